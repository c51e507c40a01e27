"""Consecutive parts of a model for pipeline stages, cut where their time and memory are even."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from torch import nn

from moesaic.layer import MoE
from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT

SLACK = 1.05
"""How much longer than the shortest possible time the slowest part may take, for less memory."""


def cut_model(model: GPT, count: int) -> list[range]:
    """Return which blocks each part of a model has, for `count` parts.

    The slowest part is as fast as it can be, up to a twentieth; among such cuts, the part with the
    most parameters has as few as it can. The first part also embeds, and the last one multiplies by
    the output matrix.
    """
    config = model.config
    seconds = [_block_flops(block, config) for block in model.blocks]
    sizes = [_num_parameters(block) for block in model.blocks]
    embedding = model.embedding.weight
    seconds_of_ends = (0.0, 2.0 * embedding.numel())
    is_tied = model.unembedding is None
    output = (
        embedding.numel()
        if is_tied or model.unembedding is None
        else _num_parameters(model.unembedding)
    )
    return cut(seconds, sizes, count, seconds_of_ends, (embedding.numel(), output))


def cut(
    times: Sequence[float],
    sizes: Sequence[float],
    count: int,
    times_of_ends: tuple[float, float] = (0, 0),
    sizes_of_ends: tuple[float, float] = (0, 0),
) -> list[range]:
    """Return `count` consecutive ranges, none empty, that cover all blocks; see `cut_model`.

    Args:
        times: of each block, at least `count`.
        sizes: of each block.
        times_of_ends: what the first and the last part take besides, and
        sizes_of_ends: hold besides.
    """
    blocks = len(times)
    limit: float = math.inf

    def part(values: Sequence[float], ends: tuple[float, float], start: int, end: int) -> float:
        at_ends = (ends[0] if start == 0 else 0.0) + (ends[1] if end == blocks else 0.0)
        return sum(values[start:end]) + at_ends

    def time_of(start: int, end: int) -> float:
        return part(times, times_of_ends, start, end)

    def size_of(start: int, end: int) -> float:
        too_slow = time_of(start, end) > limit
        return math.inf if too_slow else part(sizes, sizes_of_ends, start, end)

    def best(cost: Callable[[int, int], float]) -> tuple[float, list[range]]:
        @cache
        def rest(start: int, parts: int) -> tuple[float, tuple[int, ...]]:
            if parts == 1:
                return cost(start, blocks), (blocks,)
            found = []
            for end in range(start + 1, blocks - parts + 2):
                later, ends = rest(end, parts - 1)
                found.append((max(cost(start, end), later), (end, *ends)))
            return min(found)

        worst, ends = rest(0, count)
        return worst, [range(start, end) for start, end in zip((0, *ends), ends)]

    limit = SLACK * best(time_of)[0]
    return best(size_of)[1]


def _block_flops(block: nn.Module, config: ModelConfig) -> float:
    """Return the FLOPs of one token in a block's forward pass: two for each parameter that it uses,
    and those of attention to all earlier positions."""
    used = float(_num_parameters(block))
    for layer in block.modules():
        if isinstance(layer, MoE):
            used -= _num_parameters(layer.experts) * (1 - layer.top_k / layer.num_experts)
    # Scores and weighted values need 4 * dim for each position that a token attends to. Averaged
    # over the positions of causal attention that is half the sequence, hence 2 and not 4.
    return 2.0 * used + 2.0 * config.dim * config.seq_len


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
