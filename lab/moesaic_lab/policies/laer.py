"""LAER-MoE's re-layout (ASPLOS 2026, section 4), a baseline: each place computes a fixed number of
experts, chosen per call.

In LAER-MoE, experts are fully sharded over all ranks and gathered for every call, so each call may
compute an expert on different ranks. Experts get replicas in proportion to their load, and the
heaviest replicas go to the least loaded places with room. The copies of a token are split evenly
over the replicas on its own node or, if it has none, over all replicas.

Here weights come from the experts' homes. A place fetches nothing for its own experts, but the
busiest home sends more than a shard would. LAER-MoE decides from the counts of the previous call;
this policy sees the counts of the call itself.

Places are the positions along ep (the ranks, without etp and replicas); an origin is the place that
sends copies; an expert's home is the place that owns it.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.eplb import replicas_by_load
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.program.replications import Replications

ROOM = 2
"""Experts that a place computes, relative to the number of experts of which it is the home. All
room is used."""


class LAERLayout(AbstractReplicaPolicy):
    """A policy that chooses a new layout of the experts for every call."""

    def replicated(self, replica: ReplicaLoad) -> Replications:
        """Return the copies that are computed away from the homes of their experts."""
        ep = len(replica.origins)
        home = replica.load.home
        room = ROOM * (len(home) // ep)
        holds = layout(replica.copies.sum(0), home, ep, room)
        nodes = replica.links.nodes
        same_node = nodes[:, None] == nodes[None, :]

        # (origin, expert, place): the replicas on the origin's node, or all if it has none
        near = holds[None] & same_node[:, None, :]
        receives = np.where(near.any(2, keepdims=True), near, holds[None])

        # an even split, in which the first replicas get the remainder, one copy each
        num_replicas = receives.sum(2, keepdims=True)
        share, remainder = np.divmod(replica.copies[:, :, None], num_replicas)
        order = np.cumsum(receives, axis=2) - 1
        gets_one_more = order < remainder
        table = np.where(receives, share + gets_one_more, 0)
        table[:, np.arange(len(home)), home] = 0  # copies at home are no replication
        return Replications.of(table)


def layout(loads: np.ndarray, home: np.ndarray, ep: int, room: int) -> np.ndarray:
    """Return which places compute each expert, (num_experts, ep) bool; every expert has at least
    one place.

    Args:
        loads: (num_experts,), the copies of each expert.
        home: (num_experts,), the home of each expert, which wins among equally loaded places.
        ep: number of places.
        room: number of experts that each place may compute.
    """
    num_replicas = replicas_by_load(loads, room * ep, ep)
    share = loads / num_replicas
    replicas = np.repeat(np.arange(len(loads)), num_replicas)
    heaviest_first = replicas[np.argsort(-share[replicas], kind="stable")]
    holds = np.zeros((len(loads), ep), dtype=bool)
    place_loads = np.zeros(ep)
    room_left = np.full(ep, room)
    for expert in heaviest_first:
        free = (room_left > 0) & ~holds[expert]
        if free.any():
            free_loads = np.where(free, place_loads, np.inf)
            place = int(free_loads.argmin())
            if free_loads[home[expert]] <= free_loads.min():
                place = int(home[expert])
            holds[expert, place] = True
            place_loads[place] += share[expert]
            room_left[place] -= 1
    nowhere = np.flatnonzero(~holds.any(1))
    holds[nowhere, home[nowhere]] = True
    return holds
