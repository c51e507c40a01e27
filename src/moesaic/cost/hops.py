"""The messages of one hop of an all-to-all, from classes of packets: which packets travel together, how many such messages.

The paths are the algorithms' own (`program/all_to_all/`), asked for one packet of each class. Whether another packet of
the class takes the same leg is asked too, never assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from moesaic.cost.symmetry import Digits, GroupPlaces, Pairs
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import Leg
from moesaic.program.task import Task


@dataclass(frozen=True, eq=False)
class HopPaths:
    """The messages of a hop, whatever their bytes."""

    message: np.ndarray
    """(pairs,) int64, the number of the message that carries the packets of each class of pairs; -1 where none does."""
    ends: np.ndarray
    """(n, 2) int64, source and target of each message."""
    count: np.ndarray
    """(n,) float64, how many such messages there are."""

    def num_bytes(self, of_pairs: np.ndarray) -> np.ndarray:
        """Return the bytes of each message, (n,), from those of each class of pairs."""
        sent = self.message >= 0
        return np.bincount(self.message[sent], of_pairs[sent], len(self.ends))


def hop_paths(task: Task, digits: Digits, group: frozenset[int], pairs: Pairs, classed: frozenset[int]) -> HopPaths:
    """Return the messages of a hop: packets that take one leg together are one.

    Args:
        task: the hop.
        digits: of the mesh.
        group: digits in which the ranks differ among which packets move.
        pairs: the classes of pairs that exchange packets.
        classed: of the group, the digits of which a class says only whether they are equal.
    """
    places, link = GroupPlaces(digits, group), ALL_TO_ALLS[task.link]
    upper = sorted(classed)

    def leg_of(source: int, target: int) -> Leg | None:
        path = link.path(places.of(source), source, target) if source != target else ()
        return next((leg for leg in path if leg.hop == task.hop), None)

    number: dict[tuple[int, int], int] = {}
    count: list[float] = []
    message = np.full(len(pairs.source), -1, dtype=np.int64)
    for pair, (source, target) in enumerate(zip(pairs.source.tolist(), pairs.target.tolist())):
        leg = leg_of(source, target)
        if leg is None:
            continue
        distinct = _distinct(digits, upper, source, target, leg, partial(leg_of, source))
        messages = distinct / _sharers(digits, upper, source, target, leg, partial(_swapped, leg_of, target))
        at = message[pair] = number.setdefault((leg.source, leg.target), len(number))
        if at == len(count):
            count.append(0.0)
        count[at] = max(count[at], messages)
    return HopPaths(message, np.array(list(number), dtype=np.int64).reshape(-1, 2), np.array(count))


def _swapped(function: Callable[[int, int], Leg | None], target: int, source: int) -> Leg | None:
    return function(source, target)


def _distinct(
    digits: Digits, upper: list[int], source: int, target: int, leg: Leg, leg_to: Callable[[int], Leg | None]
) -> int:
    """Return how many messages there are for the targets of a class: the product of the digits that change the leg."""
    count = 1
    for digit in upper:
        stride, base = int(digits.strides[digit]), int(digits.sizes[digit])
        mine, theirs = source // stride % base, target // stride % base
        if mine != theirs and base > 2:
            third = next(value for value in range(base) if value not in (mine, theirs))
            if leg_to(target + (third - theirs) * stride) != leg:
                count *= base - 1
    return count


def _sharers(
    digits: Digits, upper: list[int], source: int, target: int, leg: Leg, leg_from: Callable[[int], Leg | None]
) -> int:
    """Return from how many nodes packets for a target come together in a leg."""
    others = [(0, 1)]
    for digit in upper:
        stride, base = int(digits.strides[digit]), int(digits.sizes[digit])
        mine, theirs = source // stride % base, target // stride % base
        values = {mine: 1, theirs: 1}
        third = next((value for value in range(base) if value not in values), None)
        if third is not None:
            values[third] = base - len(values)
        others = [(moved + (v - mine) * stride, n * count) for moved, n in others for v, count in values.items()]
    return sum(count for moved, count in others if leg_from(source + moved) == leg)
