"""`timed`: predicts when a program's tasks run on a cluster, given their rows and messages.

The simulator (`simulator.py`) derives the rows and messages. An actor is a rank that is simulated:
every rank, or one that stands for all. A lane runs its tasks one after the other: computation, or
movements inside nodes, or those between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.compute import compute_seconds, rates_of
from moesaic.planner.events import Events, graph_of
from moesaic.planner.movement import AbstractVolumes, Movement, movements_of
from moesaic.program.joined_messages import bundles
from moesaic.program.task import Lane, Program
from moesaic.program.timeline import Span, Timeline, chunk_of


@dataclass(frozen=True)
class Simulated:
    """The simulated run of a program on a cluster."""

    program: Program
    """The program that ran."""
    spans: np.ndarray
    """(2, tasks) start and end of each task on the rank that ends last."""
    ends: np.ndarray
    """(actors,) seconds until each rank has ended; one entry if one rank stands for all."""
    compute_seconds: float
    """Seconds of computation of the rank that computes most."""
    link_seconds: dict[str, float]
    """Seconds for which each link is busy at its full rate, by name; unused links are left out."""
    lane_seconds: dict[str, float]
    """Seconds of a rank's movements on each lane, one after the other, start-up included, if
    nothing else uses their links; of the busiest rank."""

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the rank that ends last."""
        slots = {slot.name: slot for slot in self.program.slots}
        spans = [
            Span(task.name, task.lane, chunk_of(task, slots), task.stage, float(start), float(end))
            for task, start, end in zip(self.program.tasks, *self.spans)
        ]
        return Timeline(self.program.name, tuple(spans))

    @cached_property
    def seconds(self) -> float:
        """Seconds until the last rank has ended."""
        return float(self.ends.max())

    @property
    def communication_seconds(self) -> float:
        """Lower bound on the seconds of the movements alone: the busiest link or lane."""
        return max([0.0, *self.link_seconds.values(), *self.lane_seconds.values()])

    @property
    def limit(self) -> float:
        """Lower bound on the seconds of any order of these tasks: the movements, or the computation
        of the busiest rank."""
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def bottleneck(self) -> str:
        """Name of what sets `limit`: "compute", a link, or, if no link is busy for long enough, the
        start-up costs of a lane."""
        if self.compute_seconds >= self.communication_seconds:
            return "compute"
        link = max(self.link_seconds, key=lambda name: self.link_seconds[name], default="")
        lane = max(self.lane_seconds, key=lambda name: self.lane_seconds[name])
        # a link that is busy for half of the lane's time sets the limit, rather than start-up costs
        if link and self.link_seconds[link] >= 0.5 * self.lane_seconds[lane]:
            return link
        return f"start-up on lane {lane}"


def timed(
    cluster: ClusterSpec, program: Program, volumes: AbstractVolumes, dtype: str
) -> Simulated:
    """Simulate a program.

    Args:
        cluster: rates of devices and links, and the host's costs per task and message.
        program: forward or backward, in the order of issue.
        volumes: rows and messages of its tasks.
        dtype: of the products.
    """
    costs = costs_of(cluster, program, volumes, dtype)
    events = events_of(cluster, program, costs)
    computes = np.array([task.lane is Lane.COMPUTE for task in program.tasks], dtype=bool)
    computing = costs.compute[computes].sum(axis=0)
    return account(program, volumes, costs.movements, events, computing)


@dataclass(frozen=True)
class Costs:
    """What the tasks of a program take."""

    issue: np.ndarray
    """(tasks, actors) seconds of the issuing thread."""
    compute: np.ndarray
    """(tasks, actors) seconds of computation; of movements, of the copies around them."""
    movements: list[list[Movement]]
    """Of each task."""


def costs_of(cluster: ClusterSpec, program: Program, volumes: AbstractVolumes, dtype: str) -> Costs:
    """Return what the tasks of a program take; arguments as of `timed`."""
    slots = {slot.name: slot for slot in program.slots}
    rates = rates_of(cluster, dtype)
    host = cluster.host
    shape = (len(program.tasks), volumes.num_actors)
    by_task = [compute_seconds(task, slots, volumes, rates) for task in program.tasks]
    compute = np.array(by_task).reshape(shape)
    speeds = np.array(cluster.speeds)
    topology = volumes.topology
    if len(speeds) and volumes.num_actors == topology.world:
        # The rates are the slowest device's; speeds are of all devices, or of each node's.
        devices = topology.devices_of(np.arange(topology.world))
        compute *= speeds.min() / speeds[devices % len(speeds)]

    issue = np.full(shape, host.task_us * 1e-6)
    movements = movements_of(program, volumes)
    # of movements that the executor sends as one message, only the first one posts any
    in_earlier_message = {number for bundle in bundles(program) for number in bundle[1:]}
    for number, of_task in enumerate(movements):
        if number in in_earlier_message:
            continue
        for movement in of_task:
            issue[number, list(movement.actors)] += movement.posts * host.message_us * 1e-6
    return Costs(issue, compute, movements)


def events_of(cluster: ClusterSpec, program: Program, costs: Costs) -> Events:
    """Return the run of a program whose tasks take some costs."""
    is_eager = cluster.host.messages == "eager"
    graph = graph_of(program, host_runs_compute=cluster.host.runs_compute, has_lanes=not is_eager)
    events = Events(graph, costs.issue, costs.compute, costs.movements, queues=is_eager)
    events.run()
    if cluster.device.contention:
        # each actor's run is longer by a share of the time in which it computes and moves at once
        computing = np.array([task.lane is Lane.COMPUTE for task in program.tasks], dtype=bool)
        moving = np.array([bool(moved) for moved in costs.movements], dtype=bool)
        events.stretch(1 + cluster.device.contention * events.shared_part(computing, moving))
    return events


def account(
    program: Program,
    volumes: AbstractVolumes,
    movements: list[list[Movement]],
    events: Events,
    computing: np.ndarray,
) -> Simulated:
    """Summarize the events of a program after their run.

    Args:
        program: the program that ran.
        volumes: rows and messages of its tasks.
        movements: of each task.
        events: after the run.
        computing: (actors,) seconds that each actor computes.
    """
    ends = events.ends.max(axis=0) if len(program.tasks) else np.zeros(volumes.num_actors)
    last = int(ends.argmax())
    return Simulated(
        program=program,
        spans=np.array([events.starts[:, last], events.ends[:, last]]),
        ends=ends,
        compute_seconds=float(computing.max(initial=0.0)),
        link_seconds=_links(volumes, movements),
        lane_seconds=_lanes(program, volumes, movements),
    )


def _links(volumes: AbstractVolumes, movements: list[list[Movement]]) -> dict[str, float]:
    """Return the total seconds for which each link is busy, by its name; only links in use."""
    busy = np.zeros(volumes.topology.num_links)
    for of_task in movements:
        for movement in of_task:
            busy[movement.load.links] += movement.load.seconds
    names = volumes.topology.names
    return {names[link]: float(busy[link]) for link in np.flatnonzero(busy).tolist()}


def _lanes(
    program: Program, volumes: AbstractVolumes, movements: list[list[Movement]]
) -> dict[str, float]:
    """Return the seconds of each lane's movements one after the other, on the rank with the largest
    sum."""
    spent: dict[str, np.ndarray] = {}  # by lane, (actors,)
    for task, of_task in zip(program.tasks, movements):
        for movement in of_task:
            lane = spent.setdefault(task.lane.value, np.zeros(volumes.num_actors))
            lane[list(movement.actors)] += movement.load.alone
    return {lane: float(seconds.max()) for lane, seconds in spent.items()}
