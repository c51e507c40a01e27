"""Writes what pages say of `moesaic bench step` from its committed results: README's table, the
tables of docs/choose_a_split.md, and the picture by which people decide.

    python -m moesaic_lab.step.page
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from moesaic_lab.claims import ROOT, NotMeasuredError
from moesaic_lab.measured import measured
from moesaic_lab.step.cells import AGAIN, SEARCHED, StepCell, read_config
from moesaic_lab.step.claims import Row, fastest, is_by_hand
from moesaic_lab.tables import markdown_table, write_page

RESULT = ROOT / "benchmarks" / "results" / "step.json"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "choose_a_split.md"
PICTURE = ROOT / "docs" / "images" / "bench" / "step.svg"
MARKS = ("<!-- tables: moesaic_lab/step/page.py -->", "<!-- end of tables -->")
KINDS = {"tokens": "#b8478a", "weights": "#d9772b", "stages": "#3a6ea5"}
"""What may cross the slow link, and its colour."""
CHOSEN = "#101010"
WIDTH = 390
"""Of the picture, in pixels: a phone's."""
LINE = 17
BAR = 240
"""Length of the longest bar."""


def main() -> int:
    """Write the tables and the picture."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    write_page(README, front(result), MARKS)
    write_page(PAGE, page(result), MARKS)
    PICTURE.write_text(picture(result), encoding="utf-8")
    return 0


FRONT = ("2x2_150mbit", "2x2_150mbit_real", "2x2_2gbit", "4x1_pcie")
"""Cells on README."""


def crossing(row: Row, cell: StepCell) -> str:
    """Return what crosses the slow link under a row's split."""
    if row["pp"] > 1:
        return "stages"
    return "tokens" if row["ep"] > cell.ranks_per_node else "weights"


def best_of_kinds(rows: Sequence[Row], cell: StepCell) -> dict[str, Row | None]:
    """Return for each thing that may cross the slow link the fastest split by hand, and the chosen
    split."""

    def best(is_one: Any) -> Row | None:
        try:
            return fastest(rows, is_one)
        except NotMeasuredError:
            return None

    found = {
        kind: best(lambda row, kind=kind: is_by_hand(row) and crossing(row, cell) == kind)
        for kind in KINDS
    }
    return found | {SEARCHED: best(lambda row: row["role"] == SEARCHED)}


def cells_of(result: Mapping[str, Any]) -> list[tuple[StepCell, list[Row]]]:
    """Return the cells that were measured, with their rows."""
    rows = result["rows"]
    found = [
        (cell, [row for row in rows if row["cell"] == cell.name]) for cell in read_config().cells
    ]
    return [(cell, own) for cell, own in found if own]


def seconds(row: Row | None) -> str:
    """Return the seconds of a row's step; with a sign if it is a first step, after which the split
    stopped."""
    if row is None or "seconds" not in row:
        return ""
    return f"{'' if row['state'] == 'timed' else '≈ '}{row['median_seconds']:.2f}"


def front(result: Mapping[str, Any]) -> str:
    """Return README's table: a line per cell."""
    lines = [["seconds of a step", *KINDS, "the search chooses", "measured with"]]
    for cell, rows in cells_of(result):
        if cell.name not in FRONT:
            continue
        best = best_of_kinds(rows, cell)
        chosen = best.pop(SEARCHED)
        choice = f"{chosen['split']}: {seconds(chosen)}" if chosen else ""
        lines.append([cell.title, *map(seconds, best.values()), choice, cell.how])
    return markdown_table(lines)


def page(result: Mapping[str, Any]) -> str:
    """Return the tables of docs/choose_a_split.md: for each shape of the beds a line per split and
    a column per cell, then the claims."""
    parts = []
    cells = cells_of(result)
    for shape in dict.fromkeys(cell.shape for cell, _ in cells):
        own = [(cell, rows) for cell, rows in cells if cell.shape == shape]
        lines = [["split", "crosses", *(cell.name.removeprefix(f"{shape}_") for cell, _ in own)]]
        keys = dict.fromkeys((row["split"], row["role"]) for _, rows in own for row in rows)
        for split, role in sorted(keys, key=lambda key: (key[1] == SEARCHED, key[1] == AGAIN)):
            of_cells = [
                next((row for row in rows if (row["split"], row["role"]) == (split, role)), None)
                for _, rows in own
            ]
            first = next(row for row in of_cells if row is not None)
            name = f"{split} ({role})" if role else split
            lines.append([name, crossing(first, own[0][0]), *map(seconds, of_cells)])
        parts += [f"{shape} ranks, seconds of a step:", markdown_table(lines)]
    return "\n\n".join([*parts, claims_table(result), f"Measured {measured({'step': result})}."])


def claims_table(result: Mapping[str, Any]) -> str:
    """Return the claims of each cell as a table, missed ones in bold."""
    by_name = {claim["name"]: claim for claim in result["claims"]}
    names = ("chosen_over_best", "chosen_over_ep", "hybrid", "order", "again", "losses_differ")
    titles = [name.replace("_", " ") for name in names]
    titles[names.index("order")] = "order, rank correlation"
    lines = [["cell", *titles]]
    for cell, _ in cells_of(result):
        of_cell = [by_name.get(f"step.{cell.name}.{name}") for name in names]
        lines.append([cell.name, *map(claim_in_words, of_cell)])
    regrets = [
        f"{name} {claim_in_words(by_name[f'step.pick_regret.{name}'])}"
        for name in ("median", "worst")
    ]
    return f"{markdown_table(lines)}\n\n`step.pick_regret`: {', '.join(regrets)}."


def claim_in_words(claim: Mapping[str, Any] | None) -> str:
    """Return a claim's value, interval and target."""
    if claim is None or claim["value"] is None:
        return ""
    text = f"{claim['value']:.2g}" if claim["value"] < 1e-3 else f"{claim['value']:.2f}"
    if "interval" in claim:
        text += " ({:.2f} to {:.2f})".format(*claim["interval"])
    if claim["target"] is not None:
        text += f", target {claim['target']:g}"
    return f"**{text}**" if claim["holds"] is False else text


def picture(result: Mapping[str, Any]) -> str:
    """Return the picture: for each cell a bar for each thing that may cross the slow link, and for
    the chosen split."""
    parts: list[str] = []
    y = 20.0
    parts.append(_text(8, y, "What should cross the slow link?", 15, bold=True))
    y += LINE
    parts.append(_text(8, y, "Seconds of a step: the best split of each kind", 12))
    y += 8
    for cell, rows in cells_of(result):
        best = {kind: row for kind, row in best_of_kinds(rows, cell).items() if row is not None}
        most = max(row["median_seconds"] for row in best.values())
        fast = min(row["median_seconds"] for row in best.values())
        y += LINE
        title = cell.title + ("" if cell.compute == "virtual" else ", computed")
        parts.append(_text(8, y, title, 12, bold=True))
        for kind, row in best.items():
            y += LINE
            length = BAR * row["median_seconds"] / most
            colour = KINDS.get(kind, CHOSEN)
            parts.append(_text(8, y, kind, 12))
            parts.append(
                f'<rect x="66" y="{y - 11:g}" width="{length:.1f}" height="13" fill="{colour}"/>'
            )
            is_best = row["median_seconds"] == fast
            parts.append(_text(70 + length, y, f"{seconds(row)} s", 12, bold=is_best))
        y += 6
    height = y + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        'font-family="sans-serif" fill="#111827">'
    )
    ground = f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, size: int, *, bold: bool = False) -> str:
    """Return a line of text."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight}>{escape(text)}</text>'


if __name__ == "__main__":
    raise SystemExit(main())
