"""Every rank sends to every other at once, one message each."""

from __future__ import annotations

from moesaic.program.links.link import AbstractLink, Hop, Leg, Places, legs_of
from moesaic.program.task import Lane


class Linear(AbstractLink):
    """The plain all-to-all."""

    judges_layouts = True

    def hops(self, places: Places) -> tuple[Hop, ...]:
        return (Hop(Lane.INTER),)

    def path(self, places: Places, source: int, target: int) -> tuple[Leg, ...]:
        return legs_of((0, source, target))
