"""Measured pairs of methods that differ by one technique."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CASE = ("part", "cell", "bed", "case", "what", "size_bytes", "locality")
"""Keys that two rows share if their methods were timed in turn on the same layer."""
Row = Mapping[str, Any]


def pairs(
    rows: Sequence[Row], word: str, without: str, bed: str = ""
) -> list[tuple[float, float | None]]:
    """Return the measured gain of each pair of methods that differ by a word, and the predicted one
    if the benchmark has it.

    Trials of a search are left out: they are of few repeats, and the layers are timed again among
    the methods.

    Args:
        rows: rows of a benchmark.
        word: word of the names of methods with a technique.
        without: the word in its place without the technique; empty for none.
        bed: the beginning of the names of beds to include; empty for all.
    """
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if (
            row.get("part") != "search"
            and ("method" in row or "plan" in row)
            and row.get("bed", "").startswith(bed)
        ):
            cases.setdefault(tuple(row.get(key) for key in CASE), {})[
                row.get("plan") or row["method"]
            ] = row
    gains = []
    for methods in cases.values():
        for name, row in methods.items():
            words = name.split(", ")
            other = methods.get(
                ", ".join(filter(None, (without if each == word else each for each in words)))
            )
            if word in words and other is not None and seconds(other) and seconds(row):
                known = "predicted_seconds" in row and "predicted_seconds" in other
                predicted = other["predicted_seconds"] / row["predicted_seconds"] if known else None
                gains.append((seconds(other) / seconds(row), predicted))
    return gains


def seconds(row: Row) -> float:
    """Return the measured seconds of a row; 0 if it was only simulated."""
    measured = (row.get(key) for key in ("median_seconds", "measured_seconds", "seconds"))
    return next((float(each) for each in measured if isinstance(each, float)), 0.0)
