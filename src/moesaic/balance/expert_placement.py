"""Expert placement: permutations of a layer's experts over the places of ep, decided from the load
of recent steps.

SmartMoE (Zhai et al., USENIX ATC 2023) permutes experts every few steps and ignores the cost of
moves (`SmartMoE`). Here a move transfers the expert's weights, master copies and optimizer moments,
about seven times the bytes of replicating the expert once. A move must therefore pay within the
steps until the next decision (`Balanced`). Every place keeps the same number of experts. Loads have
a leading axis of edp, the replicas of the experts, which all have the same placement.

A *place* is a coordinate of ep, and a *placement* the place of each expert, (num_experts,) int64. A
*copy* is a token for one of its experts; a *shard* is the part of an expert that one rank of etp
has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.balance.replication.cost import nodes_of, ranks_by_place, seconds_per_byte, slowness_of
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.rates import Rates
from moesaic.runtime.call_counts import check_order

SLACK = 1e-9
"""Relative differences of load up to this are rounding errors, and no gain."""
SWAPS_MOST = 64
"""Most swaps of one search for fewer rows between nodes; each swap compares all pairs of
experts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertLoad:
    """The load from which an expert placer decides, the same on all ranks."""

    grid: Grid
    copies: np.ndarray
    """(world, num_experts) float64: copies per step that each rank had for each expert."""
    order: np.ndarray
    """(num_experts,) int64: the expert in each slot at present. With n experts, the slots of place
    p of ep start at p * n / ep."""
    dim: int
    """Width of a token."""
    expert_parameters: int
    """Parameters of one shard of an expert."""
    expert_bytes: int
    """Bytes that move with one shard of an expert on one rank: weights, master copies and optimizer
    moments."""
    steps: int
    """Steps until the next decision, in each of which a move gains time."""
    speeds: tuple[float, ...] = ()
    """Speed of each rank's products relative to the rates; () if all are equal."""

    def __post_init__(self) -> None:
        num_experts = len(self.order)
        check_order(self.order, num_experts)
        if num_experts % self.grid.ep or self.copies.shape != (self.grid.world, num_experts):
            raise InputError(
                f"a load of shape {self.copies.shape} does not fit {num_experts} experts on "
                f"{self.grid.world} ranks with mesh.ep={self.grid.ep}: give (world, num_experts), "
                "num_experts a multiple of ep"
            )
        if self.steps < 1:
            raise InputError(f"expert placement steps={self.steps}: must be at least 1")

    @cached_property
    def place(self) -> np.ndarray:
        """(num_experts,) int64: the present place of each expert."""
        return places_of(self.order, self.grid.ep)

    @cached_property
    def ranks(self) -> np.ndarray:
        """(edp, ep, etp) int64: the rank at each coordinate of the experts' mesh."""
        return ranks_by_place(self.grid)

    @cached_property
    def weight(self) -> np.ndarray:
        """(edp, num_experts) float64: rows of each expert in each replica of the experts."""
        ranks_of_replica = self.ranks.reshape(self.grid.edp, -1)
        rows: np.ndarray = self.copies[ranks_of_replica].sum(1)
        return rows

    @cached_property
    def slowness(self) -> np.ndarray:
        """(edp, ep) float64: the time of a row on the slowest shard of each place, relative to the
        rates."""
        return slowness_of(self.speeds, self.ranks)

    @cached_property
    def node(self) -> np.ndarray:
        """(world,) int64: the node of each rank."""
        return nodes_of(self.grid)

    @cached_property
    def crossing(self) -> np.ndarray:
        """(num_experts, ep) float64: rows that would cross nodes, one way, if the expert were at
        the place."""
        rows = np.zeros((len(self.order), self.grid.ep))
        for ranks in self.ranks:
            origins = ranks.reshape(-1)
            # (origins, ep, etp): whether a shard is on another node than the origin
            is_away = self.node[origins][:, None, None] != self.node[ranks][None]
            shards_away = is_away.sum(2)  # (origins, ep): every shard needs the row
            rows += self.copies[origins].T @ shards_away
        return rows

    def busiest(self, place: np.ndarray) -> float:
        """Return the load of the place, in any replica of the experts, that takes longest.

        The unit is the rows that a rank of the described speed computes in that time.

        Args:
            place: (num_experts,), the place of each expert.
        """
        rows = _loads(self.weight, place, self.grid.ep)
        return float((rows * self.slowness).max())

    def between_nodes(self, place: np.ndarray) -> float:
        """Return the rows that cross nodes, one way, if each expert is at its `place`."""
        return float(self.crossing[np.arange(len(place)), place].sum())

    def order_at(self, place: np.ndarray) -> np.ndarray:
        """Return the order that puts each expert at its `place`. Experts that stay keep their
        slots; others take free slots."""
        per_place = len(place) // self.grid.ep
        stays = place[self.order] == self.place[self.order]
        order = np.where(stays, self.order, -1)  # -1: a free slot
        for number in range(self.grid.ep):
            # those of one place, as a view: what is written into it stands in `order`
            slots = order[number * per_place : (number + 1) * per_place]
            arriving = np.flatnonzero((place == number) & (self.place != number))
            slots[slots < 0] = arriving
        return order


@dataclass(frozen=True)
class ExpertSeconds:
    """The modelled times of a placement: products at the busiest place, rows over the busiest
    rank's links, and the move."""

    load: ExpertLoad
    rates: Rates

    @cached_property
    def _per_byte(self) -> np.ndarray:
        """(world, world): seconds per byte from rank to rank; 0 within a rank."""
        return seconds_per_byte(self.rates, self.load.node)

    def of_step(self, place: np.ndarray) -> float:
        """Return the part of a step's seconds that depends on the placement."""
        load = self.load
        rates = self.rates
        # a product and a sum per parameter and row, three times with the backward pass
        flops_per_row = 6 * load.expert_parameters
        is_at = np.zeros((len(place), load.grid.ep))  # 1 where an expert is at a place
        is_at[np.arange(len(place)), place] = 1

        # seconds that each rank sends and receives if every row were one byte
        sends = np.zeros(load.grid.world)
        receives = np.zeros(load.grid.world)
        for ranks in load.ranks:  # (ep, etp)
            origins = ranks.reshape(-1)
            rows = load.copies[origins] @ is_at  # (origins, ep): of each rank for each place
            spent = rows[:, :, None] * self._per_byte[origins][:, ranks]  # (origins, ep, etp)
            sends[origins] += spent.sum((1, 2))
            receives[origins] += spent.sum(0).reshape(-1)

        busiest = max(sends.max(), receives.max())
        # `passes`: how often a row crosses the link, there and back, again for gradients
        travel = rates.passes * load.dim * rates.element_bytes * busiest
        return float(load.busiest(place) * flops_per_row / (rates.tflops * 1e12) + travel)

    def of_move(self, place: np.ndarray) -> float:
        """Return the seconds of moving experts from their present places: those of the rank that
        sends or receives most."""
        load = self.load
        # seconds that each rank sends and receives if every shard of an expert were one byte
        sends = np.zeros(load.grid.world)
        receives = np.zeros(load.grid.world)
        moved = np.flatnonzero(place != load.place)
        for ranks in load.ranks:  # (ep, etp)
            source = ranks[load.place[moved]]
            target = ranks[place[moved]]
            np.add.at(sends, source, self._per_byte[source, target])
            np.add.at(receives, target, self._per_byte[source, target])
        return float(max(sends.max(), receives.max()) * load.expert_bytes)

    def in_all(self, place: np.ndarray) -> float:
        """Return the seconds of a move and of all steps until the next decision."""
        return self.of_move(place) + self.load.steps * self.of_step(place)


class AbstractExpertPlacer(ABC):
    """The interface of an expert placer. Every rank calls a placer with the same load and gets the
    same decision."""

    @abstractmethod
    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the expert for each slot, (num_experts,) int64; `load.order` if no expert moves.
        The lowest index wins ties.

        Args:
            load: the load, the same on all ranks.
        """


def places_of(order: np.ndarray, ep: int) -> np.ndarray:
    """Return the place of each expert, (num_experts,) int64, for the expert in each slot,
    `order`."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) // (len(order) // ep)
    return place


class SmartMoE(AbstractExpertPlacer):
    """SmartMoE's placement as published, a baseline.

    By descending load, each expert goes to the least loaded place with a free slot; its present
    place wins ties. This is the greedy algorithm "longest processing time first" (Graham 1969) with
    equal numbers of experts per place. The result is used whenever the busiest place gets fewer
    rows, whatever the costs of the move and of sending rows.
    """

    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the greedy order if it lowers the load of the busiest place; otherwise the present
        order."""
        equally_fast = np.ones_like(load.slowness)  # as published: it knows no speeds
        place = spread_by_load(load.weight, equally_fast, load.place)
        if load.busiest(place) < load.busiest(load.place):
            return load.order_at(place)
        return load.order


def spread_by_load(
    weight: np.ndarray, slowness: np.ndarray, before: np.ndarray | None = None
) -> np.ndarray:
    """Return a greedy placement, (num_experts,) int64: by descending load, each expert takes the
    least loaded place with room.

    Args:
        weight: (edp, num_experts), rows of each expert.
        slowness: (edp, ep), relative time of a row at each place.
        before: (num_experts,), the present place of each expert, which wins ties.
    """
    num_experts = weight.shape[1]
    ep = slowness.shape[1]
    placement = np.empty(num_experts, dtype=np.int64)
    load = np.zeros((len(weight), ep))
    room = np.full(ep, num_experts // ep)
    for expert in np.argsort(-weight.sum(0), kind="stable"):
        # (ep,): the time of each place if it takes the expert, in the replica where it is longest
        times = ((load + weight[:, expert, None]) * slowness).max(0)
        after = np.where(room > 0, times, np.inf)
        place = int(after.argmin())
        if before is not None and after[before[expert]] <= after[place]:
            place = int(before[expert])
        placement[expert] = place
        load[:, place] += weight[:, expert]
        room[place] -= 1
    return placement


class Balanced(AbstractExpertPlacer):
    """This library's placement: minimises the load of the busiest place, then the rows between
    nodes, if moving pays.

    In addition to the best placement, the policy evaluates each step of a sequence of swaps towards
    it; the first steps move few experts. Partition into parts of equal size with the smallest
    largest sum is NP-hard, and swaps of two experts end in a local optimum;
    `moesaic_lab/exact_placements.py` computes the optimum for comparison.

    Args:
        rates: rates of computing and sending rows; None for the usual ones.
    """

    def __init__(self, rates: Rates | None = None) -> None:
        self.rates = rates or Rates()

    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the order with the least modelled time until the next decision, including the
        move."""
        seconds = ExpertSeconds(load, self.rates)
        steps = least_busiest(load.weight, load.place, load.slowness)
        steps += fewest_between_nodes(load.weight, load.crossing, steps[-1], load.slowness)
        candidates = [*steps, self.best(load)]  # the first moves nothing, and wins ties
        return load.order_at(min(candidates, key=seconds.in_all))

    def best(self, load: ExpertLoad) -> np.ndarray:
        """Return the best place of each expert, (num_experts,) int64, if moves were free."""
        slowness = load.slowness
        starts = (load.place, spread_by_load(load.weight, slowness))
        ends = [least_busiest(load.weight, start, slowness)[-1] for start in starts]
        candidates = [
            fewest_between_nodes(load.weight, load.crossing, end, slowness, stay=load.place)[-1]
            for end in ends
        ]
        return min(candidates, key=lambda place: (load.busiest(place), load.between_nodes(place)))


def least_busiest(weight: np.ndarray, start: np.ndarray, slowness: np.ndarray) -> list[np.ndarray]:
    """Return a sequence of placements, one swap apart, from `start` to one whose busiest place no
    swap can relieve.

    The busiest place is the one that takes longest. Each swap exchanges one of its experts with an
    expert of another place: the pair that leaves the fuller of the two places least full. The
    sorted loads fall with every swap, so the sequence ends.

    Args:
        weight: (edp, num_experts), rows of each expert.
        start: (num_experts,), the initial place of each expert.
        slowness: (edp, ep), relative time of a row at each place.
    """
    steps = [start]
    while len(steps) <= 4 * len(start):  # a bound on the time
        place = steps[-1]
        load = _loads(weight, place, slowness.shape[1])
        times = load * slowness
        _, busiest = np.unravel_index(times.argmax(), times.shape)
        members = np.flatnonzero(place == busiest)
        others = np.flatnonzero(place != busiest)
        if not len(others):
            break

        # for each swap, (edp, members, others): the rows that the busiest place gets more, and the
        # times of both places after it
        more_rows = weight[:, None, others] - weight[:, members, None]
        busiest_load = load[:, busiest, None, None]
        busiest_times = (busiest_load + more_rows) * slowness[:, busiest, None, None]
        other_load = load[:, place[others]][:, None, :]
        other_slowness = slowness[:, place[others]][:, None, :]
        other_times = (other_load - more_rows) * other_slowness
        after = np.maximum(busiest_times, other_times).max(0)

        member, other = np.unravel_index(after.argmin(), after.shape)
        # no swap relieves the busiest place
        if not after[member, other] < times.max() * (1 - SLACK):
            break
        steps.append(_swapped(place, int(members[member]), int(others[other])))
    return steps


def fewest_between_nodes(
    weight: np.ndarray,
    crossing: np.ndarray,
    start: np.ndarray,
    slowness: np.ndarray,
    stay: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return a sequence of placements, one swap apart, with ever fewer rows between nodes and no
    busier busiest place.

    Args:
        weight: (edp, num_experts), rows of each expert.
        crossing: (num_experts, ep), rows between nodes if the expert were at the place.
        start: (num_experts,), the initial place of each expert.
        slowness: (edp, ep), relative time of a row at each place.
        stay: (num_experts,), the present place of each expert. If given, and if all places are
            equally fast, a first step permutes places: each group of experts that share a place
            goes to the best place for the group. Among equally good places, the one at which most
            of the group is at present wins. None to skip this step.
    """
    ep = crossing.shape[1]
    equally_fast = bool((slowness == slowness[:, :1]).all())
    place = start
    if stay is not None and equally_fast:
        place = _with_permuted_places(crossing, start, stay)
    steps = [place]
    # the time of the busiest place, which no swap may exceed
    limit = (_loads(weight, place, ep) * slowness).max() * (1 + SLACK)
    experts = np.arange(len(place))
    while len(steps) <= SWAPS_MOST:
        place = steps[-1]
        # for all pairs, (edp, experts, experts): the time of the first one's place if the second
        # one replaces it
        load = _loads(weight, place, ep)[:, place]
        rows = load[:, :, None] - weight[:, :, None] + weight[:, None, :]
        times = rows * slowness[:, place][:, :, None]
        fits = (times <= limit).all(0)
        # neither place exceeds the limit, and they are two places
        is_possible = fits & fits.T & (place[:, None] != place[None, :])

        # (experts, experts): further rows between nodes if the first one goes to the second one's
        # place
        cost = crossing[:, place] - crossing[experts, place][:, None]
        # a swap moves both
        saved = np.where(is_possible, -(cost + cost.T), -np.inf)
        one, other = np.unravel_index(saved.argmax(), saved.shape)
        if not saved[one, other] > SLACK * crossing.sum():  # no swap saves rows
            break
        steps.append(_swapped(place, int(one), int(other)))
    return steps


def _with_permuted_places(crossing: np.ndarray, start: np.ndarray, stay: np.ndarray) -> np.ndarray:
    """Return a placement with the same groups of experts, each group at the place where it causes
    the fewest crossing rows."""
    from scipy.optimize import linear_sum_assignment

    # by group, which its place in `start` numbers, and place: the crossing rows of the group there,
    # and the number of its experts that are there at present
    ep = crossing.shape[1]
    rows = np.zeros((ep, ep))
    staying = np.zeros((ep, ep))
    np.add.at(rows, start, crossing)
    np.add.at(staying, (start, stay), 1)

    # no more than rounding errors of the rows, and above 0 even if none cross
    tie_breaker = SLACK * max(crossing.sum(), 1.0)
    _, place_of_group = linear_sum_assignment(rows - staying * tie_breaker)
    placement: np.ndarray = place_of_group[start]
    return placement


def _loads(weight: np.ndarray, place: np.ndarray, ep: int) -> np.ndarray:
    """Return the rows at each place, (edp, ep)."""
    return np.stack([np.bincount(place, weights=rows, minlength=ep) for rows in weight])


def _swapped(place: np.ndarray, one: int, other: int) -> np.ndarray:
    """Return a placement in which two experts have exchanged places."""
    placement = place.copy()
    placement[one] = place[other]
    placement[other] = place[one]
    return placement
