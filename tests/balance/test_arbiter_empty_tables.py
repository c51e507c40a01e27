"""A program that replicates always gets a table: if the last recipe replicates nothing any more, the call is left alone."""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicationCosts
from moesaic.balance.selector.arbiter import Arbiter
from moesaic.balance.selector.options import CallChoice, Recipe
from moesaic.planner.cluster import Machine
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

PLANS = (Plan(), Plan(replication="spill"), Plan(peer_groups=2), Plan(peer_groups=2, replication="spill"))


def test_a_recipe_with_nothing_left_to_replicate_is_no_option() -> None:
    """Step by step is faster even with an empty table, so the program with replication once ran without a table."""
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    machine = Machine(tflops=0.01, inter_gbps=3, intra_gbps=9, intra_latency_us=0, inter_latency_us=0)
    costs = ReplicationCosts(machine=machine)
    arbitration = Arbiter(costs=costs, part_us=0.0).start(Plan(replication="arbiter"), PLANS)
    copies = np.tile(np.array([400, 300, 20, 20, 20, 20, 20, 20]), (4, 1))
    load = CallLoad(grid, copies, 8, 16, 16)
    arbitration.choose(load)
    arbitration.last = CallChoice("steps+shadow", 3, Recipe(shadows=True, least=(1.0,)))  # nothing is worth replication
    second = arbitration.choose(load)
    assert second.replicated is None
    assert PLANS[second.program].replication == "none"
