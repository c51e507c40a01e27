"""Where pipeline stages cut the blocks of a model. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

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
        times: of each block, at least `count`.
        sizes: of each block.
        times_of_ends: what the first and the last part take besides, and
        sizes_of_ends: hold besides.
    """
    blocks = len(times)
    limit: float = math.inf

    def part(values: Sequence[float], ends: tuple[float, float], start: int, end: int) -> float:
        """Return the sum over some blocks, with the embedding or the output that they have."""
        at_ends = (ends[0] if start == 0 else 0.0) + (ends[1] if end == blocks else 0.0)
        return sum(values[start:end]) + at_ends

    def time_of(start: int, end: int) -> float:
        return part(times, times_of_ends, start, end)

    def size_of(start: int, end: int) -> float:
        """Return the bytes of blocks that take no longer than the limit."""
        too_slow = time_of(start, end) > limit
        return math.inf if too_slow else part(sizes, sizes_of_ends, start, end)

    def best(cost: Callable[[int, int], float]) -> tuple[float, list[range]]:
        """Return the least worst cost of a stage, and the blocks of each stage."""

        @cache
        def rest(start: int, parts: int) -> tuple[float, tuple[int, ...]]:
            """Return the worst cost of the blocks from `start` on in `parts` stages, and where
            these end."""
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
