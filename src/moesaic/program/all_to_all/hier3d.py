"""2DH once more, over groups of nodes: inside the node, inside the group of nodes, between groups.

For networks with a third level (racks, islands of fast links). Messages between groups are the largest and fewest.
"""

from __future__ import annotations

import math

from moesaic.program.all_to_all.all_to_all import AbstractAllToAll, Hop, Leg, NodeMap, legs_of
from moesaic.program.task import Lane


class Hier3D(AbstractAllToAll):
    """Groups have the largest number of nodes that divides all and is at most their square root."""

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
