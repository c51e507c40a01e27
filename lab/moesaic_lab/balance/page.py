"""Writes the tables and picture of docs/balance.md and docs/balance_figures.md from results of `moesaic bench balance`.

python -m moesaic_lab.balance.page benchmarks/results/balance.json

The page also says how many pairs a test would need to show that ours takes as long as the fastest single technique. The
test consists of two one-sided tests (Schuirmann 1987) on the median of the logarithm of the pairs' ratios. Its 90 %
interval must lie within `EQUIVALENT` on both sides. The median of n normal values has a standard error of 1.2533 sigma
/ sqrt(n). Sigma comes from the quartiles of both methods' steps, as if they were independent. Pairs that the machine
disturbs equally therefore need fewer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moesaic_lab.balance.benchmark import panels, rebuild
from moesaic_lab.balance.cells import BED, share_rows
from moesaic_lab.balance.claims import EQUIVALENT
from moesaic_lab.balance.config import BalancePlace, SharesOfForced
from moesaic_lab.balance.methods import OURS, OURS_PLACED, PLAIN, methods
from moesaic_lab.balance.shares import MADE_UP, RECORDED, SYNTHETIC, Share
from moesaic_lab.performance_page import line
from moesaic_lab.pictures import write_picture
from moesaic_lab.tables import markdown_table, write_page

DOCS = Path(__file__).resolve().parents[3] / "docs"
GUIDE, FIGURES = DOCS / "balance.md", DOCS / "balance_figures.md"
PICTURE = DOCS / "images" / "bench" / "balance_shares.svg"
DRAWN = 64
"""Number of ranks in the picture and in the headline table, the same as in the claims."""
HEADLINE_CLUSTER = "dgx-h100"
HEADLINE_METHODS = (PLAIN, "shadow", "EPLB", "expert placement", OURS, OURS_PLACED)
HEADLINE_MARKS = ("<!-- headline: moesaic_lab/balance/page.py -->", "<!-- end of headline -->")
MARKS = ("<!-- tables: moesaic_lab/balance/page.py -->", "<!-- end of tables -->")

QUARTILES, MEDIAN = 1.349, 1.2533
"""Standard deviations between the quartiles of a normal distribution; standard error of a median over that of a mean."""
LEVEL, SAME, OTHER = 1.645, 1.2816, 0.8416
"""Normal quantiles. LEVEL: 95 % for each one-sided test. The test shall pass in four of five runs: SAME (90 % on each
side) if both methods take the same time, OTHER (80 % on the nearer side) if they do not."""


class Needed(NamedTuple):
    """Number of pairs that a test of equivalence needs in one case."""

    case: str
    best: str
    """The single technique with the shortest median."""
    ratio: float
    """Our median over that of `best`."""
    sigma: float
    """Standard deviation of the logarithm of a pair's ratio."""

    @property
    def pairs_if_same(self) -> int:
        """Pairs with which the test passes in four of five runs, if both methods take the same time."""
        return math.ceil((MEDIAN * self.sigma * (LEVEL + SAME) / math.log(EQUIVALENT)) ** 2)

    @property
    def pairs(self) -> int | None:
        """Pairs with which the test passes in four of five runs, if the methods differ as their medians do. None if
        they differ by more than `EQUIVALENT` allows, since no number of pairs would then do."""
        margin = math.log(EQUIVALENT) - abs(math.log(self.ratio))
        if margin <= 0:
            return None
        return max(self.pairs_if_same, math.ceil((MEDIAN * self.sigma * (LEVEL + OTHER) / margin) ** 2))


def needed(rows: Sequence[dict[str, Any]]) -> list[Needed]:
    """Return the number of pairs needed in each case on a bed."""
    singles = {name for name, method in methods(BalancePlace().grid).items() if method.is_single}
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["method"]] = row
    result = []
    for case, by_method in cases.items():
        ours = by_method[OURS]
        best = min((row for name, row in by_method.items() if name in singles), key=lambda row: row["median_seconds"])
        spread = [math.log(row["high_seconds"] / row["low_seconds"]) / QUARTILES for row in (ours, best)]
        ratio = ours["median_seconds"] / best["median_seconds"]
        result.append(Needed(case, best["method"], ratio, math.hypot(*spread)))
    return result


def main() -> int:
    """Write the tables and the picture; return the exit code."""
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    write_page(FIGURES, tables(result), MARKS)
    write_page(GUIDE, headline(result), HEADLINE_MARKS)
    shares = [share for share in rebuild(result["rows"], Share) if share.ranks == DRAWN]
    write_picture(PICTURE, "Share of forced balance, simulated", panels([], shares), result["notes"])
    return 0


def headline(result: dict[str, Any]) -> str:
    """Return a table of the best-known methods' shares of forced balance, on the headline cluster with `DRAWN` ranks."""
    shown = (HEADLINE_CLUSTER, DRAWN, SharesOfForced.ratio)
    rows = [
        row
        for row in share_rows(rebuild(result["rows"], Share))
        if (row["cluster"], row["ranks"], row["ratio"]) == shown
    ]
    ordered = [row for name in HEADLINE_METHODS for row in rows if row["method"] == name]
    return crossed(f"share of forced balance, `{HEADLINE_CLUSTER}`, {DRAWN} ranks", ordered, "load")


def tables(result: dict[str, Any]) -> str:
    """Return the tables of the page: shares of forced balance by load for each cluster, then by weight ratio, then the
    claims, and the pairs that a test of equivalence would need."""
    rows = share_rows(rebuild(result["rows"], Share))
    parts = []
    for cluster, ranks in dict.fromkeys((row["cluster"], row["ranks"]) for row in rows):
        of_cluster = [row for row in rows if (row["cluster"], row["ranks"]) == (cluster, ranks)]
        base = [row for row in of_cluster if row["ratio"] == SharesOfForced.ratio]
        parts.append(crossed(f"share of forced balance, `{cluster}`, {ranks} ranks", base, "load"))
        real = [row for row in of_cluster if row["load"] == RECORDED]
        if len({row["ratio"] for row in real}) > 1:
            parts.append(
                crossed(f"recorded loads by an expert's weights over a rank's rows, `{cluster}`", real, "ratio")
            )
    lines = [
        ["claim", "value", "target", "holds"],
        *(line([claim]) for claim in result["claims"] if claim["target"] is not None),
    ]
    beds = needed([row for row in result["rows"] if row["part"] == BED])
    return "\n\n".join([*parts, markdown_table(lines), *([equivalence(beds)] if beds else [])])


def equivalence(cases: Sequence[Needed]) -> str:
    """Return a table with the number of pairs that would show equivalence in each case on a bed."""
    lines = [["on a bed", "best single technique", "ours over it", "pairs if times were equal", "pairs as measured"]]
    for case in cases:
        pairs = "no number suffices" if case.pairs is None else str(case.pairs)
        lines.append([case.case, case.best, f"{case.ratio:.2f}", str(case.pairs_if_same), pairs])
    return markdown_table(lines)


def crossed(title: str, rows: Sequence[dict[str, Any]], across: str) -> str:
    """Return a table of medians, with a line for each method and a column for each value of the key `across`."""
    columns = sorted({row[across] for row in rows})
    cells = {(row["method"], row[across]): f"{row['median']:.2f}" for row in rows}
    names = [column.replace(MADE_UP, SYNTHETIC) if isinstance(column, str) else f"{column:g}" for column in columns]
    lines = [[title, *names]]
    for method in dict.fromkeys(row["method"] for row in rows):
        lines.append([method, *(cells.get((method, column), "") for column in columns)])
    return markdown_table(lines)


if __name__ == "__main__":
    sys.exit(main())
