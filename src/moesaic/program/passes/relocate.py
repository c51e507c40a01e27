"""Relocation: results go to the ranks where their samples live next, instead of back to where they came from.

NetMoE (Liu et al., ICLR 2025), section 4 and Algorithm 1: the gather of one layer takes its samples to where the scatter of
the next one is cheap. The pass changes layouts and nothing else: where rows were back at their origins, they are at their
samples' new homes. The tokens' places travel there too, straight from origin to new home, 4 bytes a copy, since the new home
has not routed these tokens. Sums, routing weights and experts stay as they are, and the transpose takes gradients back along
the same ways.

Since only layouts change, it comes before or after lowering, order and transpose, forward or backward.
"""

from __future__ import annotations

from dataclasses import fields, replace

from moesaic.errors import InputError
from moesaic.program.placed import Placed
from moesaic.program.task import ONCE, Kind, Lane, Layout, Op, Program, Slot, Stage, Task
from moesaic.program.transpose import cotangent

INDEX = "index_home"
"""The slot with the tokens' places at the samples' new homes."""


def relocate(program: Program) -> Program:
    """Return the program with its results delivered to the samples' new homes.

    Args:
        program: made by `s1`; chunked, split by peers, routed, encoded, ordered, or not; forward, or its transpose.
            the `LayoutIndex` of its samples must be made for as many parts as it has chunks.

    Raises:
        InputError: for a program in which results do not go from the experts to one rank in one movement.
    """
    is_backward = cotangent("y") in program.inputs
    between = next(task for task in program.tasks if task.op is (Op.PERMUTE if is_backward else Op.COMBINE))
    rows = between.writes[0] if is_backward else between.reads[0]
    _check(program, rows)
    home = _parts(program, rows)
    slots = tuple(replace(slot, layout=_placed(slot.layout)) if slot.name in home else slot for slot in program.slots)
    held = program.slot(between.reads[1])
    index = Slot(name=INDEX, kind=Kind.INDEX, layout=_placed(held.layout), state=held.state)
    reads = (between.reads[0], INDEX)
    tasks = [replace(task, reads=reads) if task is between else task for task in program.tasks]
    inputs = (*program.inputs, INDEX) if is_backward else program.inputs
    if not is_backward:
        first = next(at for at, task in enumerate(tasks) if {*task.writes, *(task.of or ())} & home)
        tasks.insert(first, _index_move(held.name))
    name = f"{program.name}, relocating"
    return replace(program, name=name, slots=(*slots, index), tasks=tuple(tasks), inputs=inputs)


def _check(program: Program, rows: str) -> None:
    """Raise InputError for a program that delivers results in another way than from experts to origins at once."""
    layouts = {slot.name: slot.layout for slot in program.slots}
    if any(isinstance(layout, Placed) for layout in layouts.values()):
        raise InputError("relocate: the program relocates already: apply the pass once")
    if any(layout.flow in ONCE for layout in layouts.values()):
        raise InputError(
            "sample placement clashes with plan.all_to_all=multicast, whose results come back by the nodes that tokens "
            "visited: choose another plan.all_to_all"
        )
    if any(layout.chunk in ("replicated", "here") for layout in layouts.values()):
        raise InputError(
            "sample placement clashes with replication, which cuts runs of copies by helper, not by "
            "sample: leave replication none"
        )
    if any(task.op is Op.MOVE and layouts[task.reads[0]].flow == "weights" for task in program.tasks):
        raise InputError(
            "sample placement clashes with plan.gather_weights, under which copies visit some shards only: leave it unset"
        )
    groups = {
        task.group for task in program.tasks if {task.reads[0], *task.writes} & _parts(program, rows) and _moves(task)
    }
    if layouts[rows] != Layout() or groups != {("ep", "etp")}:
        raise InputError(
            "sample placement needs plan.schedule=s1, whose results go from the experts to one rank in one movement, got "
            f"{program.name}: choose s1, with mesh.tp=1 it moves what the others do"
        )


def _moves(task: Task) -> bool:
    return task.op in (Op.MOVE, Op.PACK, Op.UNPACK)


def _parts(program: Program, rows: str) -> set[str]:
    """Return a slot, those that it is joined from or taken apart into, and their parts."""
    found = {rows}
    while True:
        joined = {
            name for task in program.tasks if task.op is Op.JOIN and task.writes[0] in found for name in task.reads
        }
        taken = {
            name for task in program.tasks if task.op is Op.TAKE and task.reads[0] in found for name in task.writes
        }
        if joined | taken <= found:
            return found
        found |= joined | taken


def _placed(layout: Layout) -> Placed:
    """Return the layout of the pieces whose samples have a rank as their new home, from any origin."""
    given = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return Placed(**{**given, "spread": ("ep", "etp")})


def _index_move(source: str) -> Task:
    return Task(
        name=INDEX,
        op=Op.MOVE,
        reads=(source,),
        writes=(INDEX,),
        stage=Stage.COMBINE,
        lane=Lane.INTER,
        group=("ep", "etp"),
    )
