"""The layer benchmark as rows: one per cell and method, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from moesaic_lab.layer.run import LayerCell
from moesaic_lab.tables import Column, byte_size, milliseconds, share, table

NOTES = (
    "Virtual compute: experts and codecs sleep for as long as an accelerator of the configured rate would take; everything "
    "else is real: a layer on the runtime, forward and backward, real bytes between real processes over emulated links "
    "(network namespaces, veth pairs shaped by htb). Times are of this machine, with several ranks on a core; ratios are what "
    "carries over. Loads are balanced. Methods in turn, plans switched between steps. bound: bytes over rate on the "
    "slowest link, forward plus backward, or the computing if that is longer. Ratios under 1.10 are the worse end of the "
    "median's 95 % interval over 30 pairs."
)
"""What a reader must know to judge the figures."""


def all_rows(cells: Sequence[LayerCell]) -> list[dict[str, Any]]:
    """Return everything that was measured, as plain data: methods, what searches tried, what switches cost."""
    makers = (rows_of, trial_rows, switch_rows)
    return [row for make in makers for cell in cells for row in make(cell)]


def rows_of(cell: LayerCell) -> list[dict[str, Any]]:
    """Return a line of the table per method, and one for every name of a plan that does the same as a method."""
    place = cell.job.place
    bed = f"{place.nodes}x{place.ranks_per_node} {place.inter}" + (f", lo {place.intra}" if place.intra else "")
    best = cell.best or min(cell.timings, key=lambda name: cell.timings[name].median)
    return [
        {
            "part": cell.job.section,
            "cell": cell.job.label,
            "bed": bed,
            "compute": "virtual compute",
            "method": name,
            "same_program_as": cell.job.same.get(name),
            "is_best": cell.job.same.get(name, name) == best,
            **_figures(cell, cell.job.same.get(name, name)),
        }
        for name in (*cell.timings, *cell.job.same)
    ]


def _figures(cell: LayerCell, name: str) -> dict[str, Any]:
    first = next(iter(cell.timings))
    timing, over = cell.timings[name], cell.ratio(first, name)
    return {
        **timing.row(),
        "bound_seconds": cell.bound(name),
        "bound_link": cell.limits[name][0].link,
        "computing_seconds": cell.charged[name],
        **over.row("first_over_this"),
        "across_bytes": cell.across[name][0],
        "across_messages": cell.across[name][1],
    }


def trial_rows(cell: LayerCell) -> list[dict[str, Any]]:
    """Return what the search of a cell tried, as plain data."""
    return [
        {
            "part": "search",
            "cell": cell.job.label,
            "method": name,
            "median_seconds": seconds,
            "chosen": name == cell.best,
        }
        for name, seconds in cell.trial.items()
    ]


def switch_rows(cell: LayerCell) -> list[dict[str, Any]]:
    """Return what switching to each plan of a cell costs, as plain data."""
    return [
        {
            "part": "switching",
            "cell": cell.job.label,
            "method": name,
            "first_seconds": switch.first_seconds,
            "first_call_seconds": switch.first_call_seconds,
            "again_seconds": switch.again_seconds,
            "messages": switch.messages,
            "allocated_bytes": switch.allocated_bytes,
            "share_of_step": switch.again_seconds / cell.timings[name].median,
        }
        for name, switch in cell.switches.items()
    ]


COLUMNS = (
    Column(key="cell", title="cell", is_text=True),
    Column(key="method", title="method", is_text=True),
    Column(key="same_program_as", title="same as", is_text=True),
    Column(key="is_best", title="best", show=lambda is_best: "*" if is_best else ""),
    Column(key="median_seconds", title="median ms", show=milliseconds),
    Column(key="low_seconds", title="quartile", show=milliseconds),
    Column(key="high_seconds", title="quartile", show=milliseconds),
    Column(key="bound_seconds", title="bound ms", show=milliseconds),
    Column(key="computing_seconds", title="computing ms", show=milliseconds),
    Column(key="first_over_this", title="first / this", show=share),
    Column(key="across_bytes", title="across", show=byte_size),
    Column(key="across_messages", title="messages"),
)
"""Of the table on the terminal."""
SWITCH_COLUMNS = (
    Column(key="cell", title="cell", is_text=True),
    Column(key="method", title="to", is_text=True),
    Column(key="first_seconds", title="first time ms", show=milliseconds),
    Column(key="first_call_seconds", title="its first step, more ms", show=milliseconds),
    Column(key="again_seconds", title="again ms", show=lambda seconds: f"{1e3 * seconds:.4f}"),
    Column(key="messages", title="messages"),
    Column(key="allocated_bytes", title="tensors", show=byte_size),
    Column(key="share_of_step", title="of a step", show=lambda value: f"{value:.4%}"),
)
TITLES = {
    "schedules": "Schedules",
    "adaptive_r": "Adaptive r over capacity factors",
    "pipelining": "Pipelining",
    "orders": "Orders",
    "codecs": "Codecs",
    "ablation": "ScheMoE's steps",
}
"""By part."""


def tables(cells: Sequence[LayerCell]) -> list[Table]:
    """Return a table per part, and one of switches, for a terminal."""
    made = []
    for part, title in TITLES.items():
        rows = [row for cell in cells if cell.job.section == part for row in rows_of(cell)]
        if rows:
            made.append(table(f"{title}, virtual compute, {rows[0]['bed']}", rows, COLUMNS, group_by=("cell",)))
    switches = [row for cell in cells for row in switch_rows(cell)]
    if switches:
        made.append(table("Switching plans: processor time of a rank", switches, SWITCH_COLUMNS, group_by=("cell",)))
    return made
