"""`ProfiledSimulator`: programs on a machine that was profiled, with the costs that tasks have for its host.

Rows, links and the order of events are the simulator's own (`simulate.py`); what is put in place of its assumptions is the
processor time of every task, its messages and its bytes, stretched where ranks share cores. Two effects depend on when
things happen, so every program is simulated twice: a link that was idle lets its first kilobytes through at once, and
the transport's own threads take their part of the cores while it carries something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.cost.compute import Rates, compute_seconds, rates_of
from moesaic.cost.events import Events, Graph, graph_of
from moesaic.cost.movement import AbstractVolumes, Movement, movements_of
from moesaic.cost.profile import ClusterProfile
from moesaic.cost.profile_host import FEATURES, costs_vector, host_features, is_lossy, layer_features
from moesaic.cost.simulate import Simulated, Simulator
from moesaic.cost.workload import Workload
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Op, Program, Slot, Task

MOST_TAKEN = 0.5
"""Of the cores, by the transport's own threads: above this share the issuing threads would not slow down further."""
Movements = list[list[Movement]]
"""Of each task."""


@dataclass(frozen=True)
class Asked:
    """What a program asks of a machine."""

    volumes: AbstractVolumes
    movements: Movements
    features: np.ndarray
    """(tasks, actors, features), see `FEATURES`."""


class ProfiledSimulator(Simulator):
    """Predicts times on a profiled machine; takes the place of a simulator wherever one is asked for.

    Args:
        profile: what was measured.
        nodes: of the same kind; None for as many as were measured.
        virtual_flops: operations per second of virtual accelerators, which take no processor time; None: experts multiply.

    Raises:
        InputError: if there are several nodes and the profile is of one.
    """

    def __init__(
        self, profile: ClusterProfile, *, nodes: int | None = None, virtual_flops: float | None = None
    ) -> None:
        super().__init__(profile.to_cluster(nodes))
        self.profile, self._virtual_flops = profile, virtual_flops
        self._costs = costs_vector(profile.host, with_transport=False)

    @property
    def around_seconds(self) -> float:
        """What a layer's forward and backward pass take outside its programs: routing, the exchange of counts, autograd."""
        return float(layer_features() @ self._costs) * self.profile.host.sharing

    def asked(self, program: Program, workload: Workload, grid: Grid, *, sizes: CallSizes | None = None) -> Asked:
        """Return what a program asks of host and links; arguments as of `Simulator.run`."""
        return _asked(program, self.volumes(program, workload, grid, sizes=sizes))

    def program_seconds(
        self, program: Program, workload: Workload, grid: Grid, *, sizes: CallSizes | None = None
    ) -> float:
        """Return how long a program takes, forward or backward, until the last rank has ended."""
        if not program.tasks:
            return 0.0
        volumes = self.volumes(program, workload, grid, sizes=sizes)
        return float(self._events(program, workload, volumes)[0].ends.max())

    def layer_seconds(self, forward: Program, backward: Program, workload: Workload, grid: Grid) -> float:
        """Return how long a layer takes, routing, forward and backward pass.

        Args:
            forward, backward: of a compiled plan.
            workload: of the layer, even routing.
            grid: of the compiled plan.
        """
        return self.around_seconds + sum(self.program_seconds(each, workload, grid) for each in (forward, backward))

    def _simulate(self, program: Program, workload: Workload, volumes: AbstractVolumes) -> Simulated:
        """Return the plain simulator's account of links and lanes, at the times of the profiled machine.

        A link is taken for no longer than the program runs: its first kilobytes may be free. What the one thread of a rank
        does counts as computing.
        """
        plain = super()._simulate(program, workload, volumes)
        if not program.tasks:
            return plain
        events, thread = self._events(program, workload, volumes)
        ends = events.ends.max(axis=0)
        last, most = int(ends.argmax()), float(ends.max())
        spans = tuple(
            replace(span, start=float(start), end=float(end))
            for span, start, end in zip(plain.timeline.spans, events.starts[:, last], events.ends[:, last])
        )
        return Simulated(
            timeline=replace(plain.timeline, spans=spans),
            ends=ends,
            compute_seconds=min(float(thread.sum(axis=0).max()), most),
            link_seconds={name: min(seconds, most) for name, seconds in plain.link_seconds.items()},
            lane_seconds={name: min(seconds, most) for name, seconds in plain.lane_seconds.items()},
        )

    def _events(self, program: Program, workload: Workload, volumes: AbstractVolumes) -> tuple[Events, np.ndarray]:
        """Return the program's events, and the seconds that each task takes of its rank's thread, (tasks, actors)."""
        asked = _asked(program, volumes)
        issue = asked.features @ self._costs * self.profile.host.sharing
        slots = {slot.name: slot for slot in program.slots}
        compute = np.array([self._computing(task, slots, volumes, workload.dtype) for task in program.tasks])
        graph = graph_of(program, host_runs_compute=True)
        first = _run(graph, issue, compute, asked.movements)
        busy = _busy(first, asked.movements)
        issue = issue * self._stretch(first, asked, issue, busy)
        return _run(graph, issue, compute, self._early(first, asked, issue)), issue + compute

    def _computing(self, task: Task, slots: Mapping[str, Slot], volumes: AbstractVolumes, dtype: str) -> np.ndarray:
        """Return the seconds of products, and of codecs that lose precision, (actors,); the rest is the host's."""
        if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
            return compute_seconds(task, slots, volumes, self._rates(dtype))
        if not is_lossy(task, slots):
            return np.zeros(volumes.num_actors)
        rates, both_ways = self._rates(dtype), self.profile.codecs.get(task.codec, 0.0)
        if both_ways and self._virtual_flops is None:
            rates = replace(rates, codec=2 * both_ways / self.profile.host.sharing)
        return compute_seconds(task, slots, volumes, rates)

    def _rates(self, dtype: str) -> Rates:
        if self._virtual_flops is None:
            return rates_of(self.cluster, dtype)
        return Rates(flops=self._virtual_flops, rows=(1.0,), share=(1.0,), memory=float("inf"), codec=None)

    def _stretch(self, first: Events, asked: Asked, issue: np.ndarray, busy: np.ndarray) -> float:
        """Return how much longer the host's work takes because the transport's threads want the cores too."""
        carried = float((busy[:, 1] - busy[:, 0]).sum())
        wanted = (
            asked.features[:, :, FEATURES.index("transport_byte")].sum(axis=0).max() * self.profile.host.transport_byte
        )
        if not carried or not issue.any():
            return 1.0
        taken = min(wanted * self.profile.host.sharing / carried, MOST_TAKEN)
        starts, spent = first.starts[:, 0], issue[:, 0]
        meanwhile = sum(_overlap(start - length, start, busy) for start, length in zip(starts, spent))
        return 1 + meanwhile / float(spent.sum()) * taken / (1 - taken)

    def _early(self, first: Events, asked: Asked, issue: np.ndarray) -> Movements:
        """Return the movements, those shortened before which their links were idle.

        Of ranks that share a core the first has done its host work while the others still wait for the core, and what it
        exchanges with other cores' first ranks travels meanwhile.
        """
        names, sharing = asked.volumes.topology.names, max(self.profile.host.sharing, 1.0)
        last: dict[int, float] = {}
        order = sorted(
            (float(first.starts[number, moved.actors[0]]), number, part)
            for number, parts in enumerate(asked.movements)
            for part, moved in enumerate(parts)
        )
        found = [list(parts) for parts in asked.movements]
        for start, number, part in order:
            moved = asked.movements[number][part]
            links, actor = moved.load.links.tolist(), moved.actors[0]
            since = max((last.get(link, 0.0) for link in links), default=0.0)
            last.update(dict.fromkeys(links, float(first.ends[number, actor])))
            inside = all(names[link].startswith("inside") for link in links)
            credit = min((self.profile.inside if inside else self.profile.outside).credit_seconds, start - since)
            worked = self._worked(first, issue[:, actor], since, start, actor)
            less = _ahead(moved.load.seconds, worked, round(sharing)) + max(credit, 0.0)
            seconds = np.maximum(moved.load.seconds - less, 1e-9)
            found[number][part] = replace(moved, load=replace(moved.load, seconds=seconds))
        return found

    @staticmethod
    def _worked(first: Events, issue: np.ndarray, since: float, until: float, actor: int) -> float:
        """Return the host's work in an interval, tasks being issued just before they start."""
        starts = first.starts[:, actor]
        return float(np.maximum(np.minimum(starts, until) - np.maximum(starts - issue, since), 0.0).sum())


def _asked(program: Program, volumes: AbstractVolumes) -> Asked:
    movements = movements_of(program, volumes)
    return Asked(volumes, movements, host_features(program, volumes, movements))


def _run(graph: Graph, issue: np.ndarray, compute: np.ndarray, movements: Sequence[Sequence[Movement]]) -> Events:
    events = Events(graph, issue, compute, movements)
    events.run()
    return events


def _busy(events: Events, movements: Movements) -> np.ndarray:
    """Return when anything moves, (n, 2) seconds, apart and ascending."""
    spans = sorted((float(events.starts[n, 0]), float(events.ends[n, 0])) for n, parts in enumerate(movements) if parts)
    merged: list[list[float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged).reshape(-1, 2)


def _overlap(start: float, end: float, spans: np.ndarray) -> float:
    """Return how much of an interval lies in spans."""
    return float(np.maximum(np.minimum(spans[:, 1], end) - np.maximum(spans[:, 0], start), 0.0).sum())


def _ahead(carried: np.ndarray, worked: float, ranks: int) -> np.ndarray:
    """Return how much of a movement is over when the last of the ranks that share a core has issued its part.

    A message needs both its ends: when k ranks of every core have done their host work, (k / ranks)^2 of all messages can
    travel. The link ends at the latest of: one of these moments, and what becomes free then or later.

    Args:
        carried: (links,) seconds that the movement takes each link.
        worked: seconds of host work of all ranks of a core, one after the other, before it.
        ranks: that share a core.
    """
    moments = worked / ranks * np.arange(1, ranks + 1)
    later = 1 - (np.arange(ranks) / ranks) ** 2
    ends = (moments[None, :] + carried[:, None] * later[None, :]).max(axis=1)
    return np.maximum(worked + carried - ends, 0.0)
