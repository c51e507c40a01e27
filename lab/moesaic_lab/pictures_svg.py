"""Panels as a plain SVG: no script, no font, no browser to make it; small enough to stand in a repository."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic_lab.pictures import BOUND, BOUND_NAME, Panel, Series, colours

WIDTH, HEIGHT = 330, 240
"""Of a panel, its titles and marks included."""
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 42
"""Between a panel's edge and its axes."""
LETTER = 5.2
"""Width of a letter of a label, about."""
INK, GRID, FONT = "#374151", "#e8ebf0", "system-ui, sans-serif"
BAR_SHARE = 0.8
"""Of a category's width that its bars fill."""


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, at = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / ((high - low) or 1.0)

    def ticks(self) -> list[float]:
        """Return round values inside: powers of 10 (and their 2 and 5 folds where those are few), or steps of them."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            folds = (1, 2, 5) if math.log10(self.high / self.low) < 2 else (1,)
            return [f * 10.0**d for d in decades for f in folds if self.low <= f * 10.0**d <= self.high]
        step = _round_step((self.high - self.low) / 5 or 1.0)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def to_svg(title: str, panels: Sequence[Panel], notes: str = "", columns: int = 3) -> str:
    """Return the picture; `write_picture` tells the arguments."""
    columns = min(columns, max(len(panels), 1))
    rows = -(-len(panels) // columns)
    width = max(WIDTH * columns, 480)
    key, key_height = _legend(panels, width)
    lines = textwrap.wrap(notes, width // 6)
    top = 34 + key_height
    height = top + HEIGHT * rows + 14 * len(lines) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="{FONT}" font-size="11" fill="{INK}" role="img">',
        f'<title>{_safe(title)}</title><rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="20" font-size="15" font-weight="600">{_safe(title)}</text>',
        *key,
    ]
    of_name = colours(panels)
    for place, panel in enumerate(panels):
        left, above = WIDTH * (place % columns), top + HEIGHT * (place // columns)
        parts += [f'<g transform="translate({left},{above})">', *_panel(panel, of_name), "</g>"]
    below = top + HEIGHT * rows + 6
    parts += [f'<text x="10" y="{below + 14 * n}" font-size="10">{_safe(line)}</text>' for n, line in enumerate(lines)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(panels: Sequence[Panel], width: int) -> tuple[list[str], int]:
    """Return the key of colours, and its height."""
    entries = list(colours(panels).items())
    if any(bound is not None for panel in panels for series in panel.series for bound in series.bounds):
        entries.append((BOUND_NAME, BOUND))
    parts, x, y = [], 10.0, 38
    for name, colour in entries:
        length = 26 + 6.4 * len(name)
        if x + length > width and x > 10:
            x, y = 10.0, y + 16
        parts.append(f'<rect x="{x:.0f}" y="{y - 4}" width="14" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18:.0f}" y="{y}">{_safe(name)}</text>')
        x += length
    return parts, y - 30


def _panel(panel: Panel, of_name: dict[str, str]) -> list[str]:
    x, y = _scales(panel)
    parts = [f'<text x="{LEFT}" y="16" font-size="12" font-weight="600">{_safe(panel.title)}</text>']
    for value in y.ticks():
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{GRID}"/>'
        )
        parts.append(f'<text x="{LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for at, text in _x_ticks(panel, x):
        for number, line in enumerate(text.split("\n")):
            foot = HEIGHT - BOTTOM + 14 + 12 * number
            parts.append(f'<text x="{at:.1f}" y="{foot}" text-anchor="middle" font-size="10">{_safe(line)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{_safe(panel.x_title)}</text>')
    parts.append(
        f'<text transform="translate(11,{(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{_safe(panel.y_title)}</text>"
    )
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#b9c0cb"/>')
    for place, series in enumerate(panel.series):
        draw = _bars if panel.categories else _line
        parts += draw(panel, place, series, of_name[series.name], x, y)
    return parts


def _line(panel: Panel, place: int, series: Series, colour: str, x: Scale, y: Scale) -> list[str]:
    points = [(x(a), y(b)) for a, b in zip(series.x, series.y)]
    parts = [f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" fill="none" stroke="{colour}"/>']
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4" fill="{colour}"/>' for a, b in points]
    return [
        *parts,
        *_spread(series, [a for a, _ in points], colour, y),
        *_bounds(series, [a for a, _ in points], 10, y),
    ]


def _bars(panel: Panel, place: int, series: Series, colour: str, x: Scale, y: Scale) -> list[str]:
    each = (x(1) - x(0)) * BAR_SHARE / max(len(panel.series), 1)
    lefts = [x(at) + each * (place - len(panel.series) / 2) for at in series.x]
    parts = [
        f'<rect x="{left:.1f}" y="{y(value):.1f}" width="{each * 0.92:.1f}" height="{y(0) - y(value):.1f}" fill="{colour}"/>'
        for left, value in zip(lefts, series.y)
    ]
    middles = [left + each * 0.46 for left in lefts]
    return [*parts, *_spread(series, middles, INK, y), *_bounds(series, middles, each, y)]


def _spread(series: Series, middles: Sequence[float], colour: str, y: Scale) -> list[str]:
    return [
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="{colour}"/>'
        for at, low, high in zip(middles, series.low, series.high)
    ]


def _bounds(series: Series, middles: Sequence[float], width: float, y: Scale) -> list[str]:
    return [
        f'<line class="bound" x1="{at - width / 2:.1f}" x2="{at + width / 2:.1f}" y1="{y(bound):.1f}" y2="{y(bound):.1f}" '
        f'stroke="{BOUND}" stroke-width="2"/>'
        for at, bound in zip(middles, series.bounds)
        if bound is not None and y.low <= bound
    ]


def _scales(panel: Panel) -> tuple[Scale, Scale]:
    xs = [x for series in panel.series for x in series.x] or [0.0]
    ys = [v for series in panel.series for of in (series.y, series.low, series.high, series.bounds) for v in of if v]
    bottom, top = (
        (min(ys, default=1.0) / 1.15, max(ys, default=1.0) * 1.15)
        if panel.log_y
        else (0.0, max(ys, default=1.0) * 1.06)
    )
    left, right = (-0.5, len(panel.categories) - 0.5) if panel.categories else (min(xs), max(xs))
    margin = 0 if panel.categories else 10
    across = Scale(left, right, LEFT + margin, WIDTH - RIGHT - margin, panel.log_x)
    return across, Scale(bottom, top, HEIGHT - BOTTOM, TOP, panel.log_y)


def _x_ticks(panel: Panel, x: Scale) -> list[tuple[float, str]]:
    if panel.categories:
        fitting = int((WIDTH - LEFT - RIGHT) / len(panel.categories) / LETTER)
        return [(x(at), _wrapped(name, fitting)) for at, name in enumerate(panel.categories)]
    if panel.x_ticks:
        return [(x(at), text) for at, text in panel.x_ticks]
    return [(x(value), _number(value)) for value in x.ticks()]


def _wrapped(text: str, fitting: int) -> str:
    """Return a label cut at commas into lines of so many letters, where it has commas."""
    lines: list[str] = []
    for part in text.split(", "):
        joined = f"{lines[-1]}, {part}" if lines else part
        if lines and len(joined) <= fitting:
            lines[-1] = joined
        else:
            lines.append(part)
    return "\n".join(lines)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(fold * power for fold in (1, 2, 5, 10) if fold * power >= step * 0.999)


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}"


def _safe(text: str) -> str:
    return html.escape(text)
