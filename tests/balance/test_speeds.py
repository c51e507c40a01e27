"""Tests with slow ranks: copies are spread so that ranks take equally long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad, replica_loads
from moesaic.balance.replication.spill import Spill
from moesaic.balance.replication.tables import spills
from moesaic.balance.selector.arbiter import Arbiter
from moesaic.balance.selector.options import is_even, work_of
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications
from replication_loads import computed

GRID = Grid(world=4, ep=4, ranks_per_node=2)
EVEN = CallLoad(GRID, np.full((4, 8), 100), 8, units=8, dim=8)
SLOW_MACHINE = Rates(tflops=1e-6)
SPEEDS = (1.0, 1.0, 1.0, 0.5)


def costs(speeds: tuple[float, ...] = ()) -> Rates:
    return replace(SLOW_MACHINE, speeds=speeds)


def test_spilling_fills_each_place_up_to_what_it_computes_in_the_same_time() -> None:
    (replica,) = replica_loads(EVEN, costs(SPEEDS))
    rows = computed(EVEN, spills(replica, NOTHING, 1.0))
    assert rows.sum() == 3200
    assert rows[3] == pytest.approx(3200 / 7, abs=1)
    assert (rows * replica.links.slowness).max() == pytest.approx(3200 * 2 / 7, rel=0.01)


def test_policies_move_copies_away_from_a_slow_rank_and_from_no_other() -> None:
    assert not Spill(costs()).decide(EVEN).any()
    table = Spill(costs(SPEEDS)).decide(EVEN)
    assert computed(EVEN, Replications.of(table))[3] < 600
    assert not table[:, :6].any(), "experts of the other ranks stay at home"
    assert Arbiter(costs=costs(SPEEDS)).decide(EVEN).any()
    assert not Arbiter(costs=costs()).decide(EVEN).any()


def test_an_even_load_on_unlike_ranks_is_not_even() -> None:
    (alike,), (unlike,) = (replica_loads(EVEN, costs(speeds)) for speeds in ((), SPEEDS))
    assert is_even(alike, 0.05) or EVEN.copies[0, 0] * 2 * alike.row_bytes > alike.weight_bytes
    assert work_of(unlike, NOTHING).home.max() == pytest.approx(
        2 * work_of(alike, NOTHING).home.max()
    )


def test_an_arbiter_goes_by_the_speeds_that_it_is_given() -> None:
    def rows(speeds: tuple[float, ...]) -> tuple[int, ...]:
        plans = {"alone": Plan(), "replicated": Plan(replication="arbiter")}
        return Arbiter(costs=costs(speeds)).start(plans).choose(EVEN).moved()[1].rows

    assert rows(()) == (800,) * 4
    assert rows(SPEEDS)[3] < 600 < min(rows(SPEEDS)[:3])


def test_a_slow_link_is_that_of_one_node() -> None:
    grid = Grid(world=8, ep=8, ranks_per_node=2)
    machine = Rates(inter_gbps=25.0, intra_gbps=200.0)
    load = CallLoad(grid, np.full((8, 16), 10), 16, units=8, dim=8)
    told = machine
    slow = replace(machine, node_links=(1, 1, 1, 0.5))
    ((before,), (after,)) = (replica_loads(load, each) for each in (told, slow))
    ratio = after.links.seconds_per_byte / np.where(
        before.links.seconds_per_byte > 0, before.links.seconds_per_byte, 1
    )
    node = np.arange(8) // 2
    across = node[:, None] != node[None, :]
    of_slow = (node[:, None] == 3) | (node[None, :] == 3)
    assert ratio[across & of_slow] == pytest.approx(2.0)
    assert ratio[across & ~of_slow] == pytest.approx(1.0)
    assert ratio[~across & ~np.eye(8, dtype=bool)] == pytest.approx(1.0)
    moved = np.zeros((8, 8))
    moved[6, 0] = moved[0, 2] = 1
    assert after.fullest(moved) == pytest.approx(2 * before.fullest(moved)), (
        "the slow node's own end of the link"
    )
    moved[6, 0] = 0
    assert after.fullest(moved) == before.fullest(moved)
