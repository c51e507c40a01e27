"""Searches for the order with the smallest makespan, by branch and bound over the orders of tasks on all lanes.

ScheMoE's order is optimal for equal chunks and equal passes only. Otherwise a better order is often a few per cent
faster.

A program is a scheduling problem: jobs with durations on resources (`Jobs`). A node of the search is a partial list of
jobs; its children are the lists with one more job. If streams wait for each other, only active schedules are searched
(Giffler and Thompson, Operations Research 1960): one of them is optimal, and they are few. If the issuing thread itself
waits, every job that may come next is tried.

Three rules prune nodes: the bound of `Jobs`; the first of several equal chunks goes first; and of two nodes with the
same jobs placed, one that is no earlier in any time is dropped.
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
    """The tasks of a program as numbered jobs with durations and resources."""

    lanes: tuple[Lane, ...]
    resources: tuple[int, ...]
    """Index in `Free` of the resource that each job occupies."""
    seconds: tuple[float, ...]
    before: tuple[tuple[int, ...], ...]
    """The jobs that must end before each job starts."""
    after: tuple[tuple[int, ...], ...]
    """The jobs that wait for each job."""
    tails: tuple[float, ...]
    """Seconds of the longest path from each job's end to the end of the program."""
    twins: tuple[tuple[frozenset[int], frozenset[int]], ...]
    """Pairs (a, b) of equal chunks. Exchanging them changes nothing, so a may go first."""

    def bound(self, done: int, free: Free, ends: tuple[float, ...], enough: float = math.inf) -> float:
        """Return a lower bound on the makespan of every completion of a partial schedule.

        The remaining jobs of each resource run with preemption, each from the earliest time its predecessors allow, and
        each followed by its tail: Jackson's bound (Carlier, EJOR 1982). It covers the load of the lane and the critical
        path.

        Args:
            done: bit set of the placed jobs.
            free: when the resources are free.
            ends: when each placed job ends.
            enough: stop and return the bound once it is at least this large.
        """
        reached, seconds, tails, thread = list(ends), self.seconds, self.tails, free[0]
        waiting: list[list[tuple[float, float, float]]] = [[] for _ in free]
        for job, index in enumerate(self.resources):
            if done >> job & 1:
                continue
            head = free[index] if free[index] > thread else thread
            for other in self.before[job]:
                if reached[other] > head:
                    head = reached[other]
            reached[job] = end = head + seconds[job]
            if end + tails[job] >= enough:
                return end + tails[job]
            waiting[index].append((head, seconds[job], tails[job]))
        bound = max(*free, *ends)
        for jobs in waiting:
            if jobs and bound < enough:
                bound = max(bound, preemptive(jobs))
        return bound


def jobs_of(program: Program, seconds: Mapping[str, float], host_runs_compute: bool) -> Jobs:
    """Return the scheduling problem of a program.

    Raises:
        InputError: see `durations`.
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
    """Return when the last tail ends if one machine runs the jobs with preemption, always the one with the longest tail.

    No order without preemption ends earlier.

    Args:
        jobs: (earliest start, seconds, tail) of each job.
    """
    coming = [*sorted(jobs), (math.inf, 0.0, 0.0)]
    running: list[tuple[float, float]] = []
    """Jobs that may run: (-tail, seconds left)."""
    now = latest = 0.0
    position = 0
    head, seconds, tail = coming[0]
    while running or head < math.inf:
        if not running and head > now:
            now = head
        while head <= now:
            heapq.heappush(running, (-tail, seconds))
            position += 1
            head, seconds, tail = coming[position]
        negative_tail, seconds_left = running[0]
        if now + seconds_left <= head:
            heapq.heappop(running)
            now += seconds_left
            latest = max(latest, now - negative_tail)
        else:
            heapq.heapreplace(running, (negative_tail, seconds_left - (head - now)))
            now = head
    return latest


def _twins(
    program: Program, lengths: list[float], before: list[tuple[int, ...]]
) -> tuple[tuple[frozenset[int], frozenset[int]], ...]:
    """Return the pairs of parts that can be exchanged without changing the problem.

    The k-th job of one part is mapped to the k-th job of the other. Whether that is a symmetry is checked, not assumed.
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
    """Return the jobs of each chunk by its number, or of each step of peers in a program without chunks."""
    slots = {slot.name: slot for slot in program.slots}
    has_chunks = any(slot.layout.chunk is not None for slot in program.slots)

    chunk = chunk_numbers(program)

    def number(layout: Layout) -> int | None:
        return chunk(layout) if has_chunks else layout.step and layout.step[0]

    parts: dict[int, list[int]] = {}
    for job, task in enumerate(program.tasks):
        numbers = {number(slots[name].layout) for name in (*task.reads, *task.writes)} - {None}
        if len(numbers) == 1:
            parts.setdefault(numbers.pop() or 0, []).append(job)
    return parts


_BETTER = 1.0 - 1e-9
"""A makespan counts as smaller only below this fraction of the best one: sums in another order differ by less."""


@dataclass(frozen=True)
class SearchResult:
    """The outcome of `branch_and_bound`."""

    order: tuple[int, ...] | None
    """The best list of jobs; None if the search found nothing better than the list it started from."""
    is_optimal: bool
    nodes: int


@dataclass(frozen=True, slots=True)
class _SearchNode:
    """A partial list of jobs."""

    done: int
    """Bit set of the placed jobs."""
    free: Free
    ends: tuple[float, ...]
    """When each placed job ends; 0 for other jobs."""
    bound: float
    order: tuple[int, ...]


def branch_and_bound(jobs: Jobs, best: float, *, host_runs_compute: bool, max_nodes: int) -> SearchResult:
    """Search for a list of jobs with a makespan below `best`, depth first, starting with the child of smallest bound.

    Args:
        jobs: the problem.
        best: makespan of a known list, in seconds.
        host_runs_compute: see `lay_out`.
        max_nodes: the largest number of nodes to expand.
    """
    search = _OrderSearch(jobs, host_runs_compute)
    nothing = (0.0,) * len(jobs.seconds)
    everything = (1 << len(jobs.seconds)) - 1
    stack = [_SearchNode(0, IDLE, nothing, jobs.bound(0, IDLE, nothing), ())]
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


class _OrderSearch:
    """Branches nodes, and remembers the nodes seen.

    Args:
        jobs: the problem.
        host_runs_compute: see `lay_out`.
    """

    def __init__(self, jobs: Jobs, host_runs_compute: bool) -> None:
        self._jobs = jobs
        self._host_runs_compute = host_runs_compute
        self._thread_waits = host_runs_compute or Lane.HOST in jobs.lanes
        self._needs = [_bits(waits) for waits in jobs.before]
        self._twins = [(_bits(one), _bits(two)) for one, two in jobs.twins]
        self._seen: dict[int, list[list[float]]] = {}

    def candidates(self, node: _SearchNode) -> list[int]:
        """Return jobs to place next such that one of them continues to an optimal list."""
        jobs, done = self._jobs, node.done
        ready = [
            job
            for job, needs in enumerate(self._needs)
            if not done >> job & 1 and not needs & ~done and not self._has_first_twin(done, job)
        ]
        if self._thread_waits:
            instant = [job for job in ready if jobs.seconds[job] == 0 and self._has_arrived(node, job)]
            return instant[:1] or ready
        starts = {job: place(node.free, *self._request(node, job))[1] for job in ready}
        first = min(ready, key=lambda job: (starts[job] + jobs.seconds[job], job))
        end, index = starts[first] + jobs.seconds[first], jobs.resources[first]
        return [job for job in ready if job == first or (jobs.resources[job] == index and starts[job] < end)]

    def append(self, node: _SearchNode, job: int, enough: float) -> _SearchNode:
        """Return the node with one more job; see `Jobs.bound` for `enough`."""
        free, start = place(node.free, *self._request(node, job))
        ends = (*node.ends[:job], start + self._jobs.seconds[job], *node.ends[job + 1 :])
        done = node.done | 1 << job
        return _SearchNode(done, free, ends, self._jobs.bound(done, free, ends, enough), (*node.order, job))

    def is_dominated(self, node: _SearchNode) -> bool:
        """Return whether a node with the same jobs placed and no later times was seen before; remember this node if not.

        The end of a job matters only from the time at which jobs that wait for it could start, so earlier ends count as
        equal.
        """
        thread = node.free[THREAD]
        times = [max(time, thread) for time in node.free]
        for job, end in enumerate(node.ends):
            if node.done >> job & 1:
                successors_left = [other for other in self._jobs.after[job] if not node.done >> other & 1]
                if successors_left:
                    earliest = min(node.free[self._jobs.resources[other]] for other in successors_left)
                    times.append(max(end, thread if self._thread_waits else earliest))
        seen = self._seen.setdefault(node.done, [])
        if any(all(map(le, other, times)) for other in seen):
            return True
        seen.append(times)
        return False

    def _request(self, node: _SearchNode, job: int) -> tuple[Lane, float, float, bool]:
        """Return the arguments of `place` for a job."""
        ready = max((node.ends[other] for other in self._jobs.before[job]), default=0.0)
        return self._jobs.lanes[job], self._jobs.seconds[job], ready, self._host_runs_compute

    def _has_arrived(self, node: _SearchNode, job: int) -> bool:
        """Return whether the issuing thread can issue a job without waiting."""
        return all(node.ends[other] <= node.free[THREAD] for other in self._jobs.before[job])

    def _has_first_twin(self, done: int, job: int) -> bool:
        """Return whether an equal chunk must go before the job's chunk. Neither of the two has begun then."""
        return any(two >> job & 1 and not done & (one | two) for one, two in self._twins)


def _bits(jobs: Iterable[int]) -> int:
    return sum(1 << job for job in jobs)


MAX_WORK = 150_000
"""Default limit of a search, in partial orders times tasks: about a second."""


@dataclass(frozen=True)
class FoundOrder:
    """The result of `search`."""

    program: Program
    """The program in the best order found."""
    makespan: float
    """Seconds that the program takes in this order."""
    is_optimal: bool
    """Whether no order is better, to one part in 10^9. False if the search reached its limit."""
    nodes: int
    """Number of partial orders examined."""


def exact(
    program: Program,
    seconds: Callable[[], Mapping[str, float]] | None = None,
    *,
    host_runs_compute: bool = False,
    max_nodes: int | None = None,
) -> Program:
    """Return the program in the best order that `search` finds.

    Args:
        program: a forward or backward program.
        seconds: returns the duration of each task by name, identical on all ranks. None: return OptSche's order.
        host_runs_compute: see `lay_out`.
        max_nodes: see `search`.

    Raises:
        InputError: see `lay_out`.
    """
    if seconds is None:
        return optsche(program)
    return search(program, seconds(), host_runs_compute=host_runs_compute, max_nodes=max_nodes).program


def search(
    program: Program, seconds: Mapping[str, float], *, host_runs_compute: bool = False, max_nodes: int | None = None
) -> FoundOrder:
    """Search for the order with the smallest makespan, starting from the best of optsche, early and fifo.

    All ranks must choose the same order, or they would deadlock. So the limit is a number of nodes and not a time: a
    slower rank takes longer and finds the same order.

    Args:
        program: a forward or backward program.
        seconds: duration of each task by name, bit-identical on all ranks.
        host_runs_compute: see `lay_out`.
        max_nodes: the largest number of partial orders to examine; 0 returns the best of the three. None: `MAX_WORK`
            divided by the number of tasks, since a node of a larger program takes longer.

    Returns:
        an order that is at least as good as those three.

    Raises:
        InputError: see `lay_out`.
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
    """Return the program sorted by start times: lanes keep their order, and no task follows one that starts later."""
    starts = {span.task: span.start for span in lay_out(program, seconds).spans}
    return replace(program, tasks=tuple(sorted(program.tasks, key=lambda task: starts[task.name])))
