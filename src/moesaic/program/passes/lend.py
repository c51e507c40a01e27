"""Lending: some copies of a run are computed by another rank than their expert's home, which gets the expert's weights.

One pass for three policies. Shadowing (FasterMoE, He et al., PPoPP 2022, section 4.1): every origin computes its own copies
of a hot expert. Partial replication: some origins do. Spilling (least-loaded expert parallelism): what overloads a home
goes to idle ranks, from whatever origin. Which copies go where is data: `Sizes` takes it, call by call.

A run gets one more chunk per rank of ep. The copies of these chunks travel to their helpers as others do to their homes,
the weights travel over ep to the helpers that need them, and what comes back is joined. The backward program, derived,
sends the gradients of the weights back to the home, which adds them to its own once.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.errors import InputError
from moesaic.program.passes.parts import Part, split_stretch
from moesaic.program.passes.split_capacity import chunk_part, to_experts_and_back
from moesaic.program.task import Kind, Lane, Layout, Op, Program, Slot, Stage, State, Task

SUFFIX = ".lent"
"""Of slots and tasks that work on lent copies."""


def lend(program: Program, num_chunks: int) -> Program:
    """Return the program with the copies that stay at their experts' homes in chunks, and the lent ones beside them.

    Args:
        program: a forward program, not chunked, in which weights stay where they are stored.
        num_chunks: of the copies that stay. `Sizes` must be made for the same number.

    Raises:
        InputError: for a program in which copies do not travel to one home each.
    """
    if any(slot.layout.flow == "visits" for slot in program.slots):
        raise InputError(
            "plan.lending clashes with plan.all_to_all=multicast: a token visits a node for all its experts there, also where "
            "another rank computes some: choose another plan.all_to_all"
        )
    if any(task.op is Op.MOVE and program.slot(task.reads[0]).layout.flow == "weights" for task in program.tasks):
        raise InputError(
            "plan.lending clashes with plan.gather_weights, which moves weights in another way: leave gather_weights unset"
        )
    parts = [chunk_part(chunk) for chunk in range(num_chunks)]
    whole = split_stretch(program, to_experts_and_back(program), [*parts, Part(SUFFIX, _lent)])
    whole = _with_weights(whole, "w", "w", State.SHARDED)
    if any(slot.name == "b_shards" for slot in whole.slots):
        whole = _with_weights(whole, "b_shards", "b", State.REPLICATED)
    return replace(whole, name=f"{program.name}, {num_chunks} chunks, lending")


def _lent(layout: Layout) -> Layout:
    """Where copies were at their experts' homes, they are at their helpers."""
    if layout.experts == "rank":
        return replace(layout, experts="all", chunk="here")
    return replace(layout, chunk="lent")


def _with_weights(program: Program, source: str, name: str, on_etp: State) -> Program:
    """Let the experts that compute lent copies read weights that were sent to them."""
    held = program.slot(source)
    state = tuple(sorted({**dict(held.state), "ep": State.REPLICATED, "etp": on_etp}.items()))
    here = Slot(
        name=f"{name}_here",
        kind=Kind.WEIGHT,
        layout=replace(held.layout, experts="all", chunk="here"),
        state=tuple((axis, value) for axis, value in state if value is not State.SHARDED),
    )
    move = Task(
        name=here.name,
        op=Op.MOVE,
        reads=(source,),
        writes=(here.name,),
        stage=Stage.DISPATCH,
        lane=Lane.INTER,
        group=("ep",),
    )
    tasks = []
    for task in program.tasks:
        lent = task.op is Op.EXPERT and task.name.endswith(SUFFIX)
        if lent:
            task = replace(task, reads=tuple(here.name if read == source else read for read in task.reads))
        tasks.append(task)
    at = max((number + 1 for number, task in enumerate(tasks) if source in task.writes), default=0)
    return replace(program, slots=(*program.slots, here), tasks=(*tasks[:at], move, *tasks[at:]))
