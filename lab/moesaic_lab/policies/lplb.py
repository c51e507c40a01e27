"""LPLB's linear program (DeepSeek, published as source code), a baseline: tokens flow along fixed
edges to redundant experts.

A topology fixes which places help each other: each place holds redundant experts of given other
places, the heaviest ones of those. A linear program then chooses how many copies flow along each
edge, up to the expert's copies in this call, to minimise the load of the busiest place. LPLB's
solver runs on the device in about 100 microseconds; this one is HiGHS through scipy, on the host.
LPLB counts only tokens, so weights and links cost nothing here either.

Places are the positions along ep. An expert's home is the place that owns it; each place owns
equally many, with consecutive numbers.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.eplb import from_tables
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.program.replications import NOTHING, Replications


class LPLB(AbstractReplicaPolicy):
    """A policy with flows along a torus: each place helps a neighbour in its node and a place on
    the next node."""

    def replicated(self, replica: ReplicaLoad) -> Replications:
        """Return the copies that are computed away from the homes of their experts."""
        loads = replica.copies.sum(0)
        home = replica.load.home
        ep = len(replica.origins)
        heaviest_first = np.argsort(-loads.reshape(ep, -1), axis=1, kind="stable")
        experts_per_place = heaviest_first.shape[1]
        edges: list[tuple[int, int]] = []  # (expert, place that helps its home)
        # the first redundant expert of a place is the heaviest of the place that it helps, the
        # second one is the second heaviest
        for number, helped in enumerate(torus(replica.links.nodes)[:experts_per_place]):
            redundant = helped * experts_per_place + heaviest_first[helped, number]
            for place, each in enumerate(redundant):
                if helped[place] != place and loads[each]:
                    edges.append((int(each), place))
        if not edges:
            return NOTHING
        expert, helper = np.array(edges).T
        place_loads = np.bincount(home, loads, ep)
        flow = least_busiest_flow(place_loads, home[expert], helper, loads[expert])
        moved = np.zeros((len(loads), ep), dtype=np.int64)
        moved[expert, helper] = flow
        return from_tables(replica, moved)


def torus(nodes: np.ndarray) -> list[np.ndarray]:
    """Return two arrays, (ep,) int64 each, of the places of which each place holds redundant
    experts: the place before it in its node, and the place at the same position of the next node;
    itself where there is no other.

    Args:
        nodes: (ep,), the node of each place.
    """
    places = np.arange(len(nodes))
    inside = places.copy()
    across = places.copy()
    groups = [places[nodes == node] for node in np.unique(nodes)]
    for number, group in enumerate(groups):
        inside[group] = np.roll(group, 1)
        next_group = groups[(number + 1) % len(groups)]
        # nodes may have different numbers of places
        across[group] = next_group[np.arange(len(group)) % len(next_group)]
    return [inside, across]


def least_busiest_flow(
    loads: np.ndarray, source: np.ndarray, target: np.ndarray, most: np.ndarray
) -> np.ndarray:
    """Return the copies that flow along each edge, (edges,) int64, to minimise the load of the
    busiest place.

    Args:
        loads: (places,), the copies of each place before the flow.
        source, target: (edges,), the places that each edge joins.
        most: (edges,), the most copies that may flow along each edge. Edges share no limit, since
            each has its own expert.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    scale = max(float(loads.max()), 1.0)  # the solver gets numbers near 1
    num_edges = len(most)
    num_places = len(loads)
    # Variables: the flow along each edge, and the load of the busiest place. For each place,
    # load - flow out + flow in <= busiest, so - flow out + flow in - busiest <= - load.
    edges = np.arange(num_edges)
    ones = np.ones(num_edges)
    # As a sparse matrix, (places, variables), by the values of its entries, their rows and columns:
    values = np.concatenate([-ones, ones, -np.ones(num_places)])
    row = np.concatenate([source, target, np.arange(num_places)])
    column = np.concatenate([edges, edges, np.full(num_places, num_edges)])
    balance = coo_array((values, (row, column)))
    # the small cost prefers the smallest of equally good flows
    cost = np.append(ones * 1e-6 / num_edges, 1.0)
    limits = [*((0.0, float(each) / scale) for each in most), (0.0, None)]
    solution = linprog(
        cost, A_ub=balance.tocsr(), b_ub=-loads / scale, bounds=limits, method="highs"
    )
    # whole copies; rounding first keeps 2.9999999 from becoming 2
    rounded = np.round(solution.x[:-1] * scale, 6)
    flow: np.ndarray = np.floor(rounded).astype(np.int64)
    return np.clip(flow, 0, most)
