"""What a layer's forward and backward pass take under given lending: the one model by which policies choose.

FasterMoE (He et al., PPoPP 2022), equations 7 and 8, corrected: tokens that stay at home cross no link, tokens that still
travel are counted beside the weights, bytes are bytes, and links have the rates of their kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moesaic.cost.alpha_beta import Machine
from moesaic.errors import InputError
from moesaic.plan.lending.lender import Load


@dataclass(frozen=True, kw_only=True)
class LendingCosts:
    """Rates, of one rank."""

    machine: Machine = field(default_factory=Machine)
    element_bytes: int = 2
    """Of activations and weights."""
    matrices: int = 3
    """Of an expert: 3 for SwiGLU, 2 for a plain one."""
    backward: bool = True
    """Count the backward pass too: twice the products, and everything that travelled travels again."""

    def __post_init__(self) -> None:
        for name in ("element_bytes", "matrices"):
            if getattr(self, name) < 1:
                raise InputError(f"lending.{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class Board:
    """One replica's load by place in ep, and what moving a copy costs: where policies play their moves."""

    load: Load
    origins: np.ndarray
    """(ep, origins): ranks by place."""
    costs: LendingCosts

    @cached_property
    def copies(self) -> np.ndarray:
        """Copies that each place has for each expert, (ep, num_experts) int64."""
        found: np.ndarray = self.load.copies[self.origins].sum(1)
        return found

    @cached_property
    def seconds_per_copy(self) -> float:
        """Of products, forward and backward."""
        flops = 2 * self.load.dim * self.load.units * self.costs.matrices
        return flops * (3 if self.costs.backward else 1) / (self.costs.machine.tflops * 1e12)

    @cached_property
    def row_bytes(self) -> int:
        """Of one copy, one way."""
        return self.load.dim * self.costs.element_bytes

    @cached_property
    def weight_bytes(self) -> int:
        """Of one shard of an expert, one way."""
        return self.load.units * self.load.dim * self.costs.matrices * self.costs.element_bytes

    @cached_property
    def seconds_per_byte(self) -> np.ndarray:
        """From place to place, (ep, ep); nothing within one."""
        grid, machine = self.load.grid, self.costs.machine
        node = np.array([grid.node_of(int(ranks[0])) for ranks in self.origins])
        gbps = np.where(node[:, None] == node[None, :], machine.intra_gbps, machine.inter_gbps)
        seconds: np.ndarray = 8 / (gbps * 1e9) * (1 - np.eye(len(node)))
        return seconds

    @property
    def passes(self) -> int:
        """How often what is dispatched crosses a link: out and back, and again for gradients."""
        return 4 if self.costs.backward else 2

    def seconds(self, lent: np.ndarray) -> float:
        """Return the modelled time.

        Args:
            lent: (ep, num_experts, ep) int64: copies of a place for an expert that another place computes.
        """
        home, places = self.load.home, np.arange(len(self.origins))
        computed = lent.copy()
        computed[:, np.arange(self.load.num_experts), home] += self.copies - lent.sum(2)
        rows = computed.sum(1)
        helped = lent.sum(0) > 0
        weights = np.zeros((len(places), len(places)), dtype=np.int64)
        np.add.at(weights, home, helped)
        return self.seconds_of(rows, weights)

    def seconds_of(self, rows: np.ndarray, weights: np.ndarray) -> float:
        """Return the modelled time.

        Args:
            rows: (ep, ep): copies of place i that place j computes.
            weights: (ep, ep): experts of place i whose weights place j gets.
        """
        moved, sent = rows * self.seconds_per_byte, weights * self.seconds_per_byte
        travel = self.passes * self.row_bytes * max(moved.sum(0).max(), moved.sum(1).max())
        fetch = self.passes / 2 * self.weight_bytes * max(sent.sum(0).max(), sent.sum(1).max())
        return float(rows.sum(0).max() * self.seconds_per_copy + travel + fetch)

    def spread(self, lent: np.ndarray) -> np.ndarray:
        """Share what a place lends out among its ranks, first come first: (ep, num_experts, ep) to (world, num_experts, ep).

        Other replicas' ranks lend nothing.
        """
        found = np.zeros((*self.load.copies.shape, len(self.origins)), dtype=np.int64)
        of_rank = self.load.copies[self.origins]
        rank_ends, helper_ends = of_rank.cumsum(1)[..., None], lent.cumsum(2)[:, None]
        starts = np.maximum(rank_ends - of_rank[..., None], helper_ends - lent[:, None])
        shared = np.maximum(np.minimum(rank_ends, helper_ends) - starts, 0)
        found[self.origins.reshape(-1)] = shared.reshape(-1, *shared.shape[2:])
        return found


def boards(load: Load, costs: LendingCosts) -> list[Board]:
    """Return the board of every replica."""
    return [Board(load, origins, costs) for origins in load.replicas]
