"""Pieces and rows: every cut is a partition, both ends of every movement agree, and sums include
every row once.

The counts are uneven and random, zeros included. The expected contents of slots are computed by
brute force.
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
    return CallSizes(
        grid, copies, tokens, num_chunks, node_tokens=table, units=draw(st.integers(1, 4))
    )


def pieces(shapes: LayoutIndex, layout: Layout, rank: int) -> list[Piece]:
    held = shapes.pieces(layout, rank)
    return list(zip(held.origin.tolist(), held.expert.tolist(), held.chunk.tolist()))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_pieces_are_what_the_layout_says(grid: Grid) -> None:
    """Pieces ascend by expert, then origin, then chunk. Origins are the ranks of `spread`, with
    their tensor-parallel groups."""
    shapes = LayoutIndex(grid, 2 * grid.ep, 3)
    for rank, spread, whole, experts, chunk in itertools.product(
        range(grid.world),
        [(), ("ep",), ("etp",), ("ep", "etp")],
        (False, True),
        ("all", "rank"),
        (None, 1),
    ):
        layout = Layout(spread=spread, whole_tp=whole, experts=experts, chunk=chunk)  # type: ignore[arg-type]
        origins = set(grid.group(rank, spread))
        if whole:
            origins = {
                mate
                for peer in origins
                for mate in range(peer // grid.tp * grid.tp, (peer // grid.tp + 1) * grid.tp)
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
def test_chunks_partition_every_run_into_near_equal_contiguous_parts(grid, data, num_chunks):
    sizes = data.draw(sizes_of(grid, num_chunks))
    whole = Layout(spread=("ep", "etp"), experts="rank")
    for rank in range(grid.world):
        total = sizes.num_rows(whole, rank)
        parts = [
            Layout(spread=("ep", "etp"), experts="rank", chunk=chunk) for chunk in range(num_chunks)
        ]
        rows = np.concatenate([sizes.part_rows(part, whole, rank).rows for part in parts])
        assert sorted(rows.tolist()) == list(range(total))
        assert [sizes.part_rows(part, whole, rank).total for part in parts] == [
            sizes.num_rows(p, rank) for p in parts
        ]
        for part in parts:
            assert np.all(np.diff(sizes.part_rows(part, whole, rank).rows) > 0), (
                "a part keeps the order"
            )
        runs = np.array([np.diff(sizes.offsets(part, rank)) for part in parts])
        if runs.size:
            assert (runs.max(0) - runs.min(0) <= 1).all()


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
    """A rank sends the same pieces that its peer receives. A sum includes the rows of every
    holder."""
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
            outgoing = sizes.outgoing(move, rank)
            incoming = sizes.incoming(move, rank)
            assert set(outgoing.peers) | set(incoming.peers) <= set(grid.group(rank, move.group))
            assert len(outgoing.runs.rows) == sum(outgoing.counts)
            assert len(outgoing.runs.rows) == 0 or outgoing.runs.rows.max() < sizes.num_rows(
                move.source, rank
            )
            for peer, count in zip(outgoing.peers, outgoing.counts):
                theirs = sizes.incoming(move, peer)
                assert (
                    dict(zip(theirs.peers, theirs.counts)).get(rank, 0)
                    == count
                    == sizes.num_moved(move, rank, peer)
                )
                assert sent_pieces(sizes, move, rank, peer) == received_pieces(
                    sizes, move, rank, peer
                )
            placed = Counter(incoming.runs.rows.tolist())
            assert sorted(placed) == list(range(sizes.num_rows(move.target, rank))), (
                "every row of the target is filled"
            )
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
        piece
        for member in sizes.grid.group(rank, move.group)
        for piece in pieces(sizes.shapes, move.source, member)
    )
    lengths = np.diff(sizes.offsets(move.target, rank))
    times = [holders[piece] for piece in pieces(sizes.shapes, move.target, rank)]
    return Counter(dict(enumerate(np.repeat(times, lengths).tolist())))


def test_a_gather_prefers_ones_own_rows_then_the_lowest_rank_that_has_them() -> None:
    """Three of four ranks of a tensor-parallel group need the rows that all of them hold: no rank
    sends what another one has."""
    grid = Grid(world=4, tp=4, ep=2, etp=2)
    sizes = CallSizes(grid, np.full((4, 2), 2), np.ones(4, dtype=np.int64))
    same = Move(Layout(whole_tp=True), Layout(whole_tp=True), ("tp",), False)
    for rank in range(4):
        assert sizes.incoming(same, rank).peers == (rank,)
    down = Move(Layout(whole_tp=True), Layout(), ("tp",), False)
    assert [sizes.incoming(down, rank).peers for rank in range(4)] == [
        (rank,) for rank in range(4)
    ], "a slice: no bytes"


@pytest.mark.parametrize(
    ("copies", "tokens", "words"),
    [
        ((3, 2), (4,), r"counts of shape \(3, 2\)"),
        ((4, 2), (3,), r"counts of shape \(4, 2\) and \(3,\)"),
        ((4,), (4,), "counts"),
    ],
)
def test_counts_that_do_not_fit_the_mesh_are_refused(
    copies: tuple, tokens: tuple, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        CallSizes(
            Grid(world=4, ep=2), np.zeros(copies, dtype=np.int64), np.zeros(tokens, dtype=np.int64)
        )


def test_experts_that_do_not_split_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"num_experts=5 does not split over mesh\.ep=2: choose ep as a divisor of it",
    ):
        LayoutIndex(Grid(world=4, ep=2), 5)
