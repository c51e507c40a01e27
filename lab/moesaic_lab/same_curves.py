"""The demo model trained 50 steps on 1, 2, 4 and 8 Gloo processes under eight plans: is it the same loss curve?

In float64 each run chooses experts itself. In float32 a rounding difference can move a token to another expert, after which
the curves differ for good; so in float32 every run replays the experts that the first run chose.

    moesaic bench same_curves --json benchmarks/results/same_curves.json
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moesaic.program.plan import StaticPlan
from moesaic.train.config import MeshConfig, TrainConfig, demo
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told
from moesaic_lab.claims import Claim
from moesaic_lab.training import changes, steps_of, trained_on

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
    (8, MeshConfig(tp=4, ep=4, etp=2), StaticPlan(schedule="s2", overlap_gather=True, order="early")),
)


@dataclass(frozen=True, kw_only=True)
class SameCurvesOptions(BenchmarkOptions):
    """Length and precision of the runs."""

    steps: int = 50
    """Optimizer steps of each run."""
    precisions: tuple[Literal["float64", "float32"], ...] = ("float64", "float32")
    """Precisions to train in."""


def configuration(
    out: Path, precision: Literal["float64", "float32"], steps: int, mesh: MeshConfig, plan: StaticPlan
) -> TrainConfig:
    """Return the demo's configuration for `steps` steps, with every step logged."""
    return replace(
        demo(), out=str(out), steps=steps, precision=precision, log_every=1, evaluate=(steps, 8), save=str(10 * steps),
        trackers=(), device="cpu:1", mesh=mesh, plan=plan,
    )  # fmt: skip


def row(
    precision: str, run: tuple[int, MeshConfig, StaticPlan], lines: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of a run, with its largest differences from the first run."""
    world, mesh, plan = run

    def apart(key: str) -> float:
        return max(abs(a[key] - b[key]) for a, b in zip(lines, first, strict=True))

    return {
        "precision": precision, "ranks": world, "steps": len(lines), "mesh": changes(mesh) or "one process",
        "plan": changes(plan) or "s1", "last_loss": lines[-1]["loss"], "loss_difference": apart("loss"),
        "grad_norm_difference": apart("grad_norm"), "seconds": round(seconds, 1),
    }  # fmt: skip


def measure(options: SameCurvesOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train with every mesh and plan, in every precision."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for precision in options.precisions:
            first: list[dict[str, Any]] = []
            for number, (world, mesh, plan) in enumerate(RUNS):
                told(f"{precision}, {number + 1} of {len(RUNS)}")
                config = configuration(Path(folder) / f"{precision}-{number}", precision, options.steps, mesh, plan)
                if precision == "float32":
                    routing = f"replay:{Path(folder) / f'{precision}-0'}" if first else "record:tokens"
                    config = replace(config, routing=(routing,))
                start = time.monotonic()
                lines = steps_of(trained_on(world, config))
                first = first or lines
                rows.append(row(precision, RUNS[number], lines, first, time.monotonic() - start))
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims: the largest difference in each precision, and the number of compared steps."""
    listed = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        worst = max(max(r["loss_difference"], r["grad_norm_difference"]) for r in rows if r["precision"] == precision)
        name = f"same_curves.largest_difference_{precision}"
        listed.append(Claim(name=name, value=worst, unit="nats, norm", target=LIMITS[precision], op="<="))
    return [*listed, Claim(name="same_curves.steps", value=rows[0]["steps"], unit="steps", target=50, op=">=")]


BENCHMARK = Benchmark(
    name="same_curves", description="Train the same model on every mesh and plan.", options=SameCurvesOptions,
    notes=(__doc__ or "").splitlines()[0], measure=measure, claims=claims,
    columns=(Shown(title="largest difference to one process over all steps"),),
)  # fmt: skip
