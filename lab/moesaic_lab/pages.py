"""Pages of the documentation that results are written into: tables, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Marks = tuple[str, str]
"""Two lines of a page; what stands between them is written."""


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines as a Markdown table; the first is the header."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


def write_page(path: Path, text: str, marks: Marks | None = None) -> None:
    """Write a page, or what stands between two lines of it."""
    if marks is not None:
        start, end = marks
        whole = path.read_text(encoding="utf-8")
        before, after = whole.split(start)[0], whole.split(end)[1]
        text = f"{before}{start}\n\n{text.strip()}\n\n{end}{after}"
    path.write_text(text, encoding="utf-8")
