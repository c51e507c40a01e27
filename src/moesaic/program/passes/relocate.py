"""Relocation: results are sent to the ranks that hold their samples next, instead of back to their
origins.

NetMoE (Liu et al., ICLR 2025), section 4 and Algorithm 1: the combine of one layer moves its
samples to the ranks from which the next layer's dispatch is cheap. The pass changes layouts only:
rows return to the new homes of their samples instead of their origins. The index of the tokens is
sent from origin to new home too, 4 bytes per copy, since the new home has not routed these tokens.
Sums, routing weights and experts are unchanged. The transpose returns gradients by the same paths.

Since only layouts change, the pass may run before or after lowering, order and transpose, forward
or backward. A slot is a named value of a program; its layout says which rows it has on which rank.
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
            encoded and ordered. The argument `parts` of the `LayoutIndex` of its samples must be
            the number of the program's chunks.

    Raises:
        InputError: for a program in which results do not go from the experts to one rank in one
            movement.
    """
    # The task between rows and tokens at the samples' home: the combine, backward its transpose.
    is_backward = cotangent("y") in program.inputs
    if is_backward:
        at_home = next(task for task in program.tasks if task.op is Op.PERMUTE)
        rows = at_home.writes[0]
    else:
        at_home = next(task for task in program.tasks if task.op is Op.COMBINE)
        rows = at_home.reads[0]
    _check(program, rows)
    home_names = _parts(program, rows)
    slots = list[Slot]()
    for slot in program.slots:
        if slot.name in home_names:
            slot = replace(slot, layout=_placed(slot.layout))
        slots.append(slot)
    value, index = at_home.reads
    index_slot = program.slot(index)
    slots.append(
        Slot(name=INDEX, kind=Kind.INDEX, layout=_placed(index_slot.layout), state=index_slot.state)
    )

    tasks = list(program.tasks)
    tasks[tasks.index(at_home)] = replace(at_home, reads=(value, INDEX))
    inputs = program.inputs
    if is_backward:  # the forward program has moved the index
        inputs += (INDEX,)
    else:
        tasks.insert(_first_that_sends(tasks, home_names), _index_move(index))
    name = f"{program.name}, relocating"
    return replace(program, name=name, slots=tuple(slots), tasks=tuple(tasks), inputs=inputs)


def _first_that_sends(tasks: list[Task], names: set[str]) -> int:
    """Return the position of the first task that writes one of some slots, or is a part of a
    movement to one."""
    for number, task in enumerate(tasks):
        if names.intersection(task.writes) or names.intersection(task.of or ()):
            return number
    raise AssertionError(f"no task writes {sorted(names)}")


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
    if any(layouts[task.reads[0]].flow == "weights" for task in program.moves()):
        raise InputError(
            "sample placement clashes with plan.gather_weights, under which copies visit some "
            "shards only: leave it unset"
        )
    parts = _parts(program, rows)
    groups = {
        task.group
        for task in program.tasks
        if _moves(task) and parts.intersection((task.reads[0], *task.writes))
    }
    if layouts[rows] != Layout() or groups != {("ep", "etp")}:
        raise InputError(
            "sample placement needs plan.schedule=s1, whose results go from the experts to one "
            f"rank in one movement, got {program.name}: choose s1; with mesh.tp=1 it sends the "
            "same rows as the others"
        )


def _moves(task: Task) -> bool:
    """Return whether a task is a movement, or the first or the last part of one."""
    return task.op in (Op.MOVE, Op.PACK, Op.UNPACK)


def _parts(program: Program, rows: str) -> set[str]:
    """Return a slot, the slots from which it is joined or into which it is split, and so on."""
    names = {rows}
    num_before = 0
    while len(names) > num_before:
        num_before = len(names)
        for task in program.tasks:
            if task.op is Op.JOIN and task.writes[0] in names:
                names.update(task.reads)
            if task.op is Op.TAKE and task.reads[0] in names:
                names.update(task.writes)
    return names


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
