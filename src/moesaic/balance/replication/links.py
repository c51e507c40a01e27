"""Where the ranks of a mesh are, and what bytes between them take of each link: rates per pair, and links that several share.

A replication policy asks at every call for many candidates, so routing is done once per cluster and mesh, and a candidate costs
a product of a matrix with the bytes that places exchange.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations, product

import numpy as np

from moesaic.cost.alpha_beta import Machine
from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.topology import Topology
from moesaic.program.grid import Grid
from moesaic.program.passes.replicate import relays


def ranks_by_place(grid: Grid) -> np.ndarray:
    """Return the rank of each shard of each place of ep of each copy of the experts, (edp, ep, etp) int64."""
    found = np.empty((grid.edp, grid.ep, grid.etp), dtype=np.int64)
    for rank in range(grid.world):
        found[tuple(grid.coordinate(rank, axis) for axis in ("edp", "ep", "etp"))] = rank
    return found


def nodes_of(grid: Grid) -> np.ndarray:
    """Return the node of each rank, (world,) int64."""
    return np.array([grid.node_of(rank) for rank in range(grid.world)])


def seconds_per_byte(machine: Machine, node: np.ndarray, node_links: tuple[float, ...] = ()) -> np.ndarray:
    """Return the seconds of a byte from each place to each other one, (places, places); nothing within one.

    Args:
        machine: rates of one rank.
        node: (places,) the node of each.
        node_links: of each node's link to the others, over the machine's, of which the slower end counts; () for all alike.
    """
    link = np.array(node_links or (1.0,))[node % len(node_links or (1.0,))]
    between = machine.inter_gbps * np.minimum(link[:, None], link[None, :])
    gbps = np.where(node[:, None] == node[None, :], machine.intra_gbps, between)
    seconds: np.ndarray = 8 / (gbps * 1e9) * (1 - np.eye(len(node)))
    return seconds


@lru_cache(maxsize=64)
def links_of_places(
    cluster: ClusterSpec, grid: Grid, places: tuple[tuple[int, ...], ...], *, weights: bool
) -> np.ndarray:
    """Return the seconds that a byte from place to place takes of each link, (ep, ep, links).

    Args:
        cluster: the links.
        grid: the mesh.
        places: ranks by place of ep.
        weights: each shard sends its own, a byte of each; else a byte of rows, which every origin has a part of and which goes
            to all shards.

    Raises:
        InputError: if the mesh does not fit the cluster.
    """
    topology = Topology(cluster, grid.world, grid.ranks_per_node)
    found = np.zeros((len(places), len(places), topology.num_links))
    one, no_message = np.ones(1), np.zeros(1)
    for i, j in permutations(range(len(places)), 2):
        pairs = zip(places[i], places[j]) if weights else product(places[i], places[j])
        for source, target in pairs:
            load = topology.loads(np.array([source]), np.array([target]), one, no_message)
            found[i, j, load.links] += load.seconds / (1 if weights else len(places[i]))
    return found


@lru_cache(maxsize=64)
def relays_of(grid: Grid, places: tuple[tuple[int, ...], ...]) -> np.ndarray | None:
    """Return the place by which the weights of each home come to each helper, (home, helper) int64; None where by none.

    Args:
        grid: the mesh.
        places: ranks by place of ep.
    """
    if not relays(grid):
        return None
    via = np.zeros((len(places), len(places)), dtype=np.int64)
    for home, helper in product(range(len(places)), repeat=2):
        rails = grid.group(places[home][0], ("node",))
        mates = set(grid.group(places[helper][0], ("local",)))
        via[home, helper] = next(grid.coordinate(rank, "ep") for rank in rails if rank in mates)
    return via
