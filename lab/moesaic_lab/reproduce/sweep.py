"""Many layers on one mesh: what a program puts on the links is worked out twice and scaled from there.

Under even routing the messages of a movement are the same for every layer on a mesh; only their bytes differ, and the time that
a link is taken is start-up per message plus bytes over rate. So two layers tell all others. A sweep of a thousand layers
costs little more than its events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from moesaic.cost.call_sizes import chunks_of
from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.even import AbstractEvenLayers, EvenLayers, PieceRows, piece_rows
from moesaic.cost.movement import AbstractVolumes, Movement, ends_of, row_bytes
from moesaic.cost.simulate import Simulator
from moesaic.cost.timing import Simulated
from moesaic.cost.topology import Load, Topology
from moesaic.cost.workload import Workload
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.task import Kind, Layout, Op, Program, Slot, Task

_REFERENCE = 1 << 20
"""Tokens and hidden units of the first reference layer; the second has twice as many."""


@dataclass(frozen=True)
class _Line:
    """A movement by the bytes of one piece of what it moves."""

    moved: Movement
    intercept: np.ndarray
    """(links,) seconds of start-up."""
    slope: np.ndarray
    """(links,) seconds per byte of a piece."""

    def at(self, num_bytes: float) -> Movement:
        """Return the movement for pieces of so many bytes."""
        load = self.moved.load
        seconds = self.intercept + self.slope * num_bytes
        return Movement(self.moved.actors, Load(load.links, seconds, load.messages, load.latency), self.moved.posts)


class _Family:
    """What all layers on a mesh have in common: two of them, and the lines through both.

    Args:
        first: volumes of a layer.
        second: of one with twice the tokens and the hidden units.
        pieces: of the two.
    """

    def __init__(self, first: AbstractVolumes, second: AbstractVolumes, pieces: tuple[PieceRows, PieceRows]) -> None:
        self.first, self.second, self.pieces = first, second, pieces
        self.rows: dict[Layout, np.ndarray] = {}
        self.experts: dict[Layout, np.ndarray] = {}
        self._lines: dict[tuple[object, ...], list[_Line]] = {}

    def lines(self, task: Task, slots: Mapping[str, Slot], codec: str) -> list[_Line]:
        """Return the movements of a move or hop, each a line over the bytes of a piece."""
        source, move = ends_of(task, slots)
        key = (source.kind, move, codec, task.link if task.op is Op.HOP else "", task.hop)
        if key not in self._lines:
            found = [volumes.movements(task, slots, codec) for volumes in (self.first, self.second)]
            sizes = [row_bytes(source, codec, piece.of(source.layout), self.first.layer) for piece in self.pieces]
            self._lines[key] = [_line(one, two, sizes) for one, two in zip(*found)]
        return self._lines[key]


class Scaled(AbstractVolumes):
    """Rows and messages of one layer of a family.

    Args:
        family: of its mesh.
        layer: of the family.
        piece: rows of a piece of the layer.
    """

    def __init__(self, family: _Family, layer: Workload, piece: PieceRows) -> None:
        self._family, self._piece = family, piece
        self.layer = layer
        self.topology: Topology = family.first.topology

    @property
    def num_actors(self) -> int:
        return self._family.first.num_actors

    def rows(self, layout: Layout) -> np.ndarray:
        rows = self._family.rows
        if layout not in rows:
            rows[layout] = self._family.first.rows(layout)
        return rows[layout] * self._times(layout)

    def rows_per_expert(self, layout: Layout) -> np.ndarray:
        held = self._family.experts
        if layout not in held:
            held[layout] = self._family.first.rows_per_expert(layout)
        return held[layout] * self._times(layout)

    def shards(self, weights: Layout) -> float:
        return self._family.first.shards(weights)

    def movements(self, task: Task, slots: Mapping[str, Slot], codec: str) -> list[Movement]:
        source = ends_of(task, slots)[0]
        num_bytes = row_bytes(source, codec, self._piece.of(source.layout), self.layer)
        return [line.at(num_bytes) for line in self._family.lines(task, slots, codec)]

    def _times(self, layout: Layout) -> float:
        return self._piece.of(layout) / (self._family.pieces[0].of(layout) or 1.0)


class SweptLayers(AbstractEvenLayers):
    """Many even layers per mesh and program; a simulator that takes them has the times of one that does not.

    Codecs that code rows in blocks round up message by message, which pieces do not show: up to one block per message.

    Args:
        cluster: on what.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self._each = EvenLayers(cluster)
        self._families: dict[tuple[object, ...], _Family] = {}

    def volumes(self, program: Program, workload: Workload, grid: Grid) -> AbstractVolumes:
        """Return the rows and messages of a program under even routing."""
        chunks, redundant = chunks_of(program), program.is_redundant
        apart = any(slot.layout.step is not None for slot in program.slots)
        key = (grid, workload.num_experts, chunks, redundant, apart)
        if key not in self._families:
            made = [
                Workload(tokens=size, num_experts=workload.num_experts, top_k=1, dim=1024, hidden=size)
                for size in (_REFERENCE, 2 * _REFERENCE)
            ]
            one, two = (self._each.volumes(program, each, grid) for each in made)
            pieces = [piece_rows(each, grid, chunks, redundant) for each in made]
            self._families[key] = _Family(one, two, (pieces[0], pieces[1]))
        return Scaled(self._families[key], workload, piece_rows(workload, grid, chunks, redundant))


class SweptRuns:
    """Plans on meshes of a cluster, each compiled once, and their layers, forward and backward.

    Args:
        cluster: on what.
        sends_gates: whether routing weights travel with the rows, as in our layers, or are applied where the rows come home to.
    """

    def __init__(self, cluster: ClusterSpec, *, sends_gates: bool = True) -> None:
        self.simulator, self._sends_gates = sweep_simulator(cluster), sends_gates
        self._compiled: dict[tuple[Plan, Grid], Compiled] = {}

    def compiled(self, plan: Plan, grid: Grid) -> Compiled:
        """Return the programs of a plan."""
        if (plan, grid) not in self._compiled:
            made = compile_plan(plan, grid)
            if not self._sends_gates:
                made = replace(made, forward=_without_gates(made.forward), backward=_without_gates(made.backward))
            self._compiled[plan, grid] = made
        return self._compiled[plan, grid]

    def run(self, plan: Plan, grid: Grid, workload: Workload) -> tuple[Simulated, Simulated]:
        """Return the forward and the backward pass of a layer."""
        made = self.compiled(plan, grid)
        there, back = (self.simulator.run(each, workload, made.grid) for each in (made.forward, made.backward))
        return there, back


def _without_gates(program: Program) -> Program:
    """Return a program, to be timed, in which no routing weight moves."""
    kinds = {slot.name: slot.kind for slot in program.slots}
    kept = [
        task
        for task in program.tasks
        if any(kinds[n] is not Kind.LANE for n in (task.of[1:] if task.of else task.writes))
    ]
    return replace(program, tasks=tuple(kept))


def sweep_simulator(cluster: ClusterSpec) -> Simulator:
    """Return a simulator for many even layers per mesh and program."""
    return Simulator(cluster, even=SweptLayers(cluster))


def _line(one: Movement, two: Movement, sizes: list[float]) -> _Line:
    """Return the line through two movements with the same messages."""
    step = sizes[1] - sizes[0]
    slope = (two.load.seconds - one.load.seconds) / step if step else np.zeros(len(one.load.seconds))
    return _Line(one, one.load.seconds - slope * sizes[0], slope)
