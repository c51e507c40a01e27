"""Layouts, pieces and sizes for sample placement, in which a layer's results go to a new home of
each sample: the rank on which the next layer reads it.

Here a piece is one sample's copies for one expert, and its chunk is the sample's index among those
of its origin, the rank that held it before. Results can therefore go to the new home as whole
pieces. The new homes need to be known only when results are sent, so they can be computed while
tokens are dispatched and experts run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moesaic.program.grid import Grid
from moesaic.program.layouts import (
    AbstractLayoutIndex,
    Held,
    LayoutIndex,
    Matched,
    Move,
    Pieces,
    find,
    joined,
    memoised,
)
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Layout

Targets = Callable[[], tuple[np.ndarray, np.ndarray]]
"""Returns the rank and the slot to which the sample in each slot goes, (ranks, slots) int64 each.
May block until they are known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed(Layout):
    """The subset of the layout's pieces whose sample has the rank as its new home."""


class PlacedIndex(AbstractLayoutIndex):
    """The pieces of one call in which samples change home.

    Args:
        index: the pieces that do not depend on the new homes, shared between calls; each part of a
            run is one sample.
        targets: returns the new homes; called only when they are needed.
        length: tokens per sample.
    """

    def __init__(self, index: LayoutIndex, targets: Targets, length: int) -> None:
        super().__init__(index.grid, index.num_experts, index.num_chunks, replicates=False)
        self._of_all_calls = index
        self._targets = targets
        self.length = length

    @memoised
    def pieces(self, layout: Layout, rank: int) -> Pieces:
        """Return the pieces that a slot of a layout holds on a rank."""
        all_pieces = self._of_all_calls.pieces(layout, rank)
        if not isinstance(layout, Placed):
            return all_pieces
        homes, _ = self._targets()
        is_at_home = homes[all_pieces.origin, all_pieces.chunk] == rank
        number = all_pieces.number[is_at_home]
        return Pieces(
            number,
            origin=all_pieces.origin[is_at_home],
            expert=all_pieces.expert[is_at_home],
            chunk=all_pieces.chunk[is_at_home],
            sorter=np.argsort(number, kind="stable"),
        )

    def held(self, layout: Layout) -> Held:
        """Return which pieces slots of a layout hold on each rank. A placed piece is on the new
        home of its sample only."""
        held = self._of_all_calls.held(layout)
        if not isinstance(layout, Placed):
            return held
        homes, _ = self._targets()
        return replace(held, homes=homes)

    def tokens_later(self, copies: Layout, rank: int) -> np.ndarray | None:
        """Return by how many rows each sample's tokens moved from its slot at the origin to its
        slot at the new home.

        See the base class.
        """
        if not isinstance(copies, Placed):
            return None
        pieces = self.pieces(copies, rank)
        _, new_slots = self._targets()
        samples_later = new_slots[pieces.origin, pieces.chunk] - pieces.chunk
        tokens_later: np.ndarray = samples_later * self.length
        return tokens_later

    @memoised
    def matched(self, move: Move, rank: int) -> tuple[Matched, Matched]:
        """Return the pieces that a rank sends in a movement, and those that it receives.

        A piece that is placed or at its origin is on one rank. A piece at its expert is on all
        shards. So the receiver of a piece gets it from all ranks that hold it, which is a single
        rank unless the movement sums.
        """
        if not (isinstance(move.source, Placed) or isinstance(move.target, Placed)):
            return self._of_all_calls.matched(move, rank)
        members = self.grid.group(rank, move.group)
        source_pieces = self.pieces(move.source, rank)
        target_numbers = self.pieces(move.target, rank).number
        sent = []
        received = []
        for peer in members:
            places = find(source_pieces, self.pieces(move.target, peer).number)
            sent.append((peer, places[places >= 0]))
            is_held_by_peer = find(self.pieces(move.source, peer), target_numbers) >= 0
            received.append((peer, np.flatnonzero(is_held_by_peer)))
        return joined(sent), joined(received)


def placed_sizes(grid: Grid, copies: np.ndarray, shapes: PlacedIndex, units: int = 0) -> CallSizes:
    """Return the rows of all slots and movements in one call in which samples change home.

    Args:
        grid: the mesh, with tp = 1.
        copies: (world, slots, num_experts) int64: copies of each sample for each expert, by the
            sample's origin.
        shapes: the pieces of the call.
        units: rows into which one shard of an expert is packed when weights are moved.
    """
    tokens = np.full(grid.world, copies.shape[1] * shapes.length)
    return CallSizes(
        grid,
        copies=copies.sum(1),
        tokens=tokens,
        num_chunks=shapes.num_chunks,
        units=units,
        shapes=shapes,
        parts=copies.transpose(0, 2, 1),
    )
