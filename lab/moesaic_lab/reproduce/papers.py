"""The five reproductions by name, what they claim, and all of it as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moesaic_lab.claims import Claim, Measurement
from moesaic_lab.reproduce import fastermoe_report, netmoe_report, parm_report, schemoe_report, tutel_report
from moesaic_lab.reproduce.records import Book, Reproduction

REPRODUCTIONS: dict[str, Callable[[Book], Reproduction]] = {
    "parm": parm_report.reproduce,
    "schemoe": schemoe_report.reproduce,
    "tutel": tutel_report.reproduce,
    "netmoe": netmoe_report.reproduce,
    "fastermoe": fastermoe_report.reproduce,
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
    by_paper = {each.paper: each for each in made}
    found = []
    for paper in REPRODUCTIONS:
        found.append(_claim(f"reproduce.{paper}.error", by_paper.get(paper), _median, "1", TARGETS[paper]))
    parm, netmoe = by_paper.get("parm"), by_paper.get("netmoe")
    found.append(_claim("reproduce.parm.worst", parm, _worst_speedup, "1", 0.25))
    found.append(_claim("reproduce.parm.order", parm, lambda each: _ordered(book, each), "1", 0.75, at_least=True))
    found.append(_claim("reproduce.netmoe.after_points", netmoe, netmoe_report.after_points, "points", 5.0))
    return found


def as_dict(made: Sequence[Reproduction], book: Book) -> dict[str, Any]:
    """Return rows, claims, constants, findings, assumptions and what stays unexplained as plain data."""
    rows = [_row(each.paper, row) for each in made for row in each.rows]
    measured = Measurement(rows=rows, claims=claims(made, book), notes=NOTES, packages=("numpy", "scipy"))
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
    return {**measured.as_dict(), "papers": papers}


def _row(paper: str, row: Any) -> dict[str, Any]:
    known = row.cell.value is not None
    return {
        "paper": paper,
        "cell": row.cell.name,
        "unit": row.cell.unit,
        "published": row.cell.value,
        "ours": row.ours,
        "ratio": row.cell.ratio(row.ours) if known and row.cell.unit != "points" else None,
        "error": row.error,
        "role": row.role,
        "source": row.cell.source,
        "note": row.note,
    }


def _claim(
    name: str,
    made: Reproduction | None,
    value: Callable[[Reproduction], float],
    unit: str,
    target: float,
    *,
    at_least: bool = False,
) -> Claim:
    op: Any = ">=" if at_least else "<="
    if made is None:
        return Claim(name=name, value=None, unit=unit, target=target, op=op, reason="not reproduced in this run")
    return Claim(name=name, value=value(made), unit=unit, target=target, op=op)


def _median(made: Reproduction) -> float:
    return netmoe_report.before_error(made) if made.paper == "netmoe" else made.median_error


def _worst_speedup(made: Reproduction) -> float:
    return max(made.errors(unit="x"))


def _ordered(book: Book, made: Reproduction) -> float:
    right, known = parm_report.order(book, made.rows)
    return right / known
