"""Rows between token order and expert order: gather, weighted sum, and the weights' gradient.

Eager: `x[token]`, `zeros.index_add_(0, token, rows * weight)`, `(dy[token] * rows).sum(1)`. Each is the other's transpose.
All three read rows through indices and write each output once: deterministic without atomics, and the sum over a token's
copies runs in float32, in the order of its copies. Saved: indices, and for weighted sums the rows. No FLOPs worth
counting; bytes: R D read and T D written for the sum, the reverse for the gather, R D + T D read for the dot products.

Tutel's `fast_encode` and `fast_decode` (Hwang et al. 2023, section 4) are `gather_rows` and `sum_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.launch import next_power_of_2

WIDEST = 1024
"""Columns that one program works on at a time."""


@torch.library.custom_op("moesaic::triton_gather_rows", mutates_args=())
def gather_rows(x: Tensor, copy: Tensor, row: Tensor, top_k: int, weight: Tensor | None) -> Tensor:
    """Read token rows into expert order, differentiable in `x`.

    Args:
        x: (T, D).
        copy: (R,) int32 of `Order`.
        row: (R,) int32 of `Order`.
        top_k: K; row i reads token `copy[i] // K`.
        weight: (R,) float32 in the order of copies, multiplied in; None for 1. Not differentiable here.

    Returns:
        (R, D) in the dtype of `x`; rows that nobody sent hold anything.
    """
    out = x.new_empty(len(copy), x.shape[1])
    if out.numel():
        width = min(WIDEST, next_power_of_2(x.shape[1]))
        _gather_kernel[(len(copy), triton.cdiv(x.shape[1], width))](
            x.contiguous(), copy, x if weight is None else weight, out, x.shape[1], top_k,
            WEIGHTED=weight is not None, WIDTH=width,
        )  # fmt: skip
    return out


@gather_rows.register_fake
def _(x: Tensor, copy: Tensor, row: Tensor, top_k: int, weight: Tensor | None) -> Tensor:
    return x.new_empty(copy.shape[0], x.shape[1])


@torch.library.custom_op("moesaic::triton_sum_rows", mutates_args=())
def sum_rows(rows: Tensor, copy: Tensor, row: Tensor, top_k: int, weight: Tensor | None) -> Tensor:
    """Sum each token's rows times their weights, differentiable in `rows` and `weight`.

    Args:
        rows: (R, D) in expert order.
        copy: (R,) int32 of `Order`.
        row: (R,) int32 of `Order`; a copy with row -1 adds nothing.
        top_k: K.
        weight: (R,) float32 in the order of copies; None for 1.

    Returns:
        (R / K, D) in the dtype of `rows`, rounded once.
    """
    return sum_of_rows(rows, row, top_k, weight, rows.dtype)


def sum_of_rows(rows: Tensor, row: Tensor, top_k: int, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what `sum_rows` does, in `dtype`, without autograd; `row` may be int64."""
    out = torch.empty(len(row) // top_k, rows.shape[1], dtype=dtype, device=rows.device)
    if out.numel():
        width = min(WIDEST, next_power_of_2(rows.shape[1]))
        _sum_kernel[(len(out), triton.cdiv(rows.shape[1], width))](
            rows.contiguous(), row, rows if weight is None else weight, out, rows.shape[1],
            WEIGHTED=weight is not None, TOP_K=top_k, WIDTH=width,
        )  # fmt: skip
    return out


@sum_rows.register_fake
def _(rows: Tensor, copy: Tensor, row: Tensor, top_k: int, weight: Tensor | None) -> Tensor:
    return rows.new_empty(row.shape[0] // top_k, rows.shape[1])


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
        width = min(WIDEST, next_power_of_2(rows.shape[1]))
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


@torch.library.custom_op("moesaic::triton_dot_rows", mutates_args=())
def dot_rows(dy: Tensor, rows: Tensor, row: Tensor, top_k: int) -> Tensor:
    """Return the product of each copy's row with its token's row of `dy`: the gradient of a routing weight.

    Args:
        dy: (T, D).
        rows: (R, D) in expert order.
        row: (R,) int32 of `Order`.
        top_k: K.

    Returns:
        (R,) float32 in the order of copies; 0 for a copy that was not sent.
    """
    out = torch.zeros(len(row), dtype=torch.float32, device=rows.device)
    if rows.numel():
        width = min(WIDEST, next_power_of_2(rows.shape[1]))
        _dot_kernel[(len(row),)](dy.contiguous(), rows.contiguous(), row, out, rows.shape[1], top_k, WIDTH=width)
    return out


@dot_rows.register_fake
def _(dy: Tensor, rows: Tensor, row: Tensor, top_k: int) -> Tensor:
    return rows.new_empty(row.shape[0], dtype=torch.float32)


def sum_rows_reference(rows: Tensor, row: Tensor, top_k: int, weight: Tensor | None) -> Tensor:
    """Sum each token's rows one after the other, in float64."""
    out = torch.zeros(len(row) // top_k, rows.shape[1], dtype=torch.float64, device=rows.device)
    for copy, place in enumerate(row.tolist()):
        if place >= 0:
            out[copy // top_k] += rows[place].double() * (1.0 if weight is None else weight[copy].double())
    return out


def _keep_gather(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, copy, row, ctx.top_k, weight = inputs
    ctx.save_for_backward(copy, row, weight)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    copy, row, weight = ctx.saved_tensors
    return sum_rows(grad, copy, row, ctx.top_k, weight), None, None, None, None


def _keep_sum(ctx: Any, inputs: tuple, output: Tensor) -> None:
    rows, copy, row, ctx.top_k, weight = inputs
    ctx.save_for_backward(None if weight is None else rows, copy, row, weight)


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, Tensor | None]:
    rows, copy, row, weight = ctx.saved_tensors
    d_weight = None
    if weight is not None and ctx.needs_input_grad[4]:
        d_weight = dot_rows(grad, rows, row, ctx.top_k).to(weight.dtype)
    return gather_rows(grad, copy, row, ctx.top_k, weight), None, None, None, d_weight


gather_rows.register_autograd(_gather_backward, setup_context=_keep_gather)
sum_rows.register_autograd(_sum_backward, setup_context=_keep_sum)


@triton.jit
def _gather_kernel(
    x: tl.tensor,
    copy: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    dim: tl.tensor,
    top_k: tl.tensor,
    WEIGHTED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(copy + row)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(x + (source // top_k).to(tl.int64) * dim + column, mask=column < dim)
    if WEIGHTED:
        values = values.to(tl.float32) * tl.load(weight + source).to(tl.float32)
    tl.store(out + row * dim + column, values.to(out.dtype.element_ty), mask=column < dim)


@triton.jit
def _sum_kernel(
    rows: tl.tensor,
    row: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    dim: tl.tensor,
    WEIGHTED: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for slot in tl.static_range(TOP_K):
        source = tl.load(row + token * TOP_K + slot)
        at = rows + source.to(tl.int64) * dim + column
        values = tl.load(at, mask=(source >= 0) & (column < dim), other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weight + token * TOP_K + slot).to(tl.float32)
        total += values
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=column < dim)


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


@triton.jit
def _dot_kernel(
    dy: tl.tensor,
    rows: tl.tensor,
    row: tl.tensor,
    out: tl.tensor,
    dim: tl.tensor,
    top_k: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    copy = tl.program_id(0).to(tl.int64)
    source = tl.load(row + copy).to(tl.int64)
    total = tl.zeros((WIDTH,), tl.float32)
    for first in tl.range(0, dim, WIDTH):
        column = first + tl.arange(0, WIDTH)
        inside = (source >= 0) & (column < dim)
        left = tl.load(dy + (copy // top_k) * dim + column, mask=inside, other=0.0).to(tl.float32)
        total += left * tl.load(rows + source * dim + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + copy, tl.sum(total, 0))
