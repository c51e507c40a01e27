"""Messages inside a node and between nodes on two lanes at the same time.

Pipe-A2A of ScheMoE (Shi et al., EuroSys 2024), section 5. At best twice as fast as one lane, where both take equally long.
"""

from __future__ import annotations

from moesaic.program.links.link import AbstractLink, Hop, Leg, Places, legs_of
from moesaic.program.task import Lane


class Pipelined(AbstractLink):
    """An exchange inside the nodes beside one between them."""

    def hops(self, places: Places) -> tuple[Hop, ...]:
        return Hop(Lane.INTER), Hop(Lane.INTRA)

    def path(self, places: Places, source: int, target: int) -> tuple[Leg, ...]:
        return legs_of((int(places.node(source) == places.node(target)), source, target))
