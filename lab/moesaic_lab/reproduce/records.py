"""What a reproduction is made of: a paper's figures (cells), constants that were fitted to some of them, ours beside them.

The honesty rule is in the data: a row takes its role from the constants. A cell that any constant names, or that follows from
such cells, is a fit, and no row of it counts as validation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from moesaic.configfile import read_table
from moesaic.errors import InputError

PAPERS = ("parm", "schemoe", "tutel", "netmoe", "fastermoe")
"""In the order in which they are reproduced."""
Role = Literal["fit", "validation", "kept back"]
Unit = Literal["x", "ms", "us", "ns", "MiB", "%", "gain %", "points", "1"]


@dataclass(frozen=True, kw_only=True)
class PublishedCell:
    """One figure of a paper."""

    name: str
    """paper.quantity.case"""
    value: float | None
    """As printed; None for a figure that is kept back."""
    unit: Unit
    """gain %: g stands for a ratio of 1 + g / 100; points: differences are points, not shares."""
    source: str
    """Paper, table, row."""
    derived: tuple[str, ...] = ()
    """Cells from which this one follows, so that it is no evidence of its own."""
    note: str = ""
    """What to know of it."""

    def error(self, ours: float) -> float:
        """Return how far a figure of ours is off, as a share of the paper's; of points, the difference in points.

        Raises:
            InputError: if the figure is kept back.
        """
        if self.value is None:
            raise InputError(f"{self.name} is kept back: there is nothing to compare with")
        if self.unit == "points":
            return abs(ours - self.value)
        return abs(self.ratio(ours) - 1)

    def ratio(self, ours: float) -> float:
        """Return ours over the paper's; of gains, the ratio of the speeds they stand for."""
        assert self.value is not None
        if self.unit == "gain %":
            return (1 + ours / 100) / (1 + self.value / 100)
        return ours / self.value


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number that was found so that some cells come out."""

    name: str
    """paper.what"""
    value: float
    unit: str
    cells: tuple[str, ...]
    """Names of the figures that it rests on."""
    how: str
    """From the cells to the value, in words."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of the paper beside ours."""

    cell: PublishedCell
    ours: float
    role: Role

    @property
    def error(self) -> float | None:
        """See `PublishedCell.error`; None where the paper's figure is kept back."""
        return None if self.cell.value is None else self.cell.error(self.ours)


@dataclass(frozen=True)
class PaperFinding:
    """A statement of a paper that is no single number, and whether it holds here."""

    statement: str
    ours: str
    holds: bool | None = None
    """None where the paper prints nothing to hold it against."""


@dataclass(frozen=True)
class Chart:
    """Lines or bars, before anybody knows how they are drawn."""

    title: str
    x_title: str
    y_title: str
    series: tuple[tuple[str, tuple[float, ...], tuple[float, ...]], ...]
    """Name, x and y of each; of bars, x is the number of the category."""
    categories: tuple[str, ...] = ()
    log_x: bool = False
    log_y: bool = False


def paper_bars(title: str, x_title: str, y_title: str, cases: Mapping[str, tuple[float | None, float]]) -> Chart:
    """Return bars of a paper's figures, as far as they are printed, beside ours.

    Args:
        title: of the chart.
        x_title: of the cases.
        y_title: with the unit.
        cases: label to the paper's figure and ours.
    """
    known = [(float(place), paper) for place, (paper, _) in enumerate(cases.values()) if paper is not None]
    series = (
        ("paper", tuple(x for x, _ in known), tuple(y for _, y in known)),
        ("simulated", tuple(map(float, range(len(cases)))), tuple(ours for _, ours in cases.values())),
    )
    return Chart(title, x_title, y_title, series, tuple(cases))


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """All that was found for one paper."""

    paper: str
    title: str
    rows: tuple[Row, ...]
    constants: tuple[Constant, ...]
    findings: tuple[PaperFinding, ...] = ()
    assumptions: tuple[str, ...] = ()
    """What the paper does not tell, and what was taken."""
    unexplained: tuple[str, ...] = ()
    """Figures that do not come out, and which assumption would explain them."""
    charts: tuple[Chart, ...] = ()

    def errors(self, *, unit: str | None = None, prefix: str = "") -> list[float]:
        """Return the errors of the rows that count as validation; points apart from shares, derived cells left out.

        Args:
            unit: only cells of this unit; None for all but points.
            prefix: of the cells' names.
        """
        return [
            row.cell.error(row.ours)
            for row in self.rows
            if row.role == "validation" and not row.cell.derived and row.cell.name.startswith(prefix)
            if (row.cell.unit != "points" if unit is None else row.cell.unit == unit)
        ]

    @property
    def median_error(self) -> float:
        """Median over the rows that count as validation, points left out."""
        return statistics.median(self.errors())


class Book:
    """The cells and constants of all papers.

    Args:
        cells: by name.
        constants: by name.
        about: title, assumptions and what stays unexplained, by paper.
    """

    def __init__(
        self,
        cells: Mapping[str, PublishedCell],
        constants: Mapping[str, Constant],
        about: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.cells, self.constants, self._about = cells, constants, about or {}

    @cached_property
    def used(self) -> frozenset[str]:
        """Names of the cells that some constant rests on."""
        return frozenset(name for constant in self.constants.values() for name in constant.cells)

    def value(self, name: str) -> float:
        """Return a figure that is printed.

        Raises:
            InputError: if it is unknown or kept back.
        """
        value = self.cells[name].value if name in self.cells else None
        if value is None:
            raise InputError(f"cell {name}: there is no such printed figure: see lab/moesaic_lab/reproduce/data")
        return value

    def constant(self, name: str) -> float:
        """Return a constant's value."""
        if name not in self.constants:
            raise InputError(f"constant {name} is unknown: see lab/moesaic_lab/reproduce/data/constants.toml")
        return self.constants[name].value

    def role(self, name: str) -> Role:
        """Return what a row of a cell is."""
        cell = self.cells[name]
        if cell.value is None:
            return "kept back"
        return "fit" if name in self.used or any(other in self.used for other in cell.derived) else "validation"

    def rows(self, found: Mapping[str, float]) -> tuple[Row, ...]:
        """Return rows of cells, each with the role that follows from the constants."""
        return tuple(Row(cell=self.cells[name], ours=ours, role=self.role(name)) for name, ours in found.items())

    def reproduction(
        self, paper: str, rows: tuple[Row, ...], findings: Iterable[PaperFinding], charts: Iterable[Chart]
    ) -> Reproduction:
        """Return what was found for a paper, with its constants and what the data say about it."""
        of, about = self.of(paper), self._about[paper]
        also = tuple(self.constants[name] for name in about.get("also", ()))
        return Reproduction(
            paper=paper, title=about["title"], rows=rows, constants=(*of, *also), findings=tuple(findings),
            assumptions=tuple(about["assumptions"]), unexplained=tuple(about["unexplained"]), charts=tuple(charts),
        )  # fmt: skip

    def of(self, paper: str) -> tuple[Constant, ...]:
        """Return the constants of a paper."""
        return tuple(each for each in self.constants.values() if each.name.startswith(f"{paper}."))

    def with_values(self, values: Mapping[str, float]) -> Book:
        """Return the same book with other values of some constants, as a fit tries them."""
        changed = {name: replace(self.constants[name], value=value) for name, value in values.items()}
        return Book(self.cells, {**self.constants, **changed}, self._about)


def read_book() -> Book:
    """Return the cells and constants that come with the package."""
    cells: dict[str, PublishedCell] = {}
    about = {paper: _table(paper) for paper in PAPERS}
    for table in about.values():
        for group in table["group"]:
            for name, value in group["cells"].items():
                assert name not in cells, f"{name} stands twice"
                cells[name] = PublishedCell(
                    name=name, value=None if value == "." else float(value), unit=group["unit"],
                    source=group["source"], derived=tuple(table.get("derived", {}).get(name, ())),
                    note=table.get("notes", {}).get(name, ""),
                )  # fmt: skip
    constants = {
        each["name"]: Constant(**{**each, "cells": tuple(each["cells"])}) for each in _table("constants")["constant"]
    }
    return Book(cells, constants, about)


def _table(name: str) -> dict[str, Any]:
    with resources.as_file(resources.files("moesaic_lab.reproduce").joinpath("data", f"{name}.toml")) as path:
        return read_table(path)
