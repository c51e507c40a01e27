"""NetMoE's comparison without ranks: synthetic and recorded loads, the homes chosen for samples,
bytes and simulated time of every layer.

A journey is one forward pass. The samples start at home. Each MoE layer decides from its own and
the next layer's routing where they go next, and the last layer takes them home.
`balance/run/relocate.py` does the same with tensors. Synthetic routing of consecutive layers is
drawn independently, so a sample's experts in one layer say nothing about the next. That is the
harder case for placement.

A home is the rank that holds a sample (`Homes`). A slot is room for one sample on a rank: all ranks
hold equally many. Counts of a layer are the copies that each sample sends to each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from moesaic.balance.samples import AbstractPlacer, Homes, SampleLoad, Volume
from moesaic.planner.cluster import ClusterSpec, Link, read_cluster
from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import Workload
from moesaic.program.all_to_all.volume import traffic
from moesaic.program.compile import Compiled, compile_plan, moving
from moesaic.program.grid import Grid
from moesaic.program.layouts import LayoutIndex
from moesaic.program.plan import Plan
from moesaic.program.sample_layouts import PlacedIndex, placed_sizes
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Program, Stage
from moesaic.traces.trace import Trace, TraceSegment, TraceShape
from moesaic_lab.balance.loads import deal
from moesaic_lab.traces.synthetic import SyntheticRouting, make_trace

PAPER = Workload(
    tokens=1024, num_experts=2, top_k=2, dim=768, hidden=3072, matrices=2, dtype="fp32"
)
"""NetMoE's small model; `tokens` are those of a sample, `num_experts` those of a device."""
CONFIGS = Path(__file__).parent.parent / "configs"
TRAINED = {"code": "gpt_code.npz", "messages": "gpt_messages.npz"}
"""Files with the routing of trained models, by the text that they were trained on. Their first half
of the steps is early."""
PAPER_SAMPLES = 4
"""Samples per device in NetMoE's experiments."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Ranks and nodes, the samples of each rank, and the layers."""

    nodes: int
    per_node: int
    """Ranks per node."""
    slots: int
    """Samples per rank."""
    layer: Workload
    """The layer, where `tokens` are those of a sample and `num_experts` those of all ranks
    together."""
    num_layers: int
    """Number of consecutive MoE layers."""

    @property
    def grid(self) -> Grid:
        """The mesh, with the experts split over all ranks."""
        world = self.nodes * self.per_node
        return Grid(world=world, ep=world, ranks_per_node=self.per_node)

    @property
    def samples(self) -> int:
        """Samples of all ranks together."""
        return self.nodes * self.per_node * self.slots

    @property
    def on_a_rank(self) -> Workload:
        """The layer with the tokens of a rank."""
        return replace(self.layer, tokens=self.layer.tokens * self.slots)


def paper_setting(
    nodes: int, per_node: int, *, slots: int = PAPER_SAMPLES, num_layers: int = 8
) -> Setting:
    """Return NetMoE's setting for this many nodes and devices per node."""
    layer = replace(PAPER, num_experts=PAPER.num_experts * nodes * per_node)
    return Setting(nodes=nodes, per_node=per_node, slots=slots, layer=layer, num_layers=num_layers)


def paper_cluster(nodes: int, per_node: int) -> ClusterSpec:
    """Return NetMoE's cluster with other numbers of nodes and devices. Each node has one port,
    regardless of its devices."""
    spec = read_cluster("netmoe", nodes=nodes)

    def resized(link: Link) -> Link:
        return replace(link, devices=per_node) if link.devices > 1 else link

    return replace(spec, devices_per_node=per_node, links=tuple(map(resized, spec.links)))


def routing(setting: Setting, locality: float, *, seed: int = 0, tokens: bool = False) -> Trace:
    """Return synthetic routing of one call of every layer. The experts' total loads are even, and
    samples differ by `locality`."""
    return make_trace(
        SyntheticRouting(
            steps=1,
            num_layers=setting.num_layers,
            num_experts=setting.layer.num_experts,
            top_k=setting.layer.top_k,
            sequences=setting.samples,
            seq_len=setting.layer.tokens,
            locality=locality,
            tokens=tokens,
            seed=seed,
        )
    )


def trained_traces() -> dict[str, Trace]:
    """Return the recorded routing of trained models, by the text that they were trained on."""
    return {text: Trace.open(CONFIGS / file) for text, file in TRAINED.items()}


def recorded(setting: Setting, trace: Trace, step: int) -> Trace:
    """Return a recorded step as routing of one call of every layer.

    The first samples are used. A sample's copies are dealt to its tokens anew; if the setting's
    samples are longer, each token stands for several that choose alike.
    """
    layer = setting.layer
    stands_for = layer.tokens // trace.shape.seq_len
    experts_by_layer = []
    for number in range(setting.num_layers):
        counts = trace.samples(number, step)[: setting.samples] * stands_for
        experts = deal(counts, layer.tokens, layer.top_k)
        experts_by_layer.append(experts.reshape(-1, layer.top_k))
    shape = TraceShape(
        num_layers=setting.num_layers,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        sequences=setting.samples,
        seq_len=layer.tokens,
    )
    # one step and one micro-batch
    table = np.stack(experts_by_layer)[None, None]
    segment = TraceSegment(shape, "tokens", np.array([0]), table, source={"step": step})
    return Trace.of(segment)


@dataclass(frozen=True)
class Journey:
    """One forward pass: the samples' homes before each layer and after the last one."""

    grid: Grid
    counts: Sequence[np.ndarray]
    """For each layer, (samples, num_experts) int64 copies."""
    homes: Sequence[Homes]
    """One entry more than layers; the first and the last are the same."""
    before: Volume
    """Rows of the gathers and scatters that the decisions affect, if no sample moved."""
    after: Volume
    """Rows of the same gathers and scatters, with the decisions applied."""

    @cached_property
    def moved(self) -> tuple[float, float]:
        """Shares of the samples that change their (node, rank) after a layer that decides, averaged
        over these layers."""
        node = np.array([self.grid.node_of(rank) for rank in range(self.grid.world)])
        decisions = list(zip(self.homes, self.homes[1:-1]))  # without the last move, home
        # a single layer decides nothing, and nothing moves
        samples = max(len(decisions), 1) * self.homes[0].samples.size
        between_nodes = sum(before.moved(after, node) for before, after in decisions)
        between_ranks = sum(before.moved(after, None) for before, after in decisions)
        return between_nodes / samples, between_ranks / samples


def travel(grid: Grid, counts: Sequence[np.ndarray], slots: int, placer: AbstractPlacer) -> Journey:
    """Return the journey under a policy, with exact predictions of the next layer's routing.

    Args:
        grid: the mesh.
        counts: for each layer, (samples, num_experts) copies.
        slots: samples per rank.
        placer: the policy.
    """
    homes = [Homes.start(grid.world, slots)]
    volumes = np.zeros((2, 2), dtype=np.int64)  # (before, after) by the fields of `Volume`
    for current, following in pairwise(counts):
        load = SampleLoad(grid, homes[-1], current, following)
        homes.append(placer.decide(load))
        volumes += [load.volume(homes[0]), load.volume(homes[-1])]
    before, after = (Volume(*row) for row in volumes.tolist())
    return Journey(grid, counts, (*homes, homes[0]), before, after)


class Costs:
    """Computes bytes and simulated seconds of journeys.

    Args:
        setting: the ranks, samples and layers.
        plan: plan of the layers; None for the plain one. Samples can only move under plans that
            deliver results directly to new homes.
    """

    def __init__(self, setting: Setting, cluster: ClusterSpec, plan: Plan | None = None) -> None:
        plan = plan or Plan()
        self.setting = setting
        self._layer = setting.on_a_rank
        self._plain: Compiled = compile_plan(plan, setting.grid)
        self._moving = moving(self._plain)
        self._shapes = LayoutIndex(setting.grid, self._layer.num_experts, setting.slots, parts=1)
        self._simulator = Simulator(cluster)

    def plain(self, counts: Sequence[np.ndarray]) -> tuple[float, int, int]:
        """Return (seconds, bytes inside nodes, bytes between nodes) of the layers if samples stay
        on their ranks."""
        calls: list[tuple[Program, CallSizes]] = []
        grid = self.setting.grid
        for of_samples in counts:
            copies = of_samples.reshape(grid.world, self.setting.slots, -1).sum(1)
            tokens = np.full(grid.world, self._layer.tokens)
            shapes = self._plain.shapes(self._layer.num_experts)
            sizes = CallSizes(
                grid, copies, tokens, num_chunks=1, units=self._layer.hidden, shapes=shapes
            )
            calls += [(self._plain.forward, sizes), (self._plain.backward, sizes)]
        return self._summed(calls)

    def placed(self, journey: Journey) -> tuple[float, int, int]:
        """Return (seconds, bytes inside nodes, bytes between nodes) of forward and backward of a
        journey's layers, in sequence. The residual travels with the results, and the host's
        decisions are hidden."""
        calls: list[tuple[Program, CallSizes]] = []
        for counts, before, after in zip(journey.counts, journey.homes, journey.homes[1:]):
            targets = before.targets(after)
            length = self.setting.layer.tokens
            index = PlacedIndex(self._shapes, lambda targets=targets: targets, length)  # type: ignore[misc]
            counts_by_slot = counts[before.samples]
            sizes = placed_sizes(self.setting.grid, counts_by_slot, index, self._layer.hidden)
            calls += [(program, sizes) for program in (self._moving.forward, self._moving.backward)]
        return self._summed(calls)

    def even(self) -> tuple[Simulated, Simulated]:
        """Return the simulated forward and backward passes of a layer under even routing."""
        grid = self.setting.grid
        forward = self._simulator.run(self._plain.forward, self._layer, grid)
        backward = self._simulator.run(self._plain.backward, self._layer, grid)
        return forward, backward

    def hidden_seconds(self) -> float:
        """Return the simulated time from the start of a forward pass to the end of the experts,
        under even routing. A decision is needed when results are sent, so it can hide behind this
        time."""
        forward, _ = self.even()
        spans = forward.timeline.spans
        return max(span.end for span in spans if span.stage is Stage.EXPERT)

    def _summed(self, calls: Sequence[tuple[Program, CallSizes]]) -> tuple[float, int, int]:
        """Return the seconds of calls, and their bytes inside and between nodes."""
        seconds = 0.0
        inside = 0
        across = 0
        for program, sizes in calls:
            simulated = self._simulator.run(program, self._layer, self.setting.grid, sizes=sizes)
            seconds += simulated.seconds
            for moved in traffic(program, sizes, self.setting.grid.node_of):
                inside_bytes, across_bytes = moved.num_bytes(
                    self._layer.dim, self._layer.element_bytes
                )
                inside += inside_bytes
                across += across_bytes
        return seconds, inside, across


def decision_seconds(
    setting: Setting, placer: AbstractPlacer, repeats: int, clock: Callable[[], float]
) -> list[float]:
    """Return the seconds of decisions, from counts to homes, on one thread of this processor. Each
    decision has a new load.

    Args:
        setting: the ranks and samples; its number of layers is ignored.
        placer: the policy.
        repeats: number of timed decisions.
        clock: returns the current time in seconds.
    """
    # one decision more than asked for, to warm up, and a layer that follows the last decision
    trace = routing(replace(setting, num_layers=repeats + 2), locality=0.4)
    seconds = []
    for layer in range(repeats + 1):
        homes = Homes.start(setting.grid.world, setting.slots)
        current = trace.samples(layer, 0)
        following = trace.samples(layer + 1, 0)
        load = SampleLoad(setting.grid, homes, current, following)
        start = clock()
        placer.decide(load)
        seconds.append(clock() - start)
    return seconds[1:]
