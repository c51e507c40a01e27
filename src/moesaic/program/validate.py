"""Checks that every program must pass, whatever pass produced it. A violation is a bug in a pass
and names the task and slot.

A slot is a named value of a program, with a state per axis of the mesh: how its values on the ranks
of the axis relate, sharded, replicated, partial or identical (`State` in `task.py`). A movement is
a task that takes rows from one slot to another between ranks.
"""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from moesaic.program.grid import Axis
from moesaic.program.task import Layout, Op, Program, Slot, State, Task

_CHANGES: dict[tuple[State, State], str] = {
    (State.SHARDED, State.SHARDED): "exchange",
    (State.SHARDED, State.REPLICATED): "gather",
    (State.SHARDED, State.IDENTICAL): "gather",
    (State.IDENTICAL, State.SHARDED): "slice",
    (State.IDENTICAL, State.REPLICATED): "share",
    (State.PARTIAL, State.SHARDED): "reduce_scatter",
    (State.PARTIAL, State.IDENTICAL): "all_reduce",
    (State.PARTIAL, State.REPLICATED): "all_reduce",
}
"""Allowed changes of state on an axis of a movement's group, with the name of the collective that
performs each. The table contains the transpose of each entry, which is why the backward program can
be derived."""


class ProgramError(Exception):
    """Raised for a program that cannot be executed."""


def validate(program: Program) -> None:
    """Check a program.

    Raises:
        ProgramError: if tasks depend on each other in a cycle; a slot is unknown, written twice or
            read before it is written; an output is never written; no collective performs a
            movement's change of state; or the experts' output is not partial.
    """
    known = {slot.name for slot in program.slots}
    written = set(program.inputs)
    names: set[str] = set()
    for task in program.tasks:
        if task.name in names:
            raise ProgramError(
                f"two tasks are called {task.name}: give each task a name of its own"
            )
        names.add(task.name)
        for name in (*task.reads, *task.writes):
            if name not in known:
                raise ProgramError(
                    f"task {task.name}: slot {name} is not declared: add a Slot of this name"
                )
        for name in task.reads:
            if name not in written:
                cycle = _cycle(program, task)
                if cycle:
                    path = " -> ".join((*cycle, cycle[0]))
                    raise ProgramError(
                        f"tasks wait for each other: {path}: let one of them read another slot"
                    )
                raise ProgramError(
                    f"task {task.name} reads {name} before anything writes it: put its writer first"
                )
        for name in task.writes:
            if name in written:
                raise ProgramError(
                    f"task {task.name} writes {name}, which is written already: write another slot"
                )
            written.add(name)
        if task.op is Op.MOVE:
            collective(program, task.name)
        if task.op is Op.EXPERT:
            _check_expert(program, task)
    for name in program.outputs:
        if name not in written:
            raise ProgramError(
                f"output {name} is never written: let a task write it, or take it out of the "
                "outputs"
            )


def validate_schedule(program: Program) -> None:
    """Check what a schedule builds, before any pass changes it.

    Raises:
        ProgramError: if `validate` refuses it; a movement names an unknown axis, or its states and
            layouts do not change together; a slot is never read; or the output is not laid out like
            the input.
    """
    if not isinstance(program, Program):
        raise ProgramError(f"a schedule returned {program!r}: return build.build(...)")
    where = f"schedule {program.name}"
    for task in program.moves():
        unknown = [axis for axis in task.group if axis not in get_args(Axis)]
        if unknown:
            raise ProgramError(
                f"{where}: task {task.name} moves over {task.group!r}: give a tuple of axes"
            )
    validate(program)
    for task in program.moves():
        _check_layouts(program, task, where)
    used = {*program.outputs, *(name for task in program.tasks for name in task.reads)}
    for task in program.tasks:
        for name in task.writes:
            if name not in used:
                raise ProgramError(f"{where}: nothing reads {name}: read it, or take its task out")
    x = program.slot("x")
    y = program.slot(program.outputs[0])
    if (x.kind, x.layout, x.state) != (y.kind, y.layout, y.state):
        raise ProgramError(
            f"{where}: x has {_layout(x)} and {_states(x)}, but {y.name} has {_layout(y)} and "
            f"{_states(y)}: let it be like x"
        )


def _states(slot: Slot) -> str:
    """Return a slot's states in words."""
    return ", ".join(f"{axis} {state.name}" for axis, state in slot.state) or "sharded"


def _check_layouts(program: Program, task: Task, where: str) -> None:
    """Raise ProgramError if a movement changes a state but not the rows, or `whole_tp` but no
    state."""
    source = program.slot(task.reads[0])
    target = program.slot(task.writes[0])
    if source.layout == target.layout:  # the same rows: none may be added or left out
        word = collective(program, task.name)
        if {"gather", "slice", "reduce_scatter"}.intersection(word.split("+")):
            raise ProgramError(
                f"{where}: task {task.name} is a {word}, but {source.name} and {target.name} both "
                f"have {_layout(source)}: change the layout too"
            )
    elif source.layout.whole_tp != target.layout.whole_tp and source.state == target.state:
        raise ProgramError(
            f"{where}: task {task.name} goes from {_layout(source)} to {_layout(target)} without "
            "a change of state: give the states that change"
        )


def _layout(slot: Slot) -> str:
    """Return a slot's layout as code, without fields that have their defaults."""
    default = Layout()
    arguments = []
    for field in fields(Layout):
        value = getattr(slot.layout, field.name)
        if value != getattr(default, field.name):
            arguments.append(f"{field.name}={value!r}")
    return f"Layout({', '.join(arguments)})"


def _cycle(program: Program, start: Task) -> tuple[str, ...]:
    """Return the names of tasks in a dependency cycle through `start`, () if there is none."""
    # Depth-first, from each task to the writers of what it reads.
    writers = {name: task for task in program.tasks for name in task.writes}
    paths: list[tuple[Task, ...]] = [(start,)]
    visited = {start.name}
    while paths:
        path = paths.pop()
        for name in path[-1].reads:
            writer = writers.get(name)
            if writer is start:  # the path goes from readers to writers
                return tuple(task.name for task in reversed(path))
            if writer is not None and writer.name not in visited:
                visited.add(writer.name)
                paths.append((*path, writer))
    return ()


def _check_expert(program: Program, task: Task) -> None:
    """Raise ProgramError unless the experts' output is partial on exactly the axes on which their
    rows are replicated."""
    rows = program.slot(task.reads[0])
    out = program.slot(task.writes[0])
    # Shards of an expert read the same rows, and each gives a part of the sum.
    replicated = {axis for axis, state in rows.state if state is State.REPLICATED}
    partial = {axis for axis, state in out.state if state is State.PARTIAL}
    if replicated != partial:
        raise ProgramError(
            f"task {task.name}: shards of an expert give partial sums over {sorted(replicated)}, "
            f"but {out.name} is partial over {sorted(partial)}: declare it so"
        )


def reduces(source: Slot, target: Slot) -> bool:
    """Return whether a movement sums: the source is partial on an axis on which the target is
    not."""
    return any(
        state is State.PARTIAL and target.on(axis) is not State.PARTIAL
        for axis, state in source.state
    )


def collective(program: Program, task_name: str) -> str:
    """Return the name of the collective that a movement performs.

    One of exchange, gather, slice, share, reduce_scatter, all_reduce and keep, or several joined by
    "+". An exchange and a gather in one is deliver; an exchange and a reduce-scatter in one is
    collect.

    Raises:
        ProgramError: if no collective performs its change of states.
    """
    task = next(task for task in program.tasks if task.name == task_name)
    source = program.slot(task.reads[0])
    target = program.slot(task.writes[0])
    words = set()
    axes = {axis for axis, _ in (*source.state, *target.state)} | set(task.group)
    for axis in sorted(axes):
        before = source.on(axis)
        after = target.on(axis)
        is_exchanged = axis in task.group and before is State.SHARDED
        if before is after and not is_exchanged:
            continue
        if (before, after) not in _CHANGES:
            allowed = sorted(to.value for at, to in _CHANGES if at is before)
            remedy = f"let {source.name} be in another state"
            if allowed:
                remedy = f"let {target.name} be {', '.join(allowed)}"
            raise ProgramError(
                f"task {task_name}: no collective takes {axis} from {before.value} to "
                f"{after.value}: {remedy}"
            )
        words.add(_CHANGES[(before, after)])
    if words == {"exchange", "gather"}:
        return "deliver"
    if words == {"exchange", "reduce_scatter"}:
        return "collect"
    return "+".join(sorted(words)) or "keep"
