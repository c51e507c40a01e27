"""The pages about a plan: Gantt charts of its programs, and what `moesaic plan --page` shows.

A Gantt chart has a row per lane and a bar per task, coloured by chunk.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.compute import rates_of
from moesaic.cost.memory import GIB
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan.candidates import name_of
from moesaic.plan.findings import Found, Result
from moesaic.plan.plan import plan_in_words
from moesaic.program.timeline import LANES, Span, Timeline
from moesaic.report.style import INK, Drawn, Picture, figure, line, page_text, rounded, run_colour, write_text

WHOLE = "#9aa1ac"
"""Colour of tasks that work on no chunk, or on several."""
_ROW = 58
"""Height of a lane, in pixels."""


def gantt(timeline: Timeline, until: float | None = None) -> go.Figure:
    """Draw a timeline.

    Args:
        until: seconds at the end of the axis, so that charts compare; None for the timeline's own end.
    """
    end = until or timeline.makespan
    unit, length = unit_of(end)
    rows = [lane for lane in LANES if timeline.on(lane)]
    height = 96 + _ROW * max(len(rows), 1)
    made = figure(f"time ({unit})", "", height=height, legend=True, categoryorder="array")
    chunks = sorted({span.chunk for span in timeline.spans}, key=lambda chunk: (chunk is not None, chunk or 0))
    for chunk in chunks:
        made.add_trace(_bars(chunk, [span for span in timeline.spans if span.chunk == chunk], length))
    names = [lane.value for lane in reversed(rows)]
    made.update_yaxes(categoryarray=names, showgrid=False, nticks=None, range=[-0.5, len(names) - 0.5])
    made.update_xaxes(range=[0, rounded(end / length) or 1], showgrid=True)
    made.update_layout(barmode="overlay", bargap=0.25, hovermode="closest", uniformtext={"mode": "hide", "minsize": 11})
    return made


def write_gantt(timelines: Mapping[str, Timeline], path: Path) -> Path:
    """Write a page with one chart below the other over the same length of time, forward and backward say; returns its path.

    The file holds everything that it shows and loads nothing.

    Raises:
        InputError: if there is nothing to draw, or the file cannot be written.
    """
    if not timelines:
        raise InputError(f"{path}: no timeline to draw: give at least one")
    until = max(timeline.makespan for timeline in timelines.values())
    charts = [Picture(title, in_words(timeline), gantt(timeline, until)) for title, timeline in timelines.items()]
    title = " and ".join(timelines)
    return write_text(page_text("charts.html", Drawn(), what="timeline", title=title, lead="", charts=charts), path)


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit to show up to so many seconds in, and its length in seconds."""
    if seconds >= 1:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)


def in_words(timeline: Timeline) -> str:
    """Return what the chart shows in a line: its length, how busy the lanes are, how much communication is hidden."""
    unit, length = unit_of(timeline.makespan)
    busy = ", ".join(f"{lane.value} {share:.0%}" for lane, share in timeline.busy.items())
    line = f"{timeline.program}: {timeline.makespan / length:.4g} {unit}"
    if busy:
        line += f"; busy: {busy}"
    if timeline.communication:
        line += f"; {timeline.overlap:.0%} of the communication behind computation"
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


def write_plan_page(
    title: str, told: Sequence[str], result: Result, cluster: ClusterSpec, layer: Workload, timelines: Mapping[str, Timeline],
    path: Path,
) -> Path:  # fmt: skip
    """Write the page; returns its path. The file holds everything that it shows and loads nothing.

    Raises:
        InputError: if the file cannot be written.
    """
    best, until = result.best, max(timeline.makespan for timeline in timelines.values())
    pictures = [
        Picture("One step", "Seconds by part, of the best plans.", stacked(
            {_name(found): found.estimate.parts for found in result.ranking},
            "seconds",
        )),
        *(
            Picture(f"One MoE layer of the best plan, {name}", in_words(timeline), gantt(timeline, until))
            for name, timeline in timelines.items()
        ),
        Picture(
            "Memory of a rank", f"GiB by what holds it; the line is what a device has, {cluster.device.memory_gib:g}.",
            stacked(
                {_name(each): {what: size / GIB for what, size in vars(each.memory).items()} for each in result.ranking},
                "GiB", limit=cluster.device.memory_gib,
            ),
        ),
        Picture(
            "Roofline of products",
            "What a device reaches by the rows of a product: at most its memory's rate times the operations that a byte of "
            "weights serves, and the rate that products were seen to reach. The dot is an expert of the best plan.",
            roofline(best, cluster, layer),
        ),
    ]  # fmt: skip
    lead = " · ".join(told)
    return write_text(page_text("charts.html", Drawn(), what="plan", title=title, lead=lead, charts=pictures), path)


def stacked(bars: Mapping[str, Mapping[str, float]], unit: str, *, limit: float | None = None) -> go.Figure:
    """Draw bars of parts that add up."""
    made = figure(unit, "", height=140 + 34 * len(bars), legend=True)
    for number, part in enumerate(dict.fromkeys(part for parts in bars.values() for part in parts)):
        values = [rounded(parts.get(part, 0.0)) for parts in bars.values()]
        made.add_trace(go.Bar(name=part, orientation="h", y=list(bars), x=values, marker={"color": run_colour(number)}))
    made.update_yaxes(autorange="reversed", nticks=None)
    made.update_layout(barmode="stack", hovermode="closest")
    if limit is not None:
        made.add_vline(x=limit, line={"color": INK, "width": 2, "dash": "dash"})
    return made


def roofline(best: Found, cluster: ClusterSpec, layer: Workload) -> go.Figure:
    """Draw the rate of an expert's products by its rows: bounds, what the device reaches, and where the plan's experts are."""
    rates = rates_of(cluster, layer.products or layer.dtype)
    work = float(layer.matrices * layer.dim * layer.hidden / best.grid.etp)
    here = best.grid.dp * layer.copies / layer.num_experts / best.grid.edp

    def reached(rows: np.ndarray) -> np.ndarray:
        seconds = rates.product_seconds(rows, 2 * work, work * layer.element_bytes)
        found: np.ndarray = rows * 2 * work / seconds / 1e12
        return found

    rows = np.geomspace(1, max(8192.0, 2 * here), 60)
    made = figure("rows of an expert", "TFLOP/s", height=340, legend=True, type="log")
    made.update_xaxes(type="log")
    memory = np.minimum(2 * rows * rates.memory / layer.element_bytes, rates.flops) / 1e12
    made.add_trace(line("memory and the best rate", rows.tolist(), memory.tolist(), run_colour(6), width=1.2))
    made.add_trace(line("reached", rows.tolist(), reached(rows).tolist(), run_colour(0), width=2.4))
    if cluster.device.peak_tflops:
        ends = [float(rows[0]), float(rows[-1])]
        made.add_trace(line("data sheet", ends, [cluster.device.peak_tflops] * 2, run_colour(1), width=1.2))
    at = float(reached(np.array([here]))[0])
    made.add_trace(line(f"experts of the best plan, {here:,.0f} rows", [here], [at], INK))
    return made


def _name(found: Found) -> str:
    unit, length = unit_of(found.seconds)
    return f"{name_of(found.grid)}, {plan_in_words(found.plan)}: {found.seconds / length:.4g} {unit}"
