"""The command `moesaic reproduce`, which compares published figures of five papers with simulated
ones. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moesaic.cli.arguments import parse
from moesaic.errors import InputError, suggestion
from moesaic_lab.reproduce.papers import NOTES, REPRODUCTIONS, PapersMeasured, claims
from moesaic_lab.reproduce.records import Book, Chart, Reproduction, Row, read_book
from moesaic_lab.tables import claims_table, print_whole, table

if TYPE_CHECKING:
    from moesaic_lab.pictures import Panel

MOST_BARS = 20
"""The most rows that the chart of ratios shows. A paper with more rows has its own charts for
them."""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """What to write in addition to the tables."""

    json: str | None = None
    """Write all results to this JSON file; "-" prints them instead of the tables."""
    picture: str | None = None
    """Draw the charts into this file, .svg, .png or .pdf."""
    refit: bool = False
    """First fit the papers' constants again to their figures, and report which differ from those
    that come with Moesaic."""


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    words = list(arguments)
    names = ", ".join((*REPRODUCTIONS, "all"))
    first = words[0] if words else ""
    if not first or (first.startswith("-") and first not in ("-h", "--help")):
        raise InputError(f"say what to reproduce: moesaic reproduce PAPER, one of {names}")
    wants_help = first in ("-h", "--help")
    if not wants_help and first not in (*REPRODUCTIONS, "all"):
        raise InputError(f"paper {first!r} is unknown{suggestion(first, [*REPRODUCTIONS, 'all'])}")
    description = (
        "Simulate a paper's cluster and sweep, and compare the figures with the paper's. PAPER "
        f"is one of {names}."
    )
    options = parse(
        ReproduceOptions,
        words if wants_help else words[1:],
        prog="moesaic reproduce PAPER",
        description=description,
    )
    if options.picture is not None:
        from moesaic_lab.pictures import check_picture

        check_picture(Path(options.picture))

    papers = list(REPRODUCTIONS) if first == "all" else [first]
    book = _refitted(papers) if options.refit else read_book()
    reproductions = []
    progress = Console(stderr=True)
    for paper in papers:
        with progress.status(f"{paper}: simulating"):
            reproductions.append(REPRODUCTIONS[paper](book))
        if options.json != "-":
            _print(reproductions[-1])

    if options.json != "-":
        print_whole(claims_table(claims(reproductions, book)))
    if options.json is not None:
        try:
            PapersMeasured.of(reproductions, book).write(options.json)
        except OSError as error:
            raise InputError(
                f"--json {options.json}: cannot be written ({error.strerror}): choose another path"
            ) from error
    if options.picture is not None:
        _draw(reproductions, Path(options.picture))
    return 0


def _refitted(papers: list[str]) -> Book:
    """Return the book with the constants of papers found again."""
    from moesaic_lab.reproduce.fitting import refit

    committed = read_book()
    names = tuple(name for name in committed.constants if name.split(".")[0] in papers)
    with Console(stderr=True).status("finding the constants again"):
        refitted = refit(committed, names)
    for name in names:
        old = committed.constant(name)
        new = refitted.constant(name)
        differs = abs(new - old) > 1e-3 * abs(old)
        print(
            f"{name}: {new:.6g} {'differs from' if differs else 'as'} {old:.6g} committed",
            file=sys.stderr,
        )
    return refitted


def _print(reproduction: Reproduction) -> None:
    """Print the table and the findings of a paper."""
    console = Console()
    rows = [
        {
            "cell": row.cell.name.removeprefix(f"{reproduction.paper}."),
            "unit": row.cell.unit,
            "published": "." if row.cell.value is None else f"{row.cell.value:g}",
            "ours": f"{row.ours:.4g}",
            "error": _error(row.cell.unit, row.error),
            "role": _role(row),
        }
        for row in reproduction.rows
    ]
    columns = (
        ("cell", reproduction.paper),
        "published",
        ("ours", "simulated"),
        "unit",
        ("error", "off by"),
        "role",
    )
    print_whole(table(reproduction.title, rows, columns))
    for finding in reproduction.findings:
        mark = {True: "holds", False: "does not hold", None: "found"}[finding.holds]
        console.print(
            f"{mark}: {finding.statement}: {finding.ours}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    lines = [f"assumed: {text}" for text in reproduction.assumptions]
    lines += [f"unexplained: {text}" for text in reproduction.unexplained]
    for constant in reproduction.constants:
        cells = ", ".join(constant.cells)
        value = f"{constant.value:.6g} {constant.unit}"
        lines.append(f"constant {constant.name} = {value}, from {cells}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print()


def _role(row: Row) -> str:
    """Return the role of a row in words."""
    if row.role == "no prediction":
        return f"{row.role} ({row.cell.not_printed} not printed)"
    return row.role


def _error(unit: str, error: float | None) -> str:
    """Return an error in words."""
    if error is None:
        return ""
    return f"{error:.1f} points" if unit == "points" else f"{error:.1%}"


def _draw(reproductions: Sequence[Reproduction], path: Path) -> None:
    """Draw the charts of all papers into a file."""
    from moesaic_lab.pictures import write_picture

    title = "Published and simulated: " + ", ".join(
        reproduction.paper for reproduction in reproductions
    )
    panels = []
    for reproduction in reproductions:
        charts = (*_ratios(reproduction), *reproduction.charts)
        panels += [_panel(chart) for chart in charts]
    try:
        write_picture(path, title, panels, notes=NOTES)
    except OSError as error:
        raise InputError(
            f"--picture {path}: cannot be written ({error.strerror}): choose another path"
        ) from error


def _ratios(reproduction: Reproduction) -> list[Chart]:
    """Return a chart of simulated over published figures, of the rows that count as validation.

    The list is empty if there are no such rows or more than `MOST_BARS`.
    """
    rows = [
        row for row in reproduction.rows if row.role == "validation" and row.cell.unit != "points"
    ]
    if not rows or len(rows) > MOST_BARS:
        return []
    labels = tuple(
        row.cell.name.removeprefix(f"{reproduction.paper}.").replace(".", "\n") for row in rows
    )
    places = tuple(float(index) for index in range(len(rows)))
    ratios = tuple(row.cell.ratio(row.ours) for row in rows)
    series = (("simulated", places, ratios),)
    return [
        Chart(
            f"{reproduction.paper}: not used for fitting",
            "figure",
            "simulated over published",
            series,
            labels,
        )
    ]


def _panel(chart: Chart) -> Panel:
    """Return a chart as a panel."""
    from moesaic_lab.pictures import Panel, PlottedSeries

    return Panel(
        title=chart.title,
        x_title=chart.x_title,
        y_title=chart.y_title,
        series=tuple(PlottedSeries(name=name, x=x, y=y) for name, x, y in chart.series),
        categories=chart.categories,
        log_x=chart.log_x,
        log_y=chart.log_y,
    )
