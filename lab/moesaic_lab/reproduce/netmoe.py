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
from moesaic.cost.cluster_file import read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload, dirichlet_counts
from moesaic.plan import Plan, compile_plan
from moesaic.program.all_to_all.volume import traffic
from moesaic.program.grid import Grid
from moesaic.program.task import Kind, Stage
from moesaic.program.timeline import Span
from moesaic_lab.reproduce.records import Book

MODELS = {"S": 768, "M": 1024, "L": 1280, "XL": 1600, "XXL": 4096}
"""Widths by model."""
SAMPLES, LENGTH, TOP_K, PER_NODE, DRAWS = 4, 1024, 2, 8, 20
"""Samples per device, tokens of each, experts per token, devices of a node, draws that a mean is taken over."""
MIB = 2**20


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


class NetMoECluster:
    """Two nodes of the cluster, for Table 4.

    Args:
        book: tells the constants.
    """

    def __init__(self, book: Book) -> None:
        self.book = book

    @cached_property
    def spec(self) -> ClusterSpec:
        """The cluster: its preset with the constants in place."""
        spec = read_cluster("netmoe", nodes=2)
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
