"""Splits an all-reduce into reduce-scatter and all-gather.

Each rank then sends 2 (n - 1) / n times the rows; sending all rows to all ranks takes n - 1 times.
The pass runs after the transpose, because the transpose of an all-reduce whose result is used
identically costs nothing, unlike that of its halves.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.program.task import Kind, Layout, Op, Program, Task
from moesaic.program.validate import reduces


def halve_reduce(program: Program) -> Program:
    """Return the program with every all-reduce of rows or tokens done in two movements.

    Each rank sums the runs of which it is the origin, then sends the sums to the other ranks of the
    group.
    """
    slots = list(program.slots)
    tasks: list[Task] = []
    for task in program.tasks:
        source = program.slot(task.reads[0])
        target = program.slot(task.writes[0])
        is_all_reduce = (
            task.op is Op.MOVE
            and source.kind is not Kind.WEIGHT
            and source.layout == target.layout
            and reduces(source, target)
        )
        share = _share(source.layout, task) if is_all_reduce else None
        if share is None:
            tasks.append(task)
            continue
        name = f"{target.name}/sums"
        state = tuple((axis, value) for axis, value in target.state if axis not in task.group)
        slots.append(replace(target, name=name, layout=share, state=state))
        reduce_scatter = replace(task, name=name, writes=(name,))
        all_gather = replace(task, reads=(name,))
        tasks += [reduce_scatter, all_gather]
    return replace(program, slots=tuple(slots), tasks=tuple(tasks))


def _share(layout: Layout, task: Task) -> Layout | None:
    """Return the layout with each rank of a movement's group as the origin of its own rows; None if
    the layout does not allow it."""
    if len(task.group) != 1:  # a sum over several axes stays one movement
        return None
    axis = task.group[0]
    # All ranks over the axes of `spread` are origins of a rank's rows: without this axis, on it
    # only the rank itself is.
    if axis in layout.spread:
        return replace(layout, spread=tuple(other for other in layout.spread if other != axis))
    # With `whole_tp` an origin stands for its tensor-parallel group (whose ranks are those of etp,
    # if a schedule sums over etp here): without it, for itself.
    if layout.whole_tp and axis in ("tp", "etp"):
        return replace(layout, whole_tp=False)
    return None
