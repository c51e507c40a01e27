"""NetMoE's volumes and times: what all-to-alls move under even routing, and how much sample
placement saves.

Liu et al. (ICLR 2025). Placement saves traffic only if samples prefer different experts. Each
sample draws its shares of the experts from a Dirichlet distribution with equal means, so the
experts' total loads are even. One concentration is fitted for all rows.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moesaic.balance.samples import Homes, SampleLoad, TwoStage
from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import ClusterSpec, Tflops
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload, dirichlet_counts
from moesaic.program.all_to_all.volume import traffic
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.task import Kind, Stage
from moesaic_lab.netmoe.setting import Costs, Setting, paper_cluster, travel
from moesaic_lab.reproduce.end_to_end import WholeStep
from moesaic_lab.reproduce.records import Book, Chart, PaperFinding, Reproduction, paper_bars

MODELS = {"S": 768, "M": 1024, "L": 1280, "XL": 1600, "XXL": 4096}
"""Width of each model."""
SAMPLES = 4
LENGTH = 1024
TOP_K = 2
PER_NODE = 8
DRAWS = 20
"""Samples per device, tokens per sample, experts per token, devices per node, and random draws in a
mean."""
MIB = 2**20
JOURNEY = 6
"""Number of consecutive MoE layers between which samples move; the last one returns them to their
home ranks."""


@dataclass(frozen=True)
class PlacedSamples:
    """The effect of sample placement on an all-to-all, as means over draws."""

    intra: float
    """Rows sent inside nodes, after over before."""
    inter: float
    """Rows sent between nodes, after over before."""
    moved_nodes: float
    """Share of the samples that moved to another node."""
    moved_devices: float
    """Share of the samples that moved to another device."""


def workload(devices: int, dim: int, samples: int = SAMPLES) -> Workload:
    """Return an MoE layer with two experts per device, float32 and F = 4 D.

    Args:
        devices: number of devices.
        dim: width of the model.
        samples: samples per device.
    """
    return Workload(
        tokens=samples * LENGTH,
        num_experts=2 * devices,
        top_k=TOP_K,
        dim=dim,
        hidden=4 * dim,
        matrices=2,
        dtype="fp32",
    )


def before_mib(devices: int, dim: int) -> tuple[float, float]:
    """Return the MiB that all ranks together send in an all-to-all of rows under even routing:
    (inside, between) nodes."""
    grid = Grid(world=devices, ep=devices, ranks_per_node=PER_NODE)
    layer = workload(devices, dim)
    compiled = compile_plan(Plan(), grid)
    sizes = sizes_of(compiled.forward, layer, grid)
    row_slots = {slot.name for slot in compiled.forward.slots if slot.kind is Kind.ROWS}
    stage = {task.name: task.stage for task in compiled.forward.tasks}
    inside = 0
    across = 0
    for sent in traffic(compiled.forward, sizes, grid.node_of):
        # a task that writes rows has the name of their slot
        writes_rows = sent.kind is Kind.ROWS and sent.task in row_slots
        if writes_rows and stage[sent.task] is Stage.DISPATCH:
            inside_bytes, across_bytes = sent.num_bytes(dim, layer.element_bytes)
            inside += inside_bytes
            across += across_bytes
    return inside / MIB, across / MIB


def placed(devices: int, concentration: float, draws: int = DRAWS) -> PlacedSamples:
    """Return the effect of the two-stage assignment on the gather of a layer and the scatter of the
    next.

    Args:
        devices: number of devices.
        concentration: concentration of the Dirichlet distribution, summed over all experts.
        draws: number of random batches.
    """
    grid = Grid(world=devices, ep=devices, ranks_per_node=PER_NODE)
    node = np.arange(devices) // PER_NODE
    samples = devices * SAMPLES
    sample = replace(workload(devices, 1), tokens=LENGTH)
    per_expert = concentration / sample.num_experts
    effects = []
    for draw in range(draws):
        # the copies of each sample for each expert of this layer and of the next
        here, following = (
            dirichlet_counts(samples, sample, concentration=per_expert, seed=2 * draw + layer)
            for layer in range(2)
        )
        load = SampleLoad(grid, Homes.start(devices, SAMPLES), here, following)
        homes = TwoStage(least_gain=0.0).decide(load)
        old = load.volume(load.homes)
        new = load.volume(homes)
        moved_nodes = load.homes.moved(homes, node) / samples
        moved_devices = load.homes.moved(homes) / samples
        effects.append((new.intra / old.intra, new.inter / old.inter, moved_nodes, moved_devices))
    return PlacedSamples(*np.mean(effects, axis=0).tolist())


def step_gains(
    book: Book,
    model: str,
    nodes: int,
    per_node: int,
    systems: Sequence[str] = ("fastmoe", "fastermoe", "smartmoe"),
) -> dict[str, float]:
    """Return the speed-ups of NetMoE's whole steps over those of other systems.

    MoE layers route samples as `placed` draws them. FastMoE dispatches and combines all tokens. So
    does SmartMoE, which moves no expert if all are evenly loaded. FasterMoE has its smart schedule
    in groups of four devices, and no shadows.

    Args:
        book: gives the constants.
        model: a key of `MODELS`.
        nodes: number of nodes.
        per_node: devices in use on each node.
    """
    dim = MODELS[model]
    devices = nodes * per_node
    layer = replace(workload(devices, dim, 1), tokens=LENGTH)
    setting = Setting(
        nodes=nodes, per_node=per_node, slots=SAMPLES, layer=layer, num_layers=JOURNEY
    )
    concentration = book.constant("netmoe.concentration") / layer.num_experts
    counts = [
        dirichlet_counts(setting.samples, layer, concentration=concentration, seed=number)
        for number in range(JOURNEY)
    ]
    spec = NetMoECluster(book, nodes, per_node).spec
    costs = Costs(setting, spec)

    # seconds of the layers of a journey, by system
    plain_seconds, _, _ = costs.plain(counts)
    seconds = {"fastmoe": plain_seconds, "smartmoe": plain_seconds}
    if "fastermoe" in systems:
        smart = Plan(peer_groups=max(devices // 4, 1))
        seconds["fastermoe"], _, _ = Costs(setting, spec, smart).plain(counts)
    journey = travel(setting.grid, counts, SAMPLES, TwoStage(least_gain=0.0))
    placed_seconds, _, _ = costs.placed(journey)

    step = WholeStep(f"netmoe-gpt-{model.lower()}", spec, setting.grid, layer.num_experts, SAMPLES)
    around = step.around_seconds(*costs.even())  # outside the MoE layers
    journeys = step.model.moe_layers / JOURNEY
    netmoe = around + journeys * placed_seconds
    return {system: (around + journeys * seconds[system]) / netmoe for system in systems}


class NetMoECluster:
    """Simulates layers on some nodes of the paper's cluster.

    Args:
        book: gives the constants.
        nodes: number of nodes in use.
        per_node: devices in use on each node.
    """

    def __init__(self, book: Book, nodes: int = 2, per_node: int = PER_NODE) -> None:
        self.book = book
        self._nodes = nodes
        self._per_node = per_node

    @cached_property
    def spec(self) -> ClusterSpec:
        """The cluster's preset, with the fitted constants in place."""
        spec = paper_cluster(self._nodes, self._per_node)
        nvlink, nic = spec.links
        nic = replace(nic, gbps=(self.book.constant("netmoe.nic"),))
        device = replace(spec.device, tflops=Tflops(fp32=self.book.constant("netmoe.tflops")))
        return replace(spec, device=device, links=(nvlink, nic))

    def table4_ms(self, samples: int) -> tuple[float, float]:
        """Return the milliseconds of scatter and computation in a layer of the small model on 16
        devices.

        Args:
            samples: samples per device.
        """
        grid = Grid(world=16, ep=16, ranks_per_node=PER_NODE)
        compiled = compile_plan(Plan(), grid)
        layer = workload(16, MODELS["S"], samples)
        run = Simulator(self.spec).run(compiled.forward, layer, grid)
        row_slots = {slot.name for slot in compiled.forward.slots if slot.kind is Kind.ROWS}
        sent = row_slots - {"rows"}  # "rows" is filled on the token's own rank
        spans = run.timeline.spans
        scatter = sum(
            span.end - span.start
            for span in spans
            if span.stage is Stage.DISPATCH and span.task in sent
        )
        computing = sum(span.end - span.start for span in spans if span.stage is Stage.EXPERT)
        return 1e3 * scatter, 1e3 * computing + self.book.constant("netmoe.launch")


SWEEP = ((2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8))
"""(nodes, devices per node) of the paper's sweep of N and J."""


def reproduce(book: Book) -> Reproduction:
    """Compute volumes, placements and times, and compare them with the paper's figures."""
    figures: dict[str, float] = {}
    after = {
        devices: placed(devices, book.constant("netmoe.concentration")) for devices in (16, 32)
    }
    for devices, effect in after.items():
        for model, dim in MODELS.items():
            intra, inter = before_mib(devices, dim)
            figures[f"netmoe.before.intra.{devices}.{model}"] = intra
            figures[f"netmoe.before.inter.{devices}.{model}"] = inter
            figures[f"netmoe.after.intra.{devices}.{model}"] = intra * effect.intra
            figures[f"netmoe.change.{devices}.{model}"] = 100 * (effect.inter - 1)
        # the models for which the paper prints how many samples move
        for model in ("S", "M", "L") if devices == 16 else ("S",):
            figures[f"netmoe.moved.nodes.{devices}.{model}"] = 100 * effect.moved_nodes
            figures[f"netmoe.moved.devices.{devices}.{model}"] = 100 * effect.moved_devices

    bed = NetMoECluster(book)
    for samples in (2, 4, 8, 16, 24):
        scatter, computing = bed.table4_ms(samples)
        figures[f"netmoe.scatter.{samples}"] = scatter
        figures[f"netmoe.compute.{samples}"] = computing

    gains = [step_gains(book, model, 4, PER_NODE) for model in MODELS]
    for system in gains[0]:
        best = max(model_gains[system] for model_gains in gains)
        figures[f"netmoe.speedup.{system}"] = best
    for nodes, per_node in SWEEP:
        sweep_gains = step_gains(book, "S", nodes, per_node, ("fastmoe",))
        figures[f"netmoe.sweep.n{nodes}.j{nodes * per_node}"] = sweep_gains["fastmoe"]
    findings = _findings(book, after)
    return book.reproduction("netmoe", book.rows(figures), findings, _charts(book, after))


def after_points(reproduction: Reproduction) -> float:
    """Return the median error in points of the changes in traffic between nodes, over rows that
    count as validation."""
    return statistics.median(reproduction.errors(unit="points", prefix="netmoe.change."))


def _findings(book: Book, after: dict[int, PlacedSamples]) -> tuple[PaperFinding, ...]:
    """Return the findings about the paper's statements."""
    concentration = book.constant("netmoe.concentration")
    return (
        PaperFinding(
            "one concentration explains the savings on 2 and on 4 nodes",
            f"{concentration:.3g} over all experts: {100 * (after[16].inter - 1):.1f} % on 2 "
            f"nodes, {100 * (after[32].inter - 1):.1f} % on 4",
            abs(after[16].inter - after[32].inter) < 0.05,
        ),
        PaperFinding(
            "volumes inside nodes fall on 2 nodes and rise on 4",
            f"{100 * (after[16].intra - 1):+.1f} % and {100 * (after[32].intra - 1):+.1f} %",
            after[16].intra < 1 < after[32].intra,
        ),
    )


def _charts(book: Book, after: dict[int, PlacedSamples]) -> tuple[Chart, ...]:
    """Return the charts of the paper, for the effect of placement by number of devices."""
    cases: dict[str, tuple[float | None, float]] = {}
    for devices, model in itertools.product((16, 32), MODELS):
        change = book.cells[f"netmoe.change.{devices}.{model}"].value
        published_saving = None if change is None else -change
        saving = 100 * (1 - after[devices].inter)
        cases[f"{devices}\n{model}"] = (published_saving, saving)

    concentrations = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    curves = []
    for devices in (16, 32):
        effects = [placed(devices, value, draws=4) for value in concentrations]
        savings = tuple(100 * (1 - effect.inter) for effect in effects)
        curves.append((f"{devices} devices", concentrations, savings))
    return (
        paper_bars("saved between nodes", "devices and model", "%", cases),
        Chart(
            "saved between nodes, by how alike samples are",
            "concentration",
            "%",
            tuple(curves),
            log_x=True,
        ),
    )
