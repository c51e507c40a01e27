"""What the planner predicts for a split on a profiled bed, and the split that it chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moesaic.configfile import as_toml, override
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.job import job_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.split import JobSplit, SplitCostModel
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan, StaticPlan
from moesaic.train.config import MeshConfig
from moesaic_lab.step.cells import SEARCHED, BedSplit, StepCell, StepConfig


def cluster_of(profile_text: str, config: StepConfig, cell: StepCell) -> ClusterSpec:
    """Return a profiled bed, with virtual accelerators where the cell's ranks have them."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "cluster.toml")
        path.write_text(profile_text, encoding="utf-8")
        cluster = read_cluster(str(path), nodes=cell.nodes)
    if cell.compute == "real":
        return cluster
    return replace(cluster, device=cluster.device.with_flops(1e9 * config.gflops))


def text_of(profile_text: str, config: StepConfig, cell: StepCell) -> str:
    """Return the description of a profiled bed, with virtual accelerators, as a file has it."""
    return as_toml(cluster_of(profile_text, config, cell))


def chosen_split(config: StepConfig, found: Mapping[str, Any]) -> BedSplit:
    """Return the split of a searched configuration.

    Args:
        found: the configuration, as plain data.
    """
    return BedSplit(
        mesh=override(MeshConfig(), found["mesh"], source="search"),
        plan=override(StaticPlan(), found["plan"], source="search"),
        in_flight=found["micro_batches_in_flight"],
        finer=config.batch_size // found["batch_size"],
        role=SEARCHED,
    )


def predicted_seconds(
    config: StepConfig, cell: StepCell, split: BedSplit, simulator: Simulator
) -> float | None:
    """Return the predicted seconds of a step under a split; None if the planner knows no such
    step."""
    if split.in_flight > 1:
        return None
    mesh = split.mesh
    ranks_of_stage = cell.world // mesh.pp
    per_node = min(cell.ranks_per_node, ranks_of_stage)
    grid = Grid(
        world=ranks_of_stage,
        tp=mesh.tp,
        ep=mesh.ep,
        etp=mesh.etp,
        innermost=mesh.innermost,
        ranks_per_node=per_node,
    )
    # auto chooses these where they fit the memory, as they do here
    shard = "node" if mesh.shard == "auto" else mesh.shard
    hold = "gradients" if mesh.hold == "auto" else mesh.hold
    job_split = JobSplit(
        pp=mesh.pp, parts=mesh.parts_per_stage, shard=shard, hold=hold, finer=split.finer
    )
    job = job_of(asdict(config.run_of(cell, BedSplit())), "step")
    costs = SplitCostModel(job, grid, job_split, simulator)
    plan = {name: getattr(split.plan, name) for name in asdict(split.plan)}
    compiled = compile_plan(Plan(**plan), grid)
    passes = simulator.passes(compiled.forward, compiled.backward, costs.model.layer, compiled.grid)
    return costs.estimate(*passes).seconds
