"""What a plan table starts with: candidate plans for a mesh that is given, and their simulated steps at a load.

Of a cluster that is described, or was measured, candidates are the plans that are simulated best. Where nothing is known they
are those that would be best on slow links, on usual ones and on fast ones, so that the best is likely to be among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from moesaic.balance.rates import simulator_of
from moesaic.cost.cluster import ClusterSpec, Device, Host, Link, Tflops
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import StepCostModel
from moesaic.cost.workload import Workload
from moesaic.plan.candidates import Pins, compile_on
from moesaic.plan.loads import simulate_counts, simulate_even
from moesaic.plan.model import Job, job_of
from moesaic.plan.model_shape import ModelShape, MoEShape
from moesaic.plan.plan import Plan
from moesaic.plan.search import LOSSLESS, Found, Settings, search
from moesaic.program.grid import Grid

APART = 64
"""Ranks up to which uneven loads are simulated; above, every load is predicted as an even one."""
GBPS = {True: (0.2, 2.0, 20.0), False: (25.0, 100.0, 400.0)}
"""Rates of a node's link that are assumed where none is known, for nodes that compute on CPUs and for others."""
INSIDE = 4.0
"""How much faster links inside nodes are taken to be."""
CPU = Device(
    tflops=Tflops(fp32=0.05, fp64=0.025, bf16=0.01),
    memory_gib=8.0,
    memory_gigabytes_per_second=5.0,
    gemm_rows=(1, 8, 32, 128),
    gemm_share=(0.1, 0.5, 0.85, 1.0),
)
"""One process with one thread of a server core; assumed."""
GPU = Device(tflops=Tflops(fp64=10.0, fp32=40.0, bf16=200.0), memory_gib=80.0, memory_gigabytes_per_second=1500.0)
"""Assumed."""
ENDLESS_GIB = 1e6
"""Memory of an assumed device: what runs already fits."""


class Predictor:
    """Simulated seconds of a step under each of some plans, by load.

    Args:
        job: what is trained.
        cluster: on what.
        grid: the mesh.
        plans: the candidates.
        simulator: of this cluster; that of a profile predicts by what was measured. None: by the cluster's description.

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
        self._around = StepCostModel(job.step_model(cluster, grid.dp), grid, self._simulator)
        layer = self._around.model.layer
        self._compiled = [compile_on(plan, grid, self._simulator, layer) for plan in self.plans]

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        grid: Grid,
        first: Plan,
        *,
        cluster: str,
        plans: int,
        times: Mapping[Literal["inside", "outside"], float] | None = None,
    ) -> Predictor:
        """Search the candidates for a run.

        Args:
            config: of the run, as a table.
            grid: its mesh.
            first: the plan that it is configured with, the first of the candidates.
            cluster: as for `simulator_of`.
            plans: how many others.
            times: links of the cluster inside or between nodes that are so many times as fast as it says.

        Raises:
            InputError: if the cluster is not one of such nodes, or the search finds nothing.
        """
        simulator = simulator_of(cluster, grid.world, grid.ranks_per_node or grid.world)
        for carries, faster in (times or {}).items():
            simulator = Simulator(simulator.cluster.with_links(carries, faster))
        spec = simulator.cluster
        job = job_of(config, "planner")
        codecs = tuple(dict.fromkeys((first.codec, "none"))), tuple(dict.fromkeys((first.backward_codec, "none")))
        space = replace(LOSSLESS, codecs=codecs[0], backward_codecs=codecs[1])
        found = search(job, spec, Settings(space=space, pins=_pins(grid), keep=plans + 1), simulator=simulator)
        wanted = [each.plan for each in found.ranking if each.plan != first]
        return cls(job, spec, grid, [first, *wanted[:plans]], simulator=simulator)

    @classmethod
    def assumed(cls, job: Job, grid: Grid, first: Plan, *, plans: int, on_cpu: bool) -> Predictor:
        """Search the candidates for a mesh whose links nobody has measured or described: the best for each of several rates.

        They are lossless and move no more weights than a rank's own shards, whatever memory there is.

        Args:
            job: what is trained.
            grid: its mesh.
            first: the first of the candidates.
            plans: how many others.
            on_cpu: the ranks compute on CPUs.

        Raises:
            InputError: if the search finds nothing.
        """
        shards = tuple(r for r in range(1, grid.etp) if grid.etp % r == 0)
        space = replace(LOSSLESS, gather_weights=shards, orders=("optsche",))
        settings = Settings(space=space, pins=_pins(grid), keep=plans + 1)
        clusters = [assumed_cluster(grid, gbps, on_cpu=on_cpu) for gbps in GBPS[on_cpu]]
        rankings = [[each.plan for each in search(job, cluster, settings).ranking] for cluster in clusters]
        in_turn = [plan for place in zip_longest(*rankings) for plan in place if plan is not None and plan != first]
        return cls(job, clusters[len(clusters) // 2], grid, [first, *dict.fromkeys(in_turn)][: plans + 1])

    def __call__(self, load: float) -> list[float]:
        """Return the seconds of a step under each plan.

        Args:
            load: copies that the busiest expert gets from all data-parallel groups; the others share the rest evenly.
        """
        around, found = self._around, []
        layer = around.model.layer
        counts = hot_counts(load, around.grid.dp, layer)
        for compiled in self._compiled:
            if around.grid.world <= APART:
                there, back = simulate_counts(self._simulator, compiled, layer, counts)
            else:
                there, back = simulate_even(self._simulator, compiled, layer)
            found.append(around.estimate(there, back).seconds)
        return found


def find_layout(config: dict[str, Any], world: int, per_node: int, *, cluster: str, on_cpu: bool) -> Found:
    """Search the mesh and the plan of a run for the ranks that there are; the same on every machine.

    Args:
        config: of the run, as a table; its mesh and plan do not count.
        world: ranks.
        per_node: of a node.
        cluster: as for `simulator_of`; empty: usual links are assumed, and memory enough.
        on_cpu: the ranks compute on CPUs.

    Raises:
        InputError: if no mesh of so many ranks holds the model and its batch, or the cluster is not one of such nodes.
    """
    if cluster:
        simulator = simulator_of(cluster, world, per_node)
    else:
        grid = Grid(world=world, tp=1, ep=1, etp=1, ranks_per_node=per_node)
        simulator = Simulator(assumed_cluster(grid, GBPS[on_cpu][1], on_cpu=on_cpu))
    return search(job_of(config, "planner"), simulator.cluster, Settings(keep=1), simulator=simulator).best


def _pins(grid: Grid) -> Pins:
    return Pins(tp=grid.tp, ep=grid.ep, etp=grid.etp, innermost=grid.innermost)


def assumed_cluster(grid: Grid, gbps: float, *, on_cpu: bool) -> ClusterSpec:
    """Return a cluster for a mesh of which only the nodes are known; on one node the links are those inside it.

    Args:
        grid: the mesh.
        gbps: gigabits per second of a node's link.
        on_cpu: the ranks compute on CPUs.
    """
    per_node = grid.ranks_per_node or grid.world
    nodes = grid.world // per_node
    links = [Link(name="inside", devices=1, carries="inside", gbps=(gbps if nodes == 1 else INSIDE * gbps,))]
    if nodes > 1:
        links.append(Link(name="outside", devices=per_node, carries="outside", gbps=(gbps,)))
    return ClusterSpec(
        nodes=nodes,
        devices_per_node=per_node,
        device=replace(CPU if on_cpu else GPU, memory_gib=ENDLESS_GIB),
        links=tuple(links),
        host=Host(runs_compute=True, task_us=30.0, message_us=60.0) if on_cpu else Host(task_us=10.0, message_us=5.0),
        name=f"assumed, {gbps:g} gbit/s",
    )


def layer_job(
    grid: Grid, *, tokens: int, top_k: int, dim: int, hidden: int, num_experts: int, element_bytes: int
) -> Job:
    """Return the job of one MoE layer by itself; what stands around it takes the same time under every plan.

    Args:
        grid: its mesh.
        tokens: per data-parallel group.
        top_k, dim, hidden, num_experts: of the layer.
        element_bytes: of an activation.
    """
    unit = 2 * grid.tp
    shape = MoEShape(num_experts=num_experts, top_k=top_k, hidden=hidden)
    model = ModelShape(dim=-(-dim // unit) * unit, num_layers=1, num_heads=grid.tp, seq_len=max(tokens, 1), moe=shape)
    precision = {2: "bfloat16", 4: "float32", 8: "float64"}[element_bytes]
    return Job(batch_size=grid.dp, precision=precision, model=model)  # type: ignore[arg-type]


def hot_counts(load: float, groups: int, layer: Workload) -> np.ndarray:
    """Return counts in which one expert gets `load` copies in all, (groups, num_experts) int64, and the others share the rest.

    Args:
        load: at most every token's one copy, at least an even share; else the nearest of these is taken.
        groups: data-parallel groups, all alike.
        layer: says how many copies a group sends.
    """
    copies, experts = round(layer.copies), layer.num_experts
    hot = min(max(round(load / groups), -(-copies // experts)), max(layer.tokens, -(-copies // experts)), copies)
    counts = np.zeros(experts, dtype=np.int64)
    counts[0] = hot
    if experts > 1:
        counts[1:] = (copies - hot) // (experts - 1)
        counts[1 : 1 + (copies - hot) % (experts - 1)] += 1
    return np.tile(counts, (groups, 1))
