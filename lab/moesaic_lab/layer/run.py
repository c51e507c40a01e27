"""Measures the jobs of a configuration, cluster after cluster, and sums up what the ranks found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moesaic_lab.bounds import Limit, link_limit
from moesaic_lab.layer.cells import jobs
from moesaic_lab.layer.config import LayerBenchConfig
from moesaic_lab.layer.job import LayerFound, LayerJob, Switch
from moesaic_lab.measure import Ratio, Timing, over_ranks, paired
from moesaic_testbed.cluster import Cluster, Launcher

Progress = Callable[[str, int], object]
"""Told what is measured now, and how many jobs are done."""


@dataclass(frozen=True, kw_only=True)
class LayerCell:
    """What one job found."""

    job: LayerJob
    timings: Mapping[str, Timing]
    """By method, rounds in turn with all others."""
    near: Mapping[str, tuple[float, ...]]
    """By method, seconds of all rounds in which the reference ran too; only of the reference and those near it."""
    best: str
    """What a search chose; "" without one."""
    trial: Mapping[str, float]
    """Median seconds of what the search tried."""
    limits: Mapping[str, tuple[Limit, Limit]]
    """By method: forward and backward, of the messages that ranks sent."""
    across: Mapping[str, tuple[int, int]]
    """By method: (bytes, messages) between nodes in a step, as recorders counted them."""
    charged: Mapping[str, float]
    """By method: seconds of virtual compute in a step, of the rank that has most."""
    switches: Mapping[str, Switch]
    """By method: of the rank for which it takes longest."""

    def ratio(self, name: str, other: str) -> Ratio:
        """Return how long one method takes over another: from all rounds that both were in.

        Args:
            name, other: methods, or names of plans that do the same as one.
        """
        name, other = (self.job.same.get(each, each) for each in (name, other))
        if name in self.near and other in self.near:
            return paired(self.near[name], self.near[other])
        return paired(self.timings[name].seconds, self.timings[other].seconds)

    def bound(self, name: str) -> float:
        """Return seconds below which no step can go: the links' limit, forward and backward, or the computing."""
        forward, backward = self.limits[name]
        return max(forward.seconds + backward.seconds, self.charged[name])


def run(config: LayerBenchConfig, progress: Progress = lambda label, number: None) -> list[LayerCell]:
    """Measure everything that a configuration names; it starts clusters, one after another.

    Raises:
        InputError: if this machine cannot make them.
    """
    cells: list[LayerCell] = []
    with Launcher() as launcher:
        for bed, of_bed in itertools.groupby(jobs(config), key=lambda job: job.place.bed):
            with launcher.open(bed) as ranks:
                for job in of_bed:
                    progress(f"{job.section}: {job.label}", len(cells))
                    cells.append(measure(ranks, job))
    return cells


def measure(ranks: Cluster, job: LayerJob) -> LayerCell:
    """Measure one job on a cluster that runs, on the bed of the job."""
    from moesaic_lab.layer import ranks as side

    return summed_up(job, ranks.run(side.measure, job))


def summed_up(job: LayerJob, found: Sequence[LayerFound]) -> LayerCell:
    """Return a cell from what every rank found."""
    seconds = over_ranks([of_rank.spans for of_rank in found])
    pairs = over_ranks([of_rank.pairs for of_rank in found])
    limits, across, charged = {}, {}, {}
    for name in seconds:
        steps = [of_rank.steps[name] for of_rank in found]
        forward, backward = ([m for s in steps for m in s.forward], [m for s in steps for m in s.backward])
        limits[name] = link_limit(forward, job.place.bed), link_limit(backward, job.place.bed)
        crossing = [n for a, b, n in (*forward, *backward) if job.grid.node_of(a) != job.grid.node_of(b)]
        across[name] = round(sum(crossing)), len(crossing)
        charged[name] = max(step.charged for step in steps)
    return LayerCell(
        job=job,
        timings={name: Timing.of(times) for name, times in seconds.items()},
        near={name: (*seconds[name], *times) for name, times in pairs.items()},
        best=found[0].best,
        trial=found[0].trial,
        limits=limits,
        across=across,
        charged=charged,
        switches={
            name: max((of_rank.switches[name] for of_rank in found), key=lambda switch: switch.again_seconds)
            for name in found[0].switches
        },
    )
