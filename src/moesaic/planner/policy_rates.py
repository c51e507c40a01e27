"""The rates that policies use, read from the cluster that a run names.

"Near" are messages inside nodes and "far" those between nodes. Rates of links are what a rank gets
while all ranks send at once, so links that ranks share are slower for each.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.compute import rates_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.topology import Topology, check_fit
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid, LinkLevel
from moesaic.program.rates import Rates

PROBE_BYTES = 1 << 20
"""Size of the simulated messages from which the rates of links are derived."""


def simulator_of(cluster: str, world: int, per_node: int) -> Simulator:
    """Return the simulator of the cluster that a run names.

    Args:
        cluster: a preset, or a file, such as one that `moesaic profile` wrote.
        world: number of ranks of the run.
        per_node: number of ranks per node.

    Raises:
        InputError: if the cluster's nodes do not have `per_node` devices.
    """
    simulator = Simulator(read_cluster(cluster, nodes=world // per_node))
    devices = simulator.cluster.devices_per_node
    if devices != per_node:
        raise InputError(
            f"planner.cluster={cluster} has nodes of {devices} devices, this run {per_node} ranks "
            "on a node: choose a cluster of such nodes, or set mesh.ranks_per_node"
        )
    return simulator


def seen_by(spec: ClusterSpec, grid: Grid, layer: Workload) -> Rates:
    """Return the rates that each rank gets while all ranks exchange, and the rate of products of
    the layer's size.

    Args:
        spec: the cluster.
        grid: the mesh.
        layer: the sizes of a layer.

    Raises:
        InputError: if the mesh does not fit the cluster, or the rate of the layer's dtype is not
            known.
    """
    topology = Topology(spec, grid.world, grid.ranks_per_node)
    # every pair of ranks
    ranks = np.arange(grid.world)
    source = np.repeat(ranks, grid.world)
    target = np.tile(ranks, grid.world)
    same_node = source // topology.ranks_per_node == target // topology.ranks_per_node
    inside = same_node & (source != target)
    usual = Rates()  # for messages that no two ranks of the mesh exchange
    near_gbps = usual.intra_gbps
    near_latency_us = usual.intra_latency_us
    if inside.any():
        near_gbps, near_latency_us = _rate(topology, source[inside], target[inside])
    far_gbps = usual.inter_gbps
    far_latency_us = usual.inter_latency_us
    if not same_node.all():
        far_gbps, far_latency_us = _rate(topology, source[~same_node], target[~same_node])

    device = rates_of(spec, layer.dtype)
    # the copies of all data-parallel groups, shared by the edp replicas of an expert
    rows_per_expert = max(1.0, grid.dp * layer.copies / layer.num_experts / grid.edp)
    rows = np.array([rows_per_expert])
    flops_per_row = 2.0 * layer.matrices * layer.dim * layer.hidden / grid.etp
    seconds_by_expert = device.product_seconds(rows, flops_per_row, weight_bytes=0.0, grouped=True)
    seconds = float(seconds_by_expert[0])
    return Rates(
        intra_gbps=near_gbps,
        inter_gbps=far_gbps,
        intra_latency_us=near_latency_us + spec.host.message_us,
        inter_latency_us=far_latency_us + spec.host.message_us,
        intra_ranks=_sharing(topology, "inside"),
        inter_ranks=_sharing(topology, "outside"),
        tflops=rows_per_expert * flops_per_row / seconds / 1e12,
        memory_gbps=device.memory * 8 / 1e9,
        speeds=spec.speeds,
        node_links=_node_links(spec),
        expert_us=2 * spec.host.message_us,  # forward and backward
        part_us=3 * spec.host.task_us,  # a part counts as three tasks
        element_bytes=layer.element_bytes,
        matrices=layer.matrices,
    )


def levels_of(cluster: ClusterSpec, grid: Grid) -> tuple[LinkLevel, ...]:
    """Return the levels that follow from a cluster's links, outermost first, without levels that
    limit nothing.

    By FasterMoE's rule a share L = Wn / (M * Wl) of a rank's copies may leave, which keeps the
    shared link busy as long as the rank's own link. Wn is the rate of a link that M ranks share, Wl
    the rate of a rank's own link.

    Args:
        cluster: the cluster that the mesh runs on, with one rank per device.
        grid: the mesh.

    Raises:
        InputError: if mesh and cluster do not fit, or the cluster has no link that belongs to one
            device.
    """
    per_node = check_fit(cluster, grid.world, grid.ranks_per_node)
    own_rates = [
        link.slowest(cluster.nodes)
        for link in cluster.links
        if link.devices == 1 and link.carries != "outside"
    ]
    if not own_rates or per_node != cluster.devices_per_node:
        raise InputError(
            f"topology gate: cluster {cluster.name} on nodes of {per_node} ranks does not give "
            "the rate of a rank's own link: use a rank per device and a link with devices = 1, "
            "or give the levels yourself"
        )
    sized_levels = []  # (ranks of a group, level)
    for link in cluster.links:
        leaves_node = link.carries == "outside" or link.devices >= per_node
        # ranks of the group that messages leave over the link
        size = max(link.devices, per_node) if leaves_node else link.devices
        share = link.slowest(cluster.nodes) / (link.devices * min(own_rates))
        # a shared medium carries messages among its own devices only
        leaves_no_group = link.carries == "inside" or link.shared
        limits_nothing = size == 1 or size >= grid.world or share >= 1
        if leaves_no_group or limits_nothing:
            continue
        group = tuple(rank // size for rank in range(grid.world))  # of each rank
        sized_levels.append((size, LinkLevel(name=link.name, group=group, share=share)))
    sized_levels.sort(key=lambda pair: -pair[0])
    return tuple(level for _, level in sized_levels)


def _node_links(spec: ClusterSpec) -> tuple[float, ...]:
    """Return the rate of each node's link to the others, relative to the slowest one, which bounds
    an even exchange; () if all are equal."""
    levels = [link for link in spec.links if link.carries in ("all", "outside")]
    if not levels:
        return ()
    # the level with the lowest rate for each device
    narrowest = min(levels, key=lambda link: min(link.gbps) / link.devices)
    rates = narrowest.gbps
    # else they are one rate, or those of other links than one per node
    if len(rates) != spec.nodes or len(set(rates)) == 1:
        return ()
    return tuple(rate / min(rates) for rate in rates)


def _sharing(topology: Topology, kind: Literal["inside", "outside"]) -> int:
    """Return how many of a node's ranks share the link that bounds messages inside nodes or between
    them."""
    levels = [link for link in topology.spec.links if link.carries in ("all", kind)]
    if not levels:
        return 1
    # of equally narrow levels the one that most ranks share
    narrowest = min(levels, key=lambda link: (min(link.gbps) / link.devices, -link.devices))
    return min(narrowest.devices, topology.ranks_per_node)


def _rate(topology: Topology, source: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """Return the Gbit/s of a rank, and the microseconds per message, if all pairs of ranks send at
    once; there is at least one pair."""
    ones = np.ones(len(source))
    messages_per_rank = int(np.bincount(source).max())
    # the difference of two sizes is the time of bytes alone
    small = topology.loads(source, target, ones * PROBE_BYTES, messages=ones)
    large = topology.loads(source, target, ones * (2 * PROBE_BYTES), messages=ones)
    small_seconds = float(small.seconds.max())  # of the busiest link
    byte_seconds = (float(large.seconds.max()) - small_seconds) / messages_per_rank
    start_up = max(0.0, small_seconds / messages_per_rank - byte_seconds)
    start_up += small.latency / messages_per_rank
    return PROBE_BYTES * 8 / byte_seconds / 1e9, start_up * 1e6
