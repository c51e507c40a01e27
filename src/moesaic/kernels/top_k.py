"""Deterministic top-k: the columns of each row's largest entries, also within the best groups of
columns."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.pick import is_limited

MOST_PASSES = 8
"""Up to this many experts are selected by repeated `argmax`; measured, docs/kernels.md."""


def top_k_indices(rank_by: Tensor, top_k: int) -> Tensor:
    """Return the indices of the `top_k` largest entries of each row, largest first; equal entries
    are in index order.

    NaN ranks above every number, as in `torch.topk`, whatever its sign bit: a row of NaN gets the
    indices 0 to top_k - 1. A token with NaN scores therefore gets valid and distinct experts, and a
    weight of NaN that shows in its own result.

    `torch.topk` does not define the order of ties, so two runs, or a run and its recomputation, may
    differ. If `top_k` is small, `argmax`, which takes the first of equal entries, runs `top_k`
    times. After the first, -inf marks the entries that were taken, and others of -inf rank as the
    lowest finite number. Otherwise each float32 is mapped to an integer of the same order, to which
    the index is appended, which makes all keys of a row distinct. A key has 32 + log2(E) bits and
    is exact in a float64, for which `topk` is fast; devices without float64 run `argmax` for every
    `top_k`.

    Args:
        rank_by: (rows, columns), float32 or float64.
        top_k: the number of indices per row.

    Returns:
        (rows, top_k) int64.
    """
    has_few_passes = top_k <= MOST_PASSES or is_limited(rank_by.device)
    if top_k > 0 and has_few_passes:
        return _by_passes(rank_by, top_k)
    if rank_by.dtype != torch.float32:
        return top_k_indices_reference(rank_by, top_k)
    bits = (rank_by + 0.0).contiguous().view(torch.int32)  # -0.0 becomes 0.0, which it equals
    # turning the other bits of a negative number makes larger magnitudes smaller integers
    magnitude_bits = 0x7FFFFFFF
    sign = bits >> 31  # all bits, or none
    ordered = bits ^ (sign & magnitude_bits)
    ordered.masked_fill_(rank_by.isnan(), magnitude_bits)
    columns = rank_by.shape[-1]
    tie_break = torch.arange(columns - 1, -1, -1, device=rank_by.device)
    return (ordered.double() * columns + tie_break).topk(top_k, dim=-1).indices


def _by_passes(rank_by: Tensor, top_k: int) -> Tensor:
    """Return `top_k_indices` by one `argmax` for each, at least one."""
    chosen = [rank_by.argmax(1, keepdim=True)]
    if top_k == 1:
        return chosen[0]
    left = rank_by.clamp_min(torch.finfo(rank_by.dtype).min)  # a copy, in which -inf marks taken
    for _ in range(top_k - 1):
        left.scatter_(1, chosen[-1], float("-inf"))
        chosen.append(left.argmax(1, keepdim=True))
    return torch.cat(chosen, 1)


def top_k_indices_reference(rank_by: Tensor, top_k: int) -> Tensor:
    """Return the same indices as `top_k_indices`, from a stable sort of all columns."""
    return rank_by.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def in_best_groups(rank_by: Tensor, num_groups: int, top_groups: int, *, best_two: bool) -> Tensor:
    """Return the values with -inf for all columns outside each row's best groups.

    Args:
        rank_by: (rows, columns).
        num_groups: number of equal groups of consecutive columns.
        top_groups: how many groups of each row keep their values.
        best_two: rank a group by the sum of its two best entries, else by its best one.
    """
    per_group = rank_by.shape[1] // num_groups
    grouped = rank_by.unflatten(1, (num_groups, per_group))
    num_best = min(2 if best_two else 1, per_group)
    group_values = grouped.topk(num_best, dim=-1).values.sum(-1)
    groups = top_k_indices(group_values, top_groups)
    is_eligible = torch.zeros_like(group_values, dtype=torch.bool).scatter_(1, groups, True)
    return grouped.masked_fill(~is_eligible.unsqueeze(-1), float("-inf")).flatten(1)
