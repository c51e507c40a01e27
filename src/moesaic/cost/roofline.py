"""The roofline of distributed training: how fast a device can be, by the ratio of computing to communication.

He et al., "FasterMoE" (PPoPP 2022), section 3.4. The ratio is taken of totals (errata F4): all computing of a pass over all
communication, on the busiest rank and link. Then throughput under full overlap is P min(1, R), and without any overlap
P R / (R + 1), exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.cost.cluster import check_above_zero
from moesaic.cost.simulate import Simulated


@dataclass(frozen=True, kw_only=True)
class Point:
    """One plan."""

    name: str
    ratio: float
    """R_CC: seconds of computing over seconds of communication; infinite where nothing moves."""
    throughput: float
    """Operations per second and device that it reaches."""

    def share_of_ideal(self, peak: float) -> float:
        """Return the throughput over what full overlap would give."""
        return self.throughput / ideal(peak, self.ratio)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Plans under the two curves of one device rate."""

    peak: float
    """Operations per second of a device that only computes."""
    points: tuple[Point, ...]

    def curves(self, num: int = 129) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ratios over the range of the points, and the throughput of the ideal and the semi-ideal curve there.

        Args:
            num: of ratios.
        """
        finite = [point.ratio for point in self.points if 0 < point.ratio < np.inf]
        low, high = min([0.1, *finite]) / 1.5, max([10.0, *finite]) * 1.5
        ratios = np.geomspace(low, high, num)
        return (
            ratios,
            np.array([ideal(self.peak, r) for r in ratios]),
            np.array([semi_ideal(self.peak, r) for r in ratios]),
        )


def ideal(peak: float, ratio: float) -> float:
    """Return the throughput if all communication that can be hidden is (eq. 5)."""
    return peak * min(1.0, ratio)


def semi_ideal(peak: float, ratio: float) -> float:
    """Return the throughput if nothing is hidden (eq. 6, of totals)."""
    return peak if ratio == float("inf") else peak * ratio / (ratio + 1)


def roofline(peak: float, points: Sequence[Point]) -> Roofline:
    """Return the points under the curves.

    Raises:
        InputError: if the peak is no rate.
    """
    check_above_zero("peak", peak)
    return Roofline(peak=peak, points=tuple(points))


def point_of(name: str, passes: Sequence[Simulated], flops: float) -> Point:
    """Return the point of a plan.

    Args:
        name: of the plan.
        passes: simulated programs of it, forward and backward.
        flops: useful operations of one rank in all of them.
    """
    computing = sum(each.compute_seconds for each in passes)
    moving = sum(each.communication_seconds for each in passes)
    return Point(
        name=name,
        ratio=computing / moving if moving else float("inf"),
        throughput=flops / sum(each.seconds for each in passes),
    )
