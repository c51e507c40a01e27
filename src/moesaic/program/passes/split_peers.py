"""The smart schedule: exchange with one group of peers after the other, and run their tokens meanwhile.

FasterMoE (He et al., PPoPP 2022), section 4.2: in step j, group G sends to group G + j, runs what group G - j sent, and sends
the results back. Step 0 stays inside the group and is the cheapest; the last step is an exchange between neighbours, whose
results are the last to travel. Shards of an expert stay together: groups are of ep. Where groups lie inside nodes, step 0
takes the lane of the links there, beside the first step that crosses nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.passes.parts import Part, split_stretch
from moesaic.program.passes.split_capacity import to_experts_and_back
from moesaic.program.task import ONCE, Chunk, Lane, Layout, Op, Program, Task


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
    if any(slot.layout.flow in ONCE for slot in program.slots):
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
    tasks = tuple(_on_its_lane(task, program, groups, grid) for task in program.tasks)
    return replace(program, name=f"{program.name}, {groups} peer groups", tasks=tasks)


def groups_inside_nodes(grid: Grid) -> int:
    """Return the fewest groups of peers that each lie inside one node: one per node, where nodes hold equal parts of ep.

    Args:
        grid: the mesh.
    """
    return next(
        n for n in range(1, grid.ep + 1) if grid.ep % n == 0 and (n == grid.ep or _stay_inside(grid, n, ("ep",)))
    )


def _stay_inside(grid: Grid, groups: int, axes: tuple[Axis, ...]) -> bool:
    """Whether the ranks of a group of ep, among those that a movement over these axes connects, share a node."""
    each = grid.ep // groups

    def group_of(rank: int) -> int:
        return grid.coordinate(rank, "ep") // each

    return all(
        grid.node_of(rank) == grid.node_of(mate)
        for rank in range(grid.world)
        for mate in grid.group(rank, axes)
        if group_of(rank) == group_of(mate)
    )


def _on_its_lane(task: Task, program: Program, groups: int, grid: Grid) -> Task:
    """Return a task of step 0 on the lane inside nodes, if it stays there and other steps do not."""
    is_local = (
        task.op is Op.MOVE and task.lane is Lane.INTER and program.slot(task.writes[0]).layout.step == (0, groups)
    )
    if not is_local or _stay_inside(grid, 1, task.group) or not _stay_inside(grid, groups, task.group):
        return task
    return replace(task, lane=Lane.INTRA)


def steps(step: int, groups: int) -> Callable[[Layout], Layout]:
    """Return the cut of one step out of `groups`."""

    def cut(layout: Layout) -> Layout:
        return replace(layout, step=(step, groups))

    return cut


def _chunk_of(program: Program, task_name: str) -> Chunk | None:
    task = next(task for task in program.tasks if task.name == task_name)
    return program.slot(task.writes[0]).layout.chunk
