"""Where samples go: in two stages, nodes first, then ranks within each (NetMoE, Liu et al., ICLR 2025, section 4.3), and by the
slower kind of link, ours.

Stage two leaves what crosses nodes as it is. Ours beside the paper: among equal costs a sample stays where it is (published
figures show as many moves as chance would make), a residual that travels counts, and where the best placement gains less
than a threshold nobody moves.

Two stages always prefer links within nodes. Where these are no faster (shared memory on a CPU, a node with many ranks and
many network cards) that may cost more than it saves. `Weighed` weighs rows of both kinds in one assignment of samples to
ranks. The slower of two times is the largest of their weighted means, so a few weights are tried (Lagrange multipliers of
the two constraints) and the best placement by the model is taken, the two stages' and nobody's move among them.

Each stage is a transportation problem: samples to places of limited room at the least cost. NetMoE solves an assignment with
each node's column repeated for every seat on it. The columns are identical, so with many samples a flow on (samples x places)
is far smaller. Both ways are exact, and deterministic: all ranks get the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from moesaic.balance.samples.placer import LEAST_GAIN, REST, AbstractPlacer, Homes, SampleLoad, check
from moesaic.cost.alpha_beta import Machine

SEATS_MOST = 96
"""Up to so many samples the matrix of repeated columns is solved, above the flow; both take about as long there."""
WEIGHTS = (0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0)
"""Of the links within nodes, that are tried."""
Solver: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From costs, (samples, places) int64, and the room of each place to the place of each sample."""
_UNITS = 2**20
"""Costs are whole numbers, so that every rank adds up the same: of this many parts of the largest one."""


class TwoStage(AbstractPlacer):
    """The least rows between nodes, then the least within each.

    Args:
        least_gain: share of the rows between nodes (within them, where there is one node) that a move must save, else
            nobody moves; from 0 to below 1.
        rest: passes in which it is not asked after some in which nobody moved: to decide costs as much where nobody does.
        solve: what solves an assignment; as `assign`, which is the default.

    Raises:
        InputError: for what is no share.
    """

    def __init__(self, least_gain: float = LEAST_GAIN, *, rest: int = REST, solve: Solver | None = None) -> None:
        check(least_gain, rest)
        self.least_gain, self.rest, self._solve = least_gain, rest, solve or assign

    def decide(self, load: SampleLoad) -> Homes:
        """Return the homes of the two assignments, or the present ones if they gain too little."""
        rank = load.homes.rank.copy()
        for ranks in load.replicas:
            samples = np.flatnonzero(np.isin(rank, ranks))
            rank[samples] = _placed(load, samples, ranks, self._solve)
        found = Homes.of_ranks(rank, load.grid.world)
        before, after = load.volume(load.homes), load.volume(found)
        if (after.inter, after.intra) >= (before.inter, before.intra):
            return load.homes
        saved, of = (
            (before.inter - after.inter, before.inter) if before.inter else (before.intra - after.intra, before.intra)
        )
        return found if saved >= self.least_gain * of else load.homes


def _placed(load: SampleLoad, samples: np.ndarray, ranks: np.ndarray, solve: Solver) -> np.ndarray:
    """Return the rank of each of a replica's samples, (samples,) int64."""
    intra, inter = (table[np.ix_(samples, ranks)] for table in load.rows)
    now, slots = load.homes.rank[samples], load.homes.slots
    nodes, first = np.unique(load.node[ranks], return_index=True)
    room = np.array([slots * (load.node[ranks] == node).sum() for node in nodes])
    stays = load.node[now][:, None] == nodes[None, :]
    node = nodes[solve(_weighed(inter[:, first], stays), room)]
    found = np.empty(len(samples), dtype=np.int64)
    for each in nodes:
        here, members = np.flatnonzero(node == each), load.node[ranks] == each
        stays = now[here][:, None] == ranks[members][None, :]
        cost = _weighed(intra[np.ix_(here, members)], stays)
        found[here] = ranks[members][solve(cost, np.full(int(members.sum()), slots))]
    return found


def _weighed(rows: np.ndarray, stays: np.ndarray) -> np.ndarray:
    """Return costs in which rows come first, and fewer moves decide between equal ones."""
    weighed: np.ndarray = rows * (len(rows) + 1) + ~stays
    return weighed


class Weighed(AbstractPlacer):
    """The placement whose slower kind of link is done first, by the model.

    Args:
        machine: rates of one rank's links; None for those of `cost.Machine`.
        least_gain: share of the modelled time that a move must save, else nobody moves; from 0 to below 1.
        rest: as of `TwoStage`.

    Raises:
        InputError: for what is no share.
    """

    def __init__(self, machine: Machine | None = None, *, least_gain: float = LEAST_GAIN, rest: int = REST) -> None:
        check(least_gain, rest)
        self.least_gain, self.rest = least_gain, rest
        machine = machine or Machine()
        self.rates = 1 / machine.intra_gbps, 1 / machine.inter_gbps
        """Of a row within a node and between nodes, up to a common factor."""

    def decide(self, load: SampleLoad) -> Homes:
        """Return the best of what was tried; the fewest moves among equals, as tried last."""
        tried = [load.homes, TwoStage(least_gain=0.0).decide(load), *(self._by(weight, load) for weight in WEIGHTS)]
        timed = [(load.seconds(homes, *self.rates), load.homes.moved(homes)) for homes in tried]
        best = min(range(len(tried)), key=timed.__getitem__)
        gains = timed[best][0] <= (1 - self.least_gain) * timed[0][0]
        return tried[best] if gains else load.homes

    def _by(self, weight: float, load: SampleLoad) -> Homes:
        """Return the best placement for one weight of the links within nodes."""
        intra, inter = load.rows
        cost = weight * self.rates[0] * intra + (1 - weight) * self.rates[1] * inter
        units = np.rint(cost * (_UNITS / (np.abs(cost).max() or 1.0))).astype(np.int64)
        rank = load.homes.rank.copy()
        for ranks in load.replicas:
            samples = np.flatnonzero(np.isin(load.homes.rank, ranks))
            stays = load.homes.rank[samples][:, None] == ranks[None, :]
            weighed = units[np.ix_(samples, ranks)] * (len(samples) + 1) + ~stays
            rank[samples] = ranks[assign(weighed, np.full(len(ranks), load.homes.slots))]
        return Homes.of_ranks(rank, load.grid.world)


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
