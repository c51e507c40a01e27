"""`moesaic bench layer`: plans of one MoE layer, timed in turn on an emulated cluster with virtual
compute.

Virtual compute: experts and codecs sleep for as long as an accelerator of the configured rate would
take; everything else is real: a layer on the runtime, forward and backward, real bytes between real
processes over emulated links (network namespaces, veth pairs shaped by htb). Times are of this
machine, with several ranks on a core; ratios are what carries over. Loads are balanced. Methods in
turn, plans switched between steps. bound: bytes over rate on the slowest link, forward plus
backward, or the computing if that is longer. Ratios under 1.10 are the worse end of the median's 95
% interval over 30 pairs.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from moesaic_lab.beds import BedCell, bars, drawn, joined
from moesaic_lab.benchmark import Told, emulated, notes_of, on_beds
from moesaic_lab.claims import Claim, claimed, enough, some
from moesaic_lab.kept_ranks import KeptRanks
from moesaic_lab.layer import ranks as side
from moesaic_lab.layer.cells import BEST, COMPETE, LayerJob, jobs
from moesaic_lab.layer.config import LayerBenchConfig, read_config
from moesaic_lab.layer.ranks import LayerFound, Switch
from moesaic_lab.measure import Ratio
from moesaic_lab.pictures import Panel
from moesaic_lab.tables import QUARTILES, table
from moesaic_testbed.cluster import Cluster

TITLES = {
    "schedules": "Schedules",
    "adaptive_r": "Adaptive r over capacity factors",
    "pipelining": "Pipelining",
    "orders": "Orders",
    "codecs": "Codecs",
    "ablation": "ScheMoE's steps",
}
"""Titles of the tables, by part."""
PICTURED = {
    "pipelining": "chunks",
    "orders": "orders",
    "codecs": "codecs",
    "ablation": "ScheMoE's steps",
}
"""Titles of the panels with bars, by part."""
VIRTUAL = "ms, virtual compute"
"""Title of every time axis."""


@dataclass(frozen=True, kw_only=True)
class LayerCell(BedCell):
    """The measurements of one job, over all ranks."""

    job: LayerJob
    best: str
    """Name of the plan that the search chose; "" without a search."""
    trial: Mapping[str, float]
    """Median seconds of the plans that the search tried."""
    charged: Mapping[str, float]
    """Seconds of virtual compute in a step on the rank with most, by method."""
    switches: Mapping[str, Switch]
    """Cost of switching to a plan on the slowest rank, by method."""

    def timed_as(self, name: str) -> str:
        """Return the method that was timed for a plan: the plan itself, or another one that does
        the same."""
        return self.job.same.get(name, name)

    def ratio(self, name: str, other: str, level: float = 0.95) -> Ratio:
        """Return the time of one method over another. Both may also be names of plans that do the
        same as a timed method."""
        return super().ratio(self.timed_as(name), self.timed_as(other), level)

    def bound(self, name: str) -> float:
        """Return a lower bound on a step's seconds: the link limits of forward plus backward, or
        the computing if longer."""
        return max(super().bound(name), self.charged[name])


def run(config: LayerBenchConfig, told: Told, keep: str | None) -> list[LayerCell]:
    """Measure all jobs of a configuration. This starts clusters, one after another."""
    return on_beds(
        jobs(config),
        lambda job: job.place.bed,
        lambda job: f"{job.section}: {job.label}",
        measure,
        told=told,
        keep=keep,
    )


def measure(ranks: Cluster | KeptRanks, job: LayerJob) -> LayerCell:
    """Measure one job on a running cluster of the job's bed."""
    return summed_up(job, ranks.run(side.measure, job))


def summed_up(job: LayerJob, of_ranks: Sequence[LayerFound]) -> LayerCell:
    """Combine the measurements of all ranks into a cell."""
    switches = {
        name: max(
            (of_rank.switches[name] for of_rank in of_ranks),
            key=lambda switch: switch.again_seconds,
        )
        for name in of_ranks[0].switches
    }
    return LayerCell(
        job=job,
        best=of_ranks[0].best,
        trial=of_ranks[0].trial,
        switches=switches,
        **joined(of_ranks, job.place.bed),
        charged={
            name: max(of_rank.charged[name] for of_rank in of_ranks) for name in of_ranks[0].charged
        },
    )


def claims(cells: Sequence[LayerCell]) -> list[Claim]:
    """Return all claims, including those that this run did not measure."""

    def of(section: str) -> list[LayerCell]:
        return some([cell for cell in cells if cell.job.section == section], f"of {section}")

    def switching(seconds: Callable[[Switch], float]) -> float:
        shares = [
            seconds(s) / cell.timings[name].median
            for cell in of("adaptive_r")
            for name, s in cell.switches.items()
        ]
        return max(some(shares, "that counts switches"))

    return [
        claimed(
            "layer.best_over_baseline_tp4", lambda: best_over_baseline(of("schedules")), 4.0, ">="
        ),
        claimed(
            "layer.worst_over_best_single", lambda: max(map(over_single, of("schedules"))), 1.03
        ),
        claimed("layer.switch_cost_share", lambda: switching(lambda s: s.again_seconds), 0.01),
        claimed(
            "layer.first_switch_share",
            lambda: switching(lambda s: s.first_seconds + s.first_call_seconds),
            None,
        ),
        claimed(
            "layer.fixed_r_over_adaptive", lambda: fixed_over_adaptive(of("adaptive_r")), None, ">="
        ),
        claimed("layer.schemoe_ablation", lambda: ablation(of("ablation")), 2.0, ">="),
    ]


def best_over_baseline(cells: Sequence[LayerCell]) -> float:
    """Return the baseline's time over the best plan's, the median over all meshes with tp = etp
    = 4."""
    chosen = some(
        [cell for cell in cells if cell.job.grid.tp == cell.job.grid.etp == 4], "at tp = etp = 4"
    )
    return statistics.median(cell.ratio("baseline", cell.best).median for cell in chosen)


def over_single(cell: LayerCell) -> float:
    """Return the best plan's time over that of the fastest of ted, S1 and S2, as the upper end of
    the 95 % interval."""
    names = {cell.timed_as(name) for name in COMPETE} & set(cell.timings)
    return bounded(cell, cell.best, min(names, key=lambda name: cell.ratio(name, cell.best).median))


def bounded(cell: LayerCell, name: str, other: str) -> float:
    """Return the upper end of a ratio's 95 % interval; 1 if both names stand for the same timed
    method.

    Raises:
        NotMeasuredError: the ratio is near 1 and has too few pairs.
    """
    if cell.timed_as(name) == cell.timed_as(other):
        return 1.0
    return enough(cell.ratio(name, other), cell.job.label).high


def fixed_over_adaptive(cells: Sequence[LayerCell]) -> float:
    """Return the total time with the best single r for all sizes and factors, over that with the
    best r for each of them."""
    medians = [{name: timing.median for name, timing in cell.timings.items()} for cell in cells]
    fixed = min(sum(of_cell[name] for of_cell in medians) for name in medians[0])
    return fixed / sum(min(of_cell.values()) for of_cell in medians)


def ablation(cells: Sequence[LayerCell]) -> float:
    """Return the plain layer's time over that of the layer with all of ScheMoE's steps."""
    (cell,) = cells
    names = list(cell.timings)
    return cell.ratio(names[0], names[-1]).median


def all_rows(cells: Sequence[LayerCell]) -> list[dict[str, Any]]:
    """Return all rows: of methods, of the plans that searches tried, and of the costs of
    switches."""
    return [
        row for make in (rows_of, trial_rows, switch_rows) for cell in cells for row in make(cell)
    ]


def rows_of(cell: LayerCell) -> list[dict[str, Any]]:
    """Return a row per method, and one per further plan that does the same as a method."""
    first = next(iter(cell.timings))
    best = cell.best or min(cell.timings, key=lambda name: cell.timings[name].median)
    return [
        {
            "part": cell.job.section,
            "cell": cell.job.label,
            "bed": cell.job.place.in_words,
            "compute": "virtual compute",
            "method": name,
            "same_program_as": cell.job.same.get(name),
            "is_best": timed_name == best,
            **cell.row(timed_name),
            "computing_seconds": cell.charged[timed_name],
            **cell.ratio(first, timed_name).row("first_over_this"),
        }
        for name in (*cell.timings, *cell.job.same)
        for timed_name in [cell.timed_as(name)]
    ]


def trial_rows(cell: LayerCell) -> list[dict[str, Any]]:
    """Return a row per plan that the search of a cell tried."""
    head = {"part": "search", "cell": cell.job.label, "bed": cell.job.place.in_words}
    return [
        {**head, "method": n, "median_seconds": s, "chosen": n == cell.best}
        for n, s in cell.trial.items()
    ]


def switch_rows(cell: LayerCell) -> list[dict[str, Any]]:
    """Return a row per plan of a cell with the cost of switching to it."""
    return [
        {
            "part": "switching",
            "cell": cell.job.label,
            "method": name,
            **asdict(switch),
            "share_of_step": switch.again_seconds / cell.timings[name].median,
        }
        for name, switch in cell.switches.items()
    ]


COLUMNS = (
    *(
        "cell",
        "method",
        ("same_program_as", "same as"),
        "is_best",
        *QUARTILES,
        "bound_seconds",
        "computing_seconds",
    ),
    *("first_over_this", "across_bytes", "across_messages"),
)


def tables(cells: Sequence[LayerCell]) -> list[Table]:
    """Return the tables for a terminal: one per part, and one of switches."""
    all_tables = []
    for part, title in TITLES.items():
        rows = [row for cell in cells if cell.job.section == part for row in rows_of(cell)]
        for bed in dict.fromkeys(row["bed"] for row in rows):
            on_bed = [row for row in rows if row["bed"] == bed]
            all_tables.append(
                table(f"{title}, virtual compute, {bed}", on_bed, COLUMNS, group_by=("cell",))
            )
    switches = [row for cell in cells for row in switch_rows(cell)]
    if switches:
        all_tables.append(
            table("Switching plans: processor time of a rank", switches, group_by=("cell",))
        )
    return all_tables


def panels(cells: Sequence[LayerCell]) -> list[Panel]:
    """Return a panel per kind of mesh of the schedules, one per size of weights of adaptive r, and
    one per other part."""

    def mesh(cell: LayerCell) -> tuple[int, int, str]:
        return cell.job.place.tokens_per_rank, cell.job.grid.etp, cell.job.grid.innermost

    def of(section: str) -> list[LayerCell]:
        return [cell for cell in cells if cell.job.section == section]

    all_panels = []
    for (tokens, etp, innermost), group in itertools.groupby(
        sorted(of("schedules"), key=mesh), key=mesh
    ):
        title = f"{tokens} tokens, etp {etp}" + (f", {innermost} inside nodes" if etp > 1 else "")
        all_panels.append(_bars(title, list(group), lambda cell: f"tp {cell.job.grid.tp}"))
    for name, sized in itertools.groupby(of("adaptive_r"), key=lambda cell: cell.job.place.name):  # type: ignore[attr-defined]
        all_panels.append(_over_factors(f"adaptive r, {name}", list(sized)))
    for section, title in PICTURED.items():
        if chosen := of(section):
            all_panels.append(_bars(title, chosen, lambda cell: cell.job.label))
    return all_panels


def _bars(title: str, cells: Sequence[LayerCell], label: Callable[[LayerCell], str]) -> Panel:
    """Return a panel with a bar per method in each cell; the plan that a search chose comes
    last."""
    names = dict.fromkeys(name for cell in cells for name in (*cell.job.methods, *cell.job.same))
    methods: dict[str, Callable[[Any], str]] = {
        name: lambda cell, name=name: cell.timed_as(name)  # type: ignore[misc]
        for name in names
    }
    if any(cell.best for cell in cells):
        methods[BEST] = lambda cell: cell.best
    return bars(title, cells, label, VIRTUAL, names=methods)


def _over_factors(title: str, cells: Sequence[LayerCell]) -> Panel:
    """Return a panel with a line per method over the capacity factors."""
    factors = [cell.job.factor or 0.0 for cell in cells]
    return Panel(
        title=title,
        x_title="capacity factor",
        y_title=VIRTUAL,
        series=drawn(cells, factors),
        log_x=True,
        log_y=True,
        x_ticks=tuple((factor, f"{factor:g}") for factor in factors),
    )


BENCHMARK = emulated(
    name="layer",
    description=(
        "Measure ways to run an MoE layer in turn on an emulated cluster, with virtual compute."
    ),
    notes=notes_of(__doc__),
    read_config=read_config,
    run=run,
    rows=all_rows,
    claims=claims,
    columns=tables,
    panels=panels,
    title="One MoE layer over emulated links, virtual compute",
    panels_in_a_row=3,
)
