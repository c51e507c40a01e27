"""Simulates the MoE programs of two micro-batches at once, the forward pass of one beside the backward pass of the other.

`together` joins both into one program. Neither waits for the other, so one can send while the other computes, as in DualPipe
(DeepSeek-V3, section 3.2.1). The planner itself counts with a closed form (`moesaic.planner.step`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moesaic.planner.step import StepCostModel
from moesaic.planner.timing import Simulated
from moesaic.program.grid import Grid
from moesaic.program.order.graph import predecessors
from moesaic.program.task import Kind, Op, Program, Slot, Stage, Task
from moesaic.program.timeline import IDLE, Free, durations, place

BEFORE, BEHIND = "before", "behind"
"""Names of the tasks that stand for the rest of a block. The caller knows their durations."""


def together(forward: Program, backward: Program) -> Program:
    """Return one program that contains both, with slots and tasks kept apart by name prefixes.

    Args:
        forward: forward program of one micro-batch; the task `BEFORE` writes its input tokens.
        backward: backward program of another micro-batch; the task `BEHIND` reads its output tokens.
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
    """Return the program in the order of list scheduling: of the tasks that are ready, the one that can start soonest.

    Args:
        program: the program; its order decides among tasks that can start at the same time.
        seconds: duration of each task by name.
    """
    lengths, needs = durations(program, seconds), [set(waits) for waits in predecessors(program)]
    ends, free, order = [0.0] * len(lengths), IDLE, list[int]()
    waiting = list(range(len(lengths)))

    def placed(number: int, free: Free) -> tuple[Free, float]:
        ready = max((ends[other] for other in needs[number]), default=0.0)
        return place(free, program.tasks[number].lane, lengths[number], ready, host_runs_compute=False)

    while waiting:
        ready = [(placed(each, free)[1], each) for each in waiting if needs[each] <= {*order}]
        number = min(ready)[1]
        free, start = placed(number, free)
        ends[number] = start + lengths[number]
        order.append(number)
        waiting.remove(number)
    return replace(program, tasks=tuple(program.tasks[number] for number in order))


def _named(program: Program, prefix: str) -> Program:
    def prefixed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{prefix} {name}" for name in names)

    def renamed(task: Task) -> Task:
        ends = None if task.of is None else (f"{prefix} {task.of[0]}", f"{prefix} {task.of[1]}")
        return replace(
            task, name=f"{prefix} {task.name}", reads=prefixed(task.reads), writes=prefixed(task.writes), of=ends
        )

    slots = tuple(replace(slot, name=f"{prefix} {slot.name}") for slot in program.slots)
    tasks = tuple(map(renamed, program.tasks))
    return replace(
        program, slots=slots, tasks=tasks, inputs=prefixed(program.inputs), outputs=prefixed(program.outputs)
    )


def _tokens(program: Program, names: tuple[str, ...]) -> list[Slot]:
    return [slot for slot in program.slots if slot.name in names and slot.kind is Kind.TOKENS]


def simulate_overlapped(around: StepCostModel, forward: Program, backward: Program, grid: Grid) -> Simulated:
    """Simulate both programs, the forward one after the attention of its micro-batch, the backward one before it of the other.

    The task that can start soonest comes next.

    Args:
        around: the step that has the layer.
        forward: the lowered program of an MoE layer.
        backward: the lowered program of its gradients.
        grid: the layout, with etp factored as the plan requires.
    """
    joined, layer = together(forward, backward), around.model.layer
    known = {BEFORE: around.forward.attention, BEHIND: 2 * around.forward.attention}
    seconds = around.simulator.durations(joined, layer, grid) | known
    return around.simulator.run(soonest_first(joined, seconds), layer, grid, known=known)
