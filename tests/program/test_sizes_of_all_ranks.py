"""What all ranks hold and send, counted without a list of pieces, against the lists of each
rank."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.planner.call_sizes import copies_by_rank, sizes_of
from moesaic.planner.workload import Workload, dirichlet_counts
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.layouts import LayoutIndex, Move
from moesaic.program.plan import Plan
from moesaic.program.replications import Replications
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Layout, Op, Program
from moesaic.program.validate import reduces

LAYER = Workload(tokens=64, num_experts=16, top_k=2, dim=8, hidden=8)
PLANS = [
    Plan(schedule="s2", chunks=2, all_to_all="hier2d"),
    Plan(schedule="s1", all_to_all="multicast"),
    Plan(peer_groups=2),
    Plan(schedule="baseline", all_to_all="naive"),
    Plan(gather_weights=0),
    Plan(replication="spill", chunks=2),
    Plan(replication="spill", peer_groups=2),
]
GRIDS = [
    Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4),
    Grid(world=16, tp=2, ep=4, etp=2, ranks_per_node=4),
    Grid(world=8, ep=8, ranks_per_node=2),
    Grid(world=8, ep=4, ranks_per_node=2),
]


def replicated(copies: np.ndarray, grid: Grid) -> np.ndarray:
    """Return counts in which one or two helpers compute a third of some runs each, and never an
    expert's home."""
    random = np.random.default_rng(5)
    counts = np.zeros((*copies.shape, grid.ep), dtype=np.int64)
    home = np.arange(copies.shape[1]) * grid.ep // copies.shape[1]
    for expert in random.choice(copies.shape[1], 5, replace=False):
        for helper in random.choice(grid.ep, 2, replace=False):
            if helper != home[expert]:
                counts[:, expert, helper] = copies[:, expert] // 3
    return counts


def held_and_moved(program: Program) -> tuple[set[Layout], set[Move]]:
    slots = {slot.name: slot for slot in program.slots}
    ends = [
        (slots[task.reads[0]], slots[task.writes[0]], task)
        for task in program.tasks
        if task.op is Op.MOVE
    ]
    ends += [
        (slots[task.of[0]], slots[task.of[1]], task)
        for task in program.tasks
        if task.of is not None
    ]
    moves = {
        Move(source.layout, target.layout, task.group, reduces(source, target))
        for source, target, task in ends
    }
    known = {slot.layout for slot in program.slots if slot.kind.value != "packets"}
    return known, moves


def agree(sizes: CallSizes, program: Program) -> int:
    """Compare every slot and movement of a program with the lists of each rank. Return how many
    pairs exchange rows."""
    world = range(sizes.grid.world)
    exchanged = 0
    layouts, moves = held_and_moved(program)
    for layout in layouts:
        assert sizes.rows_of_ranks(layout).tolist() == [
            sizes.num_rows(layout, rank) for rank in world
        ]
        if layout.flow == "copies" and layout.experts == "rank":
            of_ranks = sizes.rows_per_expert_of_ranks(layout)
            for rank in world:
                own = sizes.rows_per_expert(layout, rank)
                experts = sizes.shapes.experts(layout, rank)
                listed = dict(zip(sizes.held(layout, rank).tolist(), own.tolist()))
                assert of_ranks[rank, : len(experts)].tolist() == [
                    listed.get(each, 0) for each in experts.tolist()
                ]
    for move in moves:
        moved = sizes.moved(move)
        pairs = {
            (s, t): n
            for s, t, n in zip(moved.source.tolist(), moved.target.tolist(), moved.rows.tolist())
        }
        listed = {
            (rank, peer): count
            for rank in world
            for peer, count in zip(
                sizes.outgoing(move, rank).peers, sizes.outgoing(move, rank).counts
            )
            if count and peer != rank
        }
        assert pairs == listed, move
        exchanged += len(pairs)
    return exchanged


@pytest.mark.parametrize(
    ("plan", "grid"),
    [(plan, GRIDS[number % len(GRIDS)]) for number, plan in enumerate(PLANS)],
    ids=str,
)
def test_all_ranks_together_are_what_each_rank_lists(plan: Plan, grid: Grid) -> None:
    compiled = compile_plan(plan, grid)
    counts = dirichlet_counts(grid.dp, LAYER, concentration=0.3, seed=1)
    shapes = compiled.shapes(LAYER.num_experts)
    table = None
    exchanged = 0
    assert isinstance(shapes, LayoutIndex)
    for program in (compiled.forward, compiled.backward):
        if compiled.replicates:
            table = Replications.of(
                replicated(copies_by_rank(program, compiled.grid, counts), compiled.grid)
            )
        sizes = sizes_of(program, LAYER, compiled.grid, counts, replicated=table, shapes=shapes)
        exchanged += agree(sizes, program)
    assert exchanged > 0
