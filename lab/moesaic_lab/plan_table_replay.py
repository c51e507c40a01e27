"""The cost of load predictions that are wrong by a factor of 2 for the plan table, with recorded counts in simulation.

Every step of a recorded run is simulated under each candidate plan with its true counts. The best static plan is the one with
the least total time, which is known only afterwards. Before each step, the table chooses by the preceding step's load times
an error. Afterwards it learns the step's true load, and the simulated time of the chosen plan only.

    moesaic bench plan_table --json benchmarks/results/plan_table.json

The trace is 200 steps without a balance loss:

    moesaic train --preset gpt-tiny --steps 200 --batch-size 8 --model.moe.num-experts 8 --model.moe.balance-loss 0 \\
        --routing record:counts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.planner.candidates import Pins
from moesaic.planner.cluster import read_cluster
from moesaic.planner.loads import fit_counts, simulate_counts
from moesaic.planner.model import Job
from moesaic.planner.predict import Predictor
from moesaic.planner.search import Settings, search
from moesaic.planner.simulate import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.planner.table import PlanTable, TableSettings
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan, plan_in_words
from moesaic.shapes import ModelShape, MoEShape
from moesaic.traces.trace import Trace
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told
from moesaic_lab.claims import Claim

ERRORS: dict[str, tuple[float, ...]] = {"half": (0.5,), "right": (1.0,), "twice": (2.0,), "half or twice": (0.5, 2.0)}
"""Predicted load, relative to that of the preceding step: one factor, or several that are drawn at random per step."""
CANDIDATES = 6
PASSES = 5
"""How often the trace is replayed while the table keeps its state. Real runs are longer than the trace, and trials come
early."""


@dataclass(frozen=True, kw_only=True)
class PlanTableOptions(BenchmarkOptions):
    """Command-line options."""

    trace: str = "benchmarks/traces/gpt-tiny-unbalanced"
    """A routing trace with counts."""
    every: int = 1
    """Replay every n-th step of the trace only."""
    layer: int = 1
    """MoE layer of the trace to replay."""


@dataclass(frozen=True, kw_only=True)
class ReplayPlace:
    """A mesh on a cluster, with the number of sequences per data-parallel group."""

    cluster: str
    nodes: int
    ep: int
    etp: int
    sequences: int
    """Sequences per data-parallel group."""


PLACES = (
    ReplayPlace(cluster="8x4090-pcie", nodes=1, ep=8, etp=1, sequences=2),
    ReplayPlace(cluster="25gbe", nodes=2, ep=8, etp=1, sequences=1),
)


def job_for(place: ReplayPlace, trace: Trace, world: int) -> Job:
    """Return a job whose model has the trace's experts, and is large enough to keep such a machine busy."""
    shape = trace.shape
    moe = MoEShape(num_experts=shape.num_experts, top_k=shape.top_k, hidden=2816)
    return Job(
        batch_size=place.sequences * world,
        model=ModelShape(dim=1024, num_layers=12, num_heads=16, seq_len=1024, moe=moe),
    )


def replay(place: ReplayPlace, trace: Trace, layer: int, every: int) -> list[dict[str, Any]]:
    """Return a row for each error of the predicted load, with the table's time over that of the best static plan and of
    others."""
    cluster = read_cluster(place.cluster, nodes=place.nodes)
    grid = Grid(world=cluster.world, ep=place.ep, etp=place.etp, ranks_per_node=cluster.devices_per_node)
    job = job_for(place, trace, grid.world)
    pins = Pins(tp=1, ep=place.ep, etp=place.etp, innermost="etp")
    plans = [candidate.plan for candidate in search(job, cluster, Settings(pins=pins, keep=CANDIDATES)).ranking]
    cost_model = StepCostModel(job.step_model(cluster, grid.dp), grid, Simulator(cluster))
    seconds, loads = simulated(cost_model, plans, trace, layer, every)
    seconds, loads = np.tile(seconds, (PASSES, 1)), loads * PASSES
    static = seconds.sum(axis=0)
    predictor = Predictor(job, cluster, grid, plans)
    rows = []
    draw = np.random.default_rng(0)
    for error, values in ERRORS.items():
        predicted = (np.array([loads[0], *loads[:-1]]) * draw.choice(values, size=len(loads))).tolist()
        total, table = run_table(plans, predictor, seconds, predicted, loads, job)
        rows.append(
            {
                "cluster": f"{place.nodes} x {place.cluster}", "mesh": f"ep {place.ep}, etp {place.etp}", "layer": layer,
                "error": error, "over_best_static": total / float(static.min()),
                "over_worst_static": total / float(static.max()), "over_first_predicted": total / float(static[0]),
                "over_best_each_step": total / float(seconds.min(axis=1).sum()),
                "explored_share": table.explored / table.steps, "switches": table.switches,
                "best_static": plan_in_words(plans[int(static.argmin())]),
            }
        )  # fmt: skip
    return rows


def simulated(
    cost_model: StepCostModel, plans: Sequence[Plan], trace: Trace, layer: int, every: int
) -> tuple[np.ndarray, list[float]]:
    """Return the seconds of every step under every plan, (steps, plans), and the copies of each step's busiest expert."""
    grid, workload = cost_model.grid, cost_model.model.layer
    compiled = [compile_plan(plan, grid) for plan in plans]
    rows, loads = [], []
    for step in trace.steps[::every]:
        counts = fit_counts(trace.counts(layer, step), grid.dp, workload)
        loads.append(float(counts.sum(axis=0).max()))
        rows.append(
            [
                cost_model.estimate(*simulate_counts(cost_model.simulator, plan_program, workload, counts)).seconds
                for plan_program in compiled
            ]
        )
    return np.array(rows), loads


def run_table(
    plans: Sequence[Plan],
    predictor: Predictor,
    seconds: np.ndarray,
    predicted: Sequence[float],
    loads: Sequence[float],
    job: Job,
) -> tuple[float, PlanTable]:
    """Run the plan table over all steps; return its total seconds, and the table."""
    even = job.batch_size * job.model.seq_len * job.model.moe.top_k / job.model.moe.num_experts
    table = PlanTable(plans, predictor, replace(TableSettings(), rows_per_bucket=even / 4))
    total = 0.0
    for row, expected, load in zip(seconds, predicted, loads):
        step_seconds = float(row[table.choose(expected)])
        table.record(step_seconds, load)
        total += step_seconds
    return total, table


def measure(options: PlanTableOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Replay on every cluster."""
    trace = Trace.open(Path(options.trace))
    return [row for place in PLACES for row in replay(place, trace, options.layer, options.every)]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the table's time with wrong predictions over that of the best static plan, for the worst case."""
    worst = max(row["over_best_static"] for row in rows if row["error"] != "right")
    return [Claim(name="model.wrong_load_over_best_static", value=worst, unit="1", target=1.0, op="<=")]


BENCHMARK = Benchmark(
    name="plan_table", description="Replay recorded routing with a plan table that predicts loads wrongly.",
    options=PlanTableOptions, measure=measure, claims=claims, packages=("numpy",),
    notes="simulated seconds; the table's total includes explored steps; the best static plan is known only afterwards",
    columns=(Shown(title="plan table, recorded counts, simulated steps"),),
)  # fmt: skip
