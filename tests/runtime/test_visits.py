"""Visits, against sets: each token once per node and chunk, and every copy finds its token's visit."""

from __future__ import annotations

import random

import pytest
import torch
from meshes import make_layer, on_mesh, tokens_of

from moesaic.comm.loopback import run_ranks
from moesaic.comm.recorder import Recorder
from moesaic.comm.wire import AbstractWire
from moesaic.plan import Plan
from moesaic.program.grid import Grid
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic.runtime.visits import find_visits

GRIDS = [
    Grid(world=4, ep=4, ranks_per_node=2),
    Grid(world=8, ep=4, etp=2, ranks_per_node=4),
    Grid(world=8, ep=8, ranks_per_node=1),
    Grid(world=4, ep=2, etp=2),
]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_visits_are_the_distinct_tokens_of_every_node_and_chunk(grid: Grid, chunks: int, seed: int) -> None:
    rng = random.Random(seed)
    num_experts, num_tokens = 2 * grid.ep, rng.choice([0, 1, 6, 20])
    copies = sorted(
        (expert, token)
        for token in range(num_tokens)
        for expert in rng.sample(range(num_experts), rng.randint(0, min(4, num_experts)))
    )
    expert = torch.tensor([e for e, _ in copies], dtype=torch.int64)
    token = torch.tensor([t for _, t in copies], dtype=torch.int64)
    found = find_visits(token, expert, num_experts, num_tokens, chunks, grid)

    nodes, per_node = grid.nodes_per_replica, num_experts // grid.nodes_per_replica
    cells: dict[tuple[int, int], list[int]] = {(n, c): [] for n in range(nodes) for c in range(chunks)}
    cell_of_copy = []
    for place, (e, t) in enumerate(copies):
        run = [i for i, (other, _) in enumerate(copies) if other == e]
        at = run.index(place)
        chunk = next(c for c in range(chunks) if len(run) * c // chunks <= at < len(run) * (c + 1) // chunks)
        cells[e // per_node, chunk].append(t)
        cell_of_copy.append((e // per_node, chunk))
    distinct = {cell: sorted(set(tokens)) for cell, tokens in cells.items()}
    assert found.counts.tolist() == [[len(distinct[n, c]) for c in range(chunks)] for n in range(nodes)]
    assert found.visit_index.flatten().tolist() == [t for cell in sorted(distinct) for t in distinct[cell]]
    expected = [distinct[cell].index(t) for cell, (_, t) in zip(cell_of_copy, copies)]
    assert found.copy_index.flatten().tolist() == expected
    assert found.visit_index.shape[1:] == found.copy_index.shape[1:] == (1,)


def test_a_token_visits_a_node_once_for_all_its_experts_there() -> None:
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    expert, token = torch.tensor([0, 1, 1, 2, 3]), torch.tensor([5, 5, 7, 5, 5])
    found = find_visits(token, expert, 4, 8, 1, grid)
    assert found.counts.tolist() == [[2], [1]], "tokens 5 and 7 on the first node, 5 on the second"
    assert found.visit_index.flatten().tolist() == [5, 7, 5]
    assert found.copy_index.flatten().tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("capacity", "exchanges"), [(Dropless(), 2), (Capacity.fixed(4.0), 3)], ids=["dropless", "limited"]
)
def test_visits_are_told_with_the_counts_unless_copies_may_be_dropped(
    capacity: AbstractCapacity, exchanges: int
) -> None:
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    whole = make_layer("swiglu", capacity=capacity)

    def rank(wire: AbstractWire) -> int:
        recorder = Recorder(wire)
        layer = on_mesh(whole, grid, recorder, Plan(all_to_all="multicast"))
        recorder.ranges.clear()
        layer(tokens_of(wire.rank))
        return len(recorder.ranges)

    assert run_ranks(4, rank) == [exchanges] * 4
