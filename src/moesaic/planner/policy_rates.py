"""The rates that policies use, read from the cluster that a run names."""

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
    ranks = np.arange(grid.world)
    source, target = (table.reshape(-1) for table in np.meshgrid(ranks, ranks, indexing="ij"))
    inside = (source // topology.ranks_per_node == target // topology.ranks_per_node) & (
        source != target
    )
    across = source // topology.ranks_per_node != target // topology.ranks_per_node
    usual = Rates()
    near = _rate(topology, source[inside], target[inside]) or (
        usual.intra_gbps,
        usual.intra_latency_us,
    )
    far = _rate(topology, source[across], target[across]) or (
        usual.inter_gbps,
        usual.inter_latency_us,
    )
    device = rates_of(spec, layer.dtype)
    rows = np.array([max(1.0, grid.dp * layer.copies / layer.num_experts / grid.edp)])
    flops = 2.0 * layer.matrices * layer.dim * layer.hidden / grid.etp
    seconds = float(device.product_seconds(rows, flops, 0.0, grouped=True)[0])
    return Rates(
        intra_gbps=near[0],
        inter_gbps=far[0],
        intra_latency_us=near[1] + spec.host.message_us,
        inter_latency_us=far[1] + spec.host.message_us,
        intra_ranks=_sharing(topology, "inside"),
        inter_ranks=_sharing(topology, "outside"),
        tflops=float(rows[0]) * flops / seconds / 1e12,
        memory_gbps=device.memory * 8 / 1e9,
        speeds=spec.speeds,
        node_links=_node_links(spec),
        expert_us=2 * spec.host.message_us,
        part_us=3 * spec.host.task_us,
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
    sized_levels = []
    for link in cluster.links:
        leaves_node = link.carries == "outside" or link.devices >= per_node
        size = max(link.devices, per_node) if leaves_node else link.devices
        share = link.slowest(cluster.nodes) / (link.devices * min(own_rates))
        if link.carries == "inside" or link.shared or size >= grid.world or size == 1 or share >= 1:
            continue
        group = tuple(rank // size for rank in range(grid.world))
        sized_levels.append((size, LinkLevel(name=link.name, group=group, share=share)))
    return tuple(level for _, level in sorted(sized_levels, key=lambda pair: -pair[0]))


def _node_links(spec: ClusterSpec) -> tuple[float, ...]:
    """Return the rate of each node's link to the others, relative to the slowest one, which bounds
    an even exchange."""
    levels = [link for link in spec.links if link.carries in ("all", "outside")]
    rates = min(levels, key=lambda link: min(link.gbps) / link.devices).gbps if levels else ()
    return (
        tuple(rate / min(rates) for rate in rates)
        if len(set(rates)) > 1 and len(rates) == spec.nodes
        else ()
    )


def _sharing(topology: Topology, kind: Literal["inside", "outside"]) -> int:
    """Return how many of a node's ranks share the link that bounds messages inside nodes or between
    them."""
    levels = [link for link in topology.spec.links if link.carries in ("all", kind)]
    if not levels:
        return 1
    narrowest = min(levels, key=lambda link: (min(link.gbps) / link.devices, -link.devices))
    return min(narrowest.devices, topology.ranks_per_node)


def _rate(topology: Topology, source: np.ndarray, target: np.ndarray) -> tuple[float, float] | None:
    """Return the Gbit/s of a rank, and the microseconds per message, if all pairs send at once;
    None without pairs."""
    if not len(source):
        return None
    ones = np.ones(len(source))
    messages = int(np.bincount(source).max())
    one, two = (
        topology.loads(source, target, ones * size, ones) for size in (PROBE_BYTES, 2 * PROBE_BYTES)
    )
    seconds = (float(two.seconds.max()) - float(one.seconds.max())) / messages
    start = max(0.0, float(one.seconds.max()) / messages - seconds) + one.latency / messages
    return PROBE_BYTES * 8 / seconds / 1e9, start * 1e6
