"""Discrete-event simulation of a program: when each task runs on each actor.

The rules of issue are those of `lay_out` in `program/timeline.py`. One thread issues tasks in list
order, a lane runs its tasks one after the other, and a task waits for the slots that it reads. In
addition, a movement starts when all its members have reached it, and takes longer while other
movements use its links. If no two movements share a link, every actor's spans equal those of
`lay_out`.

Movements that share links run max-min fair among their messages, and no link idles that a movement
could use. A movement is one fluid: its messages advance in proportion, and alone it runs at speed
1, with its slowest link full. If a link is oversubscribed, each of its messages gets an equal part,
as the connections of one TCP link do, unless its movement needs less (progressive filling:
Bertsekas and Gallager, Data Networks, section 6.5.2). Messages are counted, not movements, so the
shares do not depend on how messages are grouped into movements.

A separate message (`Movement.sender`) starts when its sender reaches it, and only its receiver
waits for it. Its links may be queues: each serves messages in order of arrival and forwards a
message while it is still coming in. So does the shaped link of a machine whose senders hand whole
messages to the kernel.

An actor is a rank that is simulated. A node is the issue or the run of one task (`Graph`), and a
flow a movement in progress. "Parts" of a task are its movements, by their place in its list.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from moesaic.planner.movement import Movement
from moesaic.planner.topology import Use
from moesaic.program.task import Lane, Program

_END = 0
_FLOW = 1
_ARRIVED = 2
"""Kinds of events: a node ends; a movement's first byte reaches a link; its last byte has
arrived."""


@dataclass(frozen=True)
class Graph:
    """Dependencies of a program, equal on all ranks. Node k issues task k; node tasks + k runs
    it."""

    after: tuple[tuple[int, ...], ...]
    """By node, the nodes that wait for it."""
    waits: tuple[int, ...]
    """By node, the number of nodes that it waits for."""


@lru_cache(maxsize=256)
def graph_of(program: Program, *, host_runs_compute: bool, has_lanes: bool = True) -> Graph:
    """Return the dependency graph of a program.

    Args:
        program: in the order of issue.
        host_runs_compute: whether the issuing thread also computes, as in `lay_out`.
        has_lanes: whether a lane runs its movements one after the other.
    """
    tasks = program.tasks
    count = len(tasks)
    before: list[set[int]] = [set() for _ in range(2 * count)]
    """By node, the nodes that it waits for."""
    writer: dict[str, int] = {}
    """By slot, the node that writes it."""
    last_on_lane: dict[Lane, int] = {}
    """By lane, the node that runs its last task so far."""
    thread_is_free: int | None = None
    """The node after which the thread issues the next task."""
    for issue, task in enumerate(tasks):  # node `issue` issues the task, and node `run` runs it
        run = count + issue
        # the nodes that write what the task reads; inputs of the program have none
        written = {writer[name] for name in task.reads if name in writer}
        # whether the issuing thread itself runs the task, and issues no other meanwhile
        on_thread = task.lane is Lane.HOST or (host_runs_compute and task.lane is Lane.COMPUTE)
        if thread_is_free is not None:
            before[issue].add(thread_is_free)
        if host_runs_compute or task.lane is Lane.HOST:  # the thread itself waits for the slots
            before[issue] |= written
        before[run] |= written | {issue}
        if not on_thread:
            if task.lane in last_on_lane and (has_lanes or task.lane is Lane.COMPUTE):
                before[run].add(last_on_lane[task.lane])
            last_on_lane[task.lane] = run
        thread_is_free = run if on_thread else issue
        for name in task.writes:
            writer[name] = run

    after: list[list[int]] = [[] for _ in range(2 * count)]
    for node, required in enumerate(before):
        for required_node in required:
            after[required_node].append(node)
    num_waits = [len(required) for required in before]
    return Graph(tuple(map(tuple, after)), tuple(num_waits))


@dataclass
class _Flow:
    """A movement in progress."""

    task: int
    waiting: tuple[int, ...]
    """As in `Movement`."""
    use: Mapping[int, Use]
    """By link, the movement's demand for it: the part of the link that it uses at speed 1, and the
    number of messages that share this part."""
    left: float
    """Seconds at speed 1 that remained at `since`."""
    since: float = 0.0
    """When `speed` changed last."""
    speed: float = 0.0
    """0 to 1."""
    version: int = 0
    """Number of the last event that ends it; earlier ones are void."""
    through: float = 0.0
    """Time at which the last byte has passed the links so far, if links are queues."""


@dataclass
class _Links:
    """The movements on each link, and the demand for it."""

    on: dict[int, set[int]] = field(default_factory=dict)
    """By link, the numbers of the movements that use it."""
    demand: dict[int, float] = field(default_factory=dict)
    """By link, the sum of the parts that these use at speed 1."""

    def enter(self, number: int, use: Mapping[int, Use]) -> None:
        """Add a movement to its links."""
        for link, want in use.items():
            self.on.setdefault(link, set()).add(number)
            self.demand[link] = self.demand.get(link, 0.0) + want.part

    def leave(self, number: int, use: Mapping[int, Use]) -> None:
        """Remove a movement from its links."""
        for link, want in use.items():
            self.on[link].discard(number)
            # an empty link has exactly 0, whatever was rounded before
            self.demand[link] = self.demand[link] - want.part if self.on[link] else 0.0

    def neighbours(
        self, changed: set[int], flows: Mapping[int, _Flow]
    ) -> tuple[set[int], set[int]]:
        """Return the movements on the `changed` links, and those whose speeds depend on theirs.

        Speeds depend on each other through oversubscribed links. A movement without such a link
        runs at speed 1.
        """
        touched = {number for link in changed for number in self.on.get(link, ())}

        def full_links(number: int) -> list[int]:
            """Return the oversubscribed links of a movement."""
            return [link for link in flows[number].use if self.demand[link] > FULL]

        # from oversubscribed link to oversubscribed link, over the movements on them
        links = [link for number in touched for link in full_links(number)]
        seen = set(links)
        contending: set[int] = set()
        while links:
            for number in self.on[links.pop()] - contending:
                contending.add(number)
                for link in full_links(number):
                    if link not in seen:
                        seen.add(link)
                        links.append(link)
        return touched, contending


class Events:
    """One simulated run of a program.

    Args:
        graph: of the program.
        issue: (tasks, actors) seconds of the issuing thread per task.
        compute: (tasks, actors) seconds of computation; for movements, of the copies around them.
        movements: of each task; () for tasks that move nothing.
        queues: whether links are queues: each serves messages in the order of their arrival.
    """

    def __init__(
        self,
        graph: Graph,
        issue: np.ndarray,
        compute: np.ndarray,
        movements: Sequence[Sequence[Movement]],
        *,
        queues: bool = False,
    ) -> None:
        self._graph = graph
        self._movements = movements
        self._tasks, self._actors = compute.shape
        self._issue = issue.tolist()
        self._compute = compute.tolist()
        self._parts_started: list[dict[int, list[int]]] = [{} for _ in movements]
        """By task and actor, the parts that the actor starts."""
        self._awaited: list[dict[int, int]] = [{} for _ in movements]
        """By task and actor, how many events must still come: the actor reaches the task, and each
        part that it waits for arrives."""
        for task, parts in enumerate(movements):
            awaited = self._awaited[task]
            for part, movement in enumerate(parts):
                for actor in movement.starters:
                    self._parts_started[task].setdefault(actor, []).append(part)
                for actor in movement.waiting:
                    # the part, in addition to 1 for the actor itself
                    awaited[actor] = awaited.get(actor, 1) + 1
        self._missing_starters = [
            [len(movement.starters) for movement in parts] for parts in movements
        ]
        """By task and part, the number of starters that have not reached it."""
        self._unmet = [list(graph.waits) for _ in range(self._actors)]
        """By actor and node, the number of nodes that the node still waits for."""
        self._heap: list[tuple[float, int, int, int]] = []
        """Events to come: (time, kind, ...): of `_END` the actor and the node, of `_FLOW` the flow
        and the place of the link on its path, of `_ARRIVED` the flow and its version."""
        self._flows: dict[int, _Flow] = {}
        self._links = _Links()
        self._free: dict[int, float] | None = {} if queues else None
        """By link, when its queue is empty; None if links are no queues."""
        self._num_flows = 0
        """Movements launched so far, which number the flows."""
        self.starts = np.zeros((self._tasks, self._actors))
        """(tasks, actors) time at which each task starts to run on each actor."""
        self.ends = np.zeros((self._tasks, self._actors))
        """(tasks, actors) time at which each task has ended on each actor."""

    def run(self) -> None:
        """Run all events."""
        for actor in range(self._actors):
            for node, waits in enumerate(self._graph.waits):
                if not waits:
                    self._start(0.0, actor, node)
        while self._heap:
            now = self._heap[0][0]
            # links of which the load changes now; speeds follow after all events of this time
            changed: set[int] = set()
            while self._heap and self._heap[0][0] == now:
                _, kind, number, detail = heapq.heappop(self._heap)
                if kind == _END:
                    self._end(now, actor=number, node=detail)
                elif kind == _FLOW:
                    changed |= self._enter(now, number, place=detail)
                # else the last byte arrives, unless the speed has changed since this was predicted
                elif number in self._flows and self._flows[number].version == detail:
                    changed |= self._arrive(now, number)
            if changed:
                self._rate(now, changed)

    def shared_part(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return the share of its time in which each actor runs tasks of both kinds at once,
        (actors,), 0 to 1.

        Args:
            first: (tasks,) whether a task is of the first kind.
            second: (tasks,) whether a task is of the second kind.
        """
        shared = np.zeros(self._actors)
        for actor in range(self._actors):
            edges = np.unique(np.concatenate([self.starts[:, actor], self.ends[:, actor]]))
            if len(edges) < 2 or edges[-1] <= 0:
                continue
            # (intervals, tasks) bool: whether a task runs between two edges, at their middle
            middles = ((edges[1:] + edges[:-1]) / 2)[:, None]
            runs = (self.starts[:, actor] < middles) & (middles < self.ends[:, actor])
            both = runs[:, first].any(axis=1) & runs[:, second].any(axis=1)
            shared[actor] = np.diff(edges)[both].sum() / edges[-1]
        return shared

    def stretch(self, factors: np.ndarray) -> None:
        """Scale all times of each actor by a factor, (actors,)."""
        self.starts *= factors
        self.ends *= factors

    def _start(self, now: float, actor: int, node: int) -> None:
        """Start a node on an actor: the issue of a task, its computation, or the movements for
        which this actor was awaited."""
        task = node - self._tasks
        if task < 0:  # the node issues a task
            heapq.heappush(self._heap, (now + self._issue[node][actor], _END, actor, node))
            return
        self.starts[task, actor] = now
        parts = self._parts_started[task].get(actor, ())
        # events that must come before the task ends, this start and arrivals; 0 if it awaits none
        awaited = self._awaited[task].get(actor, 0)
        for part in parts:
            self._missing_starters[task][part] -= 1
            if not self._missing_starters[task][part]:
                self._launch(now, task, self._movements[task][part])
        if awaited:
            self._end_wait(now, actor, task)
        elif parts:  # the actor only sends, and need not wait for its messages
            self._end(now, actor, node)
        else:
            heapq.heappush(self._heap, (now + self._compute[task][actor], _END, actor, node))

    def _end_wait(self, now: float, actor: int, task: int) -> None:
        """Record that an actor has reached a movement, or that a message for the actor has arrived.
        The last of these ends the task."""
        self._awaited[task][actor] -= 1
        if not self._awaited[task][actor]:
            self._end(now, actor, self._tasks + task)

    def _launch(self, now: float, task: int, movement: Movement) -> None:
        """Let a movement begin after its latency and the copies that its starters make."""
        load = movement.load
        number = self._num_flows
        self._num_flows += 1
        self._flows[number] = _Flow(task, movement.waiting, load.use, left=load.longest)
        copies = max(self._compute[task][member] for member in movement.starters)
        heapq.heappush(self._heap, (now + load.latency + copies, _FLOW, number, 0))

    def _end(self, now: float, actor: int, node: int) -> None:
        """Note that an actor ended a node, and start the nodes that waited for it alone."""
        if node >= self._tasks:
            self.ends[node - self._tasks, actor] = now
        unmet = self._unmet[actor]
        for waiting_node in self._graph.after[node]:
            unmet[waiting_node] -= 1
            if not unmet[waiting_node]:
                self._start(now, actor, waiting_node)

    def _enter(self, now: float, number: int, place: int) -> set[int]:
        """Start a movement on its links, and return the links whose load changed. If links are
        queues, start it on link number `place` of its path only."""
        flow = self._flows[number]
        if self._free is not None:
            self._queue(now, number, place, self._free)
            return set()
        flow.since = now
        flow.speed = 1.0
        self._links.enter(number, flow.use)
        self._push(now, number, flow)
        return set(flow.use)

    def _queue(self, now: float, number: int, place: int, free: dict[int, float]) -> None:
        """Put a message into the queue of link number `place` of its path, or end it behind the
        last link. Its first byte reaches the next link later, and other messages may reach that
        link before.

        Args:
            now: when its first byte reaches the link.
            number: the message's flow.
            place: of the link.
            free: by link, when its queue is empty; is changed.
        """
        flow = self._flows[number]
        if place == len(flow.use):
            heapq.heappush(self._heap, (max(now, flow.through), _ARRIVED, number, flow.version))
            return
        link, want = list(flow.use.items())[place]
        begin = max(now, free.get(link, now))
        # `left` is what the slowest link takes, and `part` this link's share of that
        free[link] = begin + want.part * flow.left
        flow.through = max(flow.through, free[link])
        heapq.heappush(self._heap, (begin, _FLOW, number, place + 1))

    def _arrive(self, now: float, number: int) -> set[int]:
        """End a movement; return the links that it leaves."""
        flow = self._flows.pop(number)
        for actor in flow.waiting:
            self._end_wait(now, actor, flow.task)
        if self._free is not None:
            return set()
        self._links.leave(number, flow.use)
        return set(flow.use)

    def _rate(self, now: float, changed: set[int]) -> None:
        """Update the speeds of the movements that a change on some links affects."""
        touched, contending = self._links.neighbours(changed, self._flows)
        new_speeds = dict.fromkeys(touched, 1.0)
        if contending:
            numbers = sorted(contending)
            shared_speeds = speeds([self._flows[number].use for number in numbers])
            new_speeds.update(zip(numbers, shared_speeds))
        for number in sorted(new_speeds):
            flow = self._flows[number]
            if abs(flow.speed - new_speeds[number]) > 1e-12:
                flow.left -= (now - flow.since) * flow.speed
                flow.since = now
                flow.speed = new_speeds[number]
                self._push(now, number, flow)

    def _push(self, now: float, number: int, flow: _Flow) -> None:
        """Predict the end of a movement at its present speed, in place of earlier predictions."""
        flow.version += 1
        # a movement that stands still ends far in the future, until its speed changes
        end = now + max(flow.left, 0.0) / max(flow.speed, 1e-12)
        heapq.heappush(self._heap, (end, _ARRIVED, number, flow.version))


FULL = 1.0 + 1e-9
"""Demand above which a link is oversubscribed; sums in another order differ by less than the
margin."""


def speeds(uses: Sequence[Mapping[int, Use]]) -> list[float]:
    """Return the speed of each of several movements, 0 to 1.

    Args:
        uses: demand of each movement, by link; the part of its slowest link is 1.
    """
    users: dict[int, list[int]] = {}  # by link, the movements that use it
    demand: dict[int, float] = {}  # by link, the sum of their parts
    for number, use in enumerate(uses):
        for link, want in use.items():
            users.setdefault(link, []).append(number)
            demand[link] = demand.get(link, 0.0) + want.part
    oversubscribed: dict[int, _Contested] = {}
    for link, numbers in users.items():
        if demand[link] > FULL:
            oversubscribed[link] = _Contested({number: uses[number][link] for number in numbers})
    contested_links = [[link for link in use if link in oversubscribed] for use in uses]

    # Fix the slowest movement's speed, which lets others run faster, and so on. The queue has
    # (speed that a link allows a movement, link, movement, version of the link).
    settled = [1.0] * len(uses)
    queue = []
    for number, links_used in enumerate(contested_links):
        for link in links_used:
            queue.append((oversubscribed[link].speed(number), link, number, 0))
    heapq.heapify(queue)
    fixed: set[int] = set()
    while queue:
        speed, link, number, version = heapq.heappop(queue)
        if speed >= 1.0:  # no link slows the others
            break
        if number in fixed:
            continue
        contested = oversubscribed[link]
        if version != contested.version:  # the link allows more by now
            heapq.heappush(queue, (contested.speed(number), link, number, contested.version))
            continue
        settled[number] = speed
        fixed.add(number)
        for other_link in contested_links[number]:
            oversubscribed[other_link].take(number, speed)
    return _fill_up(uses, contested_links, settled)


class _Contested:
    """An oversubscribed link, while speeds are fixed one movement after the other, slowest first.

    Args:
        wants: demand of each movement for the link.
    """

    def __init__(self, wants: dict[int, Use]) -> None:
        self._wants = wants
        self._spare = 1.0
        """Part of the link that the movements whose speed is fixed leave."""
        self._level: float | None = None
        """`_level` of the others; None if it must be computed anew."""
        self.version = 0
        """Incremented when a movement's speed is fixed, after which the others may run faster on
        this link."""

    def speed(self, number: int) -> float:
        """Return the speed that this link allows a movement, given the speeds fixed so far."""
        if self._level is None:
            self._level = _level(list(self._wants.values()), self._spare)
        want = self._wants[number]
        return min(1.0, self._level * want.messages / want.part)

    def take(self, number: int, speed: float) -> None:
        """Fix a movement's speed."""
        self._spare -= speed * self._wants.pop(number).part
        self._level = None
        self.version += 1


def _level(wants: list[Use], spare: float) -> float:
    """Return the largest part of a link that any message gets, if each movement gets its demand up
    to that limit; infinity if all of their demand fits.

    Args:
        wants: demand of the movements whose speed is not fixed.
        spare: part of the link that is left for them.
    """
    unused = max(spare, 0.0)
    messages = sum(use.messages for use in wants)
    # those that want least per message first; what they leave is shared by the others
    for use in sorted(wants, key=lambda use: use.part / use.messages):
        equal = unused / messages
        if use.part > equal * use.messages:
            return equal
        unused -= use.part
        messages -= use.messages
    return float("inf")


def _fill_up(
    uses: Sequence[Mapping[int, Use]], contested_links: list[list[int]], settled: list[float]
) -> list[float]:
    """Distribute what is left on every oversubscribed link to the movements that can use it,
    slowest first; returns the speeds.

    Args:
        uses: as in `speeds`.
        contested_links: oversubscribed links of each movement.
        settled: speed of each movement so far; is changed.
    """
    spare: dict[int, float] = {}  # by link, the part of it that is left
    for number, links_used in enumerate(contested_links):
        for link in links_used:
            spare[link] = spare.get(link, 1.0) - settled[number] * uses[number][link].part
    for number in sorted(range(len(uses)), key=lambda number: (settled[number], number)):
        use = uses[number]
        # by how much each link lets the movement's speed grow
        rooms = [spare[link] / use[link].part for link in contested_links[number]]
        more = min(1.0 - settled[number], min(rooms, default=1.0))
        if more > 0:
            settled[number] += more
            for link in contested_links[number]:
                spare[link] -= more * use[link].part
    return settled
