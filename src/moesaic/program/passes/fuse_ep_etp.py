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
    pair = _next_pair(program)
    while pair is not None:
        program = _fused(program, *pair)
        pair = _next_pair(program)
    return program


def _permute_first(program: Program) -> Program:
    """Return the program with the permutation before the all-gather over etp: a rank copies its own
    tokens to rows, then gathers the rows in place of tokens and index."""
    found = _gathered_permute(program)
    if found is None:
        return program
    permute, tokens, index = found
    rows = program.slot(permute.writes[0])
    own_rows = replace(
        rows,
        name=f"{rows.name}_own",
        layout=program.slot(index).layout,
        state=program.slot(tokens).state,
    )
    own = own_rows.name
    own_permute = replace(permute, name=own, reads=(tokens, index), writes=(own,))
    gather = Task(
        name=rows.name,
        op=Op.MOVE,
        reads=(own,),
        writes=(rows.name,),
        stage=permute.stage,
        lane=Lane.INTRA,
        group=("etp",),
    )
    tasks: list[Task] = []
    for task in program.tasks:
        if task is permute:
            tasks += [own_permute, gather]
        elif task.writes[0] not in permute.reads:
            tasks.append(task)
    slots = tuple(slot for slot in program.slots if slot.name not in permute.reads)
    return replace(program, slots=(*slots, own_rows), tasks=tuple(tasks))


def _gathered_permute(program: Program) -> tuple[Task, str, str] | None:
    """Return the first permutation of which movements over etp alone write both tokens and index,
    and the slots that these two movements read: a rank's own tokens and index."""
    gathers = {task.writes[0]: task for task in program.moves() if task.group == ("etp",)}
    for task in program.tasks:
        if task.op is Op.PERMUTE and gathers.keys() >= set(task.reads):
            gathered_tokens, gathered_index = task.reads
            tokens = gathers[gathered_tokens].reads[0]
            index = gathers[gathered_index].reads[0]
            return task, tokens, index
    return None


def _next_pair(program: Program) -> tuple[Task, Task] | None:
    """Return two movements over ep and etp of which only the second reads what the first writes."""
    readers: dict[str, list[Task]] = {}
    for task in program.tasks:
        for name in task.reads:
            readers.setdefault(name, []).append(task)
    for first in program.tasks:
        readers_of_first = readers.get(first.writes[0], [])
        if len(readers_of_first) != 1:
            continue
        second = readers_of_first[0]
        if _may_fuse(program, first) and _may_fuse(program, second):
            return first, second
    return None


def _may_fuse(program: Program, task: Task) -> bool:
    """Return whether a task moves copies over ep or etp only, and sends bytes: identical rows are
    not sent."""
    source = program.slot(task.reads[0])
    if task.op is not Op.MOVE or source.kind is Kind.WEIGHT or source.layout.flow != "copies":
        return False
    target = program.slot(task.writes[0])
    rows_are_there = source.on("etp") is State.IDENTICAL and target.on("etp") is State.REPLICATED
    return set(task.group) <= _SHARDS and not rows_are_there


def _fused(program: Program, first: Task, second: Task) -> Program:
    """Return the program with two movements made one over the axes of both."""
    axes: tuple[Axis, ...] = ("ep", "etp")
    group = tuple(axis for axis in axes if axis in first.group or axis in second.group)
    lane = Lane.INTER if "ep" in group else Lane.INTRA
    fused = replace(second, reads=first.reads, group=group, lane=lane)
    tasks = tuple(fused if task is second else task for task in program.tasks if task is not first)
    slots = tuple(slot for slot in program.slots if slot.name != first.writes[0])
    name = program.name if "fused" in program.name else f"{program.name}, fused"
    return replace(program, name=name, slots=slots, tasks=tasks)
