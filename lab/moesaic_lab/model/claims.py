"""What the model benchmark claims, as rows and claims; and its picture: predicted over measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from rich.table import Table
from scipy.stats import spearmanr

from moesaic_lab.claims import Claim
from moesaic_lab.model.run import ModelFound, points
from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_lab.tables import Column, milliseconds, table

LEAST_POINTS, LEAST_CASES, LEAST_PLANS = 60, 10, 40
"""What the claims rest on at least: points; cases for the regret, and plans of each."""
NOTES = (
    "A layer on the library's runtime over emulated links, forward and backward. compute virtual: experts sleep for as long as "
    "an accelerator of the given rate would take; real: they multiply. Ranks are bound to cores, under the batch policy. "
    "Predictions use the cluster's own profile, measured on the same bed before, on other layers; no constant is fitted to "
    "these points. Regret: the plan that is predicted to be fastest, over the fastest of those that were timed again (the "
    "fastest of all plans by the first times, and the first ones by prediction), medians of repeats in turn."
)
"""What a reader must know to judge the figures."""


def rows_of(found: Sequence[ModelFound]) -> list[dict[str, Any]]:
    """Return a row per plan of every case."""
    rows = []
    for each in found:
        for name, seconds in each.measured.items():
            times = (*each.screened[name], *each.confirmed.get(name, ()))
            rows.append(
                {
                    "bed": each.bed.name, "case": each.case.name, "compute": each.case.compute, "plan": name,
                    "measured_seconds": seconds, "lowest_seconds": min(times), "highest_seconds": max(times),
                    "repeats": len(times), "predicted_seconds": each.predicted[name],
                    "error": each.predicted[name] / seconds - 1, "is_pick": name == each.pick,
                }
            )  # fmt: skip
    return rows


def case_rows(found: Sequence[ModelFound]) -> list[dict[str, Any]]:
    """Return a row per case."""
    rows = []
    for each in found:
        measured = each.measured
        errors = [abs(each.predicted[name] / seconds - 1) for name, seconds in measured.items()]
        best = min(measured, key=lambda name: measured[name])
        rows.append(
            {
                "case": each.case.name, "bed": each.bed.name, "compute": each.case.compute, "plans": len(measured),
                "median_error": statistics.median(errors), "p95_error": float(np.percentile(errors, 95)),
                "rank_correlation": float(spearmanr(*zip(*points([each]))).statistic), "pick": each.pick,
                "pick_seconds": measured[each.pick], "best": best, "best_seconds": measured[best], "regret": each.regret,
            }
        )  # fmt: skip
    return rows


COLUMNS = (
    Column(key="case", title="case", is_text=True),
    Column(key="plans", title="plans"),
    Column(key="median_error", title="error", show=lambda value: f"{value:.1%}"),
    Column(key="p95_error", title="95 %", show=lambda value: f"{value:.1%}"),
    Column(key="rank_correlation", title="rank", show=lambda value: f"{value:.3f}"),
    Column(key="pick", title="picked", is_text=True),
    Column(key="pick_seconds", title="ms", show=milliseconds),
    Column(key="best", title="best", is_text=True),
    Column(key="best_seconds", title="ms", show=milliseconds),
    Column(key="regret", title="regret", show=lambda value: f"{value:.1%}"),
)


def case_table(found: Sequence[ModelFound]) -> Table:
    """Return the cases for a terminal."""
    return table("Predicted and measured layers", case_rows(found), COLUMNS, group_by=("bed",))


def claims(found: Sequence[ModelFound], speeds: Mapping[int, float]) -> list[Claim]:
    """Return all claims, also those that this run did not measure.

    Args:
        found: the cases.
        speeds: seconds of one simulation by number of ranks.
    """
    pairs = points(found)
    missing = "" if len(pairs) >= LEAST_POINTS else f"{len(pairs)} points: needs {LEAST_POINTS}"
    errors = [abs(predicted / measured - 1) for measured, predicted in pairs]
    correlation = float(spearmanr(*zip(*pairs)).statistic) if len(pairs) > 2 else None
    made = [
        _claim("model.median_error", statistics.median(errors) if errors else None, 0.08, missing),
        _claim("model.p95_error", float(np.percentile(errors, 95)) if errors else None, 0.20, missing),
        _claim("model.rank_correlation", correlation, 0.95, missing, op=">="),
    ]
    ranked = [each for each in found if len(each.measured) >= LEAST_PLANS]
    missing = "" if len(ranked) >= LEAST_CASES else f"{len(ranked)} cases of {LEAST_PLANS} plans: needs {LEAST_CASES}"
    regrets = [each.regret for each in ranked]
    made += [
        _claim("model.planner_regret", max(regrets, default=None), 0.03, missing),
        _claim("model.planner_regret_median", statistics.median(regrets) if regrets else None, None, missing),
    ]
    for name, world, target in (
        ("model.simulate_2048_seconds", 2048, 1.0),
        ("model.simulate_100k_seconds", 100_352, 10.0),
    ):
        reason = "" if world in speeds else "not asked for: --only speed"
        made.append(_claim(name, speeds.get(world), target, reason, unit="s"))
    return made


def panels(found: Sequence[ModelFound]) -> list[Panel]:
    """Return predicted over measured times, a panel per bed and kind of compute."""
    made = []
    kinds = dict.fromkeys((each.bed.name, each.case.compute) for each in found)
    for bed, compute in kinds:
        of_kind = [each for each in found if (each.bed.name, each.case.compute) == (bed, compute)]
        ends = [1e3 * value for pair in points(of_kind) for value in pair]
        low, high = min(ends), max(ends)
        series = [PlottedSeries(name="equal", x=(low, high), y=(low, high))]
        for each in of_kind:
            ordered = sorted((1e3 * measured, 1e3 * predicted) for measured, predicted in points([each]))
            x, y = zip(*ordered)
            series.append(PlottedSeries(name=each.case.name, x=x, y=y))
        made.append(
            Panel(
                title=f"{bed}, {compute} compute", x_title="measured, ms", y_title="predicted, ms", series=tuple(series),
                log_x=True, log_y=True,
            )
        )  # fmt: skip
    return made


def _claim(
    name: str,
    value: float | None,
    target: float | None,
    missing: str,
    *,
    op: Literal[">=", "<="] = "<=",
    unit: str = "1",
) -> Claim:
    return Claim(name=name, value=None if missing else value, unit=unit, target=target, op=op, reason=missing)
