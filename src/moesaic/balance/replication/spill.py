"""Spilling: copies above a limit go from overloaded places to places with room, followed by the
weights; the limit is the fastest by the cost model.

The algorithm is that of least-loaded expert parallelism. Copies of all origins may move; those of
the helper itself move first, since they need not travel. A *giver* is a place that computes more
than its limit, *room* what a place may compute more, negative for a giver.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import seconds_under
from moesaic.program.replications import NOTHING, Replications

LIMITS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""The limits that are tried: copies of a place relative to its share if all places take equally
long."""
MOST_HELPED = 8
"""Most experts that may be replicated to one place, which holds their weights until the backward
pass, and then their gradients."""


class Spill(AbstractReplicaPolicy):
    """A policy that spills down to the limit that is fastest by the cost model, or not at all if
    that is fastest."""

    def replicated(self, replica: ReplicaLoad) -> Replications:
        spilled = [overflow(replica, replica.limits(limit)) for limit in LIMITS]
        return min([NOTHING, *spilled], key=partial(seconds_under, replica))


def overflow(replica: ReplicaLoad, most: int | np.ndarray) -> Replications:
    """Return replications under which no place computes more than `most` if possible.

    The fullest place gives first. It gives copies of its largest expert to the emptiest place that
    may help.

    Args:
        replica: the load of one replica of the experts.
        most: most copies per place, one number for all places or (ep,).
    """
    giving = Giving(replica, NOTHING)
    room = most - giving.loads
    for giver in np.argsort(room, kind="stable"):
        while room[giver] < 0 and giving.give(int(giver), room):
            room = most - giving.loads
    return giving.replicated


class Giving:
    """A greedy algorithm that replicates copies of a place's largest expert to the place with most
    room, step by step.

    Args:
        initial: the replications at the start.
    """

    def __init__(self, replica: ReplicaLoad, initial: Replications) -> None:
        self._home = replica.load.home
        self._places = np.arange(len(replica.origins))
        self._initial = initial
        self._given = list[tuple[int, int, int, int]]()
        """Origin, expert, helper and amount of each replication since."""
        self._staying = initial.staying(replica.copies)
        """(places, num_experts) int64: the copies of each place that stay at their homes."""
        self.helped = initial.helped(len(self._home), len(self._places))
        """(num_experts, ep) bool: whether an expert is replicated to a place."""
        at_home = np.bincount(self._home, self._staying.sum(0), len(self._places))
        helping = np.bincount(initial.helper, initial.amount, len(self._places))
        self.loads: np.ndarray = (at_home + helping).astype(np.int64)
        """(ep,) int64: copies that each place computes."""

    @property
    def replicated(self) -> Replications:
        """The replications at the start and those since."""
        # (replications, 4): origin, expert, helper, amount
        given = np.array(self._given, dtype=np.int64).reshape(-1, 4)
        return self._initial.joined(Replications(*given.T))

    def give(self, giver: int, room: np.ndarray, weights: int = 0) -> bool:
        """Replicate the excess copies of a place, at most those of one expert to one helper, and
        return whether any moved.

        Args:
            giver: a place without room.
            room: (ep,) int64, further copies that each place may compute; negative if it has too
                many.
            weights: the memory of an expert's weights, as a number of copies, which a new replica
                takes from the helper's room.
        """
        own_experts = np.flatnonzero(self._home == giver)
        expert = int(own_experts[self._staying[:, own_experts].sum(0).argmax()])

        new_weights = np.where(self.helped[expert], 0, weights)
        room_left = room - new_weights
        may_take_expert = self.helped[expert] | (self.helped.sum(0) < MOST_HELPED)
        may_help = may_take_expert & (self._places != giver)
        least = np.iinfo(np.int64).min  # in place of the room where a place may not help
        helper = int(np.where(may_help, room_left, least).argmax())

        # a new replica's weights take memory at the giver too
        excess = new_weights[helper] - room[giver]
        copies_left = self._staying[:, expert].sum()
        amount = int(min(room_left[helper], excess, copies_left))
        if not may_help[helper] or amount <= 0:
            return False
        self._take(expert, helper, amount)
        self.helped[expert, helper] = True
        self.loads[giver] -= amount
        self.loads[helper] += amount
        return True

    def _take(self, expert: int, helper: int, amount: int) -> None:
        """Replicate copies of an expert: the helper's own first, then those of the places with most
        of them."""
        staying = self._staying[:, expert]  # a view
        others = [int(place) for place in np.argsort(-staying, kind="stable") if place != helper]
        remaining = amount
        for place in (helper, *others):
            moved = min(remaining, int(staying[place]))
            staying[place] -= moved
            remaining -= moved
            if moved:
                self._given.append((place, expert, helper, moved))
