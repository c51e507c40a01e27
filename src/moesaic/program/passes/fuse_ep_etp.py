"""Fuses consecutive movements over ep and etp into one movement over both.

Parm (INFOCOM 2024), section III: an all-gather over the expert shards and an all-to-all over ep
become one all-to-all over both. So do an all-reduce, an all-to-all and a split. This takes fewer
steps, but sends more bytes over the ep links if the first movement had reduced the number of rows.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.program.grid import Axis
from moesaic.program.task import Kind, Lane, Op, Program, State, Task

_SHARDS: frozenset[Axis] = frozenset({"ep", "etp"})


def fuse_ep_etp(program: Program) -> Program:
    """Return the program with every chain of movements over ep and etp replaced by one movement.

    A permutation between an all-gather of tokens and an exchange of their copies is first moved
    before the all-gather. Programs without such chains (s1, s2, ted's dispatch) are returned
    unchanged.
    """
    program = _permute_first(program)
    while (pair := _next_pair(program)) is not None:
        program = _fused(program, *pair)
    return program


def _permute_first(program: Program) -> Program:
    """Copy tokens to rows before an all-gather over etp, if tokens and index are gathered in the
    same way."""
    writers = {task.writes[0]: task for task in program.tasks}
    for task in program.tasks:
        if task.op is not Op.PERMUTE:
            continue
        writers_read = [writers.get(name) for name in task.reads]
        if not all(
            move is not None and move.op is Op.MOVE and move.group == ("etp",)
            for move in writers_read
        ):
            continue
        tokens, index = (move.reads[0] for move in writers_read if move is not None)
        rows = program.slot(task.writes[0])
        own = f"{task.writes[0]}_own"
        own_rows = replace(
            rows, name=own, layout=program.slot(index).layout, state=program.slot(tokens).state
        )
        gather = Task(
            name=rows.name,
            op=Op.MOVE,
            reads=(own,),
            writes=(rows.name,),
            stage=task.stage,
            lane=Lane.INTRA,
            group=("etp",),
        )
        permute = replace(task, name=own, reads=(tokens, index), writes=(own,))
        removed = set(task.reads)
        tasks: list[Task] = []
        for other in program.tasks:
            if other is task:
                tasks += [permute, gather]
            elif other.writes[0] not in removed:
                tasks.append(other)
        slots = tuple(slot for slot in program.slots if slot.name not in removed)
        return replace(program, slots=(*slots, own_rows), tasks=tuple(tasks))
    return program


def _next_pair(program: Program) -> tuple[Task, Task] | None:
    """Return two movements over ep and etp of which only the second reads what the first writes."""
    readers: dict[str, list[Task]] = {}
    for task in program.tasks:
        for name in task.reads:
            readers.setdefault(name, []).append(task)
    for first in program.tasks:
        its_readers = readers.get(first.writes[0], [])
        if (
            len(its_readers) == 1
            and _may_fuse(program, first)
            and _may_fuse(program, its_readers[0])
        ):
            return first, its_readers[0]
    return None


def _may_fuse(program: Program, task: Task) -> bool:
    """Return whether a task moves copies over ep or etp only, and sends bytes: identical rows are
    not sent."""
    source = program.slot(task.reads[0])
    if task.op is not Op.MOVE or source.kind is Kind.WEIGHT or source.layout.flow != "copies":
        return False
    shares = (
        source.on("etp") is State.IDENTICAL
        and program.slot(task.writes[0]).on("etp") is State.REPLICATED
    )
    return set(task.group) <= _SHARDS and not shares


def _fused(program: Program, first: Task, second: Task) -> Program:
    """Return the program with two movements made one over the axes of both."""
    group: tuple[Axis, ...] = tuple(
        axis for axis in ("ep", "etp") if axis in (*first.group, *second.group)
    )
    lane = Lane.INTER if "ep" in group else Lane.INTRA
    one = replace(second, reads=first.reads, group=group, lane=lane)
    tasks = tuple(one if task is second else task for task in program.tasks if task is not first)
    slots = tuple(slot for slot in program.slots if slot.name != first.writes[0])
    name = program.name if "fused" in program.name else f"{program.name}, fused"
    return replace(program, name=name, slots=slots, tasks=tasks)
