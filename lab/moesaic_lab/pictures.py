"""Benchmarks as pictures: small multiples of lines or bars, with the spread and the bound of every point, by matplotlib."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.errors import InputError
from moesaic_lab.measure import Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    "#3a6ea5", "#d9772b", "#2f8f6f", "#b8478a", "#8a6d1f", "#4fa8c9", "#5b5f6b", "#9c2f2f",
    "#6f5bb0", "#c9a227", "#7fb069", "#d46a6a", "#101010", "#00a2a2", "#b0b0b0",
)  # fmt: skip
"""By series, in the order in which they first appear; after the last one the first again."""
BOUND = "#111827"
"""Of the marks that bounds are drawn as."""
BOUND_NAME = "bound"
WIDTH, HEIGHT = 3.6, 2.7
"""Of a panel, in inches."""
LETTERS = 52
"""That stand next to each other under a panel."""
BAR_SHARE = 0.8
"""Of a category's width that its bars fill."""
SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, kw_only=True)
class PlottedSeries:
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

    @classmethod
    def of(
        cls, name: str, points: Iterable[tuple[float, Timing, float]], scales: Iterable[float] | None = None
    ) -> PlottedSeries:
        """Return what a method took.

        Args:
            name: of the method.
            points: position, times, and the seconds below which none can go, 0 for none.
            scales: by which each point's seconds are multiplied; None for milliseconds.
        """
        found = [(float(x), t, bound, scale) for (x, t, bound), scale in zip(points, scales or itertools.repeat(1e3))]
        return cls(
            name=name, x=tuple(x for x, *_ in found),
            y=tuple(scale * timing.median for _, timing, _, scale in found),
            low=tuple(scale * timing.low for _, timing, _, scale in found),
            high=tuple(scale * timing.high for _, timing, _, scale in found),
            bounds=tuple(scale * bound if bound else None for *_, bound, scale in found),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart among several."""

    title: str
    x_title: str
    """With the unit."""
    y_title: str
    """With the unit."""
    series: tuple[PlottedSeries, ...]
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
        raise InputError(f"--picture {path}: unknown kind of picture: end its name with {', '.join(SUFFIXES)}")


def write_picture(path: Path, title: str, panels: Sequence[Panel], notes: str = "", columns: int = 3) -> None:
    """Draw panels into a file.

    Args:
        path: of the file, .svg, .png or .pdf; its folder is made.
        title: above all panels.
        panels: row after row.
        notes: what a reader must know, below.
        columns: panels next to each other.

    Raises:
        InputError: for another suffix, or if the file cannot be written.
    """
    import matplotlib

    check_picture(path)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moesaic"}):
        made = figure(title, panels, notes, columns)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise InputError(f"--picture {path}: cannot be written ({error.strerror}): choose another path") from error


def colours(panels: Sequence[Panel]) -> dict[str, str]:
    """Return the colour of every series by its name."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}


def figure(title: str, panels: Sequence[Panel], notes: str = "", columns: int = 3) -> Figure:
    """Return the panels as one figure; `write_picture` tells the arguments."""
    from matplotlib.figure import Figure

    columns = min(columns, max(len(panels), 1))
    rows = max(-(-len(panels) // columns), 1)
    below = textwrap.fill(_plain(notes), 48 * columns)
    extra = 0.9 + 0.16 * (below.count("\n") + 1)
    made = Figure(figsize=(WIDTH * columns, HEIGHT * rows + extra), layout="constrained")
    of_name = colours(panels)
    axes = made.subplots(rows, columns, squeeze=False).flatten().tolist()
    for panel, on in zip(panels, axes):
        _draw(panel, on, of_name)
    for on in axes[len(panels) :]:
        on.set_axis_off()
    shown = {label: handle for on in axes for handle, label in zip(*on.get_legend_handles_labels())}
    heading = {"title": _plain(title), "title_fontproperties": {"size": 12, "weight": "bold"}}
    made.legend(
        shown.values(), shown.keys(), loc="outside upper left", ncols=2 * columns, fontsize=8, frameon=False, alignment="left",
        **heading,
    )  # fmt: skip
    made.supxlabel(below, fontsize=7, ha="left", x=0.01)
    return made


def _draw(panel: Panel, on: Axes, of_name: dict[str, str]) -> None:
    """Draw one panel: medians with their spread, and bounds as short marks."""
    width = BAR_SHARE / max(len(panel.series), 1)
    for place, series in enumerate(panel.series):
        colour, name = of_name[series.name], _plain(series.name)
        shift = (place - (len(panel.series) - 1) / 2) * width if panel.categories else 0.0
        at = [x + shift for x in series.x]
        if panel.categories:
            on.bar(at, series.y, width * 0.92, color=colour, label=name)
        else:
            on.plot(at, series.y, color=colour, marker="o", markersize=3, linewidth=1.2, label=name)
        if series.low:
            on.vlines(at, series.low, series.high, color=BOUND if panel.categories else colour, linewidth=0.8)
        bounds = [(x, bound) for x, bound in zip(at, series.bounds) if bound is not None]
        if bounds:
            on.plot(*zip(*bounds), linestyle="", marker="_", color=BOUND, label=BOUND_NAME)
    on.set(title=_plain(panel.title), xlabel=_plain(panel.x_title), ylabel=_plain(panel.y_title))
    if panel.log_x:
        on.set_xscale("log")
    if panel.log_y:
        on.set_yscale("log")
    else:
        on.set_ylim(bottom=0)
    if panel.categories:
        letters = LETTERS // len(panel.categories)
        on.set_xticks(range(len(panel.categories)), [_plain(_wrapped(name, letters)) for name in panel.categories])
    elif panel.x_ticks:
        on.set_xticks([x for x, _ in panel.x_ticks], [_plain(text) for _, text in panel.x_ticks])
        on.set_xticks([], minor=True)
    on.title.set_fontsize(9)
    on.tick_params(labelsize=7)
    on.grid(axis="y", color="#e8ebf0")
    on.set_axisbelow(True)


def _wrapped(text: str, letters: int) -> str:
    """Return a label cut at commas into lines of so many letters, where it has commas."""
    lines: list[str] = []
    for part in text.split(", "):
        if lines and len(lines[-1]) + 2 + len(part) <= letters:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a text in which nothing is mathematics to matplotlib."""
    return text.replace("$", r"\$")
