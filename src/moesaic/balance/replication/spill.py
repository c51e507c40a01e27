"""Spilling: what overloads a place goes to places with room, with the weights sent after it, down to the limit that is fastest.

As least-loaded expert parallelism does (`least_loaded.py`), from whatever origin; copies whose origin is the helper itself go
first, since they need not travel.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad, ReplicationCosts
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import Replications

LIMITS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Copies per place, over what it would compute if all took equally long, that are tried as what a place may compute."""
MOST_HELPED = 8
"""Experts that one place is replicated at most: it holds their weights until the backward pass, and their gradients in it."""


class Spill(AbstractReplicaPolicy):
    """Spills down to the limit that is fastest by the cost model; to none, if nothing helps.

    Args:
        costs: rates; None for those of `cost.Machine`.
    """

    def __init__(self, costs: ReplicationCosts | None = None) -> None:
        self.costs = costs or ReplicationCosts()

    def replicated(self, replica: ReplicaLoad) -> Replications:
        tried = [_nothing(replica), *(overflow(replica, replica.limits(limit)) for limit in LIMITS)]
        return Replications.of(min(tried, key=replica.seconds))


def _nothing(replica: ReplicaLoad) -> np.ndarray:
    """Return a table without replicated copies, (ep, num_experts, ep) int64."""
    return np.zeros((len(replica.origins), replica.load.num_experts, len(replica.origins)), dtype=np.int64)


def overflow(replica: ReplicaLoad, most: int | np.ndarray) -> np.ndarray:
    """Return what is replicated, (ep, num_experts, ep), so that no place computes more than `most` copies, if that can be.

    The fullest place gives first, of its largest expert, to the emptiest place that may be replicated it.

    Args:
        replica: the load of one replica.
        most: copies of one place, or of each, (ep,).
    """
    giving = Giving(replica, _nothing(replica))
    room = most - giving.loads
    for giver in np.argsort(room, kind="stable"):
        while room[giver] < 0 and giving.give(int(giver), room):
            room = most - giving.loads
    return giving.replicated


class Giving:
    """One greedy, step by step: a place replicates copies of its largest expert to the place that has most room.

    Args:
        replica: the load of one replica.
        replicated: (ep, num_experts, ep) int64, to begin with.
    """

    def __init__(self, replica: ReplicaLoad, replicated: np.ndarray) -> None:
        self._home, self._places = replica.load.home, np.arange(len(replica.origins))
        self.replicated = replicated.copy()
        """(ep, num_experts, ep) int64: copies of a place for an expert that another place computes."""
        self._staying = replica.copies - replicated.sum(2)
        self.helped = replicated.sum(0) > 0
        """(num_experts, ep) bool: which places are replicated an expert."""
        at_home = np.bincount(self._home, weights=self._staying.sum(0), minlength=len(self._places)).astype(np.int64)
        self.loads: np.ndarray = at_home + replicated.sum((0, 1))
        """(ep,) int64: copies that each place computes."""

    def give(self, giver: int, room: np.ndarray, weights: int = 0) -> bool:
        """Replicate what a place has too much of, as far as one expert and one helper go; returns whether any was.

        Args:
            giver: a place without room.
            room: (ep,) int64: copies that each place may compute besides, below 0 where it has too many.
            weights: copies whose room the weights of an expert take that a place is not replicated yet.
        """
        own = np.flatnonzero(self._home == giver)
        expert = int(own[self._staying[:, own].sum(0).argmax()])
        left = room - np.where(self.helped[expert], 0, weights)
        may_help = (self.helped[expert] | (self.helped.sum(0) < MOST_HELPED)) & (self._places != giver)
        helper = int(np.where(may_help, left, np.iinfo(np.int64).min).argmax())
        new = 0 if self.helped[expert, helper] else weights
        amount = int(min(left[helper], new - room[giver], self._staying[:, expert].sum()))
        if not may_help[helper] or amount <= 0:
            return False
        staying, rest = self._staying[:, expert], amount
        others = [int(place) for place in np.argsort(-staying, kind="stable") if place != helper]
        for place in (helper, *others):  # the helper's own tokens first, then of the places that have most
            moved = min(rest, int(staying[place]))
            staying[place] -= moved
            self.replicated[place, expert, helper] += moved
            rest -= moved
        self.helped[expert, helper] = True
        self.loads[[giver, helper]] += -amount, amount
        return True
