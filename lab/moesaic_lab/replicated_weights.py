"""What it gains to send replicated weights to each node once: by the policies' model, and by simulation of the programs.

For each cluster and load, `Shadow` decides with weights that go straight to every helper, and with weights that each node gets
once; both programs, forward and backward, are then simulated with the same counts, and so is the plan without
replication. Ratios are plain over replication: above 1, replication gains.

    moesaic bench replicated_weights --json benchmarks/results/replicated_weights.json
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicationCosts, replica_loads
from moesaic.balance.replication.shadow import Shadow
from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.cluster_file import read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.order import ORDERS
from moesaic.program.passes.replicate import replicate
from moesaic.program.sizes import CallSizes, LayoutIndex
from moesaic.program.task import Program
from moesaic.program.transpose import transpose
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, no_claims, once, same

NOTES = (
    "Time without replication over time with it, forward and backward of one layer: by the policies' closed form, and by "
    "simulating the programs. straight: weights go from the home to every helper; by node: once to each node, on from there."
)


@dataclass(frozen=True, kw_only=True)
class ReplicatedWeightsOptions(BenchmarkOptions):
    """What to compare."""

    clusters: tuple[str, ...] = ("100gbe", "25gbe", "dgx-h100", "fastermoe-trevor")
    """Presets or files."""
    nodes: tuple[int, ...] = (2, 4)
    tokens: int = 4096
    """Per rank, two experts each."""
    dim: int = 1024
    hidden: int = 2816


@dataclass(frozen=True, kw_only=True)
class ReplicationRow:
    """One load on one cluster; speeds are over the plan without replication."""

    cluster: str
    ranks: int
    load: str
    straight_model: float
    straight_simulated: float
    straight_sends: int
    by_node_model: float
    by_node_simulated: float
    by_node_sends: int


def loads(grid: Grid, options: ReplicatedWeightsOptions) -> dict[str, np.ndarray]:
    """Return (world, num_experts) copies: one hot expert, by MaxVio per rank, and Zipf's law."""
    rng, num_experts = np.random.default_rng(0), 2 * grid.ep
    found = {}
    for max_violation in (0, 2, 4):
        hot = min(1.0, (1 + max_violation) / grid.ep)
        shares = np.full(num_experts, (1 - hot) / (num_experts - 2))
        shares[:2] = (hot, 0.0) if max_violation else (hot / 2, hot / 2)
        found[f"MaxVio {max_violation}"] = shares
    zipf = 1 / np.arange(1, num_experts + 1)
    found["Zipf 1"] = rng.permutation(zipf / zipf.sum())
    return {name: rng.multinomial(2 * options.tokens, shares, size=grid.world) for name, shares in found.items()}


def seconds(
    program: Program,
    cluster: ClusterSpec,
    workload: Workload,
    grid: Grid,
    load: CallLoad,
    replicated: np.ndarray | None,
) -> float:
    """Return the simulated forward and backward pass of a program, before it is ordered."""
    shapes = LayoutIndex(grid, load.num_experts, replicates=replicated is not None)
    sizes = CallSizes(grid, load.copies, load.copies.sum(1), replicated=replicated, units=load.units, shapes=shapes)
    simulator = Simulator(cluster)
    ordered = (ORDERS["optsche"](each, None) for each in (program, transpose(program)))
    return sum(simulator.run(each, workload, grid, sizes=sizes).seconds for each in ordered)


def compare(name: str, nodes: int, options: ReplicatedWeightsOptions) -> list[ReplicationRow]:
    """Return the rows of one cluster."""
    cluster = read_cluster(name, nodes=nodes)
    grid = Grid(world=cluster.world, ep=cluster.world, ranks_per_node=cluster.devices_per_node)
    workload = Workload(
        tokens=options.tokens, dim=options.dim, hidden=options.hidden, num_experts=2 * grid.ep, top_k=2, dtype="bf16"
    )
    plain, rows = SCHEDULES["s1"](False), []
    for label, copies in loads(grid, options).items():
        load = CallLoad(grid, copies, workload.num_experts, options.hidden, options.dim)
        without = seconds(plain, cluster, workload, grid, load, None)
        found: list[float] = []
        for relays in (False, True):
            costs = ReplicationCosts(cluster=cluster, relays=relays)
            replicated = Shadow(costs).decide(load)
            (replica,) = replica_loads(load, costs)
            model = replica.seconds(np.zeros_like(replicated)) / replica.seconds(replicated)
            program = replicate(plain, 1, grid if relays else None) if replicated.any() else plain
            simulated = seconds(program, cluster, workload, grid, load, replicated if replicated.any() else None)
            found += [model, without / simulated, int((replicated.sum(0) > 0).sum())]
        names = list(ReplicationRow.__dataclass_fields__)
        rows.append(ReplicationRow(**dict(zip(names, (name, grid.world, label, *found)))))  # type: ignore[arg-type]
    return rows


def measure(options: ReplicatedWeightsOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Compare on every cluster."""
    found: list[dict[str, Any]] = []
    for name, nodes in itertools.product(options.clusters, options.nodes):
        told(f"{nodes} nodes of {name}")
        found += map(asdict, compare(name, nodes, options))
    return found


BENCHMARK = Benchmark(
    name="replicated_weights", description="Compare replicating weights straight and once per node, simulated.",
    options=ReplicatedWeightsOptions, notes=NOTES, cases=once, measure=measure, rows=same, claims=no_claims,
    columns=(Shown(title="Replicated weights"),), packages=("numpy",),
)  # fmt: skip
