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
    lines = [["seconds of a step", *KINDS, "the search chooses (pp: stages)", "measured with"]]
    for cell, rows in cells_of(result):
        if cell.name not in FRONT:
            continue
        best = best_of_kinds(rows, cell)
        chosen = best.pop(SEARCHED)
        choice = f"{chosen['split']}: {seconds(chosen)}" if chosen else ""
        lines.append([cell.title, *map(seconds, best.values()), choice, cell.how])
    return markdown_table(lines)


CELLS_IN_WORDS = """A *cell* is an emulated cluster on which every split runs. In most, attention
and experts only take the time that they would on an accelerator of 30 GFLOP/s, without a core, so
a waiting rank lends none; in `2x2_150mbit_real` they compute. A cell that stands for GPUs has
links as much slower than theirs as this accelerator."""
"""What the cells have in common."""
SPLITS_IN_WORDS = """A split is named by flags of `moesaic train`: pp, ep (`--mesh.pp`,
`--mesh.ep`; 1 where left out), parts a stage (`--mesh.parts-per-stage`), sharded in nodes or over
all (`--mesh.shard node`, `all`), nothing held (`--mesh.hold nothing`; else `parameters`), two in
flight (`--micro-batches-in-flight 2`), chunks and multicast (`--plan.chunks`,
`--plan.all-to-all`). Cut in 4: four times as many micro-batches, each a quarter as large. Behind
it stands whose way it is; *chosen* is what the search chose from a profile of the bed, *again* the
first split, run once more after all others. A cell has 12 minutes; splits for which none were left
are missing. \N{ALMOST EQUAL TO}: stopped after one step, which took over four times as long as the
best."""
"""What the names of splits in the tables mean."""
RATIOS_IN_WORDS = """Ratios of the seconds of two steps, with the smallest and the largest ratio of
two single steps; what misses its target, set for the slowest links only, is bold. *By hand* are
all splits but the chosen one and *again*; columns 2 to 8 compare these. *ep over all ranks* is the
fastest with `--mesh.ep` equal to the number of ranks and nothing in flight, *plain ep* the fastest
of these with nothing held, *stages with spread experts* the fastest with pp and ep above 1, over
the fastest without. The rank correlation is 1 if predictions put the splits in the order of their
measured steps. *Again* shows how much one split differs from itself. *Losses differ* by this share
at most after the last step."""
"""What the columns of the last table mean."""


def page(result: Mapping[str, Any]) -> str:
    """Return the tables of docs/choose_a_split.md: the cells, for each shape of their beds a line
    per split and a column per cell, what was fastest, then the claims."""
    cells = cells_of(result)
    parts = [_in_one_line(CELLS_IN_WORDS), _table_of_cells([cell for cell, _ in cells])]
    parts.append(_in_one_line(SPLITS_IN_WORDS))
    for shape in dict.fromkeys(cell.shape for cell, _ in cells):
        own = [(cell, rows) for cell, rows in cells if cell.shape == shape]
        parts += [f"{shape} ranks, seconds of a step:", _table_of_shape(own)]
    parts += [what_was_fastest(result), _in_one_line(RATIOS_IN_WORDS), claims_table(result)]
    return "\n\n".join([*parts, f"Measured {measured({'step': result})}."])


def _in_one_line(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


def _table_of_cells(cells: Sequence[StepCell]) -> str:
    """Return the table that says what the name of each cell means."""
    heads = ["cell", "machines x ranks", "links between machines", "links inside"]
    lines = [[*heads, "experts of a token", "attention and experts", "has the proportions of"]]
    for cell in cells:
        computed = "take their time" if cell.compute == "virtual" else "computed"
        inside = "" if cell.ranks_per_node == 1 else _rate_in_words(cell.intra)
        lines.append(
            [
                f"`{cell.name}`",
                f"{cell.nodes} x {cell.ranks_per_node}",
                _rate_in_words(cell.inter),
                inside,
                str(cell.top_k),
                computed,
                cell.stands_for,
            ]
        )
    return markdown_table(lines)


def _rate_in_words(rate: str | None) -> str:
    """Return a link's rate, such as "150mbit", for readers."""
    if rate is None:
        return "not limited"
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def what_was_fastest(result: Mapping[str, Any]) -> str:
    """Return in how many cells each thing that may cross the slow link was fastest, by hand, and
    which of those without stages."""
    winners = fastest_kinds(result)
    without_stages = fastest_kinds(result, kinds=("tokens", "weights"))
    counts = [f"{kind} in {list(winners.values()).count(kind)}" for kind in KINDS]
    tokens = [f"`{name}`" for name, kind in without_stages.items() if kind == "tokens"]
    without = f"tokens in {', '.join(tokens)}, else weights" if tokens else "weights in all"
    return (
        f"**What crosses between machines under the fastest split by hand**, in {len(winners)} "
        f"cells: {', '.join(counts)}; under the fastest without stages: {without}."
    )


def fastest_kinds(result: Mapping[str, Any], kinds: Sequence[str] = tuple(KINDS)) -> dict[str, str]:
    """Return by name of a cell what crosses the slow link under its fastest split by hand, of those
    in which one of `kinds` does."""
    winners = {}
    for cell, rows in cells_of(result):
        best = best_of_kinds(rows, cell)
        of_kinds = {kind: row for kind in kinds if (row := best[kind]) is not None}
        winners[cell.name] = min(of_kinds, key=lambda kind: of_kinds[kind]["median_seconds"])
    return winners


def _table_of_shape(cells: Sequence[tuple[StepCell, list[Row]]]) -> str:
    """Return the table of the cells on beds of one shape: by hand, chosen, and run again."""
    lines = [["split", "crosses", *(cell.name for cell, _ in cells)]]
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


TITLES = {
    "chosen_over_best": "chosen over best by hand",
    "chosen_over_ep": "chosen over ep over all ranks",
    "chosen_over_plain_ep": "chosen over plain ep",
    "ep_1_over_plain_ep": "ep 1 over plain ep",
    "ep_2_over_plain_ep": "ep 2 over plain ep",
    "hybrid": "stages with spread experts over best other",
    "order": "rank correlation of predictions",
    "again": "again over before",
    "losses_differ": "losses differ by the share",
}
"""The title of the column of each claim of a cell."""


def claims_table(result: Mapping[str, Any]) -> str:
    """Return the claims of each cell as a table, missed ones in bold."""
    by_name = {claim["name"]: claim for claim in result["claims"]}
    lines = [["cell", *TITLES.values()]]
    for cell, _ in cells_of(result):
        of_cell = [by_name.get(f"step.{cell.name}.{name}") for name in TITLES]
        lines.append([cell.name, *map(claim_in_words, of_cell)])
    median = claim_in_words(by_name["step.pick_regret.median"])
    worst = claim_in_words(by_name["step.pick_regret.worst"])
    regret = (
        "By how much longer than the fastest split the chosen one takes (`step.pick_regret`, as a "
        f"share, over all profiles): median {median}, worst {worst}."
    )
    return f"{markdown_table(lines)}\n\n{regret}"


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
