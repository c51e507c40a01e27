"""Where experts go, ours: SmartMoE's greedy as a start, and ways of swaps that lower the busiest place, then the rows between
nodes. What is gained until the next decision must pay for the move.

Partition into parts of equal size at the least largest sum is NP-hard. Swaps of two experts end in a local optimum, to be
measured by the optimum in `moesaic_lab/exact_placements.py`. All loads come with a leading axis of copies of the experts, which
all have one placement.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.experts.placer import AbstractExpertPlacer, ExpertLoad, ExpertRates, ExpertSeconds
from moesaic.balance.experts.smartmoe import spread_by_load

SLACK = 1e-9
"""Relative differences of load up to this are rounding, and no gain."""
SWAPS_MOST = 64
"""Swaps that one way has at most to save rows between nodes; each looks at all pairs of experts."""


class Balanced(AbstractExpertPlacer):
    """Ours: the least busiest place, then the fewest rows between nodes, as far as the way there pays for itself.

    Besides the best order it looks at each step of a way to it by swaps of two experts, which moves little at first.

    Args:
        rates: of rows; None for those of `cost.Machine`.
    """

    def __init__(self, rates: ExpertRates | None = None) -> None:
        self.rates = rates or ExpertRates()

    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the order of the least modelled time until the next decision, its move included."""
        seconds = ExpertSeconds(load, self.rates)
        way = least_busiest(load.weight, load.place, load.slowness)
        way += fewest_between_nodes(load.weight, load.crossing, way[-1], load.slowness)
        return load.order_at(min([*way, self.best(load)], key=seconds.in_all))  # the first is to stay: it wins ties

    def best(self, load: ExpertLoad) -> np.ndarray:
        """Return the place of each expert, (num_experts,) int64, if moving cost nothing."""
        slowness = load.slowness
        starts = (load.place, spread_by_load(load.weight, slowness))
        ends = [least_busiest(load.weight, start, slowness)[-1] for start in starts]
        found = [fewest_between_nodes(load.weight, load.crossing, end, slowness, stay=load.place)[-1] for end in ends]
        return min(found, key=lambda place: (load.busiest(place), load.between_nodes(place)))


def least_busiest(weight: np.ndarray, start: np.ndarray, slowness: np.ndarray) -> list[np.ndarray]:
    """Return a way of swaps from a placement to one whose busiest place no swap makes less busy; `start` comes first.

    Each swap is the one of an expert of the busiest place, which takes longest, with any other that leaves the fuller of the
    two places least full, so the sorted loads fall and the way ends.

    Args:
        weight: (copies, num_experts) rows of each expert.
        start: (num_experts,) the place of each expert.
        slowness: (copies, ep) time of a row at each place.
    """
    way = [start]
    while len(way) <= 4 * len(start):
        place = way[-1]
        load = _loads(weight, place, slowness.shape[1])
        times = load * slowness
        _, busiest = np.unravel_index(times.argmax(), times.shape)
        here, there = np.flatnonzero(place == busiest), np.flatnonzero(place != busiest)
        if not len(there):
            break
        more = weight[:, None, there] - weight[:, here, None]
        mine = (load[:, busiest, None, None] + more) * slowness[:, busiest, None, None]
        theirs = (load[:, place[there]][:, None, :] - more) * slowness[:, place[there]][:, None, :]
        after = np.maximum(mine, theirs).max(0)
        one, other = np.unravel_index(after.argmin(), after.shape)
        if not after[one, other] < times.max() * (1 - SLACK):
            break
        way.append(_swapped(place, int(here[one]), int(there[other])))
    return way


def fewest_between_nodes(
    weight: np.ndarray, crossing: np.ndarray, start: np.ndarray, slowness: np.ndarray, stay: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return a way to fewer rows between nodes that leaves the busiest place as busy as it is; its end comes last.

    Args:
        weight: (copies, num_experts) rows of each expert.
        crossing: (num_experts, ep) rows between nodes if an expert were at a place.
        start: (num_experts,) the place of each expert.
        slowness: (copies, ep) time of a row at each place.
        stay: (num_experts,) where experts are now: first of all, what is together at a place goes to the best place for it,
            and where several are as good to that from which most of it comes. None to leave out this step, which only places
            that are alike allow.
    """
    ep = crossing.shape[1]
    alike = bool((slowness == slowness[:, :1]).all())
    place = _labelled(crossing, start, stay) if stay is not None and alike else start
    way = [place]
    most = (_loads(weight, place, ep) * slowness).max() * (1 + SLACK)
    everyone = np.arange(len(place))
    while len(way) <= SWAPS_MOST:
        place = way[-1]
        load = _loads(weight, place, ep)[:, place]
        after = (load[:, :, None] - weight[:, :, None] + weight[:, None, :]) * slowness[:, place][:, :, None]
        fits = after <= most
        possible = fits.all(0) & fits.all(0).T & (place[:, None] != place[None, :])
        cost = crossing[:, place] - crossing[everyone, place][:, None]
        saved = np.where(possible, -(cost + cost.T), -np.inf)
        one, other = np.unravel_index(saved.argmax(), saved.shape)
        if not saved[one, other] > SLACK * crossing.sum():
            break
        way.append(_swapped(place, int(one), int(other)))
    return way


def _labelled(crossing: np.ndarray, start: np.ndarray, stay: np.ndarray) -> np.ndarray:
    """Return a placement with the same experts together, at the places where that costs least."""
    ep = crossing.shape[1]
    rows, kept = np.zeros((ep, ep)), np.zeros((ep, ep))
    np.add.at(rows, start, crossing)
    np.add.at(kept, (start, stay), 1)
    from scipy.optimize import linear_sum_assignment

    _, place = linear_sum_assignment(rows - kept * (SLACK * max(crossing.sum(), 1.0)))
    found: np.ndarray = place[start]
    return found


def _loads(weight: np.ndarray, place: np.ndarray, ep: int) -> np.ndarray:
    """Return (copies, ep) rows at each place."""
    return np.stack([np.bincount(place, weights=rows, minlength=ep) for rows in weight])


def _swapped(place: np.ndarray, one: int, other: int) -> np.ndarray:
    found = place.copy()
    found[one], found[other] = place[other], place[one]
    return found
