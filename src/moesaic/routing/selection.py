"""Pieces that several routers share: the linear score, the deterministic top-k, its weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moesaic.kernels.pick import kind_of
from moesaic.routing.routing import Choice

MOST_COLUMNS, MOST_CHOICES = 2048, 32
"""What the Triton kernel holds of a row, and how many times it looks for the largest; more goes by sorting."""


def linear_scores(
    dim: int, num_experts: int, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """Return a router matrix, (num_experts, dim), drawn uniformly from +-1/sqrt(dim) as `nn.Linear` does."""
    return nn.Parameter(draw_linear(torch.empty(num_experts, dim, device=device, dtype=dtype)))


@torch.no_grad()
def draw_linear(weight: Tensor) -> Tensor:
    """Draw a matrix anew, uniformly from +-1/sqrt(its last size), in place; returns it."""
    bound = 1 / math.sqrt(weight.shape[-1])
    return weight.uniform_(-bound, bound)


def top_k_indices(rank_by: Tensor, top_k: int) -> Tensor:
    """Return the indices of the `top_k` largest entries of each row, largest first; of equal ones the lowest index.

    NaN ranks above every number, as `torch.topk` has it, whatever its sign bit: a row of NaN has the indices 0 to top_k - 1.
    So a token whose scores are NaN has valid experts, distinct ones, and a weight of NaN that shows in its own result.

    `torch.topk` leaves the order of ties open, so two runs, or a run and its recomputation, may differ. Here a float32
    is mapped to an integer of the same order and the index is appended: no two keys of a row are equal. The key has
    32 + log2(E) bits and is exact in a float64, whose `topk` is fast on every device.

    Args:
        rank_by: (rows, columns), float32 or float64.
        top_k: how many to return.

    Returns:
        (rows, top_k) int64.
    """
    if rank_by.dtype != torch.float32:
        return top_k_indices_reference(rank_by, top_k)
    if kind_of(rank_by.device) == "triton" and rank_by.shape[1] <= MOST_COLUMNS and 0 < top_k <= MOST_CHOICES:
        from moesaic.kernels.triton.top_k import top_k_columns

        return top_k_columns(rank_by, top_k).long()
    bits = rank_by.masked_fill(rank_by == 0, 0.0).contiguous().view(torch.int32)  # -0.0 equals 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(rank_by.isnan(), 0x7FFFFFFF)
    columns = rank_by.shape[-1]
    tie_break = torch.arange(columns - 1, -1, -1, device=rank_by.device)
    return (ordered.double() * columns + tie_break).topk(top_k, dim=-1).indices


def top_k_indices_reference(rank_by: Tensor, top_k: int) -> Tensor:
    """Return what `top_k_indices` must: a stable sort, cut."""
    return rank_by.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def token_choice(experts_TK: Tensor) -> Choice:
    """Turn each token's list of experts into copies, token by token.

    Args:
        experts_TK: (tokens, top_k) int64, best first.
    """
    num_tokens, top_k = experts_TK.shape
    token = torch.arange(num_tokens, device=experts_TK.device).repeat_interleave(top_k)
    slot = torch.arange(top_k, device=experts_TK.device).repeat(num_tokens)
    return Choice(token, experts_TK.reshape(-1), slot, per_token=top_k)


def chosen(values_TE: Tensor, choice: Choice, top_k: int) -> Tensor:
    """Read each token's chosen entries: (tokens, num_experts) -> (tokens, top_k), for a choice made by `token_choice`."""
    return values_TE.gather(1, choice.expert.view(-1, top_k))


def normalized(gates_TK: Tensor) -> Tensor:
    """Divide each row of non-negative gates by its sum; a row of zeros stays zero.

    Args:
        gates_TK: (tokens, top_k).

    Returns:
        (tokens * top_k,): one weight per copy.
    """
    total = gates_TK.sum(-1, keepdim=True)
    return (gates_TK / total.clamp_min(torch.finfo(total.dtype).tiny)).reshape(-1)
