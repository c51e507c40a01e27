"""ScheMoE's OptSche: encode and dispatch all chunks, then run expert by expert, each result sent off at once, decode last.

Shi et al., EuroSys 2024, section 4 (eq. 12). With C encode, A all-to-all, D decode, E expert, the compute lane runs
C1(1)..C1(r), then D1(i) E(i) C2(i) for each chunk i, then D2(1)..D2(r); the communication lane A1(1)..A1(r), A2(1)..A2(r).
It is optimal where chunks are equal and A1 = A2, C1 = C2, D1 = D2; otherwise `exact.py` may find a better one.

Our programs have more than seven tasks a chunk, and two communication lanes. So phases are read off stages and dependencies:

- before: the dispatch until it has crossed nodes (A1);
- middle, chunk by chunk: from there (D1) to the result's crossing (A2);
- last: what waits for that crossing (D2, gathers inside a node).

Before and last go level by level, a level being the number of movements behind a task, so that hops of several chunks on one
lane do not wait for each other's next hops. In the middle, what a chunk still has to move inside a node before its expert
goes behind the expert of the chunk before it, which it then overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum

from moesaic.program.order.graph import brings_replicated_weights, chunk_numbers, in_order, predecessors
from moesaic.program.task import Lane, Layout, Program, Stage, Task
from moesaic.program.timeline import MOVING


class _Phase(IntEnum):
    BEFORE = 0
    MIDDLE = 1
    LAST = 2


def optsche(
    program: Program, seconds: Callable[[], Mapping[str, float]] | None = None, *, host_runs_compute: bool = False
) -> Program:
    """Return the program in that order; `seconds` is not read: it is the order for equal chunks and passes."""
    phases, levels, parts = _phases(program), _levels(program), _parts(program)
    is_replicated, last = brings_replicated_weights(program), max(levels.values(), default=0)

    def rank(task: Task) -> tuple[int, int, int]:
        phase, part = phases[task.name], parts[task.name]
        if is_replicated(task):
            return (_Phase.BEFORE, last, part) if task.lane is Lane.INTER else (_Phase.MIDDLE, part - 1, 3)
        if phase is not _Phase.MIDDLE:
            return phase, levels[task.name], part
        if task.stage is Stage.DISPATCH and task.lane in MOVING:
            return phase, part - 1, 1
        return phase, part, 2 if task.stage is Stage.COMBINE else 0

    return replace(program, tasks=in_order(program, rank))


def _phases(program: Program) -> dict[str, _Phase]:
    """Return the phase of each task; along dependencies it never falls."""
    phases: dict[str, _Phase] = {}
    crossed: list[set[Stage]] = []
    """Of each task: the stages of the crossings of nodes behind it, its own included."""
    for task, before in zip(program.tasks, predecessors(program)):
        behind = set().union(*(crossed[number] for number in before))
        phase = max((phases[program.tasks[number].name] for number in before), default=_Phase.BEFORE)
        if Stage.COMBINE in behind:
            phase = _Phase.LAST
        elif task.stage in (Stage.EXPERT, Stage.COMBINE) or (behind and task.lane is not Lane.INTER):
            phase = max(phase, _Phase.MIDDLE)
        phases[task.name] = phase
        crossed.append(behind | ({task.stage} if task.lane is Lane.INTER else set()))
    return phases


def _levels(program: Program) -> dict[str, int]:
    """Return for each task the number of movements on the longest way to it."""
    levels: list[int] = []
    for before in predecessors(program):
        behind = (levels[number] + (program.tasks[number].lane in MOVING) for number in before)
        levels.append(max(behind, default=0))
    return {task.name: level for task, level in zip(program.tasks, levels)}


def _parts(program: Program) -> dict[str, int]:
    """Return the place of the chunk, or step of peers, that each task works on; before or behind all if of several."""
    slots = {slot.name: slot for slot in program.slots}

    number = chunk_numbers(program)

    def part(layout: Layout) -> tuple[int, int]:
        chunk = number(layout)
        return -1 if chunk is None else chunk, -1 if layout.step is None else layout.step[0]

    whole = (-1, -1)
    found = {
        task.name: {part(slots[name].layout) for name in (*task.reads, *task.writes)} - {whole}
        for task in program.tasks
    }
    place = {key: number for number, key in enumerate(sorted(set().union(*found.values())))}

    def place_of(task: Task) -> int:
        if len(found[task.name]) == 1:
            return place[next(iter(found[task.name]))]
        return -1 if task.stage in (Stage.ROUTE, Stage.DISPATCH) else len(place)

    return {task.name: place_of(task) for task in program.tasks}
