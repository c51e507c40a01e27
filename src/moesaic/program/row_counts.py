"""What the bytes of a call depend on besides its program: how a mesh moves rows, and how many rows
there are. The runtime reads both from the pieces of every rank, the planner also from one rank that
stands for all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import legs_by_hop
from moesaic.program.grid import Axis
from moesaic.program.layouts import AbstractLayoutIndex, Move
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Layout


class HopRows(NamedTuple):
    """Rows that a rank sends or receives in one hop of a movement."""

    move: Move
    link: str
    group: tuple[Axis, ...]
    hop: int
    arrives: bool


class Messages(NamedTuple):
    """The rows of one end of a movement's messages, those to the rank itself included."""

    uses: float
    """How often each row of the slot occurs among them, on the rank where this is most."""
    is_whole: bool
    """Whether they are all rows of the slot in its order, on every rank."""


class AbstractRowsMoved(Protocol):
    """How a mesh moves rows, whatever their number."""

    def stays(self, move: Move) -> bool:
        """Return whether a movement leaves all rows where they are."""

    def messages(self, move: Move) -> tuple[Messages, Messages]:
        """Return what ranks send in a movement, and what they receive."""

    def num_shards(self, weights: Layout) -> int:
        """Return how many shards of an expert a rank computes with weights of this layout."""


class AbstractRowCounts(Protocol):
    """The rows of a call, on each rank or on the ranks that stand for all."""

    def rows(self, layout: Layout) -> np.ndarray:
        """Return the rows of a slot of this layout, (ranks,)."""

    def rows_per_expert(self, layout: Layout) -> np.ndarray:
        """Return the rows of each expert that each rank runs, zeros included, (ranks, experts)."""

    def hop_rows(self, hop: HopRows) -> np.ndarray:
        """Return the rows that each rank sends or receives in a hop, (ranks,)."""


class MovedPieces(AbstractRowsMoved):
    """How the ranks of a mesh move the pieces of slots.

    Args:
        shapes: the pieces.
        ranks: the ranks that are looked at; None for all.
    """

    def __init__(self, shapes: AbstractLayoutIndex, ranks: Sequence[int] | None = None) -> None:
        self._shapes = shapes
        self._ranks = range(shapes.grid.world) if ranks is None else ranks

    def stays(self, move: Move) -> bool:
        """See `AbstractRowsMoved`."""
        return all(self._shapes.stays(move, rank) for rank in self._ranks)

    def messages(self, move: Move) -> tuple[Messages, Messages]:
        """See `AbstractRowsMoved`."""
        ends = []
        for matches_of, layout in (
            (self._shapes.sent, move.source),
            (self._shapes.received, move.target),
        ):
            uses = 0
            is_whole = True
            for rank in self._ranks:
                match = matches_of(move, rank)
                num_pieces = len(self._shapes.pieces(layout, rank).number)
                uses = max(uses, -(-len(match.places) // max(1, num_pieces)))
                is_whole &= match.in_order and len(match.places) == num_pieces
            ends.append(Messages(uses, is_whole))
        return ends[0], ends[1]

    def num_shards(self, weights: Layout) -> int:
        """See `AbstractRowsMoved`."""
        pieces = [len(self._shapes.pieces(weights, rank).number) for rank in self._ranks]
        rank = self._ranks[int(np.argmax(pieces))]
        return max(1, max(pieces) // max(1, len(self._shapes.experts(weights, rank))))


_legs = lru_cache(maxsize=64)(legs_by_hop)


class RankRows(AbstractRowCounts):
    """The rows of a call on each rank."""

    def __init__(self, sizes: CallSizes) -> None:
        self._sizes = sizes

    def rows(self, layout: Layout) -> np.ndarray:
        """See `AbstractRowCounts`."""
        return self._sizes.rows_of_ranks(layout)

    def rows_per_expert(self, layout: Layout) -> np.ndarray:
        """See `AbstractRowCounts`."""
        return self._sizes.rows_per_expert_of_ranks(layout)

    def hop_rows(self, hop: HopRows) -> np.ndarray:
        """See `AbstractRowCounts`."""
        grid = self._sizes.grid
        legs = _legs(ALL_TO_ALLS[hop.link], grid, hop.group)
        source, target, *ends = legs.get(hop.hop, np.zeros((4, 0), dtype=np.int64))
        rows = self._sizes.moved(hop.move).between(source, target)
        return np.bincount(ends[hop.arrives], weights=rows, minlength=grid.world).astype(np.int64)
