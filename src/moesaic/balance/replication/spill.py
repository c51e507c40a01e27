"""Spilling: what overloads a place goes to places with room, with the weights sent after it.

As least-loaded expert parallelism does, from whatever origin; copies whose origin is the helper itself go first, since they
need not travel.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import Board, ReplicationCosts, boards
from moesaic.balance.replication.load import Load
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.errors import InputError

LIMITS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Copies per place, over the mean, that are tried as what a place may compute."""
MOST_HELPED = 8
"""Experts that one place is replicated at most: it holds their weights until the backward pass, and their gradients in it."""


class LeastLoaded(AbstractReplicationPolicy):
    """Lets no place compute more than a limit, wherever there is room, whatever it costs: for bounded memory.

    Args:
        limit: copies per place over the mean; at least 1.
        budget: copies that one rank may compute, instead of `limit`; a load above all budgets together is spread evenly.
    """

    def __init__(self, limit: float = 1.0, *, budget: int | None = None) -> None:
        if limit < 1:
            raise InputError(f"replication limit={limit}: the mean must fit: choose 1 or more")
        if budget is not None and budget < 1:
            raise InputError(f"replication budget={budget}: choose at least one token copy per rank")
        self.limit, self.budget = limit, budget

    def decide(self, load: Load) -> np.ndarray:
        """Return the replicated copies."""
        found = []
        for board in boards(load, ReplicationCosts()):
            mean = -(-int(board.copies.sum()) // len(board.origins))
            most = int(np.ceil(mean * self.limit)) if self.budget is None else max(self.budget, mean)
            found.append(board.spread(overflow(board, most)))
        return np.sum(found, axis=0)


class Spill(AbstractReplicationPolicy):
    """Spills down to the limit that is fastest by the cost model; to none, if nothing helps.

    Args:
        costs: rates; None for those of `cost.Machine`.
    """

    def __init__(self, costs: ReplicationCosts | None = None) -> None:
        self.costs: ReplicationCosts = costs or ReplicationCosts()

    def decide(self, load: Load) -> np.ndarray:
        """Return the replicated copies."""
        found = []
        for board in boards(load, self.costs):
            mean = board.copies.sum() / len(board.origins)
            none = np.zeros((len(board.origins), load.num_experts, len(board.origins)), dtype=np.int64)
            tried = [none, *(overflow(board, int(np.ceil(mean * limit))) for limit in LIMITS)]
            found.append(board.spread(min(tried, key=board.seconds)))
        return np.sum(found, axis=0)


def overflow(board: Board, most: int) -> np.ndarray:
    """Return what is replicated, (ep, num_experts, ep), so that no place computes more than `most` copies, if that can be.

    The fullest place gives first, of its largest expert, to the emptiest place that may be replicated it.

    Args:
        board: the load.
        most: copies of one place.
    """
    ep, home = len(board.origins), board.load.home
    replicated = np.zeros((ep, board.load.num_experts, ep), dtype=np.int64)
    staying, helped = board.copies.copy(), replicated.sum(0) > 0
    loads = np.bincount(home, weights=staying.sum(0), minlength=ep).astype(np.int64)
    for giver in np.argsort(-loads, kind="stable"):
        experts = np.flatnonzero(home == giver)
        while loads[giver] > most:
            expert = experts[np.argmax(staying[:, experts].sum(0))]
            may_help = (helped[expert] | (helped.sum(0) < MOST_HELPED)) & (home[expert] != np.arange(ep))
            helper = int(np.argmin(np.where(may_help, loads, np.iinfo(np.int64).max)))
            amount = int(min(most - loads[helper], loads[giver] - most, staying[:, expert].sum()))
            if not may_help[helper] or amount <= 0:
                break
            give(staying[:, expert], replicated[:, expert, helper], helper, amount)
            helped[expert, helper] = True
            loads[giver] -= amount
            loads[helper] += amount
    return replicated


def give(staying: np.ndarray, replicated: np.ndarray, helper: int, amount: int) -> None:
    """Lend so many copies of an expert, those of the helper's own tokens first, then of the places that have most.

    Args:
        staying: (ep,) copies of each place that stay; changed.
        replicated: (ep,) those that the helper computes; changed.
        helper: place in ep.
        amount: copies.
    """
    others = [int(place) for place in np.argsort(-staying, kind="stable") if place != helper]
    for place in (helper, *others):
        moved = min(amount, int(staying[place]))
        staying[place] -= moved
        replicated[place] += moved
        amount -= moved
