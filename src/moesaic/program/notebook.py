"""What notebooks show of the library's objects: a table in HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a title; what its cells say is escaped."""

    def line(cells: Sequence[object], kind: str) -> str:
        text = "".join(f"<{kind}>{escape(str(cell))}</{kind}>" for cell in cells)
        return f"<tr>{text}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{escape(title)}</caption>{line(heads, 'th')}{body}</table>"
