"""The demo model trained 50 steps on 1, 2, 4 and 8 Gloo processes under eight plans: is it the same loss curve?

In float64 the curves are compared as they are. In float32 a rounding difference can move a token to another expert, after
which curves part for good; so there every run replays the experts that the first run chose.

    moesaic bench same_curves --json benchmarks/results/same_curves.json
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from moesaic.layer import MoE
from moesaic.plan.plan import StaticPlan
from moesaic.routing.router import token_choice
from moesaic.routing.routing import Choice, Scores
from moesaic.testing.processes import on_ranks
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.loop import Trainer
from moesaic.train.metrics import read_metrics
from moesaic.train.presets import demo
from moesaic.train.state import open_run
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, once, same
from moesaic_lab.claims import Claim

LIMITS = {"float64": 1e-9, "float32": 1e-4}
RUNS: tuple[tuple[int, MeshConfig, StaticPlan], ...] = (
    (1, MeshConfig(), StaticPlan()),
    (2, MeshConfig(ep=2), StaticPlan(schedule="s1", chunks=2)),
    (2, MeshConfig(tp=2, etp=2), StaticPlan(schedule="ted")),
    (4, MeshConfig(tp=2, ep=2, etp=2, ranks_per_node=2), StaticPlan(schedule="s2", chunks=4, all_to_all="hier2d")),
    (4, MeshConfig(ep=4), StaticPlan(schedule="s1", peer_groups=4)),
    (4, MeshConfig(tp=2, ep=2, etp=2), StaticPlan(schedule="baseline")),
    (8, MeshConfig(tp=2, ep=4, etp=2, ranks_per_node=4), StaticPlan(schedule="s1", all_to_all="multicast", chunks=2)),
    (8, MeshConfig(tp=2, ep=2, etp=2), StaticPlan(schedule="s3", gather_weights=1, all_to_all="pipelined")),
    (8, MeshConfig(tp=4, ep=4, etp=2), StaticPlan(schedule="s2", overlap_gather=True, order="exact")),
)


@dataclass(frozen=True, kw_only=True)
class SameCurvesOptions(BenchmarkOptions):
    """What to run."""

    steps: int = 50
    """Optimizer steps of each run."""
    precisions: tuple[Literal["float64", "float32"], ...] = ("float64", "float32")
    """Of training."""


def configuration(
    out: Path, precision: Literal["float64", "float32"], steps: int, mesh: MeshConfig, plan: StaticPlan
) -> TrainConfig:
    """Return the demo's configuration, cut to so many steps, every step logged."""
    return replace(
        demo(),
        out=str(out),
        steps=steps,
        precision=precision,
        log_every=1,
        evaluate=(steps, 8),
        save=str(10 * steps),
        trackers=(),
        device="cpu:1",
        mesh=mesh,
        plan=plan,
    )


def _train(config: TrainConfig, routing: Path | None) -> None:
    run, world = open_run(config, lambda _: None), dist.get_world_size() if dist.is_initialized() else 1
    layers = [module for module in run.model.modules() if isinstance(module, MoE)]
    written: list[list[Tensor]] = [[] for _ in layers]
    if routing is not None:
        chosen = torch.load(routing) if world > 1 else None
        for number, layer in enumerate(layers):
            original = layer.router.choose
            if chosen is None:
                layer.router.choose = recording(original, layer, written[number])  # type: ignore[method-assign, assignment]
            else:
                layer.router.choose = replaying(original, layer, chosen[number], run.ranks.dp_index, run.ranks.dp)  # type: ignore[method-assign, assignment]
    Trainer(run, Console(quiet=True)).run()
    if routing is not None and world == 1:
        torch.save([torch.stack(calls) for calls in written], routing)


Choose = Callable[[Scores, int, Tensor | None, Tensor | None], Choice]


def recording(original: Choose, layer: MoE, calls: list[Tensor]) -> Choose:
    """Return a router's choice that keeps the experts of every training call, (tokens, top_k)."""

    def choose(scores: Scores, top_k: int, valid: Tensor | None, noise: Tensor | None) -> Choice:
        choice = original(scores, top_k, valid, noise)
        if layer.training:
            calls.append(choice.expert.view(-1, top_k).clone())
        return choice

    return choose


def replaying(original: Choose, layer: MoE, chosen: Tensor, group: int, groups: int) -> Choose:
    """Return a router's choice that takes this rank's part of the kept experts, (calls, tokens, top_k)."""
    calls = iter(chosen)

    def choose(scores: Scores, top_k: int, valid: Tensor | None, noise: Tensor | None) -> Choice:
        if not layer.training:
            return original(scores, top_k, valid, noise)
        assert layer.on_mesh is not None
        of_group = next(calls).chunk(groups)[group]
        if layer.on_mesh.peers.slices > 1:
            of_group = of_group.chunk(layer.on_mesh.peers.slices)[layer.on_mesh.peers.slice]
        return token_choice(of_group)

    return choose


def row(
    precision: Literal["float64", "float32"],
    world: int,
    mesh: MeshConfig,
    plan: StaticPlan,
    found: list[dict[str, float]],
    first: list[dict[str, float]],
    seconds: float,
) -> dict[str, Any]:
    """Return a line of the table."""
    plain_plan, plain_mesh = vars(StaticPlan()), vars(MeshConfig())
    return {
        "precision": precision,
        "ranks": world,
        "steps": len(found),
        "mesh": " ".join(f"{k}={v}" for k, v in vars(mesh).items() if v != plain_mesh[k]) or "one process",
        "plan": " ".join(f"{k}={v}" for k, v in vars(plan).items() if v != plain_plan[k]) or "s1",
        "last_loss": found[-1]["loss"],
        "loss_difference": max(abs(a["loss"] - b["loss"]) for a, b in zip(found, first, strict=True)),
        "grad_norm_difference": max(abs(a["grad_norm"] - b["grad_norm"]) for a, b in zip(found, first, strict=True)),
        "seconds": round(seconds, 1),
    }


def measure(options: SameCurvesOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train on every mesh."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for precision in options.precisions:
            first: list[dict[str, float]] = []
            for number, (world, mesh, plan) in enumerate(RUNS):
                told(f"{precision}, {number + 1} of {len(RUNS)}")
                out = Path(folder) / f"{precision}-{number}"
                config = configuration(out, precision, options.steps, mesh, plan)
                begun = time.monotonic()
                routing = None if precision == "float64" else Path(folder) / "routing.pt"
                if world > 1:
                    on_ranks(world, _train, config, routing)
                else:
                    _train(config, routing)
                found = [line for line in read_metrics(out) if line["kind"] == "train"]
                first = first or found
                rows.append(row(precision, world, mesh, plan, found, first, time.monotonic() - begun))
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the largest difference in each precision, and how many steps it was looked for in."""
    made = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        worst = max(max(r["loss_difference"], r["grad_norm_difference"]) for r in rows if r["precision"] == precision)
        name = f"same_curves.largest_difference_{precision}"
        made.append(Claim(name=name, value=worst, unit="nats, norm", target=LIMITS[precision], op="<="))
    return [*made, Claim(name="same_curves.steps", value=rows[0]["steps"], unit="steps", target=50, op=">=")]


BENCHMARK = Benchmark(
    name="same_curves", description="Train the same on every mesh and plan.", options=SameCurvesOptions,
    notes=(__doc__ or "").splitlines()[0], cases=once, measure=measure, rows=same, claims=claims,
    columns=(Shown(title="largest difference to one process over all steps"),),
)  # fmt: skip
