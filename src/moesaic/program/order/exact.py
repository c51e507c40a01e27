"""The order of the smallest makespan, by branch and bound over the orders of tasks on all lanes.

ScheMoE's order is optimal for equal chunks and equal passes only; elsewhere a better one is often a few per cent away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moesaic.program.order.early import early
from moesaic.program.order.fifo import fifo
from moesaic.program.order.jobs import jobs_of
from moesaic.program.order.optsche import optsche
from moesaic.program.order.search import branch_and_bound
from moesaic.program.task import Lane, Program
from moesaic.program.timeline import lay_out

MAX_WORK = 150_000
"""Partial orders times tasks that a search looks into unless it is told otherwise: about a second."""


@dataclass(frozen=True)
class Found:
    """What a search found."""

    program: Program
    """In the best order."""
    makespan: float
    """Seconds of its timeline."""
    is_optimal: bool
    """Whether no order is better, to one part in 10^9; False if the search ended at its limit."""
    nodes: int
    """Partial orders that were looked into."""


def exact(
    program: Program,
    seconds: Callable[[], Mapping[str, float]] | None = None,
    *,
    host_runs_compute: bool = False,
    max_nodes: int | None = None,
) -> Program:
    """Return the program in the best order that `search` finds.

    Args:
        program: forward or backward.
        seconds: returns the duration of each task by name, the same on all ranks. None: there is nothing to search by, and
            the order is OptSche's.
        host_runs_compute: as of `lay_out`.
        max_nodes: as of `search`.

    Raises:
        InputError: as `lay_out` does.
    """
    if seconds is None:
        return optsche(program)
    return search(program, seconds(), host_runs_compute=host_runs_compute, max_nodes=max_nodes).program


def search(
    program: Program, seconds: Mapping[str, float], *, host_runs_compute: bool = False, max_nodes: int | None = None
) -> Found:
    """Search for the order of the smallest makespan, starting from the best of optsche, early and fifo.

    All ranks must choose the same order, or they would wait for each other forever. So the search is bounded by nodes and
    reads no clock: a slower rank takes longer and finds the same.

    Args:
        program: forward or backward.
        seconds: duration of each task by name, bit for bit the same on all ranks.
        host_runs_compute: as of `lay_out`.
        max_nodes: partial orders to look into at most; 0 returns the best of the three. None: `MAX_WORK` over the number of
            tasks, a node of a larger program taking longer.

    Returns:
        an order that is never worse than those three.

    Raises:
        InputError: as `lay_out` does.
    """

    def length(ordered: Program) -> float:
        return lay_out(ordered, seconds, host_runs_compute=host_runs_compute).makespan

    if max_nodes is None:
        max_nodes = MAX_WORK // max(len(program.tasks), 1)
    best = min((optsche(program), early(program), fifo(program)), key=length)
    jobs = jobs_of(program, seconds, host_runs_compute)
    result = branch_and_bound(jobs, length(best), host_runs_compute=host_runs_compute, max_nodes=max_nodes)
    if result.order is not None:
        best = replace(program, tasks=tuple(program.tasks[job] for job in result.order))
        if not host_runs_compute and Lane.HOST not in jobs.lanes:
            best = _by_start(best, seconds)
    return Found(best, length(best), result.is_optimal, result.nodes)


def _by_start(program: Program, seconds: Mapping[str, float]) -> Program:
    """Issue in the order of starting times: every lane keeps its order, and no task stands behind one that starts later."""
    starts = {span.task: span.start for span in lay_out(program, seconds).spans}
    return replace(program, tasks=tuple(sorted(program.tasks, key=lambda task: starts[task.name])))
