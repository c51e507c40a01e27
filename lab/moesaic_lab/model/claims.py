"""The rows, claims and pictures of the model benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from rich.table import Table
from scipy.stats import spearmanr

from moesaic_lab.claims import Claim
from moesaic_lab.model.run import ModelFound, points
from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_lab.tables import table

LEAST_POINTS = 60
LEAST_CASES = 10
LEAST_PLANS = 40
"""Least data for the claims: points (plans of cases) for the errors; cases with at least
`LEAST_PLANS` plans for the regret. The regret also includes cases with fewer plans."""


def rows_of(results: Sequence[ModelFound]) -> list[dict[str, Any]]:
    """Return a row per plan of each case."""
    rows = []
    for result in results:
        for name, seconds in result.measured.items():
            times = (*result.screened[name], *result.confirmed.get(name, ()))
            rows.append(
                {
                    "bed": result.case.shape,
                    "case": result.case.name,
                    "compute": result.case.compute,
                    "plan": name,
                    "measured_seconds": seconds,
                    "lowest_seconds": min(times),
                    "highest_seconds": max(times),
                    "repeats": len(times),
                    "predicted_seconds": result.predicted[name],
                    "error": result.predicted[name] / seconds - 1,
                    "is_pick": name == result.pick,
                }
            )
    return rows


def case_rows(results: Sequence[ModelFound]) -> list[dict[str, Any]]:
    """Return a row per case."""
    rows = []
    for result in results:
        measured = result.measured
        measured_seconds, predicted_seconds = zip(*points([result]))
        errors = [abs(result.predicted[name] / seconds - 1) for name, seconds in measured.items()]
        best = min(measured, key=lambda name: measured[name])
        rows.append(
            {
                "case": result.case.name,
                "bed": result.case.shape,
                "compute": result.case.compute,
                "plans": len(measured),
                "median_error": statistics.median(errors),
                "p95_error": float(np.percentile(errors, 95)),
                "rank_correlation": float(spearmanr(measured_seconds, predicted_seconds).statistic),
                "pick": result.pick,
                "pick_seconds": measured[result.pick],
                "best": best,
                "best_seconds": measured[best],
                "regret": result.regret,
            }
        )
    return rows


def case_table(results: Sequence[ModelFound]) -> Table:
    """Return the table of cases for a terminal."""
    return table("Predicted and measured layers", case_rows(results), group_by=("bed",))


def claims(results: Sequence[ModelFound]) -> list[Claim]:
    """Return all claims, including those that this run did not measure."""
    # on all plans of all cases
    pairs = points(results)
    missing = "" if len(pairs) >= LEAST_POINTS else f"{len(pairs)} points: needs {LEAST_POINTS}"
    errors = [abs(predicted / measured - 1) for measured, predicted in pairs]
    median = statistics.median(errors) if errors else None
    p95 = float(np.percentile(errors, 95)) if errors else None
    correlation = float(spearmanr(*zip(*pairs)).statistic) if len(pairs) > 2 else None
    error_claims = [
        _claim("model.median_error", median, 0.06, missing),
        _claim("model.p95_error", p95, 0.15, missing),
        _claim("model.rank_correlation", correlation, 0.97, missing, op=">="),
    ]

    # on the order of the plans of each case, and on its regret
    ranked = sum(len(result.measured) >= LEAST_PLANS for result in results)
    missing = ""
    if ranked < LEAST_CASES:
        missing = f"{ranked} cases of {LEAST_PLANS} plans: needs {LEAST_CASES}"
    regrets = [result.regret for result in results]
    by_case = [row["rank_correlation"] for row in case_rows(results)]
    case_correlation = statistics.median(by_case) if by_case else None
    regret = statistics.median(regrets) if regrets else None
    return [
        *error_claims,
        _claim("model.case_correlation", case_correlation, 0.9, missing, op=">="),
        _claim("model.case_correlation_worst", min(by_case, default=None), 0.75, missing, op=">="),
        _claim("model.planner_regret", max(regrets, default=None), 0.03, missing),
        _claim("model.planner_regret_median", regret, None, missing),
    ]


def panels(results: Sequence[ModelFound]) -> list[Panel]:
    """Return a panel of predicted over measured times per bed and kind of compute."""
    all_panels = []
    by_kind: dict[tuple[str, str], list[ModelFound]] = {}
    for result in results:
        by_kind.setdefault((result.case.shape, result.case.compute), []).append(result)
    for (bed, compute), of_kind in by_kind.items():
        all_ms = [1e3 * seconds for pair in points(of_kind) for seconds in pair]
        low = min(all_ms)
        high = max(all_ms)
        series = [PlottedSeries(name="equal", x=(low, high), y=(low, high))]
        for result in of_kind:
            in_ms = [(1e3 * measured, 1e3 * predicted) for measured, predicted in points([result])]
            x, y = zip(*sorted(in_ms))
            series.append(PlottedSeries(name=result.case.name, x=x, y=y))
        all_panels.append(
            Panel(
                title=f"{bed}, {compute} compute",
                x_title="measured, ms",
                y_title="predicted, ms",
                series=tuple(series),
                log_x=True,
                log_y=True,
            )
        )
    return all_panels


def _claim(
    name: str,
    value: float | None,
    target: float | None,
    missing: str,
    *,
    op: Literal[">=", "<="] = "<=",
) -> Claim:
    """Return a claim, without a value if something is missing."""
    if missing:
        value = None
    return Claim(name=name, value=value, target=target, op=op, reason=missing)
