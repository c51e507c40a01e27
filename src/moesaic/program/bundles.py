"""Bundles: movements that stand side by side in a program and travel as one message per peer.

Routing weights and indices are a few bytes per row, and a message costs its sender and its receiver about the same time
whatever it holds. So the small movements wait for the rows that they belong to, and leave with them. Executor and simulator
find the same bundles, on every rank, from the program alone.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.program.task import Kind, Op, Program, Slot, Task

_SMALL = (Kind.LANE, Kind.INDEX)
_LARGE = (Kind.ROWS, Kind.TOKENS)


def side_by_side(program: Program) -> Program:
    """Return the program with each movement of weights or indices next to the next one of rows on its way, if it can wait.

    It can if nothing reads its slot before; else it stays where it is. The sequence of everything else stays, so an order's
    choices stand.

    Args:
        program: in the order in which it is to run.
    """
    slots = {slot.name: slot for slot in program.slots}
    leader = {number: _leader(program, number, slots) for number in range(len(program.tasks))}
    followers: dict[int, list[Task]] = {}
    for number, place in leader.items():
        if place is not None:
            followers.setdefault(place, []).append(program.tasks[number])
    tasks: list[Task] = []
    for number, task in enumerate(program.tasks):
        if leader[number] is None:
            tasks += [*followers.get(number, ()), task]
    return replace(program, tasks=tuple(tasks))


def _leader(program: Program, number: int, slots: dict[str, Slot]) -> int | None:
    """Return the place of the rows that a movement can wait for; None if it is no small one, or something reads it before."""
    small = program.tasks[number]
    if not _is_move(small) or slots[small.writes[0]].kind not in _SMALL:
        return None
    for place, task in enumerate(program.tasks[number + 1 :], number + 1):
        if _needs(task, small):
            return None
        if _leads(task, slots) and _same_way(small, task, slots):
            return place
    return None


def bundles(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the places of tasks that start together: of a task alone, or of movements that travel as one.

    A bundle ends with rows, or where the lane or the group changes; none of its tasks reads what another writes.
    """
    slots = {slot.name: slot for slot in program.slots}
    found: list[tuple[int, ...]] = []
    open_bundle: list[int] = []
    for number, task in enumerate(program.tasks):
        if open_bundle and not _joins(task, [program.tasks[place] for place in open_bundle], slots):
            found.append(tuple(open_bundle))
            open_bundle = []
        open_bundle.append(number)
        if not (_is_move(task) and slots[task.writes[0]].kind in _SMALL):
            found.append(tuple(open_bundle))
            open_bundle = []
    return (*found, tuple(open_bundle)) if open_bundle else tuple(found)


def _joins(task: Task, bundle: list[Task], slots: dict[str, Slot]) -> bool:
    """Whether a task may travel with small movements."""
    kind = slots[task.writes[0]].kind
    waits = any(_needs(task, other) for other in bundle)
    return not waits and _same_way(bundle[0], task, slots) and _is_move(task) and kind in (*_SMALL, *_LARGE)


def _same_way(small: Task, task: Task, slots: dict[str, Slot]) -> bool:
    """Whether two movements go over the same links, towards the same side, with rows of the same chunk."""
    ways = [(t.op, t.lane, t.group, t.stage, slots[t.writes[0]].layout.step) for t in (small, task)]
    chunks = [slots[t.writes[0]].layout.chunk for t in (small, task)]
    return ways[0] == ways[1] and (chunks[0] == chunks[1] or None in chunks)


def _leads(task: Task, slots: dict[str, Slot]) -> bool:
    """Whether small movements may travel with a task."""
    return _is_move(task) and slots[task.writes[0]].kind in _LARGE


def _needs(task: Task, other: Task) -> bool:
    return bool(set(other.writes).intersection(task.reads))


def _is_move(task: Task) -> bool:
    return task.op is Op.MOVE
