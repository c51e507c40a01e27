"""NetMoE's volumes and times: what a dispatch moves under even routing, and after samples were placed anew.

Liu et al. (ICLR 2025). Savings need samples that like experts of their own; each sample draws its shares from a Dirichlet
distribution with equal means, so that experts are loaded evenly in sum, and one concentration is fitted for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moesaic.balance.samples import Homes, SampleLoad, TwoStage
from moesaic.cost.call_sizes import sizes_of
from moesaic.cost.cluster import ClusterSpec, Tflops
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload, dirichlet_counts
from moesaic.plan import Plan, compile_plan
from moesaic.program.all_to_all.volume import traffic
from moesaic.program.grid import Grid
from moesaic.program.task import Kind, Stage
from moesaic.program.timeline import Span
from moesaic_lab.netmoe.setting import Costs, Setting, paper_cluster, travel
from moesaic_lab.reproduce.end_to_end import WholeStep
from moesaic_lab.reproduce.records import Book

MODELS = {"S": 768, "M": 1024, "L": 1280, "XL": 1600, "XXL": 4096}
"""Widths by model."""
SAMPLES, LENGTH, TOP_K, PER_NODE, DRAWS = 4, 1024, 2, 8, 20
"""Samples per device, tokens of each, experts per token, devices of a node, draws that a mean is taken over."""
MIB = 2**20
JOURNEY = 6
"""MoE layers over which the time of one is taken, where samples move between them; the last takes them home."""


@dataclass(frozen=True)
class PlacedSamples:
    """What placing samples did, means over draws."""

    intra: float
    """Rows inside nodes in one all-to-all after, over those before."""
    inter: float
    """Rows between nodes after, over those before."""
    moved_nodes: float
    """Share of the samples that went to another node."""
    moved_devices: float
    """Share of the samples that went to another device."""


def workload(devices: int, dim: int, samples: int = SAMPLES) -> Workload:
    """Return a layer: two experts per device, float32, F = 4 D.

    Args:
        devices: in use.
        dim: width of the model.
        samples: per device.
    """
    return Workload(
        tokens=samples * LENGTH, num_experts=2 * devices, top_k=TOP_K, dim=dim, hidden=4 * dim, matrices=2, dtype="fp32"
    )


def before_mib(devices: int, dim: int) -> tuple[float, float]:
    """Return the MiB that one all-to-all of rows moves (inside nodes, between nodes), all ranks together, even routing."""
    grid, layer = Grid(world=devices, ep=devices, ranks_per_node=PER_NODE), workload(devices, dim)
    made = compile_plan(Plan(), grid)
    sizes = sizes_of(made.forward, layer, grid)
    names = {slot.name for slot in made.forward.slots if slot.kind is Kind.ROWS}
    stage = {task.name: task.stage for task in made.forward.tasks}
    inside, across = 0, 0
    for moved in traffic(made.forward, sizes, grid.node_of):
        if moved.kind is Kind.ROWS and stage[moved.task] is Stage.DISPATCH and moved.task in names:
            found = moved.num_bytes(dim, layer.element_bytes)
            inside, across = inside + found[0], across + found[1]
    return inside / MIB, across / MIB


def placed(devices: int, concentration: float, draws: int = DRAWS) -> PlacedSamples:
    """Return what the two-stage assignment does to the gather of a layer and the scatter of the next.

    Args:
        devices: in use.
        concentration: of the Dirichlet distribution, over all experts together.
        draws: how many batches.
    """
    grid = Grid(world=devices, ep=devices, ranks_per_node=PER_NODE)
    node = np.arange(devices) // PER_NODE
    of_sample = replace(workload(devices, 1), tokens=LENGTH)
    found = []
    for draw in range(draws):
        here, following = (
            dirichlet_counts(
                devices * SAMPLES, of_sample, concentration=concentration / of_sample.num_experts, seed=2 * draw + at
            )
            for at in range(2)
        )
        load = SampleLoad(grid, Homes.start(devices, SAMPLES), here, following)
        homes = TwoStage(least_gain=0.0).decide(load)
        old, new = load.volume(load.homes), load.volume(homes)
        moved = load.homes.moved(homes, node), load.homes.moved(homes)
        samples = devices * SAMPLES
        found.append((new.intra / old.intra, new.inter / old.inter, moved[0] / samples, moved[1] / samples))
    return PlacedSamples(*np.mean(found, axis=0).tolist())


@dataclass(frozen=True)
class EndToEnd:
    """A step of a model under three systems, seconds."""

    fastmoe: float
    """All tokens out, all experts, all tokens back. SmartMoE's time too: experts are evenly loaded, so it moves none."""
    fastermoe: float
    """With the smart schedule, in groups of four devices; nothing is shadowed under even loads."""
    netmoe: float


def end_to_end(book: Book, model: str, nodes: int, per_node: int) -> EndToEnd:
    """Return what whole steps take: MoE layers by samples as `placed` draws them, and what stands around them.

    Args:
        book: tells the constants.
        model: a key of `MODELS`.
        nodes: of the cluster.
        per_node: devices of each in use.
    """
    dim, devices = MODELS[model], nodes * per_node
    layer = replace(workload(devices, dim, 1), tokens=LENGTH)
    setting = Setting(nodes=nodes, per_node=per_node, slots=SAMPLES, layer=layer, num_layers=JOURNEY)
    concentration = book.constant("netmoe.concentration") / layer.num_experts
    counts = [
        dirichlet_counts(setting.samples, layer, concentration=concentration, seed=number) for number in range(JOURNEY)
    ]
    spec = NetMoECluster(book, nodes, per_node).spec
    plain, smart = Costs(setting, spec), Costs(setting, spec, Plan(peer_groups=max(devices // 4, 1)))
    step = WholeStep(f"netmoe-gpt-{model.lower()}", spec, setting.grid, layer.num_experts, SAMPLES)
    around = step.around_seconds(*plain.even())
    layers = step.model.moe_layers / JOURNEY
    journey = travel(setting.grid, counts, SAMPLES, TwoStage(least_gain=0.0))
    seconds = (plain.plain(counts)[0], smart.plain(counts)[0], plain.placed(journey)[0])
    return EndToEnd(*(around + layers * each for each in seconds))


class NetMoECluster:
    """Some nodes of the cluster.

    Args:
        book: tells the constants.
        nodes: in use.
        per_node: devices of each in use.
    """

    def __init__(self, book: Book, nodes: int = 2, per_node: int = PER_NODE) -> None:
        self.book, self._nodes, self._per_node = book, nodes, per_node

    @cached_property
    def spec(self) -> ClusterSpec:
        """The cluster: its preset with the constants in place."""
        spec = paper_cluster(self._nodes, self._per_node)
        nvlink, nic = spec.links
        nic = replace(nic, gbps=(self.book.constant("netmoe.nic"),))
        device = replace(spec.device, tflops=Tflops(fp32=self.book.constant("netmoe.tflops")))
        return replace(spec, device=device, links=(nvlink, nic))

    def table4_ms(self, samples: int) -> tuple[float, float]:
        """Return scatter and computing of a layer of the small model on 16 devices, milliseconds.

        Args:
            samples: per device.
        """
        grid = Grid(world=16, ep=16, ranks_per_node=PER_NODE)
        made, layer = compile_plan(Plan(), grid), workload(16, MODELS["S"], samples)
        run = Simulator(self.spec).run(made.forward, layer, grid)
        rows = {slot.name for slot in made.forward.slots if slot.kind is Kind.ROWS}
        scatter = sum(_length(s) for s in run.timeline.spans if s.stage is Stage.DISPATCH and s.task in rows - {"rows"})
        computing = sum(_length(s) for s in run.timeline.spans if s.stage is Stage.EXPERT)
        return 1e3 * scatter, 1e3 * computing + self.book.constant("netmoe.launch")


def _length(span: Span) -> float:
    return span.end - span.start
