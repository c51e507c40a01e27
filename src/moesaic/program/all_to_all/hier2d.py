"""2DH: inside the node to the rank with the target's place, then between nodes among ranks of equal place.

Tutel (Hwang et al., MLSys 2023), section 4.3; its algorithm 2 prints a wrong index where nodes and ranks per node differ.
With m ranks per node, messages between nodes are m times larger and m times fewer than in the plain all-to-all.
"""

from __future__ import annotations

from moesaic.program.all_to_all.all_to_all import AbstractAllToAll, Hop, Leg, NodeMap, legs_of
from moesaic.program.task import Lane


class Hier2D(AbstractAllToAll):
    """An exchange inside the nodes, then one between them."""

    needs_even_nodes = True
    judges_layouts = True

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTRA), Hop(Lane.INTER, (-1, 0))

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        mate = places.rank(places.node(source), places.local(target))
        return legs_of((0, source, mate), (1, mate, target))
