"""Two programs as one: the forward pass of a layer for one micro-batch beside the backward pass for another.

Neither waits for the other, so what one of them sends can travel while the other computes. What a block computes besides its
MoE layer stands in for itself as one task before the forward program and one behind the backward program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moesaic.program.order.graph import predecessors, successors
from moesaic.program.task import Kind, Op, Program, Slot, Stage, Task
from moesaic.program.timeline import IDLE, durations, place

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


def soonest_first(program: Program, seconds: Mapping[str, float]) -> Program:
    """Return a program in which of the tasks that may come next that one does which can start first; of several, the one with
    the longest way to the end (a schedule without delay: Giffler and Thompson, Operations Research 1960).

    Args:
        program: in any legal order, on streams that wait for each other.
        seconds: of every task, by name.
    """
    before, lengths = predecessors(program), durations(program, seconds)
    after = successors(before)
    ways, ends = [0.0] * len(lengths), [0.0] * len(lengths)
    for number in reversed(range(len(ways))):
        ways[number] = lengths[number] + max((ways[other] for other in after[number]), default=0.0)
    free, left, ordered = IDLE, set(range(len(lengths))), []
    while left:
        found = []
        for number in left:
            if left.isdisjoint(before[number]):
                ready = max((ends[other] for other in before[number]), default=0.0)
                start = place(free, program.tasks[number].lane, lengths[number], ready, False)[1]
                found.append((start, -ways[number], number, ready))
        start, _, number, ready = min(found)
        free = place(free, program.tasks[number].lane, lengths[number], ready, False)[0]
        ends[number] = start + lengths[number]
        ordered.append(program.tasks[number])
        left.discard(number)
    return replace(program, tasks=tuple(ordered))


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
