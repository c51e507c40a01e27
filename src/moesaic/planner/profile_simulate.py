"""`ProfileTiming`: predicts when a program's tasks run on a profiled machine, from its measured host costs.

Rows, paths and the order of events are the simulator's own (`simulate.py`). Measured values replace its assumptions
about the processor time of every task, of its messages and of its bytes. Ranks send eagerly: a message leaves when its
sender issues it, whatever the others do. So ranks of a node drift apart, one rank computes while another sends, and
links that would idle in lockstep do not. Up to `RANKS_APART` ranks are therefore simulated separately, on the cores
that they share, with links as queues. Beyond that, one rank stands for all.

The demands of a program on the host are counted task by task (tasks of each kind, messages, bytes), identically for
fits and simulations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from moesaic.codecs import name_of
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.compute import Rates, compute_seconds, rates_of
from moesaic.planner.events import Events, Graph, graph_of
from moesaic.planner.fit import Fit
from moesaic.planner.movement import AbstractVolumes, Movement, movements_of
from moesaic.planner.profile import ClusterProfile, HostCosts
from moesaic.planner.simulate import Simulator
from moesaic.planner.timing import AbstractTiming, Simulated, account
from moesaic.program.bundles import bundles
from moesaic.program.task import Kind, Op, Program, Slot, Task

FEATURES = tuple(each.name for each in fields(HostCosts) if each.name != "sharing")
"""Units in which the host's work is counted: one cost each."""
TRANSPORT = FEATURES.index("transport_byte")
DEARER = {
    **dict.fromkeys((Op.PACK, Op.UNPACK, Op.TAKE, Op.JOIN), "copy"), Op.COMBINE: "combine", Op.EXPERT_GRAD: "gradient",
}  # fmt: skip
"""Tasks that cost the host more than others do, whatever their bytes, and the name of the extra cost."""
_BYTES = Rates(flops=1.0, grouped_flops=1.0, rows=(1.0,), share=(1.0,), memory=1.0, codec=None)
"""Rates under which compute "seconds" are bytes."""


def host_features(program: Program, volumes: AbstractVolumes, movements: list[list[Movement]]) -> np.ndarray:
    """Return the demand of each task on each actor's host, (tasks, actors, features), in the order of `FEATURES`.

    Args:
        program: forward or backward.
        volumes: its rows.
        movements: of each task.
    """
    slots = {slot.name: slot for slot in program.slots}
    waits = _waits(program, movements)
    in_earlier_message = {number for bundle in bundles(program) for number in bundle[1:]}
    features = np.zeros((len(program.tasks), volumes.num_actors, len(FEATURES)))
    for number, task in enumerate(program.tasks):
        features[number, :, FEATURES.index("task")] = 1
        features[number, :, FEATURES.index("wait")] = waits[number]
        if task.op in DEARER:
            features[number, :, FEATURES.index(DEARER[task.op])] = 1
        features[
            number,
            list({actor for movement in movements[number] for actor in movement.actors}),
            FEATURES.index("transfer"),
        ] = 1
        for movement in movements[number]:
            if number not in in_earlier_message:
                features[number, list(movement.actors), FEATURES.index("message")] += movement.posts
            features[number, list(movement.actors), FEATURES.index("transport_byte")] += _transport_bytes(
                movement, volumes
            )
        is_weight = any(slots[name].kind is Kind.WEIGHT for name in task.writes)
        if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
            features[number, :, FEATURES.index("weight_byte")] = _gradient_bytes(task, slots, volumes)
        elif not is_lossy(task, slots):
            touched_bytes = compute_seconds(task, slots, volumes, _BYTES)
            features[number, :, FEATURES.index("weight_byte" if is_weight else "byte")] = touched_bytes
    return features


def is_lossy(task: Task, slots: Mapping[str, Slot]) -> bool:
    """Return whether a task encodes or decodes rows with a codec. These costs are measured per codec, not per byte."""
    if task.op not in (Op.PACK, Op.UNPACK) or not task.codec:
        return False
    assert task.of is not None
    return slots[task.of[0] if task.op is Op.PACK else task.of[1]].kind is Kind.ROWS


def layer_features() -> np.ndarray:
    """Return the demand of a layer on the host besides its programs, (features,)."""
    features = np.zeros(len(FEATURES))
    features[FEATURES.index("layer")] = 1
    return features


def costs_vector(costs: HostCosts) -> np.ndarray:
    """Return the cost of one unit of each feature, (features,) seconds of processor time.

    Args:
        costs: as measured.
    """
    return np.array([getattr(costs, name) for name in FEATURES])


def _transport_bytes(moved: Movement, volumes: AbstractVolumes) -> float:
    """Return the bytes that a rank sends and receives in a movement, mean over its ranks."""
    topology, total = volumes.topology, 0.0
    for link, seconds in zip(moved.load.links.tolist(), moved.load.seconds.tolist()):
        ends = 2 if topology.names[link].startswith("inside") else 1  # between nodes a message leaves and arrives
        total += ends * seconds / topology.seconds_per_byte[link]
    return total / (topology.block if volumes.num_actors == 1 else len(moved.actors))


def _gradient_bytes(task: Task, slots: Mapping[str, Slot], volumes: AbstractVolumes) -> np.ndarray:
    """Return the bytes of weight gradients that an expert task writes, (actors,)."""
    total = np.zeros(volumes.num_actors)
    layer = volumes.layer
    for name in task.writes:
        slot = slots[name]
        if slot.kind is Kind.WEIGHT and slot.layout.flow == "weights":
            total += volumes.rows(slot.layout) * layer.element_bytes * layer.dim * layer.matrices
    return total


def _waits(program: Program, movements: list[list[Movement]]) -> list[bool]:
    """Return, for each task, whether it is the first to need a movement deeper in the chain of movements than all
    before."""
    depth: dict[str, int] = {}
    deepest, first_to_wait = 0, []
    for task, task_movements in zip(program.tasks, movements):
        needed = max((depth.get(name, 0) for name in task.reads), default=0)
        first_to_wait.append(needed > deepest)
        deepest = max(deepest, needed)
        depth.update(dict.fromkeys(task.writes, needed + bool(task_movements)))
    return first_to_wait


RANKS_APART = 16
"""Number of ranks up to which every rank and message is simulated separately; beyond it, one rank stands for all."""


@dataclass(frozen=True)
class Demand:
    """The demand of a program on a machine, which does not depend on the host's costs."""

    program: Program
    volumes: AbstractVolumes
    movements: list[list[Movement]]
    """Movements of each task."""
    features: np.ndarray
    """As returned by `host_features`."""
    compute: np.ndarray
    """(tasks, actors) seconds of products and codecs."""
    graph: Graph


class ProfileTiming(AbstractTiming):
    """Timing from the profile of a machine.

    Args:
        profile: the measurements.
        cluster: links and devices of the profile, as `ClusterProfile.to_cluster` returns them.
        virtual_flops: operations per second of virtual accelerators, which use no processor time; None: experts
            multiply on the host.
    """

    def __init__(self, profile: ClusterProfile, cluster: ClusterSpec, virtual_flops: float | None = None) -> None:
        self.profile, self._cluster, self._virtual_flops = profile, cluster, virtual_flops
        self._costs = costs_vector(profile.host)

    @property
    def around_seconds(self) -> float:
        """Seconds of a layer before its forward program: routing, the exchange of counts. Autograd takes as long before
        the backward program."""
        return float(layer_features() / 2 @ self._costs) * self.profile.host.sharing

    @property
    def collectives(self) -> Mapping[str, Fit]:
        """Lines of the profile, if the cluster has as many nodes as were measured; else none."""
        return self.profile.collectives if self._cluster.nodes == self.profile.nodes else {}

    @property
    def starts_early(self) -> bool:
        return True

    @property
    def ranks_apart(self) -> int:
        return RANKS_APART

    def run(self, program: Program, volumes: AbstractVolumes, dtype: str) -> Simulated:
        """Simulate a program.

        A link is busy for no longer than the program runs, since its first kilobytes may be free. All work of a rank's
        single thread counts as computation.
        """
        demand = self.demand_of(program, volumes, dtype)
        return self._account(demand, self.lay_out(demand))

    def passes(self, passes: Sequence[tuple[Program, AbstractVolumes]], dtype: str) -> list[Simulated]:
        demands = [self.demand_of(program, volumes, dtype) for program, volumes in passes]
        return [self._account(*each) for each in zip(demands, self.laid_out(demands))]

    def laid_out(self, demands: Sequence[Demand]) -> list[Events]:
        """Return the events of a layer's passes, with times relative to the end of the previous pass. A rank that ends
        a pass early starts the next one at once, so some times are below 0."""
        events_of_passes: list[Events] = []
        late: np.ndarray | None = None
        for demand in demands:
            if events_of_passes and len(demand.features):
                features = demand.features.copy()
                features[0] += layer_features() / 2
                demand = replace(demand, features=features)
            events = self.lay_out(demand, late)
            ends = events.ends.max(axis=0, initial=0.0)
            if late is not None:
                ends = np.maximum(ends, late)
                events.starts -= late.max(initial=0.0)
                events.ends -= late.max(initial=0.0)
            late = ends
            events_of_passes.append(events)
        return events_of_passes

    def _account(self, demand: Demand, events: Events) -> Simulated:
        end = float(events.ends.max(initial=0.0))
        computing = (demand.features @ self._costs * self.profile.host.sharing + demand.compute).sum(axis=0)
        return account(demand.program, demand.volumes, demand.movements, events, computing, at_most=end)

    def demand_of(self, program: Program, volumes: AbstractVolumes, dtype: str) -> Demand:
        """Return the demand of a program on the machine. Arguments as in `run`."""
        movements = movements_of(program, volumes)
        features = host_features(program, volumes, movements)
        slots = {slot.name: slot for slot in program.slots}
        compute = np.array([self._computing(task, slots, volumes, dtype) for task in program.tasks])
        compute = compute.reshape(features.shape[:2])
        graph = graph_of(program, host_runs_compute=True, has_lanes=False)
        return Demand(program, volumes, movements, features, compute, graph)

    def lay_out(self, demand: Demand, late: np.ndarray | None = None) -> Events:
        """Run the events of a program and return them.

        Args:
            demand: demand of the program.
            late: as in `Events.run`.
        """
        actors, profile = demand.volumes.num_actors, self.profile
        moving = demand.features[..., TRANSPORT] * self._costs[TRANSPORT]
        issue, compute = demand.features @ self._costs - moving, demand.compute
        cores = [0]
        if actors > 1:
            cores = self._cores_of(actors)
            if self._virtual_flops is None:  # products run on the core; the rates already contain `sharing`
                issue, compute = issue + compute / profile.host.sharing, np.zeros_like(compute)
        else:
            issue, moving = issue * profile.host.sharing, moving * profile.host.sharing
        names = demand.volumes.topology.names
        bursts = [(profile.inside if name.startswith("inside") else profile.outside).credit_seconds for name in names]
        events = Events(
            demand.graph, issue, compute, demand.movements, cores=cores, moving=moving, bursts=np.array(bursts)
        )
        events.run(late)
        return events

    def _cores_of(self, ranks: int) -> list[int]:
        """Return the core of each rank, as `hold_still` assigns them, with as many ranks per core as measured."""
        cores = max(1, round(ranks / self.profile.host.sharing))
        return [rank % cores for rank in range(ranks)]

    def _computing(self, task: Task, slots: Mapping[str, Slot], volumes: AbstractVolumes, dtype: str) -> np.ndarray:
        """Return the seconds of products and of lossy codecs, (actors,). All other work counts as host work."""
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
        flops = self._virtual_flops
        at_once = float("inf")
        return Rates(flops=flops, grouped_flops=flops, rows=(1.0,), share=(1.0,), memory=at_once, codec=None)


def profiled_simulator(
    profile: ClusterProfile, *, nodes: int | None = None, virtual_flops: float | None = None
) -> Simulator:
    """Return a simulator of a profiled machine.

    Args:
        profile: the measurements.
        nodes: number of nodes of this kind; None for the measured number.
        virtual_flops: as in `ProfileTiming`.

    Raises:
        InputError: if `nodes` is above 1 and only one node was measured.
    """
    cluster = profile.to_cluster(nodes)
    return Simulator(cluster, timing=ProfileTiming(profile, cluster, virtual_flops))
