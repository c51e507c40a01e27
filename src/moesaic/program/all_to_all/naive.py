"""Naive local aggregation: as 2DH, but without aligning packets first, so that each node's packets go inside the node apart.

The baseline of Tutel (Hwang et al., MLSys 2023), section 4.3: as many small messages inside the node as there are nodes, per
pair of ranks.
"""

from __future__ import annotations

from moesaic.program.all_to_all.all_to_all import AbstractAllToAll, Hop, Leg, NodeMap, legs_of
from moesaic.program.task import Lane


class NaiveAggregation(AbstractAllToAll):
    """One exchange inside the nodes per node of destination, then one between nodes."""

    needs_even_nodes = True
    hops_by_node = True

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        inside = range(len(places.nodes))
        return *(Hop(Lane.INTRA) for _ in inside), Hop(Lane.INTER, (-1, *inside))

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        node, last = places.node(target), len(places.nodes)
        mate = places.rank(places.node(source), places.local(target))
        return legs_of((node, source, mate), (last, mate, target))
