"""Plans under uneven loads: fits counts to a layout, and predicts the time and memory of plans
under counts.

Counts are a table (groups, num_experts): the copies that each data-parallel group sends to each
expert in one call of a layer. If a plan replicates busy experts, its policy decides from the counts
which of its programs runs and which copies are computed elsewhere (`decided`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from moesaic.balance import replication_policy
from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import programs_of
from moesaic.errors import InputError
from moesaic.planner.call_sizes import copies_by_rank, sizes_of
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.even import MAX_RANKS_APART
from moesaic.planner.policy_rates import seen_by
from moesaic.planner.rank_memory import Memory, of_calls
from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import (
    Workload,
    imbalance,
    largest_max_vio,
    skewed_counts,
    uniform_counts,
)
from moesaic.program.compile import Compiled
from moesaic.program.replications import Replications
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Program
from moesaic.traces.trace import Trace


def simulate_counts(
    simulator: Simulator, compiled: Compiled, layer: Workload, counts: np.ndarray
) -> tuple[Simulated, Simulated]:
    """Simulate a plan under counts, with every rank individually; returns the forward and the
    backward pass.

    Args:
        simulator: simulator of the cluster.
        compiled: the compiled plan. If it replicates, its policy decides from the counts, as in a
            call.
        layer: the workload.
        counts: (dp, num_experts), as `fit_counts` returns them.

    Raises:
        InputError: if the cluster lacks the rates that the policy of the plan needs.
    """
    chosen, sizes = _called(simulator, compiled, layer, counts)
    both_sizes = sizes(chosen.forward), sizes(chosen.backward)
    return simulator.passes(chosen.forward, chosen.backward, layer, chosen.grid, sizes=both_sizes)


def _called(
    simulator: Simulator, compiled: Compiled, layer: Workload, counts: np.ndarray
) -> tuple[Compiled, Callable[[Program], CallSizes]]:
    """Return the compiled plan that runs under counts, and a function that returns the sizes of a
    call of one of its programs; arguments as of `simulate_counts`."""
    chosen, replicated = decided(simulator, compiled, layer, counts)
    shapes = chosen.shapes(layer.num_experts)
    return chosen, lambda program: sizes_of(
        program, layer, chosen.grid, counts, replicated=replicated, shapes=shapes
    )


MemoryOf = Callable[[Compiled, CallSizes], Memory]
"""Returns the memory of a rank, as `step_memory` does for its model of the step."""


def memory_under_counts(
    memory_of: MemoryOf,
    simulator: Simulator,
    compiled: Compiled,
    layer: Workload,
    tables: Sequence[np.ndarray],
) -> Memory:
    """Return the memory of a rank in a step whose layers have the counts of some tables, each like
    those of `simulate_counts`.

    In each call the rank with the most rows counts.
    """
    calls = []
    for counts in tables:
        chosen, sizes = _called(simulator, compiled, layer, counts)
        calls.append(memory_of(chosen, sizes(chosen.forward)))
    return of_calls(calls)


def memory_under_skew(
    memory_of: MemoryOf, simulator: Simulator, compiled: Compiled, layer: Workload, max_vio: float
) -> Memory:
    """Return the memory of a rank if the experts of one ep rank get 1 + `max_vio` times the mean
    load in every layer.

    A layout that allows no such skew has the largest that it allows. One replica of the experts
    stands for all.
    """
    grid = compiled.grid
    most = min(max_vio, largest_max_vio(grid.ep, layer))
    replica = on_replica(compiled, simulator.cluster)
    counts = skewed_counts(replica.grid.dp, layer, ep=grid.ep, max_vio=most)
    return memory_under_counts(memory_of, simulator, replica, layer, [counts])


def on_replica(compiled: Compiled, cluster: ClusterSpec) -> Compiled:
    """Return a plan compiled for one replica of the experts, on whole nodes and in whole
    tensor-parallel groups: the ranks of the largest of the three."""
    grid = compiled.grid
    replica_ranks = max(grid.ep * grid.etp, cluster.devices_per_node, grid.tp)
    return replace(compiled, grid=replace(grid, world=min(replica_ranks, grid.world)))


def simulate_even(
    simulator: Simulator, compiled: Compiled, layer: Workload
) -> tuple[Simulated, Simulated]:
    """Simulate a plan under even routing; returns the forward and the backward pass.

    One rank stands for all ranks that do the same work. If the policy of the plan replicates
    anything, every rank is simulated individually.

    Args:
        simulator: simulator of the cluster.
        compiled: the compiled plan. If it replicates, its policy decides.
        layer: the workload.

    Raises:
        InputError: as `simulate_counts`, and if the policy replicates anything on more than
            `MAX_RANKS_APART` ranks.
    """
    if not compiled.replicates:
        return simulator.passes(compiled.forward, compiled.backward, layer, compiled.grid)
    counts = uniform_counts(compiled.grid.dp, layer)
    chosen, replicated = decided(simulator, compiled, layer, counts)
    if replicated is None:
        return simulator.passes(chosen.forward, chosen.backward, layer, chosen.grid)
    if compiled.grid.world > MAX_RANKS_APART:
        raise InputError(
            f"replication={compiled.plan.replication} is decided under even routing too, so every "
            f"rank is simulated, on at most {MAX_RANKS_APART} ranks, but the mesh has "
            f"{compiled.grid.world}: choose another policy, or none"
        )
    return simulate_counts(simulator, compiled, layer, counts)


def decided(
    simulator: Simulator, compiled: Compiled, layer: Workload, counts: np.ndarray
) -> tuple[Compiled, Replications | None]:
    """Return the decision of the policy of a plan for a call; the arguments are those of
    `simulate_counts`.

    Returns:
        the compiled plan that runs, and the replicated rows, or None if there are none.
    """
    if not compiled.replicates:
        return compiled, None
    grid = compiled.grid
    rates = seen_by(simulator.cluster, grid, layer)
    policy = replication_policy(compiled.plan.replication, rates)
    programs = programs_of(compiled, policy)  # compiled plans that a call may run, by name
    chooser = policy.start({name: each.plan for name, each in programs.items()})
    copies = copies_by_rank(compiled.forward, grid, counts)
    units = max(1, layer.hidden // grid.etp)  # of each expert's hidden width, on a rank
    load = CallLoad(grid, copies, layer.num_experts, units=units, dim=layer.dim)
    decision = chooser.choose(load)
    return programs[decision.program], decision.replicated


def fit_counts(counts: np.ndarray, groups: int, layer: Workload) -> np.ndarray:
    """Return counts for another number of data-parallel groups and tokens, with the same shares of
    the experts.

    Args:
        counts: (old number of groups, num_experts).
        groups: new number of groups. A divisor or multiple of the old number keeps the shares of
            each group; with other numbers every group gets the mean shares.
        layer: the workload, which has the number of copies that a group sends.

    Raises:
        InputError: if the counts have another number of experts, or no copies.
    """
    if counts.ndim != 2 or counts.shape[1] != layer.num_experts or not counts.sum() > 0:
        raise InputError(
            f"counts of shape {counts.shape} with {int(counts.sum())} copies do not fit "
            f"{layer.num_experts} experts: give a row per group and a column for each expert"
        )
    num_groups = len(counts)
    if num_groups % groups == 0:
        merged = counts.reshape(groups, num_groups // groups, -1).sum(axis=1)
    elif groups % num_groups == 0:
        merged = np.repeat(counts, groups // num_groups, axis=0)
    else:
        merged = np.tile(counts.sum(axis=0), (groups, 1))
    # groups without copies get the mean shares too
    is_empty = merged.sum(axis=1) == 0
    merged[is_empty] = counts.sum(axis=0)
    # round the sums over the first experts, so that each row sums to all copies
    total = round(layer.copies)
    scale = total / merged.sum(axis=1, keepdims=True)
    cumulated = np.rint(merged.cumsum(axis=1) * scale).astype(np.int64)
    return np.diff(cumulated, axis=1, prepend=0)


def typical_counts(trace: Trace, count: int) -> list[np.ndarray]:
    """Return the counts of calls of a trace at even quantiles of the imbalance, (groups,
    num_experts) each.

    Counts of several layers or steps are never summed, since their busiest experts differ and the
    sum would be more even.

    Args:
        trace: the trace.
        count: largest number of calls.
    """
    calls = [(layer, step) for step in trace.steps for layer in range(trace.shape.num_layers)]
    by_imbalance = sorted((imbalance(trace.counts(*call)), call) for call in calls)
    # the middles of `count` equal parts, each once if there are fewer calls
    places = sorted({int((number + 0.5) * len(calls) / count) for number in range(count)})
    return [trace.counts(*by_imbalance[place][1]) for place in places]
