"""The rates that policies use, read from the cluster or profile that a run names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Machine, read_cluster
from moesaic.planner.compute import rates_of
from moesaic.planner.profile import read_profile
from moesaic.planner.profile_simulate import profiled_simulator
from moesaic.planner.simulate import Simulator
from moesaic.planner.topology import Topology
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid

PROBE_BYTES = 1 << 20
"""Size of the simulated messages from which the rates of links are derived."""


def simulator_of(cluster: str, world: int, per_node: int) -> Simulator:
    """Return the simulator of the cluster that a run names.

    Args:
        cluster: a preset, a description that ends in .toml, or a profile of `moesaic profile` that ends in .json.
        world: number of ranks of the run.
        per_node: number of ranks per node.

    Raises:
        InputError: if the cluster's nodes do not have `per_node` devices.
    """
    nodes = world // per_node
    if is_measured(cluster):
        simulator = profiled_simulator(read_profile(Path(cluster), any_machine=True), nodes=nodes)
    else:
        simulator = Simulator(read_cluster(cluster, nodes=nodes))
    devices = simulator.cluster.devices_per_node
    if devices != per_node:
        raise InputError(
            f"planner.cluster={cluster} has nodes of {devices} devices, this run {per_node} ranks on a node: choose a cluster "
            "of such nodes, or set mesh.ranks_per_node"
        )
    return simulator


def is_measured(cluster: str) -> bool:
    """Return whether a run's cluster is a file written by `moesaic profile`, and not a preset or a description."""
    return cluster.endswith(".json")


def machine_of(spec: ClusterSpec, grid: Grid, layer: Workload) -> Machine:
    """Return the rates that each rank gets while all ranks exchange, and the rate of products of the layer's size.

    Args:
        spec: the cluster.
        grid: the mesh.
        layer: the sizes of a layer.

    Raises:
        InputError: if the mesh does not fit the cluster, or the rate of the layer's dtype is not known.
    """
    topology = Topology(spec, grid.world, grid.ranks_per_node)
    ranks = np.arange(grid.world)
    source, target = (table.reshape(-1) for table in np.meshgrid(ranks, ranks, indexing="ij"))
    inside = (source // topology.ranks_per_node == target // topology.ranks_per_node) & (source != target)
    across = source // topology.ranks_per_node != target // topology.ranks_per_node
    default = Machine()
    near = _rate(topology, source[inside], target[inside]) or (default.intra_gbps, default.intra_latency_us)
    far = _rate(topology, source[across], target[across]) or (default.inter_gbps, default.inter_latency_us)
    rates = rates_of(spec, layer.dtype)
    rows = np.array([max(1.0, grid.dp * layer.copies / layer.num_experts / grid.edp)])
    flops = 2.0 * layer.matrices * layer.dim * layer.hidden / grid.etp
    seconds = float(rates.product_seconds(rows, flops, 0.0)[0])
    return Machine(
        intra_gbps=near[0],
        inter_gbps=far[0],
        intra_latency_us=near[1] + spec.host.message_us,
        inter_latency_us=far[1] + spec.host.message_us,
        tflops=float(rows[0]) * flops / seconds / 1e12,
        memory_gbps=rates.memory * 8 / 1e9,
    )


def _rate(topology: Topology, source: np.ndarray, target: np.ndarray) -> tuple[float, float] | None:
    """Return the Gbit/s of a rank, and the microseconds per message, if all pairs send at once; None without pairs."""
    if not len(source):
        return None
    ones = np.ones(len(source))
    messages = int(np.bincount(source).max())
    one, two = (topology.loads(source, target, ones * size, ones) for size in (PROBE_BYTES, 2 * PROBE_BYTES))
    seconds = (float(two.seconds.max()) - float(one.seconds.max())) / messages
    start = max(0.0, float(one.seconds.max()) / messages - seconds) + one.latency / messages
    return PROBE_BYTES * 8 / seconds / 1e9, start * 1e6
