"""Pictures of benchmarks with matplotlib: several small line or bar charts, each point with its
spread and lower bound."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.errors import InputError
from moesaic_lab.measure import Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    "#101010",
    "#00a2a2",
    "#b0b0b0",
)
"""Colours of the series, in the order in which their names first appear; reused from the start if
there are more."""
BOUND = "#111827"
"""Colour of the marks for bounds."""
BOUND_NAME = "bound"
WIDTH = 3.6
HEIGHT = 2.7
"""Size of a panel in inches."""
LETTERS = 52
"""Number of letters that fit in one line under a panel."""
BAR_SHARE = 0.8
"""Share of a category's width that its bars fill."""
SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, kw_only=True)
class PlottedSeries:
    """The points of one method in one panel."""

    name: str
    """Name in the legend; the same name has the same colour in all panels."""
    x: tuple[float, ...]
    """Positions; for bars, indices of categories."""
    y: tuple[float, ...]
    """Medians."""
    low: tuple[float, ...] = ()
    """Lower ends of the spread; () for none."""
    high: tuple[float, ...] = ()
    """Upper ends of the spread."""
    bounds: tuple[float | None, ...] = ()
    """Lower bound of each point's value; () or None if unknown."""

    def __post_init__(self) -> None:
        for name in ("y", "low", "high", "bounds"):
            values = getattr(self, name)
            is_left_out = not values and name != "y"
            assert is_left_out or len(values) == len(self.x), f"{self.name}: {name} does not fit x"

    @classmethod
    def of(
        cls,
        name: str,
        points: Iterable[tuple[float, Timing, float]],
        scales: Iterable[float] | None = None,
    ) -> PlottedSeries:
        """Return the series of a method's times.

        Args:
            points: position, times and lower bound in seconds of each point; 0 for no bound.
            scales: factor on the seconds of each point; None for milliseconds.
        """
        positions: list[float] = []
        medians: list[float] = []
        lows: list[float] = []
        highs: list[float] = []
        bounds: list[float | None] = []
        for (x, timing, bound), scale in zip(points, scales or itertools.repeat(1e3)):
            positions.append(float(x))
            medians.append(scale * timing.median)
            lows.append(scale * timing.low)
            highs.append(scale * timing.high)
            bounds.append(scale * bound if bound else None)
        return cls(
            name=name,
            x=tuple(positions),
            y=tuple(medians),
            low=tuple(lows),
            high=tuple(highs),
            bounds=tuple(bounds),
        )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of a picture."""

    title: str
    x_title: str
    """Label of the x axis, with the unit."""
    y_title: str
    """Label of the y axis, with the unit."""
    series: tuple[PlottedSeries, ...]
    categories: tuple[str, ...] = ()
    """Names of the groups of a bar chart, all different; they may have several lines. () makes a
    line chart."""
    x_ticks: tuple[tuple[float, str], ...] = ()
    """Position and label of each tick on the x axis of a line chart; () for round numbers."""
    log_x: bool = False
    log_y: bool = False
    """Logarithmic y axis; not for bars, which start at zero."""

    def __post_init__(self) -> None:
        assert not (self.categories and (self.log_x or self.log_y)), (
            "bars have a zero, logarithms have none"
        )


def check_picture(path: Path) -> None:
    """Raise InputError if a file's suffix is not one of `SUFFIXES`; called before anything is
    measured."""
    if path.suffix not in SUFFIXES:
        raise InputError(
            f"--picture {path}: unknown kind of picture: end its name with {', '.join(SUFFIXES)}"
        )


def write_picture(
    path: Path, title: str, panels: Sequence[Panel], notes: str = "", columns: int = 3
) -> None:
    """Draw panels into a file.

    Args:
        path: the .svg, .png or .pdf file to write; its folder is created if missing.
        title: title above all panels.
        panels: the panels, row by row.
        notes: text below the panels, with what a reader must know.
        columns: number of panels in a row.

    Raises:
        InputError: for another suffix, or if the file cannot be written.
    """
    import matplotlib

    check_picture(path)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moesaic"}):
        drawing = figure(title, panels, notes, columns)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            drawing.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise InputError(
                f"--picture {path}: cannot be written ({error.strerror}): choose another path"
            ) from error


def colours(panels: Sequence[Panel]) -> dict[str, str]:
    """Return the colour of every series by its name."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}


def figure(title: str, panels: Sequence[Panel], notes: str = "", columns: int = 3) -> Figure:
    """Return the panels as one figure; the arguments are those of `write_picture`."""
    from matplotlib.figure import Figure

    columns = min(columns, max(len(panels), 1))
    rows = max(math.ceil(len(panels) / columns), 1)

    # Room for the legend above, and for the lines of the notes below, in inches.
    below = textwrap.fill(_plain(notes), 48 * columns)
    extra = 0.9 + 0.16 * (below.count("\n") + 1)
    drawing = Figure(figsize=(WIDTH * columns, HEIGHT * rows + extra), layout="constrained")
    of_name = colours(panels)
    axes = drawing.subplots(rows, columns, squeeze=False).flatten().tolist()
    for panel, on in zip(panels, axes):
        _draw(panel, on, of_name)
    for on in axes[len(panels) :]:
        on.set_axis_off()

    # One legend for all panels: a name is listed once.
    shown: dict[str, Any] = {}
    for on in axes:
        handles, labels = on.get_legend_handles_labels()
        shown.update(zip(labels, handles))
    heading = {"title": _plain(title), "title_fontproperties": {"size": 12, "weight": "bold"}}
    drawing.legend(
        shown.values(),
        shown.keys(),
        loc="outside upper left",
        ncols=2 * columns,
        fontsize=8,
        frameon=False,
        alignment="left",
        **heading,
    )
    drawing.supxlabel(below, fontsize=7, ha="left", x=0.01)
    return drawing


def _draw(panel: Panel, on: Axes, of_name: dict[str, str]) -> None:
    """Draw one panel: medians with their spread, and bounds as short horizontal marks.

    Args:
        of_name: the colour of each series.
    """
    width = BAR_SHARE / max(len(panel.series), 1)
    for place, series in enumerate(panel.series):
        colour = of_name[series.name]
        name = _plain(series.name)
        # The bars of a category stand side by side, its position in their middle.
        middle = (len(panel.series) - 1) / 2
        shift = (place - middle) * width if panel.categories else 0.0
        at = [x + shift for x in series.x]
        if panel.categories:
            on.bar(at, series.y, width * 0.92, color=colour, label=name)
        else:
            on.plot(at, series.y, color=colour, marker="o", markersize=3, linewidth=1.2, label=name)
        if series.low:
            on.vlines(
                at,
                series.low,
                series.high,
                color=BOUND if panel.categories else colour,
                linewidth=0.8,
            )
        bounds = [(x, bound) for x, bound in zip(at, series.bounds) if bound is not None]
        if bounds:
            bound_x, bound_y = zip(*bounds)
            on.plot(bound_x, bound_y, linestyle="", marker="_", color=BOUND, label=BOUND_NAME)

    on.set(title=_plain(panel.title), xlabel=_plain(panel.x_title), ylabel=_plain(panel.y_title))
    if panel.log_x:
        on.set_xscale("log")
    if panel.log_y:
        on.set_yscale("log")
    else:
        on.set_ylim(bottom=0)
    if panel.categories:
        letters = LETTERS // len(panel.categories)
        on.set_xticks(
            range(len(panel.categories)),
            [_plain(_wrapped(name, letters)) for name in panel.categories],
        )
    elif panel.x_ticks:
        positions = [x for x, _ in panel.x_ticks]
        labels = [_plain(text) for _, text in panel.x_ticks]
        on.set_xticks(positions, labels)
        on.set_xticks([], minor=True)
    on.title.set_fontsize(9)
    on.tick_params(labelsize=7)
    on.grid(axis="y", color="#e8ebf0")
    on.set_axisbelow(True)


def _wrapped(text: str, letters: int) -> str:
    """Break a label at commas into lines of at most `letters` letters, if its parts are that
    short."""
    lines: list[str] = []
    for part in text.split(", "):
        if lines and len(lines[-1]) + 2 + len(part) <= letters:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Escape dollar signs, between which matplotlib would read mathematics."""
    return text.replace("$", r"\$")
