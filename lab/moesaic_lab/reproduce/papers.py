"""The five reproductions by name, what they claim, and all of it as data."""

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
"""By the name of the paper."""
TARGETS = {"parm": 0.15, "schemoe": 0.10, "tutel": 0.10, "fastermoe": 0.30, "netmoe": 0.03}
"""Median errors to reach; NetMoE's of the volumes before."""
NOTES = (
    "Simulated figures beside published ones. A row of role fit rests on a constant that was made of it, and counts for "
    "nothing; figures that are kept back have a prediction and no error."
)


def claims(made: Sequence[Reproduction], book: Book) -> list[Claim]:
    """Return all claims, also those of papers that were not reproduced in this run.

    Args:
        made: what was reproduced.
        book: of cells and constants.
    """

    def of(paper: str) -> Reproduction:
        return some([each for each in made if each.paper == paper], paper)[0]

    def ordered() -> float:
        right, known = parm.order(book, of("parm").rows)
        return right / known

    def median(paper: str) -> float:
        return netmoe.before_error(of(paper)) if paper == "netmoe" else of(paper).median_error

    return [
        *(claimed(f"reproduce.{paper}.error", partial(median, paper), TARGETS[paper]) for paper in REPRODUCTIONS),
        claimed("reproduce.parm.worst", lambda: max(of("parm").errors(unit="x")), 0.25),
        claimed("reproduce.parm.order", ordered, 0.75, ">="),
        claimed("reproduce.netmoe.after_points", lambda: netmoe.after_points(of("netmoe")), 5.0, unit="points"),
    ]


@dataclass(frozen=True, kw_only=True)
class PapersMeasured(Measurement):
    """Rows and claims of some papers, and constants, findings, assumptions and what stays unexplained by paper."""

    papers: dict[str, Any]

    @classmethod
    def of(cls, made: Sequence[Reproduction], book: Book) -> PapersMeasured:
        """Return what was reproduced as plain data."""
        papers = {
            each.paper: {
                "title": each.title,
                "constants": [dict(vars(constant)) for constant in each.constants],
                "findings": [dict(vars(finding)) for finding in each.findings],
                "assumptions": list(each.assumptions),
                "unexplained": list(each.unexplained),
            }
            for each in made
        }
        rows = [_row(each.paper, row) for each in made for row in each.rows]
        return cls(rows=rows, claims=claims(made, book), notes=NOTES, packages=("numpy", "scipy"), papers=papers)

    def as_dict(self) -> dict[str, Any]:
        """Return what is written, with the papers."""
        return {**super().as_dict(), "papers": self.papers}


def _row(paper: str, row: Row) -> dict[str, Any]:
    cell = row.cell
    return {
        "paper": paper,
        "cell": cell.name,
        "unit": cell.unit,
        "published": cell.value,
        "ours": row.ours,
        "ratio": None if cell.value is None or cell.unit == "points" else cell.ratio(row.ours),
        "error": row.error,
        "role": row.role,
        "source": cell.source,
        "note": cell.note,
    }
