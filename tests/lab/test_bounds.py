"""Limits of links against closed forms, and a program's messages against what must cross."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.planner.movement import coded_bytes
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.passes.gather_weights import gather_weights
from moesaic.program.passes.route_all_to_all import compress, route_all_to_all
from moesaic.program.sizes import CallSizes
from moesaic.program.task import INDEX_BYTES
from moesaic_lab.bounds import Limit, link_limit, link_seconds, program_messages
from moesaic_lab.comm.programs import LANES, Work, all_ep, dispatch, exchange
from moesaic_testbed.bed import Bed
from program.even import even_sizes

RATE = 25e6
"""Bytes per second of 200mbit."""
DIM = 8


def even(world: int, each: float) -> list[tuple[int, int, float]]:
    return [(source, target, each) for source in range(world) for target in range(world)]


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 2), (2, 4), (4, 4)])
def test_an_even_all_to_all_is_limited_by_what_a_node_sends_out(nodes, ranks):
    world = nodes * ranks
    per_rank = 1 << 20
    limit = link_limit(even(world, per_rank / world), Bed(nodes=nodes, ranks_per_node=ranks))
    assert limit.seconds == pytest.approx(ranks * per_rank * (nodes - 1) / nodes / RATE)
    assert limit.link in ("node 0 out", "node 0 in")


def test_the_limit_of_the_notes():
    limit = link_limit(even(4, (4 << 20) / 4), Bed())
    assert round(1e3 * limit.seconds) == 168  # ms: 2x2, 4 MiB, 200 Mbit/s


def test_each_direction_of_a_link_counts_for_itself():
    bed = Bed(nodes=2, ranks_per_node=1)
    assert link_limit([(0, 1, 25e6), (1, 0, 25e6)], bed).seconds == 1.0
    assert link_limit([(0, 1, 25e6), (0, 1, 25e6)], bed).seconds == 2.0


def test_many_to_one_is_limited_by_the_one():
    bed = Bed(nodes=3, ranks_per_node=1)
    assert link_limit([(1, 0, 25e6), (2, 0, 50e6)], bed) == Limit(seconds=3.0, link="node 0 in")


def test_a_slow_node_limits():
    bed = Bed(nodes=2, ranks_per_node=1, inter=("400mbit", "100mbit"))
    assert link_seconds([(0, 1, 25e6)], bed) == {"node 0 out": 0.5, "node 1 in": 2.0}


def test_inside_a_node_only_a_shaped_lo_limits_and_both_directions_share_it():
    inside = [(0, 1, 50e6), (1, 0, 50e6), (2, 3, 1.0), (0, 0, 1e12)]
    assert link_limit(inside, Bed()) == Limit(seconds=0.0, link="")
    assert link_limit(inside, Bed(intra="400mbit")) == Limit(seconds=2.0, link="lo of node 0")


def test_a_message_costs_at_least_its_charge_between_nodes_only():
    bed = Bed(per_message=5000, intra="200mbit")
    assert link_seconds([(0, 2, 100), (0, 3, 100), (1, 2, 6000)], bed)[
        "node 0 out"
    ] == pytest.approx(16000 / RATE)
    assert link_seconds([(0, 2, 100), (0, 2, 100)], bed)["node 0 out"] == pytest.approx(
        5000 / RATE
    )  # may share a packet
    assert link_seconds([(0, 1, 100)], bed) == {"lo of node 0": pytest.approx(100 / RATE)}
    assert link_seconds([(0, 2, 0)], bed) == {}


@pytest.mark.parametrize("algorithm", list(ALL_TO_ALLS))
def test_every_all_to_all_carries_the_same_bytes_between_nodes(algorithm):
    grid = all_ep(2, 2)
    messages = exchange(grid, 8, algorithm).messages(DIM)
    row = 4 * DIM
    crossing = [size for source, target, size in messages if source // 2 != target // 2]
    assert sum(crossing) == 4 * 8 * row / 2  # half of four ranks' eight rows
    assert link_limit(messages, Bed()).seconds == pytest.approx(2 * 8 * row / 2 / RATE)
    assert len(crossing) == {"linear": 8, "pipelined": 8, "sequential": 8, "hier1d": 2}.get(
        algorithm, 4
    )


def test_two_level_sends_through_mates_what_is_not_for_its_own_place():
    grid = all_ep(2, 2)
    inside = sum(s for a, b, s in exchange(grid, 8, "hier2d").messages(DIM) if a // 2 == b // 2)
    # for the mate, and for the mate's place on the other node
    assert inside == 4 * (2 + 2) * 4 * DIM


def test_lanes_alone_split_what_both_carry():
    grid = all_ep(2, 2)
    both, inside, across = (
        sorted(exchange(grid, 8, "pipelined", which).messages(DIM)) for which in LANES.values()
    )
    assert sorted(inside + across) == both
    assert {source // 2 == target // 2 for source, target, _ in inside} == {True}
    assert {source // 2 == target // 2 for source, target, _ in across} == {False}


def test_multicast_sends_a_token_once_per_node_and_once_per_rank_there():
    grid = all_ep(2, 2)
    tokens = 6
    copies = np.full((4, 8), tokens)  # every token has a copy for every expert, two at each rank
    node_tokens = np.full((4, 2 + 4, 1), tokens)
    linear = dispatch(grid, copies, tokens, None)
    multicast = dispatch(grid, copies, tokens, node_tokens)
    row = 4 * DIM
    of_copy = 4 + INDEX_BYTES
    of_stop = INDEX_BYTES

    def sent(work: Work, *, inside: bool) -> float:
        return sum(size for a, b, size in work.messages(DIM) if (a // 2 == b // 2) is inside)

    assert sent(linear, inside=False) == 4 * 4 * tokens * (row + 4)
    assert sent(linear, inside=True) == 4 * 2 * tokens * (row + 4)
    assert sent(multicast, inside=False) == 4 * tokens * (row + 4 * of_copy + 2 * of_stop)
    assert sent(multicast, inside=True) == 4 * 2 * tokens * (row + 2 * of_copy), (
        "of two nodes' tokens, to the other rank"
    )


def test_weights_and_biases_have_their_own_rows():
    grid = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)
    program, factored = gather_weights(SCHEDULES["s2"](True), 1, grid)
    sizes = even_sizes(factored, tokens=16, num_experts=4, top_k=2, units=6)
    messages = program_messages(program, sizes, dim=DIM, element_bytes=2, unit_columns=3 * DIM)
    by_unit = 4 * 2 * 6 * 3 * DIM * 2  # four ranks, two experts of six units, from the other shard
    alone = program_messages(program, sizes, dim=DIM, element_bytes=2)
    assert sum(size for *_, size in messages) - sum(size for *_, size in alone) == by_unit


def test_coded_rows_count_as_their_messages():
    grid = all_ep(2, 2)
    plain = exchange(grid, 8, "linear")
    coded = compress(plain.program, "int8", grid)
    messages = program_messages(coded, plain.sizes, dim=DIM, element_bytes=4)
    assert {size for *_, size in messages} == {coded_bytes("int8", 2, DIM, 4)}
    assert len(messages) == 12
    other = program_messages(
        coded, plain.sizes, dim=DIM, element_bytes=4, coded=lambda codec, rows, dim, size: rows
    )
    assert {size for *_, size in other} == {2}


def test_a_codec_of_one_movement_is_not_that_of_another():
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    whole = SCHEDULES["s1"](False)
    sizes = CallSizes(grid, np.full((4, 4), 2), np.full(4, 4))
    messages = program_messages(compress(whole, "int8", grid), sizes, dim=DIM, element_bytes=4)
    rows = coded_bytes("int8", 2, DIM, 4)
    gates = 2 * 4
    assert sorted({size for *_, size in messages}) == sorted({rows, gates})


def test_lowered_lanes_keep_their_bytes():
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    sizes = CallSizes(grid, np.full((4, 4), 2), np.full(4, 4))
    routed = route_all_to_all(SCHEDULES["s1"](False), "pipelined", grid)
    messages = program_messages(routed, sizes, dim=DIM, element_bytes=4)
    assert sorted({size for *_, size in messages}) == [2 * 4, 2 * 4 * DIM]
