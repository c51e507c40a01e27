"""`moesaic bench comm`: all-to-alls on an emulated cluster, timed in turn and compared with the
limit of its links.

Real bytes between real processes over emulated links (network namespaces, veth pairs shaped by
htb); times are of this machine, ratios are what carries over. Even all-to-alls and the dispatch of
a layer, each as a program on the interpreter, packing and unpacking included, methods in turn.
bound: bytes over rate on the slowest link; where a packet is charged a minimum, one packet per pair
of ranks. The shaper lets 20 KB through at once, so that messages of that size may come in under it.
Claims under a ratio of 1.10 are the worse end of the median's 95 % interval over 30 pairs.

Each all-to-all runs as a program on the interpreter. The picture shows times as multiples of the
link limit, the lowest of all methods at that size: from 16 KiB to 32 MiB milliseconds differ by a
factor of 1000, methods only by tenths.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from moesaic_lab.beds import BedCell, bars, drawn, joined
from moesaic_lab.benchmark import Told, emulated, notes_of, on_beds
from moesaic_lab.claims import Claim, claimed, enough, some
from moesaic_lab.comm import ranks as side
from moesaic_lab.comm.config import CommConfig, Sweep, read_config
from moesaic_lab.kept_ranks import KeptRanks
from moesaic_lab.measure import paired
from moesaic_lab.pictures import Panel
from moesaic_lab.tables import QUARTILES, byte_size, table
from moesaic_testbed.bed import Bed

DOMINATES = 2
"""The charge per message dominates if it is at least this many times the bytes of one of linear's
messages."""
FOUR_MIB_KIB = 4096


Job = tuple[Sweep, int]
"""A sweep and one of its sizes in KiB per rank; 0 for a dispatch."""


@dataclass(frozen=True, kw_only=True)
class CommCell(BedCell):
    """The measurements of one size on one bed."""

    sweep: Sweep
    size_kib: int
    """KiB per rank; for a dispatch the rounded size of all copies of a rank."""


def run(config: CommConfig, told: Told, keep: str | None) -> list[CommCell]:
    """Measure all sweeps of a configuration. This starts clusters, one after another.

    Raises:
        RuntimeError: a method delivers wrong rows.
    """

    def measure(ranks: KeptRanks, job: Job) -> CommCell:
        sweep, size_kib = job
        of_ranks = ranks.run(side.measure, sweep, size_kib, config)
        if sweep.kind == "dispatch":  # its size follows from its tokens
            size_kib = round(sweep.tokens * sweep.top_k * config.dim * 4 / 1024)
        return CommCell(sweep=sweep, size_kib=size_kib, **joined(of_ranks, sweep.bed))

    def about(job: Job) -> str:
        sweep, size_kib = job
        size = f", {byte_size(1024 * size_kib)}" if size_kib else ""
        return f"{sweep.kind} on {sweep.label}{size}"

    def bed_of(job: Job) -> Bed:
        sweep, _ = job
        return sweep.bed

    jobs: list[Job] = []
    for sweep in config.cells:
        sizes = (0,) if sweep.kind == "dispatch" else sweep.sizes_kib
        jobs += [(sweep, size_kib) for size_kib in sizes]
    return on_beds(jobs, bed_of, about, measure, told=told, keep=keep)


def claims(cells: Sequence[CommCell]) -> list[Claim]:
    """Return all claims, including those that this run did not measure."""

    def top8() -> CommCell:
        dispatches = [cell for cell in cells if cell.sweep.kind == "dispatch"]
        chosen = [
            cell for cell in dispatches if cell.sweep.shape == "2x2" and cell.sweep.top_k == 8
        ]
        return some(chosen, "of a dispatch with top_k 8 on 2x2")[0]

    return [
        claimed("comm.receive_first.link_share_2x2_4MiB", lambda: link_share(cells), 0.95, ">="),
        claimed("comm.pipelined.over_longer_lane", lambda: over_longer_lane(cells), 1.05),
        claimed("comm.multicast.top8_bytes_over_linear", lambda: multicast_bytes(top8()), 0.34),
        claimed(
            "comm.multicast.top8_time_over_linear",
            lambda: top8().ratio("multicast", "linear").median,
            0.34,
        ),
        claimed("comm.multicast.over_bound", lambda: multicast_over_bound(cells), 1.15),
        claimed("comm.hier2d.over_linear_small_messages", lambda: small_messages(cells), 0.7),
    ]


def link_share(cells: Sequence[CommCell]) -> float:
    """Return the share of the link limit that the linear all-to-all reaches, as the lower end of
    the 95 % interval."""
    chosen = [
        cell for cell in cells if cell.sweep.kind == "limit" and cell.size_kib == FOUR_MIB_KIB
    ]
    cell = some(chosen, "of 4 MiB to the limit")[0]
    seconds = cell.timings["linear"].seconds
    limits = [cell.bound("linear")] * len(seconds)
    return enough(paired(limits, seconds)).low


def over_longer_lane(cells: Sequence[CommCell]) -> float:
    """Return the time of pipelined over that of the longer of its lanes alone.

    It is the median over all sizes of the upper end of the 95 % interval.
    """
    ratios = []
    for cell in some([c for c in cells if c.sweep.kind == "lanes"], "of lanes"):
        longer = max(("intra alone", "inter alone"), key=lambda name: cell.timings[name].median)
        ratios.append(enough(cell.ratio("pipelined", longer)).high)
    return statistics.median(ratios)


def multicast_bytes(cell: CommCell) -> float:
    """Return the bytes that multicast sends between nodes divided by linear's, as counted by
    recorders."""
    return cell.across["multicast"][0] / cell.across["linear"][0]


def multicast_over_bound(cells: Sequence[CommCell]) -> float:
    """Return the time of multicast over its link limit, the median over all dispatches."""
    chosen = some([cell for cell in cells if cell.sweep.kind == "dispatch"], "of a dispatch")
    return statistics.median(
        cell.timings["multicast"].median / cell.bound("multicast") for cell in chosen
    )


def small_messages(cells: Sequence[CommCell]) -> float:
    """Return the time of 2DH over linear on 4x4 ranks, the median over the cells in which the
    charge per message dominates."""
    ratios = []
    for cell in cells:
        sweep = cell.sweep
        if sweep.kind != "exchange" or sweep.shape != "4x4":
            continue
        message_bytes = 1024 * cell.size_kib / sweep.world  # linear sends one to each rank
        is_dominated = sweep.per_message >= DOMINATES * message_bytes
        if is_dominated and {"hier2d", "linear"} <= set(cell.timings):
            ratios.append(cell.ratio("hier2d", "linear").median)
    return statistics.median(some(ratios, "on 4x4 where a cost per message dominates"))


def rows_of(cell: CommCell) -> list[dict[str, Any]]:
    """Return a row per method."""
    first_name = "linear" if "linear" in cell.timings else next(iter(cell.timings))
    first = cell.timings[first_name]
    return [
        {
            "what": cell.sweep.kind,
            "bed": cell.sweep.label,
            "size_bytes": 1024 * cell.size_kib,
            "method": name,
            **cell.row(name),
            "share_of_bound": cell.bound(name) / timing.median,
            "over_first": timing.median / first.median,
        }
        for name, timing in cell.timings.items()
    ]


COLUMNS = (
    "size_bytes",
    "method",
    *QUARTILES,
    "bound_seconds",
    "share_of_bound",
    "over_first",
    "across_bytes",
)
"""Columns on the terminal. "over first": over linear, or over the first method if linear was not
measured."""


def tables(cells: Sequence[CommCell]) -> list[Table]:
    """Return the tables for a terminal, one per kind and bed."""

    def kind_and_bed(cell: CommCell) -> tuple[str, str]:
        return cell.sweep.kind, cell.sweep.label

    all_tables = []
    for (kind, label), group in itertools.groupby(cells, key=kind_and_bed):
        rows = [row for cell in group for row in rows_of(cell)]
        all_tables.append(table(f"{kind} on {label}", rows, COLUMNS, group_by=("size_bytes",)))
    return all_tables


def panels(cells: Sequence[CommCell]) -> list[Panel]:
    """Return a panel per bed of the all-to-alls, and one panel each for lanes and dispatches."""
    all_panels = []
    exchanges = [cell for cell in cells if cell.sweep.kind == "exchange"]
    exchanges.sort(key=lambda cell: (cell.sweep.label, cell.size_kib))
    for label, group in itertools.groupby(exchanges, key=lambda cell: cell.sweep.label):
        all_panels.append(_over_sizes(f"all-to-all, {label}", list(group)))
    for kind, title in (
        ("lanes", "two lanes, alone and at once"),
        ("dispatch", "dispatch: copies, or once per node"),
    ):
        chosen = [cell for cell in cells if cell.sweep.kind == kind]
        if chosen:
            all_panels.append(bars(title, chosen, _label))
    return all_panels


def _over_sizes(title: str, cells: Sequence[CommCell]) -> Panel:
    """Return a panel of times over sizes, as multiples of the lowest link limit of all methods at
    that size."""
    sizes = [float(cell.size_kib) for cell in cells]
    lowest_limits = [min(cell.bound(method) for method in cell.timings) for cell in cells]
    scales = [1 / limit for limit in lowest_limits]
    return Panel(
        title=title,
        x_title="per rank",
        y_title="time over link limit",
        log_x=True,
        log_y=True,
        series=drawn(cells, sizes, scales),
        x_ticks=tuple((size, byte_size(1024 * size)) for size in sizes),
    )


def _label(cell: CommCell) -> str:
    """Return the name of a cell's group of bars."""
    sweep = cell.sweep
    return (
        f"{sweep.shape}, top {sweep.top_k}"
        if sweep.kind == "dispatch"
        else byte_size(1024 * cell.size_kib)
    )


BENCHMARK = emulated(
    name="comm",
    description=(
        "Measure all-to-alls in turn on an emulated cluster, beside the limit of its links."
    ),
    notes=notes_of(__doc__),
    read_config=read_config,
    run=run,
    claims=claims,
    columns=tables,
    panels=panels,
    rows=lambda cells: [row for cell in cells for row in rows_of(cell)],
    title="All-to-alls over emulated links",
    panels_in_a_row=3,
)
