"""What a budget of rows costs and saves: speed and peak memory of a layer against `plan.token_budget`, on an emulated cluster.

The layer, bed and loads are those of `moesaic bench balance`. For each load plain expert parallelism, spilling and the arbiter
(which goes by its model: learning takes more calls than this) run with several budgets, and without one, all in turn. Before
that results and gradients of each are held against the plain layer's, and its peak of memory is counted. Budgets are over the
load of a rank under balance, memory over that of the plain layer there.

    moesaic bench token_budget --json benchmarks/results/token_budget.json --picture docs/images/bench/token_budget.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.plan.plan import Plan
from moesaic_lab.balance.config import COMMITTED, BalanceBenchConfig, read_config
from moesaic_lab.balance.job import BalanceJob
from moesaic_lab.balance.methods import OURS, PLAIN, BalanceMethod
from moesaic_lab.balance.run import BalanceCell, measure
from moesaic_lab.benchmark import Benchmark, DrawnOptions, Shown, Told, no_claims, require_cluster, same
from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_lab.tables import Column, share
from moesaic_testbed.cluster import Launcher

NOTES = (
    "One layer, forward and backward, virtual compute, real bytes over emulated links; methods in turn, medians and the 95 % "
    "interval of ratios within a round. budget: over the copies of a rank under balance; null for none. memory: bytes of all "
    "tensors alive at once with real experts, of the rank that has most, over those of plain ep at MaxVio 0."
)

LENDINGS = {PLAIN: "none", "spill": "spill", OURS: "arbiter"}
"""Methods, and what their plans replicate."""


@dataclass(frozen=True, kw_only=True)
class TokenBudgetOptions(DrawnOptions):
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


def methods(mean: int, budgets: Sequence[float]) -> dict[str, BalanceMethod]:
    """Return plain ep, spilling and the arbiter, without a budget and with each."""
    found = {}
    for name, replication in LENDINGS.items():
        for budget in (None, *budgets):
            rows = None if budget is None else int(budget * mean)
            label = name if budget is None else f"{name}, {budget:g}"
            found[label] = BalanceMethod(plan=Plan(replication=replication, token_budget=rows))
    return found


def jobs_of(config: BalanceBenchConfig, options: TokenBudgetOptions) -> list[BalanceJob]:
    """Return a job per load, and first of all plain ep under balance: what memory is compared with."""
    found = []
    for case in config.cases():
        mean = case.place.tokens_per_rank * case.place.top_k
        chosen = methods(mean, options.budgets if case.max_vio else ())
        found.append(BalanceJob(case=case, methods=chosen if case.max_vio else {PLAIN: chosen[PLAIN]}))
    return found


def rows_of(cell: BalanceCell, even_bytes: int, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """Return a line per method of a load."""
    found = []
    for name in LENDINGS:
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


def panels(rows: Sequence[dict[str, Any]]) -> list[Panel]:
    """Return a chart per load: speed over memory, a line per method, a point per budget."""
    found = []
    for load in sorted({row["max_vio"] for row in rows}):
        series = []
        for name in LENDINGS:
            chosen = [row for row in rows if (row["max_vio"], row["method"]) == (load, name)]
            chosen.sort(key=lambda row: row["memory"])
            low, high = zip(*(row["plain_over_this_95"] for row in chosen))
            series.append(
                PlottedSeries(
                    name=name, x=tuple(row["memory"] for row in chosen), low=low, high=high,
                    y=tuple(row["plain_over_this"] for row in chosen),
                )
            )  # fmt: skip
        found.append(
            Panel(
                title=f"MaxVio {load:g}", x_title="peak memory over plain ep under balance",
                y_title="time of plain ep / this, virtual compute", series=tuple(series),
            )
        )  # fmt: skip
    return found


COLUMNS = (
    Column(key="max_vio", title="MaxVio", show=share),
    Column(key="method", title="method", is_text=True),
    Column(key="budget", title="budget", show=lambda value: "none" if value is None else f"{value:g}"),
    Column(key="plain_over_this", title="plain / this", show=share),
    Column(key="memory", title="memory / balanced", show=share),
)
"""Of the table on the terminal."""


def cases(options: TokenBudgetOptions) -> list[BalanceJob]:
    """Return a job per load, those under balance first."""
    loads = tuple(f"{options.bed}-{load:g}" for load in (0.0, *options.max_vio))
    config = read_config(options.config).narrowed(only=loads, repeats=options.repeats)
    require_cluster()
    return jobs_of(config, options)


def measure_all(options: TokenBudgetOptions, cases: list[BalanceJob], told: Told) -> list[dict[str, Any]]:
    """Measure load after load."""
    cells = []
    with Launcher() as launcher, launcher.open(cases[0].case.place.bed) as ranks:
        for job in cases:
            told(job.case.label)
            cells += measure(ranks, [job])
    even = next(cell.peak_bytes[PLAIN] for cell in cells if not cell.job.case.max_vio)
    return [row for cell in cells if cell.job.case.max_vio for row in rows_of(cell, even, options.budgets)]


BENCHMARK = Benchmark(
    name="token_budget", description="Measure speed and memory under budgets of rows.", options=TokenBudgetOptions,
    notes=NOTES, cases=cases, measure=measure_all, rows=same, claims=no_claims, panels=panels, title="A budget of rows",
    columns=(Shown(title="Token budgets", columns=COLUMNS, group_by=("max_vio", "method")),),
)  # fmt: skip
