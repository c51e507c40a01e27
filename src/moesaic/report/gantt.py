"""Draws Gantt charts of programs and of whole training steps, and writes a page with several of them.

A program's chart has a row per lane and a bar per task, coloured by chunk. A step's chart has every block of the first
micro-batch, forward and backward, then the rest of the step, in the order in which a rank runs them. An MoE layer's
communication overlaps its computation as in its programs' timelines; parts without overlap follow each other.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go

from moesaic.errors import InputError
from moesaic.planner.model import Job
from moesaic.planner.search import PlannedStep
from moesaic.program.task import Lane
from moesaic.program.timeline import LANES, Span, Timeline
from moesaic.report.style import Drawn, Picture, figure, page_text, rounded, run_colour, write_text

WHOLE = "#9aa1ac"
"""Colour of tasks that belong to no chunk, or to several."""
_ROW = 58
"""Height of a lane, in pixels."""


def gantt(timeline: Timeline, until: float | None = None) -> go.Figure:
    """Draw a timeline.

    Args:
        timeline: the timeline.
        until: end of the time axis in seconds, to give several charts one scale; None for the timeline's end.
    """
    end = until or timeline.makespan
    unit, length = unit_of(end)
    rows = [lane for lane in LANES if timeline.on(lane)]
    height = 96 + _ROW * max(len(rows), 1)
    chart = figure(f"time ({unit})", "", height=height, legend=True, categoryorder="array")
    chunks = sorted({span.chunk for span in timeline.spans}, key=lambda chunk: (chunk is not None, chunk or 0))
    for chunk in chunks:
        chart.add_trace(_bars(chunk, [span for span in timeline.spans if span.chunk == chunk], length))
    names = [lane.value for lane in reversed(rows)]
    chart.update_yaxes(categoryarray=names, showgrid=False, nticks=None, range=[-0.5, len(names) - 0.5])
    chart.update_xaxes(range=[0, rounded(end / length) or 1], showgrid=True)
    chart.update_layout(
        barmode="overlay", bargap=0.25, hovermode="closest", uniformtext={"mode": "hide", "minsize": 11}
    )
    return chart


def write_gantt(timelines: Mapping[str, Timeline], path: Path) -> Path:
    """Write a page with several charts, such as forward and backward, on one time scale, and return its path.

    The page is self-contained and loads nothing.

    Args:
        timelines: the timelines by title, in the order in which to show them.
        path: the file to write.

    Raises:
        InputError: there is no timeline, or the file cannot be written.
    """
    if not timelines:
        raise InputError(f"{path}: no timeline to draw: give at least one")
    until = max(timeline.makespan for timeline in timelines.values())
    charts = [Picture(title, in_words(timeline), gantt(timeline, until)) for title, timeline in timelines.items()]
    title = " and ".join(timelines)
    return write_text(page_text("charts.html", Drawn(), what="timeline", title=title, lead="", charts=charts), path)


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit in which to show times up to `seconds`, and the unit's length in seconds."""
    if seconds >= 1:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)


def in_words(timeline: Timeline) -> str:
    """Return a one-line summary of a timeline: its length, how busy the lanes are, and how much communication is hidden."""
    unit, length = unit_of(timeline.makespan)
    busy = ", ".join(f"{lane.value} {share:.0%}" for lane, share in timeline.busy.items())
    line = f"{timeline.program}: {timeline.makespan / length:.4g} {unit}"
    if busy:
        line += f"; busy: {busy}"
    if timeline.communication:
        line += f"; {timeline.overlap:.0%} of the communication is hidden behind computation"
    return line


def _bars(chunk: int | None, spans: Sequence[Span], unit: float) -> go.Bar:
    colour = WHOLE if chunk is None else run_colour(chunk)
    return go.Bar(
        name="no one chunk" if chunk is None else f"chunk {chunk}",
        orientation="h",
        y=[span.lane.value for span in spans],
        base=[rounded(span.start / unit) for span in spans],
        x=[rounded((span.end - span.start) / unit) for span in spans],
        text=[html.escape(span.task, quote=False) for span in spans],
        customdata=[[span.stage.value, rounded(span.end / unit)] for span in spans],
        hovertemplate="%{text}<br>%{customdata[0]}, %{base:.4g} to %{customdata[1]:.4g}, takes %{x:.4g}<extra></extra>",
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="both",
        insidetextfont={"size": 11, "color": "#ffffff"},
        marker={"color": colour, "line": {"color": "#ffffff", "width": 1}},
        showlegend=True,
    )


ROWS = {
    Lane.COMPUTE: "computing",
    Lane.HOST: "computing",
    Lane.INTRA: "links inside nodes",
    Lane.INTER: "links between nodes",
}
"""Lane -> its row in a step's chart."""
COMPUTING, WAITING = ROWS[Lane.COMPUTE], "waiting for parameters"


class Bar(NamedTuple):
    """A bar in a step's chart: one activity of a rank."""

    row: str
    part: str
    """The part of the step, which determines the colour and the legend's entry."""
    what: str
    """Description that is shown on hover."""
    start: float
    """Seconds from the start of the step."""
    end: float


def bars_of(job: Job, best: PlannedStep, timelines: Mapping[str, Timeline]) -> list[Bar]:
    """Return the bars of a step: the first micro-batch block by block, all others as one bar, then the optimizer.

    Args:
        job: the training job.
        best: the plan, with the predicted times of a step's parts.
        timelines: the timelines of the MoE layers' programs, "forward" and "backward".
    """
    bars, count = list(_micro_batch(job, best, timelines)), job.accumulation
    seconds_each = bars[-1].end
    if count > 1:
        what = f"{count - 1} more like the first"
        bars.append(Bar(COMPUTING, "further micro-batches", what, seconds_each, count * seconds_each))
    end = count * seconds_each
    after = {"optimizer": best.estimate.parts.get("optimizer", 0.0)}
    return bars + [Bar(COMPUTING, name, name, end, end + seconds) for name, seconds in after.items() if seconds]


def _micro_batch(job: Job, best: PlannedStep, timelines: Mapping[str, Timeline]) -> Iterator[Bar]:
    """Yield the bars of the first micro-batch, in the order in which a rank runs them."""
    model, count = job.model, job.accumulation
    recomputes, blocks = int(model.checkpoint_activations), range(model.num_layers)
    sparse = sum(map(model.is_sparse, blocks))
    seconds_of = {name: seconds / count for name, seconds in best.estimate.parts.items()}
    wait = seconds_of.get("parameters", 0.0) / (2 * len(blocks))
    # A backward pass takes twice as long as a forward pass. Under activation checkpointing, the forward pass runs again.
    attention_seconds = seconds_of["attention"] / (3 + recomputes) / len(blocks)
    dense_seconds = seconds_of.get("dense", 0.0) / (3 + recomputes) / max(len(blocks) - sparse, 1)
    shared_seconds = seconds_of.get("shared experts", 0.0) / (3 + recomputes) / sparse
    routing_seconds = sum(seconds_of.get(part, 0.0) for part in ("routing", "small kernels", "launches")) / sparse
    layers = {
        "forward": seconds_of["moe forward"] / (1 + recomputes) / sparse, "backward": seconds_of["moe backward"] / sparse,
    }  # fmt: skip
    now = 0.0

    def bar(part: str, what: str, seconds: float, row: str = COMPUTING) -> Iterator[Bar]:
        nonlocal now
        if seconds > 0:
            yield Bar(row, part, what, now, now + seconds)
            now += seconds

    def layer(name: str, what: str) -> Iterator[Bar]:
        nonlocal now
        timeline, part = timelines[name], f"moe {name}"
        scale = layers[name] / timeline.makespan if timeline.makespan else 0.0
        for row, start, end in _busy(timeline):
            yield Bar(row, part, what, now + scale * start, now + scale * end)
        now += layers[name]

    def forward(block: int, what: str) -> Iterator[Bar]:
        yield from bar("attention", f"attention {what}", attention_seconds)
        if model.is_sparse(block):
            yield from bar("shared experts", f"shared experts {what}", shared_seconds)
            yield from layer("forward", f"MoE layer {what}")
        else:
            yield from bar("dense", f"dense layer {what}", dense_seconds)

    for block in blocks:
        yield from forward(block, f"of block {block}")
        yield from bar("parameters", f"before block {block + 1}", wait, WAITING)
    yield from bar("unembed", "output and loss", seconds_of.get("unembed", 0.0))
    for block in reversed(blocks):
        what = f"of block {block}, backward"
        if recomputes:
            yield from forward(block, f"of block {block}, again")
        if model.is_sparse(block):
            yield from layer("backward", f"MoE layer {what}")
            yield from bar("shared experts", f"shared experts {what}", 2 * shared_seconds)
            yield from bar("routing", f"routing {what}", routing_seconds)
        else:
            yield from bar("dense", f"dense layer {what}", 2 * dense_seconds)
        yield from bar("attention", f"attention {what}", 2 * attention_seconds)
        yield from bar("parameters", f"after block {block}", wait, WAITING)


def _busy(timeline: Timeline) -> Iterator[tuple[str, float, float]]:
    """Yield (row, start, end) of each interval in which a row of a program is busy. Adjoining spans are merged."""
    for row in dict.fromkeys(ROWS.values()):
        spans = sorted(
            (span.start, span.end) for span in timeline.spans if ROWS[span.lane] == row and span.end > span.start
        )
        start = end = 0.0
        for begins, ends in spans:
            if begins > end:
                if end > start:
                    yield row, start, end
                start = begins
            end = max(end, ends)
        if end > start:
            yield row, start, end


def step_gantt(bars: Iterable[Bar]) -> go.Figure:
    """Draw the bars of a step. The axis first shows the first micro-batch; a double click shows the whole step."""
    all_bars = list(bars)
    first = [bar for bar in all_bars if bar.part not in ("further micro-batches", "optimizer")]
    until, end = max(bar.end for bar in first), max(bar.end for bar in all_bars)
    unit, length = unit_of(until)
    rows = [row for row in (*dict.fromkeys(ROWS.values()), WAITING) if any(bar.row == row for bar in all_bars)]
    chart = figure(f"time ({unit})", "", height=110 + 46 * len(rows), legend=True, categoryorder="array")
    for number, part in enumerate(dict.fromkeys(bar.part for bar in all_bars)):
        part_bars = [bar for bar in all_bars if bar.part == part]
        colour = WHOLE if part == "further micro-batches" else run_colour(number)
        chart.add_trace(
            go.Bar(
                name=part,
                orientation="h",
                y=[bar.row for bar in part_bars],
                base=[rounded(bar.start / length) for bar in part_bars],
                x=[rounded((bar.end - bar.start) / length) for bar in part_bars],
                text=[bar.what for bar in part_bars],
                textposition="none",
                hovertemplate="%{text}<br>from %{base:.4g}, takes %{x:.4g}<extra></extra>",
                marker={"color": colour},
            )
        )
    chart.update_yaxes(categoryarray=rows[::-1], showgrid=False, nticks=None)
    chart.update_xaxes(range=[0, rounded(min(1.05 * until, end) / length)], showgrid=True)
    chart.update_layout(barmode="overlay", bargap=0.25, hovermode="closest")
    return chart
