"""Copies whose samples change home: the layout, its pieces, and the sizes of a call in which they do.

Every piece is one sample's copies for one expert: the chunk of a piece is the slot that the sample has at its origin. Then
results can go to a sample's new home as whole pieces, and the new homes need be known only when results start to travel,
not when copies do: whoever decides them works while tokens travel and experts run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes, LayoutIndex, Matched, Move, Pieces, find
from moesaic.program.task import Layout

Targets = Callable[[], tuple[np.ndarray, np.ndarray]]
"""Returns the rank and the slot to which the sample in each slot goes, (ranks, slots) int64 each; may wait for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed(Layout):
    """Of the pieces that the layout describes, those whose sample has the rank as its new home."""


class SampleShapes(LayoutIndex):
    """Pieces by sample, before anybody moves.

    Args:
        grid: the mesh.
        num_experts: of the layer.
        slots: samples per rank.
        num_chunks: parts that a program does one after the other; each takes its share of the slots.
    """

    def __init__(self, grid: Grid, num_experts: int, slots: int, num_chunks: int) -> None:
        super().__init__(grid, num_experts, slots)
        self.slots, self._parts = slots, num_chunks

    def _chunks(self, layout: Layout, rank: int) -> np.ndarray:
        if layout.flow != "copies" or not isinstance(layout.chunk, int):
            return super()._chunks(layout, rank)
        return np.arange(self.slots * layout.chunk // self._parts, self.slots * (layout.chunk + 1) // self._parts)


class PlacedShapes(SampleShapes):
    """Pieces of one call, in which samples change home.

    Args:
        shapes: what does not depend on where samples go, to share between calls.
        targets: where they go; asked for when it is needed.
    """

    def __init__(self, shapes: SampleShapes, targets: Targets) -> None:
        super().__init__(shapes.grid, shapes.num_experts, shapes.slots, shapes._parts)
        self._of_all_calls, self._targets = shapes, targets

    def target_slots(self) -> np.ndarray:
        """Return the slot that the sample in each slot will have, (ranks, slots) int64."""
        return self._targets()[1]

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
        return super().sent(move, rank) if _is_placed(move) else self._of_all_calls.sent(move, rank)

    def received(self, move: Move, rank: int) -> Matched:
        """Return what a rank receives in a movement."""
        return super().received(move, rank) if _is_placed(move) else self._of_all_calls.received(move, rank)

    def _match(self, move: Move, rank: int) -> None:
        """Match the pieces that one rank sends and receives.

        A piece that is placed, or at its origin, is on one rank; one at its expert is on all shards. So whoever wants a piece
        gets it from all that hold it, which is one of them unless the movement sums.
        """
        members = self.grid.group(rank, move.group)
        mine, wanted = self.pieces(move.source, rank), self.pieces(move.target, rank).number
        sent, received = [], []
        for peer in members:
            where = find(mine, self.pieces(move.target, peer).number)
            sent.append((peer, where[where >= 0]))
            received.append((peer, np.flatnonzero(find(self.pieces(move.source, peer), wanted) >= 0)))
        self._sent[(move, rank)], self._received[(move, rank)] = _joined(sent), _joined(received)


class PlacedSizes(CallSizes):
    """The rows of every slot and movement, for one call in which samples change home.

    Args:
        grid: the mesh, with tp = 1.
        copies: (world, slots, num_experts) int64: copies that each sample has for each expert, by origin.
        length: tokens of a sample.
        shapes: of the call.
        units: rows into which one shard of an expert is packed when weights travel.
    """

    def __init__(self, grid: Grid, copies: np.ndarray, length: int, shapes: PlacedShapes, units: int = 0) -> None:
        tokens = np.full(grid.world, copies.shape[1] * length)
        super().__init__(grid, copies.sum(1), tokens, shapes.slots, units=units, shapes=shapes)
        self._rows["copies"] = copies.transpose(0, 2, 1)
        self._length, self._placed = length, shapes

    def _find_bases(self, tokens: Layout, copies: Layout, rank: int) -> np.ndarray:
        """An index counts tokens from where its origin had the sample; here they start where the new home has it."""
        if not isinstance(copies, Placed):
            return super()._find_bases(tokens, copies, rank)
        pieces = self._placed.pieces(copies, rank)
        slots = self._placed.target_slots()[pieces.origin, pieces.chunk]
        return np.repeat((slots - pieces.chunk) * self._length, np.diff(self.offsets(copies, rank)))


def _is_placed(move: Move) -> bool:
    return isinstance(move.source, Placed) or isinstance(move.target, Placed)


def _joined(splits: list[tuple[int, np.ndarray]]) -> Matched:
    """Return lots, peer after peer, as one; those without a piece are left out."""
    given = [(peer, places) for peer, places in splits if len(places)]
    starts = np.cumsum([0, *(len(places) for _, places in given)])
    places = np.concatenate([np.zeros(0, dtype=np.int64), *(places for _, places in given)])
    return Matched(tuple(peer for peer, _ in given), starts, places)
