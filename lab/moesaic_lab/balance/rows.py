"""The balance benchmark as rows: one per case and method, and how they are shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from moesaic_lab.balance.config import SkewedCase
from moesaic_lab.balance.decisions import TimedDecision
from moesaic_lab.balance.job import BalanceJob, Decided
from moesaic_lab.balance.memory import BudgetHeld
from moesaic_lab.balance.methods import PLAIN, methods
from moesaic_lab.balance.run import BalanceCell
from moesaic_lab.balance.shares import RECORDED, Share
from moesaic_lab.measure import Timing
from moesaic_lab.tables import Column, byte_size, milliseconds, share, table

NOTES = (
    "Virtual compute: experts sleep for as long as an accelerator of the configured rate would take; everything else is real: "
    "one layer on the runtime, forward and backward, real bytes between real processes over emulated links (network "
    "namespaces, veth pairs shaped by htb). Times are of this machine, with several ranks on a core; ratios are what carries "
    "over. Methods in turn, each on its own layer; before that every method's results and gradients are held against the "
    "plain layer's with real experts, and its bytes and its peak of memory counted (all tensors alive in one step beyond "
    "those before it, of the rank that has most). MaxVio is of ranks: the busiest rank's copies over the mean, minus 1. Each "
    "case has several calls whose hot experts differ in part, taken in turn. Expert placement knows an earlier call and "
    "moves no weights in the timed steps; NetMoE's residual is not moved, and its samples do not go home. Ours learns from "
    "what its calls take: it runs `learning_calls` steps before anything is timed, as training runs thousands of "
    "them; `trials` are the calls that ran an option to learn what it takes, before the timed steps and among them. "
    "Ratios under 1.10 are the worse end of the median's 95 % interval over 30 pairs. Simulated rows are the cost "
    "simulator's, not measured. In the simulated shares, `moving_seconds` is what it takes to move experts with their "
    "optimizer state from where they began to where a placement has them, alone on the links; it is spent once in "
    "`moves_every` calls, and `of_forced` counts each call's part of it. Weights that a call replicates (shadows, spilling, "
    "EPLB, LPLB, LAER's re-layout) travel within the call, and their gradients back, so they are in `seconds`."
)
"""What a reader must know to judge the figures."""


BED = "bed"
PARTS: dict[type, str] = {Share: "shares", TimedDecision: "decision", BudgetHeld: "memory"}
"""Of the rows besides those of beds, by what they are made of."""


def all_rows(
    cells: Sequence[BalanceCell], shares: Sequence[Share] = (), decided: Sequence[TimedDecision] = (),
    held: Sequence[BudgetHeld] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Return everything that was measured and simulated, as plain data."""
    simulated = [{"part": PARTS[Share], **asdict(each), "of_forced": each.of_forced} for each in shares]
    alone = [{"part": PARTS[TimedDecision], **asdict(each)} for each in decided]
    counted = [{"part": PARTS[BudgetHeld], **asdict(each)} for each in held]
    return [*(row for cell in cells for row in rows_of(cell)), *simulated, *alone, *counted]


def rows_of(cell: BalanceCell) -> list[dict[str, Any]]:
    """Return a line of the table per method."""
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
    return [{**shape, "method": name, "is_best": name == best, **_figures(cell, name)} for name in cell.timings]


def _figures(cell: BalanceCell, name: str) -> dict[str, Any]:
    timing, over, decided = cell.timings[name], cell.ratio(PLAIN, name), cell.decided.get(name)
    return {
        **timing.row(),
        "seconds": list(timing.seconds),
        "near_seconds": list(cell.near[name]) if name in cell.near else None,
        **over.row("plain_over_this"),
        "communication_seconds": cell.link_seconds[name],
        "computing_seconds": cell.charged[name],
        "across_bytes": cell.across_bytes[name],
        "peak_bytes": cell.peak_bytes[name],
        "promised_bytes": cell.job.methods[name].plan.memory_budget,
        "error": cell.error[name],
        "replicated_experts": statistics.mean(decided.replicated_experts) if decided else 0.0,
        "replicated_copies": statistics.mean(decided.replicated_copies) if decided else 0.0,
        "options": ", ".join(sorted(set(decided.options))) if decided else "",
        "decision_seconds": statistics.median(decided.seconds) if decided else 0.0,
        "weighing_seconds": statistics.median(decided.weighing_seconds)
        if decided and decided.weighing_seconds
        else 0.0,
        "trials": list(decided.trials) if decided else [0, 0],
    }


def cell_of(rows: Sequence[dict[str, Any]], case: SkewedCase) -> BalanceCell:
    """Return the cell whose rows these are: `rows_of` gives them back."""
    place, by_method = case.place, {row["method"]: row for row in rows}
    budget = next((row["promised_bytes"] for row in rows if row["promised_bytes"]), None)
    every = methods(place.grid, budget)
    return BalanceCell(
        job=BalanceJob(case=case, methods={name: every[name] for name in by_method}),
        max_vio=(rows[0]["max_vio"],),
        timings={name: Timing.of(row["seconds"]) for name, row in by_method.items()},
        near={name: tuple(row["near_seconds"]) for name, row in by_method.items() if row["near_seconds"]},
        peak_bytes={name: row["peak_bytes"] for name, row in by_method.items()},
        error={name: row["error"] for name, row in by_method.items()},
        link_seconds={name: row["communication_seconds"] for name, row in by_method.items()},
        across_bytes={name: row["across_bytes"] for name, row in by_method.items()},
        charged={name: row["computing_seconds"] for name, row in by_method.items()},
        decided={name: _decided_of(row) for name, row in by_method.items() if row["options"]},
    )


def _decided_of(row: dict[str, Any]) -> Decided:
    return Decided(
        seconds=(row["decision_seconds"],), options=tuple(row["options"].split(", ")),
        replicated_experts=(row["replicated_experts"],), replicated_copies=(row["replicated_copies"],),
        weighing_seconds=(row["weighing_seconds"],), trials=tuple(row["trials"]),
    )  # fmt: skip


COLUMNS = (
    Column(key="case", title="case", is_text=True),
    Column(key="max_vio", title="MaxVio", show=share),
    Column(key="method", title="method", is_text=True),
    Column(key="is_best", title="best", show=lambda is_best: "*" if is_best else ""),
    Column(key="median_seconds", title="median ms", show=milliseconds),
    Column(key="low_seconds", title="quartile", show=milliseconds),
    Column(key="high_seconds", title="quartile", show=milliseconds),
    Column(key="plain_over_this", title="plain / this", show=share),
    Column(key="communication_seconds", title="links ms", show=milliseconds),
    Column(key="computing_seconds", title="computing ms", show=milliseconds),
    Column(key="across_bytes", title="across", show=byte_size),
    Column(key="peak_bytes", title="peak", show=byte_size),
    Column(key="replicated_experts", title="replicated experts", show=lambda value: f"{value:.1f}" if value else ""),
    Column(key="decision_seconds", title="deciding ms", show=lambda value: milliseconds(value) if value else ""),
    Column(key="trials", title="trials", show=lambda value: " + ".join(map(str, value)) if any(value) else ""),
)
"""Of the table on the terminal."""
SHARE_COLUMNS = (
    Column(key="cluster", title="cluster", is_text=True),
    Column(key="ranks", title="ranks"),
    Column(key="load", title="load", is_text=True),
    Column(key="ratio", title="weights / rows", show=lambda value: f"{value:g}"),
    Column(key="method", title="method", is_text=True),
    Column(key="max_vio", title="MaxVio", show=share),
    Column(key="median", title="of forced", show=share),
    Column(key="low", title="least", show=share),
    Column(key="high", title="most", show=share),
    Column(key="of_own", title="of own forced", show=share),
    Column(key="decision_seconds", title="deciding ms", show=milliseconds),
    Column(key="calls", title="calls"),
)


def share_rows(shares: Sequence[Share]) -> list[dict[str, Any]]:
    """Return shares of forced balance by cluster, load, weights and method: median, least and most over the calls."""
    groups: dict[tuple[Any, ...], list[Share]] = {}
    for each in shares:
        load = each.load if each.load == RECORDED else f"{each.load}, MaxVio {round(2 * each.max_vio) / 2:g}"
        groups.setdefault((each.cluster, each.ranks, load, each.ratio, each.method), []).append(each)
    names = ("cluster", "ranks", "load", "ratio", "method")
    return [
        {
            **dict(zip(names, key)),
            "max_vio": statistics.median(each.max_vio for each in found),
            "median": statistics.median(each.of_forced for each in found),
            "low": min(each.of_forced for each in found),
            "high": max(each.of_forced for each in found),
            "of_own": statistics.median(each.own_forced_seconds / each.whole_seconds for each in found),
            "decision_seconds": statistics.median(each.decision_seconds for each in found),
            "calls": len(found),
        }
        for key, found in groups.items()
    ]


def tables(cells: Sequence[BalanceCell], shares: Sequence[Share] = ()) -> list[Table]:
    """Return a table per bed and layer, and one of shares of forced balance, for a terminal."""
    made = []
    for place in dict.fromkeys(cell.job.case.place for cell in cells):
        rows = [row for cell in cells if cell.job.case.place == place for row in rows_of(cell)]
        made.append(table(f"{described(rows[0])}, virtual compute", rows, COLUMNS, group_by=("case",)))
    if shares:
        title, groups = "Simulated: share of forced balance", ("cluster", "ranks", "load", "ratio")
        made.append(table(title, share_rows(shares), SHARE_COLUMNS, group_by=groups))
    return made


def described(row: dict[str, Any]) -> str:
    """Return the layer of a row in words: its bed, tokens and sizes."""
    return (
        f"{row['bed']}, {row['tokens_per_rank']} tokens per rank, dim {row['dim']}, hidden {row['hidden']}, "
        f"{row['experts_per_rank']} experts per rank, top {row['top_k']}"
    )
