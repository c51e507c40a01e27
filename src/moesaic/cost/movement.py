"""What a program's tasks are to the simulator: movements with loads on links, and rows to compute on.

`AbstractVolumes` has two leaves: `Even` (`symmetry.py`) for workloads in which all ranks do the same, one actor for all of
them; `Counted` (`counted.py`) for a matrix of counts, an actor per rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moesaic.cost.row_bytes import LayerShape
from moesaic.cost.topology import Load, Topology
from moesaic.program.sizes import Move
from moesaic.program.task import Layout, Op, Program, Slot, Task
from moesaic.program.validate import reduces


@dataclass(frozen=True)
class Movement:
    """Messages that start and end together: a connected part of what a task moves."""

    actors: tuple[int, ...]
    """Who sends or receives any of them, ascending."""
    load: Load
    posts: np.ndarray
    """(actors,) sends and receives that each of them posts."""


class AbstractVolumes(ABC):
    """Rows and messages of a program's tasks, by actor."""

    topology: Topology
    shape: LayerShape

    @property
    @abstractmethod
    def num_actors(self) -> int:
        """Ranks that are told apart."""

    @abstractmethod
    def rows(self, layout: Layout) -> np.ndarray:
        """Return the rows of a slot of this layout, (actors,) float64."""

    @abstractmethod
    def rows_per_expert(self, layout: Layout) -> list[np.ndarray]:
        """Return for each actor the rows of each expert that it runs, zeros among them."""

    @abstractmethod
    def shards(self, weights: Layout) -> float:
        """Return how much of an expert's hidden width a rank runs with weights of this layout, 0 to 1."""

    @abstractmethod
    def movements(self, task: Task, slots: Mapping[str, Slot], codec: str) -> list[Movement]:
        """Return what a move or hop puts on the links.

        Args:
            task: the move or hop.
            slots: of its program, by name.
            codec: of the rows that it carries; "" for none.
        """


def ends_of(task: Task, slots: Mapping[str, Slot]) -> tuple[Slot, Move]:
    """Return the source slot of a move or hop, and the movement that it is, or is a part of."""
    source, target = (slots[name] for name in (task.of or (task.reads[0], task.writes[0])))
    return source, Move(source.layout, target.layout, task.group, reduces(source, target))


def movements_of(program: Program, volumes: AbstractVolumes) -> list[list[Movement]]:
    """Return the movements of each task of a program; none where it moves nothing."""
    slots = {slot.name: slot for slot in program.slots}
    codecs = {task.of: task.codec for task in program.tasks if task.op is Op.PACK}
    return [
        volumes.movements(task, slots, codecs.get(task.of, "")) if task.op in (Op.MOVE, Op.HOP) else []
        for task in program.tasks
    ]


def connected(source: np.ndarray, target: np.ndarray, num_actors: int) -> list[np.ndarray]:
    """Return the messages of each connected set of actors, by their places in the arguments.

    Args:
        source: (n,) actors.
        target: (n,) actors.
        num_actors: in all.
    """
    if not len(source):
        return []
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    edges = coo_matrix((np.ones(len(source)), (source, target)), shape=(num_actors, num_actors))
    label = connected_components(edges, directed=False)[1][source]
    order = np.argsort(label, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1)
