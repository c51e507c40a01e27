"""Doing a stretch of a program part by part: what pipelining by capacity, by peers and by phases have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moesaic.program.task import Kind, Layout, Op, Program, Slot, Stage, Task


@dataclass(frozen=True)
class Part:
    """One part of every run in a stretch."""

    suffix: str
    """Added to the names of slots and tasks."""
    cut: Callable[[Layout], Layout]
    """From the layout of a slot to that of its part."""


def split_stretch(program: Program, names: Sequence[str], parts: Sequence[Part]) -> Program:
    """Return the program with a stretch of its tasks done part by part.

    Slots that enter are taken apart before it, slots that leave are joined after it. Weights are whole in every part;
    tasks that only prepare weights move before the stretch.

    Args:
        program: forward or backward.
        names: of the tasks of the stretch, in order.
        parts: a partition of every run.
    """
    chosen = set(names)
    kinds = {slot.name: slot.kind for slot in program.slots}
    stretch = [task for task in program.tasks if task.name in chosen and kinds[task.writes[0]] is not Kind.WEIGHT]
    inside = {task.name for task in stretch}
    before, after = _around(program, inside)
    made = list(dict.fromkeys(name for task in stretch for name in task.writes))
    read_later = {name for task in after for name in task.reads} | set(program.outputs)
    leaving = [name for name in made if name in read_later]
    entering = list(dict.fromkeys(name for task in stretch for name in task.reads if name not in made))
    entering = [name for name in entering if kinds[name] is not Kind.WEIGHT]
    cut = set(entering) | set(made)
    slots = [slot for slot in program.slots if slot.name not in set(made) - set(leaving)]
    slots += [_part_of(program.slot(name), part) for name in (*entering, *made) for part in parts]
    dispatch, combine = stretch[0].stage, stretch[-1].stage
    takes = [_gathered(Op.TAKE, f"take-{name}", (name,), _names(name, parts), dispatch) for name in entering]
    joins = [_gathered(Op.JOIN, f"join-{name}", _names(name, parts), (name,), combine) for name in leaving]
    pieces = [_part_task(task, part, cut) for part in parts for task in stretch]
    return replace(program, slots=tuple(slots), tasks=(*before, *takes, *pieces, *joins, *after))


def _around(program: Program, inside: set[str]) -> tuple[list[Task], list[Task]]:
    """Split the other tasks into those that may stand before the stretch and those that read from it."""
    deferred_wgrad = {name for task in program.tasks if task.name in inside for name in task.writes}
    before: list[Task] = []
    after: list[Task] = []
    for task in program.tasks:
        if task.name in inside:
            continue
        if deferred_wgrad.intersection(task.reads):
            deferred_wgrad.update(task.writes)
            after.append(task)
        else:
            before.append(task)
    return before, after


def _part_of(slot: Slot, part: Part) -> Slot:
    return replace(slot, name=slot.name + part.suffix, layout=part.cut(slot.layout))


def _part_task(task: Task, part: Part, cut: set[str]) -> Task:
    return replace(
        task,
        name=task.name + part.suffix,
        reads=tuple(name + part.suffix if name in cut else name for name in task.reads),
        writes=tuple(name + part.suffix for name in task.writes),
    )


def _names(name: str, parts: Sequence[Part]) -> tuple[str, ...]:
    return tuple(name + part.suffix for part in parts)


def _gathered(op: Op, name: str, reads: tuple[str, ...], writes: tuple[str, ...], stage: Stage) -> Task:
    return Task(name=name, op=op, reads=reads, writes=writes, stage=stage)
