"""The gradient of experts' biases: each expert's rows times their routing weights, summed.

Eager: gather the rows into expert order, multiply, and reduce each expert's segment. Here rows are
read through the token index. The bias of a result also enters the gradient of its routing weight,
as <row, bias>. The kernel has the row in registers, and writes one partial dot product per column
tile, as `down_grad` does. Each program sums all rows of an expert in float32 and in order: no
atomics. FLOPs: 4 R N. Bytes: R N + E N elements, a few percent of a backward pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
COLUMNS = 64
"""The rows of a step and the columns of a program: 32 sums per thread, and 128 bytes of each
row."""


def bias_grad(
    rows: Tensor,
    ends: Tensor,
    *,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    token: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum each expert's rows times their weights.

    Args:
        rows: (R, N) in expert order, or with `token` (T, N), one row per token.
        ends: (E,) int32, one past the last row of each expert.
        bias: (E, N), multiplied with the rows; None for no dot products.
        weight: (R,) factors of the rows in the sums; None for 1.
        token: (R,) int32, the token of each row; None if `rows` is in expert order.

    Returns:
        The sums, (E, N) in the dtype of the rows, zero for an expert without rows; partial dot
        products of the unweighted rows with their expert's bias, (R, P) float32, to be summed over
        the P column tiles; P is 0 without a bias.
    """
    width = rows.shape[1]
    num_rows = len(rows) if token is None else len(token)
    column_tiles = triton.cdiv(width, COLUMNS)
    sums = rows.new_empty(len(ends), width)
    dots = rows.new_empty(num_rows, 0 if bias is None else column_tiles, dtype=torch.float32)
    if sums.numel():
        _bias_grad_kernel[(len(ends) * column_tiles,)](
            rows.contiguous(),
            ends,
            sums=sums,
            bias=rows if bias is None else bias.contiguous(),
            dots=dots,
            # tensors in the place of absent ones are not read
            weight=rows if weight is None else weight,
            token=rows if token is None else token,
            width=width,
            column_tiles=column_tiles,
            BIASED=bias is not None,
            WEIGHTED=weight is not None,
            GATHERED=token is not None,
            BLOCK_R=ROWS,
            BLOCK_N=COLUMNS,
            num_warps=4,
        )
    return sums, dots


@triton.jit
def _bias_grad_kernel(
    rows: tl.tensor,
    ends: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    dots: tl.tensor,
    weight: tl.tensor,
    token: tl.tensor,
    width: tl.tensor,
    column_tiles: tl.tensor,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Sum an expert's rows in a tile of columns, and write the tile's part of their dot products
    with the bias: a program for each expert and tile."""
    expert = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < width
    place = expert.to(tl.int64) * width + column  # in (E, N) tensors

    own_bias = tl.zeros((BLOCK_N,), tl.float32)
    if BIASED:
        own_bias = tl.load(bias + place, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for first in tl.range(start, end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        is_row = row < end
        source = tl.load(token + row, mask=is_row, other=0) if GATHERED else row
        inside = is_row[:, None] & is_column[None, :]
        pointers = rows + source.to(tl.int64)[:, None] * width + column[None, :]
        values = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)

        if BIASED:
            dot = tl.sum(values * own_bias[None, :], 1)
            tl.store(dots + row.to(tl.int64) * column_tiles + column_tile, dot, mask=is_row)
        if WEIGHTED:
            values *= tl.load(weight + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
        total += values
    tl.store(sums + place, tl.sum(total, 0).to(sums.dtype.element_ty), mask=is_column)
