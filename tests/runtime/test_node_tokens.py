"""Visits and stops: a token counts once per node and place of ep, and its counts ride with the
others."""

from __future__ import annotations

import pytest
import torch
from meshes import make_layer, on_mesh, tokens_of

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


def test_a_token_node_tokens_a_node_once_and_stops_once_at_each_rank_there() -> None:
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    expert = torch.tensor([0, 1, 1, 2, 3, 4, 5])
    token = torch.tensor([5, 5, 7, 5, 5, 7, 7])
    found = find_node_tokens(token, expert, 8, 8, 1, grid)
    assert found.counts.tolist() == [[2], [1], [2], [1], [1], [0]], (
        "5 and 7 on the first node, 7 on the second"
    )
    assert found.node_token_index.flatten().tolist() == [5, 7, 7]
    assert found.rank_token_index.flatten().tolist() == [0, 1, 0, 0], (
        "5 and 7 at rank 0, 5 at rank 1, 7 at rank 2"
    )
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
    """Return the exchanges of a layer's second forward pass on each rank; the first pass also
    announces message lengths."""
    whole = make_layer("swiglu", capacity=capacity)

    def rank(transport: AbstractTransport) -> int:
        recorder = Recorder(transport)
        layer = on_mesh(whole, grid, recorder, plan)
        layer(tokens_of(transport.rank))
        recorder.ranges.clear()
        layer(tokens_of(transport.rank))
        return len(recorder.ranges)

    return run_ranks(grid.world, rank)
