"""SAA: the all-gather over the tensor-parallel group runs in phases, each overlapped with the next
phase of the all-to-all.

Parm (INFOCOM 2024), section III-D. There is one phase per ep rank: the rows that arrive from one ep
rank are gathered in the tensor-parallel group while the next ones arrive. The shards of an expert
are summed inside each phase.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.passes.split import StretchPart, split_stretch, steps
from moesaic.program.task import ONCE, Kind, Op, Program, State, Task


def overlap_gather(program: Program, grid: Grid, *, required: bool = True) -> Program:
    """Return the program with every all-to-all that is followed by an all-gather over tp done in ep
    phases, both included.

    Args:
        program: a forward or backward program.
        required: whether to raise if there is no such pair; otherwise the program is returned
            unchanged.

    Raises:
        InputError: if the program has no such pair, or is split by groups of peers already.
    """
    if any(slot.layout.step is not None for slot in program.slots):
        raise InputError(
            "overlap_gather clashes with split_peers, which gathers group by group already: choose "
            "plan.overlap_gather=false or plan.peer_groups=1"
        )
    pairs = _pairs(program)
    if not pairs and required:
        raise InputError(f"overlap_gather clashes with {_clash(program)}")
    if grid.ep == 1 or grid.tp == 1 or not pairs:
        return program
    # In phase p, rows go to the ep rank that is p places further on.
    parts = [StretchPart(f"~{phase}", steps(phase, grid.ep)) for phase in range(grid.ep)]
    for first, second in pairs:
        program = split_stretch(program, [first.name, second.name], parts)
    return replace(program, name=f"{program.name}, overlapped gather")


def _pairs(program: Program) -> list[tuple[Task, Task]]:
    """Return every movement of rows over ep together with the all-gather over tp that is its only
    reader."""
    pairs = []
    for first in program.tasks:
        if first.op is not Op.MOVE or "ep" not in first.group:
            continue
        received = program.slot(first.writes[0])
        if received.kind is not Kind.ROWS:
            continue
        readers = [task for task in program.tasks if received.name in task.reads]
        if len(readers) != 1:
            continue
        second = readers[0]
        is_over_tp = second.op is Op.MOVE and second.group == ("tp",)
        if is_over_tp and program.slot(second.writes[0]).on("tp") is State.IDENTICAL:
            pairs.append((first, second))
    return pairs


def _clash(program: Program) -> str:
    """Return why no all-gather over tp follows an all-to-all, and what to choose."""
    instead = "choose plan.overlap_gather=false"
    if any(slot.layout.flow in ONCE for slot in program.slots):
        return (
            f"multicast, which leaves sums over tp rather than gathers: {instead} or another "
            "plan.all_to_all"
        )
    moves_over_ep = [task for task in program.moves() if "ep" in task.group]
    if any(program.slot(task.writes[0]).kind is Kind.WEIGHT for task in moves_over_ep):
        return f"gather_weights=0, under which no token travels: {instead}"
    return (
        f"{program.name}, where no gather over tp follows an all-to-all: {instead} or "
        "plan.schedule=s2 or s3"
    )
