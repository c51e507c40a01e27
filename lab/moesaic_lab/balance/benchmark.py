"""`moesaic bench balance`: compares methods for skewed routing on emulated clusters, and in
simulation on larger ones.

Virtual compute: experts sleep for as long as an accelerator of the configured rate would compute.
Everything else is real: one layer on the runtime, forward and backward, with real bytes between
processes over emulated links (network namespaces, veth pairs shaped by htb). Times are those of
this machine, with several ranks on a core; only ratios carry over to others. Methods run in turn,
each on its own layer. Before that, every method runs with real experts: its results and gradients
are compared with the plain layer's, and its bytes and peak memory are counted (the tensors alive at
once beyond those before the step, on the rank with the highest peak). MaxVio is of ranks: the
busiest rank's copies over the mean, minus 1. Each case cycles through several calls, whose hot
experts differ in part. Expert placement learns from an earlier call and moves no weights in the
timed steps. Under NetMoE the residual does not move, and samples do not return home. Ours is given
what a replicated expert costs the host, and the speed of a slow rank or link, as a profile of the
cluster has them. Ratios under 1.10 are the worse end of the median's 95 % interval over 30 pairs.
Simulated rows come from the cost simulator and are not measured. In the simulated shares,
`moving_seconds` is the time to move experts with their optimizer state from their initial ranks to
their placement, alone on the links. It is spent once in `moves_every` calls, and `of_forced`
includes each call's part of it. Weights that a call replicates (shadows, spilling, EPLB, LPLB,
LAER's re-layout) and their gradients are sent within the call, so `seconds` includes them.

The pictures are small multiples: speed-up over MaxVio, replicated experts, gain of a schedule,
memory.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, TypeVar

from moesaic.errors import InputError
from moesaic_lab.balance.cells import BED, PARTS, BalanceCell, Row, all_rows, cell_of, run, tables
from moesaic_lab.balance.claims import claims
from moesaic_lab.balance.config import (
    DECISIONS,
    MEMORY,
    SHARES,
    BalanceBenchConfig,
    BalancePlace,
    SharesOfForced,
    read_config,
)
from moesaic_lab.balance.methods import PLAIN, SMART
from moesaic_lab.balance.shares import MADE_UP, SLOW, SYNTHETIC, Share, shares_of_forced
from moesaic_lab.balance.simulated import TimedDecision, decisions
from moesaic_lab.balance.tracked_memory import BudgetHeld, budgets_held
from moesaic_lab.benchmark import (
    Benchmark,
    EmulatedOptions,
    Told,
    keeping,
    kept,
    notes_of,
    require_cluster,
    words_of,
)
from moesaic_lab.measure import Ratio
from moesaic_lab.pictures import Panel, PlottedSeries

T = TypeVar("T")
SPEEDUP = "plain ep / method, virtual compute"
"""Title of every axis that shows a speed-up."""


@dataclass(frozen=True, kw_only=True)
class BalanceOptions(EmulatedOptions):
    """Command-line options of the benchmark."""

    only: str | None = None
    """Run only these parts, separated by commas; an unknown name lists all parts. If the file of
    --json exists, the rows of the other parts stay in it, and claims rest on all rows."""


class BalanceMeasured(NamedTuple):
    """Results of all parts of the benchmark."""

    cells: list[BalanceCell]
    shares: list[Share]
    decided: list[TimedDecision]
    under_budget: list[BudgetHeld]


def cases(options: BalanceOptions) -> BalanceBenchConfig:
    """Return the configuration, narrowed to the cases that the options ask for."""
    config = read_config(Path(options.config)) if options.config else read_config()
    config = config.narrowed(only=words_of(options.only), repeats=options.repeats)
    if config.selected:
        require_cluster()
    return config


def measure(options: BalanceOptions, config: BalanceBenchConfig, told: Told) -> BalanceMeasured:
    """Measure the cases bed by bed, then simulate."""
    rows = rows_to_stay(options)  # what an earlier run measured, unless it is measured again
    shares = rebuild(rows, Share)
    decided = rebuild(rows, TimedDecision)
    under_budget = rebuild(rows, BudgetHeld)
    order = [case.label for case in config.every]
    with keeping(options.keep) as keep:
        cells = sorted(
            [*other_cells(rows, config), *run(config, told, keep)],
            key=lambda cell: order.index(cell.job.case.label),
        )
        if config.has(SHARES):
            assert config.shares is not None
            shares = shares_of_forced(config.shares, config.folder, config.seed, told, keep)
        if config.has(DECISIONS):
            told("decisions")
            kept_rows = kept(keep / "decisions.json", lambda: list(map(asdict, decisions())))
            decided = [TimedDecision(**row) for row in kept_rows]
        if config.has(MEMORY):
            under_budget = budgets_held(told, keep)
    return BalanceMeasured(cells, shares, decided, under_budget)


def rows_to_stay(options: BalanceOptions) -> list[Row]:
    """Return the rows of the file of --json, some of which a run of only some parts replaces.

    Raises:
        InputError: if it is not a file of results.
    """
    path = Path(options.json or "-")
    if not options.only or not path.is_file():
        return []
    try:
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"--json {path}: not a file of results: name another") from None
    return rows


def other_cells(rows: list[Row], config: BalanceBenchConfig) -> list[BalanceCell]:
    """Return the cells of a result file whose cases do not run again."""
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        if row["part"] == BED:
            by_case.setdefault(row["case"], []).append(row)
    repeated = {case.label for case in config.selected}
    return [
        cell_of(by_case[case.label], case)
        for case in config.every
        if case.label in by_case and case.label not in repeated
    ]


def rebuild(rows: list[Row], kind: type[T]) -> list[T]:
    """Rebuild the objects of class `kind` from the rows of a result file."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return [
        kind(**{name: row[name] for name in names}) for row in rows if row["part"] == PARTS[kind]
    ]


def panels(cells: Sequence[BalanceCell], shares: Sequence[Share] = ()) -> list[Panel]:
    """Return the panels of the picture.

    Simulated shares of forced balance get a panel per cluster and kind of load. Each bed gets two
    panels, all recorded cases share one, and two more compare the beds.
    """
    groups: dict[tuple[str, int, str], list[Share]] = {}
    for share in shares:
        if share.ratio == SharesOfForced.ratio and share.load != SLOW:
            groups.setdefault((share.cluster, share.ranks, share.load), []).append(share)
    charts = [_shares_panel(points, load) for (_, _, load), points in groups.items()]

    by_bed: dict[BalancePlace, list[BalanceCell]] = {}
    recorded = []
    for cell in cells:
        if cell.job.case.max_vio is None:
            recorded.append(cell)
        else:
            by_bed.setdefault(cell.job.case.place, []).append(cell)
    for place, bed_cells in by_bed.items():
        charts.append(_speedup_panel(f"{place.name}, speed-up", bed_cells))
        charts.append(_memory_panel(f"{place.name}, memory", bed_cells))
    if recorded:
        charts.append(_recorded_panel("recorded routing", recorded))
    if by_bed:
        largest = max(by_bed, key=lambda place: place.bed.world)
        charts.append(_replicated_panel(by_bed[largest]))
        charts.append(_gain_panel(by_bed))
    return charts


def _shares_panel(shares: Sequence[Share], load: str) -> Panel:
    """Return a panel of the share of forced balance over MaxVio under one kind of load, with a
    point for each call."""
    series = []
    for name in dict.fromkeys(share.method for share in shares):
        points = sorted(
            (share for share in shares if share.method == name), key=lambda share: share.max_vio
        )
        x = tuple(share.max_vio for share in points)
        y = tuple(share.of_forced for share in points)
        series.append(PlottedSeries(name=name, x=x, y=y))
    return Panel(
        title=(
            f"{shares[0].cluster}, {shares[0].ranks} ranks, {load.replace(MADE_UP, SYNTHETIC)} "
            "loads"
        ),
        x_title="MaxVio of ranks",
        y_title="share of forced balance",
        series=tuple(series),
    )


def _speedup_panel(title: str, cells: Sequence[BalanceCell]) -> Panel:
    """Return a panel of the speed-up of every method over MaxVio."""
    series = tuple(
        _ratio_series(name, _loads(cells), [cell.ratio(PLAIN, name) for cell in cells])
        for name in cells[0].timings
    )
    return Panel(title=title, x_title="MaxVio of ranks", y_title=SPEEDUP, series=series)


def _memory_panel(title: str, cells: Sequence[BalanceCell]) -> Panel:
    """Return a panel of the peak memory of every method over MaxVio."""
    series = tuple(
        PlottedSeries(
            name=name, x=_loads(cells), y=tuple(cell.peak_bytes[name] / 2**20 for cell in cells)
        )
        for name in cells[0].timings
    )
    return Panel(title=title, x_title="MaxVio of ranks", y_title="peak, MiB", series=series)


def _recorded_panel(title: str, cells: Sequence[BalanceCell]) -> Panel:
    """Return the panel of times under recorded routing."""
    x = tuple(float(index) for index in range(len(cells)))
    series = []
    for name in cells[0].timings:
        ratios = [cell.ratio(PLAIN, name) for cell in cells]
        series.append(_ratio_series(name, x, ratios))
    categories = tuple(
        f"{cell.job.case.label}, MaxVio {statistics.mean(cell.max_vio):.2f}" for cell in cells
    )
    return Panel(
        title=title, x_title="", y_title=SPEEDUP, series=tuple(series), categories=categories
    )


def _replicated_panel(cells: Sequence[BalanceCell]) -> Panel:
    """Return a panel of the number of experts that each policy replicates per call, on one bed."""
    place = cells[0].job.case.place
    series = tuple(
        PlottedSeries(
            name=name,
            x=_loads(cells),
            y=tuple(statistics.mean(cell.decided[name].replicated_experts) for cell in cells),
        )
        for name in cells[0].decided
    )
    title = f"{place.name}, replicated experts per call"
    return Panel(
        title=title,
        x_title="MaxVio of ranks",
        y_title=f"of {place.num_experts} experts",
        series=series,
    )


def _gain_panel(by_bed: dict[BalancePlace, list[BalanceCell]]) -> Panel:
    """Return a panel that compares the gain of the smart schedule with the largest gain that
    overlap could give the plain layer: a line for each bed, and the diagonal where both are
    equal."""
    series = []
    all_x: list[float] = []
    for place, cells in by_bed.items():
        ordered = sorted(cells, key=_most_gain)
        x = tuple(_most_gain(cell) for cell in ordered)
        ratios = [cell.ratio(PLAIN, SMART) for cell in ordered]
        series.append(_ratio_series(f"{SMART}, {place.name}", x, ratios))
        all_x += x
    ends = (min(all_x), max(all_x))
    series.append(PlottedSeries(name="all that overlap could gain", x=ends, y=ends))
    return Panel(
        title="gain of the smart schedule",
        x_title="(comm + comp) / max(comm, comp) of plain ep",
        y_title="plain ep / smart schedule, virtual compute",
        series=tuple(series),
    )


def _most_gain(cell: BalanceCell) -> float:
    """Return how much faster a call gets if messages and computation overlap completely."""
    comm = cell.bound(PLAIN)
    comp = cell.charged[PLAIN]
    return (comm + comp) / max(comm, comp)


def _loads(cells: Sequence[BalanceCell]) -> tuple[float, ...]:
    """Return the MaxVio of each cell."""
    return tuple(cell.job.case.max_vio or 0.0 for cell in cells)


def _ratio_series(name: str, x: tuple[float, ...], ratios: Sequence[Ratio]) -> PlottedSeries:
    """Return the series of ratios with their intervals."""
    return PlottedSeries(
        name=name,
        x=x,
        y=tuple(ratio.median for ratio in ratios),
        low=tuple(ratio.low for ratio in ratios),
        high=tuple(ratio.high for ratio in ratios),
    )


BENCHMARK = Benchmark(
    name="balance",
    description=(
        "Compare methods for skewed routing, in turn on an emulated cluster, with virtual compute."
    ),
    options=BalanceOptions,
    notes=notes_of(__doc__),
    cases=cases,
    measure=measure,
    rows=lambda measured: all_rows(*measured),
    claims=lambda measured: claims(*measured),
    columns=lambda measured: tables(*measured[:2]),
    panels=lambda measured: panels(*measured[:2]),
    title="One MoE layer under skewed routing, virtual compute",
    panels_in_a_row=3,
)
