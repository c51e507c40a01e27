"""Permutation of tokens into expert order, and back with a sum over each token's copies.

The two are each other's transpose, so each is the other's backward. Both are deterministic (no
atomics) and sum in float32. Only indices are saved for backward. `dot_rows` computes the gradients
of routing weights.

A routing makes R copies of T tokens, one for each token and expert, and lists them in its own
order, usually by token. A row is a copy in expert order. Copies that are not sent, such as those of
padding, have the expert number E; their rows come last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.operator import operator
from moesaic.kernels.pick import is_limited, kind_of
from moesaic.kernels.work import Dispatch, accumulate_dtype


@dataclass(frozen=True)
class Permutation:
    """The expert order of the copies of a routing."""

    order: Tensor
    """(R,) int64, int32 by Triton: row i in expert order is copy `order[i]` of the routing."""
    counts: Tensor
    """(E,) int64: rows per expert."""
    ends: Tensor
    """(E,) int32: one past the last row of each expert."""
    dispatch: Dispatch
    """Each row's token, and each token's rows."""

    @property
    def token(self) -> Tensor:
        """(R,) int64, int32 by Triton: the token of each row in expert order."""
        return self.dispatch.token

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return len(self.dispatch.starts)


def sort_by_expert(
    token: Tensor,
    expert: Tensor,
    counts: Tensor,
    num_tokens: int,
    rows_per_token: int | None,
    *,
    has_unsent: bool = False,
) -> Permutation:
    """Sort copies by expert; copies of one expert keep their order.

    Args:
        token: (R,) int64, each copy's token.
        expert: (R,) int64, each copy's expert.
        counts: (E,) int64, copies per expert.
        num_tokens: T.
        rows_per_token: R / T if every token has that many copies and they follow one another; else
            None.
        has_unsent: whether some copies have expert number E, which marks them as not sent. Their
            rows come last and belong to no token.
    """
    if kind_of(expert.device) == "triton":
        from moesaic.kernels.triton.rows.sort import sort

        order, row_of_copy, ends = sort(expert, len(counts))
    else:
        order, row_of_copy, ends = sort_copies(expert, len(counts))
    if rows_per_token is not None and order.dtype == torch.int32:
        row_tokens = order // rows_per_token  # stays int32
    else:
        row_tokens = token.index_select(0, order)

    if rows_per_token is None:
        by_token = row_tokens.argsort(stable=True)  # the rows of each token, token after token
        if has_unsent:
            # rows from the last end on are those of copies that are not sent
            by_token = by_token.masked_fill(by_token >= ends[-1], -1)
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=token.device)
        # one past each token's last place in `by_token`
        stops = zeros.scatter_add_(0, token, torch.ones_like(token)).cumsum(0)
        # each token starts where the one before it stops, and token 0, if there is one, at 0
        first_token = stops.new_zeros(min(num_tokens, 1))
        starts = stops.roll(1).index_fill(0, first_token, 0)
    else:
        # copies are listed by token, and so are their rows
        by_token = row_of_copy
        starts = torch.arange(0, num_tokens * rows_per_token, rows_per_token, device=order.device)
    dispatch = Dispatch(
        token=row_tokens,
        by_token=by_token,
        starts=starts,
        per_token=rows_per_token,
        has_unsent=has_unsent,
    )
    return Permutation(order, counts, ends, dispatch)


@operator("sort_copies")
def sort_copies(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort copies by expert, stably, without Triton. On a CPU numpy sorts 16-bit integers by radix,
    in a fifth of torch's time.

    Args:
        expert: (R,) int64, each copy's expert; `num_experts` for a copy that is not sent, whose row
            comes last.
        num_experts: E.

    Returns:
        order: (R,) int64, row i is copy `order[i]`.
        row: (R,) int64, copy i is in row `row[i]`; -1 for a copy that is not sent.
        ends: (E,) int32, one past the last row of each expert.
    """
    if expert.device.type == "cpu":
        return _sort_by_numpy(expert, num_experts)
    # int16, which holds E too, is sorted in half the time of int64
    narrow = expert
    if num_experts < 2**15:
        narrow = expert.to(torch.int16)
    sorted_experts, order = narrow.sort(stable=True)

    position = torch.arange(len(expert), device=expert.device)
    position = position.masked_fill(sorted_experts == num_experts, -1)
    row = torch.empty_like(order).scatter_(0, order, position)

    # the last of E + 1 counts is that of copies that are not sent
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    ends = counts.cumsum(0, dtype=torch.int32)[:num_experts].clone()
    return order, row, ends


def _sort_by_numpy(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `sort_copies` on a CPU."""
    numbers = expert.numpy()
    if num_experts < 2**16:
        numbers = numbers.astype(np.uint16)
    order = numbers.argsort(kind="stable")
    counts = np.bincount(numbers, minlength=num_experts)[:num_experts]  # of copies that are sent
    ends = counts.cumsum(dtype=np.int32)
    num_sent = ends[-1]
    row = np.full(len(numbers), -1)
    row[order[:num_sent]] = np.arange(num_sent)
    return torch.from_numpy(order), torch.from_numpy(row), torch.from_numpy(ends)


@torch.library.register_fake(sort_copies.overload)
def _(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order = torch.empty_like(expert, dtype=torch.int64)
    return order, torch.empty_like(order), expert.new_empty(num_experts, dtype=torch.int32)


def expert_of_rows(ends: Tensor, num_rows: int) -> Tensor:
    """Return the expert of each row, (R,); any expert for rows of none."""
    row = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, row, right=True).clamp_max(len(ends) - 1)


def only_sent(rows: Tensor, permutation: Permutation) -> Tensor:
    """Set rows of copies that are not sent, which hold arbitrary values, to zero, differentiable.

    Args:
        rows: (R, ...) in expert order.
        permutation: the permutation that gave this order.
    """
    if not permutation.dispatch.has_unsent:
        return rows
    row = torch.arange(len(rows), device=rows.device)
    is_unsent = row >= permutation.ends[-1]
    for _ in range(rows.dim() - 1):
        is_unsent = is_unsent.unsqueeze(-1)
    return rows.masked_fill(is_unsent, 0.0)


def permute(x: Tensor, permutation: Permutation) -> Tensor:
    """Gather tokens into rows in expert order: (T, D) -> (R, D), differentiable."""
    rows: Tensor = _Permute.apply(x, permutation.dispatch)
    return rows


def unpermute(
    rows: Tensor, permutation: Permutation, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum each token's rows, differentiable. 16-bit rows are summed in float32 and rounded once, to
    `dtype`.

    Args:
        rows: (R, D) in expert order.
        permutation: the permutation that gave this order.
        dtype: dtype of the result; None for that of `rows`. The gradient has the dtype of `rows`.

    Returns:
        (T, D).
    """
    sum_dtype = rows.dtype if dtype is None else dtype
    tokens: Tensor = _Unpermute.apply(rows, permutation.dispatch, sum_dtype)
    return tokens


def sum_rows(
    rows: Tensor,
    dispatch: Dispatch,
    *,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum each token's rows times their weights; not differentiable, deterministic on every device.

    16-bit rows are summed in float32 and rounded once. On a CPU this is torch's `embedding_bag`,
    where each token is a bag of rows: it needs no buffer of all rows and takes a fifth of the time
    of a gather and a sum. The Triton kernel needs no such buffer either.

    Args:
        rows: (R, D) in expert order.
        dispatch: maps rows to tokens.
        weights: (R,), rounded to the dtype of `rows`; None for weights of 1.
        dtype: dtype of the result; None for that of `rows`.

    Returns:
        (T, D).
    """
    if dtype is None:
        dtype = rows.dtype
    weights = None if weights is None else weights.to(rows.dtype)
    kind = kind_of(rows.device)
    if kind == "cpu":
        return _sum_by_bags(rows, dispatch, weights, dtype)
    if kind == "triton" and rows.dtype != torch.float64 and dtype != torch.float64:
        from moesaic.kernels.triton.rows.permute import sum_tokens

        # 0 if the number of a token's rows varies
        per_token = dispatch.per_token or 0
        return sum_tokens(rows, dispatch.by_token, dispatch.starts, weights, per_token, dtype)
    return _sum_gathered(rows, dispatch, weights).to(dtype)


def _sum_by_bags(
    rows: Tensor, dispatch: Dispatch, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return each token's sum as that of a bag of rows, (T, D), in `dtype`."""
    bag_weights = None
    if weights is not None:
        bag_weights = weights.index_select(0, dispatch.by_token).to(dtype)
    summed: Tensor = F.embedding_bag(
        dispatch.by_token,
        rows.to(dtype),
        dispatch.starts,
        mode="sum",
        per_sample_weights=bag_weights,
    )
    return summed


def _sum_gathered(rows: Tensor, dispatch: Dispatch, weights: Tensor | None) -> Tensor:
    """Return each token's sum over its rows, gathered in the tokens' order: (T, D), in the dtype of
    the sums."""
    by_token = dispatch.by_token
    # -1, a copy that is not sent, reads any row, which is set to zero below
    readable = by_token.clamp_min(0) if dispatch.has_unsent else by_token
    token_rows = rows.index_select(0, readable).to(accumulate_dtype(rows.dtype))
    if weights is not None:
        token_rows *= weights.index_select(0, by_token.clamp_min(0)).unsqueeze(1)
    if dispatch.has_unsent:
        token_rows.masked_fill_(by_token.unsqueeze(1) < 0, 0.0)

    starts = dispatch.starts
    num_tokens = len(starts)
    if dispatch.per_token is not None:
        return token_rows.view(num_tokens, dispatch.per_token, rows.shape[1]).sum(1)
    last_end = starts.new_full((min(num_tokens, 1),), len(rows))  # none without tokens
    ends = torch.cat([starts[1:], last_end])
    lengths = ends - starts  # correct by construction; a check would wait for the device
    if is_limited(rows.device):
        return _sum_by_doubling(token_rows, starts, lengths)
    return torch.segment_reduce(token_rows, "sum", lengths=lengths, unsafe=True, initial=0.0)


def _sum_by_doubling(rows: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each segment of rows, (segments, D), by log2(rows) sums of pairs; an empty
    segment gives zeros.

    Args:
        rows: (R, D), the segments one after the other.
        starts: (segments,), the first row of each.
        lengths: (segments,), the rows of each.
    """
    if not len(rows):
        return rows.new_zeros(len(starts), rows.shape[1])
    row = torch.arange(len(rows), dtype=starts.dtype, device=rows.device)
    # a row's segment, by the number of segments that start at or before it
    segment = torch.searchsorted(starts, row, right=True)
    step = 1
    while step < len(rows):
        # now each row is the sum of the next `step` rows of its segment, itself included
        is_apart = segment[step:] != segment[:-step]
        following = rows[step:].masked_fill(is_apart.unsqueeze(1), 0.0)
        rows = torch.cat([rows[:-step] + following, rows[-step:]])
        step *= 2
    # an empty segment at the end would start behind the last row
    sums = rows.index_select(0, starts.clamp_max(len(rows) - 1))
    return sums.masked_fill((lengths == 0).unsqueeze(1), 0.0)


def in_expert_order(weight: Tensor, permutation: Permutation) -> Tensor:
    """Return values of copies, (R,) in the order of the routing, as values of rows;
    differentiable."""
    dispatch = permutation.dispatch
    # `by_token` is the inverse of `order` if copies are listed by token and all are sent
    if dispatch.per_token is None or dispatch.has_unsent:
        return weight.index_select(0, permutation.order)
    rows: Tensor = _InExpertOrder.apply(weight, permutation.order, dispatch.by_token)
    return rows


class _InExpertOrder(torch.autograd.Function):
    """A permutation, whose gradient needs no sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, order: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        return weight.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row,) = ctx.saved_tensors
        return grad.index_select(0, row), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return x.index_select(0, dispatch.token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_rows(grad, ctx.dispatch), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch, dtype: torch.dtype) -> Tensor:
        ctx.dispatch = dispatch
        ctx.rows_dtype = rows.dtype
        return sum_rows(rows, dispatch, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.rows_dtype).index_select(0, ctx.dispatch.token), None, None


def dot_rows(a: Tensor, b: Tensor, row_numbers: Tensor | None = None) -> Tensor:
    """Return the dot product of each row of `a` with the same row of `b`: (R,).

    On a CPU this is the kernel for the gradient of an `embedding_bag`'s weights. It writes no (R,
    H) product and takes half the time of `(a * b).sum(1)`, which other devices use. float16 on a
    CPU is summed as float32.

    Args:
        a: (R, H).
        b: (R, H).
        row_numbers: `arange(R)` if the caller has it already; saves making it.
    """
    if a.device.type != "cpu":
        return (a * b).sum(1)
    if a.dtype == torch.float16:
        return (a.float() * b.float()).sum(1).to(a.dtype)
    if row_numbers is None:
        row_numbers = torch.arange(len(a))
    # row numbers as indices, as offsets and as bags: each bag has one row; mode 0 is a sum
    dots: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        a, b, row_numbers, row_numbers, row_numbers, 0
    )
    return dots
