"""What must hold of every prediction: all presets of clusters, all models by name, several layouts
and sizes.

Nothing here is held against a measurement; wrong figures that look plausible are what it is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from helpers import pairwise
from moesaic.errors import InputError
from moesaic.planner.answer import SPEED_RATIOS, speed_of
from moesaic.planner.candidates import Pins
from moesaic.planner.cluster import ClusterSpec, presets, read_cluster
from moesaic.planner.emit import SYSTEMS, from_flags, layout_of
from moesaic.planner.hub import HubShape
from moesaic.planner.job import Job
from moesaic.planner.other_systems import OthersLayout, predict
from moesaic.planner.presets import CONFIGS, read_job
from moesaic.planner.rank_memory import usable_bytes
from moesaic.planner.search import LOSSLESS, Settings, search
from moesaic.planner.simulated_plans import PlannedStep

LAYOUTS: dict[str, Callable[[int], OthersLayout]] = {
    "ep": lambda world: OthersLayout(ep=min(8, world), global_batch=4 * world),
    "stages": lambda world: OthersLayout(pp=2, ep=max(world // 2, 1), global_batch=4 * world),
    "in parts": lambda world: OthersLayout(
        ep=world, sharded="parameters", global_batch=2 * world, all_to_all="multicast"
    ),
    "tensors": lambda world: OthersLayout(tp=2, ep=world // 2, etp=2, global_batch=2 * world),
}
"""How a number of ranks is split."""
MACHINES = [name for name in presets() if read_cluster(name).device.memory_gib > 8]
"""Clusters of accelerators, not emulated ones."""
MODELS = [name for name in CONFIGS if name != "mixtral-8x7b"]


def better(cluster: ClusterSpec) -> dict[str, ClusterSpec]:
    """Return the cluster with one thing twice as good."""
    device = cluster.device
    found = {
        "inside": cluster.with_links("inside", 2.0),
        "memory": replace(
            cluster,
            device=replace(
                device, memory_gigabytes_per_second=2 * device.memory_gigabytes_per_second
            ),
        ),
        "products": replace(cluster, device=device.with_products(2.0)),
    }
    return found | ({"outside": cluster.with_links("outside", 2.0)} if cluster.nodes > 1 else {})


def asked(model: str, name: str, nodes: int) -> tuple[Job, ClusterSpec]:
    cluster = read_cluster(name, nodes=nodes)
    return read_job(model, world=cluster.world), cluster


@pytest.mark.parametrize(
    ("name", "model", "split", "nodes"), pairwise(MACHINES, MODELS, LAYOUTS, (1, 2, 4))
)
def test_predictions_agree_with_themselves(name: str, model: str, split: str, nodes: int) -> None:
    job, cluster = asked(model, name, nodes)
    layout = LAYOUTS[split](cluster.world)
    try:
        found = predict(job, cluster, layout)
    except InputError as error:
        if "split" not in str(error):
            raise
        return
    sequences = layout.sequences(cluster.world)
    speed = speed_of(job, found, cluster, devices=cluster.world, sequences=sequences)
    assert speed.tokens_per_second * cluster.world * found.seconds == pytest.approx(
        sequences * job.model.seq_len * SPEED_RATIOS[1]
    )
    assert speed.interval[0] <= speed.tokens_per_second <= speed.interval[1]
    assert 0 < speed.utilization < 1
    for busy in found.estimate.limits.values():
        assert busy <= found.seconds * (1 + 1e-9), "nothing is busy for longer than a step"
    assert sum(found.estimate.parts.values()) == pytest.approx(found.seconds, rel=1e-6)
    assert min(vars(found.memory).values()) >= 0
    for what, cluster_then in better(cluster).items():
        assert predict(job, cluster_then, layout).seconds <= found.seconds * (1 + 1e-6), (
            f"{what} twice as good"
        )


def best_on(model: str, name: str, nodes: int) -> tuple[Job, ClusterSpec, PlannedStep]:
    job, cluster = asked(model, name, nodes)
    assert isinstance(job.model, HubShape)
    few = replace(
        LOSSLESS,
        all_to_alls=("linear", "multicast"),
        chunks=(1, 2),
        orders=("fifo",),
        fuse=(False,),
    )
    job = replace(job, model=replace(job.model, checkpoint_activations=True))
    settings = Settings(space=few, pins=Pins(etp=1), keep=3, refine=1, give_up=1.1)
    return job, cluster, search(job, cluster, settings).best


@pytest.mark.parametrize(
    ("model", "name", "nodes"),
    pairwise(("olmoe-1b-7b", "qwen3-30b-a3b"), ("dgx-h100", "dgx-b200", "tutel"), (1, 2)),
)
def test_what_is_found_fits_and_is_said_alike_in_every_system(
    model: str, name: str, nodes: int
) -> None:
    try:
        job, cluster, best = best_on(model, name, nodes)
    except InputError as error:
        if "fits no layout" not in str(error):
            raise
        return
    grid = best.grid
    assert best.memory.total <= usable_bytes(cluster, 1.0)
    assert job.model.moe.num_experts % grid.ep == 0
    assert grid.dp * grid.tp == grid.edp * grid.ep * grid.etp == cluster.world
    assert job.batch_size % grid.dp == 0
    layout = layout_of(job, best)
    assert layout.sequences(cluster.world) == job.batch_size * job.accumulation
    for system in ("megatron", "torchtitan"):
        read = from_flags(" ".join(SYSTEMS[system].flags(system, job, layout, best)))
        for size in ("tp", "pp", "ep", "etp", "cp"):
            assert getattr(read, size) == getattr(layout, size), f"{system}: {size}"
        assert read.sharded == layout.sharded == "parameters", "as our plans keep them"
        assert read.sequences(cluster.world) == layout.sequences(cluster.world)
        assert cluster.world % (read.tp * read.pp * read.cp) == 0
        assert cluster.world // read.pp % (read.ep * read.etp) == 0
    flags = dict(
        line.split()
        for line in SYSTEMS["moesaic"].flags("moesaic", job, layout, best)
        if len(line.split()) == 2
    )
    assert [int(flags[f"--mesh.{axis}"]) for axis in ("tp", "ep", "etp")] == [
        grid.tp,
        grid.ep,
        grid.etp,
    ]
    assert int(flags["--batch-size"]) * int(flags["--accumulation"]) == layout.global_batch
