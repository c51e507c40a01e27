"""What the layer benchmark claims: figures of its cells, held against targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from moesaic_lab.claims import Claim
from moesaic_lab.layer.cells import COMPETE
from moesaic_lab.layer.run import Cell
from moesaic_lab.measure import MANY, NEAR


class NotMeasuredError(Exception):
    """There is no cell that a claim could rest on, or too few pairs; says why."""


def claims(cells: Sequence[Cell]) -> list[Claim]:
    """Return all claims, also those that this run did not measure."""
    return [
        _claim("layer.best_over_baseline_tp4", best_over_baseline, cells, 4.0, at_least=True),
        _claim("layer.worst_over_best_single", worst_over_single, cells, 1.03),
        _claim("layer.switch_cost_share", switch_share, cells, 0.01),
        _claim("layer.first_switch_share", first_switch_share, cells, None),
        _claim("layer.fixed_r_over_adaptive", fixed_over_adaptive, cells, None, at_least=True),
        _claim("layer.exact_over_optsche", exact_over_optsche, cells, 1.0),
        _claim("layer.exact_over_optsche_worst", worst_exact_over_optsche, cells, None),
        _claim("layer.schemoe_ablation", ablation, cells, 2.0, at_least=True),
    ]


def best_over_baseline(cells: Sequence[Cell]) -> float:
    """Return the baseline's time over the best plan's at tp = etp = 4, median over the meshes that have it."""
    found = [cell for cell in _of(cells, "schedules") if cell.job.grid.tp == cell.job.grid.etp == 4]
    return statistics.median(cell.ratio("baseline", cell.best).median for cell in _some(found, "at tp = etp = 4"))


def worst_over_single(cells: Sequence[Cell]) -> float:
    """Return the best plan's time over the fastest of ted, S1 and S2, worst over all meshes, at the 95 % bound."""
    return max(over_single(cell) for cell in _of(cells, "schedules"))


def over_single(cell: Cell) -> float:
    """Return that ratio for one mesh: the upper end of its 95 % interval, 1 if the best plan is the fastest of them."""
    names = {cell.job.same.get(name, name) for name in COMPETE} & set(cell.timings)
    fastest = min(names, key=lambda name: cell.ratio(name, cell.best).median)
    return bounded(cell, cell.best, fastest)


def bounded(cell: Cell, name: str, other: str) -> float:
    """Return the upper end of a ratio's 95 % interval; 1 for programs that are the same.

    Raises:
        NotMeasuredError: for a ratio near 1 that rests on too few pairs.
    """
    if cell.job.same.get(name, name) == cell.job.same.get(other, other):
        return 1.0
    ratio = cell.ratio(name, other)
    if ratio.is_near and ratio.repeats < MANY:
        raise NotMeasuredError(f"{cell.job.label}: {ratio.repeats} repeats, a ratio under {NEAR:.2f} needs {MANY}")
    return ratio.high


def switch_share(cells: Sequence[Cell]) -> float:
    """Return what coming back to a plan costs a rank, over a step of that plan, worst case."""
    found = [(cell, name) for cell in _of(cells, "adaptive_r") for name in cell.switches]
    shares = [cell.switches[name].again_seconds / cell.timings[name].median for cell, name in found]
    return max(_some(shares, "that counts switches"))


def first_switch_share(cells: Sequence[Cell]) -> float:
    """Return what taking up a plan for the first time costs a rank, over a step of that plan, worst case."""
    found = [(cell, name) for cell in _of(cells, "adaptive_r") for name in cell.switches]
    shares = [
        (cell.switches[name].first_seconds + cell.switches[name].first_call_seconds) / cell.timings[name].median
        for cell, name in found
    ]
    return max(_some(shares, "that counts switches"))


def fixed_over_adaptive(cells: Sequence[Cell]) -> float:
    """Return the time of the best r that is the same for all sizes and factors, over that of the best r for each."""
    found = _of(cells, "adaptive_r")
    medians = [{name: timing.median for name, timing in cell.timings.items()} for cell in found]
    fixed = min(sum(of_cell[name] for of_cell in medians) for name in medians[0])
    return fixed / sum(min(of_cell.values()) for of_cell in medians)


def exact_over_optsche(cells: Sequence[Cell]) -> float:
    """Return the exact order's time over OptSche's, median over all programs, each at the 95 % bound."""
    return statistics.median(exact_ratios(cells))


def worst_exact_over_optsche(cells: Sequence[Cell]) -> float:
    """Return that ratio for the program where it is worst."""
    return max(exact_ratios(cells))


def exact_ratios(cells: Sequence[Cell]) -> list[float]:
    """Return the upper end of that ratio's 95 % interval for every program; 1 where both orders are the same."""
    found = [cell for cell in _of(cells, "orders") if {"exact", "optsche"} <= {*cell.timings, *cell.job.same}]
    return [bounded(cell, "exact", "optsche") for cell in _some(found, "with both orders")]


def ablation(cells: Sequence[Cell]) -> float:
    """Return the plain layer's time over that of all of ScheMoE's steps together."""
    (cell,) = _of(cells, "ablation")
    names = list(cell.timings)
    return cell.ratio(names[0], names[-1]).median


def _claim(
    name: str,
    value: Callable[[Sequence[Cell]], float],
    cells: Sequence[Cell],
    target: float | None,
    at_least: bool = False,
) -> Claim:
    measured, why = None, ""
    try:
        measured = value(cells)
    except NotMeasuredError as reason:
        why = str(reason)
    return Claim(name=name, value=measured, unit="1", target=target, op=">=" if at_least else "<=", reason=why)


def _of(cells: Sequence[Cell], section: str) -> list[Cell]:
    return _some([cell for cell in cells if cell.job.section == section], f"of {section}")


def _some(found: list, what: str) -> list:
    if not found:
        raise NotMeasuredError(f"no cell {what} was run")
    return found
