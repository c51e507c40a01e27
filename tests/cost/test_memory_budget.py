"""The planner's estimate under a token budget: a slice of the copies at once, tokens and weights as ever."""

from __future__ import annotations

import pytest

from cost.clusters import tree
from moesaic.cost.call_sizes import sizes_of
from moesaic.cost.memory import layer_memory
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload, zipf_counts
from moesaic.plan import Plan, compile_plan
from moesaic.program.grid import Grid

WORKLOAD = Workload(tokens=1024, num_experts=8, top_k=2, dim=256, hidden=512)
GRID, SPEC, ROWS = Grid(world=4, ep=4), tree(1, 4), 2048


def estimate(budget: int | None, plan: Plan, *, skewed: bool = False) -> tuple[float, float]:
    compiled = compile_plan(plan, GRID)
    counts = zipf_counts(4, WORKLOAD, exponent=1.5, seed=0)
    sizes = sizes_of(compiled.forward, WORKLOAD, GRID, counts) if skewed else None
    volumes = Simulator(SPEC).volumes(compiled.forward, WORKLOAD, GRID, sizes=sizes)
    return layer_memory(compiled.forward, compiled.backward, volumes, budget)


@pytest.mark.parametrize("plan", [Plan(), Plan(chunks=2), Plan(all_to_all="multicast")], ids=str)
def test_a_budget_caps_the_rows_of_a_layer(plan: Plan) -> None:
    kept, buffers = estimate(None, plan)
    assert estimate(ROWS, plan) == (kept, buffers), "a budget that is not needed"
    half_kept, half_buffers = estimate(ROWS // 2, plan)
    assert half_kept == pytest.approx(kept / 2)
    assert 0.5 * buffers <= half_buffers < buffers


def test_under_skew_a_rank_keeps_what_it_would_keep_under_balance() -> None:
    even, _ = estimate(None, Plan())
    assert estimate(None, Plan(), skewed=True)[0] > 1.5 * even
    assert estimate(ROWS, Plan(), skewed=True)[0] <= even
