"""Measures the cases of a configuration, cluster after cluster, and sums up what the ranks found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.cost.held import ExpertSizes
from moesaic.plan import Plan, compile_plan
from moesaic.plan.budget import CountedCall, MemoryBudget
from moesaic.program.grid import Grid
from moesaic_lab.balance.config import ELEMENT_BYTES, MATRICES, BalanceBenchConfig, BalancePlace
from moesaic_lab.balance.job import BalanceFound, BalanceJob, Decided
from moesaic_lab.balance.loads import max_vio
from moesaic_lab.balance.methods import methods
from moesaic_lab.benchmark import Told
from moesaic_lab.bounds import Message, crossing, link_limit
from moesaic_lab.measure import TimedCell, timed
from moesaic_testbed.bed import Bed
from moesaic_testbed.cluster import Cluster, Launcher

BUDGET = 1.5
"""Bytes of the method with a memory budget, over what a rank holds of plain expert parallelism under balance."""


@dataclass(frozen=True, kw_only=True)
class BalanceCell(TimedCell):
    """What one case found."""

    job: BalanceJob
    max_vio: tuple[float, ...]
    """Of ranks, by call."""
    peak_bytes: Mapping[str, int]
    """By method: the most bytes of tensors alive at once in the first call, of the rank that has most."""
    error: Mapping[str, float]
    """By method: largest difference from the plain layer, results and gradients, over the largest value."""
    link_seconds: Mapping[str, float]
    """By method: bytes over rate on the busiest link of each movement, all of the first call's, one after the other."""
    across_bytes: Mapping[str, int]
    """By method: bytes between nodes of the first call."""
    charged: Mapping[str, float]
    """By method: seconds of virtual compute in a step, of the rank that has most."""
    decided: Mapping[str, Decided]
    """By method that replicates: what rank 0 decided; seconds are those of the slowest rank."""

    def best_single(self) -> str:
        """Return the single technique with the shortest median."""
        singles = [name for name in self.timings if self.job.methods[name].is_single]
        return min(singles, key=lambda name: self.timings[name].median)


def run(config: BalanceBenchConfig, told: Told) -> list[BalanceCell]:
    """Measure every case that a configuration asks for; it starts clusters, one after another.

    Raises:
        InputError: if this machine cannot make them.
    """
    cells: list[BalanceCell] = []
    cases = config.cases()
    if not cases:
        return cells
    by_bed: dict[tuple[Bed, Grid, int], list[BalanceJob]] = {}
    for case in cases:
        place = case.place
        job = BalanceJob(case=case, methods=methods(place.grid, budget_of(place)), seed=config.seed)
        by_bed.setdefault((place.bed, place.grid, place.num_experts), []).append(job)
    with Launcher() as launcher:
        for (bed, _, _), jobs in by_bed.items():
            told(f"{len(cells)} done; " + ", ".join(job.case.label for job in jobs))
            with launcher.open(bed) as ranks:
                cells += measure(ranks, jobs)
    return cells


def budget_of(place: BalancePlace) -> int:
    """Return the bytes of the method with a memory budget."""
    world, rows = place.bed.world, place.tokens_per_rank * place.top_k
    copies, compiled = np.full((world, place.num_experts), rows // place.num_experts), compile_plan(Plan(), place.grid)
    experts = ExpertSizes.stacked(place.dim, place.hidden, MATRICES, ELEMENT_BYTES)
    call = CountedCall(copies, np.full(world, place.tokens_per_rank), place.hidden, lambda: experts)
    return int(BUDGET * MemoryBudget(compiled, place.num_experts).peak(compiled, None, call).max())


def measure(ranks: Cluster, jobs: Sequence[BalanceJob]) -> list[BalanceCell]:
    """Measure cases of one mesh on a cluster that runs."""
    from moesaic_lab.balance import ranks as side

    of_ranks = ranks.run(side.measure, jobs)
    return [summed_up(job, [found[number] for found in of_ranks]) for number, job in enumerate(jobs)]


def summed_up(job: BalanceJob, found: Sequence[BalanceFound]) -> BalanceCell:
    """Return a cell from what every rank found."""
    place, routes = job.case.place, job.case.routes
    links, across = {}, {}
    for name in job.methods:
        by_movement: dict[int, list[Message]] = {}
        for of_rank in found:
            for tag, sent in of_rank.counted[name].messages.items():
                by_movement.setdefault(tag, []).extend(sent)
        messages = [message for sent in by_movement.values() for message in sent]
        links[name] = sum(link_limit(sent, place.bed).seconds for sent in by_movement.values())
        across[name] = crossing(messages, place.grid.node_of)[0]
    loads = [routes.counts(call, place.bed.world, place.num_experts) for call in range(len(routes.experts))]
    return BalanceCell(
        job=job,
        max_vio=tuple(max_vio(counts, place.bed.world) for counts in loads),
        **timed([of_rank.spans for of_rank in found], [of_rank.pairs for of_rank in found]),
        peak_bytes={name: max(each.counted[name].peak_bytes for each in found) for name in job.methods},
        error={name: max(each.counted[name].error for each in found) for name in job.methods},
        link_seconds=links,
        across_bytes=across,
        charged={name: max(each.charged[name] for each in found) for name in job.methods},
        decided={name: _slowest([each.decided[name] for each in found]) for name in found[0].decided},
    )


def _slowest(decided: Sequence[Decided]) -> Decided:
    """Return the decisions, the same on all ranks, with the times of the rank that needs longest."""
    return max(decided, key=lambda each: sum(each.seconds))
