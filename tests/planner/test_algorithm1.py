"""Algorithm 1 as a run names it: what it takes is what the closed form says of the cluster's own lines."""

from __future__ import annotations

import pytest

from moesaic.errors import InputError
from moesaic.planner.algorithm1 import choose, corrected, operations
from moesaic.planner.simulate import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic.train.config import PlannerConfig
from planner.clusters import DEVICE, flat

GRID = Grid(world=8, tp=4, ep=2, etp=4, ranks_per_node=4)
LAYER = Workload(tokens=2048, num_experts=8, top_k=2, dim=512, hidden=512, matrices=2, dtype="fp32")


def test_the_choice_is_the_rules_on_the_clusters_operations() -> None:
    simulator = Simulator(flat(2, 4, device=DEVICE))
    found = operations(simulator, GRID, LAYER.top_k, capacity_factor=LAYER.capacity_factor)
    assert min(found.all_to_all.beta, found.gather.beta, found.overlapped.beta) > 0
    plan = choose(simulator, LAYER, GRID)
    assert plan.schedule == corrected(found, LAYER, 4, 4)
    assert plan.overlap_gather == (plan.schedule == "s2")


def test_a_rule_needs_times_from_one_place() -> None:
    with pytest.raises(InputError, match=r"planner\.plan=parm needs the times"):
        PlannerConfig(plan="parm")
    named = PlannerConfig(plan="parm", cluster="25gbe")
    assert (named.rule, named.file, named.is_auto) == ("parm", "", False)
