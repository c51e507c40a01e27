"""Writes the tables and picture of docs/balance.md and docs/balance_figures.md from results of
`moesaic bench balance`.

python -m moesaic_lab.balance.page benchmarks/results/balance.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from moesaic_lab.balance.benchmark import panels, rebuild
from moesaic_lab.balance.cells import Row, share_rows
from moesaic_lab.balance.config import SharesOfForced
from moesaic_lab.balance.methods import OURS, OURS_PLACED, PLAIN
from moesaic_lab.balance.shares import MADE_UP, RECORDED, SYNTHETIC, Share
from moesaic_lab.claims import ROOT
from moesaic_lab.measured import measured
from moesaic_lab.performance_page import line
from moesaic_lab.pictures import write_picture
from moesaic_lab.tables import CLAIM_COLUMNS, markdown_table, write_page

DOCS = ROOT / "docs"
GUIDE = DOCS / "balance.md"
FIGURES = DOCS / "balance_figures.md"
PICTURE = DOCS / "images" / "bench" / "balance_shares.svg"
DRAWN = 64
"""Number of ranks in the picture and in the headline table, the same as in the claims."""
HEADLINE_CLUSTER = "dgx-h100"
HEADLINE_METHODS = (PLAIN, "shadow", "EPLB", "expert placement", OURS, OURS_PLACED)
HEADLINE_MARKS = ("<!-- headline: moesaic_lab/balance/page.py -->", "<!-- end of headline -->")
MARKS = ("<!-- tables: moesaic_lab/balance/page.py -->", "<!-- end of tables -->")


def main() -> int:
    """Write the tables and the picture; return the exit code."""
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    write_page(FIGURES, tables(result), MARKS)
    write_page(GUIDE, headline(result), HEADLINE_MARKS)
    shares = [share for share in rebuild(result["rows"], Share) if share.ranks == DRAWN]
    write_picture(
        PICTURE, "Share of forced balance, simulated", panels([], shares), result["notes"]
    )
    return 0


def headline(result: dict[str, Any]) -> str:
    """Return a table of the best-known methods' shares of forced balance, on the headline cluster
    with `DRAWN` ranks."""
    rows_by_method: dict[str, list[Row]] = {name: [] for name in HEADLINE_METHODS}
    for row in share_rows(rebuild(result["rows"], Share)):
        is_shown = (
            row["cluster"] == HEADLINE_CLUSTER
            and row["ranks"] == DRAWN
            and row["ratio"] == SharesOfForced.ratio
        )
        if is_shown and row["method"] in rows_by_method:
            rows_by_method[row["method"]].append(row)
    ordered = list(chain.from_iterable(rows_by_method.values()))
    return crossed(f"share of forced balance, `{HEADLINE_CLUSTER}`, {DRAWN} ranks", ordered, "load")


def tables(result: dict[str, Any]) -> str:
    """Return the tables of the page: shares of forced balance by load for each cluster, then by
    weight ratio, then the claims."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in share_rows(rebuild(result["rows"], Share)):
        groups.setdefault((row["cluster"], row["ranks"]), []).append(row)

    parts = []
    for (cluster, ranks), rows in groups.items():
        default_ratio = [row for row in rows if row["ratio"] == SharesOfForced.ratio]
        title = f"share of forced balance, `{cluster}`, {ranks} ranks"
        parts.append(crossed(title, default_ratio, "load"))
        recorded = [row for row in rows if row["load"] == RECORDED]
        ratios = {row["ratio"] for row in recorded}
        if len(ratios) > 1:
            title = f"recorded loads by an expert's weights over a rank's rows, `{cluster}`"
            parts.append(crossed(title, recorded, "ratio"))

    claims = [claim for claim in result["claims"] if claim["target"] is not None]
    lines = [CLAIM_COLUMNS, *(line([claim]) for claim in claims)]
    where = (
        f"Claims about beds were measured {measured({'balance': result})}; shares are simulated."
    )
    return "\n\n".join([*parts, where, markdown_table(lines)])


def crossed(title: str, rows: Sequence[Row], across: str) -> str:
    """Return a table of medians, with a line for each method and a column for each value of the key
    `across`."""
    columns = sorted({row[across] for row in rows})  # kinds of loads, or ratios
    cells = {(row["method"], row[across]): f"{row['median']:.2f}" for row in rows}
    heads = [title]
    for column in columns:
        is_load = isinstance(column, str)
        heads.append(column.replace(MADE_UP, SYNTHETIC) if is_load else f"{column:g}")
    lines = [heads]
    for method in dict.fromkeys(row["method"] for row in rows):
        lines.append([method, *(cells.get((method, column), "") for column in columns)])
    return markdown_table(lines)


if __name__ == "__main__":
    sys.exit(main())
