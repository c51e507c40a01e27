"""Blocks of rows that fit the processor's cache: several small experts, one expert, or part of a
large one.

A call's R rows lie in expert order. A block is a run of them that is processed at a time, and a
segment is the part of a block that belongs to one expert.

`Results` collects the blocks' results, rows of width D, and sums them into tokens. If they are
small, all rows are kept and summed at the end. If they are large, such a buffer would cost page
faults, so each block is added to the tokens while it is in the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.kernels.huge_pages import empty
from moesaic.kernels.permute import sum_rows
from moesaic.kernels.work import ExpertWork, accumulate_dtype, counts
from moesaic.program.expert_sizes import block_limit


@dataclass(frozen=True)
class Segment:
    """The rows of one expert in a block."""

    expert: int
    index: int
    """The segment's number among the segments of all blocks."""
    is_first: bool
    """Whether it is the expert's first segment, which writes the expert's weight gradients; later
    segments add to them."""


@dataclass(frozen=True)
class RowBlock:
    """Rows that are processed together."""

    index: int
    """The block's number among all blocks."""
    rows: int
    """The number of rows."""
    segments: Sequence[Segment]
    """The experts' parts of the block, in row order."""
    sizes: Sequence[int]
    """The number of rows of each segment."""

    @property
    def behind(self) -> Iterator[int]:
        """The number of the block's rows that come after each segment."""
        return (self.rows - end for end in itertools.accumulate(self.sizes))

    def products(self, rows: BlockRows, out: BlockRows) -> Iterator[SegmentProduct]:
        """Yield what the product of each segment's rows reads and where it is written."""
        parts = zip(self.segments, rows.segments, out.segments, self.behind)
        for segment, segment_rows, segment_out, behind in parts:
            yield SegmentProduct(segment.expert, segment_rows, segment_out, behind)


class Blocks:
    """The rows of a call, cut into blocks.

    Args:
        hidden_buffers: the number of scratch buffers of width `hidden` that a block needs.
        dim_buffers: the number of scratch buffers of width `dim` that a block needs.
    """

    def __init__(self, work: ExpertWork, hidden_buffers: int, dim_buffers: int) -> None:
        numbers_per_row = hidden_buffers * work.hidden + dim_buffers * work.x.shape[1]
        # the most rows of a block, for its buffers to fit the cache
        max_rows = block_limit(numbers_per_row * work.x.element_size())
        self.all: list[RowBlock] = []
        """The blocks, in row order."""
        self.sizes: list[int] = []
        """The number of rows of each segment of `all`."""
        self.counts = counts(work.ends)
        """The number of rows of each expert."""

        # the segments of the block that is being filled, and their numbers of rows
        segments: list[Segment] = []
        sizes: list[int] = []
        for expert, expert_rows in enumerate(self.counts):
            for start in range(0, expert_rows, max_rows):
                size = min(max_rows, expert_rows - start)
                if sum(sizes) + size > max_rows:
                    self._close(segments, sizes)
                    segments = []
                    sizes = []
                index = len(self.sizes) + len(sizes)  # after closed blocks and this one's so far
                segments.append(Segment(expert, index, is_first=start == 0))
                sizes.append(size)
        self._close(segments, sizes)

        self._block_sizes = [block.rows for block in self.all]
        """The number of rows of each block."""
        self.most_rows = max(self._block_sizes, default=0)
        """The number of rows of the largest block."""
        self.row_numbers = torch.arange(self.most_rows, device=work.x.device)
        """`arange` of the rows of the largest block."""

    def cut(self, rows: Tensor) -> Sequence[Tensor]:
        """Split a tensor of all rows into blocks, as views."""
        return torch.split_with_sizes(rows, self._block_sizes)

    def segments(self, rows: Tensor) -> Sequence[Tensor]:
        """Split a tensor of all rows into segments, as views."""
        return torch.split_with_sizes(rows, self.sizes)

    def _close(self, segments: list[Segment], sizes: list[int]) -> None:
        """Make a block of these segments, with these numbers of rows, if there are any."""
        if segments:
            block = RowBlock(
                index=len(self.all), rows=sum(sizes), segments=tuple(segments), sizes=tuple(sizes)
            )
            self.all.append(block)
            self.sizes += sizes


@dataclass(frozen=True)
class BlockRows:
    """The rows of a block, whole and by segment."""

    rows: Tensor
    """(rows, width)."""
    segments: Sequence[Tensor]
    """Views of `rows`, (rows of a segment, width) each."""

    @classmethod
    def of(cls, rows: Tensor, block: RowBlock) -> BlockRows:
        """Split the rows of a block into its segments."""
        return cls(rows, torch.split_with_sizes(rows, block.sizes))


class SegmentProduct(NamedTuple):
    """The product of the rows of one expert in a block with a matrix of the expert."""

    expert: int
    rows: Tensor
    """(rows, width)."""
    out: Tensor
    """(rows, columns of the matrix): the memory for the product."""
    behind: int
    """The number of rows behind these in the block, which may be overwritten."""


class Scratch:
    """Memory for the rows of one block, reused by every block and allocated at the first use.

    Splitting the memory into views costs some microseconds per expert, so blocks with equal segment
    sizes share the views.

    Args:
        blocks: the blocks of the call.
        width: numbers per row.
        like: a tensor with the dtype and the device of the memory.
    """

    def __init__(self, blocks: Blocks, width: int, like: Tensor) -> None:
        self._most_rows = blocks.most_rows
        self._width = width
        self._like = like
        self._memory: Tensor | None = None
        self._views: dict[Sequence[int], BlockRows] = {}
        """The memory as rows of a block, by the sizes of its segments."""

    def of(self, block: RowBlock) -> BlockRows:
        """Return the memory for the rows of a block."""
        views = self._views.get(block.sizes)
        if views is None:
            if self._memory is None:
                self._memory = self._like.new_empty(self._most_rows, self._width)
            views = BlockRows.of(self._memory[: block.rows], block)
            self._views[block.sizes] = views
        return views

    def free(self) -> None:
        """Free the memory. Tensors that `of` returned must not be used afterwards."""
        self._memory = None
        self._views.clear()


class Source:
    """Provides the input rows of each block.

    Args:
        x: (T, D) tokens, or rows.
        index: (R,), the row of `x` that each row is; None if `x` is in expert order.
        blocks: the blocks of the call.
    """

    def __init__(self, x: Tensor, index: Tensor | None, blocks: Blocks) -> None:
        self._x = x
        # by block: with an index the rows of `x` to gather, else the rows themselves
        self._index_blocks = None if index is None else blocks.cut(index)
        self._row_blocks = blocks.cut(x) if index is None else ()
        self._row_numbers = blocks.row_numbers

    def take(self, block: RowBlock, scratch: Scratch, weight: Tensor | None = None) -> BlockRows:
        """Return the rows of a block: gathered tokens, or a view if there is neither an index nor a
        weight.

        Args:
            scratch: memory of width D, which may be used for the rows.
            weight: (rows,) factors of the rows, in their dtype; None for 1. Weighting costs nothing
                in a gather: each row is an `embedding_bag` of one weighted token.
        """
        if self._index_blocks is None:
            if weight is None:
                return BlockRows.of(self._row_blocks[block.index], block)
            out = scratch.of(block)
            torch.mul(self._row_blocks[block.index], weight.unsqueeze(1), out=out.rows)
            return out

        index = self._index_blocks[block.index]
        if weight is None:
            out = scratch.of(block)
            torch.index_select(self._x, 0, index, out=out.rows)
            return out

        starts = self._row_numbers[: block.rows]  # bags of one row each
        # the arguments are (..., scale_grad_by_freq, mode, sparse, ...), and mode 0 is a sum
        weighted, *_ = torch.ops.aten._embedding_bag_forward_only(
            self._x, index, starts, False, 0, False, weight
        )
        return BlockRows.of(weighted, block)


SIDE_BY_SIDE_BYTES = 2**25
"""The most bytes of results that are kept until the end of the call; measured, see
docs/kernels.md."""


class Results:
    """Collects the results of all blocks and sums them into tokens.

    Small results, and rows that stay in expert order, are kept side by side in `_rows` until the
    end. Others are written to scratch memory, from which each block goes to its places: it is added
    to the tokens in `_total`, or copied to rows of `_placed`.

    Args:
        work: the call.
        blocks: the blocks of the call.
        weights: (R,) factors of the rows in the sum; None for 1.
        places: (R,), the row of the result that each row becomes, without dispatch; None for expert
            order.
    """

    def __init__(
        self, work: ExpertWork, blocks: Blocks, weights: Tensor | None, places: Tensor | None
    ) -> None:
        x = work.x
        num_rows = work.num_rows
        dim = x.shape[1]
        self._dispatch = work.dispatch
        self._weights = weights
        self._rows: Tensor | None = None
        """(R, D): the results in expert order."""
        self._total: Tensor | None = None
        """(T, D): the sums of the tokens' results so far, weighted."""
        self._placed: Tensor | None = None
        """(R, D): the results in their places, weighted."""

        all_bytes = num_rows * dim * x.element_size()
        if places is not None:
            self._placed = empty((num_rows, dim), x.dtype, x.device)
        # too large to be kept until they are summed
        if work.dispatch is not None and all_bytes > SIDE_BY_SIDE_BYTES:
            self._total = x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype))
            places = work.dispatch.token  # a row's place is its token

        if places is not None:
            # the memory of one block, and places and weights by block
            self._scratch = Scratch(blocks, dim, x)
            self._places = blocks.cut(places)
            self._weight_blocks = None if weights is None else blocks.cut(weights)
        else:
            self._rows = empty((num_rows, dim), x.dtype, x.device)
            self._row_blocks = blocks.cut(self._rows)

    def of(self, block: RowBlock) -> BlockRows:
        """Return the memory into which the results of a block are to be written."""
        if self._rows is None:
            return self._scratch.of(block)
        return BlockRows.of(self._row_blocks[block.index], block)

    def finish(self, block: RowBlock) -> None:
        """Process the written results of a block; called once per block, in order."""
        if self._rows is not None:  # they stay where they are until `summed`
            return
        rows = self._scratch.of(block).rows
        places = self._places[block.index]
        if self._weight_blocks is not None:
            rows.mul_(self._weight_blocks[block.index].unsqueeze(1))
        if self._placed is not None:
            self._placed.index_copy_(0, places, rows)
        elif self._total is not None:
            self._total.index_add_(0, places, rows.to(self._total.dtype))

    def summed(self, dtype: torch.dtype) -> Tensor:
        """Return the weighted results, (T, D), or (R, D) without dispatch, once all blocks are
        finished."""
        if self._placed is not None:
            return self._placed.to(dtype)
        if self._total is not None:
            return self._total.to(dtype)
        assert self._rows is not None
        if self._dispatch is not None:
            return sum_rows(self._rows, self._dispatch, weights=self._weights, dtype=dtype)
        if self._weights is not None:
            self._rows.mul_(self._weights.unsqueeze(1))
        return self._rows.to(dtype)
