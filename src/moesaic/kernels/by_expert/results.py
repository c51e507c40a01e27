"""Where blocks leave their rows of width D, and how those become tokens again.

Few rows are written side by side and summed at the end, each token a bag of rows. Many would be a large buffer, whose memory
has to be fetched and cleared: their blocks are added to the tokens one after the other, while they are in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.by_expert.blocks import BlockRows, Blocks, RowBlock, Scratch
from moesaic.kernels.memory import empty
from moesaic.kernels.permute import sum_rows
from moesaic.kernels.work import ExpertWork, accumulate_dtype

SIDE_BY_SIDE_BYTES = 2**25
"""Most bytes of rows that are kept until the end; measured, docs/kernels.md."""


class Results:
    """The results of a call's blocks.

    Args:
        work: the call.
        blocks: its blocks.
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
