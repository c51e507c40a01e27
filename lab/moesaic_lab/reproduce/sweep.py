"""Simulate many layers on one mesh: link loads are computed for two reference layers and
interpolated for all others.

Under even routing, the messages of a movement are the same for every layer on a mesh, except for
their bytes. A message occupies a link for a start-up time plus bytes over rate, which is linear in
the bytes. Two layers therefore determine all others. A sweep of a thousand layers costs little more
than laying out its tasks in time.

A piece is the rows that one rank contributes for one expert, of one chunk. A movement is the
messages of one task. Slots, layouts and hops are those of `program/task.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from moesaic.planner.call_sizes import chunks_of
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.even import AbstractEvenLayers, EvenLayers, PieceRows, piece_rows
from moesaic.planner.movement import AbstractVolumes, Movement, row_bytes
from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import Simulated
from moesaic.planner.topology import Load, Topology
from moesaic.planner.workload import Workload
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.layouts import Move, ends_of
from moesaic.program.plan import Plan
from moesaic.program.row_counts import HopRows, Messages
from moesaic.program.task import Kind, Layout, Op, Program, Slot, Task

_REFERENCE = 1 << 20
"""Tokens and hidden units of the first reference layer; the second has twice as many of both."""


@dataclass(frozen=True)
class _Line:
    """A movement's link times as linear functions of the bytes of a piece."""

    moved: Movement
    """The movement in the first reference layer."""
    intercept: np.ndarray
    """(links,) seconds of start-up."""
    slope: np.ndarray
    """(links,) seconds per byte of a piece."""

    def at(self, num_bytes: float) -> Movement:
        """Return the movement for pieces of `num_bytes`."""
        load = self.moved.load
        seconds = self.intercept + self.slope * num_bytes
        return Movement(
            self.moved.actors,
            Load(load.links, seconds, load.messages, load.latency),
            self.moved.posts,
        )


class _Family:
    """The data shared by all layers of a program on a mesh: two reference layers, and the lines
    through both.

    Args:
        first: volumes of the first reference layer.
        second: volumes of the second one, which has twice the tokens and hidden units.
        pieces: rows per piece of both layers.
    """

    def __init__(
        self, first: AbstractVolumes, second: AbstractVolumes, pieces: tuple[PieceRows, PieceRows]
    ) -> None:
        self.first = first
        self.second = second
        self.pieces = pieces
        self.rows: dict[Layout, np.ndarray] = {}
        """Rows of the first layer, by layout."""
        self.experts: dict[Layout, np.ndarray] = {}
        """Rows per expert of the first layer, by layout."""
        self._lines: dict[tuple[object, ...], list[_Line]] = {}

    def lines(self, task: Task, slots: Mapping[str, Slot], codec: str) -> list[_Line]:
        """Return the movements of a move or hop task, as lines over the bytes of a piece."""
        source, move = ends_of(task, slots)
        algorithm = task.link if task.op is Op.HOP else ""
        key = (source.kind, move, codec, algorithm, task.hop)
        if key not in self._lines:
            sizes = [
                row_bytes(source, codec, piece.of(source.layout), self.first.layer)
                for piece in self.pieces
            ]
            first = self.first.movements(task, slots, codec)
            second = self.second.movements(task, slots, codec)
            self._lines[key] = [_line(one, two, sizes) for one, two in zip(first, second)]
        return self._lines[key]


class Scaled(AbstractVolumes):
    """Rows and messages of one layer, scaled from the reference layers.

    Args:
        family: the reference layers of the same program and mesh.
        piece: rows per piece of the layer.
    """

    def __init__(self, family: _Family, layer: Workload, piece: PieceRows) -> None:
        self._family = family
        self._piece = piece
        self.layer = layer
        self.topology: Topology = family.first.topology
        self.grid: Grid = family.first.grid

    @property
    def num_actors(self) -> int:
        return self._family.first.num_actors

    def rows(self, layout: Layout) -> np.ndarray:
        rows = self._family.rows
        if layout not in rows:
            rows[layout] = self._family.first.rows(layout)
        return rows[layout] * self._times(layout)

    def rows_per_expert(self, layout: Layout) -> np.ndarray:
        experts = self._family.experts
        if layout not in experts:
            experts[layout] = self._family.first.rows_per_expert(layout)
        return experts[layout] * self._times(layout)

    def shards(self, weights: Layout) -> float:
        return self._family.first.shards(weights)

    def stays(self, move: Move) -> bool:
        """See `AbstractRowsMoved`."""
        return self._family.first.stays(move)

    def messages(self, move: Move) -> tuple[Messages, Messages]:
        """See `AbstractRowsMoved`."""
        return self._family.first.messages(move)

    def hop_rows(self, hop: HopRows) -> np.ndarray:
        """See `AbstractRowCounts`."""
        return self._family.first.hop_rows(hop) * self._times(hop.move.source)

    def movements(self, task: Task, slots: Mapping[str, Slot], codec: str) -> list[Movement]:
        source, _ = ends_of(task, slots)
        num_bytes = row_bytes(source, codec, self._piece.of(source.layout), self.layer)
        return [line.at(num_bytes) for line in self._family.lines(task, slots, codec)]

    def _times(self, layout: Layout) -> float:
        """Return a layer's amount in a layout over that of the family's first layer."""
        first_piece, _ = self._family.pieces
        # where the first layer has no rows (replicas under even routing), this one has none either
        return self._piece.of(layout) / (first_piece.of(layout) or 1.0)


class SweptLayers(AbstractEvenLayers):
    """Even routing for many layers per mesh and program. A simulator with it gives the same times
    as one without, only faster.

    Codecs that encode rows in blocks round up each message, which scaling ignores: an error of up
    to one block per message.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self._even = EvenLayers(cluster)
        self._families: dict[tuple[object, ...], _Family] = {}

    def volumes(self, program: Program, workload: Workload, grid: Grid) -> AbstractVolumes:
        """Return the rows and messages of a program under even routing."""
        chunks = chunks_of(program)
        redundant = program.is_redundant
        has_steps = any(slot.layout.step is not None for slot in program.slots)
        key = (grid, workload.num_experts, chunks, redundant, has_steps)
        if key not in self._families:
            layers = [
                Workload(
                    tokens=size, num_experts=workload.num_experts, top_k=1, dim=1024, hidden=size
                )
                for size in (_REFERENCE, 2 * _REFERENCE)
            ]
            first, second = (self._even.volumes(program, layer, grid) for layer in layers)
            one, two = (piece_rows(layer, grid, chunks, redundant) for layer in layers)
            self._families[key] = _Family(first, second, (one, two))
        return Scaled(self._families[key], workload, piece_rows(workload, grid, chunks, redundant))


class SweptRuns:
    """Simulates forward and backward passes of layers on a cluster; each plan is compiled once per
    mesh.

    Args:
        sends_gates: whether routing weights are sent with the rows, as in our layers. If not, they
            are applied at the tokens' home ranks.
    """

    def __init__(self, cluster: ClusterSpec, *, sends_gates: bool = True) -> None:
        self.simulator = sweep_simulator(cluster)
        self._sends_gates = sends_gates
        self._compiled: dict[tuple[Plan, Grid], Compiled] = {}

    def compiled(self, plan: Plan, grid: Grid) -> Compiled:
        """Return the compiled plan."""
        if (plan, grid) not in self._compiled:
            compiled = compile_plan(plan, grid)
            if not self._sends_gates:
                compiled = replace(
                    compiled,
                    forward=_without_gates(compiled.forward),
                    backward=_without_gates(compiled.backward),
                )
            self._compiled[plan, grid] = compiled
        return self._compiled[plan, grid]

    def run(self, plan: Plan, grid: Grid, workload: Workload) -> tuple[Simulated, Simulated]:
        """Return the simulated forward and backward passes of a layer."""
        compiled = self.compiled(plan, grid)
        forward, backward = (
            self.simulator.run(program, workload, compiled.grid)
            for program in (compiled.forward, compiled.backward)
        )
        return forward, backward


def _without_gates(program: Program) -> Program:
    """Return a program without the tasks that move routing weights (`Kind.LANE`, a number per row);
    it can only be timed, not run."""
    kinds = {slot.name: slot.kind for slot in program.slots}
    tasks = []
    for task in program.tasks:
        results = task.writes
        if task.of is not None:  # a part of a movement, into the movement's target
            results = (task.of[1],)
        if any(kinds[name] is not Kind.LANE for name in results):
            tasks.append(task)
    return replace(program, tasks=tuple(tasks))


def sweep_simulator(cluster: ClusterSpec) -> Simulator:
    """Return a simulator that is fast for many layers per mesh and program, under even routing."""
    return Simulator(cluster, even=SweptLayers(cluster))


def _line(one: Movement, two: Movement, sizes: list[float]) -> _Line:
    """Return the line through two movements with the same messages, whose pieces have these sizes
    in bytes."""
    first_size, second_size = sizes
    step = second_size - first_size
    slope = np.zeros(len(one.load.seconds))
    if step:
        slope = (two.load.seconds - one.load.seconds) / step
    return _Line(one, one.load.seconds - slope * first_size, slope)
