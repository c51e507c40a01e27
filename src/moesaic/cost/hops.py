"""The messages of one hop of an all-to-all, from classes of packets: which packets travel together, how many such messages.

The paths are the algorithms' own (`program/all_to_all/`), asked for one packet of each class. Whether another packet of
the class takes the same leg is asked too, never assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from moesaic.cost.symmetry import Digits, GroupPlaces, Pairs
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import Leg
from moesaic.program.task import Task


def hop_messages(
    task: Task,
    digits: Digits,
    group: frozenset[int],
    pairs: Pairs,
    num_bytes: np.ndarray,
    classed: frozenset[int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return source, target, bytes and number of the messages of a hop: packets that take one leg together are one."""
    places, link = GroupPlaces(digits, group), ALL_TO_ALLS[task.link]
    upper = sorted(classed)

    def leg_of(source: int, target: int) -> Leg | None:
        path = link.path(places.of(source), source, target) if source != target else ()
        return next((leg for leg in path if leg.hop == task.hop), None)

    joined: dict[tuple[int, int], list[float]] = {}
    for source, target, size in zip(pairs.source.tolist(), pairs.target.tolist(), num_bytes.tolist()):
        leg = leg_of(source, target)
        if leg is None:
            continue
        distinct = _distinct(digits, upper, source, target, leg, partial(leg_of, source))
        messages = distinct / _sharers(digits, upper, source, target, leg, partial(_swapped, leg_of, target))
        entry = joined.setdefault((leg.source, leg.target), [0.0, 0.0])
        entry[0] += size
        entry[1] = max(entry[1], messages)
    ends = np.array(list(joined), dtype=np.int64).reshape(-1, 2)
    amounts = np.array(list(joined.values())).reshape(-1, 2)
    return ends[:, 0], ends[:, 1], amounts[:, 0], amounts[:, 1]


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
