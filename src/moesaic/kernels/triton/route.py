"""Top-k routing: each token's experts and weights from its logits, and the logits' gradient.

Eager: softmax or sigmoid over (T, E), a deterministic top-k (in float64, so that ties break), a gather, a normalisation;
by autograd a scatter back. Here one kernel reads a token's logits once and picks K times the largest, of equal ones the
lowest index; NaN ranks above every number, as in `routing/router.py`, so that every token has K different experts.
Saved: the logits, T E, and the experts, T K. Backward writes each logit's gradient once, as a sum over the token's K
choices: no scatter, no atomics. Bytes: T E read, 8 T K written; in backward T E written too. FLOPs: K T E compares.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.launch import next_power_of_2
from moesaic.kernels.triton.parts import sigmoid

SCORES = ("softmax", "switch", "sigmoid")
"""softmax over the chosen logits; softmax over all of them; sigmoids of the chosen ones divided by their sum."""
VALUES = 4096
"""Logits that one program holds."""


@torch.library.custom_op("moesaic::triton_route", mutates_args=())
def route(logits: Tensor, bias: Tensor | None, top_k: int, score: str) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and weigh them, differentiable in `logits`.

    Args:
        logits: (T, E); computed in float32.
        bias: (E,) float32, added to the sigmoids for the choice alone (Wang et al. 2024, section 3); None for none.
        top_k: K, at most E.
        score: one of `SCORES`.

    Returns:
        weight, (T, K) float32, and expert, (T, K) int32, largest first; of equal logits the lowest index. Logits of NaN come
        first, and make the token's weights NaN.
    """
    num_tokens, num_experts = logits.shape
    weight = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    expert = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    if num_tokens:
        experts = next_power_of_2(num_experts)
        tokens = max(1, VALUES // experts)
        _route_kernel[(triton.cdiv(num_tokens, tokens),)](
            logits.contiguous(), logits if bias is None else bias, weight, expert, num_tokens, num_experts,
            SCORE=score, BIASED=bias is not None, TOP_K=top_k, SLOTS=next_power_of_2(top_k), TOKENS=tokens,
            EXPERTS=experts,
        )  # fmt: skip
    return weight, expert


@route.register_fake
def _(logits: Tensor, bias: Tensor | None, top_k: int, score: str) -> tuple[Tensor, Tensor]:
    weight = logits.new_empty(logits.shape[0], top_k, dtype=torch.float32)
    return weight, weight.new_empty(weight.shape, dtype=torch.int32)


@torch.library.custom_op("moesaic::triton_route_backward", mutates_args=())
def route_backward(d_weight: Tensor, logits: Tensor, expert: Tensor, score: str) -> Tensor:
    """Return the gradient of the logits.

    Args:
        d_weight: (T, K) float32.
        logits: (T, E).
        expert: (T, K) int32, from `route`.
        score: as in `route`.

    Returns:
        (T, E) in the dtype of `logits`.
    """
    num_tokens, num_experts = logits.shape
    d_logits = torch.empty(num_tokens, num_experts, dtype=logits.dtype, device=logits.device)
    if num_tokens:
        experts, top_k = next_power_of_2(num_experts), expert.shape[1]
        tokens = max(1, VALUES // experts)
        _route_backward_kernel[(triton.cdiv(num_tokens, tokens),)](
            d_weight.contiguous(), logits.contiguous(), expert, d_logits, num_tokens, num_experts,
            SCORE=score, TOP_K=top_k, SLOTS=next_power_of_2(top_k), TOKENS=tokens, EXPERTS=experts,
        )  # fmt: skip
    return d_logits


@route_backward.register_fake
def _(d_weight: Tensor, logits: Tensor, expert: Tensor, score: str) -> Tensor:
    return logits.new_empty(logits.shape)


def route_reference(logits: Tensor, bias: Tensor | None, top_k: int, score: str) -> tuple[Tensor, Tensor]:
    """Return what `route` must, by a stable sort in float64, differentiable."""
    logits = logits.double()
    rank_by = logits.detach() if score != "sigmoid" else logits.detach().sigmoid()
    rank_by = rank_by if bias is None else rank_by + bias.double()
    expert = rank_by.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    if score == "switch":
        return logits.softmax(1).gather(1, expert), expert
    chosen = logits.gather(1, expert)
    if score == "softmax":
        return chosen.softmax(1), expert
    gates = chosen.sigmoid()
    return gates / gates.sum(1, keepdim=True).clamp_min(torch.finfo(gates.dtype).tiny), expert


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, ctx.score = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _gradients(ctx: Any, d_weight: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
    return route_backward(d_weight, *ctx.saved_tensors, ctx.score), None, None, None


route.register_autograd(_gradients, setup_context=_keep)


@triton.jit
def at_least(total: tl.tensor) -> tl.tensor:
    """Return a divisor above 0: the total, or the smallest normal float. NaN stays, which `tl.maximum` would drop."""
    return tl.where(total < 1.1754943508222875e-38, 1.1754943508222875e-38, total)


@triton.jit
def _route_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weight: tl.tensor,
    expert: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    SCORE: tl.constexpr,
    BIASED: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    number = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    inside = (token < num_tokens)[:, None] & (number < num_experts)[None, :]
    at = token.to(tl.int64)[:, None] * num_experts + number[None, :]
    value = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    rank = value
    if SCORE == "sigmoid":
        rank = tl.where(inside, sigmoid(value), float("-inf"))
        if BIASED:
            rank += tl.load(bias + number, mask=number < num_experts, other=0.0)[None, :]
    # Integers in the order of the floats, -0 beside 0 and NaN above all; below all of them what is no choice.
    bits = tl.where(rank == 0.0, 0.0, rank).to(tl.int32, bitcast=True)
    place = tl.where(rank != rank, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    place = tl.where(inside, place, -0x80000000)
    best = tl.zeros((TOKENS, SLOTS), tl.int32)
    chosen = tl.full((TOKENS, SLOTS), float("-inf"), tl.float32)
    for k in tl.static_range(TOP_K):
        is_best = place == tl.max(place, 1)[:, None]
        index = tl.minimum(tl.min(tl.where(is_best, number[None, :], EXPERTS), 1), num_experts - 1)
        is_it = number[None, :] == index[:, None]
        place = tl.where(is_it, -0x80000000, place)
        best = tl.where(slot[None, :] == k, index[:, None], best)
        chosen = tl.where(slot[None, :] == k, tl.sum(tl.where(is_it & inside, value, 0.0), 1)[:, None], chosen)
    if SCORE == "switch":
        top = tl.max(value, 1)
        total = tl.sum(tl.where(inside, tl.exp(value - top[:, None]), 0.0), 1)
        weighed = tl.exp(chosen - top[:, None]) / total[:, None]
    elif SCORE == "softmax":
        weighed = tl.exp(chosen - tl.max(chosen, 1)[:, None])
        weighed = weighed / tl.sum(weighed, 1)[:, None]
    else:
        weighed = tl.where(slot[None, :] < TOP_K, sigmoid(chosen), 0.0)
        weighed = weighed / at_least(tl.sum(weighed, 1))[:, None]
    to = token.to(tl.int64)[:, None] * TOP_K + slot[None, :]
    is_slot = (token < num_tokens)[:, None] & (slot < TOP_K)[None, :]
    tl.store(weight + to, weighed, mask=is_slot)
    tl.store(expert + to, best, mask=is_slot)


@triton.jit
def _route_backward_kernel(
    d_weight: tl.tensor,
    logits: tl.tensor,
    expert: tl.tensor,
    d_logits: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    SCORE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    number = tl.arange(0, EXPERTS)
    inside = (token < num_tokens)[:, None] & (number < num_experts)[None, :]
    at = token.to(tl.int64)[:, None] * num_experts + number[None, :]
    value = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    # One column per expert: the gradient of its weight if it was chosen, and whether it was.
    grad = tl.zeros((TOKENS, EXPERTS), tl.float32)
    is_chosen = tl.zeros((TOKENS, EXPERTS), tl.int32)
    for k in tl.static_range(TOP_K):
        of_slot = token.to(tl.int64) * TOP_K + k
        index = tl.load(expert + of_slot, mask=token < num_tokens, other=0)
        is_it = number[None, :] == index[:, None]
        grad = tl.where(is_it, tl.load(d_weight + of_slot, mask=token < num_tokens, other=0.0)[:, None], grad)
        is_chosen = tl.where(is_it, 1, is_chosen)
    if SCORE == "sigmoid":
        gate = tl.where(is_chosen == 1, sigmoid(value), 0.0)
        total = at_least(tl.sum(gate, 1))[:, None]
        mean = tl.sum(gate * grad, 1)[:, None] / total
        result = tl.where(is_chosen == 1, (grad - mean) / total * gate * (1.0 - gate), 0.0)
    else:
        counted = value
        if SCORE == "softmax":
            counted = tl.where(is_chosen == 1, value, float("-inf"))
        share = tl.exp(counted - tl.max(counted, 1)[:, None])
        share = share / tl.sum(share, 1)[:, None]
        result = share * (grad - tl.sum(share * grad, 1)[:, None])
    tl.store(d_logits + at, result.to(d_logits.dtype.element_ty), mask=inside)
