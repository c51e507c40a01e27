"""Blocks of rows: some small experts, one expert, or part of a large one, whose rows fit the processor's cache together.

`Results` takes the rows of width D that blocks leave, and makes tokens of them again. Few rows are written side by side and
summed at the end, each token a bag of rows. Many would be a large buffer, whose memory has to be fetched and cleared: their
blocks are added to the tokens one after the other, while they are in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.memory import empty
from moesaic.kernels.permute import sum_rows
from moesaic.kernels.work import ExpertWork, accumulate_dtype, counts

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
class RowBlock:
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
        wide: how many numbers per row and hidden unit, and
        narrow: how many per row and dim the scratch memory of a block has.
    """

    def __init__(self, work: ExpertWork, wide: int, narrow: int) -> None:
        row_bytes = (wide * work.hidden + narrow * work.x.shape[1]) * work.x.element_size()
        limit = max(CACHE_BYTES // max(row_bytes, 1), MIN_ROWS)
        self.all: list[RowBlock] = []
        self.sizes: list[int] = []
        segments: list[Segment] = []
        sizes: list[int] = []
        self.counts = counts(work.ends)
        for expert, rows in enumerate(self.counts):
            for start in range(0, rows, limit):
                size = min(limit, rows - start)
                if sum(sizes) + size > limit:
                    self._close(segments, sizes)
                    segments, sizes = [], []
                segments.append(Segment(expert, len(self.sizes) + len(sizes), start == 0))
                sizes.append(size)
        self._close(segments, sizes)
        self._rows = [block.rows for block in self.all]
        self.most_rows = max(self._rows, default=0)
        self.each = torch.arange(self.most_rows, device=work.x.device)
        """The numbers of a block's rows."""

    def cut(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the blocks' parts of a tensor of all rows, as views."""
        return torch.split_with_sizes(rows, self._rows)

    def segments(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the segments' parts of a tensor of all rows, as views."""
        return torch.split_with_sizes(rows, self.sizes)

    def _close(self, segments: list[Segment], sizes: list[int]) -> None:
        if segments:
            self.all.append(RowBlock(len(self.all), sum(sizes), tuple(segments), tuple(sizes)))
            self.sizes += sizes


@dataclass(frozen=True)
class BlockRows:
    """A block's rows, whole and by expert."""

    rows: Tensor
    """(rows, width)."""
    segments: Sequence[Tensor]
    """(rows of a segment, width) each, as views."""

    @classmethod
    def of(cls, rows: Tensor, block: RowBlock) -> BlockRows:
        """Cut rows that are a block's."""
        return cls(rows, torch.split_with_sizes(rows, block.sizes))


class Scratch:
    """Memory that one block after the other writes its rows into, taken when the first one asks for it.

    Cutting it into views costs some microseconds per expert, and blocks of equal sizes share a cut.

    Args:
        width: numbers per row.
        like: a tensor of the dtype and device.
    """

    def __init__(self, blocks: Blocks, width: int, like: Tensor) -> None:
        self._rows, self._width, self._like = blocks.most_rows, width, like
        self._memory: Tensor | None = None
        self._cuts: dict[Sequence[int], BlockRows] = {}

    def of(self, block: RowBlock) -> BlockRows:
        """Return the memory of a block's rows."""
        part = self._cuts.get(block.sizes)
        if part is None:
            if self._memory is None:
                self._memory = self._like.new_empty(self._rows, self._width)
            part = self._cuts[block.sizes] = BlockRows.of(self._memory[: block.rows], block)
        return part

    def free(self) -> None:
        """Give the memory back; what was handed out is not read any more."""
        self._memory = None
        self._cuts.clear()


class Source:
    """Where blocks take their rows from.

    Args:
        x: (T, D) tokens, or (R, D) rows where the call has no dispatch.
    """

    def __init__(self, x: Tensor, work: ExpertWork, blocks: Blocks) -> None:
        self._x = x
        self._token = None if work.dispatch is None else blocks.cut(work.dispatch.token)
        self._rows = blocks.cut(x) if work.dispatch is None else ()
        self._each = blocks.each

    def take(self, block: RowBlock, scratch: Scratch, weight: Tensor | None = None) -> BlockRows:
        """Return a block's rows: gathered, or a view where there is nothing to do.

        Args:
            block: whose.
            scratch: memory of their width.
            weight: (rows,) that they are multiplied by, in their dtype; None for 1. With a gather it is free: a bag of one
                weighted row each.
        """
        if self._token is None:
            if weight is None:
                return BlockRows.of(self._rows[block.index], block)
            out = scratch.of(block)
            torch.mul(self._rows[block.index], weight.unsqueeze(1), out=out.rows)
            return out
        token = self._token[block.index]
        if weight is None:
            out = scratch.of(block)
            torch.index_select(self._x, 0, token, out=out.rows)
            return out
        bags = torch.ops.aten._embedding_bag_forward_only(
            self._x, token, self._each[: block.rows], False, 0, False, weight
        )
        return BlockRows.of(bags[0], block)


SIDE_BY_SIDE_BYTES = 2**25
"""Most bytes of rows that are kept until the end; measured, docs/kernels.md."""


class Results:
    """The results of a call's blocks.

    Args:
        weights: (R,) that rows are multiplied by when they are summed, or None for weights of 1.
    """

    def __init__(self, work: ExpertWork, blocks: Blocks, weights: Tensor | None) -> None:
        x, dim = work.x, work.x.shape[1]
        self._dispatch, self._weights = work.dispatch, weights
        row_bytes = work.num_rows * dim * x.element_size()
        self._total = self._rows = None
        if work.dispatch is not None and row_bytes > SIDE_BY_SIDE_BYTES:
            self._total = x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype))
            self._scratch = Scratch(blocks, dim, x)
            self._tokens = blocks.cut(work.dispatch.token)
            self._weights_of = None if weights is None else blocks.cut(weights)
        else:
            self._rows = empty((work.num_rows, dim), x.dtype, x.device)
            self._rows_of = blocks.cut(self._rows)

    def of(self, block: RowBlock) -> BlockRows:
        """Return where a block's rows go."""
        return self._scratch.of(block) if self._rows is None else BlockRows.of(self._rows_of[block.index], block)

    def finish(self, block: RowBlock) -> None:
        """Take note that a block's rows are written; blocks come in order."""
        if self._total is None:
            return
        rows = self._scratch.of(block).rows
        if self._weights_of is not None:
            rows.mul_(self._weights_of[block.index].unsqueeze(1))
        self._total.index_add_(0, self._tokens[block.index], rows.to(self._total.dtype))

    def summed(self, dtype: torch.dtype) -> Tensor:
        """Return (T, D), or (R, D) without dispatch, weighed, once all blocks are finished."""
        if self._total is not None:
            return self._total.to(dtype)
        assert self._rows is not None
        if self._dispatch is not None:
            return sum_rows(self._rows, self._dispatch, weights=self._weights, dtype=dtype)
        return (self._rows if self._weights is None else self._rows.mul_(self._weights.unsqueeze(1))).to(dtype)
