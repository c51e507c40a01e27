"""Relocation: results are sent to the ranks that hold their samples next, instead of back to their
origins.

NetMoE (Liu et al., ICLR 2025), section 4 and Algorithm 1: the combine of one layer moves its
samples to the ranks from which the next layer's dispatch is cheap. The pass changes layouts only:
rows return to the new homes of their samples instead of their origins. The index of the tokens is
sent from origin to new home too, 4 bytes per copy, since the new home has not routed these tokens.
Sums, routing weights and experts are unchanged. The transpose returns gradients by the same paths.

Since only layouts change, the pass may run before or after lowering, order and transpose, forward
or backward.
"""

from __future__ import annotations

from dataclasses import fields, replace

from moesaic.errors import InputError
from moesaic.program.sample_layouts import Placed
from moesaic.program.task import ONCE, Kind, Lane, Layout, Op, Program, Slot, Stage, Task
from moesaic.program.transpose import cotangent

INDEX = "index_home"
"""The slot with the tokens' index at the samples' new homes."""


def relocate(program: Program) -> Program:
    """Return the program with its results sent to the samples' new homes.

    Args:
        program: made by `s1`, forward or its transpose; it may be chunked, split by peers, routed,
            encoded and ordered. The `LayoutIndex` of its samples must have as many parts as the
            program has chunks.

    Raises:
        InputError: for a program in which results do not go from the experts to one rank in one
            movement.
    """
    is_backward = cotangent("y") in program.inputs
    boundary = next(
        task for task in program.tasks if task.op is (Op.PERMUTE if is_backward else Op.COMBINE)
    )
    rows = boundary.writes[0] if is_backward else boundary.reads[0]
    _check(program, rows)
    home_names = _parts(program, rows)
    slots = tuple(
        replace(slot, layout=_placed(slot.layout)) if slot.name in home_names else slot
        for slot in program.slots
    )
    index_slot = program.slot(boundary.reads[1])
    home_index = Slot(
        name=INDEX, kind=Kind.INDEX, layout=_placed(index_slot.layout), state=index_slot.state
    )
    reads = (boundary.reads[0], INDEX)
    tasks = [replace(task, reads=reads) if task is boundary else task for task in program.tasks]
    inputs = (*program.inputs, INDEX) if is_backward else program.inputs
    if not is_backward:
        first = next(
            number
            for number, task in enumerate(tasks)
            if {*task.writes, *(task.of or ())} & home_names
        )
        tasks.insert(first, _index_move(index_slot.name))
    name = f"{program.name}, relocating"
    return replace(
        program, name=name, slots=(*slots, home_index), tasks=tuple(tasks), inputs=inputs
    )


def _check(program: Program, rows: str) -> None:
    """Raise InputError unless the program sends results from the experts to their origins in one
    movement."""
    layouts = {slot.name: slot.layout for slot in program.slots}
    if any(isinstance(layout, Placed) for layout in layouts.values()):
        raise InputError("relocate: the program relocates already: apply the pass once")
    if any(layout.flow in ONCE for layout in layouts.values()):
        raise InputError(
            "sample placement clashes with plan.all_to_all=multicast, whose results return "
            "through the nodes to which tokens were sent: choose another plan.all_to_all"
        )
    if any(layout.chunk in ("replicated", "here") for layout in layouts.values()):
        raise InputError(
            "sample placement clashes with replication, which cuts runs of copies by helper, not "
            "by sample: leave replication none"
        )
    if any(
        task.op is Op.MOVE and layouts[task.reads[0]].flow == "weights" for task in program.tasks
    ):
        raise InputError(
            "sample placement clashes with plan.gather_weights, under which copies visit some "
            "shards only: leave it unset"
        )
    groups = {
        task.group
        for task in program.tasks
        if {task.reads[0], *task.writes} & _parts(program, rows) and _moves(task)
    }
    if layouts[rows] != Layout() or groups != {("ep", "etp")}:
        raise InputError(
            "sample placement needs plan.schedule=s1, whose results go from the experts to one "
            f"rank in one movement, got {program.name}: choose s1; with mesh.tp=1 it sends the "
            "same rows as the others"
        )


def _moves(task: Task) -> bool:
    return task.op in (Op.MOVE, Op.PACK, Op.UNPACK)


def _parts(program: Program, rows: str) -> set[str]:
    """Return a slot, the slots from which it is joined or into which it is split, and so on."""
    names = {rows}
    while True:
        joined = {
            name
            for task in program.tasks
            if task.op is Op.JOIN and task.writes[0] in names
            for name in task.reads
        }
        split_from = {
            name
            for task in program.tasks
            if task.op is Op.TAKE and task.reads[0] in names
            for name in task.writes
        }
        if joined | split_from <= names:
            return names
        names |= joined | split_from


def _placed(layout: Layout) -> Placed:
    """Return the layout of the pieces, from any origin, whose samples have the rank as their new
    home."""
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return Placed(**{**values, "spread": ("ep", "etp")})


def _index_move(source: str) -> Task:
    """Return the task that moves the index of rows to where samples go."""
    return Task(
        name=INDEX,
        op=Op.MOVE,
        reads=(source,),
        writes=(INDEX,),
        stage=Stage.COMBINE,
        lane=Lane.INTER,
        group=("ep", "etp"),
    )
