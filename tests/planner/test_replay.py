"""Recorded loads replayed against simulated times: the plan table against the best static plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moesaic.planner.cluster import Link, read_cluster
from moesaic.planner.job import Job
from moesaic.planner.loads import fit_counts, typical_counts
from moesaic.planner.plan_table import PlanTable, TableSettings
from moesaic.planner.predicted_plans import Predictor, hot_counts
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.shapes import ModelShape, MoEShape
from moesaic.traces.trace import Trace

TRACE = Path(__file__).resolve().parents[2] / "benchmarks" / "traces" / "gpt-tiny-unbalanced"
JOB = Job(
    batch_size=16,
    model=ModelShape(
        dim=1024,
        num_layers=12,
        num_heads=16,
        seq_len=1024,
        moe=MoEShape(num_experts=8, hidden=2816),
    ),
)
PLANS = (Plan(), Plan(chunks=2), Plan(chunks=4), Plan(all_to_all="hier2d"), Plan(gather_weights=0))
EVEN = 16 * 1024 * 2 / 8
"""Copies per expert under even routing."""
LAYER = Workload(tokens=100, num_experts=4, top_k=2, dim=8, hidden=8)


@pytest.fixture(scope="module")
def world() -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Return levels of load, seconds (levels, plans), and the recorded loads of the busiest expert,
    step by step.

    The cards have a bus on which neither messages nor products decide alone, so that plans differ.
    """
    described = read_cluster("8x4090-pcie")
    links = (
        Link(name="pcie", devices=1, gbps=(120.0,), latency_us=20, message_us=4),
        Link(name="socket", devices=4, gbps=(240.0,), latency_us=3),
    )
    cluster = replace(described, links=links)
    predictor = Predictor(JOB, cluster, Grid(world=8, ep=8, ranks_per_node=8), PLANS)
    levels = EVEN * np.linspace(1, 4, 7)
    seconds = np.array([predictor(load) for load in levels])
    trace = Trace.open(TRACE)
    layer = JOB.step_model(cluster, 8).layer
    loads = [
        float(fit_counts(trace.counts(1, step), 8, layer).sum(axis=0).max()) for step in trace.steps
    ]
    return levels, seconds, loads


def at(world: tuple[np.ndarray, np.ndarray, list[float]], load: float) -> list[float]:
    """Return the seconds of every plan at a load."""
    levels, seconds, _ = world
    return [float(np.interp(load, levels, seconds[:, plan])) for plan in range(len(PLANS))]


@pytest.mark.parametrize("bias", [0.0, 0.1])
def test_recorded_loads_cost_next_to_nothing(world, bias: float) -> None:
    loads = 5 * world[2]
    wrong = 1 + bias * np.random.default_rng(0).standard_normal(len(PLANS))
    real = np.array([at(world, load) for load in loads]) * wrong
    settings = replace(TableSettings(), rows_per_bucket=EVEN / 4)
    table = PlanTable(PLANS, lambda load: at(world, load), settings, load=EVEN)
    total = 0.0
    for row, load in zip(real, loads):
        seconds = float(row[table.choose()])
        table.record(seconds, load)
        total += seconds
    static = real.sum(axis=0)
    assert total <= 1.01 * static.min(), "the best static plan is known only afterwards"
    planned = int(np.argmin(world[1][0]))
    assert static[planned] > 1.1 * static.min(), "the recorded loads are uneven enough to matter"
    assert total < 0.95 * static[planned], "the plan that even routing suggests"


def test_one_hot_expert_has_the_load_and_the_others_share_the_rest() -> None:
    counts = hot_counts(150, 2, LAYER)
    assert counts.tolist() == [[75, 42, 42, 41]] * 2
    assert hot_counts(1e9, 2, LAYER)[0].tolist() == [100, 34, 33, 33], (
        "a token chooses an expert once"
    )
    assert hot_counts(0, 2, LAYER)[0].tolist() == [50, 50, 50, 50]
    assert hot_counts(50, 2, replace(LAYER, num_experts=1, top_k=1)).tolist() == [[100], [100]]


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8])
def test_counts_are_brought_to_other_groups_and_tokens(groups: int) -> None:
    counts = np.array([[4, 0, 0, 0], [0, 4, 4, 0], [0, 0, 0, 9], [1, 1, 1, 1]])
    found = fit_counts(counts, groups, LAYER)
    assert found.shape == (groups, 4)
    assert (found.sum(axis=1) == 200).all()
    assert (found >= 0).all()
    if groups == 8:
        assert found[0].tolist() == found[1].tolist() == [200, 0, 0, 0]
    if groups == 2:
        assert found[0].tolist() == [67, 66, 67, 0] or abs(found[0] - 200 / 3)[:3].max() < 1
    if groups == 3:
        assert (found == found[0]).all()


def test_a_group_without_copies_gets_the_mean() -> None:
    found = fit_counts(np.array([[0, 0, 0, 0], [1, 1, 0, 0]]), 2, LAYER)
    assert found.tolist() == [[100, 100, 0, 0]] * 2


def test_typical_counts_are_calls_at_quantiles_of_the_imbalance() -> None:
    trace = Trace.open(TRACE)
    tables = typical_counts(trace, 4)
    skews = [float(table.sum(0).max() / table.sum(0).mean()) for table in tables]
    assert skews == sorted(skews)
    everything = sorted(
        float(trace.counts(layer, step).sum(0).max() / trace.counts(layer, step).sum(0).mean())
        for layer in range(2)
        for step in trace.steps
    )
    assert skews == pytest.approx(
        [everything[len(everything) * part // 8] for part in (1, 3, 5, 7)]
    )
    assert len(typical_counts(trace, 10_000)) == len(everything)
