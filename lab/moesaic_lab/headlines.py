"""Repeat the headline comparison of each of the five papers on emulated clusters.

Messages are real, over rate-limited links; computation is virtual. Links and accelerators are
chosen so that communication has the same share of the reference's step as in the paper. The methods
of a paper run alternately in one run. A ratio is the median over rounds of the alternative's time
over that of the paper's method, forward and backward. If the paper or its alternative chooses among
plans, the fastest plan counts. Nothing is computed: what could not run here is no headline here.
Published figures are those of `moesaic reproduce`.

The ranks share two cores, so a message costs processor time that it does not cost on a cluster.
Headlines are therefore measured where links and accelerators are `SLOWER` times slower: bytes and
products keep their proportion, and a message's processor time is a small share of a step. All
methods run at the full rates too, which tells what the bed takes from a gain.

A comparison is several methods on one cluster; a headline is a ratio between two of them. The book
(`read_book`) has the published figures by name.

    moesaic bench headlines --keep runs/headlines --json benchmarks/results/headlines.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from moesaic.balance.samples import TwoStage
from moesaic.configfile import override, read_table
from moesaic.planner.algorithm1 import choose
from moesaic.planner.simulator import Simulator
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.balance import cells as balance
from moesaic_lab.balance.config import BalanceBenchConfig, Skewed
from moesaic_lab.balance.methods import PLAIN, SMART, BalanceMethod, methods
from moesaic_lab.balance.ranks import BalanceJob
from moesaic_lab.benchmark import (
    Benchmark,
    KeptOptions,
    Shown,
    Told,
    each_kept,
    notes_of,
    require_cluster,
)
from moesaic_lab.claims import Claim
from moesaic_lab.layer import benchmark as layer
from moesaic_lab.layer.cells import LayerJob, all_ep
from moesaic_lab.layer.config import LayerPlace
from moesaic_lab.measure import TimedCell, timed
from moesaic_lab.netmoe import ranks as travel
from moesaic_lab.netmoe.benchmark import ALWAYS, BED_LAYER, GFLOPS, INTER, job_of
from moesaic_lab.netmoe.setting import Setting, routing
from moesaic_lab.reproduce.records import read_book
from moesaic_testbed.bed import Bed, bytes_per_second
from moesaic_testbed.cluster import Launcher

Rows = Sequence[Mapping[str, Any]]
Paper = Literal["parm", "schemoe", "tutel", "netmoe", "fastermoe"]
SLOWER = 8
"""How many times slower links and accelerators are where headlines are measured."""
OFF = 0.25
"""Largest share of a published gain by which the measured gain may differ, in either direction."""


@dataclass(frozen=True, kw_only=True)
class HeadlinesOptions(KeptOptions):
    """Options of `moesaic bench headlines`."""

    papers: tuple[Paper, ...] = ("parm", "schemoe", "tutel", "netmoe", "fastermoe")
    """Papers whose comparisons to run."""
    slower: tuple[int, ...] = (1, SLOWER)
    """By how many times to slow down links and accelerators; each in turn."""
    repeats: int = 4
    """How often each method is timed."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A ratio that a paper prints."""

    cells: tuple[str, ...]
    """Name of the published figure in `reproduce/data`, or the names of two figures whose quotient
    is meant; () for a ratio that the paper does not print, which is shown and not claimed."""
    what: str
    """Description of the comparison, for the table."""
    slow: tuple[str, ...]
    """Methods of the alternative."""
    fast: tuple[str, ...]
    """Methods of the paper."""

    @property
    def published(self) -> float | None:
        """The published ratio of speeds; None if the paper does not print it."""
        return read_book().ratio(self.cells) if self.cells else None


CONFIG = Path(__file__).parent / "configs" / "headlines.toml"
TABLES = read_table(CONFIG)
"""The comparisons' beds, layers, plans and ratios by name."""


def ratios(table: Mapping[str, Any], **words: str) -> dict[str, tuple[Headline, ...]]:
    """Return the headlines and the parts of a comparison; `words` fill the places in their
    texts."""
    found: dict[str, tuple[Headline, ...]] = {}
    for kind in ("headlines", "parts"):
        found[kind] = tuple(
            Headline(
                cells=tuple(cell.format(**words) for cell in entry["cells"]),
                what=entry["what"].format(**words),
                slow=tuple(entry["slow"]),
                fast=tuple(entry["fast"]),
            )
            for entry in table.get(kind, ())
        )
    return found


def slowed_rate(rate: str, slower: int) -> str:
    """Return the rate of a link that is `slower` times slower."""
    return f"{8 * bytes_per_second(rate, 'rate') / 1e6 / slower:g}mbit"


def slowed(fields: Mapping[str, Any], slower: int) -> dict[str, Any]:
    """Return the fields of a place whose links and accelerators are `slower` times slower."""
    rates = {name: slowed_rate(fields[name], slower) for name in ("inter", "intra")}
    for name in ("gflops", "coded_mb_per_second"):
        if name in fields:
            rates[name] = fields[name] / slower
    return {**fields, **rates}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods that run alternately on one emulated cluster, and the paper's ratios between them."""

    paper: Paper
    name: str
    """Unique name, used in the name of the file with kept results."""
    bed: Bed
    """The emulated cluster."""
    share: float
    """Share of communication in the reference's step, in the paper."""
    reference: str
    """Method whose step has this share of communication."""
    headlines: tuple[Headline, ...]
    """The ratios. Each becomes a claim."""
    parts: tuple[Headline, ...] = ()
    """Ratios of single parts of the paper's method, which are shown and not claimed."""
    slower: int = 1
    """How many times slower links and accelerators are than the numbers of the comparison say."""
    run: Callable[[Launcher, int], tuple[TimedCell, float]]
    """Called with (launcher, repeats); returns the measured times and the reference's seconds of
    computation."""

    @property
    def bed_in_words(self) -> str:
        """Nodes x ranks per node, and the rate between nodes."""
        return f"{self.bed.nodes}x{self.bed.ranks_per_node} {self.bed.inter}"


def share_of(table: Mapping[str, Any]) -> float:
    """Return the share of communication in the reference's step, in the paper: the middle of two
    published percentages, the quotient of two published times, or the share that follows from the
    paper's figures."""
    book = read_book()
    if "middle_of" in table:
        return sum(map(book.value, table["middle_of"])) / 200
    if "quotient_of" in table:
        return book.ratio(table["quotient_of"])
    return float(table["share"])


def of_layer(
    name: str, slower: int, grid: Grid | None = None, chosen: Mapping[str, Plan] | None = None
) -> Comparison:
    """Return a comparison of a layer's plans.

    Args:
        name: the comparison's: a table of the configuration, with the size behind it if there are
            several.
        slower: how many times slower links and accelerators are.
        grid: the mesh; None for expert parallelism alone.
        chosen: plans that the configuration does not have, by the names of methods.
    """
    paper, _, size = name.partition("-")
    table = TABLES[name if name in TABLES else paper]
    place = LayerPlace(**slowed(table["place"], slower))
    grid = grid or all_ep(place)
    plans = {
        method: override(Plan(), entry, source=str(CONFIG))
        for method, entry in table["plans"].items()
    } | dict(chosen or {})
    made = {method: compile_plan(plan, grid) for method, plan in plans.items()}
    job = LayerJob(section="headlines", label=name, place=place, grid=grid, methods=made)
    schedules = [plan.schedule.upper() for plan in (chosen or {}).values()]

    def run(launcher: Launcher, repeats: int) -> tuple[TimedCell, float]:
        timed = replace(place, repeats=repeats, pairs=repeats)
        with launcher.open(place.bed) as ranks:
            cell = layer.measure(ranks, replace(job, place=timed))
        return cell, cell.charged[table["reference"]]

    return Comparison(
        paper=paper,  # type: ignore[arg-type]
        name=name,
        bed=place.bed,
        share=share_of(table),
        reference=table["reference"],
        **ratios(table, size=size, chosen=" and ".join(schedules)),
        slower=slower,
        run=run,
    )


def parm(size: int, slower: int) -> Comparison:
    """Return Parm's comparison in the proportions of its testbed of 32 GPUs, 4 per node, with N_MP
    = N_ESP = size, with the plan that Parm's Algorithm 1 chooses."""
    place = LayerPlace(**slowed(TABLES["parm"]["place"], slower))
    grid = Grid(world=16, tp=size, ep=16 // size, etp=size, ranks_per_node=4)
    taken = choose(Simulator(place.cluster), place.workload(size), grid)
    return of_layer(f"parm-{size}", slower, grid, {"Parm": taken})


def fastermoe(slower: int) -> Comparison:
    """Return FasterMoE's comparison in the proportions of MoE-GPT-S on the cluster johnny, whose
    constants give the share of communication at this skew."""
    place = Skewed(**slowed(TABLES["fastermoe"]["place"], slower))
    chosen = _methods_of_fastermoe(place)

    def run(launcher: Launcher, repeats: int) -> tuple[TimedCell, float]:
        """Measure the case, alternating between the methods."""
        timed = replace(place, repeats=repeats, pairs=repeats)
        (case,) = BalanceBenchConfig(cells=(timed,)).cases()
        with launcher.open(timed.bed) as ranks:
            (cell,) = balance.measure(ranks, [BalanceJob(case=case, methods=chosen)])
        return cell, cell.charged[PLAIN]

    return Comparison(
        paper="fastermoe",
        name="fastermoe",
        bed=place.bed,
        share=share_of(TABLES["fastermoe"]),
        reference=PLAIN,
        **ratios(TABLES["fastermoe"]),
        slower=slower,
        run=run,
    )


def _methods_of_fastermoe(place: Skewed) -> dict[str, BalanceMethod]:
    """Return the methods by name: without balancing, shadowing, smart schedule, both.

    ZeRO-3 is not among them: a rank would fetch every expert from its owner, four times over a
    node's link, which a ring crosses once. `moesaic reproduce fastermoe` simulates the ring.
    """
    known = methods(place.grid)
    steps = Plan(peer_groups=4)
    published = replace(steps, replication="published")
    shadow = replace(steps, replication="shadow")
    return {
        **{name: known[name] for name in (PLAIN, "shadow, published", "shadow")},
        SMART: BalanceMethod(plan=steps),
        "both, published": BalanceMethod(plan=published, is_single=False),
        "both": BalanceMethod(plan=shadow, is_single=False),
    }


LOCALITY = 0.9
LAYERS = 8
"""Locality of the samples' choices, at which placement saves as much as NetMoE's Table 5 has for
its small model (39 % between nodes); and the number of consecutive MoE layers."""


def netmoe(slower: int) -> Comparison:
    """Return NetMoE's comparison on 2 nodes: consecutive MoE layers, between which samples move
    towards their experts."""
    setting = Setting(nodes=2, per_node=2, slots=8, layer=BED_LAYER, num_layers=LAYERS)
    bed = Bed(nodes=2, ranks_per_node=2, inter=slowed_rate(INTER, slower))
    fast = "FastMoE"
    faster = "FasterMoE"
    placed = "NetMoE"
    book = read_book()
    moving = 2 * book.value("netmoe.scatter.4")

    def run(launcher: Launcher, repeats: int) -> tuple[TimedCell, float]:
        """Measure the layers, alternating between the methods."""
        plans = {faster: compile_plan(Plan(peer_groups=setting.nodes), setting.grid)}
        methods = {fast: None, faster: None, placed: TwoStage(**ALWAYS)}
        trace = routing(setting, LOCALITY, tokens=True)
        job = job_of(setting, trace, methods, plans=plans, repeats=repeats)
        with launcher.open(bed) as ranks:
            of_ranks = ranks.run(travel.measure, replace(job, gflops=GFLOPS / slower))
        copies = setting.on_a_rank.copies
        # 12 = 2 matrices, times 2 flops per element forward and 4 backward.
        flops = LAYERS * 12.0 * copies * BED_LAYER.dim * BED_LAYER.hidden
        computing = flops * slower / (1e9 * GFLOPS)
        return TimedCell(**timed([rank.spans for rank in of_ranks])), computing

    return Comparison(
        paper="netmoe",
        name="netmoe",
        bed=bed,
        share=moving / (moving + book.value("netmoe.compute.4")),
        reference=fast,
        **ratios(TABLES["netmoe"]),
        slower=slower,
        run=run,
    )


COMPARISONS: dict[Paper, tuple[Callable[[int], Comparison], ...]] = {
    "parm": (partial(parm, 4), partial(parm, 2)),
    "schemoe": (partial(of_layer, "schemoe-tutel"), partial(of_layer, "schemoe-ablation")),
    "tutel": (partial(of_layer, "tutel"),),
    "netmoe": (netmoe,),
    "fastermoe": (fastermoe,),
}
"""Comparisons by paper, each made by how many times links and accelerators are slower."""


def cases(options: HeadlinesOptions) -> list[Comparison]:
    """Return the comparisons of `options.papers`; fails on a machine that cannot emulate
    clusters."""
    require_cluster()
    return [
        make(slower)
        for slower in options.slower
        for paper in options.papers
        for make in COMPARISONS[paper]
    ]


def rows_of(comparison: Comparison, cell: TimedCell, computing: float) -> list[dict[str, Any]]:
    """Return a row per headline and one per method.

    Args:
        cell: the times of the comparison's methods.
        computing: seconds of computation in a step of the reference.
    """

    def fastest(names: Sequence[str]) -> str:
        return min(names, key=lambda name: cell.timings[name].median)

    share_here = 1 - computing / cell.timings[comparison.reference].median
    rows: list[dict[str, Any]] = []
    for headline in (*comparison.headlines, *comparison.parts):
        slow = fastest(headline.slow)
        fast = fastest(headline.fast)
        ratio = cell.ratio(slow, fast)
        off = None if headline.published is None else ratio.median / headline.published - 1
        rows.append(
            {
                "part": "headline",
                "paper": comparison.paper,
                "comparison": comparison.name,
                "what": headline.what,
                "cells": list(headline.cells),
                "published": headline.published,
                **ratio.row("here"),
                "off": off,
                "slow": slow,
                "fast": fast,
                "slower": comparison.slower,
                "bed": comparison.bed_in_words,
                "share": comparison.share,
                "share_here": share_here,
            }
        )
    timed = [
        {
            "part": "method",
            "paper": comparison.paper,
            "comparison": comparison.name,
            "slower": comparison.slower,
            "method": name,
            **timing.row(),
        }
        for name, timing in cell.timings.items()
    ]
    return rows + timed


def measure(
    options: HeadlinesOptions, comparisons: list[Comparison], told: Told
) -> list[dict[str, Any]]:
    """Run the comparisons one after another and return their rows."""
    with Launcher() as launcher:

        def run(comparison: Comparison) -> list[dict[str, Any]]:
            return rows_of(comparison, *comparison.run(launcher, options.repeats))

        runs = {
            f"{comparison.name}-{comparison.slower}-{options.repeats}": partial(run, comparison)
            for comparison in comparisons
        }
        return [row for _, rows in each_kept(options.keep, runs, told) for row in rows]


@dataclass(frozen=True, kw_only=True)
class MeasuredRatio:
    """What the rows of a run say about a headline."""

    median: float
    interval: tuple[float, float] | None
    """95 % interval over pairs of runs in turn; None if the run paired other methods, and the ratio
    is that of medians."""


def rows_about(comparison: Comparison, rows: Rows) -> Rows:
    """Return the rows of a comparison."""
    wanted = (comparison.name, comparison.slower)
    return [row for row in rows if (row.get("comparison"), row.get("slower")) == wanted]


def found(comparison: Comparison, headline: Headline, rows: Rows) -> MeasuredRatio | None:
    """Return the measured ratio of a headline; None if its methods were not run."""
    rows = rows_about(comparison, rows)
    times = {row["method"]: row["median_seconds"] for row in rows if row["part"] == "method"}
    if any(name not in times for name in (*headline.slow, *headline.fast)):
        return None
    slow = min(headline.slow, key=lambda name: times[name])
    fast = min(headline.fast, key=lambda name: times[name])

    # The run has paired these two methods if its row of the headline names them.
    for row in rows:
        is_same = not headline.cells or row.get("cells") == list(headline.cells)
        if is_same and (row.get("slow"), row.get("fast")) == (slow, fast):
            low, high = row["here_95"]
            return MeasuredRatio(median=row["here"], interval=(low, high))
    return MeasuredRatio(median=times[slow] / times[fast], interval=None)


def made() -> list[tuple[Comparison, Headline]]:
    """Return all headlines, each with its comparison."""
    comparisons = [make(SLOWER) for of_paper in COMPARISONS.values() for make in of_paper]
    return [(each, headline) for each in comparisons for headline in each.headlines]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return a claim per published headline: how far the measured gain is from the published one,
    in either direction, as a share of the published gain."""
    claimed = []
    for comparison, headline in made():
        if headline.published is None:
            continue
        ratio = found(comparison, headline, rows)
        name = f"papers.{headline.cells[0]}"
        if ratio is None:
            claimed.append(Claim(name=name, value=None, target=OFF, reason="not run"))
            continue
        gain = ratio.median - 1
        published_gain = headline.published - 1
        off = abs(gain / published_gain - 1)
        claimed.append(Claim(name=name, value=off, target=OFF))
    return claimed


COLUMNS = ("paper", "what", "slower", "published", "here", "pairs", "share", "share_here", "off")

BENCHMARK = Benchmark(
    name="headlines",
    description="Repeat the headline of each of the five papers on emulated clusters.",
    options=HeadlinesOptions,
    notes=notes_of(__doc__),
    cases=cases,
    measure=measure,
    claims=claims,
    columns=(
        Shown(
            title="The papers' headlines, virtual compute",
            where={"part": ("headline",)},
            columns=COLUMNS,
            group_by=("paper",),
        ),
    ),
)
