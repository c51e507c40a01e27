"""The orders without a method: as built, and every movement as early as can be. They read nothing but the program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from moesaic.program.order.graph import brings_replicated_weights, chunk_numbers, in_order
from moesaic.program.task import Lane, Op, Program, Task


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
