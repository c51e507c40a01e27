"""What a budget of rows costs and saves: speed and peak memory of a layer against `plan.token_budget`, on an emulated cluster.

The layer, bed and loads are those of `moesaic bench balance`. For each load plain expert parallelism and the arbiter run with
several budgets, and without one, all in turn. Before that results and gradients of each are held against the plain layer's, and
its peak of memory is counted. Budgets are over the load of a rank under balance, memory over that of the plain layer there.

    python benchmarks/token_budget.py --json benchmarks/results/token_budget.json --svg docs/images/bench/token_budget.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from moesaic.bench.balance.config import COMMITTED, Config, read_config
from moesaic.bench.balance.job import Job
from moesaic.bench.balance.methods import OURS, PLAIN, Method
from moesaic.bench.balance.run import Cell, measure
from moesaic.bench.tables import Column, share, table
from moesaic.plan.plan import Plan
from moesaic.report.claims import Measurement
from moesaic.testbed.cluster import Launcher

NOTES = (
    "One layer, forward and backward, virtual compute, real bytes over emulated links; methods in turn, medians and the 95 % "
    "interval of ratios within a round. budget: over the copies of a rank under balance; null for none. memory: bytes of all "
    "tensors alive at once with real experts, of the rank that has most, over those of plain ep at MaxVio 0."
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare."""

    config: Path = COMMITTED
    """Beds and layers."""
    bed: str = "4x2"
    """Name of the bed in it."""
    max_vio: tuple[float, ...] = (2.0, 4.0)
    """Of ranks, as the configuration has them."""
    budgets: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0)
    """Over the load of a rank under balance."""
    repeats: int = 5
    json: Path | None = None
    """Write the table here."""
    svg: Path | None = None
    """Draw speed and memory against the budget here."""


def methods(mean: int, budgets: Sequence[float]) -> dict[str, Method]:
    """Return plain ep and the arbiter, without a budget and with each."""
    found = {}
    for name, lending in ((PLAIN, "none"), (OURS, "arbiter")):
        for budget in (None, *budgets):
            rows = None if budget is None else int(budget * mean)
            label = name if budget is None else f"{name}, {budget:g}"
            found[label] = Method(plan=Plan(lending=lending, token_budget=rows))  # type: ignore[arg-type]
    return found


def jobs_of(config: Config, options: Options) -> list[Job]:
    """Return a job per load, and first of all plain ep under balance: what memory is compared with."""
    found = []
    for case in config.cases():
        mean = case.place.tokens_per_rank * case.place.top_k
        chosen = methods(mean, options.budgets if case.max_vio else ())
        found.append(Job(case=case, methods=chosen if case.max_vio else {PLAIN: chosen[PLAIN]}))
    return found


def rows_of(cell: Cell, even_bytes: int, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """Return a line per method of a load."""
    found = []
    for name in (PLAIN, OURS):
        for budget in (None, *budgets):
            label = name if budget is None else f"{name}, {budget:g}"
            over = cell.ratio(PLAIN, label)
            found.append({
                "max_vio": cell.job.case.max_vio, "method": name, "budget": budget,
                "median_seconds": cell.timings[label].median, "plain_over_this": over.median,
                "plain_over_this_95": [over.low, over.high], "peak_bytes": cell.peak_bytes[label],
                "memory": cell.peak_bytes[label] / even_bytes, "error": cell.error[label],
                "repeats": len(cell.timings[label].seconds),
            })  # fmt: skip
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw speed over memory, a line per load and method, a point per budget."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for load in sorted({row["max_vio"] for row in rows}):
        for name, marker in ((PLAIN, "o"), (OURS, "s")):
            chosen = sorted(
                (row for row in rows if (row["max_vio"], row["method"]) == (load, name)), key=lambda row: row["memory"]
            )
            axes.plot(
                [row["memory"] for row in chosen], [row["plain_over_this"] for row in chosen], marker=marker,
                label=f"{name}, MaxVio {load:g}",
            )  # fmt: skip
            for row in chosen:
                text = "none" if row["budget"] is None else f"{row['budget']:g}"
                axes.annotate(text, (row["memory"], row["plain_over_this"]), fontsize=7)
    axes.set_xlabel("peak memory over that of plain ep under balance")
    axes.set_ylabel("time of plain ep over this")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main(options: Options) -> None:
    """Measure, print the table, write and draw."""
    config = read_config(options.config)
    loads = tuple(f"{options.bed}-{load:g}" for load in (0.0, *options.max_vio))
    config = replace(config, only=loads).repeated(options.repeats)
    config.check()
    jobs = jobs_of(config, options)
    with Launcher() as launcher, launcher.open(jobs[0].case.place.bed) as ranks:
        cells = [measure(ranks, [job])[0] for job in jobs]
    even = next(cell.peak_bytes[PLAIN] for cell in cells if not cell.job.case.max_vio)
    rows = [row for cell in cells if cell.job.case.max_vio for row in rows_of(cell, even, options.budgets)]
    Console(stderr=True).print(table("Token budgets", rows, COLUMNS, group_by=("max_vio", "method")))
    if options.json is not None:
        Measurement(rows=rows, claims=[], notes=NOTES, packages=("torch", "numpy")).write(str(options.json))
    if options.svg is not None:
        draw(rows, options.svg)


COLUMNS = (
    Column(key="max_vio", title="MaxVio", show=share),
    Column(key="method", title="method", is_text=True),
    Column(key="budget", title="budget", show=lambda value: "none" if value is None else f"{value:g}"),
    Column(key="plain_over_this", title="plain / this", show=share),
    Column(key="memory", title="memory / balanced", show=share),
)
"""Of the table on the terminal."""


if __name__ == "__main__":
    main(tyro.cli(Options))
