"""EPLB's redundant experts (DeepSeek-V3, section 3.4; the balancer that DeepSeek published): a
baseline, and one of the tables among which the arbiter chooses.

Every place has room for a few redundant experts. Each of these becomes a replica of the expert that
has the largest load per replica. The replicas, heaviest first, go to the least loaded place that
has room and does not hold the expert. An expert's home and its redundant experts then share the
expert's token copies equally. EPLB ignores the cost of sending weights.

EPLB also reorders experts, which is expert placement here. It decides from past statistics; this
policy sees the counts of the call itself and so looks better than EPLB. In this file, a *replica*
of an expert is one of the places that compute it, its home included; the argument `replica` is a
group of places that together hold all experts once.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import from_origins
from moesaic.program.replications import Replications


class EPLB(AbstractReplicaPolicy):
    """A policy with one redundant expert on each place, chosen by load."""

    def replicated(self, replica: ReplicaLoad) -> Replications:
        return redundant(replica, 1)


def redundant(replica: ReplicaLoad, per_place: int) -> Replications:
    """Return the replications with `per_place` redundant experts per place; all holders of an
    expert share its copies equally.

    Args:
        per_place: number of redundant experts per place.
    """
    holds = redundant_places(replica, np.full(len(replica.origins), per_place))
    share = replica.copies.sum(0) // holds.sum(1)
    helps = holds  # less the homes, which are taken out in place
    helps[np.arange(len(holds)), replica.load.home] = False
    return from_tables(replica, np.where(helps, share[:, None], 0))


def redundant_places(replica: ReplicaLoad, room: np.ndarray) -> np.ndarray:
    """Return which places hold each expert, as its home or as a redundant expert, (num_experts, ep)
    bool.

    Args:
        room: (ep,), number of redundant experts that each place may hold.
    """
    loads = replica.copies.sum(0)
    num_experts = len(loads)
    home = replica.load.home
    ep = len(replica.origins)
    num_replicas = replicas_by_load(loads, num_experts + int(room.sum()), ep)
    share = loads / num_replicas

    room_left = room.copy()
    holds = np.zeros((num_experts, ep), dtype=bool)
    holds[np.arange(num_experts), home] = True
    place_loads = np.bincount(home, share, ep)
    # each expert as often as it has redundant replicas, those with the largest shares first
    redundant_experts = np.repeat(np.arange(num_experts), num_replicas - 1)
    for expert in redundant_experts[np.argsort(-share[redundant_experts], kind="stable")]:
        free = (room_left > 0) & ~holds[expert]
        if free.any():
            place = int(np.where(free, place_loads, np.inf).argmin())
            holds[expert, place] = True
            place_loads[place] += share[expert]
            room_left[place] -= 1
    return holds


def replicas_by_load(loads: np.ndarray, slots: int, ep: int) -> np.ndarray:
    """Return the number of replicas of each expert, (num_experts,) int64.

    Every expert has one; each further replica goes to the expert with the largest load per replica.

    Args:
        loads: (num_experts,), the copies of each expert.
        slots: number of replicas that all places together may hold.
        ep: number of places; no place holds an expert twice.
    """
    num_replicas = np.ones(len(loads), dtype=np.int64)
    for _ in range(slots - len(loads)):
        # -1 for an expert that all places hold
        load_per_replica = np.where(num_replicas < ep, loads / num_replicas, -1.0)
        if load_per_replica.max() <= 0:  # no expert with copies may have another one
            break
        num_replicas[int(load_per_replica.argmax())] += 1
    return num_replicas


def from_tables(replica: ReplicaLoad, moved: np.ndarray) -> Replications:
    """Return the replications, with origins, that give each helper its copies; a helper's own
    copies are taken first.

    Args:
        replica: the load of one replica of the experts.
        moved: (num_experts, ep) int64, copies of each expert that each place computes as a helper.
    """
    experts = np.flatnonzero(moved.any(1))
    return from_origins(
        replica, replica.copies, experts, np.arange(len(replica.origins)), moved[experts]
    )
