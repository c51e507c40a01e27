"""Sizes of a call under even routing, computed by hand: the reference for
`cost.call_sizes.sizes_of`, and inputs for tests."""

from __future__ import annotations

import math

import numpy as np

from moesaic.program.grid import Grid
from moesaic.program.layouts import LayoutIndex
from moesaic.program.sizes import CallSizes


def even_sizes(
    grid: Grid,
    *,
    redundant: bool = False,
    tokens: int,
    num_experts: int,
    top_k: int,
    num_chunks: int = 1,
    node_tokens: np.ndarray | None = None,
    units: int = 0,
    replicates: bool = False,
) -> CallSizes:
    """Return the sizes of a call in which every expert gets equally many copies from every origin.

    Args:
        grid: the mesh.
        redundant: whether every rank sends all tokens of its tensor-parallel group
            (`Program.is_redundant`).
        tokens: tokens per data-parallel group; `tokens * top_k` should be divisible by
            `num_experts * tp`, or shares are rounded.
        num_experts: experts of the layer.
        top_k: copies per token.
        num_chunks: number of chunks of the program.
        node_tokens: see `CallSizes`.
        units: see `CallSizes`.
        replicates: whether the program can replicate copies; none are.
    """
    tp_rank = np.array([grid.coordinate(rank, "tp") for rank in range(grid.world)])
    if redundant:
        copies_per_expert = np.full(grid.world, tokens * top_k // num_experts)
        own_tokens = np.full(grid.world, tokens)
    else:
        copies_of_group = tokens * top_k // num_experts
        copies_per_expert = (
            copies_of_group * (tp_rank + 1) // grid.tp - copies_of_group * tp_rank // grid.tp
        )
        own_tokens = tokens * (tp_rank + 1) // grid.tp - tokens * tp_rank // grid.tp
    copies = np.repeat(copies_per_expert[:, None], num_experts, axis=1)
    shapes = LayoutIndex(grid, num_experts, num_chunks, replicates=replicates)
    return CallSizes(
        grid, copies, own_tokens, num_chunks, node_tokens=node_tokens, units=units, shapes=shapes
    )


def even_node_tokens(
    grid: Grid, *, tokens: int, num_experts: int, top_k: int, num_chunks: int = 1
) -> np.ndarray:
    """Return the expected node_tokens and rank_tokens under uniform routing, int64, as `CallSizes`
    takes them.

    A token with k of E experts has one among E / n of them with probability 1 - C(E - E / n, k) /
    C(E, k). Two of its copies there are 2 / sqrt(pi) deviations apart in their experts' runs, and
    in two chunks if a cut is in between.

    Args:
        grid: the mesh, with every replica of the experts on whole nodes.
        tokens: tokens per data-parallel group.
        num_experts: experts of the layer.
        top_k: copies per token, at most 2.
        num_chunks: number of chunks of the program; tokens are counted separately in each.
    """
    assert top_k <= 2
    run = tokens * top_k / num_experts
    cuts = [cut / num_chunks for cut in range(1, num_chunks)]
    apart = 2 / math.sqrt(math.pi) * sum(math.sqrt(x * (1 - x) / run) for x in cuts)
    parts = []
    for places in grid.cast_levels:
        elsewhere = num_experts - num_experts // places
        share = 1 - math.comb(elsewhere, top_k) / math.comb(num_experts, top_k)
        pairs = (
            math.comb(num_experts // places, 2) / math.comb(num_experts, 2) if top_k == 2 else 0.0
        )
        all_chunks = min(
            tokens * (share + pairs * apart), tokens * share * num_chunks, tokens * top_k / places
        )
        parts.append(
            np.full((grid.world, places, num_chunks), round(all_chunks / num_chunks / grid.tp))
        )
    return np.concatenate(parts, axis=1)
