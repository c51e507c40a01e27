"""EPLB's redundant experts (DeepSeek-V3, section 3.4; the balancer that DeepSeek published): a policy to compare with, and one
of the tables among which the arbiter chooses.

Every place has room for a few redundant experts. One after the other goes to the expert with the largest load per copy of it;
heaviest first, each is put on the place with the least load that has room and does not hold the expert. An expert's home and
its redundant experts then share its token copies equally. EPLB also reorders experts, which is expert placement here, and
decides from past statistics; here it sees the very counts of the call, which flatters it. What weights cost it does not ask.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import Replications, from_origins


class EPLB(AbstractReplicaPolicy):
    """Redundant experts by load, one on each place."""

    def replicated(self, replica: ReplicaLoad) -> Replications:
        return redundant(replica, 1)


def redundant(replica: ReplicaLoad, each: int) -> Replications:
    """Return what is replicated with so many redundant experts on each place, all copies of an expert shared equally.

    Args:
        replica: the load of one replica of the experts.
        each: redundant experts of a place.
    """
    holds = redundant_places(replica, np.full(len(replica.origins), each))
    share = replica.copies.sum(0) // holds.sum(1)
    holds[np.arange(len(holds)), replica.load.home] = False
    return from_tables(replica, np.where(holds, share[:, None], 0))


def redundant_places(replica: ReplicaLoad, room: np.ndarray) -> np.ndarray:
    """Return which places hold each expert, their own and redundant ones, (num_experts, ep) bool.

    Args:
        replica: the load of one replica of the experts.
        room: (ep,) redundant experts that each place may hold.
    """
    loads, home, ep = replica.copies.sum(0), replica.load.home, len(replica.origins)
    held = replicas_by_load(loads, len(loads) + int(room.sum()), ep)
    share, left = loads / held, room.copy()
    holds = np.zeros((len(loads), ep), dtype=bool)
    holds[np.arange(len(loads)), home] = True
    busy = np.bincount(home, share, ep)
    for expert in np.repeat(np.arange(len(loads)), held - 1)[np.argsort(-np.repeat(share, held - 1), kind="stable")]:
        free = (left > 0) & ~holds[expert]
        if free.any():
            place = int(np.where(free, busy, np.inf).argmin())
            holds[expert, place] = True
            busy[place] += share[expert]
            left[place] -= 1
    return holds


def replicas_by_load(loads: np.ndarray, slots: int, ep: int) -> np.ndarray:
    """Return how often each expert is held, (num_experts,) int64: once, then always one more of that with most per replica.

    Args:
        loads: (num_experts,) copies of each expert.
        slots: of all places together.
        ep: places; none holds an expert twice.
    """
    held = np.ones(len(loads), dtype=np.int64)
    for _ in range(slots - len(loads)):
        each = np.where(held < ep, loads / held, -1.0)
        if each.max() <= 0:
            break
        held[int(each.argmax())] += 1
    return held


def from_tables(replica: ReplicaLoad, moved: np.ndarray) -> Replications:
    """Return whose copies go where, those of the helper itself first.

    Args:
        replica: the load of one replica of the experts.
        moved: (num_experts, ep) int64 copies of each expert that each place computes as a helper.
    """
    experts = np.flatnonzero(moved.any(1))
    return from_origins(replica, replica.copies, experts, np.arange(len(replica.origins)), moved[experts])
