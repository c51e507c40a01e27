"""All-to-alls over really slow links: each as a program on the interpreter, in turn, beside the limit of its links."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from moesaic_lab.benchmark import Told
from moesaic_lab.bounds import Limit, crossing, link_limit
from moesaic_lab.comm.config import CommConfig, Sweep
from moesaic_lab.measure import TimedCell, timed
from moesaic_lab.tables import Column, byte_size, milliseconds, share, table
from moesaic_testbed.cluster import Cluster, Launcher


@dataclass(frozen=True, kw_only=True)
class CommCell(TimedCell):
    """What was measured for one size on one bed."""

    sweep: Sweep
    size_kib: int
    """Per rank; of a dispatch, what linear sends, rounded."""
    limits: Mapping[str, Limit]
    """By method: of the messages of its program."""
    across: Mapping[str, tuple[int, int]]
    """By method: (bytes, messages) between nodes, over all ranks: as a recorder counted them, of torch's own as computed."""

    @property
    def label(self) -> str:
        """Which one it is, for people."""
        return f"{self.sweep.label}, {byte_size(1024 * self.size_kib)}"


def run(config: CommConfig, told: Told) -> list[CommCell]:
    """Measure everything that a configuration names; it starts clusters, one after another.

    Raises:
        InputError: if this machine cannot make them.
        RuntimeError: if a method delivers wrong rows.
    """
    jobs = [
        (sweep, size) for sweep in config.sweeps for size in (sweep.sizes_kib if sweep.kind != "dispatch" else (0,))
    ]
    cells: list[CommCell] = []
    with Launcher() as launcher:
        for bed, of_bed in itertools.groupby(jobs, key=lambda job: job[0].bed):
            with launcher.open(bed) as ranks:
                for sweep, size in of_bed:
                    what = f"{sweep.kind} on {sweep.label}" + (f", {byte_size(1024 * size)}" if size else "")
                    told(f"{len(cells)} of {len(jobs)} done; {what}")
                    cells.append(measure(ranks, sweep, size, config))
    return cells


def measure(ranks: Cluster, sweep: Sweep, size_kib: int, config: CommConfig) -> CommCell:
    """Measure one size on a cluster that runs.

    Args:
        ranks: the cluster, on the sweep's bed.
        sweep: what to run.
        size_kib: per rank; not of a dispatch.
        config: its width of rows, warm-up rounds and seed.
    """
    from moesaic_lab.comm import ranks as comm_ranks

    if sweep.kind == "dispatch":
        found = ranks.run(comm_ranks.measure_dispatch, sweep, config.seed, config.dim, config.warmup)
        size_kib = round(sweep.tokens * sweep.top_k * config.dim * 4 / 1024)
    elif sweep.kind == "lanes":
        found = ranks.run(comm_ranks.measure_lanes, sweep, size_kib, config.dim, config.warmup)
    else:
        found = ranks.run(comm_ranks.measure_exchange, sweep, size_kib, config.dim, config.warmup)
    messages, names = found[0].messages, found[0].spans
    counted = {name: [m for of_rank in found for m in of_rank.sent.get(name, [])] for name in names}
    return CommCell(
        sweep=sweep,
        size_kib=size_kib,
        **timed([of_rank.spans for of_rank in found]),
        limits={name: link_limit(messages[name], sweep.bed) for name in names},
        across={name: crossing(counted[name] or messages[name], sweep.bed.node_of) for name in names},
    )


def rows_of(cell: CommCell) -> list[dict[str, Any]]:
    """Return a line of the table per method."""
    first = cell.timings["linear" if "linear" in cell.timings else next(iter(cell.timings))]
    return [
        {
            "what": cell.sweep.kind,
            "bed": cell.sweep.label,
            "size_bytes": 1024 * cell.size_kib,
            "method": name,
            **timing.row(),
            "bound_seconds": cell.limits[name].seconds,
            "bound_link": cell.limits[name].link,
            "share_of_bound": cell.limits[name].seconds / timing.median,
            "over_first": timing.median / first.median,
            "across_bytes": cell.across[name][0],
            "across_messages": cell.across[name][1],
        }
        for name, timing in cell.timings.items()
    ]


NOTES = (
    "Real bytes between real processes over emulated links (network namespaces, veth pairs shaped by htb); times are of "
    "this machine, ratios are what carries over. Even all-to-alls and the dispatch of a layer, each as a program on the "
    "interpreter, packing and unpacking included, methods in turn. bound: bytes over rate on the slowest link; where a "
    "packet is charged a minimum, one packet per pair of ranks. The shaper lets 20 KB through at once, so that messages of "
    "that size may come in under it. Claims under a ratio of 1.10 are the worse end of the "
    "median's 95 % interval over 30 pairs."
)
"""What a reader must know to judge the figures."""

COLUMNS = (
    Column(key="size_bytes", title="per rank", show=byte_size),
    Column(key="method", title="method", is_text=True),
    Column(key="median_seconds", title="ms", show=milliseconds),
    Column(key="quartiles", title="quartiles"),
    Column(key="bound_seconds", title="bound", show=milliseconds),
    Column(key="share_of_bound", title="share", show=share),
    Column(key="over_first", title="ratio", show=share),
    Column(key="across_bytes", title="across", show=byte_size),
)
"""Of the tables on the terminal: milliseconds; the bound's share of the median; the ratio to the first method; bytes that
all ranks send between nodes."""


def tables(cells: Sequence[CommCell]) -> list[Table]:
    """Return a table for people per kind and bed."""
    made = []
    for (kind, label), of_bed in itertools.groupby(cells, key=lambda cell: (cell.sweep.kind, cell.sweep.label)):
        rows = [row | {"quartiles": _quartiles(row)} for cell in of_bed for row in rows_of(cell)]
        made.append(table(f"{kind} on {label}", rows, COLUMNS, group_by=("size_bytes",)))
    return made


def _quartiles(row: dict[str, Any]) -> str:
    return f"{milliseconds(row['low_seconds'])}-{milliseconds(row['high_seconds'])}"
