"""Padded capacity: the same number of rows for every expert, so that no size depends on the routing."""

from __future__ import annotations

import torch
from torch import Tensor


def pad_copies(gates: Tensor, token: Tensor, expert: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Give every expert the same number of rows; the empty ones have no token and weight 0.

    Args:
        gates: (copies,) differentiable, expert after expert.
        token: (copies,) int64.
        expert: (copies,) int64, at most `rows` copies each.
        num_experts: of the layer.
        rows: per expert.

    Returns:
        gates and tokens, (num_experts * rows,); the token of an empty row is -1.
    """
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
    counts_E = counts_E.scatter_add(0, expert, torch.ones_like(expert))
    start_E = counts_E.cumsum(0) - counts_E
    row = expert * rows + torch.arange(len(expert), device=expert.device) - start_E[expert]
    padded = gates.new_zeros(num_experts * rows).scatter(0, row, gates)
    return padded, torch.full_like(padded, -1, dtype=torch.int64).scatter(0, row, token)
