"""The programs of the communication benchmark: one movement of rows by each all-to-all, and a
layer's dispatch.

A program is a list of tasks (`moesaic.program.task`) that read and write named slots, the same on
all ranks; `CallSizes` has the numbers of rows of one call. A copy is a row that a token sends to
one of its experts. Experts are split evenly over all ranks, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moesaic.program.build.builder import Builder
from moesaic.program.grid import Grid
from moesaic.program.order.optsche import optsche
from moesaic.program.passes.multicast import multicast
from moesaic.program.passes.route_all_to_all import route_all_to_all
from moesaic.program.passes.split import split_capacity
from moesaic.program.plan import Plan
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Kind, Layout, Op, Program, Stage, Task
from moesaic.program.validate import validate
from moesaic_lab.bounds import Message, program_messages

ELEMENT = 4
"""Bytes per element; rows are float32."""
AT_EXPERTS = Layout(spread=("ep", "etp"), experts="rank")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A program with the sizes of its call."""

    program: Program
    sizes: CallSizes
    copies: np.ndarray
    """(world, num_experts) copies that each rank sends to each expert."""

    def messages(self, dim: int) -> list[Message]:
        """Return all messages of the program, for rows of `dim` columns."""
        return program_messages(self.program, self.sizes, dim=dim, element_bytes=ELEMENT)


def all_ep(nodes: int, ranks_per_node: int) -> Grid:
    """Return the mesh of the benchmark, which splits the experts over all ranks."""
    world = nodes * ranks_per_node
    return Grid(world=world, ep=world, ranks_per_node=ranks_per_node)


def exchange(grid: Grid, rows: int, algorithm: str, which: str = "all") -> Work:
    """Return an even all-to-all: there is one expert per rank, to which every rank sends equally
    many rows.

    Args:
        grid: the mesh, from `all_ep`.
        rows: rows that each rank holds, including those for itself.
        algorithm: a name in `ALL_TO_ALLS`.
        which: "all" to move all rows, "inside" for only those that stay in their node, "across" for
            only those that leave it.
    """
    build = Builder("exchange")
    rows_slot = build.input("rows", Kind.ROWS, Layout(), {})
    build.move(rows_slot, "h", AT_EXPERTS, group=("ep", "etp"), states={}, stage=Stage.DISPATCH)
    program = route_all_to_all(build.build("h"), algorithm, grid)
    validate(program)

    node = np.array([grid.node_of(rank) for rank in range(grid.world)])
    same_node = node[:, None] == node[None, :]  # (source, target)
    chosen = {"all": np.ones_like(same_node), "inside": same_node, "across": ~same_node}[which]
    copies = np.where(chosen, rows // grid.world, 0)
    sizes = CallSizes(grid, copies, copies.sum(axis=1))
    return Work(program=program, sizes=sizes, copies=copies)


def dispatch(
    grid: Grid, copies: np.ndarray, tokens: int, node_tokens: np.ndarray | None, chunks: int = 1
) -> Work:
    """Return the dispatch of a layer under S1: the tokens are sent to their experts with their
    routing weights.

    Args:
        grid: the mesh, from `all_ep`.
        copies: (world, num_experts) copies that each rank sends to each expert.
        tokens: tokens per rank.
        node_tokens: argument of `CallSizes` for multicast; None for linear.
        chunks: number of chunks; one chunk fans out inside the nodes while the next one crosses
            nodes.
    """
    whole = Plan(schedule="s1").program
    if node_tokens is not None:
        whole = multicast(whole, grid)
    program = optsche(until_experts(split_capacity(whole, chunks)))
    validate(program)
    sizes = CallSizes(grid, copies, np.full(grid.world, tokens), chunks, node_tokens=node_tokens)
    return Work(program=program, sizes=sizes, copies=copies)


def until_experts(program: Program) -> Program:
    """Return the part of a layer's forward program before the experts; its outputs are the slots
    that the experts read."""
    after_experts: set[str] = set()
    tasks: list[Task] = []
    outputs: list[str] = []
    for task in program.tasks:
        if task.op is Op.EXPERT:
            outputs += task.reads[:2]  # rows and routing weights
        if task.op is Op.EXPERT or after_experts.intersection(task.reads):
            after_experts.update(task.writes)
        else:
            tasks.append(task)
    slots: set[str] = set()
    for task in tasks:
        slots.update(task.reads, task.writes)
    return replace(
        program,
        name=f"dispatch of {program.name}",
        slots=tuple(slot for slot in program.slots if slot.name in slots),
        tasks=tuple(tasks),
        inputs=tuple(name for name in program.inputs if name in slots),
        outputs=tuple(outputs),
    )


LANES = {"pipelined": "all", "intra alone": "inside", "inter alone": "across"}
"""Methods of the comparison of lanes, with which rows they move: the argument `which` of
`exchange`. Pipelined has a lane of messages inside the nodes (intra) and one of messages between
nodes (inter)."""
