"""The demo model end to end over really slow links, its MoE layers run by our plans and by layers of others, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from moesaic_lab.benchmark import Told
from moesaic_lab.bounds import Limit, Message, crossing, link_limit
from moesaic_lab.measure import Ratio, Timing, over_ranks, paired
from moesaic_lab.tables import Column, byte_size, milliseconds, share, table
from moesaic_lab.train.config import TrainBenchConfig, TrainCase
from moesaic_testbed import Bed
from moesaic_testbed.cluster import Launcher

if TYPE_CHECKING:
    from moesaic_lab.train.layout import LayoutPoint
    from moesaic_lab.train.ranks import MeasuredSystem, TrainFound


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured of one system, over all ranks."""

    name: str
    kind: str
    """ours, plain or deepspeed."""
    exchange: str
    """receive-first or torch's."""
    is_lossless: bool
    timing: Timing | None
    """Of a step; None for a plan that was only tried."""
    trial_seconds: float | None
    """Median of the trial."""
    phases: Mapping[str, float]
    """Median seconds per phase, mean of the ranks."""
    communication_share: float | None
    """Seconds in exchanges and the dense reduction over those of the step, mean of the ranks; of layers of others."""
    inter_bytes: float
    """Between nodes in one step, both ways."""
    limit: Limit
    """The least time that the links need for the bytes of a step."""
    worst_error: float
    """Largest relative difference of loss and gradients to the model in one process."""


@dataclass(frozen=True, kw_only=True)
class TrainCell:
    """What was measured in one case."""

    case: TrainCase
    outcomes: Sequence[Outcome]
    best: str
    """Name of our lossless plan that the trial chose."""
    most_over_mean_load: float
    """Rows of the fullest expert over the mean."""
    items: int
    """Tokens or images per step."""

    @property
    def label(self) -> str:
        """The case for people."""
        return f"{self.case.name} ({self.case.mode}, {self.case.inter})"

    def find(self, kind: str, exchange: str = "receive-first") -> Outcome | None:
        """Return a system that was timed: the layer of others by its kind and exchange; of ours the best lossless plan."""
        for outcome in self.outcomes:
            chosen = kind != "ours" or outcome.name == self.best
            if (outcome.kind, outcome.exchange) == (kind, exchange) and chosen and outcome.timing is not None:
                return outcome
        return None


@dataclass(frozen=True, kw_only=True)
class TrainResults:
    """Of the whole benchmark."""

    cells: list[TrainCell]
    layout: list[LayoutPoint]
    """By world; empty where it was left out."""


def run(config: TrainBenchConfig, told: Told) -> TrainResults:
    """Measure everything that a configuration names; it starts clusters, one after another.

    Raises:
        InputError: if this machine cannot make them.
        RankError: if a system computes something else than the model in one process.
    """
    from moesaic_lab.train import layout as train_layout
    from moesaic_lab.train import ranks as train_ranks

    total = len(config.cases) + (config.layout is not None)
    cells: list[TrainCell] = []
    if config.cases:
        with Launcher() as launcher:
            for case in config.cases:
                told(f"{len(cells)} of {total} done; {case.name}, {case.mode}")
                bed = config.bed(case)
                with launcher.open(bed) as ranks:
                    cells.append(cell_of(case, bed, ranks.run(train_ranks.measure, config, case)))
    layout: list[LayoutPoint] = []
    if config.layout is not None:
        told(f"{len(cells)} of {total} done; layouts")
        layout = train_layout.measure(config.layout)
    return TrainResults(cells=cells, layout=layout)


def cell_of(case: TrainCase, bed: Bed, found: Sequence[TrainFound]) -> TrainCell:
    """Join what the ranks found."""
    seconds = over_ranks([{s.name: s.spans for s in of_rank.systems if s.spans} for of_rank in found])
    outcomes = []
    for number, first in enumerate(found[0].systems):
        of_ranks = [of_rank.systems[number] for of_rank in found]
        messages = _messages(found, number)
        times = seconds.get(first.name)
        outcomes.append(
            Outcome(
                name=first.name, kind=first.kind, exchange=first.exchange, is_lossless=first.is_lossless,
                timing=Timing.of(times) if times else None, trial_seconds=first.trial_seconds,
                phases=_phases(of_ranks), communication_share=_share(of_ranks, times),
                inter_bytes=float(crossing(messages, bed.node_of)[0]),
                limit=link_limit(messages, bed), worst_error=max(e for m in of_ranks for e in m.errors.values()),
            )
        )  # fmt: skip
    return TrainCell(
        case=case, outcomes=outcomes, best=found[0].best, most_over_mean_load=found[0].most_over_mean_load,
        items=found[0].items,
    )  # fmt: skip


def _messages(found: Sequence[TrainFound], number: int) -> list[Message]:
    """Return what all ranks sent for a system; DeepSpeed's own exchange counts nothing, and sends what its twin does."""
    systems = found[0].systems
    if _hides_messages(systems[number]):
        number = next(n for n, s in enumerate(systems) if s.kind == "deepspeed" and not _hides_messages(s))
    return [message for of_rank in found for message in of_rank.systems[number].sent]


def _hides_messages(system: MeasuredSystem) -> bool:
    return system.kind == "deepspeed" and system.exchange != "receive-first"


def _phases(of_ranks: Sequence[MeasuredSystem]) -> dict[str, float]:
    return {
        phase: statistics.mean(statistics.median(measured.phases[phase]) for measured in of_ranks)
        for phase, values in of_ranks[0].phases.items()
        if values
    }


def _share(of_ranks: Sequence[MeasuredSystem], times: Sequence[float] | None) -> float | None:
    """Return which part of a step layers of others communicate; DeepSpeed's own exchange is not seen."""
    first = of_ranks[0]
    if not times or not first.exchanging or _hides_messages(first):
        return None
    per_step = [statistics.mean(values) for values in zip(*(measured.exchanging for measured in of_ranks))]
    return statistics.median(spent / step for spent, step in zip(per_step, times))


def ratio(cell: TrainCell, numerator: Outcome, denominator: Outcome) -> Ratio:
    """Return how long one system's step takes over another's, repeat by repeat: over all rounds in which both were run."""
    assert numerator.timing is not None, f"{numerator.name} was not timed in {cell.label}"
    assert denominator.timing is not None, f"{denominator.name} was not timed in {cell.label}"
    rounds = min(len(numerator.timing.seconds), len(denominator.timing.seconds))
    return paired(numerator.timing.seconds[:rounds], denominator.timing.seconds[:rounds])


def rows_of(cell: TrainCell) -> list[dict[str, Any]]:
    """Return a line of the table per system, timed ones first."""
    plain = cell.find("plain")
    made = []
    for outcome in sorted(cell.outcomes, key=lambda o: o.timing is None):
        timing = outcome.timing
        over = None if timing is None or plain is None else ratio(cell, outcome, plain)
        made.append(
            {
                "what": cell.case.mode,
                "case": cell.case.name,
                "inter": cell.case.inter,
                "system": outcome.name,
                "kind": outcome.kind,
                "exchange": outcome.exchange,
                "lossless": outcome.is_lossless,
                "best": outcome.name == cell.best,
                "median_seconds": timing and timing.median,
                "low_seconds": timing and timing.low,
                "high_seconds": timing and timing.high,
                "repeats": len(timing.seconds) if timing else 0,
                "trial_seconds": outcome.trial_seconds,
                "items_per_second": cell.items / timing.median if timing else None,
                "item": "images" if cell.case.model == "swin" else "tokens",
                "over_plain": over and over.median,
                "over_plain_low": over and over.low,
                "over_plain_high": over and over.high,
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
    return made


NOTES = (
    "Real bytes and real compute over emulated links (network namespaces, veth pairs shaped by htb); 4 ranks of one "
    "thread on this machine's cores: with fewer cores than ranks compute is stretched by as much, and host time too. All "
    "systems in one run, in turn, from the same weights and tokens (bytes drawn evenly), float32 on the wire, auxiliary "
    "losses off; the same loop, optimizer and reduction of dense gradients. Before timing, loss and gradients of each "
    "lossless system are compared with the model in one process. plain: expert parallelism as in torchtitan; "
    "receive-first: over the same transport as ours (sockets); torch's: by all_to_all_single (Gloo). best: our lossless plan "
    "that a separate trial chose. bound: bytes of a step over rate on the slowest link. Communication share: seconds in "
    "exchanges and the dense reduction, waiting for slower ranks included. Coded plans change results "
    "and carry no claim. Layouts: one process, one thread, no links."
)
"""What a reader must know to judge the figures."""

COLUMNS = (
    Column(key="system", title="system", is_text=True),
    Column(key="median_seconds", title="ms", show=milliseconds),
    Column(key="quartiles", title="quartiles"),
    Column(key="items_per_second", title="items/s", show=lambda value: f"{value:,.0f}"),
    Column(key="over_plain", title="over plain", show=share),
    Column(key="communication_share", title="comm share", show=share),
    Column(key="inter_bytes", title="inter", show=byte_size),
    Column(key="bound_seconds", title="bound", show=milliseconds),
    Column(key="worst_error", title="error", show=lambda value: f"{value:.0e}"),
)
"""Of the tables on the terminal: milliseconds of a step, and over the plain layer's, receive-first."""

LAYOUT_COLUMNS = (
    Column(key="world", title="ranks"),
    Column(key="layout", title="rows lie", is_text=True),
    Column(key="median_seconds", title="ms", show=milliseconds),
    Column(key="gflops_per_second", title="GFLOP/s", show=lambda value: f"{value:.1f}"),
)
"""Of the table of layouts."""


def tables(results: TrainResults) -> list[Table]:
    """Return a table for people per case, and one of the layouts."""
    made = []
    for cell in results.cells:
        rows = [row | {"quartiles": _quartiles(row), "system": _starred(row)} for row in rows_of(cell)]
        made.append(table(f"{cell.label}, best *", rows, COLUMNS))
    if results.layout:
        from moesaic_lab.train.layout import rows_of as layout_rows

        made.append(table("layouts", layout_rows(results.layout), LAYOUT_COLUMNS, group_by=("world",)))
    return made


def measurement_rows(results: TrainResults) -> list[dict[str, Any]]:
    """Return all rows, of cases and layouts."""
    from moesaic_lab.train.layout import rows_of as layout_rows

    return [row for cell in results.cells for row in rows_of(cell)] + layout_rows(results.layout)


def _starred(row: dict[str, Any]) -> str:
    return row["system"] + (" *" if row["best"] else "")


def _quartiles(row: dict[str, Any]) -> str:
    if row["median_seconds"] is None:
        return f"trial {milliseconds(row['trial_seconds'])}"
    return f"{milliseconds(row['low_seconds'])}-{milliseconds(row['high_seconds'])}"
