"""The balance benchmark as small multiples: speed-up over MaxVio, replicated experts, what a schedule gains, memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from moesaic_lab.balance.config import SharesOfForced
from moesaic_lab.balance.methods import PLAIN, SMART
from moesaic_lab.balance.run import BalanceCell
from moesaic_lab.balance.shares import SLOW, Share
from moesaic_lab.pictures import Panel, PlottedSeries

BASE_RATIO = SharesOfForced.ratio
"""Weight rows over routed rows of what is drawn."""
VIRTUAL = "virtual compute"
"""What stands beside every axis of time."""


def panels(cells: Sequence[BalanceCell], shares: Sequence[Share] = ()) -> list[Panel]:
    """Return the panels of what was run: one per cluster and kind of load of shares of forced
    balance, two per bed, one for all recorded cases, two for all beds."""
    made = []
    drawn = [each for each in shares if each.ratio == BASE_RATIO and each.load != SLOW]
    for cluster, ranks, load in dict.fromkeys((each.cluster, each.ranks, each.load) for each in drawn):
        found = [each for each in drawn if (each.cluster, each.ranks, each.load) == (cluster, ranks, load)]
        made.append(_shares(found, load))
    skewed = [cell for cell in cells if cell.job.case.max_vio is not None]
    places = list(dict.fromkeys(cell.job.case.place for cell in skewed))
    for place in places:
        of_bed = [cell for cell in skewed if cell.job.case.place == place]
        made.append(_over_loads(f"{place.name}, speed-up", of_bed, f"plain ep / method, {VIRTUAL}", _speedup))
        made.append(_over_loads(f"{place.name}, memory", of_bed, "peak, MiB", _memory, spread=False))
    recorded = [cell for cell in cells if cell.job.case.max_vio is None]
    if recorded:
        made.append(_bars("recorded routing", recorded))
    if skewed:
        made += [_replicated(skewed), _gain(skewed)]
    return made


def _shares(shares: Sequence[Share], load: str) -> Panel:
    """Draw the share of forced balance over MaxVio under one kind of load, a point for each call."""
    series = []
    for name in dict.fromkeys(each.method for each in shares):
        mine = sorted((each for each in shares if each.method == name), key=lambda each: each.max_vio)
        x, y = tuple(each.max_vio for each in mine), tuple(each.of_forced for each in mine)
        series.append(PlottedSeries(name=name, x=x, y=y))
    return Panel(
        title=f"{shares[0].cluster}, {shares[0].ranks} ranks, {load} loads", x_title="MaxVio of ranks",
        y_title="share of forced balance", series=tuple(series),
    )  # fmt: skip


def _speedup(cell: BalanceCell, name: str) -> tuple[float, float, float]:
    ratio = cell.ratio(PLAIN, name)
    return ratio.median, ratio.low, ratio.high


def _memory(cell: BalanceCell, name: str) -> tuple[float, float, float]:
    size = cell.peak_bytes[name] / 2**20
    return size, size, size


def _over_loads(
    title: str,
    cells: Sequence[BalanceCell],
    y_title: str,
    value: Callable[[BalanceCell, str], tuple[float, float, float]],
    spread: bool = True,
) -> Panel:
    """Draw a figure of every method over MaxVio."""
    series = []
    for name in cells[0].timings:
        found = [value(cell, name) for cell in cells]
        y, low, high = (tuple(column) for column in zip(*found))
        ends = {"low": low, "high": high} if spread else {}
        series.append(PlottedSeries(name=name, x=tuple(_load(cell) for cell in cells), y=y, **ends))
    return Panel(title=title, x_title="MaxVio of ranks", y_title=y_title, series=tuple(series))


def _bars(title: str, cells: Sequence[BalanceCell]) -> Panel:
    names = list(cells[0].timings)
    series = tuple(
        PlottedSeries(
            name=name,
            x=tuple(float(place) for place in range(len(cells))),
            y=tuple(_speedup(cell, name)[0] for cell in cells),
            low=tuple(_speedup(cell, name)[1] for cell in cells),
            high=tuple(_speedup(cell, name)[2] for cell in cells),
        )
        for name in names
    )
    categories = tuple(f"{cell.job.case.label}, MaxVio {statistics.mean(cell.max_vio):.2f}" for cell in cells)
    return Panel(title=title, x_title="", y_title=f"plain ep / method, {VIRTUAL}", series=series, categories=categories)


def _replicated(cells: Sequence[BalanceCell]) -> Panel:
    """Draw how many experts each policy replicates per call, on the bed with most ranks."""
    place = max((cell.job.case.place for cell in cells), key=lambda place: place.bed.world)
    of_bed = [cell for cell in cells if cell.job.case.place == place]
    series = tuple(
        PlottedSeries(
            name=name,
            x=tuple(_load(cell) for cell in of_bed),
            y=tuple(statistics.mean(cell.decided[name].replicated_experts) for cell in of_bed),
        )
        for name in of_bed[0].decided
    )
    title = f"{place.name}, replicated experts per call"
    return Panel(title=title, x_title="MaxVio of ranks", y_title=f"of {place.num_experts} experts", series=series)


def _gain(cells: Sequence[BalanceCell]) -> Panel:
    """Draw what the smart schedule gains against the most that any overlap of the plain layer could."""
    series = []
    for place in dict.fromkeys(cell.job.case.place for cell in cells):
        found = sorted((_most(cell), _speedup(cell, SMART)) for cell in cells if cell.job.case.place == place)
        x, values = zip(*found)
        y, low, high = (tuple(column) for column in zip(*values))
        series.append(PlottedSeries(name=f"{SMART}, {place.name}", x=x, y=y, low=low, high=high))
    ends = [x for each in series for x in each.x]
    series.append(PlottedSeries(name="all that overlap could gain", x=(min(ends), max(ends)), y=(min(ends), max(ends))))
    return Panel(
        title="gain of the smart schedule", x_title="(comm + comp) / max(comm, comp) of plain ep",
        y_title=f"plain ep / smart schedule, {VIRTUAL}", series=tuple(series),
    )  # fmt: skip


def _most(cell: BalanceCell) -> float:
    comm, comp = cell.link_seconds[PLAIN], cell.charged[PLAIN]
    return (comm + comp) / max(comm, comp)


def _load(cell: BalanceCell) -> float:
    load = cell.job.case.max_vio
    assert load is not None
    return load
