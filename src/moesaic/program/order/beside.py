"""Two programs as one: the forward pass of a layer for one micro-batch beside the backward pass for another.

Neither waits for the other, so what one of them sends can travel while the other computes. What a block computes besides its
MoE layer stands in for itself as one task before the forward program and one behind the backward program.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.program.task import Kind, Op, Program, Slot, Stage, Task

BEFORE, BEHIND = "before", "behind"
"""Names of the tasks that stand for the rest of a block; whoever runs them knows how long they take."""


def together(forward: Program, backward: Program) -> Program:
    """Return both programs as one, their slots and tasks apart by name.

    Args:
        forward: of one micro-batch; its tokens come from the task `BEFORE`.
        backward: of another; the task `BEHIND` waits for its tokens.
    """
    first, second = _named(forward, "forward"), _named(backward, "backward")
    entering, leaving = _tokens(first, first.inputs), _tokens(second, second.outputs)
    behind = replace(leaving[0], name=f"{BEHIND} done")
    before = Task(name=BEFORE, op=Op.ADD, reads=(), writes=tuple(slot.name for slot in entering), stage=Stage.ROUTE)
    after = Task(
        name=BEHIND, op=Op.ADD, reads=tuple(slot.name for slot in leaving), writes=(behind.name,), stage=Stage.COMBINE
    )
    return Program(
        name=f"{forward.name} beside {backward.name}",
        slots=(*first.slots, *second.slots, behind),
        tasks=(before, *first.tasks, *second.tasks, after),
        inputs=tuple(name for name in (*first.inputs, *second.inputs) if name not in before.writes),
        outputs=(*first.outputs, *second.outputs, behind.name),
    )


def _named(program: Program, prefix: str) -> Program:
    def of(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{prefix} {name}" for name in names)

    def task(each: Task) -> Task:
        ends = None if each.of is None else (f"{prefix} {each.of[0]}", f"{prefix} {each.of[1]}")
        return replace(each, name=f"{prefix} {each.name}", reads=of(each.reads), writes=of(each.writes), of=ends)

    slots = tuple(replace(slot, name=f"{prefix} {slot.name}") for slot in program.slots)
    tasks = tuple(map(task, program.tasks))
    return replace(program, slots=slots, tasks=tasks, inputs=of(program.inputs), outputs=of(program.outputs))


def _tokens(program: Program, names: tuple[str, ...]) -> list[Slot]:
    return [slot for slot in program.slots if slot.name in names and slot.kind is Kind.TOKENS]
