"""EPLB's redundant experts (DeepSeek-V3, section 3.4; the balancer that DeepSeek published): a baseline, and one of the tables
among which the arbiter chooses.

Every place has room for a few redundant experts. Each of these becomes a replica of the expert that has the largest load per
replica. The replicas, heaviest first, go to the least loaded place that has room and does not hold the expert. An expert's
home and its redundant experts then share the expert's token copies equally. EPLB ignores the cost of sending weights.

EPLB also reorders experts, which is expert placement here. It decides from past statistics; this policy sees the counts of the
call itself and so looks better than EPLB.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import Replications, from_origins


class EPLB(AbstractReplicaPolicy):
    """A policy with one redundant expert on each place, chosen by load."""

    def replicated(self, replica: ReplicaLoad) -> Replications:
        return redundant(replica, 1)


def redundant(replica: ReplicaLoad, each: int) -> Replications:
    """Return the replications with `each` redundant experts on each place; all holders of an expert share its copies equally.

    Args:
        replica: the load of one replica of the experts.
        each: number of redundant experts per place.
    """
    holds = redundant_places(replica, np.full(len(replica.origins), each))
    share = replica.copies.sum(0) // holds.sum(1)
    holds[np.arange(len(holds)), replica.load.home] = False
    return from_tables(replica, np.where(holds, share[:, None], 0))


def redundant_places(replica: ReplicaLoad, room: np.ndarray) -> np.ndarray:
    """Return which places hold each expert, as its home or as a redundant expert, (num_experts, ep) bool.

    Args:
        replica: the load of one replica of the experts.
        room: (ep,), number of redundant experts that each place may hold.
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
    """Return the number of replicas of each expert, (num_experts,) int64.

    Every expert has one; each further replica goes to the expert with the largest load per replica.

    Args:
        loads: (num_experts,), the copies of each expert.
        slots: number of replicas that all places together may hold.
        ep: number of places; no place holds an expert twice.
    """
    held = np.ones(len(loads), dtype=np.int64)
    for _ in range(slots - len(loads)):
        each = np.where(held < ep, loads / held, -1.0)
        if each.max() <= 0:
            break
        held[int(each.argmax())] += 1
    return held


def from_tables(replica: ReplicaLoad, moved: np.ndarray) -> Replications:
    """Return the replications, with origins, that give each helper its copies; a helper's own copies are taken first.

    Args:
        replica: the load of one replica of the experts.
        moved: (num_experts, ep) int64, copies of each expert that each place computes as a helper.
    """
    experts = np.flatnonzero(moved.any(1))
    return from_origins(replica, replica.copies, experts, np.arange(len(replica.origins)), moved[experts])
