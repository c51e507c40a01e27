"""What the layer benchmark claims: figures of its cells, held against targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from moesaic_lab.claims import Claim, claimed, enough, some
from moesaic_lab.layer.cells import COMPETE
from moesaic_lab.layer.run import LayerCell


def claims(cells: Sequence[LayerCell]) -> list[Claim]:
    """Return all claims, also those that this run did not measure."""
    return [
        claimed("layer.best_over_baseline_tp4", lambda: best_over_baseline(cells), 4.0, ">="),
        claimed("layer.worst_over_best_single", lambda: worst_over_single(cells), 1.03),
        claimed("layer.switch_cost_share", lambda: switch_share(cells), 0.01),
        claimed("layer.first_switch_share", lambda: first_switch_share(cells), None),
        claimed("layer.fixed_r_over_adaptive", lambda: fixed_over_adaptive(cells), None, ">="),
        claimed("layer.exact_over_optsche", lambda: exact_over_optsche(cells), 1.0),
        claimed("layer.exact_over_optsche_worst", lambda: worst_exact_over_optsche(cells), None),
        claimed("layer.schemoe_ablation", lambda: ablation(cells), 2.0, ">="),
    ]


def best_over_baseline(cells: Sequence[LayerCell]) -> float:
    """Return the baseline's time over the best plan's at tp = etp = 4, median over the meshes that have it."""
    found = [cell for cell in _of(cells, "schedules") if cell.job.grid.tp == cell.job.grid.etp == 4]
    return statistics.median(cell.ratio("baseline", cell.best).median for cell in some(found, "at tp = etp = 4"))


def worst_over_single(cells: Sequence[LayerCell]) -> float:
    """Return the best plan's time over the fastest of ted, S1 and S2, worst over all meshes, at the 95 % bound."""
    return max(over_single(cell) for cell in _of(cells, "schedules"))


def over_single(cell: LayerCell) -> float:
    """Return that ratio for one mesh: the upper end of its 95 % interval, 1 if the best plan is the fastest of them."""
    names = {cell.job.same.get(name, name) for name in COMPETE} & set(cell.timings)
    fastest = min(names, key=lambda name: cell.ratio(name, cell.best).median)
    return bounded(cell, cell.best, fastest)


def bounded(cell: LayerCell, name: str, other: str) -> float:
    """Return the upper end of a ratio's 95 % interval; 1 for programs that are the same.

    Raises:
        NotMeasuredError: for a ratio near 1 that rests on too few pairs.
    """
    if cell.job.same.get(name, name) == cell.job.same.get(other, other):
        return 1.0
    return enough(cell.ratio(name, other), cell.job.label).high


def switch_share(cells: Sequence[LayerCell]) -> float:
    """Return what coming back to a plan costs a rank, over a step of that plan, worst case."""
    found = [(cell, name) for cell in _of(cells, "adaptive_r") for name in cell.switches]
    shares = [cell.switches[name].again_seconds / cell.timings[name].median for cell, name in found]
    return max(some(shares, "that counts switches"))


def first_switch_share(cells: Sequence[LayerCell]) -> float:
    """Return what taking up a plan for the first time costs a rank, over a step of that plan, worst case."""
    found = [(cell, name) for cell in _of(cells, "adaptive_r") for name in cell.switches]
    shares = [
        (cell.switches[name].first_seconds + cell.switches[name].first_call_seconds) / cell.timings[name].median
        for cell, name in found
    ]
    return max(some(shares, "that counts switches"))


def fixed_over_adaptive(cells: Sequence[LayerCell]) -> float:
    """Return the time of the best r that is the same for all sizes and factors, over that of the best r for each."""
    found = _of(cells, "adaptive_r")
    medians = [{name: timing.median for name, timing in cell.timings.items()} for cell in found]
    fixed = min(sum(of_cell[name] for of_cell in medians) for name in medians[0])
    return fixed / sum(min(of_cell.values()) for of_cell in medians)


def exact_over_optsche(cells: Sequence[LayerCell]) -> float:
    """Return the exact order's time over OptSche's, median over all programs, each at the 95 % bound."""
    return statistics.median(exact_ratios(cells))


def worst_exact_over_optsche(cells: Sequence[LayerCell]) -> float:
    """Return that ratio for the program where it is worst."""
    return max(exact_ratios(cells))


def exact_ratios(cells: Sequence[LayerCell]) -> list[float]:
    """Return the upper end of that ratio's 95 % interval for every program; 1 where both orders are the same."""
    found = [cell for cell in _of(cells, "orders") if {"exact", "optsche"} <= {*cell.timings, *cell.job.same}]
    return [bounded(cell, "exact", "optsche") for cell in some(found, "with both orders")]


def ablation(cells: Sequence[LayerCell]) -> float:
    """Return the plain layer's time over that of all of ScheMoE's steps together."""
    (cell,) = _of(cells, "ablation")
    names = list(cell.timings)
    return cell.ratio(names[0], names[-1]).median


def _of(cells: Sequence[LayerCell], section: str) -> list[LayerCell]:
    return some([cell for cell in cells if cell.job.section == section], f"of {section}")
