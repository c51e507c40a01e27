"""Rows as a table: for a terminal, a column per shown key, each with a unit and a form; for a page, Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from moesaic_lab.claims import Claim

Marks = tuple[str, str]
"""Two lines of a page; what stands between them is written."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """How one key of a row is shown."""

    key: str
    """Of the row."""
    title: str
    """Above the column, with the unit."""
    show: Callable[[Any], str] = str
    """From a value to text; a row without the key, or with None, shows an empty cell."""
    is_text: bool = False
    """Aligned to the left, as words are."""


def table(
    title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], *, group_by: tuple[str, ...] = ()
) -> Table:
    """Return rows as a table.

    Args:
        title: above it.
        rows: a mapping per line.
        columns: in order.
        group_by: keys; a rule is drawn wherever the value of one changes.
    """
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for column in columns:
        made.add_column(column.title, justify="left" if column.is_text else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None]):
        cells = ["" if row.get(column.key) is None else column.show(row[column.key]) for column in columns]
        ends = following is not None and any(row[key] != following[key] for key in group_by)
        made.add_row(*cells, end_section=ends)
    return made


def spread(rows: Sequence[Mapping[str, Any]], figure: str, *by: str) -> list[dict[str, Any]]:
    """Return a row for each combination of values that rows have at some keys: these, and a figure's mean, least and most."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in by), []).append(row[figure])
    return [
        dict(zip(by, values)) | {"mean": statistics.mean(each), "least": min(each), "most": max(each)}
        for values, each in found.items()
    ]


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines as a Markdown table; the first is the header."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def write_page(path: Path, text: str, marks: Marks | None = None) -> None:
    """Write a page, or what stands between two lines of it."""
    if marks is not None:
        start, end = marks
        whole = path.read_text(encoding="utf-8")
        before, after = whole.split(start)[0], whole.split(end)[1]
        text = f"{before}{start}\n\n{text.strip()}\n\n{end}{after}"
    path.write_text(text, encoding="utf-8")


def milliseconds(seconds: float) -> str:
    """Return a time with three or more digits that count."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def byte_size(num_bytes: float) -> str:
    """Return bytes in the unit of 1024 that fits."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def share(value: float) -> str:
    """Return a ratio with two decimals."""
    return f"{value:.2f}"


def percent(value: float) -> str:
    """Return a share in hundredths."""
    return f"{100 * value:.1f} %"


def quartiles(row: Mapping[str, Any]) -> str:
    """Return the quartiles of what `Timing.row` gives, in milliseconds."""
    return f"{milliseconds(row['low_seconds'])}-{milliseconds(row['high_seconds'])}"


QUARTILES = (
    Column(key="median_seconds", title="median ms", show=milliseconds),
    Column(key="low_seconds", title="quartile", show=milliseconds),
    Column(key="high_seconds", title="quartile", show=milliseconds),
)
"""The columns of what `Timing.row` gives."""


def claims_table(claims: Sequence[Claim]) -> Table:
    """Return claims with their targets; one without a value tells why."""
    made = Table(title="Claims", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for name, justify in (("claim", "left"), ("value", "right"), ("target", "right"), ("holds", "left")):
        made.add_column(name, justify=justify, no_wrap=name != "holds")  # type: ignore[arg-type]
    for claim in claims:
        value = "" if claim.value is None else f"{claim.value:.4g}"
        target = "" if claim.target is None else f"{claim.op} {claim.target:g}"
        holds = {True: "yes", False: "no", None: claim.reason}[claim.holds]
        made.add_row(claim.name, value, target, holds)
    return made
