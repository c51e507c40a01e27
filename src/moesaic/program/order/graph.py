"""The graph of a program's tasks, and the orders that follow from it alone: who waits for whom, a legal order by priority, the
order as built, and every movement as early as can be. Orders by durations have files of their own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moesaic.program.task import Kind, Lane, Layout, Op, Program, Stage, Task


def predecessors(program: Program) -> list[tuple[int, ...]]:
    """Return for each task the places of the tasks that write what it reads, ascending."""
    writer = {name: number for number, task in enumerate(program.tasks) for name in task.writes}
    return [tuple(sorted({writer[name] for name in task.reads if name in writer})) for task in program.tasks]


def successors(before: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return for each task the places of the tasks that wait for it, ascending.

    Args:
        before: as `predecessors` returns it.
    """
    after: list[list[int]] = [[] for _ in before]
    for number, waits in enumerate(before):
        for other in waits:
            after[other].append(number)
    return [tuple(numbers) for numbers in after]


def in_order(program: Program, rank: Callable[[Task], Any]) -> tuple[Task, ...]:
    """Return the tasks so that of those that may come next the one of lowest rank does; ties as in the program."""
    before = predecessors(program)
    after = successors(before)
    missing = [len(waits) for waits in before]
    ready = [(rank(task), number) for number, task in enumerate(program.tasks) if not missing[number]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, number = heapq.heappop(ready)
        ordered.append(program.tasks[number])
        for other in after[number]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (rank(program.tasks[other]), other))
    assert len(ordered) == len(program.tasks), f"{program.name}: some tasks wait for each other"
    return tuple(ordered)


def brings_replicated_weights(program: Program) -> Callable[[Task], bool]:
    """Return what tells the movements of weights to the helpers of replicated copies.

    Nothing waits for them until the experts of the copies that stay are through, so they travel behind all dispatches; and
    where they are passed on inside nodes, that waits for the first movement, so it is issued just before its reader.
    """
    replicated = {
        slot.name for slot in program.slots if slot.kind is Kind.WEIGHT and slot.layout.chunk in ("near", "here")
    }
    return lambda task: task.op is Op.MOVE and task.stage is Stage.DISPATCH and task.writes[0] in replicated


def chunk_numbers(program: Program) -> Callable[[Layout], int | None]:
    """Return what numbers the chunk of a layout, None where it is not one.

    Replicated copies come last in a forward program, where their experts wait for weights to arrive. They come first in
    a backward one, so that the weights' gradients travel home behind everything else (FasterMoE, He et al., PPoPP 2022,
    section 4.2).
    """
    backward = any(task.op is Op.EXPERT_GRAD for task in program.tasks)
    last = 1 + max((slot.layout.chunk for slot in program.slots if isinstance(slot.layout.chunk, int)), default=0)

    def number(layout: Layout) -> int | None:
        if isinstance(layout.chunk, str):
            return 0 if backward else last
        return layout.chunk if layout.chunk is None else layout.chunk + backward

    return number


def fifo(
    program: Program, seconds: Callable[[], Mapping[str, float]] | None = None, *, host_runs_compute: bool = False
) -> Program:
    """Return the program as it was built, chunk after chunk: what a layer does that was cut into chunks and nothing else."""
    return program


def early(
    program: Program, seconds: Callable[[], Mapping[str, float]] | None = None, *, host_runs_compute: bool = False
) -> Program:
    """Return the program with every movement issued as soon as what it reads is there, and computing chunk after chunk.

    Where movements are not encoded this comes close to ScheMoE's order (see `optsche.py`): all dispatches first, then expert by
    expert, each result sent off at once. With encoding it waits for each chunk before it encodes the next.
    """
    slots = {slot.name: slot for slot in program.slots}
    number, is_replicated = chunk_numbers(program), brings_replicated_weights(program)

    def rank(task: Task) -> tuple[bool, int]:
        chunk = number(slots[task.writes[0]].layout)
        if is_replicated(task):
            return True, 0 if task.lane is Lane.INTER else chunk or 0
        return task.op not in (Op.MOVE, Op.HOP), -1 if chunk is None else chunk

    return replace(program, tasks=in_order(program, rank))
