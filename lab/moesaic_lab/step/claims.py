"""The claims of `moesaic bench step`."""

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
    found: list[Claim] = []
    for cell in read_config().cells:
        own = [row for row in rows if row["cell"] == cell.name]
        found += _of_cell(cell, own)
    regrets = [each for cell in read_config().cells for each in _regrets(rows, cell)]

    def regret(of: Callable[[list[float]], float]) -> float:
        if not regrets:
            raise NotMeasuredError("not run")
        return of(regrets)

    return [
        *found,
        claimed("step.pick_regret.median", lambda: regret(statistics.median), 0.03),
        claimed("step.pick_regret.worst", lambda: regret(max), 0.10),
    ]


def _of_cell(cell: StepCell, rows: Sequence[Row]) -> list[Claim]:
    """Return the claims of one cell."""
    name = f"step.{cell.name}"
    found = []
    if cell.profiles:
        pairs = {
            "chosen_over_best": (is_by_hand, cell.best_at_most),
            "chosen_over_ep": (lambda row: _is_ep(row, cell), cell.ep_at_most),
        }
        found += [
            _ratio_claim(f"{name}.{what}", rows, lambda row: row["role"] == SEARCHED, other, target)
            for what, (other, target) in pairs.items()
        ]
        found.append(claimed(f"{name}.order", lambda: _order(rows), None))
    found += [
        _ratio_claim(f"{name}.hybrid", rows, _is_hybrid, lambda row: not _is_hybrid(row), 0.0),
        _ratio_claim(
            f"{name}.again",
            rows,
            lambda row: row["role"] == AGAIN,
            lambda row: row["role"] == STAGES,
            0.0,
        ),
        claimed(f"{name}.losses_differ", lambda: _losses(rows), LOSSES_AGREE),
    ]
    return found


def _ratio_claim(
    name: str,
    rows: Sequence[Row],
    one: Callable[[Row], bool],
    other: Callable[[Row], bool],
    target: float,
) -> Claim:
    """Return the claim about the fastest row of one kind over that of another."""
    try:
        value, interval = ratio(fastest(rows, one), fastest(rows, other))
    except NotMeasuredError as reason:
        return Claim(name=name, value=None, target=target or None, reason=str(reason))
    return Claim(name=name, value=value, target=target or None, interval=interval)


def _is_ep(row: Row, cell: StepCell) -> bool:
    """Return whether a row is of experts over all ranks, one micro-batch after another."""
    in_flight = "in-flight" in row["flags"]
    return is_by_hand(row) and row["ep"] == cell.world and not in_flight


def _is_hybrid(row: Row) -> bool:
    """Return whether a row's split, by hand, has stages and split experts."""
    return is_by_hand(row) and row["pp"] > 1 and row["ep"] > 1


def _order(rows: Sequence[Row]) -> float:
    """Return Spearman's rank correlation of predicted and measured steps by hand."""
    pairs = [
        (statistics.median(row["predicted_seconds"]), row["median_seconds"])
        for row in rows
        if is_by_hand(row) and row.get("predicted_seconds")
    ]
    if len(pairs) < 3:
        raise NotMeasuredError("not run")
    return float(spearmanr(*zip(*pairs)).statistic)


def _losses(rows: Sequence[Row]) -> float:
    """Return the largest relative difference of two last losses."""
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    if len(losses) < 2:
        raise NotMeasuredError("not run")
    return max(losses) / min(losses) - 1


def _regrets(rows: Sequence[Row], cell: StepCell) -> list[float]:
    """Return for each profile how much longer the step of its split takes than the fastest."""
    own = [row for row in rows if row["cell"] == cell.name and "seconds" in row]
    if not own:
        return []
    best = min(row["median_seconds"] for row in own if row["role"] != AGAIN)
    return [row["median_seconds"] / best - 1 for row in own for _ in row["chosen_by"]]
