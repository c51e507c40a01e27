"""`simulate`: when each task of a program runs on a cluster. Needs no torch.

The program is the one that the executor runs, and its rows come from the same layouts and paths. Under an even workload one
rank stands for all (`even.py`), so the number of ranks costs nothing; with counts, every rank runs apart (`counted.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moesaic.cost.call_sizes import chunks_of, node_tokens_per_node, sizes_of
from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.compute import compute_seconds, rates_of
from moesaic.cost.counted import Counted
from moesaic.cost.even import Even, PieceRows
from moesaic.cost.events import Events, graph_of
from moesaic.cost.hops import HopPaths
from moesaic.cost.movement import AbstractVolumes, Movement, movements_of
from moesaic.cost.symmetry import UnlikeError
from moesaic.cost.topology import Topology, check_fit
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.program.bundles import bundles
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Lane, Program
from moesaic.program.timeline import Span, Timeline, chunk_of

MAX_RANKS_APART = 512
"""Ranks that are simulated apart at most where they cannot stand for one another."""


@dataclass(frozen=True)
class Simulated:
    """A program laid out in time on a cluster."""

    timeline: Timeline
    """Of the rank that ends last."""
    ends: np.ndarray
    """(actors,) seconds until each rank has ended; one entry if one stands for all."""
    compute_seconds: float
    """Computing of the rank that computes most."""
    link_seconds: dict[str, float]
    """Seconds that links are taken at their full rate, by name; those that are not used left out."""
    lane_seconds: dict[str, float]
    """Seconds that a rank's movements take one after the other on each lane, start-up included, if nothing else uses
    their links; of the busiest rank."""

    @property
    def seconds(self) -> float:
        """Until the last rank has ended."""
        return float(self.ends.max())

    @property
    def communication_seconds(self) -> float:
        """Seconds below which the movements alone cannot go: those of the busiest link or lane."""
        return max([0.0, *self.link_seconds.values(), *self.lane_seconds.values()])

    @property
    def limit(self) -> float:
        """Seconds below which no order of these tasks can go: the movements', or the busiest rank's computing."""
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def bottleneck(self) -> str:
        """What sets the limit: "compute", a link's name, or where no link is full for long enough, a lane's start-up."""
        if self.compute_seconds >= self.communication_seconds:
            return "compute"
        link = max(self.link_seconds, key=lambda name: self.link_seconds[name], default="")
        lane = max(self.lane_seconds, key=lambda name: self.lane_seconds[name])
        return link if link and self.link_seconds[link] >= 0.5 * self.lane_seconds[lane] else f"start-up on lane {lane}"


def simulate(
    program: Program, workload: Workload, cluster: ClusterSpec, grid: Grid, *, sizes: CallSizes | None = None
) -> Timeline:
    """Simulate a program; returns the timeline of the rank that ends last.

    Args:
        program: forward or backward, in the order of issue.
        workload: of the layer; even routing unless `sizes` says otherwise.
        cluster: what it runs on.
        grid: the mesh, etp factored as the plan wants it.
        sizes: of a call with counts; every rank is then simulated apart.

    Raises:
        InputError: if the mesh does not fit the cluster, or the dtype's rate is not known.
    """
    return Simulator(cluster).run(program, workload, grid, sizes=sizes).timeline


class _Key(NamedTuple):
    """What an even workload's rows depend on."""

    grid: Grid
    workload: Workload
    chunks: int
    redundant: bool
    apart: bool


class Simulator:
    """Simulates many programs on one cluster; what does not depend on the plan is worked out once.

    Args:
        cluster: what they run on.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self._topologies: dict[tuple[int, int | None, int | None], Topology] = {}
        self._even: dict[_Key, AbstractVolumes] = {}
        self._paths: dict[tuple[object, ...], HopPaths] = {}

    def run(self, program: Program, workload: Workload, grid: Grid, *, sizes: CallSizes | None = None) -> Simulated:
        """Simulate a program; see `simulate`."""
        return self._simulate(program, workload, self.volumes(program, workload, grid, sizes=sizes))

    def volumes(
        self, program: Program, workload: Workload, grid: Grid, *, sizes: CallSizes | None = None
    ) -> AbstractVolumes:
        """Return the rows and messages of a program; arguments as of `run`."""
        if sizes is not None:
            return self._counted(sizes, workload)
        try:
            volumes = self._even_volumes(program, workload, grid)
            movements_of(program, volumes)
        except UnlikeError as error:
            return self._each_rank(program, workload, grid, error)
        return volumes

    def _each_rank(self, program: Program, workload: Workload, grid: Grid, error: UnlikeError) -> AbstractVolumes:
        """Return even rows with every rank apart, for meshes and all-to-alls in which none stands for the others."""
        if grid.world > MAX_RANKS_APART:
            raise InputError(
                f"a mesh of {grid.world} ranks in which {error} cannot be simulated by one rank for all, and is too "
                f"large to simulate each: choose {error.advice}, or at most {MAX_RANKS_APART} ranks"
            ) from error
        return self._counted(sizes_of(program, workload, grid), workload)

    def _simulate(self, program: Program, workload: Workload, volumes: AbstractVolumes) -> Simulated:
        slots = {slot.name: slot for slot in program.slots}
        rates, host = rates_of(self.cluster, workload.dtype), self.cluster.host
        actors = volumes.num_actors
        compute = np.array([compute_seconds(task, slots, volumes, rates) for task in program.tasks])
        compute = compute.reshape(len(program.tasks), actors)
        issue = np.full((len(program.tasks), actors), host.task_us * 1e-6)
        movements = movements_of(program, volumes)
        in_a_message = {number for bundle in bundles(program) for number in bundle[1:]}
        for number, parts in enumerate(movements):
            for moved in parts if number not in in_a_message else ():
                issue[number, list(moved.actors)] += moved.posts * host.message_us * 1e-6
        events = Events(graph_of(program, host_runs_compute=host.runs_compute), issue, compute, movements)
        events.run()
        ends = events.ends.max(axis=0) if len(program.tasks) else np.zeros(actors)
        last = int(ends.argmax())
        spans = tuple(
            Span(task.name, task.lane, chunk_of(task, slots), task.stage, float(start), float(end))
            for task, start, end in zip(program.tasks, events.starts[:, last], events.ends[:, last])
        )
        computing = [task.lane is Lane.COMPUTE for task in program.tasks]
        return Simulated(
            timeline=Timeline(program.name, spans),
            ends=ends,
            compute_seconds=float(compute[computing].sum(axis=0).max(initial=0.0)),
            link_seconds=_links(volumes, movements),
            lane_seconds=_lanes(program, volumes, movements),
        )

    def _topology(self, grid: Grid, block: int | None) -> Topology:
        key = (grid.world, grid.ranks_per_node, block)
        if key not in self._topologies:
            self._topologies[key] = Topology(self.cluster, grid.world, grid.ranks_per_node, block=block)
        return self._topologies[key]

    def _block(self, grid: Grid, apart: bool) -> int:
        """Return how many ranks stand for all: a node's; with ranks told apart, those behind the largest switch."""
        per_node = check_fit(self.cluster, grid.world, grid.ranks_per_node)
        above = [link.devices // self.cluster.devices_per_node * per_node for link in self.cluster.links]
        fitting = [run for run in above if per_node < run <= min(grid.world, MAX_RANKS_APART)]
        return max([per_node, *fitting]) if apart else per_node

    def _counted(self, sizes: CallSizes, workload: Workload) -> AbstractVolumes:
        return Counted(sizes, self._topology(sizes.grid, None), workload.shape)

    def _even_volumes(self, program: Program, workload: Workload, grid: Grid) -> AbstractVolumes:
        apart = any(slot.layout.step is not None for slot in program.slots)
        key = _Key(grid, workload, chunks_of(program), program.is_redundant, apart)
        if key not in self._even:
            piece = piece_rows(workload, grid, key.chunks, key.redundant)
            topology = self._topology(grid, self._block(grid, apart))
            self._even[key] = Even(
                grid, topology, workload.shape, workload.num_experts, piece, self._paths, apart=apart
            )
        return self._even[key]


def piece_rows(workload: Workload, grid: Grid, chunks: int, redundant: bool) -> PieceRows:
    """Return the rows of a piece under even routing."""
    share = 1 if redundant else grid.tp
    nodes = max(1, grid.ep * grid.etp // (grid.ranks_per_node or grid.world))
    return PieceRows(
        copies=workload.copies / workload.num_experts / share,
        tokens=workload.tokens / share,
        node_tokens=node_tokens_per_node(workload, nodes, chunks) / share,
        rank_tokens=node_tokens_per_node(workload, grid.ep, chunks) / share,
        units=workload.hidden / grid.etp,
        chunks=chunks,
    )


def _links(volumes: AbstractVolumes, movements: list[list[Movement]]) -> dict[str, float]:
    """Return the seconds that each link is taken in all."""
    taken = np.zeros(volumes.topology.num_links)
    for moved in (each for parts in movements for each in parts):
        taken[moved.load.links] += moved.load.seconds
    return {volumes.topology.names[link]: float(taken[link]) for link in np.flatnonzero(taken).tolist()}


def _lanes(program: Program, volumes: AbstractVolumes, movements: list[list[Movement]]) -> dict[str, float]:
    """Return the seconds of each lane's movements one after the other, on the rank where that is most."""
    spent: dict[str, np.ndarray] = {}
    for task, parts in zip(program.tasks, movements):
        for moved in parts:
            lane = spent.setdefault(task.lane.value, np.zeros(volumes.num_actors))
            lane[list(moved.actors)] += moved.load.alone
    return {lane: float(seconds.max()) for lane, seconds in spent.items()}
