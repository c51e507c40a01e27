"""Where samples live (NetMoE, Liu et al., ICLR 2025): homes, what they cost, and the policies that choose them.

A sample is one sequence with everything that belongs to it. Attention never looks across samples, so a sample may be
anywhere, whole; what moves it stands elsewhere (`runtime/balance/relocate.py`).

Sections 3 and 4: with num[i, e] copies of sample i bound for expert e, moving sample i after a layer changes the gather of that
layer and the scatter of the next, each by the copies whose expert is elsewhere. Three things are counted that the paper leaves
out: shards of an expert (each wants every copy), the residual that goes from the old home to the new one where it cannot ride
along with the experts' results, and programs whose results come back to the old home first, so that a move changes the scatter
of the next layer alone.

Where a tensor group works on a sample together, the sample has the home of the rank that answers for it: each rank for as
many of its group's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from moesaic.balance.replication.cost import nodes_of, ranks_by_place
from moesaic.cost.cluster import Machine
from moesaic.errors import InputError
from moesaic.program.grid import Grid

LEAST_GAIN = 0.1
"""Share of the rows between nodes that moves must promise to save. Samples that hardly differ promise 6 to 9 % by chance, of
which nothing is left once the next layer has routed; those that do (locality 0.2 as `moesaic trace show` has it) promise 15 %
and more (`moesaic_lab/netmoe`, `moesaic_lab/relocate_train.py`)."""


REST = 15
"""Forward passes: with one asked after as many, deciding costs a sixteenth of what it does in every pass."""


@dataclass(frozen=True, eq=False)
class Homes:
    """Every rank has equally many samples, in slots."""

    samples: np.ndarray
    """(ranks, slots) int64: which sample is in each slot; each of 0 to ranks * slots - 1 stands once."""

    def __post_init__(self) -> None:
        wanted = np.arange(self.samples.size)
        if self.samples.ndim != 2 or not np.array_equal(np.sort(self.samples, axis=None), wanted):
            raise InputError(
                f"a placement must name each of its {self.samples.size} samples once, in (ranks, slots): "
                f"got shape {self.samples.shape}"
            )

    @classmethod
    def start(cls, ranks: int, slots: int) -> Homes:
        """Return where samples are before any has moved: sample rank * slots + slot."""
        return cls(np.arange(ranks * slots).reshape(ranks, slots))

    @classmethod
    def of_ranks(cls, rank: np.ndarray, ranks: int) -> Homes:
        """Return the homes in which each sample is on a given rank, samples of a rank in ascending order.

        Args:
            rank: (samples,) int64, each rank equally often.
            ranks: how many there are.

        Raises:
            InputError: if the samples are not split evenly.
        """
        counts = np.bincount(rank, minlength=ranks)
        if len(counts) != ranks or (counts != len(rank) // ranks).any():
            raise InputError(
                f"{len(rank)} samples do not split evenly over {ranks} ranks when ranks get {counts.min()} to "
                f"{counts.max()}: give each rank {len(rank) // ranks}"
            )
        return cls(np.argsort(rank, kind="stable").reshape(ranks, -1))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return int(self.samples.shape[0])

    @property
    def slots(self) -> int:
        """Samples that each rank has."""
        return int(self.samples.shape[1])

    @cached_property
    def place(self) -> np.ndarray:
        """Where each sample is, (samples,) int64: rank * slots + slot."""
        found = np.empty(self.samples.size, dtype=np.int64)
        found[self.samples.reshape(-1)] = np.arange(self.samples.size)
        return found

    @cached_property
    def rank(self) -> np.ndarray:
        """The rank that each sample is on, (samples,) int64."""
        return self.place // self.slots

    def targets(self, after: Homes) -> tuple[np.ndarray, np.ndarray]:
        """Return where the sample in each slot goes: the rank and the slot there, (ranks, slots) int64 each."""
        place = after.place[self.samples]
        return place // self.slots, place % self.slots

    def moved(self, after: Homes, groups: np.ndarray | None = None) -> int:
        """Return how many samples go to another rank, or to another group of ranks.

        Args:
            after: where they go.
            groups: (ranks,) the group of each rank, such as its node; None for each rank its own.
        """
        of = np.arange(self.ranks) if groups is None else groups
        return int((of[self.rank] != of[after.rank]).sum())

    def same_as(self, other: Homes) -> bool:
        """Whether every sample is in the same slot."""
        return np.array_equal(self.samples, other.samples)


class Volume(NamedTuple):
    """Rows of one movement out and one back, over all ranks; rows that stay on a rank count nowhere."""

    intra: int
    """Between ranks of one node."""
    inter: int
    """Between nodes."""


@dataclass(frozen=True, eq=False)
class SampleLoad:
    """What a placer decides from, the same on all ranks."""

    grid: Grid
    """The mesh."""
    homes: Homes
    """Where the samples are."""
    copies: np.ndarray
    """(samples, num_experts) int64: copies of each sample that this layer sends to each expert."""
    following: np.ndarray | None
    """The same of the next MoE layer, predicted; None after the last."""
    carried: int | np.ndarray = 0
    """Rows per sample, (samples,) int64 or one number, that a move sends from the old home to the new one: the sample's tokens
    where the residual travels on its own; where it rides along, those tokens that have no copy."""
    is_direct: bool = True
    """This layer's results go straight to the new homes; False: home first, whatever is decided."""

    def __post_init__(self) -> None:
        grid, samples = self.grid, self.homes.samples.size
        if self.homes.ranks != grid.world:
            raise InputError(f"a placement over {self.homes.ranks} ranks does not fit a mesh of {grid.world}")
        for name in ("copies", "following"):
            table = getattr(self, name)
            if table is not None and (table.ndim != 2 or len(table) != samples or table.shape[1] % grid.ep):
                raise InputError(
                    f"{name} of shape {table.shape} does not fit {samples} samples and mesh.ep={grid.ep}: give "
                    "(samples, num_experts)"
                )

    @cached_property
    def node(self) -> np.ndarray:
        """The node of each rank, (ranks,) int64."""
        return nodes_of(self.grid)

    @cached_property
    def replicas(self) -> list[np.ndarray]:
        """The ranks of each copy of the experts, ascending: samples never leave theirs."""
        return [np.sort(ranks, axis=None) for ranks in ranks_by_place(self.grid)]

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that cross links (intra, inter) if a sample lives on a rank, (samples, ranks) int64 each.

        A rank outside the sample's copy of the experts has meaningless entries: no sample goes there.
        """
        counted = [table for table in (self.copies if self.is_direct else None, self.following) if table is not None]
        total = np.concatenate([self.copies[:, :0], *counted], axis=1)
        holders = [self._holders([table.shape[1] for table in counted], links) for links in ("intra", "inter")]
        # Whole numbers in float64: exact below 2**53, and a product of those is many times faster than of int64.
        inside, across = (np.rint(total.astype(np.float64) @ table).astype(np.int64) for table in holders)
        now, ranks = self.homes.rank, np.arange(self.grid.world)
        leaves = now[:, None] != ranks[None, :]
        far = self.node[now][:, None] != self.node[None, :]
        carried = np.reshape(self.carried, (-1, 1))
        return inside + carried * (leaves & ~far), across + carried * far

    def volume(self, homes: Homes) -> Volume:
        """Return the rows that cross links when this layer's results, and the next layer's copies, use these homes."""
        every = np.arange(homes.samples.size)
        intra, inter = (table[every, homes.rank].sum() for table in self.rows)
        return Volume(int(intra), int(inter))

    def seconds(self, homes: Homes, intra: float, inter: float) -> float:
        """Return the modelled time of a placement: the slower kind of link (NetMoE, section 3, equation 1).

        Args:
            homes: the placement.
            intra: seconds per row within a node, over all of them.
            inter: seconds per row between nodes.
        """
        rows = self.volume(homes)
        return max(rows.intra * intra, rows.inter * inter)

    def _holders(self, widths: list[int], links: str) -> np.ndarray:
        """Return on how many other ranks a shard of each expert of some layers lives, seen from each rank.

        Args:
            widths: experts of each layer.
            links: "intra" or "inter".

        Returns:
            (experts of all layers, ranks) int64.
        """
        grid = self.grid
        table = np.zeros((sum(widths), grid.world), dtype=np.int64)
        for layer, num_experts in enumerate(widths):
            each = num_experts // grid.ep
            for ranks in self.replicas:
                for holder in ranks:
                    first = sum(widths[:layer]) + grid.coordinate(int(holder), "ep") * each
                    near = self.node[ranks] == self.node[holder]
                    seen = ranks[near & (ranks != holder)] if links == "intra" else ranks[~near]
                    table[first : first + each, seen] += 1
        return table


def check(least_gain: float, rest: int) -> None:
    """Raise InputError for what is no share, or no number of passes."""
    if not 0 <= least_gain < 1:
        raise InputError(f"placement least_gain={least_gain}: choose a share from 0 to below 1")
    if rest < 0:
        raise InputError(f"placement rest={rest}: choose 0 or more passes")


@dataclass(frozen=True, kw_only=True)
class PlacerOptions:
    """What a run tells the policy that it names; a policy takes what it needs of it."""

    machine: Machine = field(default_factory=Machine)
    """Rates of one rank's links."""
    least_gain: float = LEAST_GAIN
    """Share of what moves are to save that they must save, else nobody moves; from 0 to below 1."""
    rest: int = REST
    """As `AbstractPlacer.rest`."""


class AbstractPlacer(ABC):
    """A policy: where samples live after a layer. Every rank calls it with the same load and gets the same answer."""

    rest: int = 0
    """After forward passes in which it moved nobody, so many may go by in which it is not asked, and nothing is told for it;
    0: it is asked in every pass."""

    @abstractmethod
    def decide(self, load: SampleLoad) -> Homes:
        """Return where the samples go; each stays within its copy of the experts.

        Args:
            load: the same on all ranks.
        """


class Stay(AbstractPlacer):
    """Nobody moves."""

    def decide(self, load: SampleLoad) -> Homes:
        """Return the homes as they are."""
        return load.homes


class Given(AbstractPlacer):
    """Goes where it is told, call after call, and then starts over: for tests and replays.

    Args:
        homes: one per call.
    """

    def __init__(self, homes: list[Homes]) -> None:
        self._homes, self._calls = homes, 0

    def decide(self, load: SampleLoad) -> Homes:
        """Return the next homes."""
        found = self._homes[self._calls % len(self._homes)]
        self._calls += 1
        return found


SEATS_MOST = 96
"""Up to so many samples the matrix of repeated columns is solved, above the flow; both take about as long there."""
WEIGHTS = (0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0)
"""Of the links within nodes, that are tried."""
Solver: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From costs, (samples, places) int64, and the room of each place to the place of each sample."""
_UNITS = 2**20
"""Costs are whole numbers, so that every rank adds up the same: of this many parts of the largest one."""


class TwoStage(AbstractPlacer):
    """The least rows between nodes, then the least within each (NetMoE, section 4.3). Stage two leaves what crosses nodes.

    Ours beside the paper: among equal costs a sample stays where it is (published figures show as many moves as chance would
    make), a residual that travels counts, and where the best placement gains less than a threshold nobody moves.

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
        found = _by_replica(load, self._placed)
        before, after = load.volume(load.homes), load.volume(found)
        if (after.inter, after.intra) >= (before.inter, before.intra):
            return load.homes
        now, then = (before.inter, after.inter) if before.inter else (before.intra, after.intra)
        return found if now - then >= self.least_gain * now else load.homes

    def _placed(self, load: SampleLoad, samples: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        intra, inter = (table[np.ix_(samples, ranks)] for table in load.rows)
        now, slots = load.homes.rank[samples], load.homes.slots
        nodes, first, num_ranks = np.unique(load.node[ranks], return_index=True, return_counts=True)
        node = nodes[self._solve(_first(inter[:, first], load.node[now], nodes), slots * num_ranks)]
        found = np.empty(len(samples), dtype=np.int64)
        for each in nodes:
            here, members = np.flatnonzero(node == each), np.flatnonzero(load.node[ranks] == each)
            cost = _first(intra[np.ix_(here, members)], now[here], ranks[members])
            found[here] = ranks[members][self._solve(cost, np.full(len(members), slots))]
        return found


def _by_replica(load: SampleLoad, placed: Callable[[SampleLoad, np.ndarray, np.ndarray], np.ndarray]) -> Homes:
    """Return homes that are found for the samples of each replica of the experts, by its ranks, apart."""
    rank = load.homes.rank.copy()
    for ranks in load.replicas:
        samples = np.flatnonzero(np.isin(load.homes.rank, ranks))
        rank[samples] = placed(load, samples, ranks)
    return Homes.of_ranks(rank, load.grid.world)


def _first(rows: np.ndarray, now: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return costs, (samples, places), in which rows come first, and fewer moves decide between equal ones."""
    found: np.ndarray = rows * (len(rows) + 1) + (now[:, None] != places[None, :])
    return found


class Weighed(AbstractPlacer):
    """The placement whose slower kind of link is done first, by the model. Ours.

    Two stages always prefer links within nodes. Where these are no faster (shared memory on a CPU, a node with many ranks and
    many network cards) that may cost more than it saves. This weighs rows of both kinds in one assignment of samples to ranks.
    The slower of two times is the largest of their weighted means, so a few weights are tried (Lagrange multipliers of the two
    constraints) and the best placement by the model is taken, the two stages' and nobody's move among them.

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

        def placed(load: SampleLoad, samples: np.ndarray, ranks: np.ndarray) -> np.ndarray:
            weighed = _first(units[np.ix_(samples, ranks)], load.homes.rank[samples], ranks)
            return ranks[assign(weighed, np.full(len(ranks), load.homes.slots))]

        return _by_replica(load, placed)


def assign(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the place of each sample, (samples,) int64, filling every place, at the least summed cost.

    NetMoE solves an assignment with each node's column repeated for every seat on it. The columns are identical, so with many
    samples a flow on (samples x places) is far smaller. Both ways are exact, and deterministic: all ranks get the same answer.

    Args:
        cost: (samples, places) int64.
        room: (places,) int64: samples that each place takes; as many as there are in all.
    """
    assert room.sum() == len(cost), f"{len(cost)} samples for {room.sum()} seats"
    return by_seats(cost, room) if len(cost) <= SEATS_MOST else by_flow(cost, room)


def by_seats(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """As `assign`: a column for every seat (Kuhn-Munkres)."""
    from scipy.optimize import linear_sum_assignment

    place = np.repeat(np.arange(len(room)), room)
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
