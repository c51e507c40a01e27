"""What FasterMoE's topology gate costs in loss and saves in time: the demo model with and without it, the same seeds.

One process trains the demo's model and routes as the 16 ranks of FasterMoE's johnny would (2 nodes of 8, four of the 64
experts on each rank). The limits are those of its links by the paper's rule, and twice that on its nodes alone, as the
paper's code has it. Evaluation is never limited. The time of a step is simulated: the routing that was recorded, in a model
as wide as MoE-GPT with its tokens per rank scaled to 1024, on johnny.

    moesaic bench topology_gate --json benchmarks/results/topology_gate.json
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from moesaic.cost.cluster_file import read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import StepCostModel
from moesaic.cost.step_model import StepModel
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.plan import Plan, compile_plan
from moesaic.plan.loads import simulate_counts
from moesaic.program.grid import Grid
from moesaic.routing.routers import LinkLevel, TopologyRouter, levels_of
from moesaic.traces.load import max_violation
from moesaic.traces.trace import Trace
from moesaic.train.config import TrainConfig
from moesaic.train.loop import Trainer
from moesaic.train.metrics import read_metrics
from moesaic.train.presets import demo
from moesaic.train.state import open_run
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of, once, same
from moesaic_lab.claims import Claim
from moesaic_lab.tables import Column

CLUSTER = read_cluster("fastermoe-johnny")
GRID = Grid(world=16, ep=16, ranks_per_node=8)
WORKLOAD = Workload(tokens=1024, num_experts=64, top_k=2, dim=2048, hidden=4096, matrices=2, dtype="fp16")
SIMULATED_STEPS = 6
"""Of a run's, evenly spread."""


@dataclass(frozen=True, kw_only=True)
class TopologyGateOptions(BenchmarkOptions):
    """What to run."""

    steps: int = 100
    """Optimizer steps of each run; the learning rate's schedule ends with them."""
    evaluations: int = 5
    """Of each run."""
    seeds: tuple[int, ...] = (0, 1)
    """Of initialisation and data order."""
    json: str | None = None
    """Write the results there; "-" for standard output."""


def gates() -> dict[str, tuple[LinkLevel, ...]]:
    """Return the limits that are tried, by name."""
    node, socket = levels_of(CLUSTER, GRID)
    return {
        "plain": (),
        "links of johnny": (node, socket),
        "nodes, 0.14": (replace(node, share=0.14),),
    }


def one(out: Path, seed: int, levels: tuple[LinkLevel, ...], options: TopologyGateOptions) -> dict[str, Any]:
    """Train once; returns losses, the share of copies that left their node, MaxVio and the simulated time."""
    config = configuration(out, seed, options)
    run = open_run(config, lambda _: None)
    for module in run.model.modules():
        if isinstance(module, MoE) and levels:
            module.router = TopologyRouter(module.router, grid=GRID, levels=levels)
    Trainer(run, Console(quiet=True)).run()
    trace = Trace.open(out)
    lines = [line for line in read_metrics(out) if line["kind"] == "eval"]
    calls = [call(trace, layer, step) for step in sampled(trace) for layer in range(trace.shape.num_layers)]
    return {
        "steps": [line["step"] for line in lines],
        "losses": [line["val_nats_per_byte"] for line in lines],
        "leaving": float(np.mean([leaving(counts) for counts in calls])),
        "max_vio": float(np.mean([max_violation(counts.sum(0).reshape(GRID.world, -1).sum(1)) for counts in calls])),
        "seconds": float(np.mean([seconds(counts) for counts in calls])),
    }


def configuration(out: Path, seed: int, options: TopologyGateOptions) -> TrainConfig:
    """Return the demo's configuration."""
    every = options.steps // options.evaluations
    return replace(
        demo(), out=str(out), steps=options.steps, seed=seed, precision="float32", device="cpu:1", trackers=(),
        log_every=every, evaluate=(every, 64), save=str(options.steps), routing=("record:tokens",),
    )  # fmt: skip


def sampled(trace: Trace) -> list[int]:
    """Return the steps whose time is simulated; the routing of the first ones says little."""
    return np.linspace(len(trace.steps) // 4, len(trace.steps) - 1, SIMULATED_STEPS).astype(int).tolist()


def call(trace: Trace, layer: int, step: int) -> np.ndarray:
    """Return the copies that each rank has for each expert, (ranks, experts), a rank's tokens scaled to the workload's."""
    experts = trace.experts(layer, step).reshape(GRID.world, -1)
    counts = np.array([np.bincount(row, minlength=trace.shape.num_experts) for row in experts])
    return counts * (WORKLOAD.tokens * WORKLOAD.top_k // experts.shape[1])


def leaving(counts: np.ndarray) -> float:
    """Return the share of the copies that leave their node."""
    node = np.arange(GRID.world) // 8
    home = np.arange(counts.shape[1]) // (counts.shape[1] // GRID.world) // 8
    return float(counts[node[:, None] != home[None, :]].sum() / counts.sum())


def seconds(counts: np.ndarray) -> float:
    """Return the simulated seconds of a training step whose layers are all routed so."""
    plan = compile_plan(Plan(), GRID)
    model = StepModel(num_layers=12, layer=WORKLOAD, seq_len=1024, vocab=50304)
    simulator = Simulator(CLUSTER)
    return StepCostModel(model, GRID, simulator).estimate(*simulate_counts(simulator, plan, WORKLOAD, counts)).seconds


def row(name: str, options: TopologyGateOptions, found: dict[tuple[int, str], dict[str, Any]]) -> dict[str, Any]:
    """Return a line of the table, means over the seeds against the plain gate of the same seed."""
    runs = [(found[(seed, name)], found[(seed, "plain")]) for seed in options.seeds]
    extra = [own["losses"][-1] - plain["losses"][-1] for own, plain in runs]
    return {
        "gate": name,
        "steps": options.steps,
        "seeds": len(options.seeds),
        "leaving_node": statistics.mean(own["leaving"] for own, _ in runs),
        "max_vio_of_ranks": statistics.mean(own["max_vio"] for own, _ in runs),
        "val_nats_per_byte": statistics.mean(own["losses"][-1] for own, _ in runs),
        "extra_loss": statistics.mean(extra),
        "extra_loss_least": min(extra),
        "extra_loss_most": max(extra),
        "simulated_step_ms": 1e3 * statistics.mean(own["seconds"] for own, _ in runs),
        "step_time_ratio": statistics.mean(own["seconds"] / plain["seconds"] for own, plain in runs),
        "loss_curve": [
            [step, statistics.mean(own["losses"][at] for own, _ in runs)] for at, step in enumerate(runs[0][0]["steps"])
        ],
    }  # fmt: skip


def with_time_to_loss(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with steps and time, over those of plain, to each gate's last loss, or to plain's if that is higher."""
    plain, found = rows[0], []
    for each in rows:
        goal = max(each["loss_curve"][-1][1], plain["loss_curve"][-1][1])
        steps = steps_to(each["loss_curve"], goal) / steps_to(plain["loss_curve"], goal)
        ratio = {"steps_to_loss_ratio": steps, "time_to_loss_ratio": steps * each["step_time_ratio"]}
        found.append(each | {"goal_loss": goal} | ratio)
    return found


def steps_to(curve: list[list[float]], loss: float) -> float:
    """Return after how many steps a curve of (steps, loss) has a loss for the first time, by straight lines between points."""
    for (step, before), (later, after) in pairwise(curve):
        if after <= loss <= before:
            return step + (later - step) * (before - loss) / max(before - after, 1e-12)
    raise InputError(f"--evaluations: no curve may start below another's last loss, {loss:.4f}: ask for more")


def measure(options: TopologyGateOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Train with every gate and seed."""
    torch.set_num_threads(1)
    found: dict[tuple[int, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in itertools.product(options.seeds, gates()):
            told(f"seed {seed}, {name}")
            found[(seed, name)] = one(Path(folder) / str(len(found)), seed, gates()[name], options)
    return with_time_to_loss([row(name, options, found) for name in gates()])


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return losses, times and traffic of every gate but the plain one."""
    wanted = (("extra_loss", "nats/byte"), ("step_time_ratio", "1"), ("time_to_loss_ratio", "1"), ("leaving_node", "1"))
    return [
        Claim(name=f"topology_gate.{key}.{each['gate'].replace(' ', '_').replace(',', '')}", value=each[key], unit=unit,
              target=None, op="<=")
        for each in rows if each["gate"] != "plain" for key, unit in wanted
    ]  # fmt: skip


COLUMNS = (
    Column(key="gate", title="gate", is_text=True),
    *(
        Column(key=key, title=title, show=f"{{:.{digits}f}}".format)
        for key, title, digits in (
            ("leaving_node", "leaves node", 3), ("max_vio_of_ranks", "MaxVio", 2), ("val_nats_per_byte", "loss", 4),
            ("extra_loss", "over plain", 4), ("simulated_step_ms", "step, ms", 0), ("step_time_ratio", "over plain", 3),
            ("goal_loss", "goal", 3), ("steps_to_loss_ratio", "steps to it", 3), ("time_to_loss_ratio", "time to it", 3),
        )
    ),
)  # fmt: skip

BENCHMARK = Benchmark(
    name="topology_gate", description="Train with the gate that knows the cluster, beside the plain one.",
    options=TopologyGateOptions, notes=notes_of(__doc__), cases=once, measure=measure, rows=same, claims=claims,
    columns=(Shown(title="demo model; times simulated on FasterMoE's johnny", columns=COLUMNS),),
)  # fmt: skip
