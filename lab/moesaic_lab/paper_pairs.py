"""Measured pairs of methods that differ by one technique.

The name of a method is a list of words, such as "s2, saa, 2 chunks": one word more, or another one,
is a technique. A gain is the time without the technique over the time with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CASE = ("part", "cell", "bed", "case", "what", "size_bytes", "locality")
"""Keys that two rows share if their methods were timed in turn on the same layer."""
Row = Mapping[str, Any]


def pairs(rows: Sequence[Row], word: str, without: str, bed: str = "") -> list[float]:
    """Return the measured gain of each pair of methods that differ by a word.

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
        name = row.get("plan") or row.get("method")
        is_searched = row.get("part") == "search"
        if name and not is_searched and row.get("bed", "").startswith(bed):
            case = tuple(row.get(key) for key in CASE)
            cases.setdefault(case, {})[name] = row

    gains = []
    for methods in cases.values():
        for name, row in methods.items():
            words = name.split(", ")
            if word not in words:
                continue
            other_words = [without if each == word else each for each in words]
            other = methods.get(", ".join(each for each in other_words if each))
            if other is None or not seconds(other) or not seconds(row):
                continue
            gains.append(seconds(other) / seconds(row))
    return gains


def seconds(row: Row) -> float:
    """Return the measured seconds of a row; 0 if it was only simulated."""
    for key in ("median_seconds", "measured_seconds", "seconds"):
        value = row.get(key)
        if isinstance(value, float):
            return value
    return 0.0
