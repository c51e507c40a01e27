"""Gantt charts of programs: a row per lane, a bar per task, coloured by chunk; and a page that holds several of them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go

from moesaic.errors import InputError
from moesaic.program.timeline import LANES, Span, Timeline
from moesaic.report.style import Drawn, Picture, figure, page_text, rounded, run_colour, write_text

WHOLE = "#9aa1ac"
"""Colour of tasks that work on no chunk, or on several."""
_ROW = 58
"""Height of a lane, in pixels."""


def gantt(timeline: Timeline, until: float | None = None) -> go.Figure:
    """Draw a timeline.

    Args:
        timeline: what to draw.
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

    Args:
        timelines: by title, in the order in which they are shown.
        path: of the file.

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
