"""The claims of `moesaic bench step`.

The regret of a choice is how much longer its step takes than the fastest one, as a share of that.
A row's role says what its split stands for; see `cells`. Plain experts over all ranks hold nothing
from one micro-batch to the next, as the trainer did before it could, and as torchtitan does; ours
over all ranks hold what they need.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scipy.stats import spearmanr

from moesaic_lab.claims import Claim, NotMeasuredError, claimed
from moesaic_lab.step.cells import AGAIN, SEARCHED, STAGES, StepCell, read_config

LOSSES_AGREE = 1e-4
"""Largest relative difference of the last losses of two splits, in float32."""
Row = Mapping[str, Any]


def ratio(one: Row, other: Row) -> tuple[float, tuple[float, float]]:
    """Return the ratio of the medians of two rows' steps, and the smallest and largest ratio of two
    of their steps."""
    value = one["median_seconds"] / other["median_seconds"]
    lowest = min(one["seconds"]) / max(other["seconds"])
    highest = max(one["seconds"]) / min(other["seconds"])
    return value, (lowest, highest)


def fastest(rows: Sequence[Row], is_one: Callable[[Row], bool]) -> Row:
    """Return the row with the shortest step of those that `is_one` takes.

    Raises:
        NotMeasuredError: if there is none.
    """
    found = [row for row in rows if "seconds" in row and is_one(row)]
    if not found:
        raise NotMeasuredError("not run")
    return min(found, key=lambda row: row["median_seconds"])


def is_by_hand(row: Row) -> bool:
    """Return whether a row's split was given by hand and counts once."""
    return row["role"] not in (SEARCHED, AGAIN)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims of every cell of the repository's configuration, then those of all
    cells."""
    of_cells: list[Claim] = []
    regrets: list[float] = []
    for cell in read_config().cells:
        own = [row for row in rows if row["cell"] == cell.name]
        of_cells += _of_cell(cell, own)
        regrets += _regrets(own)

    def summary(summarize: Callable[[list[float]], float]) -> float:
        """Return one number for all regrets."""
        if not regrets:
            raise NotMeasuredError("not run")
        return summarize(regrets)

    return [
        *of_cells,
        claimed("step.pick_regret.median", lambda: summary(statistics.median), 0.03),
        claimed("step.pick_regret.worst", lambda: summary(max), 0.10),
    ]


def _of_cell(cell: StepCell, rows: Sequence[Row]) -> list[Claim]:
    """Return the claims of one cell."""
    name = f"step.{cell.name}"
    chosen = [row for row in rows if row["role"] == SEARCHED]
    by_hand = [row for row in rows if is_by_hand(row)]
    hybrids = [row for row in rows if _is_hybrid(row)]
    others = [row for row in by_hand if not _is_hybrid(row)]
    again = [row for row in rows if row["role"] == AGAIN]
    first = [row for row in rows if row["role"] == STAGES]
    found = []
    if cell.profiles:
        over_all_ranks = [row for row in rows if _is_ep(row, cell)]
        plain = [row for row in over_all_ranks if "--mesh.hold nothing" in row["flags"]]
        found += [
            _ratio_claim(f"{name}.chosen_over_best", chosen, by_hand, cell.best_at_most),
            _ratio_claim(f"{name}.chosen_over_ep", chosen, over_all_ranks, 0.0),
            _ratio_claim(f"{name}.chosen_over_plain_ep", chosen, plain, cell.ep_at_most),
            claimed(f"{name}.order", lambda: _order(rows), None),
        ]
        if cell.weights_at_most:
            for ep in (1, 2):
                own = [row for row in by_hand if row["pp"] == 1 and row["ep"] == ep]
                claim = f"{name}.ep_{ep}_over_plain_ep"
                found.append(_ratio_claim(claim, own, plain, cell.weights_at_most))
    found += [
        _ratio_claim(f"{name}.hybrid", hybrids, others, 0.0),
        _ratio_claim(f"{name}.again", again, first, 0.0),
        claimed(f"{name}.losses_differ", lambda: _losses(rows), LOSSES_AGREE),
    ]
    return found


def _ratio_claim(name: str, rows: Sequence[Row], others: Sequence[Row], target: float) -> Claim:
    """Return the claim about the fastest of some rows over that of others; a target of 0 is
    none."""
    try:
        value, interval = ratio(_fastest_of(rows), _fastest_of(others))
    except NotMeasuredError as reason:
        return Claim(name=name, value=None, target=target or None, reason=str(reason))
    return Claim(name=name, value=value, target=target or None, interval=interval)


def _fastest_of(rows: Sequence[Row]) -> Row:
    """Return the row with the shortest step; NotMeasuredError if there is none."""
    return fastest(rows, lambda row: True)


def _is_ep(row: Row, cell: StepCell) -> bool:
    """Return whether a row is of experts over all ranks, one micro-batch after another."""
    in_flight = "in-flight" in row["flags"]
    return is_by_hand(row) and row["ep"] == cell.world and not in_flight


def _is_hybrid(row: Row) -> bool:
    """Return whether a row's split, by hand, has stages and split experts."""
    return is_by_hand(row) and row["pp"] > 1 and row["ep"] > 1


def _order(rows: Sequence[Row]) -> float:
    """Return Spearman's rank correlation of predicted and measured steps by hand."""
    both = [row for row in rows if is_by_hand(row) and row.get("predicted_seconds")]
    if len(both) < 3:
        raise NotMeasuredError("not run")
    predicted = [statistics.median(row["predicted_seconds"]) for row in both]
    measured = [row["median_seconds"] for row in both]
    return float(spearmanr(predicted, measured).statistic)


def _losses(rows: Sequence[Row]) -> float:
    """Return the largest relative difference of two last losses."""
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    if len(losses) < 2:
        raise NotMeasuredError("not run")
    return max(losses) / min(losses) - 1


def _regrets(rows: Sequence[Row]) -> list[float]:
    """Return the regret of each choice in a cell, one for each of its profiles."""
    measured = [row for row in rows if "seconds" in row]
    if not measured:
        return []
    best = min(row["median_seconds"] for row in measured if row["role"] != AGAIN)
    regrets = []
    for row in measured:
        regret = row["median_seconds"] / best - 1
        regrets += [regret] * len(row["chosen_by"])
    return regrets
