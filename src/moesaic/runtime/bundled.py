"""Movements that travel as one message per peer, and how they stand in it.

Each message has the widest rows first, then the others. All messages of a rank are regions of one buffer, the part that stays
among them, and every region starts at a multiple of the widest row. So these rows are gathered into all messages by one
operation, and out of them to their places by one, whatever the number of peers; what is narrow follows by one each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.program.sizes import Splits

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What messages are counted in, by the bytes of the smallest number in them."""


class Bundle:
    """One side of a bundle at a rank: what leaves, or what arrives.

    Args:
        lots: rows of each movement, by peer.
        values: (rows, width) of each movement, or the other side's, since only their width and dtype count; not kept.
    """

    def __init__(self, splits: Sequence[Splits], values: Sequence[Tensor]) -> None:
        self.splits, size = splits, min(value.element_size() for value in values)
        self._unit, self._device = _UNITS[size], values[0].device
        self._widths = [value.shape[1] * value.element_size() // size for value in values]
        order = sorted(range(len(splits)), key=lambda number: -self._widths[number])
        self._widest, wide = order[0], self._widths[order[0]]
        counts = [dict(zip(lot.peers, lot.counts)) for lot in splits]
        self._begins: list[dict[int, int]] = [{} for _ in splits]
        self._peers, self._cuts, at = sorted({peer for lot in splits for peer in lot.peers}), [], 0
        for peer in self._peers:
            start = at
            for number in order:
                self._begins[number][peer] = at
                at += counts[number].get(peer, 0) * self._widths[number]
            self._cuts += [at - start, -at % wide]
            at += -at % wide
        self._size = at

    def buffer(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Return memory for all messages, and each peer's part of it."""
        memory = torch.empty(self._size, dtype=self._unit, device=self._device)
        return memory, dict(zip(self._peers, memory.split(self._cuts)[::2]))

    def write(self, memory: Tensor, values: Sequence[Tensor]) -> None:
        """Gather the rows of all movements into their messages."""
        lot, width = self.splits[self._widest], self._widths[self._widest]
        if len(lot.rows):
            source = np.zeros(
                self._size // width, dtype=np.int64
            )  # of what comes to stand between messages nobody reads
            source[self._places(self._widest) // width] = lot.rows
            units = values[self._widest].contiguous().view(self._unit)
            torch.index_select(units, 0, _tensor(source, memory), out=memory.view(-1, width))
        for number, (lot, value) in enumerate(zip(self.splits, values)):
            if number != self._widest and len(lot.rows):
                units = value.contiguous().view(self._unit)
                chosen = units if lot.is_whole else units.index_select(0, _tensor(lot.rows, memory))
                memory.scatter_(0, self._numbers(number, self._places(number), memory), chosen.reshape(-1))

    def read(self, memory: Tensor, number: int, dtype: torch.dtype, *, in_place: bool) -> Tensor:
        """Return the rows of a movement: (rows, width).

        Args:
            memory: all messages.
            number: of the movement.
            dtype: of its rows.
            in_place: as they stand in the slot that is written, rather than peer after peer.
        """
        lot, width, at = self.splits[number], self._widths[number], self._places(number)
        if in_place and not lot.is_whole:
            at_row = np.empty_like(at)
            at_row[lot.rows] = at
            at = at_row
        if number == self._widest:
            units = memory.view(-1, width).index_select(0, _tensor(at // width, memory))
        else:
            units = memory.index_select(0, self._numbers(number, at, memory)).view(-1, width)
        return units.view(dtype)

    def _places(self, number: int) -> np.ndarray:
        """Return where each row of a movement starts, peer after peer, in numbers of the memory."""
        lot, width = self.splits[number], self._widths[number]
        counts = np.array(lot.counts, dtype=np.int64)
        begins = np.array([self._begins[number][peer] for peer in lot.peers], dtype=np.int64)
        return np.repeat(begins - (counts.cumsum() - counts) * width, counts) + np.arange(len(lot.rows)) * width

    def _numbers(self, number: int, places: np.ndarray, like: Tensor) -> Tensor:
        """Return where each number of rows stands that start at `places`."""
        width = self._widths[number]
        return _tensor(places if width == 1 else (places[:, None] + np.arange(width)).reshape(-1), like)


def _tensor(places: np.ndarray, like: Tensor) -> Tensor:
    return torch.as_tensor(places, device=like.device)
