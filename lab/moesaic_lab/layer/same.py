"""Finds plans that do the same on a mesh, to time them once. Schedules can differ in name only if a
group is a single rank.

A plan is compiled to programs of tasks that read and write slots (`moesaic.program.task`). The
layout of a slot says over which axes of the mesh its rows are spread. An axis of one rank makes no
difference, so it is left out of what is compared.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace

from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.program.task import Layout, Op, Slot, Task
from moesaic.program.validate import reduces


def distinct(
    plans: Mapping[str, Compiled], *, in_order: bool = False
) -> tuple[dict[str, Compiled], dict[str, str]]:
    """Return the plans that differ, and a mapping from each other plan's name to the name of the
    plan that does the same.

    Args:
        plans: plans of one mesh, by name.
        in_order: whether plans differ that do the same in another order.
    """
    first_by_work: dict[Hashable, str] = {}
    same = {}
    for name, compiled in plans.items():
        first = first_by_work.setdefault(work(compiled, in_order), name)
        if first != name:
            same[name] = first
    return {name: plans[name] for name in first_by_work.values()}, same


def work(compiled: Compiled, in_order: bool) -> Hashable:
    """Return a key of what a plan does: its tasks without their names, omitting tasks that do
    nothing on its mesh.

    A task that does nothing can still keep two movements from being sent as one (see
    `program/joined_messages.py`). So plans with the same key send the same bytes, but possibly
    split into different messages. Tasks are identified by the layouts that they read and write,
    which also determine the tasks that they wait for.
    """
    key: list[Hashable] = []
    for program in (compiled.forward, compiled.backward):
        slots = {slot.name: slot for slot in program.slots}
        tasks = [
            _work_of(task, slots, compiled.grid)
            for task in program.tasks
            if not _is_idle(task, compiled.grid)
        ]
        key.append(tuple(tasks) if in_order else frozenset(Counter(tasks).items()))
    return tuple(key)


def _is_idle(task: Task, grid: Grid) -> bool:
    """Return whether a task does nothing on a mesh."""
    if task.op not in (Op.MOVE, Op.SCALE):
        return False
    return math.prod(grid.size(axis) for axis in task.group) == 1


def _work_of(task: Task, slots: Mapping[str, Slot], grid: Grid) -> Hashable:
    """Return what a task does on a mesh, equal for tasks that do the same."""
    # the slots that the task connects: those that `of` names, else what it reads and writes
    ends = task.of or (task.reads[0], task.writes[0])
    source, target = (slots[name] for name in ends)
    reads = tuple(_where(slots[name].layout, grid) for name in task.reads)
    writes = tuple(_where(slots[name].layout, grid) for name in task.writes)
    group = tuple(axis for axis in task.group if grid.size(axis) > 1)
    sums = task.op in (Op.MOVE, Op.UNPACK) and grid.etp > 1 and reduces(source, target)
    kinds = tuple(slots[name].kind for name in (*task.reads, *task.writes))
    power = task.power if task.op is Op.SCALE else 0
    return (
        task.op,
        task.lane,
        group,
        task.link,
        task.codec,
        task.hop,
        sums,
        power,
        kinds,
        reads,
        writes,
    )


@functools.cache
def _where(layout: Layout, grid: Grid) -> Layout:
    """Return a layout without the parts that make no difference: axes of one rank, and a
    tensor-parallel group of one."""
    spread = tuple(axis for axis in layout.spread if grid.size(axis) > 1)
    return replace(layout, spread=spread, whole_tp=layout.whole_tp and grid.tp > 1)
