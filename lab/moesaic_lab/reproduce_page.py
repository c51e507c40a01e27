"""Write the tables of docs/reproduce.md from the result of `moesaic reproduce all --json`: no figure is typed by hand.

moesaic reproduce all --json benchmarks/results/reproduce.json --picture docs/images/reproduce.svg
python -m moesaic_lab.reproduce_page benchmarks/results/reproduce.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from moesaic_lab.tables import markdown_table, write_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reproduce.md"
MARKS = ("<!-- tables: moesaic_lab/reproduce_page.py -->", "<!-- end of tables -->")


def main() -> int:
    """Write the tables and return the exit code."""
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    write_page(PAGE, tables(result), MARKS)
    return 0


def tables(result: dict[str, Any]) -> str:
    """Return a table of claims and, for each paper, its rows, findings and constants."""
    claims = [["claim", "value", "target", "holds"]]
    for claim in result["claims"]:
        holds = {True: "yes", False: "**no**", None: ""}[claim["holds"]]
        value = claim["reason"] if claim["value"] is None else f"{claim['value']:.3g}"
        claims.append([f"`{claim['name']}`", value, f"{claim['op']} {claim['target']:g}", holds])
    parts = [markdown_table(claims)]
    for paper, about in result["papers"].items():
        rows = [row for row in result["rows"] if row["paper"] == paper]
        parts += [
            f"### {about['title']}",
            *(rows_table(paper, rows, role) for role in ("validation", "fit", "kept back", "no prediction")),
        ]
        parts.append("\n".join(_finding(each) for each in about["findings"]))
        constants = [["constant", "value", "from", "how"]]
        for each in about["constants"]:
            value = f"{each['value']:.4g} {each['unit']}"
            constants.append([f"`{each['name']}`", value, ", ".join(f"`{c}`" for c in each["cells"]), each["how"]])
        parts.append(_folded(f"{len(constants) - 1} constants", markdown_table(constants)))
        parts.append("\n".join(f"- Assumed: {line}" for line in about["assumptions"]))
        parts.append("\n".join(f"- Not explained: {line}" for line in about["unexplained"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def rows_table(paper: str, rows: list[dict[str, Any]], role: str) -> str:
    """Return a folded table of a paper's rows that have one role; "" if none has."""
    no_prediction = role == "no prediction"
    last = ["simulated with assumed sizes", "unit", "not printed"] if no_prediction else ["simulated", "unit", "off by"]
    lines = [[role, "published", *last]]
    for row in rows:
        if row["role"] != role:
            continue
        error = row["error"]
        off = (
            row["not_printed"]
            if no_prediction
            else ""
            if error is None
            else f"{error:.1f}"
            if row["unit"] == "points"
            else f"{error:.1%}"
        )
        published = "." if row["published"] is None else f"{row['published']:g}"
        name = row["cell"].removeprefix(f"{paper}.")
        lines.append([f"`{name}`", published, f"{row['ours']:.4g}", row["unit"], off])
    if len(lines) == 1:
        return ""
    return _folded(f"{len(lines) - 1} figures, {role}", markdown_table(lines))


def _finding(each: dict[str, Any]) -> str:
    mark = {True: "Holds", False: "Does not hold", None: "Found"}[each["holds"]]
    return f"- {mark}: {each['statement']}: {each['ours']}."


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


if __name__ == "__main__":
    sys.exit(main())
