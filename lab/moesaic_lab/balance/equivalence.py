"""How many pairs a test would need to say that ours takes what the fastest single technique does, from the spread in a result.

Two one-sided tests (Schuirmann 1987) on the median of the logarithm of the pairs' ratios: its 90 % interval must lie within
`EQUIVALENT` to both sides. A median of n has a standard error of 1.2533 sigma / sqrt(n) (normal), and sigma is taken from the
quartiles of both methods' steps, as if they were drawn apart: pairs that the machine disturbs alike need fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from moesaic_lab.balance.claims import EQUIVALENT
from moesaic_lab.balance.config import BalancePlace
from moesaic_lab.balance.methods import OURS, methods

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
    """Return what each case of a bed would need.

    Args:
        rows: of beds, as a result has them.
    """
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
