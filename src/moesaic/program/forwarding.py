"""Movements whose kernels pass on in pieces what comes to a node or leaves it, as DeepEP's do, for simulation.

Under multicast a token crosses to a node once and goes to ranks there, and sums come back the same way. As two movements the
second waits for all of the first; DeepEP's kernels forward each piece as it comes (DeepEP, `csrc/kernels/internode.cu`), so
both take the time of the slower one, and copy nothing before and after.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.program.task import Kind, Op, Program, Slot, Stage, Task


def in_pieces(program: Program, dispatched: str = "") -> Program:
    """Return a program of multicast in which rows move between nodes and inside them at once.

    The second movement begins with the first, what lies between is the kernel's own, and whoever reads the result waits for
    both. It says when tasks run, not what they compute: no executor takes it.

    Args:
        program: forward or backward, not lowered to hops.
        dispatched: codec of rows on their way to experts, forward and backward; "" for none. Sums are never coded.
    """
    kinds = {slot.name: slot.kind for slot in program.slots}
    writer = {name: task for task in program.tasks for name in task.writes}
    slots: list[Slot] = list(program.slots)
    behind: dict[str, list[Task]] = {}
    put: dict[str, list[Task]] = {}
    for second in program.tasks:
        if not _moves_rows(second, kinds):
            continue
        between = writer.get(second.reads[0])
        first = writer.get(between.reads[0]) if between is not None else None
        if between is None or first is None or not _moves_rows(first, kinds):
            continue
        source, target = second.reads[0], second.writes[0]
        arriving = replace(program.slot(target), name=f"{target}@")
        slots.append(arriving)
        behind[first.name] = [replace(second, reads=first.reads, writes=(arriving.name,), of=(source, target))]
        put[between.name] = []
        # A scale by nothing takes no time.
        both = (*first.writes, arriving.name)
        put[second.name] = [replace(between, op=Op.SCALE, power=0, reads=both, writes=(target,))]
    tasks = [
        _by_kernel(each, dispatched) if _moves_rows(each, kinds) else each
        for task in program.tasks
        for each in (*put.get(task.name, [task]), *behind.get(task.name, []))
    ]
    return replace(program, name=f"{program.name}, in pieces", slots=tuple(slots), tasks=tuple(tasks))


def _by_kernel(task: Task, dispatched: str) -> Task:
    """Return a movement that takes rows from where they lie and puts them where they belong."""
    codec = dispatched if task.stage is Stage.DISPATCH else ""
    return replace(task, codec=codec, of=task.of or (task.reads[0], task.writes[0]))


def _moves_rows(task: Task, kinds: dict[str, Kind]) -> bool:
    """Whether a task moves rows between nodes or inside one."""
    moved = task.of[0] if task.of is not None else task.reads[0]
    return task.op is Op.MOVE and kinds[moved] is Kind.ROWS and bool({"ep", "node", "local"}.intersection(task.group))
