"""The interface of an all-to-all algorithm: the hops, and the ranks through which a packet travels
from source to target.

A packet is what one rank of a group sends to another. A hop is one round of messages, a leg the
way of a packet in one hop, and its path all its legs in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, permutations

import numpy as np

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import Lane

PACKED = -1
"""Stands for the packed input, in place of the number of an earlier hop."""

FOLLOWED = 8
"""The most ranks of a group whose paths `check_link` follows."""


@dataclass(frozen=True)
class Hop:
    """One round of messages: one message per pair of ranks, however many packets it contains."""

    lane: Lane
    """INTRA or INTER."""
    reads: tuple[int, ...] = (PACKED,)
    """The earlier hops whose packets this hop forwards. Hops that do not read each other run at the
    same time."""


@dataclass(frozen=True)
class Leg:
    """The movement of a packet in one hop."""

    hop: int
    source: int
    target: int


class AbstractAllToAll(ABC):
    """An all-to-all within a group of ranks. Subclasses have no state: everything follows from the
    group and its nodes."""

    needs_even_nodes = False
    """Whether every node must hold the same number of ranks of the group."""
    judges_layouts = False
    """Whether the plan search tries this algorithm on every layout. Others are tried only on the
    layouts that are best under these."""
    is_searched = True
    """Whether the plan search tries this algorithm; False for one that only serves to be compared
    with."""
    hops_by_node = False
    """Whether the first hops are one per destination node, in the order of the nodes. Each node
    then runs these hops in its own order; the simulator uses one order for all, with an error of up
    to 15 % (tests/planner/test_even.py)."""

    def nodes_per_group(self, nodes: int) -> int:
        """Return the number of neighbouring nodes per group, if paths depend on groups of nodes
        (`NodeMap.like`)."""
        return 1

    @abstractmethod
    def hops(self, node_map: NodeMap) -> tuple[Hop, ...]:
        """Return the hops, in an order in which they may be issued."""

    @abstractmethod
    def path(self, node_map: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        """Return the legs of a packet between two different ranks, in order, without legs from a
        rank to itself."""

    def paths(self, node_map: NodeMap) -> dict[int, np.ndarray]:
        """Return for each hop the legs of all packets: source and target of the packet, then of the
        leg, (4, packets) int64.

        Override it for an algorithm whose paths are a formula: computing them at once is faster for
        thousands of ranks.
        """
        by_hop: dict[int, list[tuple[int, int, int, int]]] = {}
        for source, target in permutations(node_map.ranks, 2):
            for leg in self.path(node_map, source, target):
                by_hop.setdefault(leg.hop, []).append((source, target, leg.source, leg.target))
        return {hop: np.array(legs).T for hop, legs in by_hop.items()}


class NodeMap:
    """The nodes of a group's ranks, and each rank's position among the group's ranks on its node.

    Args:
        ranks: the ranks of the group, ascending.
    """

    def __init__(self, grid: Grid, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.nodes = [list(ranks_of_node) for _, ranks_of_node in groupby(ranks, grid.node_of)]
        """The group's ranks on each node."""
        self._positions = {
            rank: (node_index, local)
            for node_index, ranks_of_node in enumerate(self.nodes)
            for local, rank in enumerate(ranks_of_node)
        }

    @property
    def is_even(self) -> bool:
        """Whether every node holds the same number of ranks of the group."""
        return len({len(node) for node in self.nodes}) == 1

    def node(self, rank: int) -> int:
        """Return the index of a rank's node within the group."""
        return self._positions[rank][0]

    def local(self, rank: int) -> int:
        """Return a rank's position among the group's ranks on its node."""
        return self._positions[rank][1]

    def rank(self, node: int, local: int) -> int:
        """Return the rank at a position."""
        return self.nodes[node][local]

    def like(self, node: int, other: int, size: int) -> int:
        """Return the node in the group of `node` that has the position which `other` has in its own
        group of `size` nodes."""
        return node // size * size + other % size


def legs_by_hop(
    link: AbstractAllToAll, grid: Grid, group: tuple[Axis, ...]
) -> dict[int, np.ndarray]:
    """Return for each hop the legs of all packets within all groups over some axes, as
    `AbstractAllToAll.paths` does.

    (4, packets) int64 each. A hop without packets is left out.
    """
    by_hop: dict[int, list[np.ndarray]] = {}
    first_groups = grid.kinds_of_groups(group)
    for ranks in first_groups:
        for hop, legs in link.paths(NodeMap(grid, ranks)).items():
            by_hop.setdefault(hop, []).append(legs)

    # These groups cover the first ranks; all others are the same, shifted by as many ranks.
    num_ranks = sum(len(ranks) for ranks in first_groups)
    shifts = np.arange(0, grid.world, num_ranks)
    all_legs = {}
    for hop, parts in by_hop.items():
        legs = np.concatenate(parts, axis=1)
        shifted = legs[:, None, :] + shifts[:, None]  # (4, shifts, packets)
        all_legs[hop] = shifted.reshape(4, -1)
    return all_legs


def check_link(link: AbstractAllToAll, name: str, grid: Grid, group: tuple[Axis, ...]) -> None:
    """Raise InputError if an algorithm cannot run within all groups over some axes with the same
    hops.

    Paths are followed in groups of at most `FOLLOWED` ranks only, since a search compiles plans for
    thousands.
    """
    if not isinstance(link, AbstractAllToAll):
        raise InputError(
            f"plan.all_to_all={name} is {link!r} in ALL_TO_ALLS: put an object of an "
            "AbstractAllToAll there"
        )
    _check_groups(link, name, grid, group)


@lru_cache(maxsize=1024)
def _check_groups(link: AbstractAllToAll, name: str, grid: Grid, group: tuple[Axis, ...]) -> None:
    """Check an algorithm as `check_link` does, once for all programs of a search on a mesh."""
    node_maps = [NodeMap(grid, ranks) for ranks in grid.kinds_of_groups(group)]
    if link.needs_even_nodes and not all(node_map.is_even for node_map in node_maps):
        raise InputError(
            f"plan.all_to_all={name} needs equally many ranks of every group over "
            f"{'+'.join(group)} on each node, which nodes of {grid.ranks_per_node} ranks do not "
            "give: choose linear or pipelined"
        )
    for node_map in node_maps:
        check_hops(link.hops(node_map), f"plan.all_to_all={name}: ")
        if len(node_map.ranks) <= FOLLOWED:
            check_paths(link, node_map, f"plan.all_to_all={name}: ")
    if len({link.hops(node_map) for node_map in node_maps}) > 1:
        raise InputError(
            f"plan.all_to_all={name} needs every group over {'+'.join(group)} on equally many "
            f"nodes, which nodes of {grid.ranks_per_node} ranks do not give: choose linear or "
            "pipelined"
        )


def check_hops(hops: tuple[Hop, ...], where: str) -> None:
    """Raise InputError, whose message starts with `where`, unless hops can be issued in their
    order."""
    if not isinstance(hops, tuple) or not hops:
        raise InputError(
            f"{where}hops are {hops!r}: return a tuple of at least one Hop(lane, reads)"
        )
    for number, hop in enumerate(hops):
        if hop.lane not in (Lane.INTRA, Lane.INTER):
            raise InputError(
                f"{where}hop {number} is on {hop.lane}: choose Lane.INTRA or Lane.INTER"
            )
        reads = hop.reads if isinstance(hop.reads, tuple) else ()
        if not reads or not all(PACKED <= read < number for read in reads):
            raise InputError(
                f"{where}hop {number} reads {hop.reads!r}: give a tuple of numbers of earlier "
                f"hops, or {PACKED} for the input"
            )


def check_paths(link: AbstractAllToAll, node_map: NodeMap, where: str) -> None:
    """Raise InputError, whose message starts with `where`, unless every path leads from its source
    to its target."""
    hops = link.hops(node_map)
    for source, target in permutations(node_map.ranks, 2):
        rank = source  # where the packet is
        last_hop = PACKED  # in which it came there
        path = f"{where}the path from rank {source} to {target}"
        legs = link.path(node_map, source, target)
        if not isinstance(legs, tuple) or not all(isinstance(leg, Leg) for leg in legs):
            raise InputError(f"{path} is {legs!r}: return a tuple of Leg(hop, source, target)")
        for leg in legs:
            name = f"{path}: the leg {leg.source} to {leg.target} in hop {leg.hop}"
            if not last_hop < leg.hop < len(hops):
                raise InputError(
                    f"{name} needs a hop after {last_hop}, of hops 0 to {len(hops) - 1}: "
                    "change its hop"
                )
            if leg.source != rank or leg.target == rank or leg.target not in node_map.ranks:
                raise InputError(
                    f"{name} does not start at {rank}, or not end at another rank of "
                    f"{node_map.ranks}: change it"
                )
            hop = hops[leg.hop]
            if last_hop not in hop.reads:
                raise InputError(
                    f"{name} passes on a packet of hop {last_hop}: add {last_hop} to the reads of "
                    f"hop {leg.hop}"
                )
            stays_inside = node_map.node(rank) == node_map.node(leg.target)
            if hop.lane is Lane.INTRA and not stays_inside:
                raise InputError(f"{name} leaves a node: put the hop on Lane.INTER")
            rank = leg.target
            last_hop = leg.hop
        if rank != target:
            raise InputError(f"{path} ends at rank {rank}: add the legs from there")


def legs_of(*legs: tuple[int, int, int]) -> tuple[Leg, ...]:
    """Return legs from (hop, source, target) triples, without those from a rank to itself."""
    return tuple(Leg(hop, source, target) for hop, source, target in legs if source != target)
