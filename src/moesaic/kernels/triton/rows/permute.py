"""The sum of each token's rows, from expert order into token order.

Eager: `zeros.index_add_(0, token, rows * weight)`. Rows are read through indices and every output is written once:
deterministic without atomics, and the sum over a token's copies runs in float32, in the order of its copies. No FLOPs worth
counting; bytes: R D read and T D written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 1024
"""Columns that one program works on at a time."""


@torch.library.custom_op("moesaic::triton_sum_tokens", mutates_args=())
def sum_tokens(
    rows: Tensor, by_token: Tensor, starts: Tensor, weights: Tensor | None, per_token: int, dtype: torch.dtype
) -> Tensor:
    """Return what `kernels.permute.sum_rows` does; the arguments are a `Dispatch`, flat. Not differentiable.

    Args:
        rows: (R, D) in expert order, 16-bit or float32.
        by_token: (R,) int64 or int32; -1 adds nothing.
        starts: (T,) int64.
        weights: (R,) in the order of `rows`, or None for 1.
        per_token: rows of each token; 0 where that varies.
        dtype: of the result.

    Returns:
        (T, D).
    """
    out = torch.empty(len(starts), rows.shape[1], dtype=dtype, device=rows.device)
    if out.numel():
        width = min(WIDEST, triton.next_power_of_2(rows.shape[1]))
        _sum_tokens_kernel[(len(out), triton.cdiv(rows.shape[1], width))](
            rows.contiguous(), by_token, starts, rows if weights is None else weights, out, len(out), len(by_token),
            rows.shape[1], WEIGHTED=weights is not None, PER_TOKEN=per_token, WIDTH=width,
        )  # fmt: skip
    return out


@sum_tokens.register_fake
def _(
    rows: Tensor, by_token: Tensor, starts: Tensor, weights: Tensor | None, per_token: int, dtype: torch.dtype
) -> Tensor:
    return rows.new_empty(starts.shape[0], rows.shape[1], dtype=dtype)


@triton.jit
def _sum_tokens_kernel(
    rows: tl.tensor,
    by_token: tl.tensor,
    starts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    dim: tl.tensor,
    WEIGHTED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    first = tl.load(starts + token)
    if PER_TOKEN > 0:
        for slot in tl.static_range(PER_TOKEN):
            total += weighted_row(rows, by_token, weights, first + slot, column, dim, WEIGHTED)
    else:
        last = tl.load(starts + token + 1, mask=token + 1 < num_tokens, other=num_rows)
        for place in tl.range(first, last):
            total += weighted_row(rows, by_token, weights, place, column, dim, WEIGHTED)
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=column < dim)


@triton.jit
def weighted_row(
    rows: tl.tensor,
    by_token: tl.tensor,
    weights: tl.tensor,
    place: tl.tensor,
    column: tl.tensor,
    dim: tl.tensor,
    WEIGHTED: tl.constexpr,
) -> tl.tensor:
    """Return the columns of the row at a place of the token order, in float32, times its weight; zeros for row -1."""
    source = tl.load(by_token + place).to(tl.int64)
    values = tl.load(rows + source * dim + column, mask=(source >= 0) & (column < dim), other=0.0).to(tl.float32)
    if WEIGHTED:
        values *= tl.load(weights + source, mask=source >= 0, other=0.0).to(tl.float32)
    return values
