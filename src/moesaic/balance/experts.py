"""Where experts live: permutations of a layer's experts over the places of ep, from the load of recent steps.

SmartMoE (Zhai et al., USENIX ATC 2023) permutes experts every few steps and ignores what a move costs (`SmartMoE`). Here a move
carries the expert's weights, master copies and optimizer moments, some seven times the bytes of replicating it once, so it must
pay within the steps until the next decision (`Balanced`). Every place keeps equally many experts. All loads come with a leading
axis of copies of the experts, which all have one placement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moesaic.balance.replication.cost import nodes_of, ranks_by_place, seconds_per_byte
from moesaic.cost.cluster import Machine
from moesaic.errors import InputError
from moesaic.program.grid import Grid

SLACK = 1e-9
"""Relative differences of load up to this are rounding, and no gain."""
SWAPS_MOST = 64
"""Swaps that one way has at most to save rows between nodes; each looks at all pairs of experts."""


@dataclass(frozen=True, kw_only=True)
class ExpertRates:
    """What a row costs where it is computed and where it travels."""

    machine: Machine = field(default_factory=Machine)
    """Rates of one rank."""
    element_bytes: int = 2
    """Of activations."""
    passes: int = 4
    """How often a row crosses a link in a step: out and back, and again for gradients."""

    def __post_init__(self) -> None:
        for name in ("element_bytes", "passes"):
            if getattr(self, name) < 1:
                raise InputError(f"rates.{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertLoad:
    """What a policy decides from, the same on all ranks."""

    grid: Grid
    copies: np.ndarray
    """(world, num_experts) float64: copies per step that each rank had for each expert."""
    order: np.ndarray
    """(num_experts,) int64: the expert in each slot now; place p of ep has slots p * n / ep on."""
    dim: int
    """Width of a token."""
    expert_parameters: int
    """Of one shard of an expert."""
    expert_bytes: int
    """Of one shard of an expert on one rank, with all that moves with it."""
    steps: int
    """Until the next decision: what a move gains is gained so often."""
    speeds: tuple[float, ...] = ()
    """Of each rank's products, over that of the rates; () for all alike."""

    def __post_init__(self) -> None:
        num_experts = len(self.order)
        check_order(self.order, num_experts)
        if num_experts % self.grid.ep or self.copies.shape != (self.grid.world, num_experts):
            raise InputError(
                f"a load of shape {self.copies.shape} does not fit {num_experts} experts on {self.grid.world} ranks with "
                f"mesh.ep={self.grid.ep}: give (world, num_experts), num_experts a multiple of ep"
            )
        if self.steps < 1:
            raise InputError(f"expert placement steps={self.steps}: must be at least 1")

    @cached_property
    def place(self) -> np.ndarray:
        """The place of each expert now, (num_experts,) int64."""
        return places_of(self.order, self.grid.ep)

    @cached_property
    def ranks(self) -> np.ndarray:
        """(edp, ep, etp) int64: the rank of each shard of each place of each copy of the experts."""
        return ranks_by_place(self.grid)

    @cached_property
    def weight(self) -> np.ndarray:
        """(edp, num_experts) float64: rows of each expert in each copy of the experts."""
        found: np.ndarray = self.copies[self.ranks.reshape(self.grid.edp, -1)].sum(1)
        return found

    @cached_property
    def slowness(self) -> np.ndarray:
        """(edp, ep) float64: time of a row at each place of each copy of the experts, of its slowest shard, over that of the
        rates."""
        speeds = np.array(self.speeds or (1.0,))
        found: np.ndarray = (1 / speeds[self.ranks % len(speeds)]).max(2)
        return found

    @cached_property
    def node(self) -> np.ndarray:
        """(world,) int64: the node of each rank."""
        return nodes_of(self.grid)

    @cached_property
    def crossing(self) -> np.ndarray:
        """(num_experts, ep) float64: rows that would go between nodes, one way, if an expert were at a place."""
        found = np.zeros((len(self.order), self.grid.ep))
        for ranks in self.ranks:
            origins = ranks.reshape(-1)
            away = (self.node[origins][:, None, None] != self.node[ranks][None]).sum(2)
            found += self.copies[origins].T @ away
        return found

    def busiest(self, place: np.ndarray) -> float:
        """Return the rows at the place of any copy of the experts that takes longest, in rows of a rank that is as fast as the
        rates; `place` is that of each expert."""
        return float((_loads(self.weight, place, self.grid.ep) * self.slowness).max())

    def between_nodes(self, place: np.ndarray) -> float:
        """Return the rows that go between nodes, one way."""
        return float(self.crossing[np.arange(len(place)), place].sum())

    def order_at(self, place: np.ndarray) -> np.ndarray:
        """Return the order in which each expert is at a place: who stays keeps the slot, who comes takes a free one."""
        each = len(place) // self.grid.ep
        found = np.where(place[self.order] == self.place[self.order], self.order, -1)
        for number in range(self.grid.ep):
            slots = slice(number * each, (number + 1) * each)
            comes = np.flatnonzero((place == number) & (self.place != number))
            found[slots][found[slots] < 0] = comes
        return found


@dataclass(frozen=True)
class ExpertSeconds:
    """Modelled times of an order: rows at the busiest place, rows over the busiest rank's links, and the move to it."""

    load: ExpertLoad
    rates: ExpertRates

    @cached_property
    def _per_byte(self) -> np.ndarray:
        """(world, world) seconds from rank to rank; nothing within one."""
        return seconds_per_byte(self.rates.machine, self.load.node)

    def of_step(self, place: np.ndarray) -> float:
        """Return the seconds of a step that depend on where experts are."""
        load, rates = self.load, self.rates
        flops = (
            6 * load.expert_parameters
        )  # a product and a sum per parameter and row, three times with the backward pass
        at = np.zeros((len(place), load.grid.ep))
        at[np.arange(len(place)), place] = 1
        busy = np.zeros((2, load.grid.world))
        for ranks in load.ranks:
            origins = ranks.reshape(-1)
            rows = load.copies[origins] @ at
            spent = rows[:, :, None] * self._per_byte[origins][:, ranks]
            busy[0, origins] += spent.sum((1, 2))
            busy[1, origins] += spent.sum(0).reshape(-1)
        travel = rates.passes * load.dim * rates.element_bytes * busy.max()
        return float(load.busiest(place) * flops / (rates.machine.tflops * 1e12) + travel)

    def of_move(self, place: np.ndarray) -> float:
        """Return the seconds of moving experts from where they are: what the busiest rank sends, or receives."""
        load, busy = self.load, np.zeros((2, self.load.grid.world))
        moved = np.flatnonzero(place != load.place)
        for ranks in load.ranks:
            source, target = ranks[load.place[moved]], ranks[place[moved]]
            np.add.at(busy[0], source, self._per_byte[source, target])
            np.add.at(busy[1], target, self._per_byte[source, target])
        return float(busy.max() * load.expert_bytes)

    def in_all(self, place: np.ndarray) -> float:
        """Return the seconds of a move and of all steps until the next decision."""
        return self.of_move(place) + self.load.steps * self.of_step(place)


class AbstractExpertPlacer(ABC):
    """A policy. It decides and never acts; every rank calls it with the same load and gets the same answer."""

    @abstractmethod
    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the expert in each slot, (num_experts,) int64; `load.order` to stay. Ties break by number.

        Args:
            load: the same on all ranks.
        """


def check_order(order: np.ndarray, num_experts: int) -> None:
    """Raise InputError if an order does not name each expert once."""
    if not np.array_equal(np.sort(np.asarray(order)), np.arange(num_experts)):
        raise InputError(f"an order of experts must name each of 0 to {num_experts - 1} once, got {list(order)}")


def places_of(order: np.ndarray, ep: int) -> np.ndarray:
    """Return the place of each expert, (num_experts,) int64, from the expert in each slot."""
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.arange(len(order)) // (len(order) // ep)
    return found


class SmartMoE(AbstractExpertPlacer):
    """As published: by descending load, each expert to the least loaded place with a free slot, its old one if equal.

    The greedy is longest processing time first (Graham 1969) with room for equally many. It is taken whenever the busiest place
    gets less, whatever the move costs, wherever rows have to go. Kept to be compared with.
    """

    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the greedy order if its busiest place has fewer rows."""
        place = spread_by_load(load.weight, np.ones_like(load.slowness), load.place)
        return load.order_at(place) if load.busiest(place) < load.busiest(load.place) else load.order


def spread_by_load(weight: np.ndarray, slowness: np.ndarray, before: np.ndarray | None = None) -> np.ndarray:
    """Return the place of each expert, (num_experts,) int64: by descending load to the least loaded place with room.

    Args:
        weight: (copies, num_experts) rows of each expert.
        slowness: (copies, ep) time of a row at each place.
        before: (num_experts,) the place of each expert now, which wins where places are equal.
    """
    num_experts, ep = weight.shape[1], slowness.shape[1]
    found, load = np.empty(num_experts, dtype=np.int64), np.zeros((len(weight), ep))
    room = np.full(ep, num_experts // ep)
    for expert in np.argsort(-weight.sum(0), kind="stable"):
        after = np.where(room > 0, ((load + weight[:, expert, None]) * slowness).max(0), np.inf)
        place = int(after.argmin())
        if before is not None and after[before[expert]] <= after[place]:
            place = int(before[expert])
        found[expert] = place
        load[:, place] += weight[:, expert]
        room[place] -= 1
    return found


class Balanced(AbstractExpertPlacer):
    """Ours: the least busiest place, then the fewest rows between nodes, as far as the way there pays for itself.

    Besides the best order it looks at each step of a way to it by swaps of two experts, which moves little at first. (Partition
    into parts of equal size at the least largest sum is NP-hard. Swaps of two experts end in a local optimum, to be measured by
    the optimum in `moesaic_lab/exact_placements.py`.)

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
    from scipy.optimize import linear_sum_assignment

    ep = crossing.shape[1]
    rows, kept = np.zeros((ep, ep)), np.zeros((ep, ep))
    np.add.at(rows, start, crossing)
    np.add.at(kept, (start, stay), 1)
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
