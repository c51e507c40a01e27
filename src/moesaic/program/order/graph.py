"""The dependency graph of a program's tasks, and the orders that need nothing else: by priority, as
built, and eager.

Orders that use durations have modules of their own. A program is a list of tasks that read and
write slots, its named values. A task is given by its number, its position in the program; `rank`
stands for a priority, not for a process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moesaic.program.task import HELPERS, Kind, Lane, Layout, Op, Program, Stage, Task


def predecessors(program: Program) -> list[tuple[int, ...]]:
    """Return for each task the positions of the tasks that write what it reads, ascending."""
    writer = {name: number for number, task in enumerate(program.tasks) for name in task.writes}
    before = []
    for task in program.tasks:
        writers = {writer[name] for name in task.reads if name in writer}
        before.append(tuple(sorted(writers)))
    return before


def successors(before: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return for each task the positions of the tasks that wait for it, ascending.

    Args:
        before: the result of `predecessors`.
    """
    after: list[list[int]] = [[] for _ in before]
    for number, waits in enumerate(before):
        for other in waits:
            after[other].append(number)
    return [tuple(numbers) for numbers in after]


def in_order(program: Program, rank: Callable[[Task], Any]) -> tuple[Task, ...]:
    """Return the tasks sorted topologically. Among ready tasks the one of lowest rank comes first,
    ties in the program's order."""
    before = predecessors(program)
    after = successors(before)
    num_missing = [len(waits) for waits in before]  # predecessors that have not run
    ready = [
        (rank(task), number) for number, task in enumerate(program.tasks) if not num_missing[number]
    ]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, number = heapq.heappop(ready)
        ordered.append(program.tasks[number])
        for other in after[number]:
            num_missing[other] -= 1
            if not num_missing[other]:
                heapq.heappush(ready, (rank(program.tasks[other]), other))
    assert len(ordered) == len(program.tasks), f"{program.name}: some tasks wait for each other"
    return tuple(ordered)


def moves_replicated_weights(program: Program) -> Callable[[Task], bool]:
    """Return a predicate that is true for movements of weights to the helpers of replicated copies.

    These weights are needed only after the experts of the copies that stay at home, so their
    movements follow all dispatches. A movement that forwards them inside a node waits for the first
    movement, so it is issued just before the task that reads it.
    """
    replicated = {
        slot.name
        for slot in program.slots
        if slot.kind is Kind.WEIGHT and slot.layout.chunk in HELPERS
    }

    def moves_them(task: Task) -> bool:
        is_dispatch = task.op is Op.MOVE and task.stage is Stage.DISPATCH
        return is_dispatch and task.writes[0] in replicated

    return moves_them


def chunk_numbers(program: Program) -> Callable[[Layout], int | None]:
    """Return a function that returns the number of a layout's chunk, or None.

    Replicated copies come last in a forward program, since their experts wait for weights to
    arrive. They come first in a backward program, so that the weights' gradients are sent home
    while everything else runs (FasterMoE, He et al., PPoPP 2022, section 4.2).
    """
    is_backward = any(task.op is Op.EXPERT_GRAD for task in program.tasks)
    chunks = [slot.layout.chunk for slot in program.slots]
    last_number = max((chunk for chunk in chunks if isinstance(chunk, int)), default=0)

    def number(layout: Layout) -> int | None:
        """Return the number of a layout's chunk; None if its rows are not cut into chunks."""
        chunk = layout.chunk
        if chunk is None:
            return None
        if isinstance(chunk, str):  # replicated copies, whose chunks have names
            return 0 if is_backward else last_number + 1
        return chunk + 1 if is_backward else chunk  # backward, 0 is taken

    return number


def fifo(program: Program) -> Program:
    """Return the program unchanged, chunk after chunk: the order of a layer that was only cut into
    chunks."""
    return program


def early(program: Program) -> Program:
    """Return the program with every movement issued as soon as its input is ready, and with
    computation chunk after chunk.

    If movements are not encoded, this is close to ScheMoE's order (see `optsche.py`): first all
    dispatches, then expert after expert, each result sent at once. With encoding, each chunk must
    be complete before the next one is encoded.
    """
    slots = {slot.name: slot for slot in program.slots}
    number = chunk_numbers(program)
    moves_replicated = moves_replicated_weights(program)

    def rank(task: Task) -> tuple[bool, int]:
        """Return the place of a task: movements first (False sorts before True), then by chunk."""
        chunk = number(slots[task.writes[0]].layout)
        # Movements of replicated weights count as computations (see `moves_replicated_weights`):
        # the first one as of chunk 0, the one inside nodes as of the chunk that reads it.
        if moves_replicated(task):
            is_first_movement = task.lane is Lane.INTER
            return True, 0 if is_first_movement or chunk is None else chunk
        is_computed = task.op not in (Op.MOVE, Op.HOP)
        return is_computed, -1 if chunk is None else chunk  # -1: before all chunks

    return replace(program, tasks=in_order(program, rank))
