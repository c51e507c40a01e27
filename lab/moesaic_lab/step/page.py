"""Writes what pages say of `moesaic bench step` from its committed results: README's table, the
tables of docs/choose_a_split.md, and the picture by which people decide.

What crosses the slow link between nodes decides: the rows of tokens, if experts are spread over
nodes; weights and gradients, if these are sharded over them; or the activations between stages.

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

    best: dict[str, Row | None] = {}
    for kind in KINDS:
        of_kind = [row for row in rows if is_by_hand(row) and crossing(row, cell) == kind]
        best[kind] = _fastest_of(of_kind)
    best[SEARCHED] = _fastest_of([row for row in rows if row["role"] == SEARCHED])
    return best


def _fastest_of(rows: Sequence[Row]) -> Row | None:
    """Return the row with the shortest step; None if none was measured."""
    try:
        return fastest(rows, lambda row: True)
    except NotMeasuredError:
        return None


def cells_of(result: Mapping[str, Any]) -> list[tuple[StepCell, list[Row]]]:
    """Return the cells that were measured, with their rows."""
    found = []
    for cell in read_config().cells:
        rows = [row for row in result["rows"] if row["cell"] == cell.name]
        if rows:
            found.append((cell, rows))
    return found


def seconds(row: Row | None) -> str:
    """Return the seconds of a row's step; with a sign if it is a first step, after which the split
    stopped."""
    if row is None or "seconds" not in row:
        return ""
    sign = "" if row["state"] == "timed" else "≈ "
    return f"{sign}{row['median_seconds']:.2f}"


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
        parts += [f"{shape} ranks, seconds of a step:", _table_of_shape(shape, own)]
    return "\n\n".join([*parts, claims_table(result), f"Measured {measured({'step': result})}."])


def _table_of_shape(shape: str, cells: Sequence[tuple[StepCell, list[Row]]]) -> str:
    """Return the table of the cells on beds of one shape: by hand, chosen, and run again."""
    columns = [cell.name.removeprefix(f"{shape}_") for cell, _ in cells]
    lines = [["split", "crosses", *columns]]
    splits_and_roles = list(
        dict.fromkeys((row["split"], row["role"]) for _, rows in cells for row in rows)
    )
    splits_and_roles.sort(key=lambda pair: (pair[1] == SEARCHED, pair[1] == AGAIN))
    first_cell, _ = cells[0]
    for split, role in splits_and_roles:
        of_cells = [_row_of(rows, split, role) for _, rows in cells]
        measured_ones = [row for row in of_cells if row is not None]
        name = f"{split} ({role})" if role else split
        crosses = crossing(measured_ones[0], first_cell)  # the same in all cells of a shape
        lines.append([name, crosses, *(seconds(row) for row in of_cells)])
    return markdown_table(lines)


def _row_of(rows: Sequence[Row], split: str, role: str) -> Row | None:
    """Return the first row of a split in a role; None if there is none."""
    for row in rows:
        if row["split"] == split and row["role"] == role:
            return row
    return None


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
    median = claim_in_words(by_name["step.pick_regret.median"])
    worst = claim_in_words(by_name["step.pick_regret.worst"])
    return f"{markdown_table(lines)}\n\n`step.pick_regret`: median {median}, worst {worst}."


def claim_in_words(claim: Mapping[str, Any] | None) -> str:
    """Return a claim's value, interval and target."""
    if claim is None or claim["value"] is None:
        return ""
    text = f"{claim['value']:.2g}" if claim["value"] < 1e-3 else f"{claim['value']:.2f}"
    if "interval" in claim:
        low, high = claim["interval"]
        text += f" ({low:.2f} to {high:.2f})"
    if claim["target"] is not None:
        text += f", target {claim['target']:g}"
    return f"**{text}**" if claim["holds"] is False else text


def picture(result: Mapping[str, Any]) -> str:
    """Return the picture as SVG: for each cell a bar for each thing that may cross the slow link,
    and for the chosen split."""
    parts: list[str] = []
    y = 20.0
    parts.append(_text(8, y, "What should cross the slow link?", 15, bold=True))
    y += LINE
    parts.append(_text(8, y, "Seconds of a step: the best split of each kind", 12))
    y += 8
    for cell, rows in cells_of(result):
        best = {kind: row for kind, row in best_of_kinds(rows, cell).items() if row is not None}
        slowest = max(row["median_seconds"] for row in best.values())
        fastest_of_all = min(row["median_seconds"] for row in best.values())
        y += LINE
        title = cell.title + ("" if cell.compute == "virtual" else ", computed")
        parts.append(_text(8, y, title, 12, bold=True))
        for kind, row in best.items():
            y += LINE
            length = BAR * row["median_seconds"] / slowest
            colour = KINDS.get(kind, CHOSEN)
            parts.append(_text(8, y, kind, 12))
            parts.append(
                f'<rect x="66" y="{y - 11:g}" width="{length:.1f}" height="13" fill="{colour}"/>'
            )
            is_best = row["median_seconds"] == fastest_of_all
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
