"""The all-to-all algorithms.

Some send each message straight from source to target. The others relay messages through further
ranks, so that fewer and larger messages cross between nodes.

A hop is one round of messages, on the lane of the links inside nodes or of those between them; its
`reads` are the earlier hops whose packets it forwards, -1 for the input. A path is the legs of one
packet, (hop, source, target) each; a leg from a rank to itself is left out.
"""

from __future__ import annotations

import math

import numpy as np

from moesaic.program.all_to_all.all_to_all import AbstractAllToAll, Hop, Leg, NodeMap, legs_of
from moesaic.program.task import Lane


class Linear(AbstractAllToAll):
    """The plain all-to-all: every rank sends one message to every other rank, all at once."""

    judges_layouts = True

    def hops(self, node_map: NodeMap) -> tuple[Hop, ...]:
        return (Hop(Lane.INTER),)

    def path(self, node_map: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        return legs_of((0, source, target))


class Pipelined(AbstractAllToAll):
    """The plain all-to-all with the messages inside nodes and between nodes on two lanes at the
    same time.

    Pipe-A2A of ScheMoE (Shi et al., EuroSys 2024), section 5. At best twice as fast as one lane, if
    both take equally long.
    """

    def hops(self, node_map: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTER), Hop(Lane.INTRA)

    def path(self, node_map: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        is_inside = node_map.node(source) == node_map.node(target)
        # hop 0 is between nodes, hop 1 inside
        return legs_of((1 if is_inside else 0, source, target))


class Hier1D(AbstractAllToAll):
    """Gather to a leader rank per node, exchange between leaders, scatter. Messages inside a node
    go straight to their target.

    The "hierarchical all-to-all" of Hetu (Nie et al., 2022): few large messages between nodes,
    through one rank's link.
    """

    def hops(self, node_map: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTRA), Hop(Lane.INTER, (-1, 0)), Hop(Lane.INTRA, (0, 1))

    def path(self, node_map: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        if node_map.node(source) == node_map.node(target):
            return legs_of((0, source, target))
        # the first rank of the group on each node
        leader = node_map.rank(node_map.node(source), 0)
        target_leader = node_map.rank(node_map.node(target), 0)
        return legs_of((0, source, leader), (1, leader, target_leader), (2, target_leader, target))


class Hier2D(AbstractAllToAll):
    """2DH: inside the node to the rank with the target's local rank, then between nodes among equal
    local ranks.

    Tutel (Hwang et al., MLSys 2023), section 4.3; its algorithm 2 prints a wrong index for unequal
    numbers of nodes and ranks per node. With m ranks per node, messages between nodes are m times
    larger and m times fewer than in the plain all-to-all.
    """

    needs_even_nodes = True
    judges_layouts = True

    def hops(self, node_map: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTRA), Hop(Lane.INTER, (-1, 0))

    def path(self, node_map: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        mate = node_map.rank(node_map.node(source), node_map.local(target))
        return legs_of((0, source, mate), (1, mate, target))

    def paths(self, node_map: NodeMap) -> dict[int, np.ndarray]:
        """Return what `path` does for all pairs of ranks, hop by hop; see the base class."""
        ranks = np.array(node_map.ranks)
        ranks_by_node = np.array(node_map.nodes)  # (nodes, ranks per node)
        # Ranks of a group are node-major, so their position tells node and local rank. A packet is
        # a pair of two different positions; its mate is on the source's node.
        node, local = np.divmod(np.arange(len(ranks)), ranks_by_node.shape[1])
        source_position, target_position = np.nonzero(~np.eye(len(ranks), dtype=bool))
        mate = ranks_by_node[node[source_position], local[target_position]]
        source = ranks[source_position]
        target = ranks[target_position]

        legs_by_hop = {}
        for hop, (leg_source, leg_target) in enumerate([(source, mate), (mate, target)]):
            legs = np.stack([source, target, leg_source, leg_target])
            legs = legs[:, leg_source != leg_target]
            if legs.shape[1]:
                legs_by_hop[hop] = legs
        return legs_by_hop


class NaiveAggregation(AbstractAllToAll):
    """Like 2DH, but packets are not aligned first: one exchange inside the nodes per destination
    node, then one between nodes.

    The baseline of Tutel (Hwang et al., MLSys 2023), section 4.3. Each pair of ranks inside a node
    exchanges as many small messages as there are nodes.
    """

    needs_even_nodes = True
    hops_by_node = True

    def hops(self, node_map: NodeMap) -> tuple[Hop, ...]:
        inside = range(len(node_map.nodes))
        hops_inside = [Hop(Lane.INTRA) for _ in inside]
        return (*hops_inside, Hop(Lane.INTER, (-1, *inside)))

    def path(self, node_map: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        hop_inside = node_map.node(target)  # one for each destination node, in their order
        hop_between = len(node_map.nodes)  # the last one
        mate = node_map.rank(node_map.node(source), node_map.local(target))
        return legs_of((hop_inside, source, mate), (hop_between, mate, target))


class Hier3D(AbstractAllToAll):
    """2DH with a third level: inside the node, inside a group of nodes, then between groups.

    For networks with a third level (racks, islands of fast links): messages between groups are the
    largest and fewest. The nodes per group are the largest divisor of the number of nodes that is
    at most its square root.
    """

    needs_even_nodes = True

    def hops(self, node_map: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTRA), Hop(Lane.INTER, (-1, 0)), Hop(Lane.INTER, (-1, 0, 1))

    def path(self, node_map: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        """Return the way of rows: to the mate on the own node, to that on a relay node, to the
        target."""
        source_node = node_map.node(source)
        target_node = node_map.node(target)
        mate = node_map.rank(source_node, node_map.local(target))
        # In the source's group of nodes, the node at the place that the target's has in its group.
        nodes_per_group = self.nodes_per_group(len(node_map.nodes))
        relay_node = node_map.like(source_node, target_node, nodes_per_group)
        relay = node_map.rank(relay_node, node_map.local(target))
        return legs_of((0, source, mate), (1, mate, relay), (2, relay, target))

    def nodes_per_group(self, nodes: int) -> int:
        return max(size for size in range(1, math.isqrt(nodes) + 1) if nodes % size == 0)
