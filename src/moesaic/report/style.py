"""Shared by all pages: the style of charts, the building blocks of pages, and writing a page.

A page is a self-contained HTML file that includes plotly.js and loads nothing. The templates are in
`templates/`; jinja2 escapes all values that they show.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.colors import sample_colorscale
from plotly.offline import get_plotlyjs

from moesaic import __version__
from moesaic.errors import InputError
from moesaic.files import write

RUN_COLOURS = ("#3a6ea5", "#d9772b", "#2f8f6f", "#b8478a", "#8a6d1f", "#4fa8c9", "#5b5f6b")
"""Colours of runs, in the order of the command line. They differ in lightness, so that colour-blind
readers can tell them."""
RUN_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
"""Markers of runs, used in addition to the colours."""
INK = "#1f2937"
WHOLE = "#9aa1ac"
PART_COLOURS = {
    "attention": "#3a6ea5",
    "dense": "#8fb8de",
    "shared experts": "#4fa8c9",
    "unembed": "#1d3f66",
    "moe forward": "#e59a4f",
    "moe backward": "#b85c12",
    "routing": "#b8478a",
    "small kernels": "#dd9cc2",
    "launches": "#8a6d1f",
    "parameters": "#2f8f6f",
    "pipeline": "#c9c2a3",
    "optimizer": "#5b5f6b",
    "further micro-batches": WHOLE,
    "weights": "#2f8f6f",
    "gradients": "#7cc4a8",
    "activations": "#d9772b",
    "buffers": "#f0c090",
    "tokens": "#3a6ea5",
    "tokens, left alone": WHOLE,
    "weights of experts": "#2f8f6f",
    "samples, between nodes": "#b8478a",
    "samples, inside nodes": "#dd9cc2",
    "left alone": WHOLE,
    "as decided": "#3a6ea5",
    "none": WHOLE,
    "shadow": "#2f8f6f",
    "spill": "#d9772b",
    "eplb": "#3a6ea5",
}
"""Colour of each part of a step, use of memory, kind of byte and decision of balancing, on every
page: blue for dense work, orange for experts and activations, green for parameters and weights,
pink for routing and samples, grey for what is left."""
STEP = "optimizer step"
MOST_COLUMNS = 200
"""Largest number of columns of a heatmap. If there are more steps, the loads of neighbouring ones
are added up."""
LOAD_COLOURS = (
    (0.0, "#8c510a"),
    (0.25, "#d8b365"),
    (0.5, "#f5f5f5"),
    (0.75, "#67a9cf"),
    (1.0, "#2166ac"),
)
"""Brown for less than the mean load, white for the mean, blue for more; colour-blind readers can
distinguish them."""
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
"""The style of every chart."""


def run_colour(index: int) -> str:
    """Return the colour of the run with this index on the command line."""
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def part_colour(name: str) -> str:
    """Return the colour of a part; one that the table lacks has the same on every page too."""
    return PART_COLOURS.get(name) or run_colour(crc32(name.encode()))


def ordered_colours(count: int) -> list[str]:
    """Return a colour per MoE layer or chunk, from dark to light, without red and green that could
    be confused."""
    if count == 1:
        return ["#46327e"]
    # evenly spread over the scale from 0 to 1, without its ends, which are nearly black and pale
    # yellow
    places = [0.08 + 0.7 * index / (count - 1) for index in range(count)]
    return list(sample_colorscale("Viridis", places))


def figure(
    x_title: str, y_title: str, *, height: int = 300, legend: bool = False, **y_axis: Any
) -> go.Figure:
    """Return an empty chart with titled axes; `y_axis` holds options of the vertical axis."""
    chart = go.Figure(layout={"template": TEMPLATE, "height": height, "showlegend": legend})
    chart.update_xaxes(title_text=x_title)
    chart.update_yaxes(title_text=y_title, **y_axis)
    return chart


def line(
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    colour: str,
    *,
    width: float = 1.6,
    **options: Any,
) -> go.Scatter:
    """Return a line for a chart. Escapes its name, which may be user input; a single point becomes
    a marker. `options` are those of plotly's Scatter."""
    mode = options.pop("mode", "lines")
    marker = {"color": colour, "size": 7, **options.pop("marker", {})}
    return go.Scatter(
        name=html.escape(name, quote=False),
        x=list(x),
        y=[rounded(value) for value in y],
        mode=mode if len(x) > 1 else "markers",
        line={"color": colour, "width": width},
        marker=marker,
        **options,
    )


def expert_loads(steps: Sequence[int], loads: Sequence[Sequence[float]]) -> go.Figure:
    """Draw a heatmap of each expert's load relative to the layer's mean load, over steps; 1 is
    balanced.

    Args:
        steps: the steps at which loads were written.
        loads: (steps, experts), copies per expert or any multiple of them.
    """
    steps, shares = load_shares(steps, loads)
    num_experts = len(shares[0]) if shares else 0
    chart = figure(STEP, "expert", height=min(max(150 + 10 * num_experts, 240), 460))
    ticks = {"tickvals": [0, 0.5, 1, 1.5, 2], "ticktext": ["0", "0.5", "1", "1.5", "≥ 2"]}

    chart.add_trace(
        go.Heatmap(
            x=list(steps),
            y=list(range(num_experts)),
            z=[list(by_step) for by_step in zip(*shares)],  # a row per expert
            zmin=0,
            zmax=2,
            colorscale=[list(stop) for stop in LOAD_COLOURS],
            hovertemplate="step %{x}<br>expert %{y}<br>%{z:.2f} of the mean load<extra></extra>",
            colorbar={
                "title": {"text": "load / mean", "side": "right"},
                **ticks,
                "thickness": 10,
                "outlinewidth": 0,
            },
        )
    )
    chart.update_layout(hovermode="closest")
    chart.update_yaxes(autorange="reversed", showgrid=False, tickformat="d")
    return chart


def load_shares(
    steps: Sequence[int], loads: Sequence[Sequence[float]], most_columns: int = MOST_COLUMNS
) -> tuple[list[int], list[list[float | None]]]:
    """Return steps and, per step, each expert's load relative to the mean; None for a step without
    load.

    Args:
        steps: see `expert_loads`.
        loads: see `expert_loads`.
        most_columns: largest number of steps to return. If there are more, the loads of
            neighbouring steps are added up.
    """
    group_size = math.ceil(len(loads) / most_columns) or 1  # 1 without loads, as `range` needs
    last_steps: list[int] = []
    shares: list[list[float | None]] = []
    for first in range(0, len(loads), group_size):
        group = loads[first : first + group_size]
        load = [sum(of_expert) for of_expert in zip(*group)]
        mean = sum(load) / len(load)
        last_steps.append(steps[first + len(group) - 1])
        shares.append([round(copies / mean, 3) if mean else None for copies in load])
    return last_steps, shares


def bars(name: str, y: Sequence[str], x: Sequence[float], colour: str, **options: Any) -> go.Bar:
    """Return horizontal bars for a chart: a row and a length each, of one colour."""
    values = [rounded(value) for value in x]
    return go.Bar(
        name=name, orientation="h", y=list(y), x=values, marker={"color": colour}, **options
    )


def rounded(value: float) -> float:
    """Round to six significant digits, which suffice for a chart and halve the size of the page."""
    return float(f"{value:.6g}")


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which to show times up to `seconds`, and the unit's length in seconds."""
    if seconds < 600:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


@dataclass(frozen=True)
class Picture:
    """A chart with a title and a caption."""

    title: str
    caption: str
    figure: go.Figure


@dataclass(frozen=True)
class Table:
    """A table of text; the first cell of each row is the row's head."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a page. Empty charts are left out."""

    title: str
    run: str = ""
    """Name of the run that the section describes, shown after the title; empty for none."""
    colour: str = ""
    """Colour of that run; empty for none."""
    text: str = ""
    charts: Sequence[Picture] = ()
    table: Table | None = None


class Drawn:
    """The charts of a page, in order."""

    def __init__(self) -> None:
        self.figures: dict[str, go.Figure] = {}

    def add(self, figure: go.Figure) -> str:
        """Add a figure, and return the id of the HTML element into which it is drawn."""
        name = f"chart-{len(self.figures) + 1}"
        self.figures[name] = figure
        return name

    def as_json(self) -> Markup:
        """Return the charts as members of a JavaScript object: element id -> figure."""
        text = ",\n".join(
            f'"{name}": {plotly.io.to_json(chart)}' for name, chart in self.figures.items()
        )
        assert "</" not in text  # plotly escapes <, so that no name can close the script element
        return Markup(text)


def page_text(template: str, drawn: Drawn, **content: Any) -> str:
    """Return the HTML of a page.

    Args:
        template: file name of the template.
        drawn: collects the charts that the template shows.
        **content: variables of the template.
    """
    pages = Environment(
        loader=PackageLoader("moesaic.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return pages.get_template(template).render(
        drawn=drawn, version=__version__, plotly_js=Markup(get_plotlyjs()), **content
    )


def charts_page(
    path: Path, what: str, title: str, lead: str, charts: Sequence[Picture], **further: Any
) -> Path:
    """Write a page of charts below each other, and return its path.

    Args:
        what: kind of page.
        lead: the sentence with which it opens; empty for none.
        **further: `cards`, `table` before the charts, and `folded` after them, a title and lines
            each.

    Raises:
        InputError: the file cannot be written.
    """
    content = {"cards": (), "table": None, "folded": {}} | further
    text = page_text(
        "charts.html", Drawn(), what=what, title=title, lead=lead, charts=charts, **content
    )
    return save_page(text, path)


def save_page(text: str, path: Path, *, typed: bool = True) -> Path:
    """Write a page, with missing parent folders, and return its path; `typed` says that a user
    typed it.

    Raises:
        InputError: the path is a folder, or cannot be written.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder: name a file, for example {path / 'page.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, text, typed=typed)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}): choose another place"
        ) from error
    return path
