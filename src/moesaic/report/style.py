"""What all charts of the report share: colours, fonts, axes, and how lines are drawn."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

RUN_COLOURS = ("#3a6ea5", "#d9772b", "#2f8f6f", "#b8478a", "#8a6d1f", "#4fa8c9", "#5b5f6b")
"""One per run, in the order of the command line; distinct in lightness, so that colour-blind readers tell them apart."""
RUN_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
"""One per run, beside the colour."""
INK = "#1f2937"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
GRID = "#e8ebf0"
AXIS = "#b9c0cb"

_AXIS = {
    "gridcolor": GRID,
    "linecolor": AXIS,
    "tickcolor": AXIS,
    "showline": True,
    "zeroline": False,
    "ticks": "outside",
    "ticklen": 4,
    "automargin": True,
    "nticks": 7,
    "title": {"standoff": 10, "font": {"size": 13, "color": "#4b5563"}},
}

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 12.5, "color": "#374151"},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "margin": {"l": 56, "r": 18, "t": 12, "b": 44},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": AXIS, "namelength": -1},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "xanchor": "left",
            "yanchor": "bottom",
            "font": {"size": 12.5},
        },
        "xaxis": {**_AXIS, "showgrid": False},
        "yaxis": _AXIS,
    }
)
"""The look of every chart."""


def run_colour(index: int) -> str:
    """Return the colour of the run at a place of the command line."""
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def layer_colours(num_layers: int) -> list[str]:
    """Return a colour per MoE layer, dark to light with depth, readable without telling red from green."""
    if num_layers == 1:
        return ["#46327e"]
    places = [0.08 + 0.7 * index / (num_layers - 1) for index in range(num_layers)]
    return list(sample_colorscale("Viridis", places))


def figure(x_title: str, y_title: str, *, height: int = 300, legend: bool = False, **y_axis: Any) -> go.Figure:
    """Return an empty chart with titled axes; `y_axis` goes to the vertical axis."""
    made = go.Figure(layout={"template": TEMPLATE, "height": height, "showlegend": legend})
    made.update_xaxes(title_text=x_title)
    made.update_yaxes(title_text=y_title, **y_axis)
    return made


def line(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, *, width: float = 1.6, **options: Any
) -> go.Scatter:
    """Return a line with a name from the outside world; a single point is drawn as a marker."""
    mode = options.pop("mode", "lines")
    return go.Scatter(
        name=html.escape(name, quote=False),
        x=list(x),
        y=[rounded(value) for value in y],
        mode=mode if len(x) > 1 else "markers",
        line={"color": colour, "width": width},
        marker={"color": colour, "size": 7, **options.pop("marker", {})},
        **options,
    )


def rounded(value: float) -> float:
    """Return six significant digits: all that a chart shows, at half the size of the page."""
    return float(f"{value:.6g}")


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit to show up to so many seconds in, and its length in seconds."""
    if seconds < 600:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
