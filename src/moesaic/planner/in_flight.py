"""The time of two micro-batches in flight (`moesaic.in_flight`): of MoE layers and what lies
between them, as one program.

A call is one run of a layer's program for one micro-batch. It pauses where the executor does
(`Life.pauses`), and the other micro-batch goes on. What a micro-batch computes between two calls is
one task. Backward passes take turns in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import Costs, costs_of, events_of
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
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
    """A task of the program of all calls, or what lies before a call."""

    micro_batch: int
    layer: int
    number: int
    """Its place in the program of a call; -1 for what lies before the call."""


def layers_in_flight(
    simulator: Simulator,
    program: Program,
    layer: Workload,
    grid: Grid,
    *,
    between: float,
    layers: int,
) -> InFlight:
    """Simulate a program of equal MoE layers in two micro-batches that take turns.

    Args:
        simulator: of the cluster.
        program: a pass of a compiled plan.
        layer: each of the layers.
        grid: of the compiled plan.
        between: seconds for which a micro-batch computes before each layer.
        layers: number of layers.
    """
    volumes = simulator.volumes(program, layer, grid)
    costs = costs_of(simulator.cluster, program, volumes, layer.products or layer.dtype)

    def run(num_layers: int) -> InFlight:
        """Simulate some layers, two micro-batches taking turns."""
        places = list(_taking_turns(program, num_layers))
        both = replace(program, tasks=tuple(_task_of(program, place) for place in places))
        events = events_of(simulator.cluster, both, _costs_of(costs, places, between))
        # `starts` and `ends` are (tasks, ranks); tasks are in the order of `places`
        last_rank = int(events.ends.max(axis=0).argmax())
        turns = []
        for number, place in enumerate(places):
            is_call = place.number >= 0
            turns.append(
                Turn(
                    place.micro_batch,
                    place.layer,
                    task=program.tasks[place.number].name if is_call else "",
                    lane=both.tasks[number].lane,
                    start=float(events.starts[number, last_rank]),
                    end=float(events.ends[number, last_rank]),
                )
            )
        return InFlight(float(events.ends.max()), tuple(turns))

    first_layers = run(min(layers, FEW))
    if layers <= FEW:
        return first_layers
    # mean of the simulated layers after the first
    seconds_per_layer = (first_layers.seconds - run(1).seconds) / (FEW - 1)
    seconds = first_layers.seconds + (layers - FEW) * seconds_per_layer
    return replace(first_layers, seconds=seconds)


def _taking_turns(program: Program, layers: int) -> Iterator[_Place]:
    """Yield the tasks of all calls in the order in which a rank issues them: each micro-batch runs
    from one pause to the next, then the other one does."""
    pieces = _pieces(program)
    # the tasks of each turn, as (layer, number as in `_Place`); a turn reaches into the next layer
    turns: list[list[tuple[int, int]]] = [[]]
    for layer in range(layers):
        turns[-1].append((layer, -1))
        for piece_number, piece in enumerate(pieces):
            if piece_number > 0:
                turns.append([])
            turns[-1] += [(layer, number) for number in piece]
    for turn in turns:
        for micro_batch in range(2):
            for layer, number in turn:
                yield _Place(micro_batch, layer, number)


def _pieces(program: Program) -> list[list[int]]:
    """Return the tasks of a call between its pauses, by their places in the program. A step is
    tasks that start together."""
    life = life_of(program, frozenset(program.outputs))
    number_of = {task.name: number for number, task in enumerate(program.tasks)}
    pieces: list[list[int]] = [[]]
    for step_number, step in enumerate(life.steps):
        if step_number in life.pauses:
            pieces.append([])
        pieces[-1] += [number_of[task.name] for task in step.tasks]
    return pieces


def _task_of(program: Program, place: _Place) -> Task:
    """Return a task with names of its own call. What lies before a call waits for the results of
    the call before, and its own call for it."""

    def in_call(names: tuple[str, ...], layer: int) -> tuple[str, ...]:
        """Return names of a program as names of the micro-batch's call in a layer."""
        return tuple(f"{name} {place.micro_batch} {layer}" for name in names)

    if place.number < 0:
        return Task(
            name=f"between {place.micro_batch} {place.layer}",
            op=Op.ADD,  # stands for any computation
            # of layer -1, before the first one, nothing is written, and so nothing is waited for
            reads=in_call(program.outputs, place.layer - 1),
            writes=in_call(program.inputs, place.layer),
            stage=Stage.EXPERT,
        )
    task = program.tasks[place.number]
    (name,) = in_call((task.name,), place.layer)
    return replace(
        task,
        name=name,
        reads=in_call(task.reads, place.layer),
        writes=in_call(task.writes, place.layer),
    )


def _costs_of(costs: Costs, places: list[_Place], between: float) -> Costs:
    """Return the costs of the tasks of all calls. What lies before a call computes `between`
    seconds."""
    is_between = np.array([place.number < 0 for place in places])
    # what lies before a call takes the first task's costs for a moment, which are then replaced
    numbers = np.array([max(place.number, 0) for place in places])
    issue = costs.issue[numbers]
    compute = costs.compute[numbers]
    issue[is_between] = 0.0
    compute[is_between] = between
    movements = [[] if place.number < 0 else costs.movements[place.number] for place in places]
    return Costs(issue, compute, movements)
