"""Counts of a call as `CallSizes` wants them: copies and tokens of every rank of the world, from what routing exchanged."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moesaic.plan import Compiled
from moesaic.routing.route import RoutingRecord


def counts_of(record: RoutingRecord, compiled: Compiled, *, slices: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return copies (world, experts) and tokens (world,) of every rank.

    Args:
        record: of the call's routing, exchanged.
        compiled: what the layer runs.
        slices: each rank of a tensor group routed a slice of the group's tokens.
    """
    grid = compiled.grid
    assert record.by_rank is not None
    assert record.gathered is not None
    copies, tokens = record.by_rank.cpu().numpy(), record.gathered.on_host[:, 1].astype(np.int64)
    if slices:
        return copies, tokens
    copies, tokens = np.repeat(copies, grid.tp, axis=0), np.repeat(tokens, grid.tp)
    if compiled.is_redundant:
        return copies, tokens
    place = np.arange(grid.world) % grid.tp
    return _cut(copies, place[:, None], grid.tp), _cut(tokens, place, grid.tp)


def even_counts(
    compiled: Compiled, num_experts: int, num_tokens: int, rows: int, *, slices: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same where every rank sends each expert the same rows; nothing comes from the device.

    Args:
        compiled, slices: as for `counts_of`.
        num_experts: of the layer.
        num_tokens: of every rank's routing.
        rows: that it sends each expert.
    """
    grid = compiled.grid
    shared = not compiled.is_redundant and not slices
    tokens = num_tokens // grid.tp if shared else num_tokens
    copies = rows // grid.tp if shared else rows
    return np.full((grid.world, num_experts), copies), np.full(grid.world, tokens)


def share_of_each(counts: Tensor, index: int, count: int) -> tuple[Tensor, Tensor]:
    """Return where the `index`-th of `count` contiguous shares starts and ends, for each of several lengths."""
    return counts * index // count, counts * (index + 1) // count


def _cut(counts: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Return the share that each rank of a tensor group has of its group's runs."""
    return counts * (place + 1) // size - counts * place // size
