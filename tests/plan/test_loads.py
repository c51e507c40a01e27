"""Plans under loads: what their policies decide is what is simulated."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.cost.call_sizes import sizes_of
from moesaic.cost.cluster_file import read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload, uniform_counts
from moesaic.errors import InputError
from moesaic.plan import Plan, compile_plan, loads
from moesaic.plan.lending import LENDERS
from moesaic.plan.lending.lender import AbstractLender, Load
from moesaic.plan.loads import decided, simulate_counts, simulate_even
from moesaic.plan.predict import hot_counts
from moesaic.program.grid import Grid

LAYER = Workload(tokens=512, num_experts=16, top_k=2, dim=256, hidden=512, dtype="fp32")
GRID = Grid(world=8, ep=8, ranks_per_node=4)
SIMULATOR = Simulator(read_cluster("25gbe", nodes=2))


class FromEverybody(AbstractLender):
    """Lends half of the copies for each expert of the first place to the last one, whatever the load."""

    def decide(self, load: Load) -> np.ndarray:
        lent = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
        lent[:, load.home == 0, -1] = load.copies[:, load.home == 0] // 2
        return lent


@pytest.fixture
def lends_when_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "spill" be a policy that lends under even routing."""
    monkeypatch.setitem(LENDERS, "spill", lambda _: FromEverybody())


def exact_seconds(plan: Plan, lent: np.ndarray | None, counts: np.ndarray | None = None) -> float:
    compiled = compile_plan(plan, GRID)
    return sum(
        SIMULATOR.run(each, LAYER, GRID, sizes=sizes_of(each, LAYER, GRID, counts, lent=lent)).seconds
        for each in (compiled.forward, compiled.backward)
    )


@pytest.mark.usefixtures("lends_when_even")
def test_a_policy_that_lends_under_even_routing_is_simulated_rank_by_rank() -> None:
    compiled = compile_plan(Plan(lending="spill"), GRID)
    _, lent = decided(SIMULATOR, compiled, LAYER, uniform_counts(GRID.dp, LAYER))
    assert lent is not None
    assert lent.any()
    found = sum(each.seconds for each in simulate_even(SIMULATOR, compiled, LAYER))
    assert found == pytest.approx(exact_seconds(compiled.plan, lent), rel=1e-12)
    assert found > 1.05 * exact_seconds(Plan(), None)


@pytest.mark.usefixtures("lends_when_even")
def test_such_a_policy_is_refused_where_ranks_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MAX_RANKS_APART", 4)
    with pytest.raises(InputError, match=r"plan\.lending=spill lends copies under even routing too"):
        simulate_even(SIMULATOR, compile_plan(Plan(lending="spill"), GRID), LAYER)


@pytest.mark.parametrize("lending", LENDERS)
def test_under_even_routing_the_normal_path_is_the_exact_one(lending: str) -> None:
    compiled = compile_plan(Plan(lending=lending), GRID)
    counts = uniform_counts(GRID.dp, LAYER)
    even = sum(each.seconds for each in simulate_even(SIMULATOR, compiled, LAYER))
    exact = sum(each.seconds for each in simulate_counts(SIMULATOR, compiled, LAYER, counts))
    assert even == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("lending", [*LENDERS, "arbiter"])
def test_under_skew_what_the_policy_lends_is_simulated(lending: str) -> None:
    counts = hot_counts(3000.0, GRID.dp, LAYER)
    compiled = compile_plan(Plan(lending=lending), GRID)
    runs, lent = decided(SIMULATOR, compiled, LAYER, counts)
    found = sum(each.seconds for each in simulate_counts(SIMULATOR, compiled, LAYER, counts))
    assert found == pytest.approx(exact_seconds(runs.plan, lent, counts), rel=1e-12)
    if lending in ("shadow", "spill", "arbiter"):
        assert lent is not None
        assert found < 0.9 * exact_seconds(Plan(), None, counts)


def test_a_plan_that_lends_nothing_is_simulated_as_it_is() -> None:
    compiled = compile_plan(Plan(schedule="s2"), GRID)
    assert decided(SIMULATOR, compiled, LAYER, uniform_counts(GRID.dp, LAYER)) == (compiled, None)
