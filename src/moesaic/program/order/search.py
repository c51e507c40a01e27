"""Branch and bound over the orders in which jobs may be issued.

A node is a partial list, its children the lists with one job more. Where streams wait for each other, only active schedules
are looked at (Giffler and Thompson, Operations Research 1960): one of them is optimal, and they are few. Where the issuing
thread itself waits, every job that may come next is tried.

Three rules prune: the bound of `Jobs`; of equal chunks the first goes first; and of two nodes with the same jobs placed, one
whose times are nowhere earlier is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import le

from moesaic.program.order.jobs import Jobs
from moesaic.program.task import Lane
from moesaic.program.timeline import IDLE, THREAD, Free, place

_BETTER = 1.0 - 1e-9
"""A makespan counts as smaller below this share of the best one; sums in another order differ by less."""


@dataclass(frozen=True)
class Result:
    """How a search ended."""

    order: tuple[int, ...] | None
    """The best list of jobs; None if none is better than what the search started from."""
    is_optimal: bool
    nodes: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A partial list."""

    done: int
    """Placed jobs, a bit each."""
    free: Free
    ends: tuple[float, ...]
    """When each placed job ends; 0 for others."""
    bound: float
    order: tuple[int, ...]


def branch_and_bound(jobs: Jobs, best: float, *, host_runs_compute: bool, max_nodes: int) -> Result:
    """Search for a list of jobs with a makespan below `best`, depth first, the most promising child first.

    Args:
        jobs: the problem.
        best: makespan of a known list, in seconds.
        host_runs_compute: as of `lay_out`.
        max_nodes: nodes whose children are made, at most.
    """
    search = _Search(jobs, host_runs_compute)
    nothing = (0.0,) * len(jobs.seconds)
    everything = (1 << len(jobs.seconds)) - 1
    stack = [_Node(0, IDLE, nothing, jobs.bound(0, IDLE, nothing), ())]
    order, nodes = None, 0
    while stack:
        node = stack.pop()
        if node.bound >= best * _BETTER:
            continue
        if node.done == everything:
            best, order = node.bound, node.order
            continue
        if search.is_dominated(node):
            continue
        if nodes >= max_nodes:
            return Result(order, False, nodes)
        nodes += 1
        children = (search.append(node, job) for job in search.candidates(node))
        promising = [child for child in children if child.bound < best * _BETTER]
        stack += sorted(promising, key=lambda child: child.bound, reverse=True)
    return Result(order, True, nodes)


class _Search:
    """How nodes branch, and which ones have been seen.

    Args:
        jobs: the problem.
        host_runs_compute: as of `lay_out`.
    """

    def __init__(self, jobs: Jobs, host_runs_compute: bool) -> None:
        self._jobs = jobs
        self._host_runs_compute = host_runs_compute
        self._thread_waits = host_runs_compute or Lane.HOST in jobs.lanes
        self._needs = [_bits(waits) for waits in jobs.before]
        self._twins = [(_bits(one), _bits(two)) for one, two in jobs.twins]
        self._seen: dict[int, list[list[float]]] = {}

    def candidates(self, node: _Node) -> list[int]:
        """Return the jobs to come next among which an optimal list goes on."""
        jobs, done = self._jobs, node.done
        ready = [
            job
            for job, needs in enumerate(self._needs)
            if not done >> job & 1 and not needs & ~done and not self._has_first_twin(done, job)
        ]
        if self._thread_waits:
            free_of_charge = [job for job in ready if jobs.seconds[job] == 0 and self._has_arrived(node, job)]
            return free_of_charge[:1] or ready
        starts = {job: place(node.free, *self._request(node, job))[1] for job in ready}
        first = min(ready, key=lambda job: (starts[job] + jobs.seconds[job], job))
        end, at = starts[first] + jobs.seconds[first], jobs.resources[first]
        return [job for job in ready if job == first or (jobs.resources[job] == at and starts[job] < end)]

    def append(self, node: _Node, job: int) -> _Node:
        """Return the list with one job more."""
        free, start = place(node.free, *self._request(node, job))
        ends = (*node.ends[:job], start + self._jobs.seconds[job], *node.ends[job + 1 :])
        done = node.done | 1 << job
        return _Node(done, free, ends, self._jobs.bound(done, free, ends), (*node.order, job))

    def is_dominated(self, node: _Node) -> bool:
        """Whether a node with the same jobs placed and no time later has been seen; remembers this one if not.

        An end counts from where jobs that wait for it can first start: all ends before that are alike.
        """
        thread = node.free[THREAD]
        times = [max(time, thread) for time in node.free]
        for job, end in enumerate(node.ends):
            if node.done >> job & 1:
                waiting = [other for other in self._jobs.after[job] if not node.done >> other & 1]
                if waiting:
                    earliest = min(node.free[self._jobs.resources[other]] for other in waiting)
                    times.append(max(end, thread if self._thread_waits else earliest))
        seen = self._seen.setdefault(node.done, [])
        if any(all(map(le, other, times)) for other in seen):
            return True
        seen.append(times)
        return False

    def _request(self, node: _Node, job: int) -> tuple[Lane, float, float, bool]:
        """Return the arguments of `place` for a job."""
        ready = max((node.ends[other] for other in self._jobs.before[job]), default=0.0)
        return self._jobs.lanes[job], self._jobs.seconds[job], ready, self._host_runs_compute

    def _has_arrived(self, node: _Node, job: int) -> bool:
        """Whether the thread need not wait to issue a job."""
        return all(node.ends[other] <= node.free[THREAD] for other in self._jobs.before[job])

    def _has_first_twin(self, done: int, job: int) -> bool:
        """Whether a chunk equal to the job's goes first by rule: neither of the two has begun."""
        return any(two >> job & 1 and not done & (one | two) for one, two in self._twins)


def _bits(jobs: Iterable[int]) -> int:
    return sum(1 << job for job in jobs)
