"""Pipelining: cut every run of copies into n parts, so that one part's experts run while another part travels.

Tutel (Hwang et al., MLSys 2023), section 4.2; ScheMoE (Shi et al., EuroSys 2024), section 3. Dropless here: every (origin,
expert) run is cut into contiguous parts, nothing is padded.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.errors import InputError
from moesaic.program.task import Kind, Op, Program, Slot, Stage, Task


def split_capacity(program: Program, num_chunks: int) -> Program:
    """Return the program with everything between its first and last movement over ep done chunk by chunk.

    Args:
        program: a forward program, not yet chunked.
        num_chunks: n; 1 returns the program as it is. `Sizes` must be made for the same n.

    Raises:
        InputError: for fewer than one chunk, or a program that is chunked already.
    """
    if num_chunks < 1:
        raise InputError(f"plan.chunks={num_chunks}: must be at least 1")
    if any(slot.layout.chunk is not None for slot in program.slots):
        raise InputError("split_capacity: the program is chunked already: choose the number of chunks in one pass")
    if num_chunks == 1:
        return program
    over_ep = [i for i, task in enumerate(program.tasks) if task.op is Op.MOVE and "ep" in task.group]
    first, last = over_ep[0], over_ep[-1]
    region = program.tasks[first : last + 1]
    made = {name for task in region for name in task.writes}
    entering = list(dict.fromkeys(name for task in region for name in task.reads if name not in made))
    leaving = program.tasks[last].writes[0]
    chunks = range(num_chunks)
    slots = [slot for slot in program.slots if slot.name not in made - {leaving}]
    slots += [_chunk_slot(program.slot(name), c) for name in (*entering, *sorted(made)) for c in chunks]
    takes = tuple(
        Task(
            name=f"take-{name}",
            op=Op.TAKE,
            reads=(name,),
            writes=tuple(_name(name, c) for c in chunks),
            stage=Stage.DISPATCH,
        )
        for name in entering
    )
    pieces = tuple(_chunk_task(task, c) for c in chunks for task in region)
    join = Task(
        name=f"join-{leaving}",
        op=Op.JOIN,
        reads=tuple(_name(leaving, c) for c in chunks),
        writes=(leaving,),
        stage=Stage.COMBINE,
    )
    return replace(
        program,
        name=f"{program.name}, {num_chunks} chunks",
        slots=tuple(slots),
        tasks=(*program.tasks[:first], *takes, *pieces, join, *program.tasks[last + 1 :]),
    )


def _chunk_slot(slot: Slot, chunk: int) -> Slot:
    assert slot.kind in (Kind.ROWS, Kind.LANE), f"{slot.name}: {slot.kind.value} cannot be cut into chunks"
    return replace(slot, name=_name(slot.name, chunk), layout=replace(slot.layout, chunk=chunk))


def _chunk_task(task: Task, chunk: int) -> Task:
    return replace(
        task,
        name=_name(task.name, chunk),
        reads=tuple(_name(name, chunk) for name in task.reads),
        writes=tuple(_name(name, chunk) for name in task.writes),
    )


def _name(name: str, chunk: int) -> str:
    return f"{name}.{chunk}"
