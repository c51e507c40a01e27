"""LPLB's linear program (DeepSeek, published with its source): tokens flow along fixed edges to redundant experts.

Who may help whom is fixed: a topology says of which place each place holds redundant experts, the heaviest ones of that place.
How many copies flow along each of these edges, no more than the expert has in this call, is the solution of a linear program:
the least load of the busiest place. LPLB's solver runs on the device in about 100 microseconds; this one is HiGHS through
scipy, on the host. LPLB counts tokens alone, so weights and links cost nothing here either. Kept to be compared with.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.eplb import from_tables
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import NOTHING, Replications


class LPLB(AbstractReplicaPolicy):
    """Flows along a torus: each place helps its neighbour in the node, and its mate on the next node."""

    def replicated(self, replica: ReplicaLoad) -> Replications:
        loads, home, ep = replica.copies.sum(0), replica.load.home, len(replica.origins)
        edges = []
        for number, helped in enumerate(torus(replica.links.nodes)):
            by_weight = np.argsort(-loads.reshape(ep, -1), axis=1, kind="stable")
            if number < by_weight.shape[1]:  # redundant expert j is the j-th heaviest of its place
                expert = helped * by_weight.shape[1] + by_weight[helped, number]
                edges += [(int(e), place) for place, e in enumerate(expert) if helped[place] != place and loads[e]]
        if not edges:
            return NOTHING
        expert, helper = np.array(edges).T
        flow = least_busiest_flow(np.bincount(home, loads, ep), home[expert], helper, loads[expert])
        moved = np.zeros((len(loads), ep), dtype=np.int64)
        moved[expert, helper] = flow
        return from_tables(replica, moved)


def torus(nodes: np.ndarray) -> list[np.ndarray]:
    """Return the place that each place holds redundant experts of, (ep,) int64: a neighbour in its node, a mate on the next.

    Args:
        nodes: (ep,) the node of each place.
    """
    places = np.arange(len(nodes))
    inside, across = places.copy(), places.copy()
    groups = [places[nodes == node] for node in np.unique(nodes)]
    for number, group in enumerate(groups):
        inside[group] = np.roll(group, 1)
        following = groups[(number + 1) % len(groups)]
        across[group] = following[np.arange(len(group)) % len(following)]
    return [inside, across]


def least_busiest_flow(loads: np.ndarray, source: np.ndarray, target: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Return the copies that flow along each edge, (edges,) int64, so that the busiest place has as few as can be.

    Args:
        loads: (places,) copies that each place has.
        source, target: (edges,) places.
        most: (edges,) copies that may flow; edges that share an expert share no limit, since each has an expert of its own.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    edges, scale = np.arange(len(most)), max(float(loads.max()), 1.0)
    ones = np.ones(len(most))
    row = np.concatenate([source, target, np.arange(len(loads))])
    column = np.concatenate([edges, edges, np.full(len(loads), len(most))])
    balance = coo_array((np.concatenate([-ones, ones, -np.ones(len(loads))]), (row, column)))
    cost = np.append(ones * 1e-6 / len(most), 1.0)  # of equally good flows the least
    limits = [*((0.0, float(each) / scale) for each in most), (0.0, None)]
    found = linprog(cost, A_ub=balance.tocsr(), b_ub=-loads / scale, bounds=limits, method="highs")
    flow: np.ndarray = np.floor(np.round(found.x[:-1] * scale, 6)).astype(np.int64)
    return np.clip(flow, 0, most)
