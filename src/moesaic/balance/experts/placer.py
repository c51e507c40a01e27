"""The interface of expert placement: a permutation of a layer's experts over the places of ep, from the load of recent steps.

SmartMoE (Zhai et al., USENIX ATC 2023) permutes experts every few steps and ignores what a move costs. Here a move carries
the expert's weights, master copies and optimizer moments, some seven times the bytes of replication it once, so it must pay
within the steps until the next decision. Every place keeps equally many experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moesaic.balance.replication.links import nodes_of, ranks_by_place, seconds_per_byte
from moesaic.cost.alpha_beta import Machine
from moesaic.errors import InputError
from moesaic.program.grid import Grid


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
        loads = np.stack([np.bincount(place, weights=rows, minlength=self.grid.ep) for rows in self.weight])
        return float((loads * self.slowness).max())

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


class GivenOrders(AbstractExpertPlacer):
    """Returns what it is told, one order after the other: for tests and replays.

    Args:
        orders: one per decision; afterwards experts stay.
    """

    def __init__(self, orders: list[np.ndarray]) -> None:
        self._left = iter(orders)

    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the next order."""
        return next(self._left, load.order)


def check_order(order: np.ndarray, num_experts: int) -> None:
    """Raise InputError if an order does not name each expert once."""
    if not np.array_equal(np.sort(np.asarray(order)), np.arange(num_experts)):
        raise InputError(f"an order of experts must name each of 0 to {num_experts - 1} once, got {list(order)}")


def places_of(order: np.ndarray, ep: int) -> np.ndarray:
    """Return the place of each expert, (num_experts,) int64, from the expert in each slot."""
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.arange(len(order)) // (len(order) // ep)
    return found
