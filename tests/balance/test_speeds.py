"""Tests with slow ranks: copies are spread so that ranks take equally long, and measured speeds are not those of one call."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad, ReplicationCosts, replica_loads
from moesaic.balance.replication.policy import BarePlan
from moesaic.balance.replication.spill import Spill
from moesaic.balance.replication.tables import NOTHING, spills
from moesaic.balance.selector.arbiter import Arbiter, Arbitration
from moesaic.balance.selector.options import is_even, replicated_cost
from moesaic.planner.cluster import Machine
from moesaic.program.grid import Grid

GRID = Grid(world=4, ep=4, ranks_per_node=2)
EVEN = CallLoad(GRID, np.full((4, 8), 100), 8, units=8, dim=8)
SLOW_MACHINE = Machine(tflops=1e-6)
SPEEDS = (1.0, 1.0, 1.0, 0.5)


def computed(table: np.ndarray) -> np.ndarray:
    """Return the copies of the even load that each place computes, (4,)."""
    staying = (EVEN.copies - table.sum(2)).sum(0).reshape(4, 2).sum(1)
    copies: np.ndarray = staying + table.sum((0, 1))
    return copies


def costs(speeds: tuple[float, ...] = ()) -> ReplicationCosts:
    return ReplicationCosts(machine=SLOW_MACHINE, speeds=speeds)


def test_spilling_fills_each_place_up_to_what_it_computes_in_the_same_time() -> None:
    (replica,) = replica_loads(EVEN, costs(SPEEDS))
    moved = spills(replica, NOTHING, 1.0).table(8, 4)
    rows = computed(moved)
    assert rows.sum() == 3200
    assert rows[3] == pytest.approx(3200 / 7, abs=1)
    assert (rows * replica.links.slowness).max() == pytest.approx(3200 * 2 / 7, rel=0.01)


def test_policies_move_copies_away_from_a_slow_rank_and_from_no_other() -> None:
    assert not Spill(costs()).decide(EVEN).any()
    table = Spill(costs(SPEEDS)).decide(EVEN)
    assert computed(table)[3] < 600
    assert not table[:, :6].any(), "experts of the other ranks stay at home"
    assert Arbiter(costs=costs(SPEEDS), learn=False).decide(EVEN).any()
    assert not Arbiter(costs=costs(), learn=False).decide(EVEN).any()


def test_an_even_load_on_unlike_ranks_is_not_even() -> None:
    (alike,), (unlike,) = (replica_loads(EVEN, costs(speeds)) for speeds in ((), SPEEDS))
    assert is_even(alike, 0.05) or EVEN.copies[0, 0] * 2 * alike.row_bytes > alike.weight_bytes
    assert replicated_cost(unlike, NOTHING).compute == pytest.approx(2 * replicated_cost(alike, NOTHING).compute)


def test_an_arbiter_goes_by_the_speeds_that_it_hears() -> None:
    arbiter = Arbiter(costs=costs(), learn=False)
    plan = BarePlan(replication="spill")
    arbitration = arbiter.start(plan, [BarePlan(), plan])
    assert arbitration.choose(EVEN).rows[1] == (800,) * 4
    arbitration.hear({}, SPEEDS)
    rows = arbitration.choose(EVEN).rows[1]
    assert rows[3] < 600 < min(rows[:3])
    arbitration.hear({}, (1.0,) * 4)
    assert arbitration.choose(EVEN).rows[1][3] >= 800


@pytest.mark.parametrize("described", [False, True], ids=["machine", "cluster"])
def test_an_arbiter_goes_by_the_links_that_it_hears(described: bool) -> None:
    fast, slow = (Machine(inter_gbps=gbps, inter_latency_us=0, intra_latency_us=0) for gbps in (25.0, 2.5))
    told, wanted = (
        ReplicationCosts(machine=machine, cluster=machine.to_cluster(GRID) if described else None)
        for machine in (fast, slow)
    )
    plan = BarePlan(replication="spill")
    heard, other = (Arbiter(costs=each).start(plan, [BarePlan(), plan]) for each in (told, wanted))

    def alone(arbitration: Arbitration) -> float:
        return arbitration.weigher.alone(arbitration.weigher.replica_loads(EVEN)).seconds

    before = alone(heard)
    heard.hear({}, SPEEDS, {"outside": (0.1, 0.1)})
    other.hear({}, SPEEDS)
    assert alone(heard) == alone(other) > 5 * before
    heard.hear({}, (), {"outside": (0.5,), "inside": (2.0,)})
    heard.hear({}, (1.0,) * 4, {})
    assert alone(heard) == before, "times are of what was told at the start"


@pytest.mark.parametrize("described", [False, True], ids=["machine", "cluster"])
def test_a_slow_link_is_that_of_one_node(described: bool) -> None:
    grid = Grid(world=8, ep=8, ranks_per_node=2)
    machine = Machine(inter_gbps=25.0, intra_gbps=200.0)
    told = ReplicationCosts(machine=machine, cluster=machine.to_cluster(grid) if described else None)
    load = CallLoad(grid, np.full((8, 16), 10), 16, units=8, dim=8)
    ((before,), (after,)) = (replica_loads(load, each) for each in (told, told.with_links({"outside": (1, 1, 1, 0.5)})))
    ratio = after.seconds_per_byte / np.where(before.seconds_per_byte > 0, before.seconds_per_byte, 1)
    node = np.arange(8) // 2
    across = node[:, None] != node[None, :]
    of_slow = (node[:, None] == 3) | (node[None, :] == 3)
    assert ratio[across & of_slow] == pytest.approx(2.0)
    assert ratio[across & ~of_slow] == pytest.approx(1.0)
    assert ratio[~across & ~np.eye(8, dtype=bool)] == pytest.approx(1.0)
    whole = told.with_links({"outside": (0.5, 0.5, 0.5, 0.5)})
    assert whole == told.with_links({"outside": (0.5,)})
