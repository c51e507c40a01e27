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
from moesaic.program.task import Lane, Program, Stage, Task
from moesaic.program.timeline import MOVING


class _Phase(IntEnum):
    BEFORE = 0
    MIDDLE = 1
    LAST = 2


def optsche(program: Program) -> Program:
    """Return the program in the order that the module's docstring describes, made for equal chunks
    that take as long to the experts as back."""
    phases = _phases(program)
    levels = _levels(program)
    parts = _parts(program)
    moves_replicated = moves_replicated_weights(program)
    last_level = max(levels.values(), default=0)

    def rank(task: Task) -> tuple[int, int, int]:
        """Return the place of a task in the order: (phase, level, part) before and last, level by
        level; (phase, part, rank within the part) in the middle, part by part."""
        phase = phases[task.name]
        part = parts[task.name]
        previous = part - 1  # what a part's expert waits for comes with the part before
        # Weights of replicated copies (see `moves_replicated_weights`) are sent after all
        # dispatches, and sent on inside nodes after the last part before these copies.
        if moves_replicated(task):
            if task.lane is Lane.INTER:
                return _Phase.BEFORE, last_level, part
            return _Phase.MIDDLE, previous, 3
        if phase is not _Phase.MIDDLE:
            return phase, levels[task.name], part
        # Ranks within a part: 0, its expert; 1, the next part's movements inside a node; 2, its
        # result; 3, the next part's weights if these are sent on (above).
        if task.stage is Stage.DISPATCH and task.lane in MOVING:
            return phase, previous, 1
        if task.stage is Stage.COMBINE:
            return phase, part, 2
        return phase, part, 0

    return replace(program, tasks=in_order(program, rank))


def _phases(program: Program) -> dict[str, _Phase]:
    """Return the phase of each task. Phases never decrease along dependencies."""
    phases: list[_Phase] = []
    # For each task: the stages of the movements between nodes that lead to it, including itself.
    crossings: list[set[Stage]] = []
    for task, waits_for in zip(program.tasks, predecessors(program)):
        crossings_before = set[Stage]()
        phase = _Phase.BEFORE
        for number in waits_for:
            crossings_before |= crossings[number]
            phase = max(phase, phases[number])
        is_crossing = task.lane is Lane.INTER
        follows_dispatch = bool(crossings_before) and not is_crossing
        if Stage.COMBINE in crossings_before:  # a result has crossed
            phase = _Phase.LAST
        # the experts and the results' way to their crossing, or what follows the dispatch's one
        elif task.stage in (Stage.EXPERT, Stage.COMBINE) or follows_dispatch:
            phase = max(phase, _Phase.MIDDLE)
        phases.append(phase)
        crossings.append(crossings_before | {task.stage} if is_crossing else crossings_before)
    return {task.name: phase for task, phase in zip(program.tasks, phases)}


def _levels(program: Program) -> dict[str, int]:
    """Return for each task the number of movements on the longest path to it."""
    levels: list[int] = []
    for waits_for in predecessors(program):
        level = 0
        for number in waits_for:
            is_movement = program.tasks[number].lane in MOVING
            level = max(level, levels[number] + 1 if is_movement else levels[number])
        levels.append(level)
    return {task.name: level for task, level in zip(program.tasks, levels)}


def _parts(program: Program) -> dict[str, int]:
    """Return the part of each task, a number in the order of chunks, and of steps of peers within a
    chunk. A task of several parts or of none comes before or after all of them."""
    slots = {slot.name: slot for slot in program.slots}
    chunk_number = chunk_numbers(program)  # of a layout

    def part_of(name: str) -> tuple[int, int]:
        """Return the chunk and the step of a slot's rows; -1 for whole ones."""
        layout = slots[name].layout
        chunk = chunk_number(layout)
        step = None if layout.step is None else layout.step[0]
        return -1 if chunk is None else chunk, -1 if step is None else step

    whole = (-1, -1)
    parts_of_tasks = []
    for task in program.tasks:
        parts = {part_of(name) for name in (*task.reads, *task.writes)}
        parts_of_tasks.append(parts - {whole})
    all_parts = sorted(set().union(*parts_of_tasks))
    position_of = {part: position for position, part in enumerate(all_parts)}

    positions = {}
    for task, parts in zip(program.tasks, parts_of_tasks):
        if len(parts) == 1:
            (only_part,) = parts
            positions[task.name] = position_of[only_part]
        elif task.stage in (Stage.ROUTE, Stage.DISPATCH):  # before all parts
            positions[task.name] = -1
        else:  # after all parts
            positions[task.name] = len(all_parts)
    return positions
