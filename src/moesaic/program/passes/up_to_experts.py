"""The part of a forward program that has to run again when only what the experts keep is wanted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from moesaic.program.task import Op, Program


def up_to_experts(program: Program, wanted: Collection[str]) -> Program:
    """Return the tasks without which the experts cannot run or a slot is not written: dispatch, and no combine.

    All ranks drop the same tasks, so what is left still matches.

    Args:
        program: a forward program, in the order in which it runs.
        wanted: slots, those that the backward program reads.
    """
    slots, tasks = set(wanted), []
    for task in reversed(program.tasks):
        if task.op is Op.EXPERT or slots.intersection(task.writes):
            tasks.append(task)
            slots.update(task.reads)
    return replace(
        program, name=f"{program.name}, up to the experts", tasks=tuple(reversed(tasks)), outputs=tuple(wanted)
    )
