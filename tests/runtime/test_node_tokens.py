"""Visits and stops against Python sets: a token counts once per node, place of ep and chunk; every copy finds its token."""

from __future__ import annotations

import random

import pytest
import torch
from meshes import make_layer, on_mesh, tokens_of

from helpers import pairwise
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic.routing.node_tokens import find_node_tokens
from moesaic.routing.peers import CHUNKS
from moesaic_lab.recorder import Recorder

GRIDS = [
    Grid(world=4, ep=4, ranks_per_node=2),
    Grid(world=8, ep=4, etp=2, ranks_per_node=4),
    Grid(world=8, ep=8, ranks_per_node=1),
    Grid(world=4, ep=2, etp=2),
]


TOKENS = (0, 1, 6, 20)
Cell = tuple[int, int]
"""A node or a place of ep, and a chunk."""


def has_few_tokens(grid: Grid, chunks: int, seed: int) -> bool:
    return random.Random(seed).choice(TOKENS) < 6


@pytest.mark.parametrize(
    ("grid", "chunks", "seed"), pairwise(GRIDS, (1, 2, 3), range(3), empty=has_few_tokens), ids=str
)
def test_stops_and_node_tokens_are_the_distinct_tokens_of_every_place_node_and_chunk(grid, chunks, seed):
    rng = random.Random(seed)
    num_experts, num_tokens = 2 * grid.ep, rng.choice(TOKENS)
    copies = sorted(
        (expert, token)
        for token in range(num_tokens)
        for expert in rng.sample(range(num_experts), rng.randint(0, min(4, num_experts)))
    )
    expert = torch.tensor([e for e, _ in copies], dtype=torch.int64)
    token = torch.tensor([t for _, t in copies], dtype=torch.int64)
    found = find_node_tokens(token, expert, num_experts, num_tokens, chunks, grid)

    homes = [(e // 2, chunk_of(copies, place, chunks)) for place, (e, _) in enumerate(copies)]
    rank_tokens = distinct_tokens(homes, copies, grid.ep, chunks)
    assert found.counts[-grid.ep :].tolist() == lengths(rank_tokens, grid.ep, chunks)
    assert found.copy_index.flatten().tolist() == [rank_tokens[cell].index(t) for cell, (_, t) in zip(homes, copies)]
    assert all(index.shape[1:] == (1,) for index in found.indices.values())
    nodes = grid.nodes_per_replica
    if nodes in (1, grid.ep):
        assert found.node_token_index is None
        assert len(found.counts) == grid.ep
        assert found.rank_token_index.flatten().tolist() == in_turn(rank_tokens)
        assert list(found.indices) == ["rank_token_index", "copy_index"]
        return
    on_nodes = [(home // (grid.ep // nodes), chunk) for home, chunk in homes]
    node_tokens = distinct_tokens(on_nodes, copies, nodes, chunks)
    assert found.counts[:nodes].tolist() == lengths(node_tokens, nodes, chunks)
    assert found.node_token_index.flatten().tolist() == in_turn(node_tokens)
    expected = [
        node_tokens[p // (grid.ep // nodes), c].index(t) for p, c in sorted(rank_tokens) for t in rank_tokens[p, c]
    ]
    assert found.rank_token_index.flatten().tolist() == expected
    assert list(found.indices) == ["node_token_index", "rank_token_index", "copy_index"]


def chunk_of(copies: list[tuple[int, int]], place: int, chunks: int) -> int:
    """Return the chunk of a copy, given its place in its expert's run."""
    run = [number for number, (expert, _) in enumerate(copies) if expert == copies[place][0]]
    at = run.index(place)
    return next(c for c in range(chunks) if len(run) * c // chunks <= at < len(run) * (c + 1) // chunks)


def distinct_tokens(
    cells: list[Cell], copies: list[tuple[int, int]], places: int, chunks: int
) -> dict[Cell, list[int]]:
    """Return the distinct tokens of each cell's copies, ascending."""
    found: dict[Cell, set[int]] = {(place, chunk): set() for place in range(places) for chunk in range(chunks)}
    for cell, (_, token) in zip(cells, copies):
        found[cell].add(token)
    return {cell: sorted(tokens) for cell, tokens in found.items()}


def lengths(cells: dict[Cell, list[int]], places: int, chunks: int) -> list[list[int]]:
    return [[len(cells[place, chunk]) for chunk in range(chunks)] for place in range(places)]


def in_turn(cells: dict[Cell, list[int]]) -> list[int]:
    return [token for cell in sorted(cells) for token in cells[cell]]


def test_a_token_node_tokens_a_node_once_and_stops_once_at_each_rank_there() -> None:
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    expert, token = torch.tensor([0, 1, 1, 2, 3, 4, 5]), torch.tensor([5, 5, 7, 5, 5, 7, 7])
    found = find_node_tokens(token, expert, 8, 8, 1, grid)
    assert found.counts.tolist() == [[2], [1], [2], [1], [1], [0]], "5 and 7 on the first node, 7 on the second"
    assert found.node_token_index.flatten().tolist() == [5, 7, 7]
    assert found.rank_token_index.flatten().tolist() == [0, 1, 0, 0], "5 and 7 at rank 0, 5 at rank 1, 7 at rank 2"
    assert found.copy_index.flatten().tolist() == [0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("grid", "chunks", "capacity", "exchanges"),
    [
        (GRIDS[0], 1, Dropless(), 2),
        (Grid(world=4, ep=4, ranks_per_node=1), CHUNKS, Dropless(), 2),
        (GRIDS[3], CHUNKS, Dropless(), 2),
        (GRIDS[0], 1, Capacity.fixed(4.0), 3),
    ],
    ids=["two levels", "a rank a node", "shards", "limited"],
)
def test_counts_of_node_tokens_ride_in_the_exchange_of_counts_unless_copies_may_be_dropped(
    grid: Grid, chunks: int, capacity: AbstractCapacity, exchanges: int
) -> None:
    found = exchanges_of(grid, Plan(all_to_all="multicast", chunks=chunks), capacity)
    assert found == [exchanges] * grid.world


def exchanges_of(grid: Grid, plan: Plan, capacity: AbstractCapacity) -> list[int]:
    """Return the exchanges of a layer's second forward pass on each rank; the first pass also announces message lengths."""
    whole = make_layer("swiglu", capacity=capacity)

    def rank(transport: AbstractTransport) -> int:
        recorder = Recorder(transport)
        layer = on_mesh(whole, grid, recorder, plan)
        layer(tokens_of(transport.rank))
        recorder.ranges.clear()
        layer(tokens_of(transport.rank))
        return len(recorder.ranges)

    return run_ranks(grid.world, rank)
