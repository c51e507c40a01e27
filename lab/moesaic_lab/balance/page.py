"""Write tables and picture of docs/balance.md and docs/balance_figures.md from what `moesaic bench balance --json` wrote.

python -m moesaic_lab.balance.page benchmarks/results/balance.json

Also how many pairs a test would need to say that ours takes what the fastest single technique does, by the spread in a result:
two one-sided tests (Schuirmann 1987) on the median of the logarithm of the pairs' ratios, whose 90 % interval must lie within
`EQUIVALENT` to both sides. A median of n has a standard error of 1.2533 sigma / sqrt(n) (normal), and sigma is taken from the
quartiles of both methods' steps, as if they were drawn apart: pairs that the machine disturbs alike need fewer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moesaic_lab.balance.benchmark import kept, panels
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
"""Number of ranks in the picture and in the headline table, which is that of the claims."""
HEADLINE_CLUSTER = "dgx-h100"
HEADLINE_METHODS = (PLAIN, "shadow", "EPLB", "expert placement", OURS, OURS_PLACED)
HEADLINE_MARKS = ("<!-- headline: moesaic_lab/balance/page.py -->", "<!-- end of headline -->")
MARKS = ("<!-- tables: moesaic_lab/balance/page.py -->", "<!-- end of tables -->")

QUARTILES, MEDIAN = 1.349, 1.2533
"""Standard deviations between a normal's quartiles; standard error of a median over that of a mean."""
LEVEL, SAME, OTHER = 1.645, 1.2816, 0.8416
"""Normal quantiles: 95 % for each one-sided test. Four runs of five are to pass: where both take the same, each side must in
90 %; where they do not, the nearer side in 80 %."""


class Needed(NamedTuple):
    """One case."""

    case: str
    best: str
    """The single technique with the shortest median."""
    ratio: float
    """Our median over its."""
    sigma: float
    """Of the logarithm of a pair's ratio."""

    @property
    def pairs_if_same(self) -> int:
        """That would do in four runs of five if both took the same."""
        return math.ceil((MEDIAN * self.sigma * (LEVEL + SAME) / math.log(EQUIVALENT)) ** 2)

    @property
    def pairs(self) -> int | None:
        """That would do in four runs of five if the two differ by what their medians do; None where no number would, since
        they then differ by more than `EQUIVALENT` allows."""
        margin = math.log(EQUIVALENT) - abs(math.log(self.ratio))
        if margin <= 0:
            return None
        return max(self.pairs_if_same, math.ceil((MEDIAN * self.sigma * (LEVEL + OTHER) / margin) ** 2))


def needed(rows: Sequence[dict[str, Any]]) -> list[Needed]:
    """Return what each case of a bed would need."""
    singles = {name for name, method in methods(BalancePlace().grid).items() if method.is_single}
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["method"]] = row
    found = []
    for case, by_method in cases.items():
        ours = by_method[OURS]
        best = min((row for name, row in by_method.items() if name in singles), key=lambda row: row["median_seconds"])
        spread = [math.log(row["high_seconds"] / row["low_seconds"]) / QUARTILES for row in (ours, best)]
        ratio = ours["median_seconds"] / best["median_seconds"]
        found.append(Needed(case, best["method"], ratio, math.hypot(*spread)))
    return found


def main() -> int:
    """Write tables and picture; returns the exit code."""
    result = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    write_page(FIGURES, tables(result), MARKS)
    write_page(GUIDE, headline(result), HEADLINE_MARKS)
    shares = [each for each in kept(result["rows"], Share) if each.ranks == DRAWN]
    write_picture(PICTURE, "Share of forced balance, simulated", panels([], shares), result["notes"])
    return 0


def headline(result: dict[str, Any]) -> str:
    """Return the shares of the best-known methods on the cluster and number of ranks of the picture."""
    shown = (HEADLINE_CLUSTER, DRAWN, SharesOfForced.ratio)
    rows = [
        row for row in share_rows(kept(result["rows"], Share)) if (row["cluster"], row["ranks"], row["ratio"]) == shown
    ]
    ordered = [row for name in HEADLINE_METHODS for row in rows if row["method"] == name]
    return crossed(f"share of forced balance, `{HEADLINE_CLUSTER}`, {DRAWN} ranks", ordered, "load")


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
    lines = [["on a bed", "best single technique", "ours over it", "pairs if times were equal", "pairs as measured"]]
    for each in cases:
        pairs = "no number suffices" if each.pairs is None else str(each.pairs)
        lines.append([each.case, each.best, f"{each.ratio:.2f}", str(each.pairs_if_same), pairs])
    return markdown_table(lines)


def crossed(title: str, rows: Sequence[dict[str, Any]], across: str) -> str:
    """Return medians as a table: a line for each method, a column for each value of a key."""
    columns = sorted({row[across] for row in rows})
    found = {(row["method"], row[across]): f"{row['median']:.2f}" for row in rows}
    names = [column.replace(MADE_UP, SYNTHETIC) if isinstance(column, str) else f"{column:g}" for column in columns]
    lines = [[title, *names]]
    for method in dict.fromkeys(row["method"] for row in rows):
        lines.append([method, *(found.get((method, column), "") for column in columns)])
    return markdown_table(lines)


if __name__ == "__main__":
    sys.exit(main())
