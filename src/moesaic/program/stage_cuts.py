"""Where pipeline stages cut the blocks of a model. Needs no torch.

A stage is a range of consecutive blocks. The first one also has the embedding, the last one the
output projection and the loss: these are the two ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

SLACK = 1.05
"""How much longer than the shortest possible time the slowest part may take, for less memory."""


def cut(
    times: Sequence[float],
    sizes: Sequence[float],
    count: int,
    times_of_ends: tuple[float, float] = (0, 0),
    sizes_of_ends: tuple[float, float] = (0, 0),
) -> list[range]:
    """Return `count` consecutive ranges, none empty, that cover all blocks.

    The slowest part is as fast as it can be, up to a twentieth; among such cuts, the largest part
    is as small as it can be.

    Args:
        times: of each block, at least `count` blocks, in any unit.
        sizes: of each block, in any unit.
        times_of_ends: what the embedding in the first part, and the output in the last part, take.
        sizes_of_ends: what these hold.
    """
    num_blocks = len(times)

    def time_of(start: int, end: int) -> float:
        return _stage_sum(times, times_of_ends, start, end)

    shortest, _ = _best_cut(num_blocks, count, time_of)
    limit = SLACK * shortest

    def size_if_fast(start: int, end: int) -> float:
        if time_of(start, end) > limit:
            return math.inf
        return _stage_sum(sizes, sizes_of_ends, start, end)

    _, stages = _best_cut(num_blocks, count, size_if_fast)
    return stages


def _stage_sum(values: Sequence[float], ends: tuple[float, float], start: int, end: int) -> float:
    """Return the sum over the blocks `start` to before `end`, with the ends that they have."""
    of_first = ends[0] if start == 0 else 0.0
    of_last = ends[1] if end == len(values) else 0.0
    return sum(values[start:end]) + (of_first + of_last)


def _best_cut(
    num_blocks: int, count: int, cost: Callable[[int, int], float]
) -> tuple[float, list[range]]:
    """Return the cut into `count` stages whose worst stage costs least: this cost, and the blocks
    of each stage.

    Args:
        cost: of a stage, from its first block and the block after its last one.
    """

    @cache
    def best_from(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return the least worst cost of the blocks from `start` on in `stages` stages, and where
        these end."""
        if stages == 1:
            return cost(start, num_blocks), (num_blocks,)
        cuts = []
        last_end = num_blocks - (stages - 1)  # leaves a block to each other stage
        for end in range(start + 1, last_end + 1):
            later_cost, later_ends = best_from(end, stages - 1)
            cuts.append((max(cost(start, end), later_cost), (end, *later_ends)))
        return min(cuts)

    worst, ends = best_from(0, count)
    return worst, [range(start, end) for start, end in pairwise((0, *ends))]
