"""`moesaic bench train`: training steps of the demo model on an emulated cluster.

Real bytes and real compute over emulated links (network namespaces, veth pairs shaped by htb); 4
ranks of one thread on this machine's cores: with fewer cores than ranks compute is stretched by as
much, and host time too. All systems in one run, in turn, from the same weights and tokens (bytes
drawn evenly), float32 on the wire, auxiliary losses off; the same loop, optimizer and reduction of
dense gradients. Before timing, loss and gradients of each lossless system are compared with the
model in one process. plain: expert parallelism as in torchtitan; receive-first: over the same
transport as ours (sockets); torch's: by all_to_all_single (Gloo). best: our lossless plan that a
separate trial chose. bound: bytes of a step over rate on the slowest link. Communication share:
seconds in exchanges and the dense reduction, waiting for slower ranks included. Coded plans change
results and carry no claim. Layouts: one process, one thread, no links.

Its MoE layers run by our plans and by the layers of others, timed in turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from moesaic_lab.benchmark import Told, emulated, notes_of, on_beds
from moesaic_lab.bounds import Limit, Message, crossing, link_limit
from moesaic_lab.claims import Claim, NotMeasuredError, claimed
from moesaic_lab.kept_ranks import KeptRanks
from moesaic_lab.measure import MANY, NEAR, Ratio, Timing, over_ranks, paired
from moesaic_lab.peers import absence
from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_lab.tables import QUARTILES, table
from moesaic_lab.train import layout
from moesaic_lab.train import ranks as side
from moesaic_lab.train.config import Layouts, TrainBenchConfig, TrainCase, read_config
from moesaic_lab.train.layout import BY_SOURCE, ORDERED
from moesaic_lab.train.ranks import MeasuredSystem, TrainFound
from moesaic_testbed import Bed

LEAST = 8
"""Least number of pairs for any ratio."""
SWEEP = (2, 4, 8)
"""Experts per token of the cases whose median is claimed; a claim needs all of them. The demo
itself has 2."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The measurements of one system, over all ranks."""

    name: str
    kind: str
    """"ours", "plain" or "deepspeed"."""
    exchange: str
    """"receive-first" or "torch's"."""
    is_lossless: bool
    timing: Timing | None
    """Times of a step; None for a plan that was only tried."""
    trial_seconds: float | None
    """Median seconds of a step in the trial; None for systems without a trial."""
    phases: Mapping[str, float]
    """Median seconds per phase, averaged over the ranks."""
    communication_share: float | None
    """Share of a step in exchanges and the dense reduction, averaged over the ranks; None for our
    plans."""
    inter_bytes: float
    """Bytes between nodes in one step, in both directions."""
    limit: Limit
    """Least time that the links need for the bytes of a step."""
    worst_error: float
    """Largest relative error of loss and gradients against the model in one process."""


@dataclass(frozen=True, kw_only=True)
class TrainCell:
    """The measurements of one case."""

    case: TrainCase
    outcomes: Sequence[Outcome]
    best: str
    """Name of our lossless plan that the trial chose."""
    most_over_mean_load: float
    """Rows of the fullest expert over the mean."""
    items: int
    """Tokens per step."""

    @property
    def label(self) -> str:
        """Name, mode and link rate of the case, for tables and pictures."""
        return f"{self.case.name} ({self.case.mode}, {self.case.inter})"

    def find(self, kind: str, exchange: str = "receive-first") -> Outcome | None:
        """Return the timed system of a kind and exchange, None if there is none; for "ours" the
        best lossless plan."""
        for outcome in self.outcomes:
            matches = outcome.kind == kind and outcome.exchange == exchange
            is_other_plan = kind == "ours" and outcome.name != self.best
            if matches and not is_other_plan and outcome.timing is not None:
                return outcome
        return None


@dataclass(frozen=True, kw_only=True)
class TrainResults:
    """The results of the whole benchmark."""

    cells: list[TrainCell]
    layout: list[dict[str, Any]]
    """Rows of the layouts; empty if they were not run."""


def run(config: TrainBenchConfig, told: Told, keep: str | None) -> TrainResults:
    """Measure all cases and the layouts of a configuration. This starts clusters, one after
    another.

    Raises:
        RankError: a lossless system computes other results than the model in one process.
    """

    def measure(ranks: KeptRanks, case: TrainCase) -> TrainCell:
        return cell_of(case, ranks.bed, ranks.run(side.measure, config, case))

    cells = list[TrainCell]()
    if config.cases:
        cells = on_beds(
            config.cases,
            lambda case: case.bed,
            lambda case: f"{case.name}, {case.mode}",
            measure,
            told=told,
            keep=keep,
        )
    told("layouts")
    layout_rows = []
    for cell in config.cells:
        if isinstance(cell, Layouts):
            layout_rows += layout.measure(cell)
    return TrainResults(cells=cells, layout=layout_rows)


def cell_of(case: TrainCase, bed: Bed, ranks: Sequence[TrainFound]) -> TrainCell:
    """Combine the measurements of all ranks, by rank, into a cell."""
    spans_by_rank = [
        {system.name: system.spans for system in of_rank.systems if system.spans}
        for of_rank in ranks
    ]
    seconds = over_ranks(spans_by_rank)
    outcomes = []
    for number, first in enumerate(ranks[0].systems):
        measured = [of_rank.systems[number] for of_rank in ranks]
        errors = [error for of_rank in measured for error in of_rank.errors.values()]
        messages = _messages(ranks, number)
        times = seconds.get(first.name)
        outcomes.append(
            Outcome(
                name=first.name,
                kind=first.kind,
                exchange=first.exchange,
                is_lossless=first.is_lossless,
                timing=Timing.of(times) if times else None,
                trial_seconds=first.trial_seconds,
                phases=_phases(measured),
                communication_share=_share(measured, times),
                inter_bytes=float(crossing(messages, bed.node_of)[0]),
                limit=link_limit(messages, bed),
                worst_error=max(errors),
            )
        )
    return TrainCell(
        case=case,
        outcomes=outcomes,
        best=ranks[0].best,
        most_over_mean_load=ranks[0].most_over_mean_load,
        items=ranks[0].items,
    )


def _messages(ranks: Sequence[TrainFound], number: int) -> list[Message]:
    """Return the messages that all ranks sent for the system of a number, an index into `systems`.

    DeepSpeed's own exchange is not recorded. It sends the same messages as DeepSpeed with the
    receive-first exchange.
    """
    systems = ranks[0].systems
    if _hides_messages(systems[number]):
        recorded = [
            other
            for other, system in enumerate(systems)
            if system.kind == "deepspeed" and not _hides_messages(system)
        ]
        number = recorded[0]
    return [message for of_rank in ranks for message in of_rank.systems[number].sent]


def _hides_messages(system: MeasuredSystem) -> bool:
    """Return whether a system sends by DeepSpeed's own exchange, which nothing counts or times."""
    return system.kind == "deepspeed" and system.exchange != "receive-first"


def _phases(of_ranks: Sequence[MeasuredSystem]) -> dict[str, float]:
    """Return the mean over the ranks of each phase's median seconds."""
    means = {}
    for phase, seconds in of_ranks[0].phases.items():
        if seconds:
            medians = [statistics.median(measured.phases[phase]) for measured in of_ranks]
            means[phase] = statistics.mean(medians)
    return means


def _share(of_ranks: Sequence[MeasuredSystem], times: Sequence[float] | None) -> float | None:
    """Return the share of a step in communication; None for our plans, and for DeepSpeed's own
    exchange, which is not timed."""
    first = of_ranks[0]
    if not times or not first.exchanging or _hides_messages(first):
        return None
    by_step = zip(*(measured.exchanging for measured in of_ranks))
    mean_seconds = [statistics.mean(of_step) for of_step in by_step]
    return statistics.median(spent / step for spent, step in zip(mean_seconds, times))


def ratio(cell: TrainCell, numerator: Outcome, denominator: Outcome) -> Ratio:
    """Return the time of one system's step over another's, paired over all rounds in which both
    ran."""
    assert numerator.timing is not None, f"{numerator.name} was not timed in {cell.label}"
    assert denominator.timing is not None, f"{denominator.name} was not timed in {cell.label}"
    rounds = min(len(numerator.timing.seconds), len(denominator.timing.seconds))
    return paired(numerator.timing.seconds[:rounds], denominator.timing.seconds[:rounds])


def claims(results: TrainResults) -> list[Claim]:
    """Return all claims, including those that this run did not measure: medians over cases of our
    step over a peer's."""
    swept = [cell for cell in results.cells if cell.case.in_sweep]

    def of_sweep(top_k: int) -> list[TrainCell]:  # the demo's own top_k is 2
        return [cell for cell in swept if (cell.case.top_k or 2) == top_k][:1]

    def named(name: str) -> list[TrainCell]:
        return [cell for cell in results.cells if cell.case.name == name][:1]

    def over(
        name: str,
        cells: Sequence[TrainCell],
        kind: str = "plain",
        target: float | None = None,
        **which: Any,
    ) -> Claim:
        """Return the claim on our step over a peer's; `which` are arguments of `enough_of`."""

        def value() -> float:
            if not cells:
                raise NotMeasuredError("its cases were not all run")
            return statistics.median(enough_of(cell, kind, **which).median for cell in cells)

        return claimed(f"train.{name}", value, target)

    whole = swept if all(map(of_sweep, SWEEP)) else []
    beside = named("demo beside DeepSpeed")
    return [
        over("step_over_torch_ep", whole, target=0.67),
        over("step_over_deepspeed", beside, "deepspeed", target=0.67),
        over("step_over_torch_ep_own_exchange", whole, exchange="torch's"),
        over("step_over_deepspeed_own_exchange", beside, "deepspeed", exchange="torch's"),
        over("coded_step_over_torch_ep", whole, of_coded=True),
        *(over(f"top{k}.step_over_torch_ep", of_sweep(k)) for k in SWEEP),
        over("inference_over_torch_ep", named("demo inference")),
        claimed("train.flexible_layout_speedup", lambda: flexible(results.layout), None, ">="),
    ]


def enough_of(
    cell: TrainCell, kind: str, exchange: str = "receive-first", of_coded: bool = False
) -> Ratio:
    """Return the time of our step over a peer's.

    Raises:
        NotMeasuredError: one of the two was not timed, or not often enough.
    """
    ours = coded(cell) if of_coded else cell.find("ours")
    peer = cell.find(kind, exchange)
    if peer is None:
        not_installed = absence() if kind == "deepspeed" else None
        raise NotMeasuredError(not_installed or f"the case has no peer {kind}")
    if ours is None:
        raise NotMeasuredError("the case has no such plan of ours")
    over_peer = ratio(cell, ours, peer)
    if over_peer.repeats < LEAST:
        raise NotMeasuredError(f"{over_peer.repeats} pairs, {LEAST} are needed")
    if over_peer.is_near and over_peer.repeats < MANY:
        near = f"a ratio nearer to 1 than {NEAR:.2f} needs {MANY}"
        raise NotMeasuredError(f"{over_peer.median:.2f} on {over_peer.repeats} pairs; {near}")
    return over_peer


def coded(cell: TrainCell) -> Outcome | None:
    """Return our fastest coded plan that was timed, None if there is none."""
    fastest = None
    least = math.inf
    for outcome in cell.outcomes:
        timing = outcome.timing
        if timing is not None and not outcome.is_lossless and timing.median < least:
            fastest = outcome
            least = timing.median
    return fastest


def flexible(rows: Sequence[dict[str, Any]]) -> float:
    """Return the speedup by ordering rows by expert on the largest world; the time includes the
    ordering."""
    if not rows:
        raise NotMeasuredError("the layouts were left out")
    largest = max(row["world"] for row in rows)
    of_layout = {row["layout"]: row["median_seconds"] for row in rows if row["world"] == largest}
    return float(of_layout[BY_SOURCE] / of_layout[ORDERED])


def rows_of(cell: TrainCell) -> list[dict[str, Any]]:
    """Return a row per system, timed systems first."""
    plain = cell.find("plain")
    rows = []
    for outcome in sorted(cell.outcomes, key=lambda outcome: outcome.timing is None):
        timing = outcome.timing
        over_plain = None
        if timing is not None and plain is not None:
            over_plain = ratio(cell, outcome, plain)
        untimed = {"median_seconds": None, "low_seconds": None, "high_seconds": None, "repeats": 0}
        rows.append(
            {
                "what": cell.case.mode,
                "case": cell.case.name,
                "inter": cell.case.inter,
                "system": outcome.name,
                "kind": outcome.kind,
                "exchange": outcome.exchange,
                "lossless": outcome.is_lossless,
                "best": outcome.name == cell.best,
                **(untimed if timing is None else timing.row()),
                "trial_seconds": outcome.trial_seconds,
                "items_per_second": cell.items / timing.median if timing else None,
                "over_plain": over_plain and over_plain.median,
                "over_plain_low": over_plain and over_plain.low,
                "over_plain_high": over_plain and over_plain.high,
                "communication_share": outcome.communication_share,
                "share_of_papers": [cell.case.share_low, cell.case.share_high],
                "inter_bytes": outcome.inter_bytes,
                "bound_seconds": outcome.limit.seconds,
                "bound_link": outcome.limit.link,
                **{f"{phase}_seconds": spent for phase, spent in outcome.phases.items()},
                "worst_error": outcome.worst_error,
                "most_over_mean_load": cell.most_over_mean_load,
            }
        )
    return rows


def measurement_rows(results: TrainResults) -> list[dict[str, Any]]:
    """Return the rows of all cases and layouts."""
    return [row for cell in results.cells for row in rows_of(cell)] + results.layout


COLUMNS = (
    *(
        "system",
        "best",
        *QUARTILES,
        "trial_seconds",
        "items_per_second",
        "over_plain",
        "communication_share",
    ),
    *("inter_bytes", "bound_seconds", "worst_error"),
)
"""Columns on the terminal. "over plain": a step's time over that of the plain layer with
receive-first."""

LAYOUT_COLUMNS = ("world", "layout", ("median_seconds", "ms"), ("gflops_per_second", "GFLOP/s"))
"""Columns of the table of layouts."""


def tables(results: TrainResults) -> list[Table]:
    """Return the tables for a terminal: one per case, and one of the layouts."""

    all_tables = [table(cell.label, rows_of(cell), COLUMNS) for cell in results.cells]
    if results.layout:
        all_tables.append(table("layouts", results.layout, LAYOUT_COLUMNS, group_by=("world",)))
    return all_tables


def panels(results: TrainResults) -> list[Panel]:
    """Return a panel per case, with the link limit at each bar, and one of the layouts."""
    all_panels = [_bars(cell) for cell in results.cells]
    if results.layout:
        worlds = dict.fromkeys(row["world"] for row in results.layout)
        by_layout: dict[str, list[dict[str, Any]]] = {}
        for row in results.layout:
            by_layout.setdefault(row["layout"], []).append(row)
        all_panels.append(
            Panel(
                title="expert throughput, one process",
                x_title="ranks that the rows come from",
                y_title="GFLOP/s",
                series=tuple(map(_line, by_layout.values())),
                x_ticks=tuple((float(world), str(world)) for world in worlds),
                log_x=True,
            )
        )
    return all_panels


def _bars(cell: TrainCell) -> Panel:
    """Return the panel of a cell: a bar per system."""
    series = []
    for outcome in cell.outcomes:
        timing = outcome.timing
        if timing is None:
            continue
        name = "ours, best lossless" if outcome.name == cell.best else outcome.name
        series.append(PlottedSeries.of(name, [(0.0, timing, outcome.limit.seconds)]))
    return Panel(
        title=cell.label, x_title="", y_title="ms per step", series=tuple(series), categories=("",)
    )


def _line(rows: Sequence[dict[str, Any]]) -> PlottedSeries:
    """Return the series of one layout, with the spread of its times."""
    worlds = []
    rates = []
    low = []
    high = []
    for row in rows:
        rate = row["gflops_per_second"]
        worlds.append(float(row["world"]))
        rates.append(rate)
        low.append(rate * row["median_seconds"] / row["high_seconds"])
        high.append(rate * row["median_seconds"] / row["low_seconds"])
    return PlottedSeries(
        name=rows[0]["layout"], x=tuple(worlds), y=tuple(rates), low=tuple(low), high=tuple(high)
    )


BENCHMARK = emulated(
    name="train",
    description=(
        "Train the demo model on an emulated cluster, its MoE layers by our plans and by others, "
        "in turn."
    ),
    notes=notes_of(__doc__),
    read_config=read_config,
    run=run,
    rows=measurement_rows,
    needs_cluster=lambda config: bool(config.cases),
    claims=claims,
    columns=tables,
    panels=panels,
    title="The demo model over emulated links",
    packages=("torch", "numpy", "deepspeed"),
)
