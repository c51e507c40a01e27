"""The time of two micro-batches in flight (`moesaic.in_flight`): of MoE layers and what lies
between them, as one program.

A call pauses where the executor does (`Life.pauses`), and the other micro-batch goes on. What a
micro-batch computes between two calls is one task. Backward passes take turns in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.movement import AbstractVolumes
from moesaic.planner.task_times import Costs, costs_of, events_of
from moesaic.program.life import life_of
from moesaic.program.task import Lane, Op, Program, Stage, Task

FEW = 3
"""Layers that are simulated; each further one takes as long as the mean of those after the
first."""


class Turn(NamedTuple):
    """A task of one of two micro-batches, and when it runs."""

    micro_batch: int
    layer: int
    task: str
    """Its name; "" for what lies between calls."""
    lane: Lane
    start: float
    end: float


@dataclass(frozen=True)
class InFlight:
    """The passes of two micro-batches through all layers, in flight."""

    seconds: float
    turns: tuple[Turn, ...]
    """Of the first `FEW` layers, on the rank that ends last."""


class _Place(NamedTuple):
    """A task of the program of all calls."""

    micro_batch: int
    layer: int
    number: int
    """Its place in the program of a call; -1 for what lies before the call."""


def in_flight(
    cluster: ClusterSpec,
    program: Program,
    volumes: AbstractVolumes,
    dtype: str,
    *,
    between: float,
    layers: int,
) -> InFlight:
    """Simulate a program of MoE layers in two micro-batches that take turns.

    Args:
        cluster, program, volumes, dtype: as of `timed`.
        between: seconds for which a micro-batch computes before each layer.
        layers: number of layers.
    """
    costs = costs_of(cluster, program, volumes, dtype)

    def run(few: int) -> InFlight:
        """Return the run of few layers, two micro-batches taking turns."""
        places = list(_taking_turns(program, few))
        both = replace(program, tasks=tuple(_task_of(program, place) for place in places))
        events = events_of(cluster, both, _costs_of(costs, places, between))
        last = int(events.ends.max(axis=0).argmax())
        times = zip(places, both.tasks, events.starts[:, last], events.ends[:, last])
        turns = tuple(
            Turn(
                place.micro_batch,
                place.layer,
                task=program.tasks[place.number].name if place.number >= 0 else "",
                lane=task.lane,
                start=float(start),
                end=float(end),
            )
            for place, task, start, end in times
        )
        return InFlight(float(events.ends.max()), turns)

    few = run(min(layers, FEW))
    if layers <= FEW:
        return few
    each = (few.seconds - run(1).seconds) / (FEW - 1)
    return replace(few, seconds=few.seconds + (layers - FEW) * each)


def _taking_turns(program: Program, layers: int) -> Iterator[_Place]:
    """Yield the tasks of all calls in the order in which a rank issues them: each micro-batch runs
    from one pause to the next, then the other one does."""
    pieces = _pieces(program)
    turns: list[list[tuple[int, int]]] = [[]]
    for layer in range(layers):
        turns[-1].append((layer, -1))
        for number, piece in enumerate(pieces):
            turns += [[]] if number else []
            turns[-1] += [(layer, place) for place in piece]
    for turn in turns:
        for micro_batch in range(2):
            for layer, number in turn:
                yield _Place(micro_batch, layer, number)


def _pieces(program: Program) -> list[list[int]]:
    """Return the tasks of a call between its pauses, by their places in the program."""
    life = life_of(program, frozenset(program.outputs))
    number_of = {task.name: number for number, task in enumerate(program.tasks)}
    pieces: list[list[int]] = [[]]
    for place, step in enumerate(life.steps):
        pieces += [[]] if place in life.pauses else []
        pieces[-1] += [number_of[task.name] for task in step.tasks]
    return pieces


def _task_of(program: Program, place: _Place) -> Task:
    """Return a task with names of its own call. What lies before a call waits for the results of
    the call before, and its own call for it."""

    def named(names: tuple[str, ...], layer: int) -> tuple[str, ...]:
        return tuple(f"{name} {place.micro_batch} {layer}" for name in names)

    if place.number < 0:
        before = named(program.outputs, place.layer - 1)
        after = named(program.inputs, place.layer)
        name = f"between {place.micro_batch} {place.layer}"
        return Task(name=name, op=Op.ADD, reads=before, writes=after, stage=Stage.EXPERT)
    task = program.tasks[place.number]
    return replace(
        task,
        name=named((task.name,), place.layer)[0],
        reads=named(task.reads, place.layer),
        writes=named(task.writes, place.layer),
    )


def _costs_of(costs: Costs, places: list[_Place], between: float) -> Costs:
    """Return the costs of the tasks of all calls. What lies before a call computes `between`
    seconds."""
    numbers = np.array([max(place.number, 0) for place in places])
    is_between = np.array([place.number < 0 for place in places])
    issue = costs.issue[numbers]
    compute = costs.compute[numbers]
    issue[is_between] = 0.0
    compute[is_between] = between
    movements = [[] if place.number < 0 else costs.movements[place.number] for place in places]
    return Costs(issue, compute, movements)
