"""Rows of results as tables: for the terminal with rich, for documentation pages in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from moesaic_lab.claims import Claim

Marks = tuple[str, str]
"""The two lines of a page that enclose its generated text."""


Columns = Sequence[str | tuple[str, str]]
"""Keys of the rows that a table shows, from left to right; a pair gives a key a shorter title than
its own words."""


def table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Columns = (),
    *,
    group_by: tuple[str, ...] = (),
) -> Table:
    """Return rows as a table; how a value is shown follows from its type and from the unit in its
    key.

    Args:
        rows: the rows from top to bottom.
        columns: the columns; () for all keys of the first row.
        group_by: keys; a line separates two rows that differ in one of them.
    """
    shown = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1)
    )
    named = [
        (column, title_of(column)) if isinstance(column, str) else column
        for column in columns or rows[0]
    ]
    for key, name in named:
        is_text = any(isinstance(row.get(key), str) for row in rows)
        shown.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None]):
        ends_group = following is not None and any(row[key] != following[key] for key in group_by)
        shown.add_row(*(cell(key, row.get(key)) for key, _ in named), end_section=ends_group)
    return shown


MOST_COLUMNS = 1000
"""Characters of a line that a table may need."""


def print_whole(shown: Table, *, stderr: bool = False) -> None:
    """Print a table with all its columns, also where a line is narrower, as in a file: an editor
    can scroll, but nobody gets back what was cut."""
    console = Console(stderr=stderr)
    options = console.options.update(width=MOST_COLUMNS)
    needed = Measurement.get(console, options, shown).minimum
    Console(stderr=stderr, width=max(console.width, needed)).print(shown)


def title_of(key: str) -> str:
    """Return a key in words; seconds are shown in milliseconds."""
    words = key.replace("_", " ")
    if not words.endswith("seconds"):
        return words
    return f"{words.removesuffix('seconds').strip()} ms".strip()


def cell(key: str, value: object) -> str:
    """Return a value in words; nothing for None and False."""
    if value is None or isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int | float) and key.endswith("seconds"):
        return milliseconds(value)
    if isinstance(value, int | float) and key.endswith("bytes"):
        return byte_size(value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:,.0f}"
    return str(value)


def spread(rows: Sequence[Mapping[str, Any]], figure: str, *by: str) -> list[dict[str, Any]]:
    """Group rows by the keys `by`; return for each group these keys and the mean, least and most of
    `figure`."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        values = tuple(row[key] for key in by)
        groups.setdefault(values, []).append(row[figure])
    spreads = []
    for values, figures in groups.items():
        entry = dict(zip(by, values))
        entry["mean"] = statistics.mean(figures)
        entry["least"] = min(figures)
        entry["most"] = max(figures)
        spreads.append(entry)
    return spreads


CLAIM_COLUMNS = ("claim (a ratio, or with its unit)", "value", "target", "holds")
"""Titles of a table of claims on a page."""


def with_unit(figure: str, unit: str) -> str:
    """Return a figure with its unit, without one for a ratio."""
    return figure if unit in RATIOS else f"{figure} {unit}"


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as a Markdown table; the first row is the header."""
    header, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([header, "|" + "---|" * len(lines[0]), *body])


def write_page(path: Path, text: str, marks: Marks | None = None) -> None:
    """Write `text` as the whole page, or between the two lines `marks` of the existing page."""
    if marks is not None:
        start, end = marks
        whole = path.read_text(encoding="utf-8")
        before = whole.split(start)[0]
        after = whole.split(end)[1]
        text = f"{before}{start}\n\n{text.strip()}\n\n{end}{after}"
    path.write_text(text, encoding="utf-8")


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with at least three significant digits if it is 1 ms or
    more."""
    value = 1e3 * seconds
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def byte_size(num_bytes: float) -> str:
    """Return a size in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def share(value: float) -> str:
    """Return a ratio with two decimals."""
    return f"{value:.2f}"


QUARTILES = ("median_seconds", "low_seconds", "high_seconds")
"""Columns for the keys of `Timing.row`."""


def _of_a_claim(value: float, *, digits: int) -> str:
    """Return a whole number in full, and any other with so many significant digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


RATIOS = ("1", "share")
"""Units of claims that are ratios."""


def claims_table(claims: Sequence[Claim]) -> Table:
    """Return a table of claims with their targets; a claim without a value shows the reason."""
    shown = Table(
        title="Claims", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1)
    )
    for name, justify in (
        ("claim", "left"),
        ("value", "right"),
        ("target", "right"),
        ("holds", "left"),
    ):
        shown.add_column(name, justify=justify, no_wrap=name != "holds")  # type: ignore[arg-type]
    for claim in claims:
        value = ""
        if claim.value is not None:
            value = with_unit(_of_a_claim(claim.value, digits=4), claim.unit)
        target = ""
        if claim.target is not None:
            target = f"{claim.op} {_of_a_claim(claim.target, digits=6)}"
        holds = {True: "yes", False: "no", None: claim.reason}[claim.holds]
        holds += f" ({claim.case})" if claim.case else ""
        shown.add_row(claim.name, value, target, holds)
    return shown
