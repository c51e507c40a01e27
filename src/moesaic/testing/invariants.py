"""What must hold of every run of a program: replicas agree, bit for bit."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from moesaic.comm.transport import Handle, Transfer
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import Kind, Program, Slot, State
from moesaic.runtime import executor
from moesaic.runtime.executor import interpret
from moesaic.runtime.tasks import Call, Environment, Value


@dataclass(frozen=True)
class Observed:
    """One run of a program on one rank."""

    program: Program
    call: Call
    values: Environment


@contextmanager
def observed() -> Iterator[list[Observed]]:
    """Collect every run of a program that a layer does inside the context, in the order of their ends."""
    runs: list[Observed] = []

    def watching(
        program: Program, values: Mapping[str, Value], call: Call, wanted: Collection[str] | None = None
    ) -> Generator[Transfer | Handle, Handle | None, Environment]:
        environment = yield from interpret(program, values, call)  # all of it, not only what is wanted
        runs.append(Observed(program, call, environment))
        return environment

    with mock.patch.object(executor, "interpret", watching):
        yield runs


def disagreements(runs: list[Observed]) -> list[str]:
    """Return the slots that are replicated or identical on an axis and yet differ between ranks, bit for bit.

    Weights of replicated copies are replicated rank by rank as the copies need them: no two ranks need hold the same.

    Args:
        runs: of all ranks, each rank's in the same order.
    """
    by_rank: dict[int, list[Observed]] = {}
    for run in runs:
        by_rank.setdefault(run.call.rank, []).append(run)
    found = set()
    for together in zip(*(by_rank[rank] for rank in sorted(by_rank))):
        grid, program = together[0].call.sizes.grid, together[0].program
        for slot in program.slots:
            if slot.kind is Kind.WEIGHT and slot.layout.chunk in ("near", "here"):
                continue
            for rank, other in _replicas(slot, grid):
                first, second = (together[r].values.get(slot.name) for r in (rank, other))
                if first is not None and second is not None and not _same(first, second):
                    found.add(f"{program.name}: {slot.name} differs between ranks {rank} and {other}")
    return sorted(found)


def same_axes(slot: Slot) -> list[Axis]:
    """Return the axes on which all ranks hold the same value of a slot."""
    return [axis for axis, state in slot.state if state in (State.REPLICATED, State.IDENTICAL)]


def _replicas(slot: Slot, grid: Grid) -> Iterator[tuple[int, int]]:
    """Yield pairs of ranks that must have the same values; no pair twice."""
    if slot.kind is Kind.PACKETS:
        return
    for axis in same_axes(slot):
        for rank in range(grid.world):
            first = grid.group(rank, (axis,))[0]
            if first != rank:
                yield first, rank


def _same(first: Value, second: Value) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return len(first) == len(second) and all(map(torch.equal, first, second))
