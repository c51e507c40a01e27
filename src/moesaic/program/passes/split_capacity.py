"""Pipelining: cut every run of copies into n parts, so that one part's experts run while another part travels.

Tutel (Hwang et al., MLSys 2023), section 4.2; ScheMoE (Shi et al., EuroSys 2024), section 3. Dropless here: every (origin,
expert) run is cut into contiguous parts, nothing is padded.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.errors import InputError
from moesaic.program.passes.parts import Part, split_stretch
from moesaic.program.task import ONCE, Layout, Op, Program

_BETWEEN = {"tp", "ep", "node"}
"""Axes of the movements of copies, visits and stops that a stretch may begin and end with."""


def split_capacity(program: Program, num_chunks: int) -> Program:
    """Return the program with everything between its first and last movement over ep done chunk by chunk.

    Args:
        program: a forward program, not yet chunked.
        num_chunks: n; 1 returns the program as it is. `CallSizes` must be made for the same n.

    Raises:
        InputError: for fewer than one chunk, or a program that is chunked already.
    """
    if num_chunks < 1:
        raise InputError(f"plan.chunks={num_chunks}: must be at least 1")
    if any(slot.layout.chunk is not None for slot in program.slots):
        raise InputError("split_capacity: the program is chunked already: choose the number of chunks in one pass")
    if num_chunks == 1:
        return program
    parts = [chunk_part(chunk) for chunk in range(num_chunks)]
    whole = split_stretch(program, to_experts_and_back(program), parts)
    return replace(whole, name=f"{program.name}, {num_chunks} chunks")


def to_experts_and_back(program: Program) -> list[str]:
    """Return the names of the tasks from the first movement of copies, visits or stops between ranks to the last one.

    A gather of tokens over etp and the copying that follows it stay outside. Where no token travels to an expert (the
    weights come to the tokens), it is the experts alone.
    """
    moved = [
        number
        for number, task in enumerate(program.tasks)
        if task.op is Op.MOVE
        and _BETWEEN.intersection(task.group)
        and program.slot(task.reads[0]).layout.flow in ("copies", *ONCE)
    ]
    if not any({"ep", "node"}.intersection(program.tasks[number].group) for number in moved):
        moved = [number for number, task in enumerate(program.tasks) if task.op is Op.EXPERT]
    return [task.name for task in program.tasks[moved[0] : moved[-1] + 1]]


def chunk_part(chunk: int) -> Part:
    """Return the part that is one chunk of every run."""

    def cut(layout: Layout) -> Layout:
        return replace(layout, chunk=chunk)

    return Part(f".{chunk}", cut)
