"""Draws Gantt charts of programs and of whole training steps, and writes a page with several of
them.

A program's chart has a row per lane and a bar per task, coloured by chunk or stage. A step's chart
has every block of the first micro-batch, forward and backward, then the rest of the step, in the
order in which a rank runs them. An MoE layer's communication overlaps its computation as in its
programs' timelines; parts without overlap follow each other.

A *lane* is what tasks of a rank occupy: its processor, its host, or its links inside or between
nodes. A *part* is what a bar belongs to, which the legend names: a chunk, a stage of a layer, or a
part of a step. Times are in seconds until they are drawn.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go

from moesaic.errors import InputError
from moesaic.planner.in_flight import InFlight
from moesaic.planner.job import Job
from moesaic.planner.pipeline import Timed
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.program.task import Lane, Stage
from moesaic.program.text import NAMES
from moesaic.program.timeline import LANES, Timeline
from moesaic.report.style import (
    WHOLE,
    Picture,
    bars,
    charts_page,
    figure,
    ordered_colours,
    part_colour,
    rounded,
)

_ROW = 58
"""Height of a lane, in pixels."""
_LEGEND = 20
"""Height of a line of the legend, in pixels."""
_NARROW = 4
"""Entries in a line of the legend on a telephone."""


class Bar(NamedTuple):
    """A bar of a chart: one activity of a rank."""

    row: str
    part: str
    """What the activity belongs to, which determines the colour and the legend's entry."""
    what: str
    """Description that is shown on hover."""
    start: float
    """Seconds from the start."""
    end: float
    kind: str = ""
    """Further description."""


ALL = "all chunks"
"""What tasks belong to that work on no chunk or on several."""
STAGES = {
    Stage.ROUTE: part_colour("routing"),
    Stage.DISPATCH: part_colour("attention"),
    Stage.EXPERT: part_colour("moe forward"),
    Stage.COMBINE: part_colour("parameters"),
}
"""Colour of each stage of a layer, in timelines without chunks."""


def _name_of(chunk: int | None) -> str:
    """Return the part of tasks that work on a chunk; None stands for no chunk or several."""
    return ALL if chunk is None else f"chunk {chunk}"


def _parts_of(timeline: Timeline) -> list[str]:
    """Return what each span belongs to: its chunk, or in a timeline without chunks its stage."""
    if all(span.chunk is None for span in timeline.spans):
        return [span.stage.value for span in timeline.spans]
    return [_name_of(span.chunk) for span in timeline.spans]


def gantt(timeline: Timeline, until: float | None = None) -> go.Figure:
    """Draw a timeline: a row per lane, and a bar per task, coloured by chunk; by stage if there is
    one chunk only.

    Args:
        until: end of the time axis in seconds, to give several charts one scale; None for the
            timeline's end.
    """
    parts = _parts_of(timeline)
    all_bars = [
        Bar(
            span.lane.value,
            part,
            what=span.task,
            start=span.start,
            end=span.end,
            kind=span.stage.value,
        )
        for span, part in zip(timeline.spans, parts)
    ]
    rows = [lane.value for lane in LANES if timeline.on(lane)]  # those with a span
    end = until or timeline.makespan
    colours = _colours_of(timeline, parts)
    return _draw(all_bars, rows, colours, unit_of(end), end, textposition="inside")


def _colours_of(timeline: Timeline, parts: Sequence[str]) -> dict[str, str]:
    """Return the colour of each part of a timeline, in the legend's order."""
    chunks = sorted({span.chunk for span in timeline.spans if span.chunk is not None})
    if not chunks:
        return {stage.value: STAGES[stage] for stage in Stage if stage.value in parts}
    colours = {}
    if ALL in parts:
        colours[ALL] = WHOLE
    for chunk, shade in zip(chunks, ordered_colours(len(chunks))):
        colours[_name_of(chunk)] = shade
    return colours


def _draw(
    all_bars: Sequence[Bar],
    rows: Sequence[str],
    colours: Mapping[str, str],
    unit: tuple[str, float],
    until: float,
    **text: str,
) -> go.Figure:
    """Draw bars in rows, the first one on top, on an axis that ends at `until` seconds.

    Args:
        all_bars: the bars; times are in seconds.
        rows: the names of the rows.
        colours: the colour of each part, in the legend's order.
        unit: the unit of the axis, and its length in seconds.
        **text: options of plotly's bars.
    """
    name, length = unit
    # 96 pixels are for the axis, the margins and the first line of the legend
    further_legend_lines = (len(colours) - 1) // _NARROW
    height = 96 + _ROW * max(len(rows), 1) + _LEGEND * further_legend_lines
    chart = figure(f"time ({name})", "", height=height, legend=True, categoryorder="array")

    for part, colour in colours.items():
        own = [bar for bar in all_bars if bar.part == part]
        lengths = [(bar.end - bar.start) / length for bar in own]
        trace = bars(
            part,
            [bar.row for bar in own],
            lengths,
            colour,
            base=[rounded(bar.start / length) for bar in own],
            text=[html.escape(bar.what, quote=False) for bar in own],
            customdata=[[bar.kind, rounded(bar.end / length)] for bar in own],
            hovertemplate=(
                "%{text}<br>%{customdata[0]} %{base:.4g} to %{customdata[1]:.4g}, takes "
                "%{x:.4g}<extra></extra>"
            ),
            insidetextfont={"size": 11},
            showlegend=True,
            **text,
        )
        chart.add_trace(trace)

    chart.update_yaxes(
        # plotly counts rows from the bottom; a row is 1 high, with its number in the middle
        categoryarray=rows[::-1],
        showgrid=False,
        nticks=None,
        range=[-0.5, len(rows) - 0.5],
    )
    end = rounded(until / length) or 1  # of an empty timeline
    chart.update_xaxes(range=[0, end], showgrid=True)
    chart.update_layout(
        barmode="overlay",
        bargap=0.25,
        hovermode="closest",
        uniformtext={"mode": "hide", "minsize": 11},
    )
    return chart


def write_gantt(
    timelines: Mapping[str, Timeline], path: Path, title: str = "", further: Sequence[Picture] = ()
) -> Path:
    """Write a page with several charts, such as forward and backward, on one time scale, and return
    its path.

    The page is self-contained and loads nothing.

    Args:
        timelines: the timelines by title, in the order in which to show them.
        title: of the page, such as model, cluster and mesh; empty for the titles of the timelines.
        further: charts that come after those of the timelines, each on a scale of its own.

    Raises:
        InputError: there is no timeline, or the file cannot be written.
    """
    if not timelines:
        raise InputError(f"{path}: no timeline to draw: give at least one")
    until = max(timeline.makespan for timeline in timelines.values())
    charts = [
        Picture(name, in_words(timeline), gantt(timeline, until))
        for name, timeline in timelines.items()
    ]
    title = title or " and ".join(timelines)
    return charts_page(path, what="timeline", title=title, lead=NAMES, charts=[*charts, *further])


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit in which to show times up to `seconds`, and the unit's length in seconds."""
    if seconds >= 1:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)


def in_words(timeline: Timeline) -> str:
    """Return a one-line summary of a timeline: its length, how busy the lanes are, and how much
    communication is hidden."""
    unit, length = unit_of(timeline.makespan)
    busy = ", ".join(f"{lane.value} {share:.0%}" for lane, share in timeline.busy.items())
    line = f"{timeline.program}: {timeline.makespan / length:.4g} {unit}"
    if busy:
        line += f"; busy: {busy}"
    if timeline.communication:
        line += f"; {timeline.overlap:.0%} of the communication is hidden behind computation"
    return line


ROWS = {
    Lane.COMPUTE: "computing",
    Lane.HOST: "computing",
    Lane.INTRA: "inside nodes",
    Lane.INTER: "between nodes",
}
"""Lane -> its row in a step's chart."""
COMPUTING = ROWS[Lane.COMPUTE]
WAITING = "waiting"
FURTHER = "further micro-batches"


def bars_of(job: Job, best: PlannedStep, timelines: Mapping[str, Timeline]) -> list[Bar]:
    """Return the bars of a step: the first micro-batch block by block, all others as one bar, then
    the optimizer.

    Args:
        job: the training job.
        best: the plan, with the predicted times of a step's parts.
        timelines: the timelines of the MoE layers' programs, "forward" and "backward".
    """
    all_bars = list(_micro_batch(job, best, timelines))
    count = job.accumulation
    end_of_first = all_bars[-1].end
    end = count * end_of_first
    optimizer = best.estimate.parts.get("optimizer", 0.0)
    if count > 1:
        what = f"{count - 1} more like the first"
        all_bars.append(Bar(COMPUTING, part=FURTHER, what=what, start=end_of_first, end=end))
    if optimizer:
        all_bars.append(
            Bar(COMPUTING, part="optimizer", what="optimizer", start=end, end=end + optimizer)
        )
    return all_bars


def _micro_batch(job: Job, best: PlannedStep, timelines: Mapping[str, Timeline]) -> Iterator[Bar]:
    """Yield the bars of the first micro-batch, in the order in which a rank runs them."""
    shares = _shares_of(job)
    parts = defaultdict(float, best.estimate.parts)  # seconds of a step
    parts["routing"] += parts["small kernels"] + parts["launches"]  # drawn as one
    now = 0.0
    for part, what, length in _order(job):
        # those of one micro-batch, divided into the shares of its passes; this is `length` of them
        seconds = length * parts[part] / job.accumulation / shares[part]
        if part.startswith("moe "):
            timeline = timelines[part.removeprefix("moe ")]
            # the timeline, stretched to the seconds that the layer has in the step
            scale = seconds / timeline.makespan if timeline.makespan else 0.0
            for row, start, end in _busy(timeline):
                yield Bar(row, part, what, start=now + scale * start, end=now + scale * end)
        elif seconds > 0:
            row = WAITING if part == "parameters" else COMPUTING
            yield Bar(row, part, what, start=now, end=now + seconds)
        now += seconds


def _shares_of(job: Job) -> dict[str, int]:
    """Return into how many forward passes of one block the seconds of each part of a micro-batch
    divide."""
    model = job.model
    num_sparse = sum(map(model.is_sparse, range(model.num_layers)))
    num_dense = model.num_layers - num_sparse
    # A backward pass takes twice as long as a forward pass. Under activation checkpointing, the
    # forward pass runs again.
    forwards = 2 if model.checkpoint_activations else 1
    return {
        "attention": (2 + forwards) * model.num_layers,
        "dense": (2 + forwards) * max(num_dense, 1),  # a divisor; without any, none is drawn
        "shared experts": (2 + forwards) * num_sparse,
        "parameters": 2 * model.num_layers,  # before and after each block
        "routing": num_sparse,
        "moe forward": forwards * num_sparse,
        "moe backward": num_sparse,
        "unembed": 1,
    }


def _order(job: Job) -> Iterator[tuple[str, str, int]]:
    """Yield (part, description, length in forward passes) of a micro-batch's activities in turn.

    "parameters" is waiting for those of the next block, or for the gradients of a block to leave.
    """
    model = job.model

    def forward(block: int, what: str) -> Iterator[tuple[str, str, int]]:
        """Yield the activities of a block's forward pass; `what` ends their descriptions."""
        yield "attention", f"attention {what}", 1
        if model.is_sparse(block):
            yield "shared experts", f"shared experts {what}", 1
            yield "moe forward", f"MoE layer {what}", 1
        else:
            yield "dense", f"dense layer {what}", 1

    for block in range(model.num_layers):
        yield from forward(block, f"of block {block}")
        yield "parameters", f"before block {block + 1}", 1
    yield "unembed", "output and loss", 1
    for block in reversed(range(model.num_layers)):
        what = f"of block {block}, backward"
        if model.checkpoint_activations:
            yield from forward(block, f"of block {block}, again")
        if model.is_sparse(block):
            yield "moe backward", f"MoE layer {what}", 1
            yield "shared experts", f"shared experts {what}", 2
            yield "routing", f"routing {what}", 1
        else:
            yield "dense", f"dense layer {what}", 2
        yield "attention", f"attention {what}", 2
        yield "parameters", f"after block {block}", 1


def _busy(timeline: Timeline) -> Iterator[tuple[str, float, float]]:
    """Yield (row, start, end) of each interval in which a row of a program is busy. Adjoining spans
    are merged."""
    for row in dict.fromkeys(ROWS.values()):  # each once
        spans = [span for span in timeline.spans if ROWS[span.lane] == row]
        merged: list[tuple[float, float]] = []
        for start, end in sorted((span.start, span.end) for span in spans):
            if merged and start <= merged[-1][1]:  # before the end of the last interval
                last_start, last_end = merged.pop()
                merged.append((last_start, max(end, last_end)))
            else:
                merged.append((start, end))
        for start, end in merged:
            if end > start:
                yield row, start, end


def step_gantt(all_bars: Sequence[Bar]) -> go.Figure:
    """Draw the bars of a step. The axis first shows the first micro-batch; a double click shows the
    whole step."""
    end_of_first = max(bar.end for bar in all_bars if bar.part not in (FURTHER, "optimizer"))
    end_of_step = max(bar.end for bar in all_bars)
    used_rows = {bar.row for bar in all_bars}
    all_rows = [*dict.fromkeys(ROWS.values()), WAITING]
    rows = [row for row in all_rows if row in used_rows]
    colours = {bar.part: part_colour(bar.part) for bar in all_bars}
    until = min(1.05 * end_of_first, end_of_step)  # with a little of what follows
    return _draw(all_bars, rows, colours, unit_of(end_of_first), until, textposition="none")


def stages_gantt(timed: Timed) -> go.Figure:
    """Draw what pipeline stages compute: a row per stage, and a bar per pass of a micro-batch."""
    all_bars = [
        Bar(
            row=f"stage {span.rank}",
            part="backward" if span.operation.is_backward else "forward",
            what=f"micro-batch {span.operation.micro_batch}, part {span.operation.part}",
            start=span.start,
            end=span.end,
        )
        for span in timed.spans
    ]
    rows = [f"stage {rank}" for rank in range(len(timed.busy))]
    colours = {part: part_colour(f"moe {part}") for part in ("forward", "backward")}
    end = max(bar.end for bar in all_bars)
    return _draw(all_bars, rows, colours, unit_of(end), end, textposition="none")


def in_flight_pictures(flights: Mapping[str, InFlight], between: float) -> list[Picture]:
    """Draw passes of two micro-batches in flight, by name, with `between` seconds of other
    computing before each layer of a forward pass."""
    pictures = []
    for name, flight in flights.items():
        unit, length = unit_of(flight.seconds)
        short_unit, short = unit_of(between)
        text = (
            f"The first layers of two micro-batches, {flight.seconds / length:.4g} {unit} in all: "
            "one computes while the messages of the other travel. Where neither computes, both "
            f"wait. Before each layer a forward pass computes {between / short:.4g} "
            f"{short_unit} of attention and norms, a backward pass twice as long."
        )
        title = f"{name}, two micro-batches in flight"
        pictures.append(Picture(title, text, in_flight_gantt(flight)))
    return pictures


def in_flight_gantt(flight: InFlight) -> go.Figure:
    """Draw two micro-batches in flight: for each a row of what it computes and a row of its
    messages, so that gaps show who waits."""

    def row(micro_batch: int, lane: Lane) -> str:
        """Return the row of what a micro-batch computes, or of its messages on any other lane."""
        what = COMPUTING if lane is Lane.COMPUTE else "messages"
        return f"micro-batch {micro_batch + 1}: {what}"

    all_bars = [
        Bar(
            row=row(turn.micro_batch, turn.lane),
            # a turn without a task is what lies between two layers
            part=f"layer {turn.layer + 1}" if turn.task else "between layers",
            what=turn.task or f"what lies before layer {turn.layer + 1}",
            start=turn.start,
            end=turn.end,
        )
        for turn in flight.turns
        if turn.end > turn.start and turn.lane is not Lane.HOST
    ]

    rows = []
    for lane in (Lane.COMPUTE, Lane.INTER):  # INTER stands for both lanes of messages
        rows += [row(0, lane), row(1, lane)]
    layers = sorted({bar.part for bar in all_bars} - {"between layers"})
    colours = {"between layers": WHOLE}
    for layer, shade in zip(layers, ordered_colours(len(layers))):
        colours[layer] = shade
    end = max(bar.end for bar in all_bars)
    return _draw(all_bars, rows, colours, unit_of(end), end, textposition="none")
