"""Measures the jobs of a configuration, cluster after cluster, and sums up what the ranks found."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moesaic_lab.benchmark import Told
from moesaic_lab.bounds import Limit, crossing, link_limit
from moesaic_lab.layer.cells import jobs
from moesaic_lab.layer.config import LayerBenchConfig
from moesaic_lab.layer.job import LayerFound, LayerJob, Switch
from moesaic_lab.measure import Ratio, TimedCell, timed
from moesaic_testbed.cluster import Cluster, Launcher


@dataclass(frozen=True, kw_only=True)
class LayerCell(TimedCell):
    """What one job found."""

    job: LayerJob
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
        """Return how long one method takes over another; either may be the name of a plan that does the same as one."""
        return super().ratio(self.job.same.get(name, name), self.job.same.get(other, other))

    def bound(self, name: str) -> float:
        """Return seconds below which no step can go: the links' limit, forward and backward, or the computing."""
        forward, backward = self.limits[name]
        return max(forward.seconds + backward.seconds, self.charged[name])


def run(config: LayerBenchConfig, told: Told) -> list[LayerCell]:
    """Measure everything that a configuration names; it starts clusters, one after another.

    Raises:
        InputError: if this machine cannot make them.
    """
    cells: list[LayerCell] = []
    with Launcher() as launcher:
        for bed, of_bed in itertools.groupby(jobs(config), key=lambda job: job.place.bed):
            with launcher.open(bed) as ranks:
                for job in of_bed:
                    told(f"{len(cells)} done; {job.section}: {job.label}")
                    cells.append(measure(ranks, job))
    return cells


def measure(ranks: Cluster, job: LayerJob) -> LayerCell:
    """Measure one job on a cluster that runs, on the bed of the job."""
    from moesaic_lab.layer import ranks as side

    return summed_up(job, ranks.run(side.measure, job))


def summed_up(job: LayerJob, found: Sequence[LayerFound]) -> LayerCell:
    """Return a cell from what every rank found."""
    limits, across, charged = {}, {}, {}
    for name in found[0].spans:
        steps = [of_rank.steps[name] for of_rank in found]
        forward, backward = ([m for s in steps for m in s.forward], [m for s in steps for m in s.backward])
        limits[name] = link_limit(forward, job.place.bed), link_limit(backward, job.place.bed)
        across[name] = crossing((*forward, *backward), job.grid.node_of)
        charged[name] = max(step.charged for step in steps)
    return LayerCell(
        job=job,
        **timed([of_rank.spans for of_rank in found], [of_rank.pairs for of_rank in found]),
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
