"""ScheMoE's OptSche: encode and dispatch all chunks, then run expert by expert and send each result
at once, decode last.

Shi et al., EuroSys 2024, section 4 (eq. 12). With C encode, A all-to-all, D decode, E expert, the
compute lane runs C1(1)..C1(r), then D1(i) E(i) C2(i) for each chunk i, then D2(1)..D2(r). The
communication lane runs A1(1)..A1(r), A2(1)..A2(r). It is optimal for equal chunks with A1 = A2, C1
= C2, D1 = D2. (A branch-and-bound search over all orders gained 0.12 % in the median elsewhere, and
was not kept.)

Our programs have more than seven tasks per chunk, and two communication lanes. So phases are
derived from stages and dependencies:

- before: the dispatch up to and including the crossing between nodes (A1);
- middle, chunk by chunk: from D1 to the crossing of the result (A2);
- last: the tasks that wait for that crossing (D2, gathers inside a node).

The phases before and last go level by level. A level is the number of movements on the longest path
to a task. So hops of several chunks on one lane do not wait for each other's next hops. In the
middle, a chunk may still have movements inside a node before its expert. These come after the
expert of the previous chunk, which they overlap.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

from moesaic.program.order.graph import (
    chunk_numbers,
    in_order,
    moves_replicated_weights,
    predecessors,
)
from moesaic.program.task import Lane, Layout, Program, Stage, Task
from moesaic.program.timeline import MOVING


class _Phase(IntEnum):
    BEFORE = 0
    MIDDLE = 1
    LAST = 2


def optsche(program: Program) -> Program:
    """Return the program in that order, which is made for equal chunks and passes."""
    phases = _phases(program)
    levels = _levels(program)
    parts = _parts(program)
    is_replicated = moves_replicated_weights(program)
    last = max(levels.values(), default=0)

    def rank(task: Task) -> tuple[int, int, int]:
        """Return the place of a task in the order: its phase, a part or level, and a rank among
        equals."""
        phase = phases[task.name]
        part = parts[task.name]
        if is_replicated(task):
            return (
                (_Phase.BEFORE, last, part)
                if task.lane is Lane.INTER
                else (_Phase.MIDDLE, part - 1, 3)
            )
        if phase is not _Phase.MIDDLE:
            return phase, levels[task.name], part
        # within a chunk: its expert, the next chunk's movements inside a node, its result
        if task.stage is Stage.DISPATCH and task.lane in MOVING:
            return phase, part - 1, 1
        return phase, part, 2 if task.stage is Stage.COMBINE else 0

    return replace(program, tasks=in_order(program, rank))


def _phases(program: Program) -> dict[str, _Phase]:
    """Return the phase of each task. Phases never decrease along dependencies."""
    phases: dict[str, _Phase] = {}
    crossed: list[set[Stage]] = []
    """For each task: the stages of the movements between nodes that lead to it, including
    itself."""
    for task, waits_for in zip(program.tasks, predecessors(program)):
        crossed_before = set().union(*(crossed[number] for number in waits_for))
        phase = max(
            (phases[program.tasks[number].name] for number in waits_for), default=_Phase.BEFORE
        )
        if Stage.COMBINE in crossed_before:
            phase = _Phase.LAST
        elif task.stage in (Stage.EXPERT, Stage.COMBINE) or (
            crossed_before and task.lane is not Lane.INTER
        ):
            phase = max(phase, _Phase.MIDDLE)
        phases[task.name] = phase
        crossed.append(crossed_before | ({task.stage} if task.lane is Lane.INTER else set()))
    return phases


def _levels(program: Program) -> dict[str, int]:
    """Return for each task the number of movements on the longest path to it."""
    levels: list[int] = []
    for waits_for in predecessors(program):
        levels_before = (
            levels[number] + (program.tasks[number].lane in MOVING) for number in waits_for
        )
        levels.append(max(levels_before, default=0))
    return {task.name: level for task, level in zip(program.tasks, levels)}


def _parts(program: Program) -> dict[str, int]:
    """Return the position of the chunk, or step of peers, of each task. A task of several comes
    before or after all of them."""
    slots = {slot.name: slot for slot in program.slots}

    number = chunk_numbers(program)

    def part(layout: Layout) -> tuple[int, int]:
        """Return a layout's chunk and step; -1 for whole ones."""
        chunk = number(layout)
        return -1 if chunk is None else chunk, -1 if layout.step is None else layout.step[0]

    whole = (-1, -1)
    parts_of_task = {
        task.name: {part(slots[name].layout) for name in (*task.reads, *task.writes)} - {whole}
        for task in program.tasks
    }
    positions = {
        key: number for number, key in enumerate(sorted(set().union(*parts_of_task.values())))
    }

    def place_of(task: Task) -> int:
        """Return the position of a task's part; -1 before all parts, or their number after them."""
        if len(parts_of_task[task.name]) == 1:
            return positions[next(iter(parts_of_task[task.name]))]
        return -1 if task.stage in (Stage.ROUTE, Stage.DISPATCH) else len(positions)

    return {task.name: place_of(task) for task in program.tasks}
