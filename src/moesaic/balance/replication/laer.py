"""LAER-MoE's re-layout (ASPLOS 2026, section 4), a baseline: each place computes a fixed number of experts, chosen per call.

In LAER-MoE, experts are fully sharded over all ranks and gathered for every call, so each call may compute an expert on
different ranks. Experts get replicas in proportion to their load, and the heaviest replicas go to the least loaded places with
room. The copies of a token are split evenly over the replicas on its own node or, if it has none, over all replicas.

Here weights come from the experts' homes. A place fetches nothing for its own experts, but the busiest home sends more than a
shard would. LAER-MoE decides from the counts of the previous call; this policy sees the counts of the call itself.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.eplb import replicas_by_load
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import Replications

ROOM = 2
"""Experts that a place computes, relative to the number of experts of which it is the home. All room is used."""


class LAER(AbstractReplicaPolicy):
    """A policy that chooses a new layout of the experts for every call."""

    def replicated(self, replica: ReplicaLoad) -> Replications:
        ep, home = len(replica.origins), replica.load.home
        holds = layout(replica.copies.sum(0), home, ep, ROOM * (len(home) // ep))
        nodes = replica.links.nodes
        near = nodes[:, None] == nodes[None, :]
        goes = holds[None] & near[:, None, :]  # (origin, expert, place): replicas on the origin's node
        goes = np.where(goes.any(2, keepdims=True), goes, holds[None])
        number = goes.sum(2, keepdims=True)
        order = np.cumsum(goes, axis=2) - 1
        part, rest = np.divmod(replica.copies[:, :, None], number)
        table = np.where(goes, part + (order < rest), 0)
        table[:, np.arange(len(home)), home] = 0
        return Replications.of(table)


def layout(loads: np.ndarray, home: np.ndarray, ep: int, room: int) -> np.ndarray:
    """Return which places compute each expert, (num_experts, ep) bool; every expert has at least one place.

    Args:
        loads: (num_experts,), the copies of each expert.
        home: (num_experts,), the home of each expert, which wins among equally loaded places.
        ep: number of places.
        room: number of experts that each place may compute.
    """
    held = replicas_by_load(loads, room * ep, ep)
    share, replicas = loads / held, np.repeat(np.arange(len(loads)), held)
    holds, busy, left = np.zeros((len(loads), ep), dtype=bool), np.zeros(ep), np.full(ep, room)
    for expert in replicas[np.argsort(-share[replicas], kind="stable")]:
        free = (left > 0) & ~holds[expert]
        if free.any():
            at = np.where(free, busy, np.inf)
            place = int(home[expert]) if at[home[expert]] <= at.min() else int(at.argmin())
            holds[expert, place] = True
            busy[place] += share[expert]
            left[place] -= 1
    nowhere = np.flatnonzero(~holds.any(1))
    holds[nowhere, home[nowhere]] = True
    return holds
