"""A program as a scheduling problem: jobs with durations on resources, and what bounds the rest of a partial schedule."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from moesaic.program.order.graph import chunk_numbers, predecessors, successors
from moesaic.program.task import Lane, Layout, Program
from moesaic.program.timeline import Free, durations, resource


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

    def bound(self, done: int, free: Free, ends: tuple[float, ...]) -> float:
        """Return a lower bound of the makespan of every completion of a partial schedule.

        For each resource its remaining jobs are run with preemption, each from the earliest time its predecessors allow,
        the rest of the longest way following it: Jackson's bound (Carlier, EJOR 1982). It covers the load of the lane and
        the critical path.

        Args:
            done: the jobs that are placed, a bit each.
            free: when the resources are free.
            ends: when each placed job ends.
        """
        reached = list(ends)
        waiting: dict[int, list[tuple[float, float, float]]] = {}
        for job, at in enumerate(self.resources):
            if done >> job & 1:
                continue
            head = free[at] if free[at] > free[0] else free[0]
            for other in self.before[job]:
                if reached[other] > head:
                    head = reached[other]
            reached[job] = head + self.seconds[job]
            waiting.setdefault(at, []).append((head, self.seconds[job], self.tails[job]))
        return max([*free, *ends, *(preemptive(jobs) for jobs in waiting.values())])


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
    coming = sorted(jobs)
    running: list[tuple[float, float]] = []
    """Jobs that may run: (-tail, seconds left)."""
    now = latest = 0.0
    at = 0
    while at < len(coming) or running:
        if not running and coming[at][0] > now:
            now = coming[at][0]
        while at < len(coming) and coming[at][0] <= now:
            heapq.heappush(running, (-coming[at][2], coming[at][1]))
            at += 1
        tail, left = heapq.heappop(running)
        until = coming[at][0] if at < len(coming) else float("inf")
        if now + left <= until:
            now += left
            latest = max(latest, now - tail)
        else:
            heapq.heappush(running, (tail, left - (until - now)))
            now = until
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
