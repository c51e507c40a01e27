"""`ProfileTiming`: when a program's tasks run on a machine that was profiled, with the costs that they have for its host.

Rows, links and the order of events are the simulator's own (`simulate.py`); what is put in place of its assumptions is the
processor time of every task, its messages and its bytes, stretched where ranks share cores. Two effects depend on when
things happen, so every program is simulated twice: a link that was idle lets its first kilobytes through at once, and
the transport's own threads take their part of the cores while it carries something.

What a program asks of the host is counted task by task (tasks of each kind, messages, bytes), alike for fits and simulations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from moesaic.codecs import name_of
from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.compute import Rates, compute_seconds, rates_of
from moesaic.cost.events import Events, Graph, graph_of
from moesaic.cost.fit import Fit
from moesaic.cost.movement import AbstractVolumes, Movement, movements_of
from moesaic.cost.profile import ClusterProfile, HostCosts
from moesaic.cost.simulate import Simulator
from moesaic.cost.timing import AbstractTiming, Simulated, account, put_known
from moesaic.program.bundles import bundles
from moesaic.program.task import Kind, Op, Program, Slot, Task

FEATURES = tuple(each.name for each in fields(HostCosts) if each.name != "sharing")
"""What costs are counted in."""
_BYTES = Rates(flops=1.0, rows=(1.0,), share=(1.0,), memory=1.0, codec=None)
"""Rates under which "seconds" are bytes."""


def host_features(program: Program, volumes: AbstractVolumes, movements: list[list[Movement]]) -> np.ndarray:
    """Return what each task asks of each actor's host, (tasks, actors, features); features as in `FEATURES`.

    Args:
        program: forward or backward.
        volumes: its rows.
        movements: of each task.
    """
    slots = {slot.name: slot for slot in program.slots}
    waits = _waits(program, movements)
    in_a_message = {number for bundle in bundles(program) for number in bundle[1:]}
    found = np.zeros((len(program.tasks), volumes.num_actors, len(FEATURES)))
    for number, task in enumerate(program.tasks):
        found[number, :, FEATURES.index("task")] = 1
        found[number, :, FEATURES.index("wait")] = waits[number]
        for moved in movements[number]:
            if number not in in_a_message:
                found[number, list(moved.actors), FEATURES.index("message")] += moved.posts
            found[number, list(moved.actors), FEATURES.index("transport_byte")] += _transport_bytes(moved, volumes)
        is_weight = any(slots[name].kind is Kind.WEIGHT for name in task.writes)
        if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
            found[number, :, FEATURES.index("weight_byte")] = _gradient_bytes(task, slots, volumes)
        elif not is_lossy(task, slots):
            touched = compute_seconds(task, slots, volumes, _BYTES)
            found[number, :, FEATURES.index("weight_byte" if is_weight else "byte")] = touched
    return found


def is_lossy(task: Task, slots: Mapping[str, Slot]) -> bool:
    """Whether a task codes rows with a codec; what that takes is measured codec by codec, not per byte."""
    if task.op not in (Op.PACK, Op.UNPACK) or not task.codec:
        return False
    assert task.of is not None
    return slots[task.of[0] if task.op is Op.PACK else task.of[1]].kind is Kind.ROWS


def layer_features() -> np.ndarray:
    """Return what a layer asks of the host besides its programs, (features,)."""
    found = np.zeros(len(FEATURES))
    found[FEATURES.index("layer")] = 1
    return found


def costs_vector(costs: HostCosts, *, with_transport: bool = True) -> np.ndarray:
    """Return the costs of one of each feature, (features,) seconds of processor time.

    Args:
        costs: as measured.
        with_transport: also what the transport's own thread takes per byte, which the issuing thread need not wait for.
    """
    left_out = () if with_transport else ("transport_byte",)
    return np.array([0.0 if name in left_out else getattr(costs, name) for name in FEATURES])


def _transport_bytes(moved: Movement, volumes: AbstractVolumes) -> float:
    """Return the bytes that a rank sends and receives in a movement, the mean over its ranks."""
    topology, total = volumes.topology, 0.0
    for link, seconds in zip(moved.load.links.tolist(), moved.load.seconds.tolist()):
        ends = 2 if topology.names[link].startswith("inside") else 1  # between nodes a message leaves and arrives
        total += ends * seconds / topology.seconds_per_byte[link]
    return total / (topology.block if volumes.num_actors == 1 else len(moved.actors))


def _gradient_bytes(task: Task, slots: Mapping[str, Slot], volumes: AbstractVolumes) -> np.ndarray:
    """Return the bytes of weight gradients that an expert task writes."""
    total = np.zeros(volumes.num_actors)
    shape = volumes.shape
    for name in task.writes:
        slot = slots[name]
        if slot.kind is Kind.WEIGHT and slot.layout.flow == "weights":
            total += volumes.rows(slot.layout) * shape.element_bytes * shape.dim * shape.matrices
    return total


def _waits(program: Program, movements: list[list[Movement]]) -> list[bool]:
    """Return which tasks first need a movement that is further down the chain of movements than any before them."""
    depth: dict[str, int] = {}
    deepest, found = 0, []
    for task, moved in zip(program.tasks, movements):
        needed = max((depth.get(name, 0) for name in task.reads), default=0)
        found.append(needed > deepest)
        deepest = max(deepest, needed)
        depth.update(dict.fromkeys(task.writes, needed + bool(moved)))
    return found


MOST_TAKEN = 0.5
"""Of the cores, by the transport's own threads: above this share the issuing threads would not slow down further."""
Movements = list[list[Movement]]
"""Of each task."""


@dataclass(frozen=True)
class Asked:
    """What a program asks of a machine, whatever its host's costs and its links' latencies and credits are."""

    program: Program
    volumes: AbstractVolumes
    movements: Movements
    features: np.ndarray
    """As of `host_features`."""
    compute: np.ndarray
    """(tasks, actors) seconds of products and codecs."""
    graph: Graph

    def with_latencies(self, inside: float, outside: float) -> Asked:
        """Return the same where links have other latencies, seconds; a movement has those of its slowest way."""
        names = self.volumes.topology.names

        def latency(moved: Movement) -> float:
            kinds = {names[link].startswith("inside") for link in moved.load.links.tolist()}
            return max((inside if kind else outside for kind in kinds), default=0.0)

        moved = [[replace(m, load=replace(m.load, latency=latency(m))) for m in parts] for parts in self.movements]
        return replace(self, movements=moved)


class ProfileTiming(AbstractTiming):
    """Times of a machine that was profiled.

    Args:
        profile: what was measured.
        cluster: links and devices of the profile, as `ClusterProfile.to_cluster` returns them.
        virtual_flops: operations per second of virtual accelerators, which take no processor time; None: experts multiply.
    """

    def __init__(self, profile: ClusterProfile, cluster: ClusterSpec, virtual_flops: float | None = None) -> None:
        self.profile, self._cluster, self._virtual_flops = profile, cluster, virtual_flops
        self._costs = costs_vector(profile.host, with_transport=False)

    @property
    def around_seconds(self) -> float:
        """What a layer's forward and backward pass take outside its programs: routing, the exchange of counts, autograd."""
        return float(layer_features() @ self._costs) * self.profile.host.sharing

    @property
    def collectives(self) -> Mapping[str, Fit]:
        """Lines that the profile has, where the cluster has as many nodes as were measured."""
        return self.profile.collectives if self._cluster.nodes == self.profile.nodes else {}

    @property
    def starts_early(self) -> bool:
        return True

    def run(
        self, program: Program, volumes: AbstractVolumes, dtype: str, known: Mapping[str, float] | None = None
    ) -> Simulated:
        """Return the program laid out in time.

        A link is taken for no longer than the program runs: its first kilobytes may be free. What the one thread of a rank
        does counts as computing.
        """
        asked = self.asked(program, volumes, dtype, known)
        events, issue = self.lay_out(asked)
        most = float(events.ends.max(initial=0.0))
        return account(program, volumes, asked.movements, events, (issue + asked.compute).sum(axis=0), at_most=most)

    def asked(
        self, program: Program, volumes: AbstractVolumes, dtype: str, known: Mapping[str, float] | None = None
    ) -> Asked:
        """Return what a program asks of the machine; arguments as of `run`."""
        movements = movements_of(program, volumes)
        features = host_features(program, volumes, movements)
        slots = {slot.name: slot for slot in program.slots}
        compute = np.array([self._computing(task, slots, volumes, dtype) for task in program.tasks])
        compute = compute.reshape(features.shape[:2])
        put_known(compute, program, known)
        return Asked(program, volumes, movements, features, compute, graph_of(program, host_runs_compute=True))

    def lay_out(self, asked: Asked) -> tuple[Events, np.ndarray]:
        """Return the events of a program that were run, and the seconds of the issuing thread, (tasks, actors)."""
        issue = asked.features @ self._costs * self.profile.host.sharing
        first = _run(asked.graph, issue, asked.compute, asked.movements)
        if asked.program.tasks:
            issue = issue * self._stretch(first, asked.features, issue, _busy(first, asked.movements))
        early = self._early(first, asked.volumes, asked.movements, issue)
        return _run(asked.graph, issue, asked.compute, early), issue

    def _computing(self, task: Task, slots: Mapping[str, Slot], volumes: AbstractVolumes, dtype: str) -> np.ndarray:
        """Return the seconds of products, and of codecs that lose precision, (actors,); the rest is the host's."""
        if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
            return compute_seconds(task, slots, volumes, self._rates(dtype))
        if not is_lossy(task, slots):
            return np.zeros(volumes.num_actors)
        rates, both_ways = self._rates(dtype), self.profile.codecs.get(name_of(task.codec), 0.0)
        if both_ways and self._virtual_flops is None:
            rates = replace(rates, codec=2 * both_ways / self.profile.host.sharing)
        return compute_seconds(task, slots, volumes, rates)

    def _rates(self, dtype: str) -> Rates:
        if self._virtual_flops is None:
            return rates_of(self._cluster, dtype)
        return Rates(flops=self._virtual_flops, rows=(1.0,), share=(1.0,), memory=float("inf"), codec=None)

    def _stretch(self, first: Events, features: np.ndarray, issue: np.ndarray, busy: np.ndarray) -> float:
        """Return how much longer the host's work takes because the transport's threads want the cores too."""
        carried = float((busy[:, 1] - busy[:, 0]).sum())
        wanted = features[:, :, FEATURES.index("transport_byte")].sum(axis=0).max() * self.profile.host.transport_byte
        if not carried or not issue.any():
            return 1.0
        taken = min(wanted * self.profile.host.sharing / carried, MOST_TAKEN)
        starts, spent = first.starts[:, 0], issue[:, 0]
        meanwhile = sum(_overlap(start - length, start, busy) for start, length in zip(starts, spent))
        return 1 + meanwhile / float(spent.sum()) * taken / (1 - taken)

    def _early(self, first: Events, volumes: AbstractVolumes, movements: Movements, issue: np.ndarray) -> Movements:
        """Return the movements, those shortened before which their links were idle.

        Of ranks that share a core the first has done its host work while the others still wait for the core, and what it
        exchanges with other cores' first ranks travels meanwhile.
        """
        names, sharing = volumes.topology.names, max(self.profile.host.sharing, 1.0)
        last: dict[int, float] = {}
        order = sorted(
            (float(first.starts[number, moved.actors[0]]), number, part)
            for number, parts in enumerate(movements)
            for part, moved in enumerate(parts)
        )
        found = [list(parts) for parts in movements]
        for start, number, part in order:
            moved = movements[number][part]
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


def profiled_simulator(
    profile: ClusterProfile, *, nodes: int | None = None, virtual_flops: float | None = None
) -> Simulator:
    """Return a simulator of a profiled machine.

    Args:
        profile: what was measured.
        nodes: of the same kind; None for as many as were measured.
        virtual_flops: as for `ProfileTiming`.

    Raises:
        InputError: if there are several nodes and the profile is of one.
    """
    cluster = profile.to_cluster(nodes)
    return Simulator(cluster, timing=ProfileTiming(profile, cluster, virtual_flops))
