"""Pieces and rows: every cut is a partition, both ends of every movement agree, and sums include every row once.

The counts are uneven and random, zeros included. The expected contents of slots are computed by brute force.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import InputError
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.layouts import LayoutIndex, Move
from moesaic.program.plan import Plan
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Layout, Op, Program, Slot, Task
from moesaic.program.validate import reduces

Piece = tuple[int, int, int]
"""Origin, expert, chunk."""
GRIDS = [
    Grid(world=1),
    Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2),
    Grid(world=4, ep=4, ranks_per_node=2),
    Grid(world=6, tp=3, ep=3, etp=2, ranks_per_node=2),
    Grid(world=8, tp=2, ep=4, etp=2, innermost="ep", ranks_per_node=8),
]


@st.composite
def sizes_of(draw: st.DrawFn, grid: Grid, num_chunks: int, node_tokens: bool = False) -> CallSizes:
    num_experts = grid.ep * draw(st.integers(1, 3))
    count = st.one_of(st.just(0), st.integers(0, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    is_counted = rng.random((grid.world, num_experts)) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    copies = rng.integers(0, 9, (grid.world, num_experts)) * is_counted
    tokens = np.array([draw(count) for _ in range(grid.world)])
    table = None
    if node_tokens:
        table = rng.integers(0, 5, (grid.world, sum(grid.cast_levels), num_chunks))
    return CallSizes(grid, copies, tokens, num_chunks, node_tokens=table, units=draw(st.integers(1, 4)))


def pieces(shapes: LayoutIndex, layout: Layout, rank: int) -> list[Piece]:
    held = shapes.pieces(layout, rank)
    return list(zip(held.origin.tolist(), held.expert.tolist(), held.chunk.tolist()))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_pieces_are_what_the_layout_says(grid: Grid) -> None:
    """Pieces ascend by expert, then origin, then chunk. Origins are the ranks of `spread`, with their tensor-parallel
    groups."""
    shapes = LayoutIndex(grid, 2 * grid.ep, 3)
    for rank, spread, whole, experts, chunk in itertools.product(
        range(grid.world), [(), ("ep",), ("etp",), ("ep", "etp")], (False, True), ("all", "rank"), (None, 1)
    ):
        layout = Layout(spread=spread, whole_tp=whole, experts=experts, chunk=chunk)  # type: ignore[arg-type]
        origins = set(grid.group(rank, spread))
        if whole:
            origins = {
                mate for peer in origins for mate in range(peer // grid.tp * grid.tp, (peer // grid.tp + 1) * grid.tp)
            }
        home = grid.group(rank, ("ep",)).index(rank)
        experts_held = range(2 * grid.ep) if experts == "all" else range(2 * home, 2 * home + 2)
        chunks = range(3) if chunk is None else [chunk]
        assert pieces(shapes, layout, rank) == [
            (o, e, c) for e in experts_held for o in sorted(origins) for c in chunks
        ]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@settings(max_examples=6)
@given(data=st.data(), num_chunks=st.integers(1, 4))
def test_chunks_partition_every_run_into_near_equal_contiguous_parts(
    grid: Grid, data: st.DataObject, num_chunks: int
) -> None:
    sizes = data.draw(sizes_of(grid, num_chunks))
    whole = Layout(spread=("ep", "etp"), experts="rank")
    for rank in range(grid.world):
        total = sizes.num_rows(whole, rank)
        parts = [Layout(spread=("ep", "etp"), experts="rank", chunk=chunk) for chunk in range(num_chunks)]
        rows = np.concatenate([sizes.part_rows(part, whole, rank).rows for part in parts])
        assert sorted(rows.tolist()) == list(range(total))
        assert [sizes.part_rows(part, whole, rank).total for part in parts] == [sizes.num_rows(p, rank) for p in parts]
        for part in parts:
            assert np.all(np.diff(sizes.part_rows(part, whole, rank).rows) > 0), "a part keeps the order"
        runs = np.array([np.diff(sizes.offsets(part, rank)) for part in parts])
        if runs.size:
            assert (runs.max(0) - runs.min(0) <= 1).all()


@pytest.mark.parametrize(("ep", "groups", "inner"), [(2, 2, "ep"), (4, 2, "etp"), (4, 4, "ep"), (6, 3, "etp")])
def test_steps_partition_the_pieces_and_go_that_many_groups_ahead(ep: int, groups: int, inner: str) -> None:
    grid = Grid(world=2 * ep, tp=2, ep=ep, etp=2, innermost=inner)
    shapes = LayoutIndex(grid, 2 * ep, 2)
    for whole in (Layout(), Layout(whole_tp=True), Layout(spread=("ep", "etp"), experts="rank")):
        for rank in range(grid.world):
            seen: Counter[Piece] = Counter()
            for step in range(groups):
                part = Layout(spread=whole.spread, whole_tp=whole.whole_tp, experts=whole.experts, step=(step, groups))
                of_step = pieces(shapes, part, rank)
                seen.update(of_step)
                for origin, expert, _ in of_step:
                    origin_group = grid.group(origin, ("ep",)).index(origin) * groups // ep
                    assert (origin_group + step) % groups == expert // 2 * groups // ep
            assert seen == Counter(pieces(shapes, whole, rank))


def move_of(task: Task, slots: dict[str, Slot]) -> Move:
    source, target = (slots[name] for name in task.of or (task.reads[0], task.writes[0]))
    return Move(source.layout, target.layout, task.group, reduces(source, target))


def movements(compiled: Compiled) -> list[tuple[Program, Task]]:
    programs = (compiled.forward, compiled.backward)
    return [(p, task) for p in programs for task in p.tasks if task.op in (Op.MOVE, Op.PACK)]


def draw_compiled(rng: random.Random) -> Compiled | None:
    grid = rng.choice(GRIDS)
    plan = Plan(
        schedule=rng.choice([*SCHEDULES]),
        fuse=rng.random() < 0.3,
        gather_weights=rng.choice([None, None, 0, 1]),
        chunks=rng.choice([1, 2, 3]),
        peer_groups=rng.choice([1, 1, 2]),
        overlap_gather=rng.random() < 0.3,
        all_to_all=rng.choice(["linear", "linear", "hier1d", "multicast", "multicast"]),  # type: ignore[arg-type]
    )
    try:
        return compile_plan(plan, grid, bias=rng.random() < 0.5)
    except InputError:
        return None


@pytest.mark.parametrize("seed", range(6))
@settings(max_examples=3)
@given(data=st.data())
def test_both_ends_of_every_movement_agree(seed: int, data: st.DataObject) -> None:
    """A rank sends the same pieces that its peer receives. A sum includes the rows of every holder."""
    rng = random.Random(seed * 1000 + data.draw(st.integers(0, 20)))
    compiled = None
    while compiled is None:
        compiled = draw_compiled(rng)
    grid = compiled.grid
    sizes = data.draw(sizes_of(grid, compiled.plan.chunks, compiled.is_multicast))
    for program, task in movements(compiled):
        slots = {slot.name: slot for slot in program.slots}
        move = move_of(task, slots)
        for rank in range(grid.world):
            outgoing, incoming = sizes.outgoing(move, rank), sizes.incoming(move, rank)
            assert set(outgoing.peers) | set(incoming.peers) <= set(grid.group(rank, move.group))
            assert len(outgoing.runs.rows) == sum(outgoing.counts)
            assert len(outgoing.runs.rows) == 0 or outgoing.runs.rows.max() < sizes.num_rows(move.source, rank)
            for peer, count in zip(outgoing.peers, outgoing.counts):
                theirs = sizes.incoming(move, peer)
                assert dict(zip(theirs.peers, theirs.counts)).get(rank, 0) == count == sizes.num_moved(move, rank, peer)
                assert sent_pieces(sizes, move, rank, peer) == received_pieces(sizes, move, rank, peer)
            placed = Counter(incoming.runs.rows.tolist())
            assert sorted(placed) == list(range(sizes.num_rows(move.target, rank))), "every row of the target is filled"
            if not move.reduce:
                assert set(placed.values()) <= {1}
            else:
                assert placed == holders_of_rows(sizes, move, rank)


def sent_pieces(sizes: CallSizes, move: Move, rank: int, peer: int) -> list[Piece]:
    sent = sizes.shapes.sent(move, rank)
    index = sent.peers.index(peer)
    places = sent.places[sent.starts[index] : sent.starts[index + 1]]
    return [pieces(sizes.shapes, move.source, rank)[place] for place in places]


def received_pieces(sizes: CallSizes, move: Move, rank: int, peer: int) -> list[Piece]:
    received = sizes.shapes.received(move, peer)
    index = received.peers.index(rank)
    places = received.places[received.starts[index] : received.starts[index + 1]]
    return [pieces(sizes.shapes, move.target, peer)[place] for place in places]


def holders_of_rows(sizes: CallSizes, move: Move, rank: int) -> Counter[int]:
    """Return how many ranks of the group hold each row of a target."""
    holders = Counter(
        piece for member in sizes.grid.group(rank, move.group) for piece in pieces(sizes.shapes, move.source, member)
    )
    lengths = np.diff(sizes.offsets(move.target, rank))
    times = [holders[piece] for piece in pieces(sizes.shapes, move.target, rank)]
    return Counter(dict(enumerate(np.repeat(times, lengths).tolist())))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@settings(max_examples=6)
@given(data=st.data())
def test_rows_per_expert_are_the_origins_copies(grid: Grid, data: st.DataObject) -> None:
    world = grid.world
    num_experts = 2 * grid.ep
    copies = np.array(data.draw(st.lists(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts),
                                         min_size=world, max_size=world)))  # fmt: skip
    sizes = CallSizes(grid, copies, np.zeros(world, dtype=np.int64), 2)
    layout = Layout(spread=("ep", "etp"), experts="rank")
    for rank in range(world):
        home = grid.coordinate(rank, "ep")
        expected = copies[list(grid.group(rank, ("ep", "etp")))][:, 2 * home : 2 * home + 2].sum(0)
        assert sizes.rows_per_expert(layout, rank).tolist() == expected.tolist()
        by_chunk = [Layout(spread=("ep", "etp"), experts="rank", chunk=chunk) for chunk in range(2)]
        assert sum(sizes.rows_per_expert(part, rank) for part in by_chunk).tolist() == expected.tolist()


def test_nothing_at_all_is_fine() -> None:
    grid = Grid(world=4, tp=2, ep=2, etp=2)
    sizes = CallSizes(grid, np.zeros((4, 2), dtype=np.int64), np.zeros(4, dtype=np.int64), 3)
    for program, task in movements(compile_plan(Plan(schedule="s2", chunks=3), grid)):
        move = move_of(task, {slot.name: slot for slot in program.slots})
        for rank in range(4):
            assert sum(sizes.outgoing(move, rank).counts) == sizes.incoming(move, rank).runs.total == 0


def test_a_gather_prefers_ones_own_rows_then_the_lowest_rank_that_has_them() -> None:
    """Three of four ranks of a tensor-parallel group need the rows that all of them hold: no rank sends what another
    one has."""
    grid = Grid(world=4, tp=4, ep=2, etp=2)
    sizes = CallSizes(grid, np.full((4, 2), 2), np.ones(4, dtype=np.int64))
    same = Move(Layout(whole_tp=True), Layout(whole_tp=True), ("tp",), False)
    for rank in range(4):
        assert sizes.incoming(same, rank).peers == (rank,)
    down = Move(Layout(whole_tp=True), Layout(), ("tp",), False)
    assert [sizes.incoming(down, rank).peers for rank in range(4)] == [(rank,) for rank in range(4)], (
        "a slice: no bytes"
    )


@pytest.mark.parametrize(
    ("copies", "tokens", "words"),
    [
        ((3, 2), (4,), r"counts of shape \(3, 2\)"),
        ((4, 2), (3,), r"counts of shape \(4, 2\) and \(3,\)"),
        ((4,), (4,), "counts"),
    ],
)
def test_counts_that_do_not_fit_the_mesh_are_refused(copies: tuple, tokens: tuple, words: str) -> None:
    with pytest.raises(InputError, match=words):
        CallSizes(Grid(world=4, ep=2), np.zeros(copies, dtype=np.int64), np.zeros(tokens, dtype=np.int64))


def test_experts_that_do_not_split_are_refused() -> None:
    with pytest.raises(InputError, match=r"num_experts=5 does not split over mesh\.ep=2: choose ep as a divisor of it"):
        LayoutIndex(Grid(world=4, ep=2), 5)


def test_nodes_hold_the_experts_of_their_ranks() -> None:
    grid = Grid(world=8, ep=4, etp=2, ranks_per_node=4)
    shapes = LayoutIndex(grid, 12)
    assert [list(shapes.node_experts(rank)) for rank in (0, 3, 4, 7)] == [list(range(6))] * 2 + [list(range(6, 12))] * 2
    node_tokens = Layout(flow="node_tokens", spread=("node",), experts="node")
    assert pieces(shapes, node_tokens, 5) == [(1, 1, 0), (5, 1, 0)]
    assert pieces(shapes, Layout(flow="node_tokens"), 5) == [(5, 0, 0), (5, 1, 0)]


def test_stops_are_at_places_of_ep_on_every_shard() -> None:
    grid = Grid(world=8, ep=4, etp=2, ranks_per_node=4)
    shapes = LayoutIndex(grid, 12, 2)
    assert pieces(shapes, Layout(flow="rank_tokens"), 5) == [
        (5, place, chunk) for place in range(4) for chunk in (0, 1)
    ]
    at_mate = Layout(flow="rank_tokens", spread=("node",), experts="node", chunk=1)
    assert pieces(shapes, at_mate, 5) == [(1, 2, 1), (5, 2, 1), (1, 3, 1), (5, 3, 1)]
    at_rank = Layout(flow="rank_tokens", spread=("ep", "etp"), experts="rank", chunk=0)
    assert pieces(shapes, at_rank, 4) == pieces(shapes, at_rank, 5) == [(origin, 2, 0) for origin in range(8)]


def test_copies_find_their_stops_and_stops_their_node_tokens() -> None:
    """Two ranks per node, two experts per rank, two chunks, with different counts everywhere."""
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    rng = np.random.default_rng(0)
    copies, table = rng.integers(2, 9, (4, 8)), rng.integers(1, 9, (4, 2 + 4, 2))
    sizes = CallSizes(grid, copies, np.full(4, 9), 2, node_tokens=table)
    at_mate = {flow: Layout(flow=flow, spread=("node",), experts="node") for flow in ("node_tokens", "rank_tokens")}  # type: ignore[arg-type]
    at_rank = {flow: Layout(flow=flow, spread=("ep", "etp"), experts="rank") for flow in ("copies", "rank_tokens")}  # type: ignore[arg-type]
    for tokens, rows, rank in (
        (at_mate["node_tokens"], at_mate["rank_tokens"], 3),
        (at_rank["rank_tokens"], at_rank["copies"], 2),
    ):
        starts = dict(zip(pieces(sizes.shapes, tokens, rank), sizes.offsets(tokens, rank).tolist()))
        per_piece = np.diff(sizes.offsets(rows, rank))
        to = [(origin, expert // 2, chunk) for origin, expert, chunk in pieces(sizes.shapes, rows, rank)]
        expected = np.repeat([starts[piece] for piece in to], per_piece)
        assert sizes.token_bases(tokens, rows, rank).rows.tolist() == expected.tolist()
    assert sizes.num_rows(at_mate["node_tokens"], 3) == table[[1, 3], 1].sum()
    assert sizes.num_rows(at_rank["rank_tokens"], 2) == table[:, 2 + 2].sum()
