"""Samples to places of limited room at the least cost: the transportation problem, two ways, with one answer.

NetMoE solves an assignment with each node's column repeated for every seat on it. The columns are identical, so with many
samples a flow on (samples x places) is far smaller. Both ways are exact, and deterministic: all ranks get the same answer.
"""

from __future__ import annotations

import numpy as np

SEATS_MOST = 96
"""Up to so many samples the matrix of repeated columns is solved, above the flow; both take about as long there."""


def assign(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the place of each sample, (samples,) int64, filling every place, at the least summed cost.

    Args:
        cost: (samples, places) int64.
        room: (places,) int64: samples that each place takes; as many as there are in all.
    """
    assert room.sum() == len(cost), f"{len(cost)} samples for {room.sum()} seats"
    return by_seats(cost, room) if len(cost) <= SEATS_MOST else by_flow(cost, room)


def by_seats(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """As `assign`: a column for every seat (Kuhn-Munkres)."""
    place = np.repeat(np.arange(len(room)), room)
    from scipy.optimize import linear_sum_assignment

    _, seat = linear_sum_assignment(cost[:, place])
    return place[seat]


def by_flow(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """As `assign`: every sample to its best place, then shortest augmenting paths from full places to free ones.

    After each path the assignment is the cheapest one with its numbers of samples per place, so the last one is optimal
    (successive shortest paths; Ahuja, Magnanti and Orlin, "Network Flows" (1993), section 9.7). A path goes over places, of
    which there are few: each step costs the best sample to shift from one place to another.
    """
    at = cost.argmin(1)
    held = np.bincount(at, minlength=len(room))
    shifts = _Shifts(cost, at)
    while (held > room).any():
        distance, before = _shortest(shifts.cost, held > room)
        target = int(np.where(held < room, distance, np.iinfo(np.int64).max).argmin())
        held[target] += 1
        while before[target] >= 0:
            source = int(before[target])
            shifts.shift(source, target)
            target = source
        held[target] -= 1
    return at


class _Shifts:
    """The cheapest sample to shift from each place to each other one.

    Args:
        cost: (samples, places) int64.
        at: (samples,) the place of each sample; changed by shifts.
    """

    def __init__(self, cost: np.ndarray, at: np.ndarray) -> None:
        self._all, self._at = cost, at
        places = cost.shape[1]
        self.cost = np.full((places, places), _FAR)
        """(from, to) int64: what the cheapest shift costs."""
        self._sample = np.zeros((places, places), dtype=np.int64)
        for place in range(places):
            self._renew(place)

    def shift(self, source: int, target: int) -> None:
        """Shift the cheapest sample from one place to another."""
        self._at[self._sample[source, target]] = target
        self._renew(source)
        self._renew(target)

    def _renew(self, place: int) -> None:
        members = np.flatnonzero(self._at == place)
        if not len(members):
            self.cost[place] = _FAR
            return
        extra = self._all[members] - self._all[members, place, None]
        best = extra.argmin(0)
        self.cost[place] = extra[best, np.arange(len(best))]
        self._sample[place] = members[best]


_FAR = np.int64(2**60)
"""Longer than any path; twice it does not overflow."""


def _shortest(cost: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distance of each place from the nearest source and the place before it, -1 at a source (Bellman-Ford)."""
    places = np.arange(len(cost))
    distance = np.where(sources, np.int64(0), _FAR)
    before = np.full(len(cost), -1)
    for _ in range(len(cost)):
        through = distance[:, None] + cost
        best = through.argmin(0)
        found = through[best, places]
        shorter = found < distance
        if not shorter.any():
            break
        distance, before = np.where(shorter, found, distance), np.where(shorter, best, before)
    return distance, before
