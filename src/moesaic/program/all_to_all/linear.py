"""Every rank sends to every other at once, one message each."""

from __future__ import annotations

from moesaic.program.all_to_all.all_to_all import AbstractAllToAll, Hop, Leg, NodeMap, legs_of
from moesaic.program.task import Lane


class Linear(AbstractAllToAll):
    """The plain all-to-all."""

    judges_layouts = True

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        return (Hop(Lane.INTER),)

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        return legs_of((0, source, target))
