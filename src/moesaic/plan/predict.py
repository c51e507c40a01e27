"""What a plan table starts with: candidate plans for a mesh that is given, and their simulated steps at a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.cluster_file import read_cluster
from moesaic.cost.profile import read_profile
from moesaic.cost.profile_simulate import profiled_simulator
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import StepCostModel
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan.compile import Compiled, compile_plan
from moesaic.plan.findings import LOSSLESS, Settings
from moesaic.plan.layouts import Pins
from moesaic.plan.loads import simulate_counts, simulate_even
from moesaic.plan.model import Job, job_of
from moesaic.plan.plan import Plan
from moesaic.plan.search import search
from moesaic.program.grid import Grid

APART = 64
"""Ranks up to which uneven loads are simulated; above, every load is predicted as an even one."""


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
        on_cpu = cluster.host.runs_compute
        self._compiled: list[Compiled] = [compile_plan(plan, grid, host_runs_compute=on_cpu) for plan in self.plans]

    @classmethod
    def of(
        cls, config: dict[str, Any], grid: Grid, first: Plan, *, cluster: str, profile: str, plans: int
    ) -> Predictor:
        """Search the candidates for a run.

        Args:
            config: of the run, as a table.
            grid: its mesh.
            first: the plan that it is configured with, the first of the candidates.
            cluster: a preset or a file; "" for the profile.
            profile: a file that `moesaic profile` wrote.
            plans: how many others.

        Raises:
            InputError: if the cluster is not one of such nodes, or the search finds nothing.
        """
        per_node = grid.ranks_per_node or grid.world
        nodes = grid.world // per_node
        if cluster:
            source, simulator = f"planner.cluster={cluster}", Simulator(read_cluster(cluster, nodes=nodes))
        else:
            measured = read_profile(Path(profile), any_machine=True)
            source, simulator = f"planner.profile={profile}", profiled_simulator(measured, nodes=nodes)
        spec = simulator.cluster
        if spec.devices_per_node != per_node:
            raise InputError(
                f"{source} has nodes of {spec.devices_per_node} devices, this run {per_node} ranks on a node: choose a "
                "cluster of such nodes, or set mesh.ranks_per_node"
            )
        job = job_of(config, "planner")
        pins = Pins(tp=grid.tp, ep=grid.ep, etp=grid.etp, innermost=grid.innermost)
        codecs = tuple(dict.fromkeys((first.codec, "none"))), tuple(dict.fromkeys((first.backward_codec, "none")))
        space = replace(LOSSLESS, codecs=codecs[0], backward_codecs=codecs[1])
        found = search(job, spec, Settings(space=space, pins=pins, keep=plans + 1), simulator=simulator)
        wanted = [each.plan for each in found.ranking if each.plan != first]
        return cls(job, spec, grid, [first, *wanted[:plans]], simulator=simulator)

    def __call__(self, load: float) -> list[float]:
        """Return the seconds of a step under each plan.

        Args:
            load: copies that the busiest expert gets from all data-parallel groups; the others share the rest evenly.
        """
        around, found = self._around, []
        layer = around.model.layer
        counts = hot_counts(load, self._around.grid.dp, layer)
        for compiled in self._compiled:
            if around.grid.world <= APART:
                there, back = simulate_counts(self._simulator, compiled, layer, counts)
            else:
                there, back = simulate_even(self._simulator, compiled, layer)
            found.append(around.estimate(there, back).seconds)
        return found


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
