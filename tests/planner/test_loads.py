"""Plans under loads: what their policies decide is what is simulated."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.errors import InputError
from moesaic.planner import loads
from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import read_cluster
from moesaic.planner.loads import decided, simulate_counts, simulate_even
from moesaic.planner.predicted_plans import hot_counts
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload, uniform_counts
from moesaic.policies import REPLICATION
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.replications import Replications

LAYER = Workload(tokens=512, num_experts=16, top_k=2, dim=256, hidden=512, dtype="fp32")
GRID = Grid(world=8, ep=8, ranks_per_node=4)
SIMULATOR = Simulator(read_cluster("25gbe", nodes=2))


class FromEverybody(AbstractReplicationPolicy):
    """Replicates half of the copies for each expert of the first place to the last one, whatever
    the load."""

    def decide(self, load: CallLoad) -> np.ndarray:
        replicated = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
        replicated[:, load.home == 0, -1] = load.copies[:, load.home == 0] // 2
        return replicated


@pytest.fixture
def replicates_when_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "spill" be a policy that replicates under even routing."""
    monkeypatch.setattr(loads, "replication_policy", lambda name, costs: FromEverybody())


def exact_seconds(
    plan: Plan, replicated: Replications | None, counts: np.ndarray | None = None
) -> float:
    compiled = compile_plan(plan, GRID)
    return sum(
        SIMULATOR.run(
            each, LAYER, GRID, sizes=sizes_of(each, LAYER, GRID, counts, replicated=replicated)
        ).seconds
        for each in (compiled.forward, compiled.backward)
    )


@pytest.mark.usefixtures("replicates_when_even")
def test_a_policy_that_replicates_under_even_routing_is_simulated_rank_by_rank() -> None:
    compiled = compile_plan(Plan(replication="spill"), GRID)
    _, replicated = decided(SIMULATOR, compiled, LAYER, uniform_counts(GRID.dp, LAYER))
    assert replicated is not None
    found = sum(each.seconds for each in simulate_even(SIMULATOR, compiled, LAYER))
    assert found == pytest.approx(exact_seconds(compiled.plan, replicated), rel=1e-12)
    assert found > 1.05 * exact_seconds(Plan(), None)


@pytest.mark.usefixtures("replicates_when_even")
def test_such_a_policy_is_refused_where_ranks_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MAX_RANKS_APART", 4)
    with pytest.raises(InputError, match=r"replication=spill is decided under even routing too"):
        simulate_even(SIMULATOR, compile_plan(Plan(replication="spill"), GRID), LAYER)


@pytest.mark.parametrize("replication", REPLICATION)
def test_under_even_routing_the_normal_path_is_the_exact_one(replication: str) -> None:
    compiled = compile_plan(Plan(replication=replication), GRID)
    counts = uniform_counts(GRID.dp, LAYER)
    even = sum(each.seconds for each in simulate_even(SIMULATOR, compiled, LAYER))
    exact = sum(each.seconds for each in simulate_counts(SIMULATOR, compiled, LAYER, counts))
    assert even == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("replication", REPLICATION)
def test_under_skew_what_the_policy_replicates_is_simulated(replication: str) -> None:
    counts = hot_counts(3000.0, GRID.dp, LAYER)
    compiled = compile_plan(Plan(replication=replication), GRID)
    runs, replicated = decided(SIMULATOR, compiled, LAYER, counts)
    found = sum(each.seconds for each in simulate_counts(SIMULATOR, compiled, LAYER, counts))
    assert found == pytest.approx(exact_seconds(runs.plan, replicated, counts), rel=1e-12)
    if replication in ("shadow", "spill", "arbiter"):
        assert replicated is not None
        assert found < 0.9 * exact_seconds(Plan(), None, counts)


def test_a_plan_that_replicates_nothing_is_simulated_as_it_is() -> None:
    compiled = compile_plan(Plan(schedule="s2"), GRID)
    assert decided(SIMULATOR, compiled, LAYER, uniform_counts(GRID.dp, LAYER)) == (compiled, None)
