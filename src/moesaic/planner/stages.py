"""Searches the best Megatron-style layout: whole parameters on every rank, a sharded optimizer, pipelines, shared sequences.

The search of meshes (`search.py`) has neither pipelines nor shared sequences. Here numbers of stages, sizes of ep and parts of
a sequence are tried in all combinations that fit the ranks, under 1F1B. For each number of stages, other pipeline schedules
are tried on the best layout. `others.py` predicts each layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.memory import usable_bytes
from moesaic.planner.model import Job
from moesaic.planner.others import OthersLayout, predict
from moesaic.planner.search import PlannedStep
from moesaic.planner.step_model import Part
from moesaic.program.plan import AllToAll, Crossing

MOST_STAGES, MOST_PARTS = 16, 8
"""Largest numbers of pipeline stages and of parts of a sequence that are tried."""
LONG = 16384
"""Shortest sequences, in tokens, that ranks share; each rank keeps at least a quarter of this many tokens."""
SCHEDULES = (("1f1b", 2), ("zb-v", 1), ("dualpipev", 1))
"""Pipeline schedules and runs of layers per rank that are tried besides 1F1B with one run."""


def best_in_stages(
    job: Job,
    cluster: ClusterSpec,
    *,
    tp: int,
    crossing: Crossing,
    stages: int | None = None,
    reserve_gib: float = 1.0,
) -> tuple[OthersLayout, PlannedStep] | None:
    """Return the layout with the shortest predicted step, and that step; None if no layout fits the memory.

    Args:
        job: the training job; its batch and accumulation give the sequences of a step.
        cluster: the cluster; layouts use all of its ranks.
        tp: tensor parallelism of attention, for example that of our best layout.
        crossing: how tokens cross ep, for example that of our best plan.
        stages: number of pipeline stages; None tries powers of two.
        reserve_gib: device memory set aside for the framework.
    """
    most = usable_bytes(cluster, reserve_gib)
    fitting = [
        tried
        for layout in _layouts(job, cluster, tp, crossing, stages)
        if (tried := _fitting(job, cluster, layout, most))
    ]
    if not fitting:
        return None
    counts = dict.fromkeys(layout.pp for layout, _ in fitting)
    leaders = [min((each for each in fitting if each[0].pp == count), key=_seconds) for count in counts]
    rescheduled = (
        _fitting(job, cluster, replace(layout, schedule=schedule, virtual_pp=runs), most)
        for layout, _ in leaders
        for schedule, runs in SCHEDULES
        if layout.pp > 1
    )
    return min([*leaders, *filter(None, rescheduled)], key=_seconds)


def _seconds(tried: tuple[OthersLayout, PlannedStep]) -> float:
    return tried[1].seconds


def _layouts(job: Job, cluster: ClusterSpec, tp: int, crossing: Crossing, stages: int | None) -> Iterator[OthersLayout]:
    """Yield layouts under 1F1B whose sizes are powers of two."""
    seq_len = job.model.seq_len
    counts = [2**power for power in range(MOST_STAGES.bit_length())] if stages is None else [stages]
    parts = [part for part in (1, 2, 4, MOST_PARTS) if part == 1 or (seq_len >= LONG and 4 * seq_len // part >= LONG)]
    sequences = job.batch_size * job.accumulation
    all_to_all: AllToAll = "multicast" if crossing is Crossing.MULTICAST else "linear"
    for pp, cp in itertools.product(counts, parts):
        if cluster.world % pp:
            continue
        stage = cluster.world // pp
        sizes = [2**power for power in range(stage.bit_length()) if job.model.moe.num_experts % 2**power == 0]
        yield from (
            OthersLayout(tp=tp, pp=pp, cp=cp, ep=ep, global_batch=sequences, all_to_all=all_to_all)
            for ep in sizes
            if stage % ep == 0
        )


def _fitting(
    job: Job, cluster: ClusterSpec, layout: OthersLayout, most: float
) -> tuple[OthersLayout, PlannedStep] | None:
    """Return a layout and its step, with recomputed blocks if it needs them to fit `most` bytes; None if it does not fit."""
    choices: tuple[tuple[Part, ...], ...] = ((), ("block",))
    for recompute in choices:
        tried = replace(layout, recompute=recompute)
        try:
            step = predict(job, cluster, tried)
        except InputError:
            return None
        if step.memory.total <= most:
            return tried, step
    return None
