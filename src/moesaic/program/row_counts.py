"""What the bytes of a call depend on besides its program: how a mesh moves rows, and how many rows
there are. The runtime reads both from the pieces of every rank, the planner also from one rank that
stands for all.

A movement takes rows from a slot of one layout to a slot of another. A slot consists of pieces: the
rows of one origin rank for one expert, or a chunk of them (`layouts.py`). A movement over ep may be
an all-to-all of several hops, one round of messages each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import legs_by_hop
from moesaic.program.grid import Axis
from moesaic.program.layouts import AbstractLayoutIndex, Matched, Move
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Layout


class HopRows(NamedTuple):
    """Rows that a rank sends or receives in one hop of a movement."""

    move: Move
    link: str
    """Name of the all-to-all algorithm in `ALL_TO_ALLS`."""
    group: tuple[Axis, ...]
    """Axes over which ranks exchange."""
    hop: int
    """Number of the hop within the algorithm."""
    arrives: bool
    """Whether received rows are counted; False for those sent."""


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
        sent = [self._shapes.sent(move, rank) for rank in self._ranks]
        received = [self._shapes.received(move, rank) for rank in self._ranks]
        return self._one_end(move.source, sent), self._one_end(move.target, received)

    def _one_end(self, layout: Layout, matches: Sequence[Matched]) -> Messages:
        """Return the messages at one end of a movement, whose slots have a layout.

        Args:
            layout: of the end's slots.
            matches: the pieces that each of the ranks sends or receives.
        """
        uses = 0
        is_whole = True
        for rank, match in zip(self._ranks, matches):
            num_pieces = len(self._shapes.pieces(layout, rank).number)
            # by pieces, whose rows are not known here; a slot may have none
            uses = max(uses, math.ceil(len(match.places) / max(1, num_pieces)))
            is_whole &= match.in_order and len(match.places) == num_pieces
        return Messages(uses, is_whole)

    def num_shards(self, weights: Layout) -> int:
        """See `AbstractRowsMoved`."""
        # A piece of weights is one shard of one expert.
        num_pieces = [len(self._shapes.pieces(weights, rank).number) for rank in self._ranks]
        fullest_rank = self._ranks[int(np.argmax(num_pieces))]
        num_experts = len(self._shapes.experts(weights, fullest_rank))
        return max(1, max(num_pieces) // max(1, num_experts))


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
        no_legs = np.zeros((4, 0), dtype=np.int64)
        # Ends of a packet's whole way, then those of its leg in this hop.
        source, target, sender, receiver = legs.get(hop.hop, no_legs)
        rows = self._sizes.moved(hop.move).between(source, target)
        ranks = receiver if hop.arrives else sender
        return np.bincount(ranks, weights=rows, minlength=grid.world).astype(np.int64)
