"""Data of a reproduction: a paper's figures (cells), constants that were fitted to some of them,
and our simulated figures.

The constants determine which figures count as validation. A cell that any constant names, or that
is printed and derived from such a cell, has the role "fit", and no row with it counts as
validation.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from moesaic.configfile import read_table
from moesaic.errors import InputError

PAPERS = ("parm", "schemoe", "tutel", "netmoe", "fastermoe")
"""Names of the papers, in the order in which they are reproduced."""
Role = Literal["fit", "validation", "arithmetic", "kept back", "no prediction"]
"""Role of a figure: a constant was fitted to it; nothing was; nothing was, but it follows from
sizes by arithmetic; it is kept back; or it cannot be predicted, since the paper does not print the
batch or the length that it was measured with."""
Unit = Literal["x", "ms", "us", "ns", "h", "MB", "MiB", "GiB", "%", "gain %", "points", "1"]
PLACEHOLDER = re.compile(r"\{(=?)([a-z][\w.]*)(?::([^{}]+))?\}")
"""A number in a text about a paper: {NAME} of the paper, {=NAME} ours; a format may follow."""


@dataclass(frozen=True, kw_only=True)
class PublishedCell:
    """One published figure of a paper."""

    name: str
    """The cell's name, in the form paper.quantity.case."""
    value: float | None
    """The figure as printed; None for a figure that is kept back, so that only a prediction is
    known."""
    unit: Unit
    """Unit of the figure. "gain %": a gain g stands for a ratio of 1 + g / 100. "points": errors
    are differences in points."""
    place: str
    """Section, table, figure or equation; "" if our notes of the paper have none."""
    what: str
    """Description of the figure."""
    derived: tuple[str, ...] = ()
    """Cells from which this one follows. Such a cell is no independent evidence."""
    not_printed: str = ""
    """Sizes that the paper does not print and without which the figure cannot be predicted; ours
    then assumes them."""
    arithmetic: bool = False
    """Whether ours is a count of bytes under even routing, or a fitted figure times a depth: right
    without a simulator."""
    note: str = ""
    """Remarks on the figure."""

    @property
    def source(self) -> str:
        """Place and description in one line."""
        return f"{self.place}: {self.what}" if self.place else self.what

    def error(self, ours: float) -> float:
        """Return the error of our figure, relative to the paper's; for points, the difference in
        points.

        Raises:
            InputError: if the figure is kept back.
        """
        if self.value is None:
            raise InputError(f"{self.name} is kept back: there is nothing to compare with")
        if self.unit == "points":
            return abs(ours - self.value)
        return abs(self.ratio(ours) - 1)

    def ratio(self, ours: float) -> float:
        """Return our figure over the paper's; for gains, the ratio of the speeds that they stand
        for."""
        assert self.value is not None
        if self.unit == "gain %":
            return (1 + ours / 100) / (1 + self.value / 100)
        return ours / self.value


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Where a paper was published."""

    title: str
    authors: str
    venue: str
    year: int

    @property
    def short(self) -> str:
        """The citation in a text, e.g. "Pan et al., INFOCOM 2024"."""
        first_author, _, _ = self.authors.partition(",")
        full_name, _, _ = first_author.partition(" et al.")
        surname = full_name.split()[-1]
        return f"{surname} et al., {self.venue} {self.year}"


@dataclass(frozen=True, kw_only=True)
class PaperHeadline:
    """A headline of a paper that is simulated, or not here."""

    cell: str
    """The published figure."""
    what: str
    why: str = ""
    """Why it is not here, with places for numbers; "" if it is simulated."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number that was fitted to some cells."""

    name: str
    """The constant's name, in the form paper.quantity."""
    value: float
    unit: str
    cells: tuple[str, ...]
    """Names of the cells to which it was fitted."""
    how: str
    """Description of how the value follows from the cells."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of a paper with our simulated one."""

    cell: PublishedCell
    ours: float
    role: Role

    @property
    def error(self) -> float | None:
        """The error as in `PublishedCell.error`; None if the paper's figure is kept back, or ours
        is no prediction."""
        is_compared = self.cell.value is not None and self.role != "no prediction"
        return self.cell.error(self.ours) if is_compared else None


@dataclass(frozen=True)
class PaperFinding:
    """A statement of a paper that is not a single number, and whether the simulation confirms
    it."""

    statement: str
    ours: str
    """What the simulation found."""
    holds: bool | None = None
    """Whether the statement holds; None if the paper prints nothing to compare with."""


@dataclass(frozen=True)
class Chart:
    """Data of a line or bar chart, independent of how it is drawn."""

    title: str
    x_title: str
    y_title: str
    series: tuple[tuple[str, tuple[float, ...], tuple[float, ...]], ...]
    """(name, x values, y values) per series; for bars, x is the index of the category."""
    categories: tuple[str, ...] = ()
    """Labels of the categories of a bar chart; () for lines."""
    log_x: bool = False
    log_y: bool = False


def paper_bars(
    title: str, x_title: str, y_title: str, cases: Mapping[str, tuple[float | None, float]]
) -> Chart:
    """Return a bar chart of a paper's figures, as far as they are printed, next to ours.

    Args:
        x_title: title of the axis with the cases.
        y_title: title of the axis with the values, unit included.
        cases: (the paper's figure, our figure) by label.
    """
    paper_x = []
    paper_y = []
    for index, (published, _) in enumerate(cases.values()):
        if published is not None:
            paper_x.append(float(index))
            paper_y.append(published)
    our_x = tuple(float(index) for index in range(len(cases)))
    our_y = tuple(ours for _, ours in cases.values())
    series = (("paper", tuple(paper_x), tuple(paper_y)), ("simulated", our_x, our_y))
    return Chart(title, x_title, y_title, series, tuple(cases))


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The complete result for one paper."""

    paper: str
    title: str
    rows: tuple[Row, ...]
    constants: tuple[Constant, ...]
    findings: tuple[PaperFinding, ...] = ()
    assumptions: tuple[str, ...] = ()
    """Assumptions for what the paper does not say."""
    unexplained: tuple[str, ...] = ()
    """Figures that are not reproduced, and assumptions that would explain them."""
    charts: tuple[Chart, ...] = ()

    def errors(self, *, unit: str | None = None, prefix: str = "") -> list[float]:
        """Return the errors of the rows that count as validation, without derived cells.

        Args:
            unit: only cells of this unit; None for all units except points, whose errors are not
                relative.
            prefix: only cells with names that start with this.
        """
        errors = []
        for row in self.rows:
            cell = row.cell
            has_unit = cell.unit != "points" if unit is None else cell.unit == unit
            counts = row.role == "validation" and not cell.derived
            if counts and has_unit and cell.name.startswith(prefix):
                errors.append(cell.error(row.ours))
        return errors

    @property
    def median_error(self) -> float:
        """Median error of the rows that count as validation, without derived cells and points."""
        return statistics.median(self.errors())


class Book:
    """The cells and constants of all papers.

    Args:
        cells: the cells by name.
        constants: the constants by name.
        about: title, assumptions and unexplained figures, by paper.
        quotes: further published figures, which nothing here simulates, by name.
        publications: where each paper was published.
    """

    def __init__(
        self,
        cells: Mapping[str, PublishedCell],
        constants: Mapping[str, Constant],
        about: Mapping[str, Mapping[str, Any]] | None = None,
        quotes: Mapping[str, PublishedCell] | None = None,
        publications: Mapping[str, Publication] | None = None,
    ) -> None:
        self.cells = cells
        self.constants = constants
        self._about = about or {}
        self.quotes = quotes or {}
        self.publications = publications or {}

    @cached_property
    def used(self) -> frozenset[str]:
        """Names of the cells to which any constant was fitted."""
        return frozenset(name for constant in self.constants.values() for name in constant.cells)

    def headlines(self, paper: str) -> list[PaperHeadline]:
        """Return a paper's headlines that are not measured."""
        return [PaperHeadline(**entry) for entry in self._about[paper].get("headline", ())]

    def filled(
        self, text: str, ours: Mapping[str, float], figures: Mapping[str, str] | None = None
    ) -> str:
        """Return a text with its numbers in place.

        Args:
            text: the text, with a `PLACEHOLDER` for each number.
            ours: our simulated figures by cell.
            figures: measured figures in words, which have no format.

        Raises:
            InputError: if a name is unknown.
        """

        def number(found: re.Match[str]) -> str:
            is_ours, name, form = found.groups()
            if figures is not None and name in figures:
                return figures[name]
            if is_ours and name not in ours:
                raise InputError(f"figure {name}: was not simulated: name one of its paper")
            value = ours[name] if is_ours else self.value(name)
            return format(value, form or "g")

        return PLACEHOLDER.sub(number, text)

    @property
    def missed(self) -> dict[str, str]:
        """Reasons of missed claims, by the claim's name, with places for numbers."""
        return {
            name: reason
            for about in self._about.values()
            for name, reason in about.get("missed", {}).items()
        }

    def value(self, name: str) -> float:
        """Return a printed figure.

        Raises:
            InputError: if the cell is unknown or kept back.
        """
        known = self.cells.get(name, self.quotes.get(name))
        if known is None or known.value is None:
            raise InputError(
                f"cell {name}: there is no such printed figure: see the quotes.toml of its paper "
                "in lab/moesaic_lab/reproduce/data"
            )
        return known.value

    def ratio(self, cells: Sequence[str], values: Mapping[str, float] | None = None) -> float:
        """Return a ratio of speeds: that of a cell, or the quotient of two cells.

        Args:
            cells: names of one or two cells.
            values: figures to use in place of the published ones.
        """
        ratios = []
        for name in cells:
            value = self.value(name) if values is None else values[name]
            is_gain = name in self.cells and self.cells[name].unit == "gain %"
            ratios.append(1 + value / 100 if is_gain else value)
        first, *others = ratios
        return first / math.prod(others)

    def constant(self, name: str) -> float:
        """Return a constant's value.

        Raises:
            InputError: if the constant is unknown.
        """
        if name not in self.constants:
            raise InputError(
                f"constant {name} is unknown: see lab/moesaic_lab/reproduce/data/constants.toml"
            )
        return self.constants[name].value

    def role(self, name: str) -> Role:
        """Return the role of rows with a cell."""
        cell = self.cells[name]
        follows_from_fit = any(other in self.used for other in cell.derived)
        # a figure that is kept back was not seen when constants were fitted
        is_known = cell.value is not None
        if name in self.used or (follows_from_fit and is_known):
            return "fit"
        if cell.not_printed:
            return "no prediction"
        if cell.value is None:
            return "kept back"
        return "arithmetic" if cell.arithmetic else "validation"

    def rows(self, figures: Mapping[str, float]) -> tuple[Row, ...]:
        """Return a row per cell, with its role; `figures` holds our values by the cells' names."""
        return tuple(
            Row(cell=self.cells[name], ours=ours, role=self.role(name))
            for name, ours in figures.items()
        )

    def reproduction(
        self,
        paper: str,
        rows: tuple[Row, ...],
        findings: Iterable[PaperFinding],
        charts: Iterable[Chart],
    ) -> Reproduction:
        """Return a paper's reproduction, with its constants, assumptions and unexplained figures
        added."""
        constants = self.of(paper)
        about = self._about[paper]
        # constants that were fitted to other papers' figures and are used here as well
        borrowed = tuple(self.constants[name] for name in about.get("also", ()))
        ours = {row.cell.name: row.ours for row in rows}
        return Reproduction(
            paper=paper,
            title=about["title"],
            rows=rows,
            constants=(*constants, *borrowed),
            findings=tuple(findings),
            assumptions=tuple(self.filled(each, ours) for each in about["assumptions"]),
            unexplained=tuple(self.filled(each, ours) for each in about["unexplained"]),
            charts=tuple(charts),
        )

    def of(self, paper: str) -> tuple[Constant, ...]:
        """Return the constants of a paper."""
        return tuple(each for each in self.constants.values() if each.name.startswith(f"{paper}."))

    def with_values(self, values: Mapping[str, float]) -> Book:
        """Return a copy of the book in which some constants have other values, for fits."""
        changed = {
            name: replace(self.constants[name], value=value) for name, value in values.items()
        }
        constants = {**self.constants, **changed}
        return Book(self.cells, constants, self._about, self.quotes, self.publications)


def read_book() -> Book:
    """Return the published figures and constants that come with the package."""
    tables = {paper: _table(f"{paper}/quotes") for paper in PAPERS}
    about = {paper: _table(f"{paper}/words") for paper in PAPERS}
    cells: dict[str, PublishedCell] = {}
    quotes: dict[str, PublishedCell] = {}
    for paper, table in tables.items():
        notes = about[paper].get("notes", {})
        for key, known in (("group", cells), ("quote", quotes)):
            found = _cells_of(table, key, notes)
            repeated = found.keys() & {**cells, **quotes}.keys()
            assert not repeated, f"{repeated} stand twice"
            known.update(found)
    constants = {
        entry["name"]: Constant(**{**entry, "cells": tuple(entry["cells"])})
        for entry in _table("constants")["constant"]
    }
    keys = ("title", "authors", "venue", "year")
    publications = {
        paper: Publication(**{key: table[key] for key in keys}) for paper, table in tables.items()
    }
    return Book(cells, constants, about, quotes, publications)


def _cells_of(
    table: Mapping[str, Any], key: str, notes: Mapping[str, str]
) -> dict[str, PublishedCell]:
    """Return the cells of a paper's table of figures by name.

    Args:
        table: the table: groups of cells that share unit, place and description.
        key: the key of the groups: "group" for figures that are simulated, "quote" for others.
        notes: remarks by cell.
    """
    cells: dict[str, PublishedCell] = {}
    for group in table.get(key, ()):
        for name, value in group["cells"].items():
            assert name not in cells, f"{name} stands twice"
            cells[name] = PublishedCell(
                name=name,
                value=None if value == "." else float(value),
                unit=group["unit"],
                place=group["place"],
                what=group["what"],
                derived=tuple(table.get("derived", {}).get(name, ())),
                not_printed=group.get("not_printed", ""),
                arithmetic=group.get("arithmetic", False),
                note=notes.get(name, ""),
            )
    return cells


def page_of(paper: str) -> str:
    """Return the part of a paper's page that people wrote, with places for numbers."""
    path = resources.files("moesaic_lab.reproduce").joinpath("data", paper, "page.md")
    return path.read_text(encoding="utf-8")


def _table(name: str) -> dict[str, Any]:
    """Read a table of published figures or of words, by its path in the folder of data."""
    parts = f"{name}.toml".split("/")
    resource = resources.files("moesaic_lab.reproduce").joinpath("data", *parts)
    with resources.as_file(resource) as path:
        return read_table(path)
