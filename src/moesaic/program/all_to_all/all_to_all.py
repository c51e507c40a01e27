"""The interface of an all-to-all algorithm: over which ranks, in which hops, a packet goes from its source to its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import groupby, permutations

import numpy as np

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import Lane

PACKED = -1
"""The number of the step before the first hop."""


@dataclass(frozen=True)
class Hop:
    """A step in which packets move: one message per pair of ranks, whatever the number of packets in it."""

    lane: Lane
    """intra or inter."""
    reads: tuple[int, ...] = (PACKED,)
    """Earlier hops that packets come from; hops that do not read each other run at the same time."""


@dataclass(frozen=True)
class Leg:
    """A packet's move in one hop."""

    hop: int
    source: int
    target: int


class AbstractAllToAll(ABC):
    """An all-to-all within a group of ranks. A leaf is stateless: everything follows from the group and its nodes."""

    needs_even_nodes = False
    """True if every node must hold equally many ranks of the group."""
    judges_layouts = False
    """True if the search tries it on every layout; others are tried on the layouts that are best under these."""
    hops_by_node = False
    """True if the first hops are one per node of destination, numbered as the nodes are. Nodes then do the same hops in orders
    of their own; the simulator takes them in one order, which is up to 15 % off (tests/cost/test_even.py)."""

    def nodes_per_group(self, nodes: int) -> int:
        """Return how many neighbouring nodes form a group, where paths depend on groups of nodes (`NodeMap.like`)."""
        return 1

    @abstractmethod
    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        """Return the hops, in an order in which they may be issued."""

    @abstractmethod
    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        """Return the legs of a packet between two different ranks, in order; legs that stay where they are left out."""

    def paths(self, places: NodeMap) -> dict[int, np.ndarray]:
        """Return by hop the legs of all packets of the group: source and target of packet, then of leg, (4, packets) int64.

        An all-to-all whose paths are a formula may give them at once, for thousands of ranks.
        """
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        for source, target in permutations(places.ranks, 2):
            for leg in self.path(places, source, target):
                found.setdefault(leg.hop, []).append((source, target, leg.source, leg.target))
        return {hop: np.array(legs).T for hop, legs in found.items()}


class NodeMap:
    """Where the ranks of a group stand: on which node, and which one of the group's ranks there.

    Args:
        ranks: of the group, ascending.
    """

    def __init__(self, grid: Grid, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.nodes = [list(node) for _, node in groupby(ranks, grid.node_of)]
        """Ranks of the group by node."""
        self._at = {rank: (n, i) for n, node in enumerate(self.nodes) for i, rank in enumerate(node)}

    @property
    def is_even(self) -> bool:
        """Whether every node holds equally many ranks of the group."""
        return len({len(node) for node in self.nodes}) == 1

    def node(self, rank: int) -> int:
        """Return a rank's node, counted within the group."""
        return self._at[rank][0]

    def local(self, rank: int) -> int:
        """Return a rank's place among the group's ranks on its node."""
        return self._at[rank][1]

    def rank(self, node: int, local: int) -> int:
        """Return the rank at a place."""
        return self.nodes[node][local]

    def like(self, node: int, other: int, size: int) -> int:
        """Return the node that has, in the group of `node`, the place that `other` has in its own group of `size` nodes."""
        return node // size * size + other % size


def legs_by_hop(link: AbstractAllToAll, grid: Grid, group: tuple[Axis, ...]) -> dict[int, np.ndarray]:
    """Return by hop the legs of all packets within the groups over some axes: source and target of packet, then of leg.

    (4, packets) int64 each. A hop that no packet takes is left out.
    """
    found: dict[int, list[np.ndarray]] = {}
    kinds = grid.kinds_of_groups(group)
    for ranks in kinds:
        for hop, legs in link.paths(NodeMap(grid, ranks)).items():
            found.setdefault(hop, []).append(legs)
    again = np.arange(0, grid.world, sum(map(len, kinds)))
    return {hop: (np.concatenate(legs, axis=1)[:, None] + again[:, None]).reshape(4, -1) for hop, legs in found.items()}


def check_link(link: AbstractAllToAll, name: str, grid: Grid, group: tuple[Axis, ...]) -> None:
    """Raise InputError if an algorithm cannot run within the groups over some axes, all in the same hops."""
    places = [NodeMap(grid, ranks) for ranks in grid.kinds_of_groups(group)]
    if link.needs_even_nodes and not all(each.is_even for each in places):
        raise InputError(
            f"plan.all_to_all={name} needs equally many ranks of every group over {'+'.join(group)} on each node, "
            f"which nodes of {grid.ranks_per_node} ranks do not give: choose linear or pipelined"
        )
    if len({link.hops(each) for each in places}) > 1:
        raise InputError(
            f"plan.all_to_all={name} needs every group over {'+'.join(group)} on equally many nodes, which nodes of "
            f"{grid.ranks_per_node} ranks do not give: choose linear or pipelined"
        )


def legs_of(*legs: tuple[int, int, int]) -> tuple[Leg, ...]:
    """Return legs from (hop, source, target) triples, those that stay in place left out."""
    return tuple(Leg(*leg) for leg in legs if leg[1] != leg[2])
