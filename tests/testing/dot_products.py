"""The dot test of programs: every movement's derived transpose is its mathematical transpose.

<A x, y> = <x, A' y> must hold for every movement A of a program and its derived transpose A',
lowered as in the plan. A value that is identical on all ranks of an axis counts once: the inner
product is the sum over ranks, divided by the sizes of the axes on which the slot is identical.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.experts import AbstractExperts
from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.program.passes.route_all_to_all import route_all_to_all
from moesaic.program.task import Kind, Op, Program, Slot, State, Task
from moesaic.program.transpose import cotangent, transpose
from moesaic.runtime.executor import drive, interpret
from moesaic.runtime.tasks import Call, Value
from moesaic.testing.runner import same_axes

_WIDTH = 3


def dot_errors(compiled: Compiled, calls: list[Call], seed: int) -> dict[str, float]:
    """Return |<A x, y> - <x, A' y>| for every movement of the forward program, relative to the
    larger one.

    Args:
        compiled: the plan.
        calls: one call per rank, with any sizes.
        seed: seed of the random values.
    """
    errors = {}
    for number, task in enumerate(compiled.logical.moves()):
        alone = one_task(compiled.logical, task)
        source, target = (alone.slot(name) for name in (*alone.inputs, *alone.outputs))
        replicates = source.kind is Kind.WEIGHT and target.layout.chunk in (
            "near",
            "here",
        )  # each helper gets other weights, so there is no single value for the inner product
        if source.kind is Kind.INDEX or replicates:
            continue
        forward, backward = (
            route_all_to_all(p, compiled.plan.link, compiled.grid)
            for p in (alone, transpose(alone))
        )
        x = [_values(source, call, seed + 2 * number) for call in calls]
        y = [_values(_dual(target), call, seed + 2 * number + 1) for call in calls]
        inputs = [{source.name: _as_value(source, value)} for value in x]
        ax = _run(forward, target.name, inputs, calls)
        both = [
            values | {cotangent(target.name): _as_value(target, value)}
            for values, value in zip(inputs, y)
        ]
        ay = _run(backward, cotangent(source.name), both, calls)
        left = _pairing(target, ax, y, compiled.grid)
        right = _pairing(source, x, ay, compiled.grid)
        errors[task.name] = abs(left - right) / max(abs(left), abs(right), 1.0)
    return errors


def one_task(program: Program, task: Task) -> Program:
    """Return a program that consists of one task."""
    slots = tuple(slot for slot in program.slots if slot.name in (*task.reads, *task.writes))
    return Program(
        name=task.name, slots=slots, tasks=(task,), inputs=task.reads, outputs=task.writes
    )


class _RowsAsWeights:
    """Replaces a call's experts; here, parameters are already rows."""

    def pack(self, sharded: tuple[Tensor, ...]) -> Tensor:
        return sharded[0]

    def unpack(self, rows: Tensor, num_experts: int) -> tuple[Tensor, ...]:
        return (rows,)


def _run(
    program: Program, output: str, inputs: list[dict[str, Value]], calls: list[Call]
) -> list[Tensor]:
    """Run a program of one movement on all ranks."""

    def rank(transport: AbstractTransport) -> Tensor:
        call = replace(
            calls[transport.rank], experts=cast(AbstractExperts, _RowsAsWeights()), first_tag=0
        )
        out = drive(interpret(program, inputs[transport.rank], call), transport)[output]
        return out if isinstance(out, Tensor) else out[0]

    return run_ranks(len(calls), rank)


def _as_value(slot: Slot, rows: Tensor) -> Value:
    return (rows,) if slot.kind is Kind.WEIGHT else rows


def _values(slot: Slot, call: Call, seed: int) -> Tensor:
    """Return random rows, equal on ranks that must hold the same values."""
    grid = call.sizes.grid
    rank = call.rank
    first = min(_closure(slot, grid, rank))
    generator = torch.Generator().manual_seed(1000 * seed + first)
    shape = call.sizes.num_rows(slot.layout, rank), 1 if slot.kind is Kind.LANE else _WIDTH
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _pairing(slot: Slot, left: list[Tensor], right: list[Tensor], grid: Grid) -> float:
    counted = 1
    for axis, state in slot.state:
        counted *= grid.size(axis) if state is State.IDENTICAL else 1
    return sum(float((a * b).sum()) for a, b in zip(left, right)) / counted


def _closure(slot: Slot, grid: Grid, rank: int) -> set[int]:
    """Return the ranks that hold the same values of a slot as `rank`."""
    ranks = {rank}
    new = {rank}
    while new:
        new = {
            peer
            for member in new
            for axis in same_axes(slot)
            for peer in grid.group(member, (axis,))
        } - ranks
        ranks |= new
    return ranks


def _dual(slot: Slot) -> Slot:
    return replace(
        slot,
        name=cotangent(slot.name),
        state=tuple((axis, state.dual) for axis, state in slot.state),
    )


def restores(program: Program, task: Task) -> bool:
    """Whether transposing a task twice returns its operation, group, layouts, kinds and states."""
    alone = one_task(program, task)
    twice = transpose(transpose(alone))
    return _types(alone, alone.tasks[0]) == _types(twice, twice.tasks[0])


def _types(program: Program, task: Task) -> tuple[object, ...]:
    slots = [program.slot(name) for name in (*task.reads, *task.writes)]
    kinds = [
        (slot.kind, slot.layout, sorted(slot.state))
        for slot in slots
        if slot.kind is not Kind.INDEX
    ]
    return task.op, task.group, task.power, task.dual_power, kinds


def is_reversible(program: Program, task: Task) -> bool:
    """Whether a task's transpose can be transposed, which experts, fetched weights and indices
    cannot."""
    kinds = {program.slot(name).kind for name in task.writes}
    return task.op not in (Op.EXPERT, Op.EXPERT_GRAD, Op.ADD) and not kinds & {
        Kind.WEIGHT,
        Kind.INDEX,
    }
