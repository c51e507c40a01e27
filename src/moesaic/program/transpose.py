"""The backward program, derived: every slot becomes its cotangent, in the dual state.

A value that is replicated and used differently has a partial cotangent, and the other way round; sharded and identical
ones keep their state. So an all-gather whose incoming gradient is partial becomes a reduce-scatter, and one whose
gradient is identical on all ranks becomes a slice without bytes. Nothing else decides it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from moesaic.program.task import Kind, Op, Program, Slot, Stage, Task

SUFFIX = "'"
"""Marks the cotangent of a slot."""

_SWAPPED = {
    Op.PERMUTE: Op.COMBINE,
    Op.COMBINE: Op.PERMUTE,
    Op.TAKE: Op.JOIN,
    Op.JOIN: Op.TAKE,
    Op.MOVE: Op.MOVE,
    Op.SCALE: Op.SCALE,
}
_STAGE = {Stage.DISPATCH: Stage.COMBINE, Stage.COMBINE: Stage.DISPATCH, Stage.EXPERT: Stage.EXPERT}


def transpose(program: Program) -> Program:
    """Return the backward program: it reads the cotangents of the outputs and writes those of the inputs.

    It also reads forward values: indices, and the inputs of the experts (`saved`). A slot with several readers gets a
    cotangent per reader, and their sum.
    """
    readers = Counter(name for task in program.tasks for name in task.reads if _flows(program, name))
    slots: dict[str, Slot] = {}
    tasks: list[Task] = []
    parts: dict[str, list[str]] = {}

    def write(name: str) -> str:
        """Return the slot for one reader's share of a cotangent."""
        slot = dual(program.slot(name))
        if readers[name] > 1:
            slot = replace(slot, name=f"{slot.name}{len(parts.setdefault(name, []))}")
            parts[name].append(slot.name)
        slots[slot.name] = slot
        return slot.name

    for name in program.outputs:
        slots[cotangent(name)] = dual(program.slot(name))
    for task in reversed(program.tasks):
        if not any(_flows(program, name) for name in task.writes):
            continue
        incoming = tuple(map(cotangent, task.writes))
        extra = task.reads if task.op is Op.EXPERT else tuple(n for n in task.reads if not _flows(program, n))
        written = tuple(write(name) for name in task.reads if _flows(program, name))
        op = Op.EXPERT_GRAD if task.op is Op.EXPERT else _SWAPPED[task.op]
        tasks.append(
            replace(
                task,
                name=cotangent(task.name),
                op=op,
                reads=incoming + extra,
                writes=written,
                stage=_STAGE[task.stage],
                power=task.dual_power,
                dual_power=task.power,
            )
        )
        for name in task.reads:
            shares = parts.get(name, [])
            if readers[name] > 1 and len(shares) == readers[name]:
                total = dual(program.slot(name))
                slots[total.name] = total
                tasks.append(
                    Task(
                        name=f"{total.name}+",
                        op=Op.ADD,
                        reads=tuple(shares),
                        writes=(total.name,),
                        stage=_STAGE[task.stage],
                    )
                )
    kept = saved(program)
    slots.update({name: program.slot(name) for name in kept})
    return Program(
        name=f"{program.name}{SUFFIX}",
        slots=tuple(slots.values()),
        tasks=tuple(tasks),
        inputs=tuple(map(cotangent, program.outputs)) + kept,
        outputs=tuple(cotangent(name) for name in program.inputs if _flows(program, name)),
    )


def saved(program: Program) -> tuple[str, ...]:
    """Return the forward slots that the backward program reads."""
    names = [
        name
        for task in program.tasks
        for name in task.reads
        if task.op is Op.EXPERT or (task.op in (Op.PERMUTE, Op.COMBINE) and not _flows(program, name))
    ]
    return tuple(dict.fromkeys(names))


def cotangent(name: str) -> str:
    """Return the name of a slot's cotangent."""
    return name + SUFFIX


def dual(slot: Slot) -> Slot:
    """Return the cotangent of a slot: the same rows, the dual state on every axis."""
    return replace(slot, name=cotangent(slot.name), state=tuple((axis, state.dual) for axis, state in slot.state))


def _flows(program: Program, name: str) -> bool:
    """Whether gradients flow through a slot."""
    return program.slot(name).kind is not Kind.INDEX
