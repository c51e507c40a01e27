"""Blocks of rows: some small experts, one expert, or part of a large one, whose rows fit the processor's cache together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.work import ExpertWork, counts

CACHE_BYTES = 2**23
"""Of a block's scratch memory: a part of the last-level cache. Measured, docs/kernels.md."""
MIN_ROWS = 512
"""A block has at least so many rows, if there are as many: products of fewer lose more than the cache gains."""


@dataclass(frozen=True)
class Segment:
    """The rows of one expert in a block."""

    expert: int
    index: int
    """Among the segments of all blocks."""
    is_first: bool
    """Of its expert: later ones add to its weight gradients."""


@dataclass(frozen=True)
class Block:
    """Rows that are worked on together."""

    index: int
    """Among all blocks."""
    rows: int
    """How many."""
    segments: Sequence[Segment]
    """In order."""
    sizes: Sequence[int]
    """Rows of each segment."""


class Blocks:
    """The blocks of a call.

    Args:
        work: the call.
        wide: how many numbers per row and hidden unit, and
        narrow: how many per row and dim the scratch memory of a block has.
    """

    def __init__(self, work: ExpertWork, wide: int, narrow: int) -> None:
        row_bytes = (wide * work.hidden + narrow * work.x.shape[1]) * work.x.element_size()
        limit = max(CACHE_BYTES // max(row_bytes, 1), MIN_ROWS)
        self.all: list[Block] = []
        self.sizes: list[int] = []
        segments: list[Segment] = []
        sizes: list[int] = []
        for expert, rows in enumerate(counts(work.ends)):
            for start in range(0, rows, limit):
                size = min(limit, rows - start)
                if sum(sizes) + size > limit:
                    self._close(segments, sizes)
                    segments, sizes = [], []
                segments.append(Segment(expert, len(self.sizes) + len(sizes), start == 0))
                sizes.append(size)
        self._close(segments, sizes)
        self.most_rows = max((block.rows for block in self.all), default=0)

    def cut(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the blocks' parts of a tensor of all rows, as views."""
        return rows.split([block.rows for block in self.all])

    def segments(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the segments' parts of a tensor of all rows, as views."""
        return rows.split(self.sizes)

    def _close(self, segments: list[Segment], sizes: list[int]) -> None:
        if segments:
            self.all.append(Block(len(self.all), sum(sizes), tuple(segments), tuple(sizes)))
            self.sizes += sizes


class Source:
    """Where blocks take their rows from.

    Args:
        x: (T, D) tokens, or (R, D) rows where the call has no dispatch.
        work: the call.
        blocks: its blocks.
    """

    def __init__(self, x: Tensor, work: ExpertWork, blocks: Blocks) -> None:
        self._x = x
        self._token = None if work.dispatch is None else blocks.cut(work.dispatch.token)
        self._rows = blocks.cut(x) if work.dispatch is None else ()

    def take(self, block: Block, out: Tensor) -> Tensor:
        """Return a block's rows: gathered into `out`, or a view."""
        if self._token is None:
            return self._rows[block.index]
        return torch.index_select(self._x, 0, self._token[block.index], out=out[: block.rows])
