"""Runs the cases of the balance benchmark on one cluster after another, and turns their results
into rows and tables.

A bed is an emulated cluster; a case is a bed, a layer and a load; a cell is the results of one
case, of all methods and ranks. Rows are plain data, one for each method of a cell.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from rich.table import Table

from moesaic.balance.budget import MemoryBudget
from moesaic.program.compile import compile_plan
from moesaic.program.expert_sizes import ExpertSizes
from moesaic.program.plan import Plan
from moesaic.runtime.call_counts import CountedCall
from moesaic_lab.balance import ranks as on_ranks
from moesaic_lab.balance.config import (
    ELEMENT_BYTES,
    MATRICES,
    BalanceBenchConfig,
    BalancePlace,
    SkewedCase,
)
from moesaic_lab.balance.loads import max_vio
from moesaic_lab.balance.methods import PLAIN, methods
from moesaic_lab.balance.ranks import BalanceFound, BalanceJob, Decided
from moesaic_lab.balance.shares import RECORDED, Share
from moesaic_lab.balance.simulated import TimedDecision
from moesaic_lab.balance.tracked_memory import BudgetHeld
from moesaic_lab.beds import BedCell, joined
from moesaic_lab.benchmark import Told, on_beds, told_of_files
from moesaic_lab.bounds import Limit
from moesaic_lab.claims import write_whole
from moesaic_lab.kept_ranks import KeptRanks
from moesaic_lab.measure import Timing
from moesaic_lab.tables import QUARTILES, table
from moesaic_testbed.bed import Bed
from moesaic_testbed.cluster import Cluster

Row = dict[str, Any]
"""The figures of one method in one case, or of one simulation, as plain data."""
NOTHING_DECIDED = Decided(
    seconds=(0.0,), options=(), replicated_experts=(0.0,), replicated_copies=(0.0,)
)
"""Decisions of a method that replicates nothing."""
BUDGET = 1.5
"""Memory budget of the method that has one, as a multiple of the peak of plain expert parallelism
under even loads."""


@dataclass(frozen=True, kw_only=True)
class BalanceCell(BedCell):
    """Results of one case, for all methods and ranks. A run is its first call, and a phase one of
    its movements."""

    job: BalanceJob
    max_vio: tuple[float, ...]
    """MaxVio of ranks, for each call."""
    peak_bytes: Mapping[str, int]
    """By method: the most bytes of tensors alive at once in the first call, on the rank with the
    highest peak."""
    error: Mapping[str, float]
    """By method: the largest difference of results and gradients from the plain layer's, relative
    to the largest value."""
    charged: Mapping[str, float]
    """By method: seconds of virtual compute in a step, on the rank that computes most."""
    decided: Mapping[str, Decided]
    """By replicating method: the decisions, as recorded on the rank that spent most time on
    them."""

    def best_single(self) -> str:
        """Return the single technique with the shortest median time."""
        singles = [name for name in self.timings if self.job.methods[name].is_single]
        return min(singles, key=lambda name: self.timings[name].median)


def run(config: BalanceBenchConfig, told: Told, keep: Path) -> list[BalanceCell]:
    """Measure every case that the configuration asks for and whose rows are not in the folder
    `keep`. Clusters start one after another; all cases of one layer share one."""
    by_layer: dict[tuple[Bed, int], list[BalanceJob]] = {}  # by bed and number of experts
    files = {case.label: keep / f"{case.label}.json" for case in config.selected}
    missing = {label for label, path in files.items() if not path.exists()}
    for case in config.cases(missing):
        place = case.place
        job = BalanceJob(case=case, methods=methods(place.grid, budget_of(place)), seed=config.seed)
        by_layer.setdefault((place.bed, place.num_experts), []).append(job)

    def about(jobs: list[BalanceJob]) -> str:
        return ", ".join(job.case.label for job in jobs)

    def measure_and_keep(ranks: KeptRanks, jobs: Sequence[BalanceJob]) -> None:
        with told_of_files(keep, told):
            ranks.cluster().run(_measure, jobs, keep)

    if by_layer:
        on_beds(
            by_layer.values(),
            lambda jobs: jobs[0].case.place.bed,
            about,
            measure_and_keep,
            told=told,
        )
    return [
        cell_of(json.loads(files[case.label].read_text(encoding="utf-8")), case)
        for case in config.selected
    ]


def budget_of(place: BalancePlace) -> int:
    """Return the memory budget, in bytes, of the method that has one."""
    world = place.bed.world
    rows = place.tokens_per_rank * place.top_k
    even_copies = np.full((world, place.num_experts), rows // place.num_experts)
    tokens = np.full(world, place.tokens_per_rank)
    compiled = compile_plan(Plan(), place.grid)
    experts = ExpertSizes.stacked(place.dim, place.hidden, MATRICES, ELEMENT_BYTES)
    call = CountedCall(even_copies, tokens, place.hidden, lambda: experts)
    memory = MemoryBudget(compiled, place.num_experts)
    peak_bytes = memory.peak(compiled, replicated=None, call=call)  # by rank
    return int(BUDGET * peak_bytes.max())


def measure(ranks: Cluster, jobs: Sequence[BalanceJob]) -> list[BalanceCell]:
    """Measure the cases of one mesh on a running cluster."""
    return ranks.run(_measure, jobs, None)[0]


def _measure(jobs: Sequence[BalanceJob], keep: Path | None) -> list[BalanceCell]:
    """Measure the cases of one mesh; as soon as one is done, the first rank writes its rows into
    the folder, if any. All ranks call it together."""
    cells = []
    by_rank: list[BalanceFound | None] = [None] * dist.get_world_size()
    for job, found in zip(jobs, on_ranks.measure(jobs)):
        dist.all_gather_object(by_rank, found)
        if dist.get_rank() == 0:
            cell = summed_up(job, cast(list[BalanceFound], by_rank))
            cells.append(cell)
            if keep is not None:
                write_whole(keep / f"{job.case.label}.json", json.dumps(rows_of(cell)))
    return cells


def summed_up(job: BalanceJob, results: Sequence[BalanceFound]) -> BalanceCell:
    """Return the cell that combines the results of all ranks for one case."""
    place = job.case.place
    routes = job.case.routes
    loads = [
        routes.counts(call, place.bed.world, place.num_experts)
        for call in range(len(routes.experts))
    ]
    slowest_decisions = {}
    for name in results[0].decided:
        by_rank = [result.decided[name] for result in results]
        slowest_decisions[name] = max(by_rank, key=lambda decided: sum(decided.seconds))
    return BalanceCell(
        job=job,
        max_vio=tuple(max_vio(counts, place.bed.world) for counts in loads),
        **joined(results, place.bed),
        peak_bytes={
            name: max(result.peak_bytes[name] for result in results) for name in job.methods
        },
        error={name: max(result.error[name] for result in results) for name in job.methods},
        charged={name: max(result.charged[name] for result in results) for name in job.methods},
        decided=slowest_decisions,
    )


BED = "bed"
PARTS: dict[type, str] = {Share: "shares", TimedDecision: "decision", BudgetHeld: "memory"}
"""Value of the key `part` for rows that were not measured on beds, by the class that they come
from."""


def all_rows(
    cells: Sequence[BalanceCell],
    shares: Sequence[Share] = (),
    decided: Sequence[TimedDecision] = (),
    under_budget: Sequence[BudgetHeld] = (),
) -> list[Row]:
    """Return all measured and simulated results as rows of plain data."""
    rows = []
    for cell in cells:
        rows += rows_of(cell)
    for share in shares:
        rows.append({"part": PARTS[Share], **asdict(share), "of_forced": share.of_forced})
    for decision in decided:
        rows.append({"part": PARTS[TimedDecision], **asdict(decision)})
    for memory in under_budget:
        rows.append({"part": PARTS[BudgetHeld], **asdict(memory)})
    return rows


def rows_of(cell: BalanceCell) -> list[Row]:
    """Return a row for each method."""
    place = cell.job.case.place
    best = min(cell.timings, key=lambda name: cell.timings[name].median)
    slow = f" (last node {place.slow_link})" if place.slow_link else ""
    shape = {
        "part": BED,
        "case": cell.job.case.label,
        "max_vio": statistics.mean(cell.max_vio),
        "bed": f"{place.nodes}x{place.ranks_per_node} {place.inter}{slow}, lo {place.intra}",
        "tokens_per_rank": place.tokens_per_rank,
        "dim": place.dim,
        "hidden": place.hidden,
        "experts_per_rank": place.experts_per_rank,
        "top_k": place.top_k,
        "compute": "virtual compute",
    }
    return [
        {**shape, "method": name, "is_best": name == best, **_figures(cell, name)}
        for name in cell.timings
    ]


def _figures(cell: BalanceCell, name: str) -> Row:
    """Return the figures of one method in a cell."""
    decided = cell.decided.get(name, NOTHING_DECIDED)
    return {
        **cell.timings[name].row(),
        "seconds": list(cell.timings[name].seconds),
        "near_seconds": list(cell.near[name]) if name in cell.near else None,
        **cell.ratio(PLAIN, name).row("plain_over_this"),
        "communication_seconds": cell.bound(name),
        "computing_seconds": cell.charged[name],
        "across_bytes": cell.across[name][0],
        "peak_bytes": cell.peak_bytes[name],
        "promised_bytes": cell.job.methods[name].plan.memory_budget,
        "error": cell.error[name],
        "replicated_experts": statistics.mean(decided.replicated_experts),
        "replicated_copies": statistics.mean(decided.replicated_copies),
        "options": ", ".join(sorted(set(decided.options))),
        "decision_seconds": statistics.median(decided.seconds),
    }


def cell_of(rows: Sequence[Row], case: SkewedCase) -> BalanceCell:
    """Rebuild a cell from its rows, as `rows_of` wrote them. What rows do not keep is left empty or
    0: the link that limits a method, and the number of its messages between nodes."""
    by_method = {row["method"]: row for row in rows}
    budgets = [row["promised_bytes"] for row in rows if row["promised_bytes"]]
    known_methods = methods(case.place.grid, budgets[0] if budgets else None)

    def column(key: str) -> dict[str, Any]:
        """Return a key's value by method."""
        return {name: row[key] for name, row in by_method.items()}

    decided = {
        name: Decided(
            seconds=(row["decision_seconds"],),
            options=tuple(row["options"].split(", ")),
            replicated_experts=(row["replicated_experts"],),
            replicated_copies=(row["replicated_copies"],),
        )
        for name, row in by_method.items()
        if row["options"]  # empty for methods that replicate nothing
    }
    return BalanceCell(
        job=BalanceJob(case=case, methods={name: known_methods[name] for name in by_method}),
        max_vio=(rows[0]["max_vio"],),
        timings={name: Timing.of(seconds) for name, seconds in column("seconds").items()},
        near={name: tuple(seconds) for name, seconds in column("near_seconds").items() if seconds},
        limits={
            name: (Limit(seconds=seconds, link=""),)
            for name, seconds in column("communication_seconds").items()
        },
        across={name: (num_bytes, 0) for name, num_bytes in column("across_bytes").items()},
        peak_bytes=column("peak_bytes"),
        error=column("error"),
        charged=column("computing_seconds"),
        decided=decided,
    )


COLUMNS = (
    *(
        "case",
        "max_vio",
        "method",
        "is_best",
        *QUARTILES,
        "plain_over_this",
        ("communication_seconds", "links ms"),
    ),
    *("computing_seconds", "across_bytes", "peak_bytes", "replicated_experts", "decision_seconds"),
)
"""Columns of the terminal's table."""
SHARE_COLUMNS = (
    "cluster",
    "ranks",
    "load",
    "ratio",
    "method",
    "max_vio",
    "median",
    "low",
    "high",
    "of_own",
    "calls",
)


def share_rows(shares: Sequence[Share]) -> list[Row]:
    """Return the median, least and largest share of forced balance over the calls, grouped by
    cluster, load, weight ratio and method."""
    groups: dict[tuple[Any, ...], list[Share]] = {}
    for share in shares:
        load = share.load
        if load != RECORDED:
            configured_max_vio = round(2 * share.max_vio) / 2  # to the nearest half
            load = f"{load}, MaxVio {configured_max_vio:g}"
        key = (share.cluster, share.ranks, load, share.ratio, share.method)
        groups.setdefault(key, []).append(share)
    names = ("cluster", "ranks", "load", "ratio", "method")
    return [
        {
            **dict(zip(names, key)),
            "max_vio": statistics.median(each.max_vio for each in members),
            "median": statistics.median(each.of_forced for each in members),
            "low": min(each.of_forced for each in members),
            "high": max(each.of_forced for each in members),
            "of_own": statistics.median(
                each.own_forced_seconds / each.whole_seconds for each in members
            ),
            "decision_seconds": statistics.median(each.decision_seconds for each in members),
            "calls": len(members),
        }
        for key, members in groups.items()
    ]


def tables(cells: Sequence[BalanceCell], shares: Sequence[Share] = ()) -> list[Table]:
    """Return the tables for a terminal: one per bed and layer, and one with shares of forced
    balance."""
    rows_by_place: dict[BalancePlace, list[Row]] = {}
    for cell in cells:
        rows_by_place.setdefault(cell.job.case.place, []).extend(rows_of(cell))

    result = []
    for rows in rows_by_place.values():
        title = f"{described(rows[0])}, virtual compute"
        result.append(table(title, rows, COLUMNS, group_by=("case",)))
    if shares:
        title = "Simulated: share of forced balance"
        groups = ("cluster", "ranks", "load", "ratio")
        result.append(table(title, share_rows(shares), SHARE_COLUMNS, group_by=groups))
    return result


def described(row: Row) -> str:
    """Describe the bed and the layer of a row in words."""
    return (
        f"{row['bed']}, {row['tokens_per_rank']} tokens per rank, dim {row['dim']}, hidden "
        f"{row['hidden']}, {row['experts_per_rank']} experts per rank, top {row['top_k']}"
    )
