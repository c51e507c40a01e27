"""`moesaic bench balance`: answers to skewed routing, in turn on an emulated cluster, and simulated on larger ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moesaic.errors import InputError
from moesaic_lab.balance.claims import claims
from moesaic_lab.balance.config import DECISIONS, MEMORY, SHARES, BalanceBenchConfig, read_config
from moesaic_lab.balance.decisions import TimedDecision, decisions
from moesaic_lab.balance.memory import BudgetHeld, budgets_held
from moesaic_lab.balance.pictures import panels
from moesaic_lab.balance.rows import BED, NOTES, PARTS, all_rows, cell_of, tables
from moesaic_lab.balance.run import BalanceCell, run
from moesaic_lab.balance.shares import Share, shares_of_forced
from moesaic_lab.benchmark import Benchmark, EmulatedOptions, Told, require_cluster, words_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BalanceOptions(EmulatedOptions):
    """What the benchmark can be asked for."""

    keep: bool = False
    """Take what the file of --json has of simulated shares and counted memory, rather than make that again, and
    the cases on beds that are not run."""


class BalanceMeasured(NamedTuple):
    """What was found."""

    cells: list[BalanceCell]
    shares: list[Share]
    decided: list[TimedDecision]
    held: list[BudgetHeld]


def cases(options: BalanceOptions) -> BalanceBenchConfig:
    """Return what is asked for."""
    if options.keep and options.json in (None, "-"):
        raise InputError("--keep takes rows from the file of --json: name that file")
    config = read_config(Path(options.config)) if options.config else read_config()
    config = config.narrowed(only=words_of(options.only), repeats=options.repeats)
    if config.labels:
        require_cluster()
    return config


def measure(options: BalanceOptions, config: BalanceBenchConfig, told: Told) -> BalanceMeasured:
    """Measure on one bed after the other, then simulate."""
    there = Path(options.json) if options.keep and options.json else None
    before = json.loads(there.read_text(encoding="utf-8")) if there is not None and there.exists() else {}
    rows = before.get("rows", [])
    shares, decided, held = kept(rows, Share), kept(rows, TimedDecision), kept(rows, BudgetHeld)
    cells = [*kept_cells(rows, config), *run(config, told)]
    cells.sort(key=lambda cell: config.order.index(cell.job.case.label))
    if config.has(SHARES):
        assert config.shares is not None
        shares = shares_of_forced(config.shares, config.folder, config.seed, told, shares)
    if config.has(DECISIONS):
        decided = decisions()
    if config.has(MEMORY):
        held = held or budgets_held(told)
    return BalanceMeasured(cells, shares, decided, held)


def kept_cells(rows: list[dict[str, Any]], config: BalanceBenchConfig) -> list[BalanceCell]:
    """Return the cases on beds of a file of results that are not run again; those whose rows are of an older form are left
    out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == BED and "seconds" in row:
            found.setdefault(row["case"], []).append(row)
    return [
        cell_of(of_case, config.case_without_routes(label))
        for label, of_case in found.items()
        if label in config.order and label not in config.labels
    ]


def kept(rows: list[dict[str, Any]], kind: type[T]) -> list[T]:
    """Return what the rows of a kind were made of; rows of an older form are left out."""
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    whole = [row for row in rows if row["part"] == PARTS[kind] and set(names) <= set(row)]
    return [kind(**{name: row[name] for name in names}) for row in whole]


BENCHMARK = Benchmark(
    name="balance",
    description="Measure answers to skewed routing in turn on an emulated cluster, with virtual compute.",
    options=BalanceOptions, notes=NOTES, cases=cases, measure=measure, rows=lambda found: all_rows(*found),
    claims=lambda found: claims(*found), columns=lambda found: tables(*found[:2]), panels=lambda found: panels(*found[:2]),
    title="One MoE layer under skewed routing, virtual compute", panels_in_a_row=3,
)  # fmt: skip
