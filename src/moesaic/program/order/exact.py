"""The order of the smallest makespan, by branch and bound over the orders of tasks on all lanes.

ScheMoE's order is optimal for equal chunks and equal passes only; elsewhere a better one is often a few per cent away.

A program is a scheduling problem: jobs with durations on resources (`Jobs`). Branch and bound looks at the orders in which jobs
may be issued. A node is a partial list, its children are the lists with one job more. Where streams wait for each other, only
active schedules are looked at (Giffler and Thompson, Operations Research 1960): one of them is optimal, and they are few. Where
the issuing thread itself waits, every job that may come next is tried.

Three rules prune: the bound of `Jobs`; of equal chunks the first goes first; and of two nodes with the same jobs placed, one
whose times are nowhere earlier is dropped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from operator import le

from moesaic.program.order.graph import chunk_numbers, early, fifo, predecessors, successors
from moesaic.program.order.optsche import optsche
from moesaic.program.task import Lane, Layout, Program
from moesaic.program.timeline import IDLE, THREAD, Free, durations, lay_out, place, resource


@dataclass(frozen=True)
class Jobs:
    """The tasks of a program by number, as the search reads them."""

    lanes: tuple[Lane, ...]
    resources: tuple[int, ...]
    """Place in `Free` of what each job occupies."""
    seconds: tuple[float, ...]
    before: tuple[tuple[int, ...], ...]
    """Jobs that each one waits for."""
    after: tuple[tuple[int, ...], ...]
    """Jobs that wait for each one."""
    tails: tuple[float, ...]
    """Seconds that must still follow each job's end: the longest way to the end of the program."""
    twins: tuple[tuple[frozenset[int], frozenset[int]], ...]
    """Pairs (a, b) of equal chunks: exchanging them changes nothing, so that a may go first."""

    def bound(self, done: int, free: Free, ends: tuple[float, ...], enough: float = math.inf) -> float:
        """Return a lower bound of the makespan of every completion of a partial schedule.

        For each resource its remaining jobs are run with preemption, each from the earliest time its predecessors allow,
        the rest of the longest way following it: Jackson's bound (Carlier, EJOR 1982). It covers the load of the lane and
        the critical path.

        Args:
            done: the jobs that are placed, a bit each.
            free: when the resources are free.
            ends: when each placed job ends.
            enough: a bound that is not smaller is not worth sharpening.
        """
        reached, seconds, tails, thread = list(ends), self.seconds, self.tails, free[0]
        waiting: list[list[tuple[float, float, float]]] = [[] for _ in free]
        for job, at in enumerate(self.resources):
            if done >> job & 1:
                continue
            head = free[at] if free[at] > thread else thread
            for other in self.before[job]:
                if reached[other] > head:
                    head = reached[other]
            reached[job] = end = head + seconds[job]
            if end + tails[job] >= enough:
                return end + tails[job]
            waiting[at].append((head, seconds[job], tails[job]))
        found = max(*free, *ends)
        for jobs in waiting:
            if jobs and found < enough:
                found = max(found, preemptive(jobs))
        return found


def jobs_of(program: Program, seconds: Mapping[str, float], host_runs_compute: bool) -> Jobs:
    """Return the scheduling problem of a program.

    Raises:
        InputError: as `durations` does.
    """
    before = predecessors(program)
    after = successors(before)
    lengths = durations(program, seconds)
    tails = [0.0] * len(lengths)
    for job in reversed(range(len(lengths))):
        tails[job] = max((lengths[other] + tails[other] for other in after[job]), default=0.0)
    return Jobs(
        lanes=tuple(task.lane for task in program.tasks),
        resources=tuple(resource(task.lane, host_runs_compute) for task in program.tasks),
        seconds=tuple(lengths),
        before=tuple(before),
        after=tuple(after),
        tails=tuple(tails),
        twins=_twins(program, lengths, before),
    )


def preemptive(jobs: list[tuple[float, float, float]]) -> float:
    """Return when the last tail ends if one machine runs jobs with preemption, always the one of the longest tail.

    No order without preemption ends earlier.

    Args:
        jobs: (earliest start, seconds, tail) of each.
    """
    coming = [*sorted(jobs), (math.inf, 0.0, 0.0)]
    running: list[tuple[float, float]] = []
    """Jobs that may run: (-tail, seconds left)."""
    now = latest = 0.0
    at = 0
    head, seconds, tail = coming[0]
    while running or head < math.inf:
        if not running and head > now:
            now = head
        while head <= now:
            heapq.heappush(running, (-tail, seconds))
            at += 1
            head, seconds, tail = coming[at]
        first, left = running[0]
        if now + left <= head:
            heapq.heappop(running)
            now += left
            latest = max(latest, now - first)
        else:
            heapq.heapreplace(running, (first, left - (head - now)))
            now = head
    return latest


def _twins(
    program: Program, lengths: list[float], before: list[tuple[int, ...]]
) -> tuple[tuple[frozenset[int], frozenset[int]], ...]:
    """Return the pairs of parts whose exchange maps the problem to itself.

    The k-th job of one part stands for the k-th job of the other; that this is a symmetry is then checked, not assumed.
    """
    parts = _parts(program)
    pairs = []
    for one, two in combinations(sorted(parts), 2):
        if len(parts[one]) != len(parts[two]):
            continue
        swap = dict(zip(parts[one], parts[two])) | dict(zip(parts[two], parts[one]))
        if all(
            lengths[job] == lengths[other]
            and program.tasks[job].lane is program.tasks[other].lane
            and {swap.get(waits, waits) for waits in before[job]} == set(before[other])
            for job, other in ((job, swap.get(job, job)) for job in range(len(lengths)))
        ):
            pairs.append((frozenset(parts[one]), frozenset(parts[two])))
    return tuple(pairs)


def _parts(program: Program) -> dict[int, list[int]]:
    """Return the jobs that work on one chunk, or in a program without chunks on one step of peers, by its number."""
    slots = {slot.name: slot for slot in program.slots}
    has_chunks = any(slot.layout.chunk is not None for slot in program.slots)

    chunk = chunk_numbers(program)

    def number(layout: Layout) -> int | None:
        return chunk(layout) if has_chunks else layout.step and layout.step[0]

    parts: dict[int, list[int]] = {}
    for job, task in enumerate(program.tasks):
        found = {number(slots[name].layout) for name in (*task.reads, *task.writes)} - {None}
        if len(found) == 1:
            parts.setdefault(found.pop() or 0, []).append(job)
    return parts


_BETTER = 1.0 - 1e-9
"""A makespan counts as smaller below this share of the best one; sums in another order differ by less."""


@dataclass(frozen=True)
class SearchResult:
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


def branch_and_bound(jobs: Jobs, best: float, *, host_runs_compute: bool, max_nodes: int) -> SearchResult:
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
            return SearchResult(order, False, nodes)
        nodes += 1
        enough = best * _BETTER
        children = (search.append(node, job, enough) for job in search.candidates(node))
        promising = [child for child in children if child.bound < enough]
        stack += sorted(promising, key=lambda child: child.bound, reverse=True)
    return SearchResult(order, True, nodes)


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

    def append(self, node: _Node, job: int, enough: float) -> _Node:
        """Return the list with one job more; see `Jobs.bound`."""
        free, start = place(node.free, *self._request(node, job))
        ends = (*node.ends[:job], start + self._jobs.seconds[job], *node.ends[job + 1 :])
        done = node.done | 1 << job
        return _Node(done, free, ends, self._jobs.bound(done, free, ends, enough), (*node.order, job))

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


MAX_WORK = 150_000
"""Partial orders times tasks that a search looks into unless it is told otherwise: about a second."""


@dataclass(frozen=True)
class FoundOrder:
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
) -> FoundOrder:
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
    return FoundOrder(best, length(best), result.is_optimal, result.nodes)


def _by_start(program: Program, seconds: Mapping[str, float]) -> Program:
    """Issue in the order of starting times: every lane keeps its order, and no task stands behind one that starts later."""
    starts = {span.task: span.start for span in lay_out(program, seconds).spans}
    return replace(program, tasks=tuple(sorted(program.tasks, key=lambda task: starts[task.name])))
