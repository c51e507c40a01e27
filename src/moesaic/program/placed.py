"""Copies whose samples change home: the layout, its pieces, and the sizes of a call in which they do.

Every piece is one sample's copies for one expert: the chunk of a piece is the slot that the sample has at its origin. Then
results can go to a sample's new home as whole pieces, and the new homes need be known only when results start to travel,
not when copies do: whoever decides them works while tokens travel and experts run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moesaic.program.grid import Grid
from moesaic.program.sizes import (
    AbstractLayoutIndex,
    CallSizes,
    Held,
    LayoutIndex,
    Matched,
    Move,
    Pieces,
    find,
    matched,
)
from moesaic.program.task import Layout

Targets = Callable[[], tuple[np.ndarray, np.ndarray]]
"""Returns the rank and the slot to which the sample in each slot goes, (ranks, slots) int64 each; may wait for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed(Layout):
    """Of the pieces that the layout describes, those whose sample has the rank as its new home."""


class PlacedIndex(AbstractLayoutIndex):
    """Pieces of one call, in which samples change home.

    Args:
        index: what does not depend on where samples go, shared between calls; a part of a run is a sample's.
        targets: where they go; asked for when it is needed.
        length: tokens of a sample.
    """

    def __init__(self, index: LayoutIndex, targets: Targets, length: int) -> None:
        super().__init__(index.grid, index.num_experts, index.num_chunks, replicates=False)
        self._of_all_calls, self._targets, self.length = index, targets, length
        self._pieces: dict[tuple[Layout, int], Pieces] = {}
        self._matched: dict[tuple[Move, int], tuple[Matched, Matched]] = {}

    def pieces(self, layout: Layout, rank: int) -> Pieces:
        """Return what a slot of a layout holds on a rank."""
        if not isinstance(layout, Placed):
            return self._of_all_calls.pieces(layout, rank)
        key = (layout, rank)
        if key not in self._pieces:
            every = self._of_all_calls.pieces(layout, rank)
            here = self._targets()[0][every.origin, every.chunk] == rank
            number = every.number[here]
            parts = (every.origin[here], every.expert[here], every.chunk[here])
            self._pieces[key] = Pieces(number, *parts, np.argsort(number, kind="stable"))
        return self._pieces[key]

    def sent(self, move: Move, rank: int) -> Matched:
        """Return what a rank sends in a movement."""
        return self._match(move, rank)[0] if _is_placed(move) else self._of_all_calls.sent(move, rank)

    def received(self, move: Move, rank: int) -> Matched:
        """Return what a rank receives in a movement."""
        return self._match(move, rank)[1] if _is_placed(move) else self._of_all_calls.received(move, rank)

    def held(self, layout: Layout) -> Held:
        """Return which pieces slots of a layout hold; of those that are placed, the new home of their sample holds them."""
        found = self._of_all_calls.held(layout)
        return replace(found, homes=self._targets()[0]) if isinstance(layout, Placed) else found

    def tokens_later(self, copies: Layout, rank: int) -> np.ndarray | None:
        """Return how much later the new home has a sample's tokens than its origin had them; see the base class."""
        if not isinstance(copies, Placed):
            return None
        pieces = self.pieces(copies, rank)
        later: np.ndarray = (self._targets()[1][pieces.origin, pieces.chunk] - pieces.chunk) * self.length
        return later

    def _match(self, move: Move, rank: int) -> tuple[Matched, Matched]:
        """Return the pieces that one rank sends, and those that it receives.

        A piece that is placed, or at its origin, is on one rank; one at its expert is on all shards. So whoever wants a piece
        gets it from all that hold it, which is one of them unless the movement sums.
        """
        if (move, rank) in self._matched:
            return self._matched[(move, rank)]
        members = self.grid.group(rank, move.group)
        mine, wanted = self.pieces(move.source, rank), self.pieces(move.target, rank).number
        sent, received = [], []
        for peer in members:
            where = find(mine, self.pieces(move.target, peer).number)
            sent.append((peer, where[where >= 0]))
            received.append((peer, np.flatnonzero(find(self.pieces(move.source, peer), wanted) >= 0)))
        self._matched[(move, rank)] = matched(sent), matched(received)
        return self._matched[(move, rank)]


def placed_sizes(grid: Grid, copies: np.ndarray, shapes: PlacedIndex, units: int = 0) -> CallSizes:
    """Return the rows of every slot and movement, for one call in which samples change home.

    Args:
        grid: the mesh, with tp = 1.
        copies: (world, slots, num_experts) int64: copies that each sample has for each expert, by origin.
        shapes: the pieces of the call.
        units: rows into which one shard of an expert is packed when weights travel.
    """
    tokens = np.full(grid.world, copies.shape[1] * shapes.length)
    return CallSizes(
        grid, copies.sum(1), tokens, shapes.num_chunks, units=units, shapes=shapes, parts=copies.transpose(0, 2, 1)
    )


def _is_placed(move: Move) -> bool:
    return isinstance(move.source, Placed) or isinstance(move.target, Placed)
