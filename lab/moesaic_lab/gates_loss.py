"""Loss over steps and time for the plain gate, GShard's, Switch, BASE and the topology gate, with
the demo's model.

Losses come from one process that routes as four ranks in two nodes would, on sequences of 128
instead of the demo's 256. Steps are timed separately: the trained models run on four ranks of an
emulated cluster, 2 nodes of 2 with 200 Mbit/s between them, with forward, backward and optimizer
step, all gates in turn; ranks share the machine's cores. BASE chooses one expert per token, so it
has half as many experts, twice as wide, with equally many parameters in all and per token. The
Switch gate has the same sizes, and shows what top-1 routing does on its own. Evaluation omits each
gate's training-time restrictions.

    moesaic bench gates_loss --json benchmarks/results/gates_loss.json \
        --picture docs/images/bench/gates_loss.svg
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.models.gpt import GPT
from moesaic.program.grid import Grid, LinkLevel
from moesaic.program.plan import Plan
from moesaic.routing.routers import TopologyRouter
from moesaic.train.config import EvaluateConfig, TrainConfig
from moesaic.train.data import Batches, load_corpus
from moesaic.train.loop import Trainer
from moesaic.train.metrics import read_metrics
from moesaic.train.optimizer import make_optimizer
from moesaic.train.parallel import parallelize
from moesaic.train.presets import demo
from moesaic.train.state import open_run
from moesaic_lab.across_ranks import Spans, timed_still
from moesaic_lab.benchmark import (
    Benchmark,
    DrawnOptions,
    KeptOptions,
    Shown,
    Told,
    each_kept,
    keeping,
    kept,
    notes_of,
)
from moesaic_lab.claims import Claim
from moesaic_lab.measure import Timing, over_ranks, paired, spread
from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_lab.reproduce.records import read_book
from moesaic_lab.training import short_run, train_step
from moesaic_testbed import cluster

GRID = Grid(world=4, ep=4, ranks_per_node=2)
NODES = LinkLevel(name="node", group=(0, 0, 1, 1), share=0.14)
"""The share of copies that FasterMoE's code lets leave a node by default."""
GATES = ("softmax", "gshard", "topology", "switch", "base")
TOP_1 = ("switch", "base")
INTER = "200mbit"


@dataclass(frozen=True, kw_only=True)
class GatesLossOptions(KeptOptions, DrawnOptions):
    """Command-line options."""

    steps: int = 240
    """Optimizer steps of each run; the learning-rate schedule ends with them."""
    evaluations: int = 8
    """Evaluations during each run."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of initialization, data order and routing noise."""
    repeats: int = 8
    """Timed steps under each gate."""


def configuration(gate: str, seed: int, steps: int) -> TrainConfig:
    """Return the demo's configuration with sequences of 128 and the given gate."""
    plain = demo()
    moe = plain.model.moe
    if gate in TOP_1:
        num_experts = moe.num_experts // 2
        hidden = moe.hidden * 2
        moe = replace(moe, num_experts=num_experts, hidden=hidden, top_k=1)
    # `add_gate` puts the topology's gate around a plain one
    moe = replace(moe, router="softmax" if gate == "topology" else gate)
    model = replace(plain.model, seq_len=128, moe=moe)
    return short_run(plain, steps, seed=seed, model=model)


def add_gate(model: nn.Module, gate: str, origin: int | None) -> None:
    """Wrap every router in the topology gate, if `gate` names it.

    Args:
        origin: this process's data-parallel group; None if one process has the tokens of all.
    """
    if gate != "topology":
        return
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        layer.router = TopologyRouter(layer.router, grid=GRID, levels=(NODES,), origin=origin)


def train(gate: str, seed: int, options: GatesLossOptions, weights: Path | None) -> dict[str, Any]:
    """Train once and return the loss curve; save the weights if a path is given."""
    with tempfile.TemporaryDirectory() as out:
        every = options.steps // options.evaluations
        config = replace(
            configuration(gate, seed, options.steps),
            out=out,
            evaluate=EvaluateConfig(every=every, sequences=64),
            existing="replace",
        )
        run = open_run(config, lambda _: None)
        add_gate(run.model, gate, None)
        Trainer(run, Console(quiet=True)).run()
        lines = [line for line in read_metrics(Path(out)) if line["kind"] == "eval"]
    if weights is not None:
        torch.save(run.model.state_dict(), weights)
    return {
        "steps": [line["step"] for line in lines],
        "losses": [line["val_nats_per_byte"] for line in lines],
    }


def timed(weights: Mapping[str, str], options: GatesLossOptions) -> dict[str, list[float]]:
    """Return the seconds of every timed step by gate, for the saved models.

    Args:
        weights: by gate, the file of the state dict.
    """
    config = configuration("softmax", options.seeds[0], options.steps)
    corpus = load_corpus(config.data)
    batches = Batches(corpus.train, config.model.seq_len, config.batch_size, seed=99)
    tokens = [batches.get(number) for number in range(options.repeats + 1)]
    with cluster(nodes=2, ranks_per_node=2, inter=INTER) as bed:
        spans = bed.run(rank_spans, weights, options.steps, corpus.vocab_size, tokens)
    return {gate: list(seconds) for gate, seconds in over_ranks(spans).items()}


def rank_spans(
    weights: Mapping[str, str], steps: int, vocab: int, batches: list[tuple[Tensor, Tensor]]
) -> Spans:
    """Return this rank's spans of training steps by gate. All ranks call this together."""
    mesh = Mesh.create(ep=GRID.ep, ranks_per_node=GRID.ranks_per_node, transport="sockets")
    step = {
        gate: stepper(gate, path, steps, vocab, mesh, batches) for gate, path in weights.items()
    }
    return timed_still(step, len(batches) - 1)


def stepper(
    gate: str,
    weights: str,
    steps: int,
    vocab: int,
    mesh: Mesh,
    batches: list[tuple[Tensor, Tensor]],
) -> Callable[[], float]:
    """Return a function that trains one gate's model on the mesh for one step at each call, on the
    next batch.

    Args:
        gate: name of the gate.
        weights: file of the state dict.
        steps: steps of the run that trained the model.
        vocab: size of the vocabulary.
        mesh: the mesh of all ranks.
        batches: tokens and targets of all ranks.
    """
    config = configuration(gate, seed=0, steps=steps)  # any seed: the weights are loaded
    following = iter(batches)
    model = GPT(config.model, vocab)
    add_gate(model, gate, mesh.grid.coordinate(mesh.rank, "dp"))
    model.load_state_dict(torch.load(weights))
    parallelize(model, mesh, Plan())
    optimizer = make_optimizer(model, replace(config.optimizer, lr=1e-5), torch.device("cpu"))
    return lambda: train_step(model, optimizer, next(following), mesh)


def row(
    gate: str,
    options: GatesLossOptions,
    runs: list[dict[str, Any]],
    seconds: Mapping[str, list[float]],
) -> dict[str, Any]:
    """Return a gate's row of the table, with means over the seeds.

    Args:
        runs: the gate's results of `train`, one per seed.
        seconds: of each timed step, by gate.
    """
    curve = [statistics.mean(values) for values in zip(*(run["losses"] for run in runs))]
    last_losses = [run["losses"][-1] for run in runs]
    return {
        "gate": gate,
        "steps": options.steps,
        "seeds": len(runs),
        "val_nats_per_byte": curve[-1],
        "loss_spread": max(last_losses) - min(last_losses),
        **spread("step_seconds", Timing.of(seconds[gate])),
        **spread("step_time_ratio", paired(seconds[gate], seconds["softmax"])),
        "curve_steps": runs[0]["steps"],
        "curve_losses": curve,
        "seed_losses": [run["losses"] for run in runs],
    }


def add_times(rows: list[dict[str, Any]]) -> None:
    """Add each gate's steps and time to its goal loss, relative to the first row's gate, by the
    mean curves and by each seed's. The goal is the higher of the two final losses."""
    plain = rows[0]
    for each in rows:
        steps = each["curve_steps"]
        each["goal_loss"] = max(each["curve_losses"][-1], plain["curve_losses"][-1])
        each["steps_to_loss_ratio"] = steps_ratio(
            steps, each["curve_losses"], plain["curve_losses"]
        )
        each["time_to_loss_ratio"] = each["steps_to_loss_ratio"] * each["step_time_ratio"]
        by_seed = [
            steps_ratio(steps, losses, plain_losses)
            for losses, plain_losses in zip(each["seed_losses"], plain["seed_losses"], strict=True)
        ]
        each["time_to_loss_least"] = min(by_seed) * each["step_time_ratio"]
        each["time_to_loss_most"] = max(by_seed) * each["step_time_ratio"]


def steps_ratio(steps: list[int], losses: list[float], plain: list[float]) -> float:
    """Return the steps of a curve over those of another, to the higher of their last losses."""
    goal = max(losses[-1], plain[-1])
    return steps_to(steps, losses, goal) / steps_to(steps, plain, goal)


def steps_to(steps: list[int], losses: list[float], loss: float) -> float:
    """Return the number of steps after which a curve first reaches a loss, interpolated linearly
    between evaluations."""
    for (step, before), (later, after) in pairwise(zip(steps, losses)):
        if after <= loss <= before:
            fall = max(before - after, 1e-12)  # of two equal losses, the first step counts
            return float(step + (later - step) * (before - loss) / fall)
    raise InputError(
        f"--evaluations: a curve starts below another's last loss, {loss:.4f}: choose more "
        "evaluations"
    )


def panels(rows: list[dict[str, Any]]) -> list[Panel]:
    """Return the loss curves over steps and over time, without their first point."""
    shown = []
    for x_title, is_time in (("steps", False), ("seconds of training on the bed", True)):
        series = []
        for each in rows:
            x_per_step = each["step_seconds"] if is_time else 1.0
            x = tuple(step * x_per_step for step in each["curve_steps"][1:])
            y = tuple(each["curve_losses"][1:])
            series.append(PlottedSeries(name=each["gate"], y=y, x=x))
        shown.append(
            Panel(
                title=f"against {x_title.split()[0]}",
                x_title=x_title,
                y_title="validation, nats/byte",
                series=tuple(series),
            )
        )
    return shown


def measure(options: GatesLossOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train under every gate and seed, then time steps of the first seed's models."""
    torch.set_num_threads(1)
    with keeping(options.keep) as keep:
        weights = {gate: (keep / f"{gate}-{options.steps}.pt").resolve() for gate in GATES}
        runs = {}
        for seed, gate in itertools.product(options.seeds, GATES):
            path = weights[gate] if seed == options.seeds[0] else None
            runs[f"{gate}-{seed}-{options.steps}"] = partial(train, gate, seed, options, path)
        curves = dict(each_kept(keep, runs, told))
        told("times of steps")
        times = partial(timed, {gate: str(path) for gate, path in weights.items()}, options)
        seconds = kept(keep / f"seconds-{options.steps}-{options.repeats}.json", times)
    rows = []
    for gate in GATES:
        of_seeds = [curves[f"{gate}-{seed}-{options.steps}"] for seed in options.seeds]
        rows.append(row(gate, options, of_seeds, seconds))
    add_times(rows)
    return rows


OFF = 0.25
"""Largest difference from a published time, or from a published gain as a share of it."""
NOT_RUN = "not run"


def table_3() -> dict[str, float]:
    """Return FasterMoE's Table 3 as times to a loss: with the topology gate over without it, GShard
    and BASE over plain top-2."""
    value = read_book().value
    return {
        "topology": value("fastermoe.hours.gate") / value("fastermoe.hours.plain"),
        "gshard": value("fastermoe.hours.gshard") / value("fastermoe.hours.fastmoe"),
        "base": value("fastermoe.base_over_top2"),
    }


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the loss and the times of every gate except the first, how far its time to a loss is
    from FasterMoE's Table 3, and how far the topology gate's gains over GShard and BASE are from
    the paper's, in either direction."""
    keys = {
        "val_nats_per_byte": "nats/byte",
        "step_time_ratio": "1",
        "time_to_loss_ratio": "1",
        "time_to_loss_most": "1",
    }
    shown = [
        Claim(name=f"gates_loss.{key}.{each['gate']}", value=each[key], unit=unit)
        for each in rows[1:]
        for key, unit in keys.items()
    ]
    times = {row["gate"]: row["time_to_loss_ratio"] for row in rows}
    for gate, published in table_3().items():
        off = abs(times[gate] / published - 1) if gate in times else None
        shown.append(_within(f"gates_loss.off_table_3.{gate}", off))
    for gate in ("gshard", "base"):
        cell = f"fastermoe.over_{gate}"
        off = None
        if gate in times and "topology" in times:
            gain = times[gate] / times["topology"] - 1
            published_gain = read_book().value(cell) - 1
            off = abs(gain / published_gain - 1)
        shown.append(_within(f"papers.{cell}", off))
    return shown


def _within(name: str, off: float | None) -> Claim:
    """Claim that a difference is at most `OFF`; None if its gates did not run."""
    reason = NOT_RUN if off is None else ""
    return Claim(name=name, value=off, target=OFF, reason=reason)


COLUMNS = (
    *("gate", "val_nats_per_byte", "loss_spread", "step_seconds", "step_time_ratio"),
    *("steps_to_loss_ratio", "time_to_loss_ratio", "time_to_loss_least", "time_to_loss_most"),
)

BENCHMARK = Benchmark(
    name="gates_loss",
    description="Train the demo under five gates and time their steps.",
    options=GatesLossOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    panels=panels,
    columns=(Shown(title="demo model; steps on 2 nodes of 2, 200 Mbit/s", columns=COLUMNS),),
    title="Loss under different gates",
)
