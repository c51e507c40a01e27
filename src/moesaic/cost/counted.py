"""`Counted`: rows and messages of a call from its counts, every rank apart: what the interpreter would send, to the row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moesaic.cost.movement import AbstractVolumes, Movement, connected, ends_of
from moesaic.cost.row_bytes import LayerShape, row_bytes
from moesaic.cost.topology import Topology
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import legs_by_hop
from moesaic.program.grid import Axis
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Layout, Op, Slot, Task

Legs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of a hop: source and target of each packet, and of the leg that it takes."""


class Counted(AbstractVolumes):
    """Rows and messages with an actor per rank.

    Args:
        sizes: of the call, on the grid that the plan wants.
        topology: of the cluster, not folded.
        shape: of the layer.
    """

    def __init__(self, sizes: CallSizes, topology: Topology, shape: LayerShape) -> None:
        self.sizes, self.topology, self.shape = sizes, topology, shape
        self._rows: dict[Layout, np.ndarray] = {}
        self._legs: dict[tuple[str, tuple[Axis, ...]], dict[int, Legs]] = {}
        self._found: dict[tuple[object, ...], list[Movement]] = {}

    @property
    def num_actors(self) -> int:
        """Ranks."""
        return self.sizes.grid.world

    def rows(self, layout: Layout) -> np.ndarray:
        """Return the rows of a slot of this layout on each rank."""
        if layout not in self._rows:
            self._rows[layout] = np.array([self.sizes.num_rows(layout, rank) for rank in range(self.num_actors)], float)
        return self._rows[layout]

    def rows_per_expert(self, layout: Layout) -> list[np.ndarray]:
        """Return for each rank the rows of each expert that it runs."""
        return [self.sizes.rows_per_expert(layout, rank).astype(np.float64) for rank in range(self.num_actors)]

    def shards(self, weights: Layout) -> float:
        """Return the share of an expert's hidden width that a rank runs."""
        pieces = len(self.sizes.shapes.pieces(weights, 0).number)
        return pieces / len(self.sizes.shapes.experts(weights, 0)) / self.sizes.grid.etp

    def movements(self, task: Task, slots: Mapping[str, Slot], codec: str) -> list[Movement]:
        """Return the movements of a move or hop, one per connected set of ranks."""
        source, move = ends_of(task, slots)
        key = (source.kind, move, codec, task.link if task.op is Op.HOP else "", task.hop)
        if key not in self._found:
            rows = self.sizes.moved(move)
            if task.op is Op.HOP:
                s, t, a, b = self._paths(task)
                joined = np.zeros_like(rows)
                np.add.at(joined, (a, b), rows[s, t])
                rows = joined
            self._found[key] = self._split(rows, source, codec)
        return self._found[key]

    def _split(self, rows: np.ndarray, slot: Slot, codec: str) -> list[Movement]:
        """Return the movements that a matrix of rows from rank to rank falls into."""
        source, target = np.nonzero(rows)
        if not len(source):
            return []
        amounts, kind = np.unique(rows[source, target], return_inverse=True)
        num_bytes = np.array([row_bytes(slot, codec, each, self.shape) for each in amounts.tolist()])[kind]
        ones = np.ones(len(source))
        posts = np.bincount(source, minlength=self.num_actors) + np.bincount(target, minlength=self.num_actors)
        found = []
        for part in connected(source, target, self.num_actors):
            actors = np.unique([source[part], target[part]])
            load = self.topology.loads(source[part], target[part], num_bytes[part], ones[part])
            found.append(Movement(tuple(actors.tolist()), load, posts[actors].astype(np.float64)))
        return found

    def _paths(self, task: Task) -> Legs:
        key = (task.link, task.group)
        if key not in self._legs:
            found = legs_by_hop(ALL_TO_ALLS[task.link], self.sizes.grid, task.group)
            tables = {hop: np.array(legs, dtype=np.int64) for hop, legs in found.items()}
            self._legs[key] = {hop: (t[:, 0], t[:, 1], t[:, 2], t[:, 3]) for hop, t in tables.items()}
        nothing = np.zeros(0, dtype=np.int64)
        return self._legs[key].get(task.hop, (nothing, nothing, nothing, nothing))
