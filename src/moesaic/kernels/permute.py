"""Permute: token rows into expert order, and back with a sum over each token's copies.

The two are each other's transpose, so each is the other's backward; both are deterministic (no atomics) and sum in
float32. Nothing but indices is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """Where each row of the expert order comes from."""

    order: Tensor
    """(R,) int64: row i of the expert order is row `order[i]` of the routing."""
    token: Tensor
    """(R,) int64: the token of row i of the expert order."""
    counts: Tensor
    """(E,) int64: rows per expert."""
    num_tokens: int
    inverse: Tensor | None
    """(R,) int64, the inverse of `order`, when every token has exactly `R / num_tokens` rows; else None."""

    @property
    def ends(self) -> Tensor:
        """(E,) int32: one past the last row of each expert."""
        return self.counts.cumsum(0).to(torch.int32)


def sort_by_expert(
    token: Tensor, expert: Tensor, counts: Tensor, num_tokens: int, rows_per_token: int | None
) -> Permutation:
    """Order rows by expert, rows of one expert by their place in the routing.

    Args:
        token: (R,) int64.
        expert: (R,) int64.
        counts: (E,) int64 rows per expert.
        num_tokens: T.
        rows_per_token: R / T when every token has that many rows, token after token; else None.
    """
    order = expert.argsort(stable=True)
    inverse = None
    if rows_per_token is not None:
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
    return Permutation(order, token[order], counts, num_tokens, inverse)


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """Gather tokens into expert order: (T, D) -> (R, D), differentiable."""
    rows: Tensor = _Permute.apply(x, permutation)
    return rows


def unpermute(rows: Tensor, permutation: Permutation, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum each token's rows, differentiable. 16-bit rows are summed in float32 and rounded once, to `dtype`.

    Args:
        rows: (R, D).
        permutation: that of the rows.
        dtype: of the result; None for that of `rows`. The gradient has the dtype of `rows`.

    Returns:
        (T, D).
    """
    x: Tensor = _Unpermute.apply(rows, permutation, rows.dtype if dtype is None else dtype)
    return x


def unpermute_reference(rows: Tensor, permutation: Permutation) -> Tensor:
    """Sum each token's rows one after the other, in float64."""
    out = torch.zeros(permutation.num_tokens, rows.shape[1], dtype=torch.float64, device=rows.device)
    for row, token in zip(rows, permutation.token.tolist()):
        out[token] += row
    return out


def _sum_rows(rows: Tensor, permutation: Permutation, dtype: torch.dtype) -> Tensor:
    """Sum each token's rows into `dtype`, by the deterministic sum that suits the routing and the device."""
    accumulate = torch.promote_types(rows.dtype, torch.float32)
    num_tokens, dim = permutation.num_tokens, rows.shape[1]
    if permutation.inverse is not None:
        by_token = rows.index_select(0, permutation.inverse).view(num_tokens, len(rows) // max(num_tokens, 1), dim)
        return by_token.sum(1, dtype=accumulate).to(dtype)
    if rows.device.type == "cpu":  # index_add runs in row order on the CPU; on CUDA it uses atomics
        zeros = torch.zeros(num_tokens, dim, dtype=accumulate)
        return zeros.index_add_(0, permutation.token, rows.to(accumulate)).to(dtype)
    order = permutation.token.argsort(stable=True)
    lengths = torch.bincount(permutation.token, minlength=num_tokens)
    sums = torch.segment_reduce(rows.index_select(0, order).to(accumulate), "sum", lengths=lengths, initial=0.0)
    return sums.to(dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return x.index_select(0, permutation.token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(grad, ctx.permutation, grad.dtype), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation, dtype: torch.dtype) -> Tensor:
        ctx.permutation = permutation
        ctx.rows_dtype = rows.dtype
        return _sum_rows(rows, permutation, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.rows_dtype).index_select(0, ctx.permutation.token), None, None
