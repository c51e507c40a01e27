"""Candidate plans for a plan table on a given mesh, and their simulated step times by load.

If the cluster is described or was measured, the candidates are the plans with the shortest
simulated steps. If nothing is known, they are the plans that would be best on slow, usual and fast
links, so that the best plan is likely to be among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from moesaic.planner.candidates import Pins
from moesaic.planner.cluster import ClusterSpec, Device, Host, Link, Tflops
from moesaic.planner.job import Job, job_of
from moesaic.planner.loads import simulate_counts, simulate_even
from moesaic.planner.policy_rates import simulator_of
from moesaic.planner.search import (
    GIVE_UP,
    LOSSLESS,
    REFINED,
    Result,
    Settings,
    search,
    search_recomputing,
)
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.shapes import ModelShape, MoEShape

APART = 64
"""Largest number of ranks for which uneven loads are simulated; on more ranks every load is
predicted as an even one."""
GBPS = {True: (0.2, 2.0, 20.0), False: (25.0, 100.0, 400.0)}
"""Assumed rates of the link of a node if none is known, for nodes that compute on CPUs (True) and
on GPUs (False)."""
INSIDE = 4.0
"""Assumed ratio of the rate of links inside nodes to that of links between nodes."""
CPU = Device(
    tflops=Tflops(fp32=0.05, fp64=0.025, bf16=0.01),
    memory_gib=8.0,
    memory_gigabytes_per_second=5.0,
    gemm_rows=(1, 8, 32, 128),
    gemm_share=(0.1, 0.5, 0.85, 1.0),
)
"""Assumed device: one process with one thread on a server core."""
GPU = Device(
    tflops=Tflops(fp64=10.0, fp32=40.0, bf16=200.0),
    memory_gib=80.0,
    memory_gigabytes_per_second=1500.0,
)
"""Assumed GPU."""
ENDLESS_GIB = 1e6
"""Memory of an assumed device: unlimited, since the model runs already."""


class Predictor:
    """Predicts the seconds of a step under each candidate plan by simulation, as a function of the
    load.

    Args:
        job: the training job.
        cluster: the cluster.
        grid: the mesh.
        plans: the candidates.
        simulator: a simulator of this cluster that has computed its layers before; None for a new
            one.

    Raises:
        InputError: if a plan does not fit the mesh.
    """

    def __init__(
        self,
        job: Job,
        cluster: ClusterSpec,
        grid: Grid,
        plans: Sequence[Plan],
        *,
        simulator: Simulator | None = None,
    ) -> None:
        self.plans = tuple(plans)
        self._simulator = simulator or Simulator(cluster)
        self._cost_model = StepCostModel(job.step_model(cluster, grid.dp), grid, self._simulator)
        self._compiled = [compile_plan(plan, grid) for plan in self.plans]

    @classmethod
    def of(
        cls, config: dict[str, Any], grid: Grid, first: Plan, *, cluster: str, plans: int
    ) -> Predictor:
        """Search the candidates for a run.

        Args:
            config: configuration of the run, as a table.
            grid: mesh of the run.
            first: the configured plan, which becomes the first candidate.
            cluster: name or file of the cluster, as for `simulator_of`.
            plans: number of other candidates.

        Raises:
            InputError: if the cluster has nodes of another size than the mesh, or if the search
                finds no plan.
        """
        simulator = simulator_of(cluster, grid.world, grid.ranks_per_node or grid.world)
        described = simulator.cluster
        job = job_of(config, source="planner")
        # codecs of the configured plan, and none; each once
        codecs = tuple(dict.fromkeys((first.codec, "none")))
        backward_codecs = tuple(dict.fromkeys((first.backward_codec, "none")))
        space = replace(LOSSLESS, codecs=codecs, backward_codecs=backward_codecs)
        settings = Settings(space=space, pins=_pins(grid), keep=plans + 1)
        result = search(job, described, settings, simulator=simulator)
        others = [each.plan for each in result.ranking if each.plan != first]
        return cls(job, described, grid, [first, *others[:plans]], simulator=simulator)

    def __call__(self, load: float) -> list[float]:
        """Return the seconds of a step under each plan.

        Args:
            load: number of copies that the busiest expert gets from all data-parallel groups; the
                other experts share the remaining copies evenly.
        """
        cost_model = self._cost_model
        step_seconds = []
        layer = cost_model.model.layer
        counts = hot_counts(load, cost_model.grid.dp, layer)
        for compiled in self._compiled:
            if cost_model.grid.world <= APART:
                forward, backward = simulate_counts(self._simulator, compiled, layer, counts)
            else:
                forward, backward = simulate_even(self._simulator, compiled, layer)
            step_seconds.append(cost_model.estimate(forward, backward).seconds)
        return step_seconds


def assumed_plans(job: Job, grid: Grid, first: Plan, *, plans: int, on_cpu: bool) -> list[Plan]:
    """Return plans to time on a mesh with unknown links: `first`, and the best plans for each of
    several assumed rates.

    They are lossless and have r of at least 1, so that no rank gathers weights of experts that it
    does not store a shard of. Memory is taken to be unlimited. Orders are compared for these plans
    only.

    Args:
        job: the training job.
        grid: its mesh.
        first: the first plan.
        plans: number of other plans.
        on_cpu: whether the ranks compute on CPUs.

    Raises:
        InputError: if the search finds no plan.
    """
    # values of r: the divisors of etp below etp, but not 0
    shards = tuple(r for r in range(1, grid.etp) if grid.etp % r == 0)
    space = replace(LOSSLESS, gather_weights=shards, orders=LOSSLESS.orders[:1])
    settings = Settings(space=space, pins=_pins(grid), keep=plans + 1)
    clusters = [assumed_cluster(grid, gbps, on_cpu=on_cpu) for gbps in GBPS[on_cpu]]
    rankings = [search(job, cluster, settings).ranking for cluster in clusters]

    # the best plan on each cluster, then the second ones, and so on; each where it ranks first
    cluster_of: dict[Plan, ClusterSpec] = {}
    for place in range(max(len(ranking) for ranking in rankings)):
        for ranking, cluster in zip(rankings, clusters):
            if place < len(ranking) and ranking[place].plan != first:
                cluster_of.setdefault(ranking[place].plan, cluster)
    others = list(cluster_of)[:plans]
    return [first, *(_in_best_order(plan, job, grid, cluster_of[plan]) for plan in others)]


def _in_best_order(plan: Plan, job: Job, grid: Grid, cluster: ClusterSpec) -> Plan:
    """Return a plan with the order that makes its layers fastest; unchanged if it does not cut them
    into chunks."""
    if plan.chunks == 1:
        return plan
    layer = job.step_model(cluster, grid.dp).layer
    simulator = Simulator(cluster)

    def seconds(plan: Plan) -> float:
        """Return the seconds of a layer under a plan."""
        compiled = compile_plan(plan, grid)
        return simulator.layer_seconds(compiled.forward, compiled.backward, layer, compiled.grid)

    return min((replace(plan, order=order) for order in LOSSLESS.orders), key=seconds)


def find_layouts(
    config: dict[str, Any],
    world: int,
    per_node: int,
    *,
    cluster: str,
    on_cpu: bool,
    most_stages: int,
    may_fly: bool = False,
    gbps: float | None = None,
) -> tuple[Job, Result]:
    """Search the mesh and the plan of a run for a number of ranks, and whether it recomputes
    blocks; the result is the same on every machine.

    Args:
        config: configuration of the run, as a table; its mesh and plan are ignored.
        world: number of ranks.
        per_node: number of ranks per node.
        cluster: name or file of the cluster, as for `simulator_of`; empty to assume usual links and
            unlimited memory.
        on_cpu: whether the ranks compute on CPUs.
        most_stages, may_fly: see `Settings`.
        gbps: measured rate of a node's link in gigabits per second, for an assumed cluster.

    Returns:
        the job that was found best, and its result, with the best plan of each of the best layouts.

    Raises:
        InputError: if no mesh of `world` ranks splits the model and its batch, or if the cluster
            has nodes of another size.
    """
    if cluster:
        simulator = simulator_of(cluster, world, per_node)
    else:
        grid = Grid(world=world, tp=1, ep=1, etp=1, ranks_per_node=per_node)
        _, usual_gbps, _ = GBPS[on_cpu]
        simulator = Simulator(assumed_cluster(grid, gbps or usual_gbps, on_cpu=on_cpu))
    settings = Settings(  # many plans are kept, since several may be of one layout
        keep=20, give_up=GIVE_UP, refine=REFINED, most_stages=most_stages, may_fly=may_fly
    )
    job = job_of(config, source="planner")
    find = partial(search, cluster=simulator.cluster, settings=settings, simulator=simulator)
    job, result = search_recomputing(job, find)
    best: dict[str, PlannedStep] = {}
    for planned in result.ranking:  # best first, so the first of a layout is its best
        best.setdefault(planned.layout, planned)
    return job, replace(result, ranking=tuple(best.values()))


def _pins(grid: Grid) -> Pins:
    """Return the pins that leave a search this mesh alone."""
    return Pins(tp=grid.tp, ep=grid.ep, etp=grid.etp, innermost=grid.innermost)


def assumed_cluster(grid: Grid, gbps: float, *, on_cpu: bool) -> ClusterSpec:
    """Return an assumed cluster for a mesh of which only the nodes are known.

    Args:
        grid: the mesh.
        gbps: rate of the link of a node in gigabits per second; of the links inside the node if
            there is only one node.
        on_cpu: whether the ranks compute on CPUs.
    """
    per_node = grid.ranks_per_node or grid.world
    nodes = grid.world // per_node
    inside_gbps = gbps if nodes == 1 else INSIDE * gbps
    links = [Link(name="inside", devices=1, carries="inside", gbps=(inside_gbps,))]
    if nodes > 1:
        links.append(Link(name="outside", devices=per_node, carries="outside", gbps=(gbps,)))
    host = Host(task_us=10.0, message_us=5.0)
    if on_cpu:
        host = Host(runs_compute=True, task_us=30.0, message_us=60.0)
    return ClusterSpec(
        nodes=nodes,
        devices_per_node=per_node,
        device=replace(CPU if on_cpu else GPU, memory_gib=ENDLESS_GIB),
        links=tuple(links),
        host=host,
        name=f"assumed, {gbps:g} gbit/s",
    )


def layer_job(
    grid: Grid,
    *,
    tokens: int,
    top_k: int,
    dim: int,
    hidden: int,
    num_experts: int,
    element_bytes: int,
) -> Job:
    """Return the job of one MoE layer alone; the other parts of the job's step take the same time
    under every plan.

    Args:
        grid: mesh of the layer.
        tokens: tokens per data-parallel group.
        top_k, dim, hidden, num_experts: sizes of the layer.
        element_bytes: bytes per element of an activation.
    """
    # attention has one head per tp rank, of an even width, so the width is rounded up
    unit = 2 * grid.tp
    shape = MoEShape(num_experts=num_experts, top_k=top_k, hidden=hidden)
    model = ModelShape(
        dim=math.ceil(dim / unit) * unit,
        num_layers=1,
        num_heads=grid.tp,
        seq_len=max(tokens, 1),
        moe=shape,
    )
    precision = {2: "bfloat16", 4: "float32", 8: "float64"}[element_bytes]
    return Job(batch_size=grid.dp, precision=precision, model=model)  # type: ignore[arg-type]


def hot_counts(load: float, groups: int, layer: Workload) -> np.ndarray:
    """Return counts in which one expert gets `load` copies and the others share the rest, (groups,
    num_experts) int64.

    Args:
        load: copies of the busiest expert over all groups, clipped to the range from an even share
            to one copy per token.
        groups: number of data-parallel groups; all have the same counts.
        layer: the workload, which has the number of copies that a group sends.
    """
    copies = round(layer.copies)
    experts = layer.num_experts
    even_share = math.ceil(copies / experts)
    most = min(max(layer.tokens, even_share), copies)
    hot = min(max(round(load / groups), even_share), most)  # copies of the busiest expert
    counts = np.zeros(experts, dtype=np.int64)
    counts[0] = hot
    if experts > 1:
        share, remainder = divmod(copies - hot, experts - 1)
        counts[1:] = share
        counts[1 : 1 + remainder] += 1
    return np.tile(counts, (groups, 1))
