"""Bundles: adjacent movements of a program that are sent as one message per peer.

A program is a list of tasks that read and write slots, its named values; a task that moves rows
between ranks is a movement. A number of a task is its position in the program.

Routing weights and indices take a few bytes per row, while the fixed cost of a message does not
depend on its size. So the small movements wait for the rows they belong to and are sent with them.
Executor and simulator derive the same bundles on every rank from the program alone.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.program.task import Kind, Op, Program, Slot, Task

_SMALL = (Kind.LANE, Kind.INDEX)
_LARGE = (Kind.ROWS, Kind.TOKENS)


def side_by_side(program: Program) -> Program:
    """Return the program with each movement of weights or indices placed directly before the next
    movement of rows it can join.

    A small movement keeps its place if a task between the two reads its result. All other tasks
    keep their order, so the order chosen for the program still holds.

    Args:
        program: the program, in the order in which it is to run.
    """
    slots = {slot.name: slot for slot in program.slots}
    leaders = [_leader(program, number, slots) for number in range(len(program.tasks))]
    followers: dict[int, list[Task]] = {}  # by the leader's number, the movements it takes along
    for task, leader in zip(program.tasks, leaders):
        if leader is not None:
            followers.setdefault(leader, []).append(task)
    tasks: list[Task] = []
    for number, task in enumerate(program.tasks):
        if leaders[number] is None:
            tasks += [*followers.get(number, ()), task]
    return replace(program, tasks=tuple(tasks))


def _leader(program: Program, number: int, slots: dict[str, Slot]) -> int | None:
    """Return the position of the movement of rows with which a small movement can be sent.

    None if the task is not a small movement, or if its result is read before any such movement.
    """
    small = program.tasks[number]
    if not _is_move(small) or slots[small.writes[0]].kind not in _SMALL:
        return None
    for other_number, other in enumerate(program.tasks[number + 1 :], number + 1):
        if _needs(other, small):
            return None
        may_lead = _is_move(other) and slots[other.writes[0]].kind in _LARGE
        if may_lead and _same_route(small, other, slots):
            return other_number
    return None


def bundles(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return groups of task positions that start together: single tasks, or movements sent as one
    message per peer.

    A bundle ends with a movement of rows, or where the lane or the group changes. No task of a
    bundle reads what another one writes.
    """
    slots = {slot.name: slot for slot in program.slots}
    finished: list[tuple[int, ...]] = []
    open_bundle: list[int] = []
    for number, task in enumerate(program.tasks):
        members = [program.tasks[member] for member in open_bundle]
        if members and not _may_join(task, members, slots):
            finished.append(tuple(open_bundle))
            open_bundle = []
        open_bundle.append(number)
        is_small_move = _is_move(task) and slots[task.writes[0]].kind in _SMALL
        if not is_small_move:
            finished.append(tuple(open_bundle))
            open_bundle = []
    if open_bundle:
        finished.append(tuple(open_bundle))
    return tuple(finished)


def _may_join(task: Task, bundle: list[Task], slots: dict[str, Slot]) -> bool:
    """Return whether a task may be sent together with the small movements of a bundle."""
    if not _is_move(task) or slots[task.writes[0]].kind not in (*_SMALL, *_LARGE):
        return False
    if any(_needs(task, other) for other in bundle):
        return False
    return _same_route(bundle[0], task, slots)


def _same_route(small: Task, task: Task, slots: dict[str, Slot]) -> bool:
    """Return whether two movements use the same links in the same direction, with rows of the same
    chunk."""
    layout = slots[task.writes[0]].layout
    small_layout = slots[small.writes[0]].layout
    if layout.step != small_layout.step:
        return False
    # None: all chunks, which go with any
    if layout.chunk != small_layout.chunk and None not in (layout.chunk, small_layout.chunk):
        return False
    route = (task.op, task.lane, task.group, task.stage)
    return route == (small.op, small.lane, small.group, small.stage)


def _needs(task: Task, other: Task) -> bool:
    """Return whether a task reads what another one writes."""
    return bool(set(other.writes).intersection(task.reads))


def _is_move(task: Task) -> bool:
    """Return whether a task is a movement that was not lowered to hops."""
    return task.op is Op.MOVE
