"""One rank per node speaks for all: gather inside the node, exchange between the leaders, scatter inside the node.

Hetu (Nie et al., 2022), the "hierarchical all-to-all": few large messages between nodes, through one rank's link.
"""

from __future__ import annotations

from moesaic.program.all_to_all.all_to_all import AbstractAllToAll, Hop, Leg, NodeMap, legs_of
from moesaic.program.task import Lane


class Hier1D(AbstractAllToAll):
    """Gather to the leader, leaders exchange, scatter; what stays on the node goes straight."""

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTRA), Hop(Lane.INTER, (-1, 0)), Hop(Lane.INTRA, (0, 1))

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        if places.node(source) == places.node(target):
            return legs_of((0, source, target))
        mine, theirs = (places.rank(places.node(rank), 0) for rank in (source, target))
        return legs_of((0, source, mine), (1, mine, theirs), (2, theirs, target))
