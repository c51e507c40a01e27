"""All-to-alls whose messages go straight from their source to their target."""

from __future__ import annotations

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
