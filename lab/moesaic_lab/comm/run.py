"""All-to-alls over really slow links: each as a program on the interpreter, in turn, beside the limit of its links."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from moesaic_lab.bounds import Limit, Message, link_limit
from moesaic_lab.comm.config import CommConfig, Sweep
from moesaic_lab.measure import Timing, over_ranks
from moesaic_lab.tables import Column, byte_size, milliseconds, share, table
from moesaic_testbed.cluster import Cluster, Launcher

Progress = Callable[[str, int, int], object]
"""Told what is measured now, and which one it is of how many."""


@dataclass(frozen=True, kw_only=True)
class CommCell:
    """What was measured for one size on one bed."""

    sweep: Sweep
    size_kib: int
    """Per rank; of a dispatch, what linear sends, rounded."""
    timings: Mapping[str, Timing]
    """By method."""
    limits: Mapping[str, Limit]
    """By method: of the messages of its program."""
    across: Mapping[str, tuple[int, int]]
    """By method: (bytes, messages) between nodes, over all ranks: as a recorder counted them, of torch's own as computed."""

    @property
    def label(self) -> str:
        """Which one it is, for people."""
        return f"{self.sweep.label}, {byte_size(1024 * self.size_kib)}"


def run(config: CommConfig, progress: Progress = lambda label, number, total: None) -> list[CommCell]:
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
                    progress(what, len(cells), len(jobs))
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
    seconds = over_ranks([of_rank.spans for of_rank in found])
    messages = found[0].messages
    counted = {name: [m for of_rank in found for m in of_rank.sent.get(name, [])] for name in seconds}
    return CommCell(
        sweep=sweep,
        size_kib=size_kib,
        timings={name: Timing.of(times) for name, times in seconds.items()},
        limits={name: link_limit(messages[name], sweep.bed) for name in seconds},
        across={name: across(counted[name] or messages[name], sweep) for name in seconds},
    )


def across(messages: Sequence[Message], sweep: Sweep) -> tuple[int, int]:
    """Return (bytes, messages) between nodes."""
    crossing = [size for a, b, size in messages if a // sweep.ranks_per_node != b // sweep.ranks_per_node]
    return round(sum(crossing)), len(crossing)


def rows_of(cell: CommCell) -> list[dict[str, Any]]:
    """Return a line of the table per method."""
    first = cell.timings["linear" if "linear" in cell.timings else next(iter(cell.timings))]
    return [
        {
            "what": cell.sweep.kind,
            "bed": cell.sweep.label,
            "size_bytes": 1024 * cell.size_kib,
            "method": name,
            "median_seconds": timing.median,
            "low_seconds": timing.low,
            "high_seconds": timing.high,
            "repeats": len(timing.seconds),
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
