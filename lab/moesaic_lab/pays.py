"""Where a technique of the papers pays: the time of a layer without it over the time with it,
simulated.

Forward and backward passes of one layer on a cluster of the technique's paper, over tokens per
rank, the rate between nodes relative to the paper's, the layer's width, and the skew of the
routing: the exponent of a Zipf law over the experts, 0 for even loads. Nothing is fitted here.
`python -m moesaic_lab.papers_page` writes the pages of the papers from the results.

    moesaic bench pays --json benchmarks/results/pays.json
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.configfile import override, read_table
from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload, zipf_counts
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.reproduce.fastermoe import FasterMoEBed, Model

TOKENS = (16, 64, 256, 1024, 4096, 16384)
LINKS = (0.25, 1.0, 4.0)
"""Rates between nodes, relative to the paper's cluster."""
WIDTHS = (256, 2048)
SKEWS = (0.0, 1.2)
SEED = 1
RANKS = 16
"""Ranks of every simulated layer."""
CONFIG = Path(__file__).parent / "configs" / "pays.toml"


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique of a paper: a plan, and the plan that differs by the technique alone."""

    paper: str
    name: str
    """What the technique changes, for the table."""
    plan: Plan
    without: Plan
    measured: tuple[tuple[str, ...], ...]
    """Committed benchmarks: name, the word of a method's name with the technique, the word in its
    place without it, and how the names of beds begin if not all count."""
    cluster: str = ""
    """Preset of the paper's cluster; empty if the technique is not simulated here."""
    tp: int = 1
    etp: int = 1
    top_k: int = 2
    shadows: bool = False
    """Whether the layer with the technique has FasterMoE's shadows too."""
    shadows_without: bool = False
    """Whether the layer without it has them."""

    @property
    def grid(self) -> Grid:
        """The mesh of `RANKS` ranks."""
        per_node = read_cluster(self.cluster).devices_per_node
        ep = RANKS // self.etp
        return Grid(world=RANKS, tp=self.tp, ep=ep, etp=self.etp, ranks_per_node=per_node)


def _technique(entry: dict[str, Any]) -> Technique:
    """Return a technique from its table in the configuration."""
    source = str(CONFIG)
    fields = entry | {
        "plan": override(Plan(), entry.get("plan", {}), source=source),
        "without": override(Plan(), entry.get("without", {}), source=source),
        "measured": tuple(tuple(words) for words in entry["measured"]),
    }
    return Technique(**fields)


TECHNIQUES = tuple(map(_technique, read_table(CONFIG)["techniques"]))


class TechniqueBed:
    """Simulates layers with and without a technique.

    Args:
        faster: rate between nodes over that of the preset.
    """

    def __init__(self, technique: Technique, faster: float) -> None:
        self.technique = technique
        self.grid = technique.grid
        per_node = read_cluster(technique.cluster).devices_per_node
        spec = read_cluster(technique.cluster, nodes=RANKS // per_node)
        links = []
        for link in spec.links:
            if link.carries == "outside":
                link = replace(link, gbps=tuple(faster * rate for rate in link.gbps))
            links.append(link)
        # as our layers send; the plan "sequential" sends in turn
        host = replace(spec.host, messages="together")
        self.spec: ClusterSpec = replace(spec, links=tuple(links), host=host)
        self._simulator = Simulator(self.spec)
        self._beds: dict[Model, FasterMoEBed] = {}
        self._compiled = {
            plan: compile_plan(plan, self.grid) for plan in (technique.plan, technique.without)
        }

    def gain(self, tokens: int, width: int, skew: float) -> float:
        """Return the time without the technique over the time with it.

        Args:
            tokens: tokens per rank; a tensor-parallel group has tp times as many.
            width: width of tokens; experts have twice this width inside.
            skew: exponent of the Zipf law.
        """
        technique = self.technique
        layer = Workload(
            tokens=tokens * technique.tp,
            num_experts=16,
            top_k=technique.top_k,
            dim=width,
            hidden=2 * width,
            matrices=2,
            dtype="fp32",
        )
        slow = self._seconds(technique.without, layer, skew, technique.shadows_without)
        return slow / self._seconds(technique.plan, layer, skew, technique.shadows)

    def _seconds(self, plan: Plan, layer: Workload, skew: float, shadows: bool) -> float:
        """Return the simulated seconds of a layer, forward and backward, under a plan."""
        if shadows or self.technique.paper == "fastermoe":
            model = Model(cluster="johnny", gpus=16, tokens=layer.tokens, dim=layer.dim)
            if model not in self._beds:
                self._beds[model] = FasterMoEBed(model, self.spec)
            bed = self._beds[model]
            counts = bed.counts(skew, SEED)
            shadowed = bed.chosen(counts, "corrected") if shadows else []
            return bed.shadowed(plan, counts, shadowed)

        compiled: Compiled = self._compiled[plan]
        if not skew:
            return self._simulator.layer_seconds(
                compiled.forward, compiled.backward, layer, compiled.grid
            )
        counts = zipf_counts(self.grid.dp, layer, exponent=skew, seed=SEED)
        shapes = compiled.shapes(layer.num_experts)
        sizes = sizes_of(compiled.forward, layer, compiled.grid, counts, shapes=shapes)
        programs = compiled.forward, compiled.backward
        return sum(
            self._simulator.run(each, layer, compiled.grid, sizes=sizes).seconds
            for each in programs
        )


def crossovers(tokens: Sequence[int], gains: Sequence[float]) -> list[float]:
    """Return the tokens at which a gain passes 1, each between two of the sizes: interpolated
    linearly over the logarithm of the tokens."""
    crossings = []
    points = zip(map(math.log, tokens), gains)
    for (x0, gain0), (x1, gain1) in itertools.pairwise(points):
        if (gain0 < 1) != (gain1 < 1):
            x = x0 + (x1 - x0) * (1 - gain0) / (gain1 - gain0)
            crossings.append(math.exp(x))
    return crossings


def measure(options: BenchmarkOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Simulate every technique; return a row per technique, rate, width and skew, with the gains by
    tokens."""
    rows = []
    simulated = [technique for technique in TECHNIQUES if technique.cluster]
    for technique, links in itertools.product(simulated, LINKS):
        told(f"{technique.paper}, {technique.name}, links x{links:g}")
        bed = TechniqueBed(technique, links)
        for width, skew in itertools.product(WIDTHS, SKEWS):
            gains = [bed.gain(tokens, width, skew) for tokens in TOKENS]
            rows.append(
                {
                    "paper": technique.paper,
                    "technique": technique.name,
                    "links": links,
                    "width": width,
                    "skew": skew,
                    "tokens": list(TOKENS),
                    "gains": gains,
                    "crossovers": crossovers(TOKENS, gains),
                    "least": min(gains),
                    "most": max(gains),
                }
            )
    return rows


BENCHMARK = Benchmark(
    name="pays",
    description="Simulate where each technique of the five papers pays.",
    options=BenchmarkOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=lambda rows: list[Claim](),
    columns=(
        Shown(
            title="time without a technique over time with it, simulated",
            columns=("technique", "links", "width", "skew", "least", "most"),
            group_by=("technique",),
        ),
    ),
)
