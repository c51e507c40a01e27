"""The smart schedule: exchange with one group of peers after the other, and run their tokens meanwhile.

FasterMoE (He et al., PPoPP 2022), section 4.2: in step j, group G sends to group G + j, runs what group G - j sent, and sends
the results back. Step 0 stays inside the group and is the cheapest. Shards of an expert stay together: groups are of ep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.passes.parts import Part, split_stretch
from moesaic.program.passes.split_capacity import to_experts_and_back
from moesaic.program.task import Chunk, Layout, Program


def split_peers(program: Program, groups: int, grid: Grid) -> Program:
    """Return the program with everything between its first and last movement over ep done step by step.

    Args:
        program: a forward program; it may be chunked, each chunk then goes step by step.
        groups: n; the ranks of ep form so many groups of neighbours, and as many steps. 1 returns the program as it is.
        grid: the mesh.

    Raises:
        InputError: if the groups do not divide ep, or the program sends tokens to nodes rather than to experts.
    """
    if groups < 1 or grid.ep % groups:
        raise InputError(
            f"plan.peer_groups={groups} does not divide mesh.ep={grid.ep}: choose a divisor, or 1 for one exchange"
        )
    if groups == 1:
        return program
    if any(slot.layout.flow == "visits" for slot in program.slots):
        raise InputError(
            "split_peers clashes with multicast: a token visits a node once for all its experts there, whatever their "
            "group: choose plan.peer_groups=1 or another plan.all_to_all"
        )
    parts = [Part(f"~{step}", steps(step, groups)) for step in range(groups)]
    numbered = sorted({slot.layout.chunk for slot in program.slots if isinstance(slot.layout.chunk, int)})
    chunks: list[int | None] = [*numbered] or [None]
    for chunk in chunks:
        names = to_experts_and_back(program)
        if chunk is not None:
            names = [name for name in names if _chunk_of(program, name) == chunk]
        program = split_stretch(program, names, parts)
    return replace(program, name=f"{program.name}, {groups} peer groups")


def steps(step: int, groups: int) -> Callable[[Layout], Layout]:
    """Return the cut of one step out of `groups`."""

    def cut(layout: Layout) -> Layout:
        return replace(layout, step=(step, groups))

    return cut


def _chunk_of(program: Program, task_name: str) -> Chunk | None:
    task = next(task for task in program.tasks if task.name == task_name)
    return program.slot(task.writes[0]).layout.chunk
