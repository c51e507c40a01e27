"""The five reproductions by name, their claims, and their results as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moesaic_lab.claims import Claim, Measurement, claimed, some
from moesaic_lab.reproduce import fastermoe, netmoe, parm, schemoe, tutel
from moesaic_lab.reproduce.records import Book, Reproduction, Row

REPRODUCTIONS: dict[str, Callable[[Book], Reproduction]] = {
    "parm": parm.reproduce,
    "schemoe": schemoe.reproduce,
    "tutel": tutel.reproduce,
    "netmoe": netmoe.reproduce,
    "fastermoe": fastermoe.reproduce,
}
"""Functions that reproduce a paper, by its name."""
TARGETS = {"parm": 0.15, "schemoe": 0.10, "tutel": 0.10, "fastermoe": 0.30, "netmoe": 0.10}
"""Largest allowed median error by paper."""
WORST = 0.25
HEADLINE_OFF = 0.25
"""Largest allowed error of a single figure, and the largest share of a headline's published gain by
which the simulated gain may differ from it, in either direction."""
HEADLINES = {
    "parm": "parm.chosen.b32.m4s4",
    "schemoe": "schemoe.layers.gain",
    "tutel": "tutel.layer.16",
    "netmoe": "netmoe.speedup.fastmoe",
    "fastermoe": "fastermoe.both.johnny",
}
"""The figure of each paper's headline."""
NOTES = (
    "Simulated figures beside published ones. A row of role fit rests on a constant that was "
    "made of it, and counts for nothing; figures that are kept back have a prediction and no "
    "error."
)


def claims(reproductions: Sequence[Reproduction], book: Book) -> list[Claim]:
    """Return all claims, including those of papers that were not reproduced in this run, which have
    no value.

    Args:
        book: the cells and constants.
    """

    def result_of(paper: str) -> Reproduction:
        found = [reproduction for reproduction in reproductions if reproduction.paper == paper]
        return some(found, paper)[0]

    def order_share() -> float:
        right, known = parm.order(book, result_of("parm").rows)
        return right / known

    def median(paper: str) -> float:
        return result_of(paper).median_error

    def worst(paper: str) -> float:
        return max(result_of(paper).errors())

    def off(cell: str) -> float:
        paper, _, _ = cell.partition(".")
        by_cell = {row.cell.name: row for row in result_of(paper).rows}
        return gain_off(by_cell[cell])

    def after_points() -> float:
        return netmoe.after_points(result_of("netmoe"))

    all_claims = []
    for paper in REPRODUCTIONS:
        error = partial(median, paper)
        all_claims.append(claimed(f"reproduce.{paper}.error", error, TARGETS[paper]))
    for paper in REPRODUCTIONS:
        all_claims.append(claimed(f"reproduce.{paper}.worst", partial(worst, paper), WORST))
    for paper in REPRODUCTIONS:
        headline_off = partial(off, HEADLINES[paper])
        all_claims.append(claimed(f"reproduce.{paper}.headline", headline_off, HEADLINE_OFF))
    for paper in REPRODUCTIONS:
        for headline in book.headlines(paper):
            name = f"papers.{headline.cell}"
            if headline.why:
                claim = Claim(name=name, value=None, target=HEADLINE_OFF, reason="not here")
            else:
                claim = claimed(name, partial(off, headline.cell), HEADLINE_OFF)
            all_claims.append(claim)
    all_claims.append(claimed("reproduce.parm.order", order_share, 0.75, ">="))
    name = "reproduce.netmoe.after_points"
    all_claims.append(claimed(name, after_points, 5.0, unit="points"))
    return all_claims


def gain_off(row: Row) -> float:
    """Return the difference of a simulated gain from the published one, as a share of the published
    one."""
    assert row.cell.value is not None
    if row.cell.unit == "gain %":
        our_gain = row.ours / 100
        published_gain = row.cell.value / 100
    else:  # a ratio of speeds
        our_gain = row.ours - 1
        published_gain = row.cell.value - 1
    return abs(our_gain / published_gain - 1)


@dataclass(frozen=True, kw_only=True)
class PapersMeasured(Measurement):
    """The results of `moesaic reproduce`: rows and claims of some papers, and further data by
    paper."""

    papers: dict[str, Any]
    """Title, constants, findings, assumptions and unexplained figures, by paper."""

    @classmethod
    def of(cls, reproductions: Sequence[Reproduction], book: Book) -> PapersMeasured:
        """Return reproductions as plain data."""
        papers = {
            reproduction.paper: {
                "title": reproduction.title,
                "constants": [dict(vars(constant)) for constant in reproduction.constants],
                "findings": [dict(vars(finding)) for finding in reproduction.findings],
                "assumptions": list(reproduction.assumptions),
                "unexplained": list(reproduction.unexplained),
            }
            for reproduction in reproductions
        }
        rows = []
        for reproduction in reproductions:
            rows += [_row(reproduction.paper, row) for row in reproduction.rows]
        return cls(
            rows=rows,
            claims=claims(reproductions, book),
            notes=NOTES,
            packages=("numpy", "scipy"),
            papers=papers,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file, including `papers`."""
        return {**super().as_dict(), "papers": self.papers}


def _row(paper: str, row: Row) -> dict[str, Any]:
    """Return the row of a figure."""
    cell = row.cell
    return {
        "paper": paper,
        "cell": cell.name,
        "unit": cell.unit,
        "published": cell.value,
        "ours": row.ours,
        "ratio": None if row.error is None or cell.unit == "points" else cell.ratio(row.ours),
        "error": row.error,
        "role": row.role,
        "source": cell.source,
        "not_printed": cell.not_printed,
        "note": cell.note,
    }
