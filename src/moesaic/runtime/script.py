"""What a program says about its run before any count is known: its steps in order, worked out once and kept.

Every call of every layer walks through a program of a dozen tasks. Finding bundles, states and last readers anew each time
takes longer than the small layers' matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from moesaic.comm.transport import Lane as TransportLane
from moesaic.program.bundles import bundles
from moesaic.program.shapes import Move
from moesaic.program.task import Op, Program, Slot, Task
from moesaic.program.validate import reduces
from moesaic.runtime.call import kept
from moesaic.runtime.compute import transport_lane


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tasks that start together."""

    number: int
    """Of the first task in the program: tags are counted by it."""
    tasks: tuple[Task, ...]
    """One, or movements that travel as one."""
    moves: tuple[Move, ...]
    """Of tasks that are movements, one each."""
    reads: tuple[str, ...]
    """Of all tasks."""
    unread: tuple[str, ...]
    """Slots that nothing reads any more and nobody wants."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program, ready to be run any number of times."""

    slots: Mapping[str, Slot]
    """By name."""
    steps: tuple[Step, ...]
    """In order."""

    @cached_property
    def slowest(self) -> TransportLane:
        """The lane whose messages are waited for longest: between nodes, where any cross."""
        lanes = {transport_lane(step.tasks[0]) for step in self.steps if step.tasks[0].op in (Op.MOVE, Op.HOP)}
        return "inter" if "inter" in lanes else "intra"


@lru_cache(maxsize=512)
def script_of(program: Program, wanted: frozenset[str] | None) -> Script:
    """Return a program's script.

    Args:
        program: what is to run.
        wanted: slots that are returned in the end; None for all of them.
    """
    slots = {slot.name: slot for slot in program.slots}
    numbers = bundles(program)
    splits = [tuple(program.tasks[number] for number in bundle) for bundle in numbers]
    steps = [
        Step(
            number=bundle[0],
            tasks=tasks,
            moves=tuple(_move(task, slots) for task in tasks if task.op is Op.MOVE),
            reads=tuple(name for task in tasks for name in task.reads),
            unread=tuple(unread),
        )
        for bundle, tasks, unread in zip(numbers, splits, _last_read(splits, wanted))
    ]
    return Script(slots=slots, steps=tuple(steps))


def _move(task: Task, slots: Mapping[str, Slot]) -> Move:
    source, target = slots[task.reads[0]], slots[task.writes[0]]
    return Move(source.layout, target.layout, task.group, reduces(source, target))


def _last_read(splits: Sequence[Sequence[Task]], wanted: frozenset[str] | None) -> list[list[str]]:
    """Return after each step which slots are read, or written, for the last time and not wanted."""
    found: list[list[str]] = [[] for _ in splits]
    if wanted is None:
        return found
    last: dict[str, int] = {}
    for number, tasks in enumerate(splits):
        for task in tasks:
            last.update(dict.fromkeys((*task.reads, *task.writes), number))
            if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
                last[kept(task.name)] = number
    for name, number in last.items():
        if name not in wanted and name != "w":  # stored anyway, and any movement of weights looks at their shape
            found[number].append(name)
    return found
