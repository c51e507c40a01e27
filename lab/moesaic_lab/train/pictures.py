"""The training benchmark as small multiples: steps as bars per case, throughput of the layouts over the world."""

from __future__ import annotations

from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_lab.train.run import TrainCell, TrainResults


def panels(results: TrainResults) -> list[Panel]:
    """Return a panel per case, with the bound of the links at each bar, and one of the layouts."""
    made = [_bars(cell) for cell in results.cells]
    if results.layout:
        names = results.layout[0].timings
        made.append(
            Panel(
                title="expert throughput, one process",
                x_title="ranks that the rows come from",
                y_title="GFLOP/s",
                series=tuple(_line(results, name) for name in names),
                x_ticks=tuple((float(point.world), str(point.world)) for point in results.layout),
                log_x=True,
            )
        )
    return made


def _bars(cell: TrainCell) -> Panel:
    series = []
    for outcome in cell.outcomes:
        timing = outcome.timing
        if timing is None:
            continue
        name = "ours, best lossless" if outcome.name == cell.best else outcome.name
        series.append(PlottedSeries.of(name, [(0.0, timing, outcome.limit.seconds)]))
    return Panel(title=cell.label, x_title="", y_title="ms per step", series=tuple(series), categories=("",))


def _line(results: TrainResults, name: str) -> PlottedSeries:
    timings = [point.timings[name] for point in results.layout]
    scale = [point.flops / 1e9 for point in results.layout]
    return PlottedSeries(
        name=name,
        x=tuple(float(point.world) for point in results.layout),
        y=tuple(flops / timing.median for flops, timing in zip(scale, timings)),
        low=tuple(flops / timing.high for flops, timing in zip(scale, timings)),
        high=tuple(flops / timing.low for flops, timing in zip(scale, timings)),
    )
