"""Sample placement (NetMoE, Liu et al., ICLR 2025): the homes of samples, their costs, and the
policies that choose them.

A sample is one sequence with all its data. Attention never crosses samples, so a whole sample may
be on any rank. `balance/run/relocate.py` moves samples.

Sections 3 and 4 of the paper: let num[i, e] be the copies of sample i for expert e. Moving sample i
after a layer changes the gather of that layer and the scatter of the next, each by the copies whose
expert is on another rank. The model here counts three things that the paper leaves out:

    Each shard of an expert needs every copy.
    The residual travels from the old home to the new one unless it can travel with the experts'
    results. In some programs results return to the old home first; then a move changes only the
    scatter of the next layer.

If a tensor-parallel group shares a sample, the sample's home is the rank that answers for it. Each
rank of the group answers for the same number of samples.

The *home* of a sample is its rank, where it takes one of as many *slots* as every rank has. A
*replica* is a group of ranks that together hold all experts once. A *row* is what travels for one
copy; *intra* are links within a node, *inter* those between nodes. In assignments a *place* is a
rank or a node, and its *room* the number of samples that it takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from moesaic.balance.replication.cost import nodes_of, ranks_by_place
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.rates import Rates

LEAST_GAIN = 0.1
"""The share of the rows between nodes that moves must be predicted to save. Samples that hardly
differ have predicted savings of 6 to 9 % by chance, which vanish once the next layer has routed.
Samples that differ (locality 0.2 in `moesaic trace show`) have 15 % and more (`moesaic_lab/netmoe`,
`moesaic_lab/relocate_train.py`)."""


REST = 15
"""The default number of forward passes without a decision; decisions then cost a sixteenth of
deciding in every pass."""


@dataclass(frozen=True, eq=False)
class Homes:
    """The homes of all samples: every rank has the same number of slots, with one sample in
    each."""

    samples: np.ndarray
    """(ranks, slots) int64: the sample in each slot; each of 0 to ranks * slots - 1 occurs once."""

    def __post_init__(self) -> None:
        expected = np.arange(self.samples.size)
        all_samples = np.sort(self.samples, axis=None)
        if self.samples.ndim != 2 or not np.array_equal(all_samples, expected):
            raise InputError(
                f"a placement must name each of its {self.samples.size} samples once, in (ranks, "
                f"slots): got shape {self.samples.shape}"
            )

    @classmethod
    def start(cls, ranks: int, slots: int) -> Homes:
        """Return the homes before any sample has moved: slot s of rank r holds sample r * slots +
        s."""
        return cls(np.arange(ranks * slots).reshape(ranks, slots))

    @classmethod
    def of_ranks(cls, rank: np.ndarray, ranks: int) -> Homes:
        """Return the homes with each sample on a given rank, and the samples of a rank in ascending
        order.

        Args:
            rank: (samples,) int64, the rank of each sample; each rank occurs equally often.
            ranks: the number of ranks.

        Raises:
            InputError: if the samples are not split evenly.
        """
        counts = np.bincount(rank, minlength=ranks)
        if len(counts) != ranks or (counts != len(rank) // ranks).any():
            raise InputError(
                f"{len(rank)} samples do not split evenly over {ranks} ranks when ranks get "
                f"{counts.min()} to {counts.max()}: give each rank {len(rank) // ranks}"
            )
        return cls(np.argsort(rank, kind="stable").reshape(ranks, -1))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self.samples.shape[0])

    @property
    def slots(self) -> int:
        """The number of samples on each rank."""
        return int(self.samples.shape[1])

    @cached_property
    def place(self) -> np.ndarray:
        """(samples,) int64: the position of each sample, rank * slots + slot."""
        position = np.empty(self.samples.size, dtype=np.int64)
        position[self.samples.reshape(-1)] = np.arange(self.samples.size)
        return position

    @cached_property
    def rank(self) -> np.ndarray:
        """(samples,) int64: the rank of each sample."""
        return self.place // self.slots

    def targets(self, after: Homes) -> tuple[np.ndarray, np.ndarray]:
        """Return the rank and the slot to which the sample in each slot moves, (ranks, slots) int64
        each."""
        place = after.place[self.samples]
        return place // self.slots, place % self.slots

    def moved(self, after: Homes, groups: np.ndarray | None = None) -> int:
        """Return how many samples move to another rank, or to another group of ranks.

        Args:
            groups: (ranks,), the group of each rank, such as its node; None if each rank is a group
                of its own.
        """
        group = np.arange(self.ranks) if groups is None else groups
        return int((group[self.rank] != group[after.rank]).sum())

    def same_as(self, other: Homes) -> bool:
        """Return whether every sample is in the same slot of the same rank."""
        return np.array_equal(self.samples, other.samples)


class Volume(NamedTuple):
    """The rows of one movement to the experts and one back, over all ranks, without rows that stay
    on a rank."""

    intra: int
    """Rows between ranks of one node."""
    inter: int
    """Rows between nodes."""


@dataclass(frozen=True, eq=False)
class SampleLoad:
    """The load from which a sample placer decides, the same on all ranks."""

    grid: Grid
    """The mesh."""
    homes: Homes
    """The present homes of the samples."""
    copies: np.ndarray
    """(samples, num_experts) int64: copies of each sample that this layer sends to each expert."""
    following: np.ndarray | None
    """(samples, num_experts) int64: the predicted copies of the next MoE layer; None after the last
    layer."""
    carried: int | np.ndarray = 0
    """(samples,) int64, or one number: rows per sample that a move sends from the old home to the
    new one. All tokens of the sample if the residual travels separately; the tokens without any
    copy if it travels with the results."""
    is_direct: bool = True
    """Whether this layer's results go directly to the new homes. False: they always return to the
    old homes first."""

    def __post_init__(self) -> None:
        grid = self.grid
        samples = self.homes.samples.size
        if self.homes.ranks != grid.world:
            raise InputError(
                f"a placement over {self.homes.ranks} ranks does not fit a mesh of {grid.world}"
            )
        for name in ("copies", "following"):
            table = getattr(self, name)
            if table is None:
                continue
            if table.ndim != 2 or len(table) != samples or table.shape[1] % grid.ep:
                raise InputError(
                    f"{name} of shape {table.shape} does not fit {samples} samples and "
                    f"mesh.ep={grid.ep}: give (samples, num_experts)"
                )

    @cached_property
    def node(self) -> np.ndarray:
        """(ranks,) int64: the node of each rank."""
        return nodes_of(self.grid)

    @cached_property
    def replicas(self) -> list[np.ndarray]:
        """The ranks of each replica of the experts, ascending. Samples never leave their
        replica."""
        return [np.sort(ranks, axis=None) for ranks in ranks_by_place(self.grid)]

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows that cross links (intra, inter) if a sample's home is a rank, (samples, ranks)
        int64 each.

        The entries of ranks outside the sample's replica of the experts mean nothing, since the
        sample never goes to them.
        """
        # the copies of the layers for which the home counts: this one's results, unless they return
        # to the old homes, and the next one's tokens
        tables = []
        if self.is_direct:
            tables.append(self.copies)
        if self.following is not None:
            tables.append(self.following)
        widths = [table.shape[1] for table in tables]
        no_columns = self.copies[:, :0]  # if no layer counts
        copies = np.concatenate([no_columns, *tables], axis=1)

        # copies of a sample for each expert, times the holders of each expert that a rank reaches
        intra = _exact_product(copies, self._holders(widths, "intra"))
        inter = _exact_product(copies, self._holders(widths, "inter"))

        home = self.homes.rank
        ranks = np.arange(self.grid.world)
        leaves_home = home[:, None] != ranks[None, :]
        leaves_node = self.node[home][:, None] != self.node[None, :]
        carried = np.reshape(self.carried, (-1, 1))  # (samples, 1), or (1, 1) for one number
        intra = intra + carried * (leaves_home & ~leaves_node)
        inter = inter + carried * leaves_node
        return intra, inter

    def volume(self, homes: Homes) -> Volume:
        """Return the rows that cross links if this layer's results, and the next layer's copies,
        use these homes."""
        sample = np.arange(homes.samples.size)
        intra_rows, inter_rows = self.rows
        intra = intra_rows[sample, homes.rank].sum()
        inter = inter_rows[sample, homes.rank].sum()
        return Volume(int(intra), int(inter))

    def seconds(self, homes: Homes, intra: float, inter: float) -> float:
        """Return the modelled seconds of a placement, those of the slower kind of link (NetMoE,
        section 3, equation 1), up to a factor that all placements have in common.

        Args:
            intra: time of a row within a node, in the unit of the result.
            inter: time of a row between nodes.
        """
        rows = self.volume(homes)
        return max(rows.intra * intra, rows.inter * inter)

    def _holders(self, widths: list[int], links: str) -> np.ndarray:
        """Return, for each rank, the number of other ranks with a shard of each expert that it
        reaches over a kind of link.

        Args:
            widths: number of experts of each layer.
            links: "intra" for ranks of the same node, "inter" for ranks of other nodes.

        Returns:
            (experts of all layers, ranks) int64.
        """
        grid = self.grid
        table = np.zeros((sum(widths), grid.world), dtype=np.int64)
        for layer, num_experts in enumerate(widths):
            first_of_layer = sum(widths[:layer])
            per_place = num_experts // grid.ep  # experts of which a holder has shards
            for ranks in self.replicas:
                for holder in ranks:  # counts once for each rank that reaches it over these links
                    first = first_of_layer + grid.coordinate(int(holder), "ep") * per_place
                    is_near = self.node[ranks] == self.node[holder]
                    is_other = ranks != holder
                    reaches_holder = is_near & is_other if links == "intra" else ~is_near
                    table[first : first + per_place, ranks[reaches_holder]] += 1
        return table


def _exact_product(copies: np.ndarray, holders: np.ndarray) -> np.ndarray:
    """Return the matrix product of two int64 tables, in float64, which is many times faster than in
    int64 and exact below 2**53."""
    product = copies.astype(np.float64) @ holders
    rows: np.ndarray = np.rint(product).astype(np.int64)
    return rows


@dataclass(frozen=True, kw_only=True)
class PlacerOptions:
    """The options of a run for its sample placer, which uses those that it needs."""

    rates: Rates = field(default_factory=Rates)
    """Rates of one rank's links."""
    least_gain: float = LEAST_GAIN
    """The share of the cost that moves must save, from 0 to below 1; otherwise no sample moves."""
    rest: int = REST
    """As for `AbstractPlacer.rest`."""


class AbstractPlacer(ABC):
    """The interface of a sample placer, which chooses homes after a layer. Every rank calls it with
    the same load and gets the same result."""

    rest: int = 0
    """How many forward passes may skip the decision, and the exchange for it, after passes in which
    no sample moved. 0: every pass decides."""

    @abstractmethod
    def decide(self, load: SampleLoad) -> Homes:
        """Return the new homes of the samples; each sample stays within its replica of the experts.

        Args:
            load: the load, the same on all ranks.
        """


class Given(AbstractPlacer):
    """A sample placer with a fixed list of homes, used call after call and then from the start, for
    tests and replays.
    """

    def __init__(self, homes: list[Homes]) -> None:
        self._homes = homes
        self._calls = 0

    def decide(self, load: SampleLoad) -> Homes:
        """Return the next homes of the list."""
        homes = self._homes[self._calls % len(self._homes)]
        self._calls += 1
        return homes


SEATS_MOST = 96
"""Up to this many samples, assignments are solved by `by_seats`, above by `by_flow`; both take
about as long at this size."""
WEIGHTS = (0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0)
"""The weights of the links within nodes that `Weighed` tries."""
Solver: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function from costs, (samples, places) int64, and the room of each place to the place of each
sample."""
_UNITS = 2**20
"""The largest cost as an integer. Costs are rounded to integers, so that every rank gets the same
sums."""


class TwoStage(AbstractPlacer):
    """A sample placer that minimises the rows between nodes, and then the rows within each node
    (NetMoE, section 4.3).

    Stage two does not change the rows between nodes. Unlike in the paper, a sample stays at home
    among equal costs (published figures show as many moves as chance would make), a residual that
    travels is counted, and no sample moves if the best placement gains less than a threshold.

    Args:
        least_gain: share of the rows between nodes (within the node, if there is only one) that
            moves must save, from 0 to below 1; otherwise no sample moves.
        rest: passes without a decision after passes in which no sample moved, since a decision
            costs as much if none moves.
        solve: solves an assignment; None for `assign`.

    Raises:
        InputError: if `least_gain` is not a share, or `rest` is negative.
    """

    def __init__(
        self, least_gain: float = LEAST_GAIN, *, rest: int = REST, solve: Solver | None = None
    ) -> None:
        if not 0 <= least_gain < 1:
            raise InputError(f"placement least_gain={least_gain}: choose a share from 0 to below 1")
        if rest < 0:
            raise InputError(f"placement rest={rest}: choose 0 or more passes")
        self.least_gain = least_gain
        self.rest = rest
        self._solve = solve or assign

    def decide(self, load: SampleLoad) -> Homes:
        """Return the homes from the two assignments, or the present homes if these gain too
        little."""
        placement = _by_replica(load, self._placed)
        before = load.volume(load.homes)
        after = load.volume(placement)
        # compares rows between nodes first, those within nodes if these are equal
        if (after.inter, after.intra) >= (before.inter, before.intra):
            return load.homes
        # the share is of rows between nodes, where there are any
        rows_before = before.intra
        rows_saved = before.intra - after.intra
        if before.inter:
            rows_before = before.inter
            rows_saved = before.inter - after.inter
        return placement if rows_saved >= self.least_gain * rows_before else load.homes

    def _placed(self, load: SampleLoad, samples: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Return the rank of each of the `samples`, all those of the replica whose `ranks` are
        given: a node by the rows between nodes, then a rank on it by the others."""
        intra, inter = (table[np.ix_(samples, ranks)] for table in load.rows)
        home = load.homes.rank[samples]
        slots = load.homes.slots

        # stage one: all ranks of a node have the same rows between nodes, so its first one stands
        # for it
        nodes, first, num_ranks = np.unique(load.node[ranks], return_index=True, return_counts=True)
        cost = _with_fewest_moves(inter[:, first], load.node[home], nodes)
        node_of_sample = nodes[self._solve(cost, slots * num_ranks)]

        # stage two, node by node
        rank_of_sample = np.empty(len(samples), dtype=np.int64)
        for node in nodes:
            on_node = np.flatnonzero(node_of_sample == node)
            members = np.flatnonzero(load.node[ranks] == node)
            rows = intra[np.ix_(on_node, members)]
            cost = _with_fewest_moves(rows, home[on_node], ranks[members])
            member = self._solve(cost, np.full(len(members), slots))
            rank_of_sample[on_node] = ranks[members][member]
        return rank_of_sample


def _by_replica(
    load: SampleLoad, placed: Callable[[SampleLoad, np.ndarray, np.ndarray], np.ndarray]
) -> Homes:
    """Return the homes for which `placed` chooses the ranks of samples, separately for each replica
    of the experts."""
    rank = load.homes.rank.copy()
    for ranks in load.replicas:
        samples = np.flatnonzero(np.isin(load.homes.rank, ranks))
        rank[samples] = placed(load, samples, ranks)
    return Homes.of_ranks(rank, load.grid.world)


def _with_fewest_moves(rows: np.ndarray, home: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return costs, (samples, places), that rank placements by rows first and by the number of
    moves second."""
    is_move = home[:, None] != places[None, :]
    # one row outweighs moves of all samples
    cost: np.ndarray = rows * (len(rows) + 1) + is_move
    return cost


class Weighed(TwoStage):
    """This library's sample placer: minimises the modelled time of the slower kind of link.

    `TwoStage` always prefers links within nodes. If these are no faster (shared memory on a CPU, a
    node with many ranks and many network cards), that may cost more than it saves. `Weighed` weighs
    rows of both kinds in one assignment of samples to ranks. The larger of two times is the maximum
    of their weighted means over all weights. Therefore the policy tries a few weights (Lagrange
    multipliers of the two constraints), the placement of `TwoStage` and the present homes, and
    returns the best of these by the model.

    Args:
        rates: those of one rank's links; None for the usual ones.
        least_gain: share of the modelled time that moves must save, from 0 to below 1; otherwise no
            sample moves.
        rest: as for `TwoStage`.

    Raises:
        InputError: if `least_gain` is not a share, or `rest` is negative.
    """

    def __init__(
        self, rates: Rates | None = None, *, least_gain: float = LEAST_GAIN, rest: int = REST
    ) -> None:
        super().__init__(least_gain, rest=rest)
        rates = rates or Rates()
        self.rates = 1 / rates.intra_gbps, 1 / rates.inter_gbps
        """Time of a row within a node, and of a row between nodes, up to a common factor."""

    def decide(self, load: SampleLoad) -> Homes:
        """Return the best placement that was tried, with the fewest moves among equals; the first
        one wins further ties."""
        placements = [
            load.homes,
            TwoStage(least_gain=0.0).decide(load),
            *(self._by(weight, load) for weight in WEIGHTS),
        ]
        seconds = [load.seconds(homes, *self.rates) for homes in placements]
        moves = [load.homes.moved(homes) for homes in placements]
        scores = list(zip(seconds, moves))
        best = scores.index(min(scores))  # the first one of equals
        seconds_now = seconds[0]
        gains_enough = seconds[best] <= (1 - self.least_gain) * seconds_now
        return placements[best] if gains_enough else load.homes

    def _by(self, weight: float, load: SampleLoad) -> Homes:
        """Return the best placement for one weight of the links within nodes, from 0 to 1; those
        between nodes have the rest of 1."""
        intra, inter = load.rows
        intra_time, inter_time = self.rates
        cost = weight * intra_time * intra + (1 - weight) * inter_time * inter
        # as integers up to `_UNITS`
        largest = np.abs(cost).max() or 1.0  # 1 if all costs are 0
        units = np.rint(cost * (_UNITS / largest)).astype(np.int64)

        def placed(load: SampleLoad, samples: np.ndarray, ranks: np.ndarray) -> np.ndarray:
            """Return the rank of each of some samples that are spread evenly over `ranks`."""
            home = load.homes.rank[samples]
            cost = _with_fewest_moves(units[np.ix_(samples, ranks)], home, ranks)
            room = np.full(len(ranks), load.homes.slots)
            return ranks[assign(cost, room)]

        return _by_replica(load, placed)


def assign(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the place of each sample, (samples,) int64, that fills every place at the least summed
    cost.

    NetMoE solves an assignment problem that repeats each node's column for every seat on the node.
    The columns are identical, so with many samples a flow problem on (samples x places) is far
    smaller. Both solutions are exact and deterministic: all ranks get the same result.

    Args:
        cost: (samples, places) int64.
        room: (places,) int64, the number of samples that each place takes; the sum is the number of
            samples.
    """
    assert room.sum() == len(cost), f"{len(cost)} samples for {room.sum()} seats"
    return by_seats(cost, room) if len(cost) <= SEATS_MOST else by_flow(cost, room)


def by_seats(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Solve `assign` with one column for every seat (Kuhn-Munkres)."""
    from scipy.optimize import linear_sum_assignment

    place = np.repeat(np.arange(len(room)), room)
    _, seat = linear_sum_assignment(cost[:, place])
    return place[seat]


def by_flow(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Solve `assign` by flow: every sample goes to its best place, then shortest augmenting paths
    relieve overfull places.

    After each path the assignment is the cheapest one with its numbers of samples per place, so the
    last one is optimal (successive shortest paths; Ahuja, Magnanti and Orlin, "Network Flows"
    (1993), section 9.7). The nodes of a path are places, of which there are few. The length of a
    step is the cost of the cheapest sample to shift from one place to the next.
    """
    place = cost.argmin(1)
    filled = np.bincount(place, minlength=len(room))  # samples at each place
    shifts = _Shifts(cost, place)  # changes `place`
    while (filled > room).any():
        distance, previous = _shortest(shifts.cost, filled > room)
        infinite = np.iinfo(np.int64).max
        target = int(np.where(filled < room, distance, infinite).argmin())
        filled[target] += 1  # all places between the ends of the path stay as full
        # back along the path from the place with room to the overfull one, before which -1 stands
        while previous[target] >= 0:
            source = int(previous[target])
            shifts.shift(source, target)
            target = source
        filled[target] -= 1
    return place


class _Shifts:
    """The table of the cheapest sample to shift from each place to each other place.

    Args:
        cost: (samples, places) int64.
        assigned: (samples,), the place of each sample; `shift` changes it in place.
    """

    def __init__(self, cost: np.ndarray, assigned: np.ndarray) -> None:
        self._costs = cost
        self._assigned = assigned
        places = cost.shape[1]
        self.cost = np.full((places, places), _FAR)
        """(places from, places to) int64: the cost of the cheapest shift."""
        self._sample = np.zeros((places, places), dtype=np.int64)
        """The sample of each cheapest shift."""
        for place in range(places):
            self._update(place)

    def shift(self, source: int, target: int) -> None:
        """Move the cheapest sample from `source` to `target`."""
        self._assigned[self._sample[source, target]] = target
        self._update(source)
        self._update(target)

    def _update(self, place: int) -> None:
        """Find the sample that leaves `place` at the least extra cost, for each other place."""
        members = np.flatnonzero(self._assigned == place)
        if not len(members):  # nobody can leave it
            self.cost[place] = _FAR
            return
        extra = self._costs[members] - self._costs[members, place, None]  # (members, places)
        cheapest = extra.argmin(0)
        self.cost[place] = extra[cheapest, np.arange(len(cheapest))]
        self._sample[place] = members[cheapest]


_FAR = np.int64(2**60)
"""A length above that of any path; twice this length does not overflow."""


def _shortest(cost: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each place's distance from the nearest of the `sources`, (places,) bool, and the place
    before it on the path or -1 (Bellman-Ford)."""
    places = np.arange(len(cost))
    distance = np.where(sources, np.int64(0), _FAR)
    previous = np.full(len(cost), -1)
    for _ in range(len(cost)):
        through = distance[:, None] + cost  # to each place (second axis), through each other one
        best = through.argmin(0)
        lengths = through[best, places]
        is_shorter = lengths < distance
        if not is_shorter.any():
            break
        distance = np.where(is_shorter, lengths, distance)
        previous = np.where(is_shorter, best, previous)
    return distance, previous
