"""The communication benchmark as small multiples: all-to-alls over size per bed, lanes and dispatches as bars.

Times of all-to-alls are drawn as multiples of the limit of the links, the least of any method there: from 16 KiB to 32 MiB
milliseconds differ by three orders, methods by tenths.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from moesaic_lab.comm.run import CommCell
from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_lab.tables import byte_size


def panels(cells: Sequence[CommCell]) -> list[Panel]:
    """Return a panel per bed of all-to-alls, and one each for lanes and dispatches."""
    made = []
    by_bed = sorted((c for c in cells if c.sweep.kind == "exchange"), key=lambda c: (c.sweep.label, c.size_kib))
    for label, of_bed in itertools.groupby(by_bed, key=lambda cell: cell.sweep.label):
        made.append(_over_sizes(f"all-to-all, {label}", list(of_bed)))
    for kind, title in (("lanes", "two lanes, alone and at once"), ("dispatch", "dispatch: copies, or once per node")):
        found = [cell for cell in cells if cell.sweep.kind == kind]
        if found:
            made.append(_bars(title, found))
    return made


def _over_sizes(title: str, cells: Sequence[CommCell]) -> Panel:
    names = dict.fromkeys(name for cell in cells for name in cell.timings)
    least = {cell.size_kib: min(limit.seconds for limit in cell.limits.values()) for cell in cells}
    series = []
    for name in names:
        found = [cell for cell in cells if name in cell.timings]
        series.append(_series(name, [(c.size_kib, c) for c in found], [1 / least[c.size_kib] for c in found]))
    ticks = tuple((float(cell.size_kib), byte_size(1024 * cell.size_kib)) for cell in cells)
    return Panel(
        title=title,
        x_title="per rank",
        y_title="time over link limit",
        series=tuple(series),
        x_ticks=ticks,
        log_x=True,
        log_y=True,
    )


def _bars(title: str, cells: Sequence[CommCell]) -> Panel:
    names = dict.fromkeys(name for cell in cells for name in cell.timings)
    series = []
    for name in names:
        found = [(place, cell) for place, cell in enumerate(cells) if name in cell.timings]
        series.append(_series(name, found, [1e3] * len(found)))
    labels = tuple(
        f"{cell.sweep.shape}, top {cell.sweep.top_k}"
        if cell.sweep.kind == "dispatch"
        else byte_size(1024 * cell.size_kib)
        for cell in cells
    )
    return Panel(title=title, x_title="", y_title="ms", series=tuple(series), categories=labels)


def _series(name: str, at: Sequence[tuple[float, CommCell]], scales: Sequence[float]) -> PlottedSeries:
    points = [(place, cell.timings[name], cell.limits[name].seconds) for place, cell in at]
    return PlottedSeries.of(name, points, scales)
