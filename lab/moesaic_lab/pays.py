"""Where a technique of the papers pays: the time of a layer without it over the time with it,
simulated along four axes.

A technique starts from a layer of its paper on 16 ranks of the paper's cluster. Then one number
changes at a time: the tokens per rank; the share of the step that messages take, by the speed of
products; the skew of the routing, MaxVio of the experts' loads under a Zipf law, 0 for
even loads; and the ranks of a node. Nothing is fitted here. `python -m moesaic_lab.papers_page`
writes docs/pays.md from the results.

    moesaic bench pays --json benchmarks/results/pays.json
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.configfile import override, read_table
from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload, zipf_counts
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.reproduce.fastermoe import FasterMoEBed, Model
from moesaic_lab.reproduce.fastermoe_model import stay_home

SEED = 1
RANKS = 16
"""Ranks and experts of every simulated layer."""
CONFIG = Path(__file__).parent / "configs" / "pays.toml"


@dataclass(frozen=True, kw_only=True)
class PaysOptions(BenchmarkOptions):
    """Options of `moesaic bench pays`: the values of each axis."""

    tokens: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    """Tokens per rank."""
    products: tuple[float, ...] = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
    """Speeds of products over those of the paper's devices, which give the shares of messages."""
    skew: tuple[float, ...] = (0.0, 0.4, 0.8, 1.2, 1.6)
    """Exponents of the Zipf law."""
    ranks: tuple[int, ...] = (2, 4, 8)
    """Ranks of a node, of 16."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A layer and its place, from which one number at a time changes."""

    tokens: int
    """Tokens per rank; a tensor-parallel group has tp times as many."""
    width: int
    """Width of tokens."""
    hidden: int
    """Width inside the experts; FasterMoE's is twice `width`."""
    skew: float = 0.0
    """Exponent of the Zipf law."""
    products: float = 1.0
    """Speed of products over that of the paper's devices."""
    ranks: int
    """Ranks of a node."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique of a paper: a plan, and the plan that differs by the technique alone."""

    paper: str
    name: str
    """What the technique changes, for the table."""
    use: str
    """Option that switches it on."""
    plan: Plan
    without: Plan
    measured: tuple[tuple[str, ...], ...]
    """Committed benchmarks: name, the word of a method's name with the technique, the word in its
    place without it, and how the names of beds begin if not all count."""
    published: Mapping[str, Any]
    """The published gain: `cells`, one or a quotient of two, and where it stands on each axis that
    the paper tells."""
    at: Point | None = None
    """The paper's layer; None if the technique is not simulated here."""
    cluster: str = ""
    """Preset of the paper's cluster."""
    tp: int = 1
    etp: int = 1
    top_k: int = 2
    shadows: bool = False
    """Whether the layer with the technique has FasterMoE's shadows too."""
    shadows_without: bool = False
    """Whether the layer without it has them."""


def _technique(entry: dict[str, Any]) -> Technique:
    """Return a technique from its table in the configuration."""
    source = str(CONFIG)
    fields = entry | {
        "plan": override(Plan(), entry.get("plan", {}), source=source),
        "without": override(Plan(), entry.get("without", {}), source=source),
        "measured": tuple(tuple(words) for words in entry["measured"]),
        "published": entry.get("published", {}),
        "at": Point(**entry["at"]) if "at" in entry else None,
    }
    return Technique(**fields)


TECHNIQUES = tuple(map(_technique, read_table(CONFIG)["techniques"]))


class TechniqueBed:
    """Simulates a layer with and without a technique at one point."""

    def __init__(self, technique: Technique, at: Point) -> None:
        self.technique = technique
        self.at = at
        self._spec = cluster(technique.cluster, at)
        self._grid = Grid(
            world=RANKS,
            tp=technique.tp,
            ep=RANKS // technique.etp,
            etp=technique.etp,
            ranks_per_node=at.ranks,
        )
        self._layer = Workload(
            tokens=at.tokens * technique.tp,
            num_experts=RANKS,
            top_k=technique.top_k,
            dim=at.width,
            hidden=at.hidden,
            matrices=2,
            dtype="fp32",
        )
        self._counts = zipf_counts(self._grid.dp, self._layer, exponent=at.skew, seed=SEED)

    def found(self) -> dict[str, float]:
        """Return the gain: the time without the technique over the time with it; the share of the
        former in which nothing is computed; and the skew as MaxVio of the experts' loads."""
        technique = self.technique
        slow, computing = self._seconds(technique.without, technique.shadows_without)
        fast, _ = self._seconds(technique.plan, technique.shadows)
        loads = self._counts.sum(0)
        max_vio = float(loads.max() / loads.mean()) - 1
        return {"gain": slow / fast, "share": 1 - computing / slow, "skew": max_vio}

    def _seconds(self, plan: Plan, shadows: bool) -> tuple[float, float]:
        """Return the simulated seconds of a layer under a plan, forward and backward, and those in
        which the busiest rank computes."""
        counts = self._counts
        if self.technique.paper == "fastermoe":
            model = Model(cluster="johnny", gpus=RANKS, tokens=self.at.tokens, dim=self.at.width)
            bed = FasterMoEBed(model, self._spec)
            shadowed = bed.chosen(counts, "corrected") if shadows else []
            computing = bed.run(plan, stay_home(counts, shadowed)).computing
            return bed.shadowed(plan, counts, shadowed), computing

        compiled = compile_plan(plan, self._grid)
        shapes = compiled.shapes(RANKS)
        sizes = sizes_of(compiled.forward, self._layer, compiled.grid, counts, shapes=shapes)
        simulator = Simulator(self._spec)
        runs = [
            simulator.run(each, self._layer, compiled.grid, sizes=sizes)
            for each in (compiled.forward, compiled.backward)
        ]
        return sum(run.seconds for run in runs), sum(run.compute_seconds for run in runs)


def cluster(name: str, at: Point) -> ClusterSpec:
    """Return a paper's cluster with as many ranks per node and the speed of products of a point.
    What all devices of a node share, they still share."""
    spec = read_cluster(name, nodes=RANKS // at.ranks)
    links = []
    for link in spec.links:
        shared = link.devices * at.ranks // spec.devices_per_node
        devices = max(shared, 1) if link.devices > 1 else 1
        links.append(replace(link, devices=devices))
    # as our layers send; the plan "sequential" sends in turn
    host = replace(spec.host, messages="together")
    device = spec.device.with_products(at.products)
    return replace(spec, devices_per_node=at.ranks, links=tuple(links), host=host, device=device)


def crossovers(places: Sequence[float], gains: Sequence[float]) -> list[float]:
    """Return the places on an axis at which a gain passes 1, each between two of the simulated
    ones: interpolated linearly."""
    crossings = []
    for (x0, gain0), (x1, gain1) in itertools.pairwise(zip(places, gains)):
        if (gain0 < 1) != (gain1 < 1):
            crossings.append(x0 + (x1 - x0) * (1 - gain0) / (gain1 - gain0))
    return crossings


def along(technique: Technique, axis: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the row of a technique along an axis, in ascending order of its places."""
    assert technique.at is not None
    found = []
    for value in values:
        changed: dict[str, Any] = {axis: value}
        here = TechniqueBed(technique, replace(technique.at, **changed)).found()
        # Shares and loads follow from what is set.
        place = here["share"] if axis == "products" else here.get(axis, value)
        found.append((place, here["gain"]))
    places, gains = zip(*sorted(found))
    if axis == "tokens":  # tokens are interpolated over their logarithm
        crossings = [math.exp(x) for x in crossovers([math.log(x) for x in places], gains)]
    else:
        crossings = crossovers(places, gains)
    return {
        "paper": technique.paper,
        "technique": technique.name,
        "axis": "share" if axis == "products" else axis,
        "places": places,
        "gains": gains,
        "crossovers": crossings,
        "least": min(gains),
        "most": max(gains),
    }


def measure(options: PaysOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Simulate every technique; return a row per technique and axis."""
    rows = []
    for technique in TECHNIQUES:
        if technique.at is None:
            continue
        told(f"{technique.paper}, {technique.name}")
        # The gain, the share of messages and the skew of the paper's own layer.
        own = TechniqueBed(technique, technique.at).found()
        for axis in AXES:
            row = along(technique, axis, getattr(options, axis))
            rows.append({**row, **own})
    return rows


AXES = ("tokens", "products", "skew", "ranks")
"""The numbers of a point that change, one at a time."""

BENCHMARK = Benchmark(
    name="pays",
    description="Simulate where each technique of the five papers pays.",
    options=PaysOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=lambda rows: list[Claim](),
    columns=(
        Shown(
            title="time without a technique over time with it, simulated",
            columns=("technique", "axis", "gain", "least", "most"),
            group_by=("technique",),
        ),
    ),
)
