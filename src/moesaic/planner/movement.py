"""A program's tasks as the simulator sees them: movements with loads on links, and rows to compute
on.

`AbstractVolumes` has two subclasses. `Even` (`even.py`) serves workloads in which all ranks do the
same, with one actor for all. `Counted` serves a matrix of counts, with one actor per rank, and
matches what the interpreter would send to the row.

An actor is a rank that is simulated. A task of a program that moves rows is a move, or a hop if it
is one step of an all-to-all. Its messages are split into movements, which are independent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moesaic.codecs import DTYPES, codec_spec, is_coded
from moesaic.errors import InputError
from moesaic.planner.topology import Load, Topology
from moesaic.planner.workload import Workload
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import AbstractAllToAll
from moesaic.program.grid import Axis, Grid
from moesaic.program.layouts import Move, ends_of
from moesaic.program.row_counts import (
    AbstractRowCounts,
    AbstractRowsMoved,
    HopRows,
    Messages,
    MovedPieces,
    RankRows,
)
from moesaic.program.sizes import CallSizes, MovedRows
from moesaic.program.task import INDEX_BYTES, Kind, Layout, Op, Program, Slot, Task

RANKS_APART = 16
"""Number of ranks up to which each is simulated separately if messages are eager; beyond it, one
rank stands for all."""


@dataclass(frozen=True)
class Movement:
    """Messages that start and end together: a connected part of a task's messages, or one message
    by itself."""

    actors: tuple[int, ...]
    """Actors that send or receive any of the messages, ascending."""
    load: Load
    posts: np.ndarray
    """(actors,) number of sends and receives that each actor posts."""
    sender: int | None = None
    """Sender of a message that leaves when the sender reaches the task, and for which only its
    receiver waits; the links of `load` are then in path order. None: all actors start the movement
    together and wait for its end."""

    @property
    def starters(self) -> tuple[int, ...]:
        """Actors that must reach the movement before it starts."""
        return self.actors if self.sender is None else (self.sender,)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Actors whose task ends only when the movement has arrived."""
        return tuple(actor for actor in self.actors if actor != self.sender)


class AbstractVolumes(AbstractRowsMoved, AbstractRowCounts, ABC):
    """Rows and messages of a program's tasks, by actor."""

    topology: Topology
    layer: Workload
    grid: Grid

    @cached_property
    def movements_known(self) -> dict[int, tuple[Program, list[list[Movement]]]]:
        """The movements of each program so far, by its `id`; the program is kept beside them, so
        that no other one gets this number."""
        return {}

    @cached_property
    def _bytes_known(self) -> dict[tuple[Kind, Layout], np.ndarray]:
        """Results of `bytes_of`."""
        return {}

    def bytes_of(self, slot: Slot) -> np.ndarray:
        """Return the bytes of the rows of a slot, (actors,)."""
        key = slot.kind, slot.layout
        if key not in self._bytes_known:
            bytes_of_row = row_bytes(slot, codec="", rows=1.0, layer=self.layer)
            self._bytes_known[key] = self.rows(slot.layout) * bytes_of_row
        return self._bytes_known[key]

    @property
    @abstractmethod
    def num_actors(self) -> int:
        """Number of actors: ranks that are simulated separately."""

    @abstractmethod
    def rows(self, layout: Layout) -> np.ndarray:
        """Return the rows of a slot of this layout, (actors,) float64."""

    @abstractmethod
    def rows_per_expert(self, layout: Layout) -> np.ndarray:
        """Return the rows of each expert that each actor runs, zeros included, (actors, experts)
        float64."""

    @abstractmethod
    def shards(self, weights: Layout) -> float:
        """Return the share of an expert's hidden width that a rank computes with weights of this
        layout, 0 to 1."""

    def num_shards(self, weights: Layout) -> int:
        """See `AbstractRowsMoved`."""
        return round(self.shards(weights) * self.grid.etp)

    @abstractmethod
    def movements(self, task: Task, slots: Mapping[str, Slot], codec: str) -> list[Movement]:
        """Return the movements of a move or hop.

        Args:
            task: the move or hop.
            slots: slots of its program, by name.
            codec: codec of the rows; "" for none.
        """


def row_bytes(slot: Slot, codec: str, rows: float, layer: Workload) -> float:
    """Return the bytes of a message.

    Args:
        slot: slot that the rows come from.
        codec: codec of token rows; "" for none.
        rows: rows of the message; fractions are expected values.
        layer: gives the sizes of rows, weights and products.
    """
    if slot.kind is Kind.LANE:  # routing weights, in float32
        return rows * 4
    if slot.kind is Kind.INDEX:
        return rows * INDEX_BYTES
    if slot.kind is Kind.WEIGHT:
        matrices = layer.matrices if slot.layout.flow == "weights" else 1  # a bias has one row
        return rows * layer.weight_bytes * layer.dim * matrices
    return coded_bytes(codec, rows, layer.dim, layer.element_bytes)


def of_each(numbers: np.ndarray, function: Callable[[float], float]) -> np.ndarray:
    """Return the values of a function of some numbers, (n,), computed once for equal ones."""
    values = numbers.tolist()
    known = {value: function(value) for value in set(values)}
    return np.array([known[value] for value in values])


def coded_bytes(codec: str, rows: float, dim: int, element_bytes: int) -> float:
    """Return the bytes of a message of token rows.

    Args:
        codec: a codec's name; "" or "none" for none.
        rows: rows of the message.
        dim: columns.
        element_bytes: bytes of a row's elements; 2 stands for bfloat16 (float16 rows under fp16
            would need no scale).

    Raises:
        InputError: if there is no such codec, or it does not support such elements.
    """
    spec = codec_spec(codec)
    if not is_coded(codec):
        return rows * dim * element_bytes
    if element_bytes not in DTYPES:
        raise InputError(
            f"codec {codec} does not support elements of {element_bytes} bytes: use codec "
            "none for them"
        )
    return spec.num_bytes(rows, dim, DTYPES[element_bytes])


def movements_of(program: Program, volumes: AbstractVolumes) -> list[list[Movement]]:
    """Return the movements of each task of a program; an empty list for a task that moves
    nothing."""
    known = volumes.movements_known
    if id(program) not in known:
        slots = {slot.name: slot for slot in program.slots}
        # a movement's codec is that of the task that packs its rows, by the slots that it joins
        codec_of = {task.of: task.codec for task in program.tasks if task.op is Op.PACK}
        movements: list[list[Movement]] = []
        for task in program.tasks:
            if task.op in (Op.MOVE, Op.HOP):
                codec = codec_of.get(task.of, task.codec)
                movements.append(volumes.movements(task, slots, codec))
            else:
                movements.append([])
        known[id(program)] = program, movements
    _, movements_of_tasks = known[id(program)]
    return movements_of_tasks


def connected_components(
    source: np.ndarray, target: np.ndarray, num_actors: int
) -> list[np.ndarray]:
    """Return the messages of each connected set of actors, as indices into the arguments.

    Each set becomes one `Movement`: its actors wait for each other, and for no others.

    Args:
        source: (n,) actors.
        target: (n,) actors.
        num_actors: total number of actors.
    """
    if not len(source):
        return []
    # By actor, the smallest one known to be connected with it. Each takes that of its neighbours if
    # it is smaller, and then that of this one, until nothing changes.
    smallest = np.arange(num_actors)
    before = np.arange(0)
    while not np.array_equal(smallest, before):
        before = smallest.copy()
        np.minimum.at(smallest, source, before[target])
        np.minimum.at(smallest, target, before[source])
        smallest = smallest[smallest]
    # messages of a set have the same label; cut their sorted indices where the label changes
    labels = smallest[source]
    order = np.argsort(labels, kind="stable")
    first_of_sets = np.flatnonzero(np.diff(labels[order])) + 1
    return np.split(order, first_of_sets)


class Counted(AbstractVolumes):
    """Rows and messages with one actor per rank.

    Args:
        sizes: sizes of the call, on the grid that the plan requires.
        topology: of the cluster, not folded.
        layer: the layer whose rows move.
        legs: `legs_by_hop`, possibly cached across calls.
    """

    def __init__(
        self,
        sizes: CallSizes,
        topology: Topology,
        layer: Workload,
        legs: Callable[[AbstractAllToAll, Grid, tuple[Axis, ...]], dict[int, np.ndarray]],
    ) -> None:
        self.sizes = sizes
        self.grid = sizes.grid
        self.topology = topology
        self.layer = layer
        self._legs = legs
        self._rows: dict[Layout, np.ndarray] = {}
        """Results of `rows`."""
        self._movements: dict[tuple[object, ...], list[Movement]] = {}
        """Results of `movements`, by kind of rows, movement, codec, all-to-all and hop."""

    @property
    def num_actors(self) -> int:
        return self.sizes.grid.world

    def rows(self, layout: Layout) -> np.ndarray:
        if layout not in self._rows:
            self._rows[layout] = self.sizes.rows_of_ranks(layout).astype(np.float64)
        return self._rows[layout]

    def rows_per_expert(self, layout: Layout) -> np.ndarray:
        return self.sizes.rows_per_expert_of_ranks(layout).astype(np.float64)

    def hop_rows(self, hop: HopRows) -> np.ndarray:
        """See `AbstractRowCounts`."""
        return RankRows(self.sizes).hop_rows(hop)

    def stays(self, move: Move) -> bool:
        """See `AbstractRowsMoved`; ranks that exchange rows with the first one stand for all."""
        return self._moved(move).stays(move)

    def messages(self, move: Move) -> tuple[Messages, Messages]:
        """See `AbstractRowsMoved`, and `stays`."""
        return self._moved(move).messages(move)

    def _moved(self, move: Move) -> MovedPieces:
        return MovedPieces(self.sizes.shapes, self.grid.group(0, move.group))

    def shards(self, weights: Layout) -> float:
        shapes = self.sizes.shapes  # of all ranks, those of the first one stand for the others
        # a piece is one shard of an expert, and etp of them are the whole one
        num_pieces = len(shapes.pieces(weights, 0).number)
        num_experts = len(shapes.experts(weights, 0))
        return num_pieces / num_experts / self.sizes.grid.etp

    def movements(self, task: Task, slots: Mapping[str, Slot], codec: str) -> list[Movement]:
        """Return the movements of a move or hop: one per connected set of ranks, or one per message
        that is eager."""
        source, move = ends_of(task, slots)
        link = task.link if task.op is Op.HOP else ""  # the all-to-all that a hop is a step of
        key = (source.kind, move, codec, link, task.hop)
        if key not in self._movements:
            moved = self.sizes.moved(move)
            if task.op is Op.HOP:
                moved = moved.on_legs(self._paths(task))
            self._movements[key] = self._split(moved, source, codec)
        return self._movements[key]

    def _split(self, moved: MovedRows, slot: Slot, codec: str) -> list[Movement]:
        """Split rows that go from rank to rank into movements."""
        source = moved.source
        target = moved.target
        if not len(source):
            return []
        num_bytes = of_each(moved.rows, lambda rows: row_bytes(slot, codec, rows, self.layer))
        if self.topology.spec.host.messages == "eager" and self.num_actors <= RANKS_APART:
            return self._messages(source, target, num_bytes)
        ones = np.ones(len(source))
        sends = np.bincount(source, minlength=self.num_actors)
        receives = np.bincount(target, minlength=self.num_actors)
        posts = (sends + receives).astype(np.float64)
        movements = []
        for indices in connected_components(source, target, self.num_actors):
            actors = np.unique([source[indices], target[indices]])
            load = self.topology.loads(
                source[indices], target[indices], num_bytes[indices], ones[indices]
            )
            movements.append(Movement(tuple(actors.tolist()), load, posts[actors]))
        return movements

    def _messages(
        self, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray
    ) -> list[Movement]:
        """Return one movement per pair of ranks. All rows of a task from one rank to another form
        one message."""
        bytes_between: dict[tuple[int, int], float] = {}
        for pair, size in zip(zip(source.tolist(), target.tolist()), num_bytes.tolist()):
            bytes_between[pair] = bytes_between.get(pair, 0.0) + size
        movements = []
        for (sender, receiver), size in bytes_between.items():
            load = self.topology.loads(
                np.array([sender]), np.array([receiver]), np.array([size]), np.ones(1)
            )
            # links that leave the sender come first on the path, then those that arrive
            arrives = self.topology.arrives[load.links]
            path_order = np.concatenate([np.flatnonzero(~arrives), np.flatnonzero(arrives)])
            load = replace(load, links=load.links[path_order], seconds=load.seconds[path_order])
            actors = (min(sender, receiver), max(sender, receiver))
            # one send and one receive
            movements.append(Movement(actors, load, posts=np.ones(2), sender=sender))
        return movements

    def _paths(self, task: Task) -> np.ndarray:
        """Return the legs of a hop as `legs_by_hop` does, (4, legs); without any if no rank takes
        part."""
        legs = self._legs(ALL_TO_ALLS[task.link], self.sizes.grid, task.group)
        return legs.get(task.hop, np.zeros((4, 0), dtype=np.int64))
