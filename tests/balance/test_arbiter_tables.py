"""Tests of the vectorized replication tables: they are legal, keep their limits, and equal those of
a loop over prefixes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad, ReplicaLoad, replica_loads
from moesaic.balance.replication.tables import (
    largest,
    least_of,
    rows_of,
    seconds_under,
    shadows,
    shadows_above,
    spills,
    spread,
    within,
)
from moesaic.balance.selector.options import gathered_work, is_even, work_of
from moesaic.program.grid import Grid
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications
from replication_loads import dense, draw

QUICK = Rates(tflops=0.01, inter_gbps=300, intra_gbps=900, intra_latency_us=0, inter_latency_us=0)
"""A machine with slow products and fast links without latency."""


def boards_of(seed: int, machine: Rates = QUICK) -> list[ReplicaLoad]:
    return replica_loads(draw(seed), machine)


def every_table(replica: ReplicaLoad) -> dict[str, Replications]:
    shadowed = shadows(replica, at_most=3)
    tables = {
        "nothing": NOTHING,
        "shadow": shadowed,
        "whole shadow": shadows(replica, at_most=3, whole=True),
    }
    for limit in (1.0, 1.4):
        for near in (False, True):
            tables[f"spill {limit} {near}"] = spills(replica, NOTHING, limit, near_first=near)
            tables[f"mix {limit} {near}"] = shadowed.joined(
                spills(replica, shadowed, limit, near_first=near)
            )
    return tables


def test_what_is_replicated_is_there_and_never_at_home():
    replicated = 0
    for seed in range(20):
        for replica in boards_of(seed):
            for name, replications in every_table(replica).items():
                assert (replications.amount > 0).all(), name
                assert (replications.helper != replica.load.home[replications.expert]).all(), name
                table = dense(replica, replications)
                assert (table.sum(2) <= replica.copies).all(), name
                replicated += int(table.sum())
    assert replicated > 3_000


def shared_one_by_one(replica: ReplicaLoad, table: np.ndarray, total: np.ndarray) -> None:
    """Add a place's copies to the table of all ranks one by one, with both the ranks and the
    helpers in their order."""
    for place, expert in zip(*np.nonzero(table.sum(2))):
        ranks = [
            int(rank)
            for rank in replica.origins[place]
            for _ in range(replica.load.copies[rank, expert])
        ]
        helpers = [
            helper for helper, amount in enumerate(table[place, expert]) for _ in range(amount)
        ]
        for rank, helper in zip(ranks, helpers):
            total[rank, expert, helper] += 1


def test_tables_are_shared_among_the_ranks_of_a_place_first_come_first():
    for seed in range(6):
        replicas = boards_of(seed)
        tables = [every_table(replica)["mix 1.0 False"] for replica in replicas]
        load = replicas[0].load
        shared = spread(replicas, tables)
        expected = np.zeros_like(dense(load, NOTHING))
        for replica, each in zip(replicas, tables):
            table = dense(replica, each)
            assert (dense(replica, Replications.of(table)) == table).all()
            assert (dense(replica, within(replica, shared)) == table).all()
            shared_one_by_one(replica, table, expected)
        assert (dense(load, shared) == expected).all()
        assert shared.is_empty == (not expected.any())


def test_rows_are_those_of_the_table():
    for seed in range(15):
        for replica in boards_of(seed):
            home = replica.load.home
            for found in every_table(replica).values():
                table = dense(replica, found)
                rows = rows_of(replica, found)
                staying = replica.copies - table.sum(2)
                for place in range(len(replica.origins)):
                    assert (rows.home[:, place] == staying[:, home == place].sum(1)).all()
                assert (rows.replicated == table.sum(1)).all()
                assert (rows.fetched == replica.sent(table.sum(0) > 0)).all()


@pytest.mark.parametrize("limit", [1.0, 1.4])
@pytest.mark.parametrize("near", [False, True])
def test_spilling_holds_every_place_to_its_limit(limit: float, near: bool):
    for seed in range(20):
        for replica in boards_of(seed):
            rows = rows_of(replica, spills(replica, NOTHING, limit, near_first=near))
            total = int(replica.copies.sum())
            assert rows.home.sum() + rows.replicated.sum() == total
            assert (rows.home + rows.replicated).sum(0).max() <= np.ceil(
                total / len(replica.origins) * limit
            )


def test_near_places_help_first_where_they_have_room():
    load = CallLoad(
        Grid(world=4, ep=4, ranks_per_node=2), np.array([[40, 0, 4, 4]] * 4), 4, units=8, dim=8
    )
    (replica,) = replica_loads(load, QUICK)
    assert set(spills(replica, NOTHING, 1.5, near_first=True).helper.tolist()) == {1, 2}
    by_helper = dense(replica, spills(replica, NOTHING, 1.5, near_first=True)).sum((0, 1))
    assert by_helper.tolist() == [0, 72, 16, 0]
    assert dense(replica, spills(replica, NOTHING, 1.5)).sum((0, 1)).tolist() == [0, 72, 16, 0]
    level = np.array([[40, 20, 0, 0]] * 4)
    (replica,) = replica_loads(CallLoad(load.grid, level, 4, units=8, dim=8), QUICK)
    assert dense(replica, spills(replica, NOTHING, 1.5)).sum((0, 1)).tolist() == [0, 0, 70, 0]
    assert dense(replica, spills(replica, NOTHING, 1.5, near_first=True)).sum((0, 1)).tolist() == [
        0,
        10,
        60,
        0,
    ]


def test_helpers_compute_their_own_copies_before_those_of_others():
    load = CallLoad(
        Grid(world=4, ep=4),
        np.array([[30, 0, 0, 0], [5, 0, 0, 0], [9, 0, 0, 0], [4, 0, 0, 0]]),
        4,
        8,
        8,
    )
    (replica,) = replica_loads(load, QUICK)
    table = dense(replica, spills(replica, NOTHING, 1.0))
    assert table.sum((0, 1)).tolist() == [0, 12, 12, 12]
    assert [int(table[place, 0, place]) for place in (1, 2, 3)] == [5, 9, 4]
    assert int(table[0].sum()) == 18, "the home's own only where nobody else has any left"


def test_the_best_prefix_of_shadows_is_found():
    helped = 0
    for seed in range(20):
        for replica in boards_of(seed, Rates(tflops=0.05, inter_gbps=30, intra_gbps=90)):
            ep = len(replica.origins)
            found = shadows(replica, at_most=2, tries=6)
            away = np.where(np.arange(ep)[:, None] == replica.load.home[None, :], 0, replica.copies)
            pairs = sorted(zip(*np.nonzero(away)), key=lambda pair: (-away[pair], pair))[:6]
            held = [0] * ep
            taken = [NOTHING]
            for place, expert in pairs:
                if held[place] == 2:
                    continue
                held[place] += 1
                one = Replications(
                    *(np.array([each]) for each in (place, expert, place, away[place, expert]))
                )
                taken.append(taken[-1].joined(one))
            times = [seconds_under(replica, each) for each in taken]
            assert seconds_under(replica, found) == pytest.approx(min(times))
            helped += not found.is_empty
    assert helped > 5


def test_what_replicated_experts_cost_the_host_makes_it_replicate_fewer():
    """Six equally hot experts of one place are all replicated if that is free, and none if it costs
    more than it saves."""
    copies = np.zeros((2, 12), dtype=np.int64)
    copies[1, :6] = 100
    load = CallLoad(Grid(world=2, ep=2, ranks_per_node=1), copies, 12, units=1, dim=4)
    held = []
    for microseconds in (0.0, 1.0, 1e9):
        (replica,) = replica_loads(load, replace(QUICK, expert_us=microseconds))
        (free,) = replica_loads(load, QUICK)
        replications = shadows(replica, microseconds * 1e-6)
        held.append(len(replications.amount))
        more = work_of(replica, replications).seconds(1) - work_of(free, replications).seconds(1)
        assert more == pytest.approx(len(replications.amount) * microseconds * 1e-6)
    assert held[0] > 0
    assert held == sorted(held, reverse=True)
    assert held[2] == 0


def test_the_cost_by_hand():
    load = CallLoad(
        Grid(world=2, ep=2, ranks_per_node=1), np.array([[6, 2], [4, 8]]), 2, units=3, dim=5
    )
    machine = Rates(tflops=1e-12, inter_gbps=8e-9, inter_latency_us=1e6)
    (replica,) = replica_loads(load, replace(machine, element_bytes=2, matrices=3))
    flops = 2 * 3 * 5 * 3 * 3
    row = 5 * 2
    weights = 3 * 5 * 3 * 2
    one = Replications(*(np.array([each]) for each in (1, 0, 1, 4)))
    work = work_of(replica, one)
    assert (work.home.tolist(), work.helped.tolist()) == ([6 * flops, 10 * flops], [0, 4 * flops])
    assert work.rows == (6, 14)
    assert (work.travel, work.travel_helped, work.fetch) == (
        4 * (2 * row + 1),
        0,
        2 * (weights + 1),
    )
    assert (work.token_bytes, work.weight_bytes) == (4 * 2 * row, 2 * weights)
    assert work.seconds(1) == work.travel / 2 + 10 * flops + 4 * flops
    alone = work_of(replica, NOTHING, chunks=3)
    assert alone.travel == 4 * (4 * row + 3)
    assert alone.seconds(1) == 10 * flops + alone.travel
    assert alone.seconds(4) == 10 * flops + alone.travel / 4


def test_gathered_weights_cost_what_adaptive_r_moves():
    grid = Grid(world=4, ep=2, etp=2, ranks_per_node=2)
    load = CallLoad(grid, np.array([[9, 1], [2, 0], [1, 1], [0, 4]]), 2, units=3, dim=5)
    machine = Rates(
        tflops=1e-12, inter_gbps=8e-9, intra_gbps=16e-9, inter_latency_us=0, intra_latency_us=0
    )
    (replica,) = replica_loads(load, replace(machine, element_bytes=2, matrices=3))
    alone = work_of(replica, NOTHING)
    weights = 3 * 5 * 3 * 2
    flops = 2 * 3 * 5 * 3 * 3
    one = gathered_work(replica, alone, 1)
    assert (one.travel, one.token_bytes) == (alone.travel / 2, alone.token_bytes // 2)
    assert one.home.tolist() == alone.home.tolist()
    assert (one.fetch, one.weight_bytes) == (3 * weights / 2, 3 * weights * 4), (
        "the other shard, there, again, and back"
    )
    none = gathered_work(replica, alone, 0)
    assert (none.travel, none.token_bytes) == (0, 0)
    assert none.home.max() == 10 * 2 * flops, "the busiest rank's own copies, both shards of each"
    assert none.fetch == 3 * (2 * weights + weights / 2)
    assert none.weight_bytes == 3 * 4 * 3 * weights


def test_even_loads_are_known_by_their_rows_and_by_what_weights_would_cost():
    grid = Grid(world=4, ep=4)
    even = np.full((4, 8), 10)
    skewed = even.copy()
    skewed[:, 0] += 10

    def answer(copies: np.ndarray, units: int) -> bool:
        (replica,) = replica_loads(CallLoad(grid, copies, 8, units=units, dim=8), QUICK)
        return is_even(replica, 0.05)

    assert answer(even, 64)
    assert not answer(skewed, 64)
    assert not answer(even, 2), (
        "an expert's weights are fewer bytes than the rows that one place sends it"
    )


def test_a_replica_that_replicates_nothing_beside_one_that_does() -> None:
    """There are two replicas of two places with two origins each; replication pays only in the
    first replica."""
    grid = Grid(world=8, tp=2, ep=2, etp=2)
    load = CallLoad(grid, np.tile(np.array([6, 2]), (8, 1)), 2, 8, 4)
    found = replica_loads(load, Rates())
    one = np.array([1])
    replicated = [Replications(one, np.array([0]), one, np.array([4])), NOTHING]
    table = dense(load, spread(found, replicated))
    assert table[found[0].origins].sum() == 4
    assert table[found[1].origins].sum() == 0


@pytest.mark.parametrize("count", [1, 5, 16, 63, 64, 300])
def test_the_largest_are_those_of_a_stable_sort(count: int) -> None:
    for seed in range(5):
        values = np.random.default_rng(seed).integers(0, 40, 256)
        assert (largest(values, count) == np.argsort(-values, kind="stable")[:count]).all()


@pytest.mark.parametrize("whole", [False, True])
def test_shadows_above_the_least_are_the_prefix_they_were_told_from_and_follow_the_counts(
    whole: bool,
) -> None:
    found = 0
    for seed in range(15):
        load = draw(seed)
        for replica in replica_loads(load, QUICK):
            best = shadows(replica, whole=whole)
            if best.is_empty:
                continue
            least = least_of(replica, best, whole=whole)
            again = shadows_above(replica, least, whole=whole)
            twice = CallLoad(load.grid, 2 * load.copies, load.num_experts, load.units, load.dim)
            (doubled,) = [
                each
                for each in replica_loads(twice, replica.costs)
                if (each.origins == replica.origins).all()
            ]
            equal = {tuple(each) for each in zip(best.origin, best.expert)}
            more = {tuple(each) for each in zip(again.origin, again.expert)}
            values = replica.copies.sum(0) if whole else None
            assert equal <= more, "what was worth it is replicated again"
            assert whole or all(
                replica.copies[pair] == best.amount.min() for pair in more - equal
            ), "but for ties nothing else"
            assert values is None or len({expert for _, expert in more}) <= 8
            same = shadows_above(doubled, least, whole=whole)
            assert {tuple(each) for each in zip(same.origin, same.expert)} == more, (
                "shares count, not copies"
            )
            found += 1
    assert found > 10
