"""NetMoE's comparison without ranks: made-up loads, the homes that samples go to, bytes and simulated time of every layer.

A journey is what a forward pass does: the samples start at home, each MoE layer decides from its own routing and the next
one's where they live after it, the last one takes them home (`runtime/balance/relocate.py` does the same with
tensors). Consecutive layers are drawn apart: what a sample likes in one layer says nothing about the next, the harder case for
placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from moesaic.balance.samples import AbstractPlacer, Homes, SampleLoad, Volume
from moesaic.cost.cluster import ClusterSpec, Link, read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.timing import Simulated
from moesaic.cost.workload import Workload
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.plan.compile import moving
from moesaic.program.all_to_all.volume import traffic
from moesaic.program.grid import Grid
from moesaic.program.placed import PlacedIndex, placed_sizes
from moesaic.program.sizes import CallSizes, LayoutIndex
from moesaic.program.task import Program, Stage
from moesaic.traces.synthetic import SyntheticRouting, make_trace
from moesaic.traces.trace import Trace

PAPER = Workload(tokens=1024, num_experts=2, top_k=2, dim=768, hidden=3072, matrices=2, dtype="fp32")
"""NetMoE's small model: a sample's tokens, experts per device."""
PAPER_SAMPLES = 4
"""Per device, in NetMoE's experiments."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Who computes what: ranks in nodes, and the samples of each."""

    nodes: int
    per_node: int
    """Ranks of a node."""
    slots: int
    """Samples of a rank."""
    layer: Workload
    """`tokens` are those of a sample, `num_experts` those of all ranks together."""
    num_layers: int
    """MoE layers, one after the other."""

    @property
    def grid(self) -> Grid:
        """The mesh: experts over all ranks."""
        world = self.nodes * self.per_node
        return Grid(world=world, ep=world, ranks_per_node=self.per_node)

    @property
    def samples(self) -> int:
        """Of all ranks."""
        return self.nodes * self.per_node * self.slots

    @property
    def on_a_rank(self) -> Workload:
        """The layer with the tokens of a rank."""
        return replace(self.layer, tokens=self.layer.tokens * self.slots)


def paper_setting(nodes: int, per_node: int, *, slots: int = PAPER_SAMPLES, num_layers: int = 8) -> Setting:
    """Return NetMoE's setting on so many devices."""
    layer = replace(PAPER, num_experts=PAPER.num_experts * nodes * per_node)
    return Setting(nodes=nodes, per_node=per_node, slots=slots, layer=layer, num_layers=num_layers)


def paper_cluster(nodes: int, per_node: int) -> ClusterSpec:
    """Return NetMoE's cluster with other numbers of nodes and devices; a node has one port, whatever its devices."""
    spec = read_cluster("netmoe", nodes=nodes)

    def resized(link: Link) -> Link:
        return replace(link, devices=per_node) if link.devices > 1 else link

    return replace(spec, devices_per_node=per_node, links=tuple(map(resized, spec.links)))


def routing(setting: Setting, locality: float, *, seed: int = 0, tokens: bool = False) -> Trace:
    """Return made-up routing of one call of every layer: experts evenly loaded in sum, samples as different as asked for."""
    return make_trace(
        SyntheticRouting(
            steps=1, num_layers=setting.num_layers, num_experts=setting.layer.num_experts, top_k=setting.layer.top_k,
            sequences=setting.samples, seq_len=setting.layer.tokens, locality=locality, tokens=tokens, seed=seed,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Journey:
    """One forward pass: where samples are in front of each layer, and after the last."""

    grid: Grid
    counts: Sequence[np.ndarray]
    """(samples, num_experts) int64 by layer."""
    homes: Sequence[Homes]
    """One more than layers; the first and the last are the same."""
    before: Volume
    """Rows of the gathers and scatters that decisions were about, had nobody moved."""
    after: Volume
    """The same as decided."""

    @cached_property
    def moved(self) -> tuple[float, float]:
        """Shares of the samples that change (node, rank) after a layer that decides; means over those."""
        node = np.array([self.grid.node_of(rank) for rank in range(self.grid.world)])
        decided = list(zip(self.homes, self.homes[1:-1]))
        samples = max(len(decided), 1) * self.homes[0].samples.size
        moved = [sum(a.moved(b, groups) for a, b in decided) / samples for groups in (node, None)]
        return moved[0], moved[1]


def travel(grid: Grid, counts: Sequence[np.ndarray], slots: int, placer: AbstractPlacer) -> Journey:
    """Return the journey under a policy; the routing of the next layer is predicted rightly.

    Args:
        grid: the mesh.
        counts: (samples, num_experts) by layer.
        slots: samples per rank.
        placer: the policy.
    """
    homes, volumes = [Homes.start(grid.world, slots)], np.zeros((2, 2), dtype=np.int64)
    for here, following in pairwise(counts):
        load = SampleLoad(grid, homes[-1], here, following)
        homes.append(placer.decide(load))
        volumes += [load.volume(homes[0]), load.volume(homes[-1])]
    return Journey(grid, counts, (*homes, homes[0]), Volume(*volumes[0].tolist()), Volume(*volumes[1].tolist()))


class Costs:
    """Bytes and simulated seconds of journeys, in a setting on a cluster.

    Args:
        setting: who computes what.
        cluster: on what.
        plan: of the layers, None for the plain one; samples move under those whose results can go straight to new homes.
    """

    def __init__(self, setting: Setting, cluster: ClusterSpec, plan: Plan | None = None) -> None:
        plan = plan or Plan()
        self.setting, self._layer = setting, setting.on_a_rank
        self._plain: Compiled = compile_plan(plan, setting.grid, host_runs_compute=cluster.host.runs_compute)
        self._moving = moving(self._plain)
        self._shapes = LayoutIndex(setting.grid, self._layer.num_experts, setting.slots, parts=1)
        self._simulator = Simulator(cluster)

    def plain(self, counts: Sequence[np.ndarray]) -> tuple[float, int, int]:
        """Return what the layers take where samples stay on their ranks: as `placed` does."""
        calls: list[tuple[Program, CallSizes]] = []
        for each in counts:
            table = each.reshape(self.setting.grid.world, self.setting.slots, -1).sum(1)
            tokens = np.full(self.setting.grid.world, self._layer.tokens)
            shapes = self._plain.shapes(self._layer.num_experts)
            sizes = CallSizes(self.setting.grid, table, tokens, 1, units=self._layer.hidden, shapes=shapes)
            calls += [(self._plain.forward, sizes), (self._plain.backward, sizes)]
        return self._summed(calls)

    def placed(self, journey: Journey) -> tuple[float, int, int]:
        """Return what the layers of a journey take, forward and backward, one after the other: seconds, bytes inside nodes,
        bytes between nodes; the residual rides with the results, and the host's decisions are hidden."""
        calls: list[tuple[Program, CallSizes]] = []
        for counts, before, after in zip(journey.counts, journey.homes, journey.homes[1:]):
            targets, length = before.targets(after), self.setting.layer.tokens
            of_call = PlacedIndex(self._shapes, lambda targets=targets: targets, length)  # type: ignore[misc]
            table = counts[before.samples]
            sizes = placed_sizes(self.setting.grid, table, of_call, self._layer.hidden)
            calls += [(program, sizes) for program in (self._moving.forward, self._moving.backward)]
        return self._summed(calls)

    def even(self) -> tuple[Simulated, Simulated]:
        """Return a layer under even routing, forward and backward."""
        programs = (self._plain.forward, self._plain.backward)
        there, back = (self._simulator.run(program, self._layer, self.setting.grid) for program in programs)
        return there, back

    def hidden_seconds(self) -> float:
        """Return the simulated time of a forward pass from its start to the end of the experts, under even routing: what a
        decision that is needed when results start to travel can hide behind."""
        spans = self.even()[0].timeline.spans
        return max(span.end for span in spans if span.stage is Stage.EXPERT)

    def _summed(self, calls: Sequence[tuple[Program, CallSizes]]) -> tuple[float, int, int]:
        seconds, inside, across = 0.0, 0, 0
        for program, sizes in calls:
            seconds += self._simulator.run(program, self._layer, self.setting.grid, sizes=sizes).seconds
            for moved in traffic(program, sizes, self.setting.grid.node_of):
                found = moved.num_bytes(self._layer.dim, self._layer.element_bytes)
                inside, across = inside + found[0], across + found[1]
        return seconds, inside, across


def decision_seconds(setting: Setting, placer: AbstractPlacer, repeats: int, clock: Callable[[], float]) -> list[float]:
    """Return how long decisions take on this processor, one thread, counts to homes; each on a load of its own.

    Args:
        setting: of the samples; its number of layers is not read.
        placer: the policy.
        repeats: how many decisions are timed.
        clock: in seconds.
    """
    trace = routing(replace(setting, num_layers=repeats + 2), 0.4)
    found = []
    for layer in range(repeats + 1):
        counts = [trace.samples(number, 0) for number in (layer, layer + 1)]
        load = SampleLoad(setting.grid, Homes.start(setting.grid.world, setting.slots), counts[0], counts[1])
        start = clock()
        placer.decide(load)
        found.append(clock() - start)
    return found[1:]
