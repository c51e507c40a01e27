"""Which rank, or which link between ranks, holds a run up: read from the times that ranks write into the metrics.

A line holds for each rank, since the line before: `seconds` of training steps, `compute` seconds that its programs worked, and
`waited`, seconds that they waited for each other rank's messages. Who works longer than the others is slow. Who does not, but
is waited for by all, comes late from elsewhere. Whom one rank alone waits for stands behind a slow link.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

LINES = 20
"""Lines of metrics that count, the last ones."""
SLOWER, WAITS, APART = 1.2, 0.1, 3.0
"""A rank is slow from so many times what ranks usually compute. A wait counts from this share of the steps. A link is slow from
so many times what others wait."""


def stragglers(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return a phrase for each slow rank and each slow link.

    Args:
        lines: of a run's training metrics.
    """
    found = [line["ranks"] for line in lines if _is_sound(line.get("ranks"))]
    found = [each for each in found if len(each["compute"]) == len(found[-1]["compute"])][-LINES:]
    if not found or len(found[0]["compute"]) < 2:
        return []
    seconds, compute, waited = (np.sum([each[name] for each in found], 0) for name in ("seconds", "compute", "waited"))
    return _of(float(np.mean(seconds)), compute, waited)


def _of(seconds: float, compute: np.ndarray, waited: np.ndarray) -> list[str]:
    world, said = len(compute), []
    slow: set[int] = set()
    for rank in range(world):
        usual = median(np.delete(compute, rank))
        if compute[rank] > SLOWER * usual and compute[rank] - usual > WAITS / 2 * seconds:
            slow.add(rank)
            said.append(
                f"rank {rank} is slow: its programs work {compute[rank] / usual:.1f} times as long as those of other ranks, by "
                "more tokens of its experts or by a slower processor"
            )
    for late in range(world):
        of_others = [waited[rank, late] for rank in range(world) if rank != late]
        if late not in slow and world > 2 and min(of_others) > WAITS * seconds:
            slow.add(late)
            said.append(
                f"rank {late} comes late: all others wait for it for {min(of_others) / seconds:.0%} of the steps, though its "
                "programs work no longer than theirs"
            )
    for rank in range(world):
        for peer in range(world):
            other = [waited[a, b] for a in range(world) for b in range(world) if a != b and {a, b} != {rank, peer}]
            usual = median(other) if other else 0.0
            is_slow = waited[rank, peer] > max(WAITS * seconds, APART * usual)
            if rank != peer and not {rank, peer} & slow and is_slow and waited[rank, peer] >= waited[peer, rank]:
                said.append(
                    f"the link from rank {peer} to rank {rank} is slow: rank {rank} waits for its messages for "
                    f"{waited[rank, peer] / seconds:.0%} of the steps"
                )
    return said


def _is_sound(ranks: Any) -> bool:
    """Whether what stands in a line are times of as many ranks each."""
    try:
        shapes = [np.asarray(ranks[name], dtype=float).shape for name in ("seconds", "compute", "waited")]
    except (KeyError, TypeError, ValueError):
        return False
    return len(shapes[0]) == 1 and shapes[1] == shapes[0] and shapes[2] == shapes[0] * 2
