"""Write the tables and the picture of docs/balance.md from the result of `moesaic bench balance --json`: no figure is typed.

python -m moesaic_lab.balance.page benchmarks/results/balance.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesaic_lab.balance.benchmark import kept
from moesaic_lab.balance.config import SharesOfForced
from moesaic_lab.balance.equivalence import Needed, needed
from moesaic_lab.balance.pictures import panels
from moesaic_lab.balance.rows import BED, share_rows
from moesaic_lab.balance.shares import RECORDED, Share
from moesaic_lab.pages import markdown_table, write_page
from moesaic_lab.performance_page import line
from moesaic_lab.pictures import write_picture

PAGE = Path(__file__).resolve().parents[3] / "docs" / "balance.md"
PICTURE = PAGE.parent / "images" / "bench" / "balance_shares.svg"
DRAWN = 64
"""Ranks of what is drawn: those of the claims."""
MARKS = ("<!-- tables: moesaic_lab/balance/page.py -->", "<!-- end of tables -->")


def main() -> int:
    """Write tables and picture; returns the exit code."""
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    write_page(PAGE, tables(result), MARKS)
    shares = [each for each in kept(result["rows"], Share) if each.ranks == DRAWN]
    write_picture(PICTURE, "Share of forced balance, simulated", panels([], shares), result["notes"])
    return 0


def tables(result: dict[str, Any]) -> str:
    """Return shares of forced balance by load, cluster after cluster, then by how heavy weights are, the claims, and the pairs
    that a test of equivalence would need."""
    rows = share_rows(kept(result["rows"], Share))
    parts = []
    for cluster, ranks in dict.fromkeys((row["cluster"], row["ranks"]) for row in rows):
        here = [row for row in rows if (row["cluster"], row["ranks"]) == (cluster, ranks)]
        base = [row for row in here if row["ratio"] == SharesOfForced.ratio]
        parts.append(crossed(f"share of forced balance, `{cluster}`, {ranks} ranks", base, "load"))
        real = [row for row in here if row["load"] == RECORDED]
        if len({row["ratio"] for row in real}) > 1:
            parts.append(
                crossed(f"recorded loads by an expert's weights over a rank's rows, `{cluster}`", real, "ratio")
            )
    lines = [
        ["claim", "value", "target", "holds"],
        *(line([each]) for each in result["claims"] if each["target"] is not None),
    ]
    beds = needed([row for row in result["rows"] if row["part"] == BED])
    return "\n\n".join([*parts, markdown_table(lines), *([equivalence(beds)] if beds else [])])


def equivalence(cases: Sequence[Needed]) -> str:
    """Return how many pairs would show each case of a bed to be equivalent, or that none would."""
    lines = [["on a bed", "best single technique", "ours over it", "pairs if both took the same", "pairs as they are"]]
    for each in cases:
        pairs = "none would do" if each.pairs is None else str(each.pairs)
        lines.append([each.case, each.best, f"{each.ratio:.2f}", str(each.pairs_if_same), pairs])
    return markdown_table(lines)


def crossed(title: str, rows: Sequence[dict[str, Any]], across: str) -> str:
    """Return medians as a table: a line for each method, a column for each value of a key."""
    columns = sorted({row[across] for row in rows})
    found = {(row["method"], row[across]): f"{row['median']:.2f}" for row in rows}
    lines = [[title, *(column if isinstance(column, str) else f"{column:g}" for column in columns)]]
    for method in dict.fromkeys(row["method"] for row in rows):
        lines.append([method, *(found.get((method, column), "") for column in columns)])
    return markdown_table(lines)


if __name__ == "__main__":
    sys.exit(main())
