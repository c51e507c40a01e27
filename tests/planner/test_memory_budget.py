"""Under a memory budget, the planner's estimate of a layer is the budget, or less if the layer
needs less."""

from __future__ import annotations

import pytest

from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.rank_memory import layer_memory
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload, zipf_counts
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from planner.clusters import tree

WORKLOAD = Workload(tokens=1024, num_experts=8, top_k=2, dim=256, hidden=512)
GRID = Grid(world=4, ep=4)
SPEC = tree(1, 4)


def estimate(budget: int | None, plan: Plan, *, skewed: bool = False) -> tuple[float, float]:
    compiled = compile_plan(plan, GRID)
    counts = zipf_counts(4, WORKLOAD, exponent=1.5, seed=0)
    sizes = sizes_of(compiled.forward, WORKLOAD, GRID, counts) if skewed else None
    volumes = Simulator(SPEC).volumes(compiled.forward, WORKLOAD, GRID, sizes=sizes)
    return layer_memory(compiled.forward, compiled.backward, volumes, budget)


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(chunks=2), Plan(all_to_all="multicast")], ids=lambda plan: plan.all_to_all
)
def test_a_budget_caps_the_bytes_of_a_layer(plan: Plan) -> None:
    kept, buffers = estimate(None, plan)
    assert estimate(int(kept + buffers) + 1, plan) == (kept, buffers), "a budget that is not needed"
    half = estimate(int(kept + buffers) // 2, plan)
    assert sum(half) == pytest.approx((kept + buffers) / 2)
    assert half[0] == pytest.approx(kept / 2)


def test_under_skew_a_rank_uses_the_budget() -> None:
    even = sum(estimate(None, Plan()))
    assert sum(estimate(None, Plan(), skewed=True)) > 1.5 * even
    assert sum(estimate(int(even), Plan(), skewed=True)) <= even
