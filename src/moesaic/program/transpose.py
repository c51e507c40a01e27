"""Derives the backward program: each slot becomes its cotangent, in the dual state.

The cotangent of a value that is replicated and used differently is partial, and vice versa. Sharded
and identical values keep their state. An all-gather whose incoming gradient is partial thus becomes
a reduce-scatter. If its gradient is identical on all ranks, it becomes a slice that moves no bytes.
The states alone decide this.

A program is a list of tasks that read and write named values, its slots. The transpose reads and
writes the cotangents (gradients) of these slots, with the tasks in reverse order.

`up_to_experts` returns the part of a forward program to recompute when only the inputs of the
experts are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from moesaic.program.task import HELPERS, Kind, Op, Program, Slot, Stage, Task

SUFFIX = "'"
"""Added to a slot's name to form the name of its cotangent."""

_SWAPPED = {
    Op.PERMUTE: Op.COMBINE,
    Op.COMBINE: Op.PERMUTE,
    Op.TAKE: Op.JOIN,
    Op.JOIN: Op.TAKE,
    Op.MOVE: Op.MOVE,
    Op.SCALE: Op.SCALE,
}
"""By operation, that of its transpose; expert tasks are treated apart."""
_STAGE = {Stage.DISPATCH: Stage.COMBINE, Stage.COMBINE: Stage.DISPATCH, Stage.EXPERT: Stage.EXPERT}
"""By stage, that of its tasks' transposes."""


def transpose(program: Program) -> Program:
    """Return the backward program, which reads the cotangents of the outputs and writes those of
    the inputs.

    It also reads the forward values in `saved`: indices and the inputs of the experts. Weights that
    were gathered are not kept; the backward program gathers them again. A slot with several readers
    gets one cotangent per reader and a task that adds them.
    """
    transposition = _Transposition(program)
    # Gather weights again, as in the forward program.
    for task in _fetches(program):
        for name in task.writes:
            transposition.slots[name] = program.slot(name)
        transposition.tasks.append(task)

    for task in reversed(program.tasks):
        if any(_flows(program, name) for name in task.writes):
            transposition.add(task)

    saved_names = saved(program)
    for name in saved_names:
        transposition.slots[name] = program.slot(name)
    given = tuple(cotangent(name) for name in program.outputs)
    return Program(
        name=f"{program.name}, backward",
        slots=tuple(transposition.slots.values()),
        tasks=tuple(transposition.tasks),
        inputs=given + saved_names,
        outputs=tuple(cotangent(name) for name in program.inputs if _flows(program, name)),
    )


class _Transposition:
    """A backward program under construction. Shares of a cotangent are collected until every reader
    has contributed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots = {cotangent(name): dual(program.slot(name)) for name in program.outputs}
        self.tasks: list[Task] = []
        self._readers = Counter(
            name for task in program.tasks for name in task.reads if _flows(program, name)
        )
        """By forward slot, how many tasks read it."""
        self._shares: dict[str, list[str]] = {}
        """By forward slot with several readers, the slots of the shares of its cotangent."""

    def add(self, task: Task) -> None:
        """Append the transpose of a task, and the sums of cotangents that are complete with it."""
        differentiable = [name for name in task.reads if _flows(self.program, name)]
        if task.op is Op.EXPERT:  # its gradient needs all that it read
            op = Op.EXPERT_GRAD
            forward_values = task.reads
        else:
            op = _SWAPPED[task.op]
            forward_values = tuple(name for name in task.reads if name not in differentiable)
        cotangents = tuple(cotangent(name) for name in task.writes)
        self.tasks.append(
            replace(
                task,
                name=cotangent(task.name),
                op=op,
                reads=cotangents + forward_values,
                writes=tuple(self._share(name) for name in differentiable),
                stage=_STAGE[task.stage],
                power=task.dual_power,
                dual_power=task.power,
            )
        )
        for name in differentiable:
            num_readers = self._readers[name]
            if num_readers > 1 and len(self._shares[name]) == num_readers:
                self._sum(name, _STAGE[task.stage])

    def _share(self, name: str) -> str:
        """Add and return the slot for one reader's share of a cotangent. With a single reader, this
        is the cotangent itself."""
        slot = dual(self.program.slot(name))
        if self._readers[name] > 1:
            shares = self._shares.setdefault(name, [])
            slot = replace(slot, name=f"{slot.name}{len(shares)}")
            shares.append(slot.name)
        self.slots[slot.name] = slot
        return slot.name

    def _sum(self, name: str, stage: Stage) -> None:
        """Add up the shares of a slot's gradient."""
        total = dual(self.program.slot(name))
        self.slots[total.name] = total
        reads = tuple(self._shares[name])
        self.tasks.append(
            Task(name=f"{total.name}+", op=Op.ADD, reads=reads, writes=(total.name,), stage=stage)
        )


def saved(program: Program) -> tuple[str, ...]:
    """Return the names of the forward slots that the backward program reads, each once.

    These are what the fetches of weights read, the inputs of the experts, and indices; not the
    fetched weights, which the backward program fetches again.
    """
    fetches = _fetches(program)
    names = [name for task in fetches for name in task.reads]
    for task in program.tasks:
        if task.op is Op.EXPERT:
            names += task.reads
        elif task.op in (Op.PERMUTE, Op.COMBINE):
            names += [name for name in task.reads if not _flows(program, name)]
    fetched = {name for task in fetches for name in task.writes}
    return tuple(name for name in dict.fromkeys(names) if name not in fetched)


def _fetches(program: Program) -> list[Task]:
    """Return the tasks that fetch weights from the ranks that store them, in order, except those
    for replicated copies.

    The weights of replicated copies are fetched once and kept for the backward pass.
    """
    fetches = []
    for task in program.tasks:
        written = program.slot(task.writes[0])
        if written.kind is Kind.WEIGHT and written.layout.chunk not in HELPERS:
            fetches.append(task)
    return fetches


def cotangent(name: str) -> str:
    """Return the name of a slot's cotangent."""
    return name + SUFFIX


def dual(slot: Slot) -> Slot:
    """Return the cotangent of a slot: the same rows, with the dual state on every axis."""
    return replace(
        slot,
        name=cotangent(slot.name),
        state=tuple((axis, state.dual) for axis, state in slot.state),
    )


def _flows(program: Program, name: str) -> bool:
    """Whether gradients flow through a slot."""
    return program.slot(name).kind is not Kind.INDEX


def up_to_experts(program: Program, wanted: Collection[str]) -> Program:
    """Return the program reduced to the experts and the slots in `wanted`: the dispatch without the
    combine.

    All ranks drop the same tasks, so the remaining messages still match.

    Args:
        program: a forward program, in the order in which it runs.
        wanted: names of the slots that the backward program reads.
    """
    # From the end, keep each task that writes a slot which a later one, or the caller, reads.
    needed = set(wanted)
    tasks = []
    for task in reversed(program.tasks):
        if task.op is Op.EXPERT or needed.intersection(task.writes):
            tasks.append(task)
            needed.update(task.reads)
    return replace(
        program,
        name=f"{program.name}, up to the experts",
        tasks=tuple(reversed(tasks)),
        outputs=tuple(wanted),
    )
