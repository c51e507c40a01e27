"""LAER-MoE's re-layout (ASPLOS 2026, section 4): each place computes so many experts, whichever they are; to compare with.

Its experts are fully sharded over all ranks and restored for every call, so where an expert is computed is decided anew each
time: experts get replicas in proportion to their load, the heaviest replicas go to the least loaded places with room, and a
token goes to a replica on its own node where there is one, evenly if there are several, else evenly to all. Here weights come
from the experts' homes, and a place that computes an expert of its own fetches nothing; the busiest home sends more than one
shard would. LAER-MoE decides from the call before; here it sees the call's own counts.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.eplb import replicas_by_load
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import Replications

ROOM = 2
"""Experts that a place may compute, over those that it is the home of; all of the places' room is used."""


class LAER(AbstractReplicaPolicy):
    """A layout of experts per call."""

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
    """Return which places compute each expert, (num_experts, ep) bool; every expert has one at least.

    Args:
        loads: (num_experts,) copies of each expert.
        home: (num_experts,) the place of each, which wins among equally loaded ones.
        ep: places.
        room: experts that each may compute.
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
