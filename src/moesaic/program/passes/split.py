"""Splits a stretch of a program into parts: by chunks of every run of copies, or by groups of
peers.

A stretch is a sequence of tasks. A run is the copies that one rank (the origin) sends to one
expert. A slot is a named value of the program; its layout says which runs it has, whole or in part.

`split_capacity` pipelines. It cuts every run of copies into n parts, so that the experts of one
part run while another part is sent (Tutel: Hwang et al., MLSys 2023, section 4.2; ScheMoE: Shi et
al., EuroSys 2024, section 3). Nothing is padded: each (origin, expert) run is cut into contiguous
parts.

`split_peers` is the smart schedule of FasterMoE (He et al., PPoPP 2022, section 4.2). Ranks
exchange with one group of peers after the other and compute in the meantime. In step j, group G
sends to group G + j, runs the experts on the tokens of group G - j, and returns the results. Step 0
stays inside the group and is the cheapest. The last step is an exchange between neighbours, and its
results are sent last. Groups are groups of ep ranks, so the shards of an expert stay together. If
groups lie inside nodes, step 0 uses the lane inside nodes at the same time as the first step
between nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import ONCE, Chunk, Kind, Lane, Layout, Op, Program, Stage, Task


@dataclass(frozen=True)
class StretchPart:
    """One part of every run in a stretch."""

    suffix: str
    """Added to the names of slots and tasks."""
    cut: Callable[[Layout], Layout]
    """Returns the layout of the part of a slot, given the slot's layout."""


def split_stretch(program: Program, names: Sequence[str], parts: Sequence[StretchPart]) -> Program:
    """Return the program with a stretch of its tasks performed part by part.

    Slots that the stretch reads are split before it, and slots that later tasks read are joined
    after it. Weights are whole in every part. Tasks that only prepare weights are moved before the
    stretch.

    Args:
        program: a forward or backward program.
        names: names of the stretch's tasks, in order.
        parts: a partition of every run.
    """
    chosen = set(names)
    kinds = {slot.name: slot.kind for slot in program.slots}
    stretch = [
        task
        for task in program.tasks
        if task.name in chosen and kinds[task.writes[0]] is not Kind.WEIGHT
    ]
    before, after = _around(program, {task.name for task in stretch})

    # Slots that enter the stretch, are written in it, and leave it; each once, in order.
    written = list(dict.fromkeys(name for task in stretch for name in task.writes))
    read = dict.fromkeys(name for task in stretch for name in task.reads)
    entering = [name for name in read if name not in written and kinds[name] is not Kind.WEIGHT]
    read_later = {*program.outputs, *(name for task in after for name in task.reads)}
    leaving = [name for name in written if name in read_later]

    inner = set(written) - set(leaving)
    slots = [slot for slot in program.slots if slot.name not in inner]
    for name in (*entering, *written):
        slot = program.slot(name)
        for part in parts:
            slots.append(replace(slot, name=name + part.suffix, layout=part.cut(slot.layout)))

    takes = [_take(name, parts, stretch[0].stage) for name in entering]
    joins = [_join(name, parts, stretch[-1].stage) for name in leaving]
    cut = {*entering, *written}
    part_tasks = [_part_task(task, part, cut) for part in parts for task in stretch]
    tasks = (*before, *takes, *part_tasks, *joins, *after)
    return replace(program, slots=tuple(slots), tasks=tasks)


def _take(name: str, parts: Sequence[StretchPart], stage: Stage) -> Task:
    """Return the task that splits a slot into its parts."""
    part_names = tuple(name + part.suffix for part in parts)
    return Task(name=f"take-{name}", op=Op.TAKE, reads=(name,), writes=part_names, stage=stage)


def _join(name: str, parts: Sequence[StretchPart], stage: Stage) -> Task:
    """Return the task that joins the parts of a slot."""
    part_names = tuple(name + part.suffix for part in parts)
    return Task(name=f"join-{name}", op=Op.JOIN, reads=part_names, writes=(name,), stage=stage)


def _around(program: Program, inside: set[str]) -> tuple[list[Task], list[Task]]:
    """Split the other tasks into those that may come before the stretch and those that depend on
    it, directly or not.

    Args:
        inside: names of the stretch's tasks.
    """
    downstream = {name for task in program.tasks if task.name in inside for name in task.writes}
    before: list[Task] = []
    after: list[Task] = []
    for task in program.tasks:
        if task.name in inside:
            continue
        if downstream.intersection(task.reads):
            downstream.update(task.writes)
            after.append(task)
        else:
            before.append(task)
    return before, after


def _part_task(task: Task, part: StretchPart, cut: set[str]) -> Task:
    """Return the task for one part of the slots that are cut."""
    return replace(
        task,
        name=task.name + part.suffix,
        reads=tuple(name + part.suffix if name in cut else name for name in task.reads),
        writes=tuple(name + part.suffix for name in task.writes),
    )


_BETWEEN = {"tp", "ep", "node"}
"""Axes of the movements with which a stretch may begin and end."""


def split_capacity(program: Program, num_chunks: int) -> Program:
    """Return the program with everything from its first to its last movement between ranks
    performed chunk by chunk.

    Args:
        program: a forward program, not yet chunked.
        num_chunks: number of chunks; 1 returns the program unchanged. `CallSizes` must be made with
            the same number.

    Raises:
        InputError: for fewer than one chunk, or a program that is chunked already.
    """
    if num_chunks < 1:
        raise InputError(f"plan.chunks={num_chunks}: must be at least 1")
    if any(slot.layout.chunk is not None for slot in program.slots):
        raise InputError(
            "split_capacity: the program is chunked already: choose the number of chunks in "
            "one pass"
        )
    if num_chunks == 1:
        return program
    parts = [chunk_part(chunk) for chunk in range(num_chunks)]
    whole = split_stretch(program, to_experts_and_back(program), parts)
    return replace(whole, name=f"{program.name}, {num_chunks} chunks")


def to_experts_and_back(program: Program) -> list[str]:
    """Return the names of the tasks from the first to the last movement of copies, node_tokens or
    rank_tokens between ranks.

    An all-gather of tokens over etp and the permutation after it stay outside. If no token is sent
    to an expert, because weights are gathered instead, only the experts are included.
    """
    positions = []
    sends_to_experts = False
    for number, task in enumerate(program.tasks):
        if task.op is not Op.MOVE or not _BETWEEN.intersection(task.group):
            continue
        if program.slot(task.reads[0]).layout.flow in ("copies", *ONCE):
            positions.append(number)
            sends_to_experts |= bool({"ep", "node"}.intersection(task.group))
    if not sends_to_experts:
        positions = [number for number, task in enumerate(program.tasks) if task.op is Op.EXPERT]
    return [task.name for task in program.tasks[positions[0] : positions[-1] + 1]]


def chunk_part(chunk: int) -> StretchPart:
    """Return the part that consists of one chunk of every run."""

    def cut(layout: Layout) -> Layout:
        return replace(layout, chunk=chunk)

    return StretchPart(f".{chunk}", cut)


def split_peers(program: Program, groups: int, grid: Grid) -> Program:
    """Return the program with everything from its first to its last movement between ranks
    performed step by step.

    Args:
        program: a forward program. If it is chunked, each chunk is split into steps.
        groups: number of groups of neighbours that the ep ranks form, which is also the number of
            steps; 1 returns the program unchanged.

    Raises:
        InputError: if the groups do not divide ep, or the program is a multicast.
    """
    if groups < 1 or grid.ep % groups:
        raise InputError(
            f"plan.peer_groups={groups} does not divide mesh.ep={grid.ep}: choose a divisor, "
            "or 1 for one exchange"
        )
    if groups == 1:
        return program
    if any(slot.layout.flow in ONCE for slot in program.slots):
        raise InputError(
            "split_peers clashes with multicast: a token is sent to a node once for all its "
            "experts there, whatever their group: choose plan.peer_groups=1 or another "
            "plan.all_to_all"
        )
    parts = [StretchPart(f"~{step}", steps(step, groups)) for step in range(groups)]
    numbered_chunks = {
        slot.layout.chunk for slot in program.slots if isinstance(slot.layout.chunk, int)
    }
    if not numbered_chunks:
        program = split_stretch(program, to_experts_and_back(program), parts)
    for chunk in sorted(numbered_chunks):
        names = to_experts_and_back(program)
        names_of_chunk = [name for name in names if _chunk_of(program, name) == chunk]
        program = split_stretch(program, names_of_chunk, parts)
    tasks = tuple(_on_its_lane(task, program, groups, grid) for task in program.tasks)
    return replace(program, name=f"{program.name}, {groups} peer groups", tasks=tasks)


def groups_inside_nodes(grid: Grid) -> int:
    """Return the fewest groups of peers such that each is inside a node: one per node, if ep is
    spread evenly over nodes."""
    for groups in range(1, grid.ep):
        if grid.ep % groups == 0 and _stay_inside(grid, groups, ("ep",)):
            return groups
    return grid.ep


def _stay_inside(grid: Grid, groups: int, axes: tuple[Axis, ...]) -> bool:
    """Return whether, in every movement over these axes, the ranks of one group of ep ranks share a
    node."""
    ranks_per_group = grid.ep // groups
    for members in grid.kinds_of_groups(axes):
        node_of_group: dict[int, int] = {}
        for rank in members:
            group = grid.coordinate(rank, "ep") // ranks_per_group
            node = grid.node_of(rank)
            if node_of_group.setdefault(group, node) != node:
                return False
    return True


def _on_its_lane(task: Task, program: Program, groups: int, grid: Grid) -> Task:
    """Return a task of step 0 on the lane inside nodes, if that step stays there and other steps do
    not."""
    if task.op is not Op.MOVE or task.lane is not Lane.INTER:
        return task
    if program.slot(task.writes[0]).layout.step != (0, groups):
        return task
    # Other steps lead from group to group: they stay inside if all ranks as one group do.
    other_steps_stay = _stay_inside(grid, 1, task.group)
    if other_steps_stay or not _stay_inside(grid, groups, task.group):
        return task
    return replace(task, lane=Lane.INTRA)


def steps(step: int, groups: int) -> Callable[[Layout], Layout]:
    """Return the function that restricts a layout to one of `groups` steps."""

    def cut(layout: Layout) -> Layout:
        return replace(layout, step=(step, groups))

    return cut


def _chunk_of(program: Program, task_name: str) -> Chunk | None:
    """Return the chunk that a task writes; None if its rows are not cut into chunks."""
    task = next(task for task in program.tasks if task.name == task_name)
    return program.slot(task.writes[0]).layout.chunk
