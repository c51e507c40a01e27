"""Benchmarks as pictures: small multiples of lines or bars, with the spread and the bound of every point.

One description, two ways to draw it: an HTML page by plotly, to look into, and a plain SVG, to stand in documentation.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.errors import InputError

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLOURS = (
    "#3a6ea5",
    "#d9772b",
    "#2f8f6f",
    "#b8478a",
    "#8a6d1f",
    "#4fa8c9",
    "#5b5f6b",
    "#9c2f2f",
    "#6f5bb0",
    "#c9a227",
    "#7fb069",
    "#d46a6a",
)
"""By series, in the order in which they first appear; after the last one the first again."""
BOUND = "#111827"
"""Of the marks that bounds are drawn as."""
BOUND_NAME = "bound"
SUFFIXES = (".html", ".svg")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One method in one panel."""

    name: str
    """The same name has the same colour in all panels."""
    x: tuple[float, ...]
    """Positions; of bars, the number of the category."""
    y: tuple[float, ...]
    """Medians."""
    low: tuple[float, ...] = ()
    """Lower ends of the spread; () for none."""
    high: tuple[float, ...] = ()
    """Upper ends of the spread."""
    bounds: tuple[float | None, ...] = ()
    """The least that is possible at each point; () or None for none."""

    def __post_init__(self) -> None:
        for name in ("y", "low", "high", "bounds"):
            values = getattr(self, name)
            assert not (values or name == "y") or len(values) == len(self.x), f"{self.name}: {name} does not fit x"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart among several."""

    title: str
    x_title: str
    """With the unit."""
    y_title: str
    """With the unit."""
    series: tuple[Series, ...]
    categories: tuple[str, ...] = ()
    """Draws bars, grouped under these different names, which may have lines; () draws lines over numbers."""
    x_ticks: tuple[tuple[float, str], ...] = ()
    """Where the axis of a line chart has marks, and what stands there; () for round numbers."""
    log_x: bool = False
    log_y: bool = False
    """Bars always start at zero: leave it off there."""

    def __post_init__(self) -> None:
        assert not (self.categories and (self.log_x or self.log_y)), "bars have a zero, logarithms have none"


def check_picture(path: Path) -> None:
    """Raise InputError if a file's name does not say how to draw it, before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"--picture {path}: unknown kind of picture: end its name with .html or .svg")


def write_picture(path: Path, title: str, panels: Sequence[Panel], notes: str = "", columns: int = 3) -> None:
    """Draw panels into a file: .html is one self-contained page, .svg a plain picture.

    Args:
        path: of the file; its folder is made.
        title: above all panels.
        panels: row after row.
        notes: what a reader must know, below.
        columns: panels next to each other.

    Raises:
        InputError: for another suffix.
    """
    check_picture(path)
    if path.suffix == ".svg":
        from moesaic_lab.pictures_svg import to_svg

        text = to_svg(title, panels, notes, columns)
    else:
        text = to_html(title, panels, notes, columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def colours(panels: Sequence[Panel]) -> dict[str, str]:
    """Return the colour of every series by its name."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}


def to_html(title: str, panels: Sequence[Panel], notes: str = "", columns: int = 3) -> str:
    """Return a page that needs nothing from the network: the script of plotly is part of it."""
    body = figure(panels, columns).to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False})
    head, below = html.escape(title, quote=False), html.escape(notes, quote=False)
    style = "body{font-family:system-ui,sans-serif;color:#1f2937;margin:24px;max-width:1400px}p{max-width:110ch}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{head}</title><style>{style}</style></head>'
        f"<body><h1>{head}</h1>{body}<p>{below}</p></body></html>\n"
    )


def figure(panels: Sequence[Panel], columns: int = 3) -> go.Figure:
    """Return the panels as one figure of plotly."""
    from plotly.subplots import make_subplots

    from moesaic.report.style import TEMPLATE

    columns = min(columns, max(len(panels), 1))
    rows = max(-(-len(panels) // columns), 1)
    titles = [html.escape(panel.title, quote=False) for panel in panels]
    made = make_subplots(rows=rows, cols=columns, subplot_titles=titles, vertical_spacing=0.35 / rows)
    made.update_layout(template=TEMPLATE, height=120 + 320 * rows, hovermode="closest", barmode="group")
    of_name, shown = colours(panels), set()
    for place, panel in enumerate(panels):
        where = {"row": place // columns + 1, "col": place % columns + 1}
        for series in panel.series:
            for trace in _traces(panel, series, of_name[series.name]):
                trace.showlegend = trace.legendgroup not in shown
                shown |= {trace.legendgroup}
                made.add_trace(trace, **where)
        ticks = {"tickvals": [x for x, _ in panel.x_ticks], "ticktext": [t for _, t in panel.x_ticks]}
        log_x, log_y = ({"type": "log"} if log else {} for log in (panel.log_x, panel.log_y))
        made.update_xaxes(title_text=panel.x_title, **(ticks if panel.x_ticks else {}), **log_x, **where)
        made.update_yaxes(
            title_text=panel.y_title, **log_y, **({} if panel.log_y else {"rangemode": "tozero"}), **where
        )
    return made


def _traces(panel: Panel, series: Series, colour: str) -> list[Any]:
    """Return a series as traces: the medians with their spread, and the bounds as short marks."""
    import plotly.graph_objects as go

    name = html.escape(series.name, quote=False)
    spread: dict[str, Any] = {}
    if series.low:
        above = [high - y for y, high in zip(series.y, series.high)]
        below = [y - low for y, low in zip(series.y, series.low)]
        spread = {"error_y": {"type": "data", "array": above, "arrayminus": below, "thickness": 1, "width": 3}}
    labels = [html.escape(name, quote=False).replace("\n", "<br>") for name in panel.categories]
    x: list[Any] = [labels[int(at)] for at in series.x] if panel.categories else list(series.x)
    common = {"x": x, "y": list(series.y), "name": name, "legendgroup": name, **spread}
    if panel.categories:
        found = [go.Bar(**common, marker_color=colour, offsetgroup=name)]
    else:
        found = [go.Scatter(**common, mode="lines+markers", line={"color": colour, "width": 1.6})]
    if any(bound is not None for bound in series.bounds):
        marks = {"symbol": "line-ew-open", "size": 12, "color": BOUND, "line": {"width": 2, "color": BOUND}}
        grouped = {"offsetgroup": name} if panel.categories else {}
        bounds = list(series.bounds)
        found.append(
            go.Scatter(x=x, y=bounds, name=BOUND_NAME, legendgroup=BOUND_NAME, mode="markers", marker=marks, **grouped)
        )
    return found
