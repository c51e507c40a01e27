"""The roofline of distributed training: how fast a device can be, by the ratio of computing to communication.

He et al., "FasterMoE" (PPoPP 2022), section 3.4. The ratio is taken of totals (errata F4): all computing of a pass over all
communication, on the busiest rank and link. Then throughput under full overlap is P min(1, R), and without any overlap
P R / (R + 1), exactly.
"""

from __future__ import annotations


def ideal(peak: float, ratio: float) -> float:
    """Return the throughput if all communication that can be hidden is (eq. 5)."""
    return peak * min(1.0, ratio)


def semi_ideal(peak: float, ratio: float) -> float:
    """Return the throughput if nothing is hidden (eq. 6, of totals)."""
    return peak if ratio == float("inf") else peak * ratio / (ratio + 1)
