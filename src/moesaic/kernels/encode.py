"""Fast encode and decode: from tokens to a padded (experts, capacity, dim) tensor, and back with
routing weights.

Names and contract are Tutel's ("Tutel: Adaptive Mixture-of-Experts at Scale", 2023, section 4.2 and
appendix B), for code that computes with padded experts. `MoE` itself is dropless and has no such
tensor. GShard's formulation multiplies by a mask, (tokens, experts, capacity). Encode and decode
only read and write rows: encode sums at most one token per place, decode sums the weighted places
of each token. Each is the other's backward; both are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels.permute import dot_rows, sum_rows
from moesaic.kernels.work import Dispatch


@dataclass(frozen=True)
class Encoding:
    """The places of token copies in the padded tensor. T tokens, K copies of each, E experts with C
    places each."""

    num_experts: int
    capacity: int
    place: Tensor
    """(T, K) int64: each copy's place among all E * C places; E * C for a dropped copy."""
    to_places: Dispatch
    """For each place its token, if any."""
    to_tokens: Dispatch
    """For each token the places of its copies."""


def encoding(expert_TK: Tensor, num_experts: int, capacity: int) -> Encoding:
    """Give every copy a place: first choices before second choices, tokens in order. Copies beyond
    the capacity are dropped.

    Args:
        expert_TK: (tokens, top_k) int64, the chosen experts; those of one token differ.
        num_experts: E.
        capacity: places per expert.

    Raises:
        InputError: the capacity is negative or `expert_TK` does not have two dimensions.
    """
    if expert_TK.dim() != 2 or capacity < 0:
        raise InputError(
            f"encoding: expert_TK of shape {tuple(expert_TK.shape)}, capacity={capacity}: "
            "give (tokens, top_k) and at least 0"
        )
    num_tokens, top_k = expert_TK.shape
    device = expert_TK.device
    num_places = num_experts * capacity
    expert = expert_TK.t().reshape(-1)  # copies with first choices first
    copy = torch.arange(len(expert), device=device)  # their numbers; also the positions in `order`

    # a copy's rank is how many copies of its expert come before it
    order = expert.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    first_of_expert = counts.cumsum(0) - counts
    rank = torch.empty_like(expert)
    rank[order] = copy - first_of_expert[expert[order]]
    place = torch.where(rank < capacity, expert * capacity + rank, num_places)

    # The rows of a place, in the sense of `Dispatch`, are the tokens of its copies: at most one.
    # Sums read `by_token` and `starts` alone; `token` is any tensor.
    sorted_place, by_place = place.sort(stable=True)  # by_place: the copies by their places
    token_of_copy = copy % max(num_tokens, 1)  # each choice lists all tokens
    starts = torch.searchsorted(sorted_place, torch.arange(num_places + 1, device=device))
    num_kept = sorted_place[sorted_place < num_places].shape[0]
    place_TK = place.view(top_k, num_tokens).t().contiguous()
    to_places = Dispatch(
        token=place_TK,
        by_token=token_of_copy[by_place][:num_kept],
        starts=starts[:-1],  # without the start of dropped copies
        per_token=None,
    )

    # the rows of a token are the places of its copies that were kept
    sorted_place_TK = place_TK.sort(1).values
    lengths = (place_TK < num_places).sum(1)
    to_tokens = Dispatch(
        token=place_TK,
        by_token=sorted_place_TK[sorted_place_TK < num_places],
        starts=lengths.cumsum(0) - lengths,
        per_token=None,
    )
    return Encoding(num_experts, capacity, place=place_TK, to_places=to_places, to_tokens=to_tokens)


def fast_encode(x: Tensor, form: Encoding) -> Tensor:
    """Copy tokens to their places and zeros to empty places: (T, D) -> (E, C, D),
    differentiable."""
    rows: Tensor = _Encode.apply(x, form)
    return rows.view(form.num_experts, form.capacity, x.shape[1])


def fast_decode(rows: Tensor, gates: Tensor, form: Encoding) -> Tensor:
    """Sum each token's places, weighted by `gates`: (E, C, D), (T, K) -> (T, D), differentiable in
    both.

    A dropped copy contributes nothing, and its weight's gradient is zero.
    """
    y: Tensor = _Decode.apply(rows.reshape(-1, rows.shape[-1]), gates, form)
    return y


def _weights(gates: Tensor, form: Encoding) -> Tensor:
    """Return each place's weight, (E * C,); 0 for an empty place."""
    # dropped copies have the place behind the last one
    weights = gates.new_zeros(form.num_experts * form.capacity + 1)
    return weights.scatter(0, form.place.reshape(-1), gates.reshape(-1))[:-1]


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Encoding) -> Tensor:
        ctx.form = form
        return sum_rows(x, form.to_places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_rows(grad.contiguous(), ctx.form.to_tokens), None


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, form: Encoding) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(rows, gates)
        return sum_rows(rows, form.to_tokens, weights=_weights(gates, form))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of the rows and of the gates."""
        rows, gates = ctx.saved_tensors
        # the gradient of each place's token, still without the gates
        d_places = sum_rows(grad.contiguous(), ctx.form.to_places)
        d_gates = None
        if ctx.needs_input_grad[1]:
            dots = dot_rows(d_places, rows.contiguous()).to(gates.dtype)
            # dropped copies, whose place is behind the last one, get zero
            d_gates = torch.cat([dots, gates.new_zeros(1)])[ctx.form.place]
        weights = _weights(gates, ctx.form).to(d_places.dtype)
        return d_places.mul_(weights.unsqueeze(1)), d_gates, None
