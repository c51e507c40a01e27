"""The table: a row for each place, what it says, and whether all of it is as it must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import Enum


class Outcome(Enum):
    """What came of a place."""

    OK = "ok"
    FAILED = "failed"
    MISSING = "missing"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, each cell as it is printed."""

    place: str
    result: str
    date: str = "-"
    processor: str = "-"
    python: str = "-"
    torch: str = "-"
    seconds: str = "-"
    packages: str = "-"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A row, and whether it may stand in a table that is right."""

    row: Row
    outcome: Outcome
    may_be_missing: bool = False

    @property
    def is_right(self) -> bool:
        """Whether the place passed, or is one of those that may be missing."""
        return self.outcome is Outcome.OK or (
            self.outcome is Outcome.MISSING and self.may_be_missing
        )


def render(rows: Sequence[Row], heading: str) -> str:
    """Return the table as text, its columns as wide as their cells, below a heading."""
    names = tuple(field.name for field in fields(Row))
    lines = [names, *(astuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    lines.insert(1, tuple("-" * width for width in widths))
    text = [heading, ""]
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths)]
        text.append("  ".join(padded).rstrip())
    return "\n".join(text) + "\n"


def exit_code(judged: Sequence[Judged]) -> int:
    """Return 0 if every row is right and there is one, else 1."""
    return 0 if judged and all(each.is_right for each in judged) else 1
