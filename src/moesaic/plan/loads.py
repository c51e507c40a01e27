"""Plans under uneven loads: counts brought to a layout's groups and tokens, and a plan simulated under them."""

from __future__ import annotations

import numpy as np

from moesaic.cost.call_sizes import sizes_of
from moesaic.cost.simulate import Simulated, Simulator
from moesaic.cost.workload import Workload, imbalance
from moesaic.errors import InputError
from moesaic.plan.compile import Compiled
from moesaic.traces.trace import Trace


def simulate_counts(
    simulator: Simulator, compiled: Compiled, layer: Workload, counts: np.ndarray
) -> tuple[Simulated, Simulated]:
    """Simulate a plan under counts, every rank apart; returns the forward and the backward pass.

    Args:
        simulator: of the cluster.
        compiled: the plan.
        layer: the workload.
        counts: (dp, num_experts), as `fit_counts` returns them.
    """
    shapes = compiled.shapes(layer.num_experts)
    there, back = (
        simulator.run(
            program, layer, compiled.grid, sizes=sizes_of(program, layer, compiled.grid, counts, shapes=shapes)
        )
        for program in (compiled.forward, compiled.backward)
    )
    return there, back


def fit_counts(counts: np.ndarray, groups: int, layer: Workload) -> np.ndarray:
    """Return counts for another number of data-parallel groups and tokens, shares kept.

    Args:
        counts: (groups before, num_experts).
        groups: wanted; a divisor or multiple of those before keeps each group's own shares, others get the mean.
        layer: says how many copies a group sends.

    Raises:
        InputError: if they are for another number of experts, or there are none.
    """
    if counts.ndim != 2 or counts.shape[1] != layer.num_experts or not counts.sum() > 0:
        raise InputError(
            f"counts of shape {counts.shape} with {int(counts.sum())} copies do not fit {layer.num_experts} experts: give "
            f"a row per group and a column for each expert"
        )
    before = len(counts)
    if before % groups == 0:
        merged = counts.reshape(groups, before // groups, -1).sum(axis=1)
    elif groups % before == 0:
        merged = np.repeat(counts, groups // before, axis=0)
    else:
        merged = np.tile(counts.sum(axis=0), (groups, 1))
    empty = merged.sum(axis=1) == 0
    merged[empty] = counts.sum(axis=0)
    total = round(layer.copies)
    ends = np.rint(merged.cumsum(axis=1) * (total / merged.sum(axis=1, keepdims=True))).astype(np.int64)
    return np.diff(ends, axis=1, prepend=0)


def typical_counts(trace: Trace, count: int) -> list[np.ndarray]:
    """Return the counts of some calls of a trace, (groups, num_experts) each: those at even quantiles of the imbalance.

    Counts of several layers or steps are never added up: their busiest experts differ, and the sum is more even than each.

    Args:
        trace: of a run.
        count: how many calls, at most.
    """
    calls = [(layer, step) for step in trace.steps for layer in range(trace.shape.num_layers)]
    tables = sorted((imbalance(trace.counts(*call)), call) for call in calls)
    chosen = dict.fromkeys(int((number + 0.5) * len(tables) / count) for number in range(count))
    return [trace.counts(*tables[place][1]) for place in chosen]
