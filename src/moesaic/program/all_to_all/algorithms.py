"""The all-to-all algorithms: those whose messages go straight from their source to their target, and those whose messages go by
way of other ranks, so that those between nodes are fewer and larger.
"""

from __future__ import annotations

import math

import numpy as np

from moesaic.program.all_to_all.all_to_all import AbstractAllToAll, Hop, Leg, NodeMap, legs_of
from moesaic.program.task import Lane


class Linear(AbstractAllToAll):
    """The plain all-to-all: every rank sends to every other at once, one message each."""

    judges_layouts = True

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        return (Hop(Lane.INTER),)

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        return legs_of((0, source, target))


class Pipelined(AbstractAllToAll):
    """Messages inside a node and between nodes on two lanes at the same time.

    Pipe-A2A of ScheMoE (Shi et al., EuroSys 2024), section 5. At best twice as fast as one lane, where both take equally long.
    """

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTER), Hop(Lane.INTRA)

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        return legs_of((int(places.node(source) == places.node(target)), source, target))


class Hier1D(AbstractAllToAll):
    """One rank per node speaks for all: gather to the leader, leaders exchange, scatter; what stays on the node goes straight.

    Hetu (Nie et al., 2022), the "hierarchical all-to-all": few large messages between nodes, through one rank's link.
    """

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTRA), Hop(Lane.INTER, (-1, 0)), Hop(Lane.INTRA, (0, 1))

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        if places.node(source) == places.node(target):
            return legs_of((0, source, target))
        mine, theirs = (places.rank(places.node(rank), 0) for rank in (source, target))
        return legs_of((0, source, mine), (1, mine, theirs), (2, theirs, target))


class Hier2D(AbstractAllToAll):
    """2DH: inside the node to the rank with the target's place, then between nodes among ranks of equal place.

    Tutel (Hwang et al., MLSys 2023), section 4.3; its algorithm 2 prints a wrong index where nodes and ranks per node differ.
    With m ranks per node, messages between nodes are m times larger and m times fewer than in the plain all-to-all.
    """

    needs_even_nodes = True
    judges_layouts = True

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTRA), Hop(Lane.INTER, (-1, 0))

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        mate = places.rank(places.node(source), places.local(target))
        return legs_of((0, source, mate), (1, mate, target))

    def paths(self, places: NodeMap) -> dict[int, np.ndarray]:
        ranks, at = np.array(places.ranks), np.array(places.nodes)
        node, local = np.divmod(np.arange(len(ranks)), at.shape[1])  # ranks of a group are node-major
        source, target = np.nonzero(~np.eye(len(ranks), dtype=bool))
        mate = at[node[source], local[target]]
        source, target = ranks[source], ranks[target]
        hops = (source, mate), (mate, target)
        legs = {hop: np.stack([source, target, *ends])[:, ends[0] != ends[1]] for hop, ends in enumerate(hops)}
        return {hop: each for hop, each in legs.items() if each.shape[1]}


class NaiveAggregation(AbstractAllToAll):
    """As 2DH, but without aligning packets first: an exchange inside the nodes per node of destination, then one between nodes.

    The baseline of Tutel (Hwang et al., MLSys 2023), section 4.3: as many small messages inside the node as there are nodes,
    per pair of ranks.
    """

    needs_even_nodes = True
    hops_by_node = True

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        inside = range(len(places.nodes))
        return *(Hop(Lane.INTRA) for _ in inside), Hop(Lane.INTER, (-1, *inside))

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        node, last = places.node(target), len(places.nodes)
        mate = places.rank(places.node(source), places.local(target))
        return legs_of((node, source, mate), (last, mate, target))


class Hier3D(AbstractAllToAll):
    """2DH once more, over groups of nodes: inside the node, inside the group of nodes, between groups.

    For networks with a third level (racks, islands of fast links): messages between groups are the largest and fewest. Groups
    have the largest number of nodes that divides all and is at most their square root.
    """

    needs_even_nodes = True

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTRA), Hop(Lane.INTER, (-1, 0)), Hop(Lane.INTER, (-1, 0, 1))

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        here, there = places.node(source), places.node(target)
        mate = places.rank(here, places.local(target))
        near = places.like(here, there, self.nodes_per_group(len(places.nodes)))
        gate = places.rank(near, places.local(target))
        return legs_of((0, source, mate), (1, mate, gate), (2, gate, target))

    def nodes_per_group(self, nodes: int) -> int:
        return max(size for size in range(1, math.isqrt(nodes) + 1) if nodes % size == 0)
