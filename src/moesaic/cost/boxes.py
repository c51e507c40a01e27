"""`Box`: the pieces that a layout holds on a rank, as digits that are fixed or free (`symmetry.py`).

A piece is an origin and an expert; both are numbers of digits. What two ranks share of two layouts is a product over digits,
but for the steps of a peer schedule, which tie the origin's digits of ep to the expert's: those are counted by differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.cost.symmetry import Digits
from moesaic.program.task import Layout


@dataclass(frozen=True)
class Box:
    """The pieces of a layout on a rank: dimensions of origin and expert, and which of them are free."""

    origin: frozenset[int]
    expert: frozenset[int]
    free_origin: frozenset[int]
    free_expert: frozenset[int]

    @property
    def fixed(self) -> frozenset[int]:
        """The digits on which ranks that hold the same pieces agree."""
        return (self.origin - self.free_origin) | (self.expert - self.free_expert)


def box_of(digits: Digits, layout: Layout) -> Box:
    """Return the pieces that a layout holds."""
    everything = frozenset(range(len(digits.sizes)))
    spread = digits.axes(layout.spread) | (digits.axis("tp") if layout.whole_tp else frozenset())
    origin = {"weights": digits.axis("etp"), "bias": frozenset()}.get(layout.flow, everything)
    expert = {"tokens": frozenset(), "node_tokens": digits.axis("node")}.get(layout.flow, digits.axis("ep"))
    free = {"all": expert, "rank": frozenset(), "node": expert & digits.local}[layout.experts]
    return Box(origin, expert, spread & origin, free)


def steps_of(digits: Digits, layout: Layout) -> frozenset[int]:
    """Return the digits of ep that count the groups of a step; () without steps."""
    if layout.step is None:
        return frozenset()
    at = digits.grid.etp if digits.grid.innermost == "etp" else 1
    size = digits.grid.ep // layout.step[1]
    return digits.axis("ep") & digits.within(at * size, digits.grid.world)


def pieces_of_step(
    digits: Digits,
    ahead: frozenset[int],
    step: tuple[int, int],
    before: Box,
    after: Box,
    s: np.ndarray,
    t: np.ndarray,
) -> np.ndarray:
    """Return for each pair how many (group of the origin, group of the expert's home) its rows have."""
    order = sorted(ahead)
    radix = np.concatenate([[1], np.cumprod(digits.sizes[order])[:-1]]).astype(np.int64)
    possible = np.ones(len(s), dtype=bool)
    bases, offsets = [], []
    for free_before, free_after in (
        (before.free_origin, after.free_origin),
        (before.free_expert, after.free_expert),
    ):
        base, offset = np.zeros(len(s), dtype=np.int64), np.zeros(1, dtype=np.int64)
        for digit, weight in zip(order, radix):
            if digit in free_before and digit in free_after:
                offset = (offset[:, None] + weight * np.arange(digits.sizes[digit])).reshape(-1)
                continue
            base += weight * (t if digit in free_before else s)[:, digit]
            if digit not in free_before and digit not in free_after:
                possible &= s[:, digit] == t[:, digit]
        bases.append(base)
        offsets.append(offset)
    apart = np.bincount(((offsets[1][:, None] - offsets[0]) % step[1]).reshape(-1), minlength=step[1])
    found: np.ndarray = possible * apart[(step[0] - bases[1] + bases[0]) % step[1]]
    return found
