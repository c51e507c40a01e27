"""Repeat the headline comparison of each of the five papers on emulated clusters.

Messages are real, over rate-limited links; computation is virtual. Links and accelerators are
chosen so that communication has the same share of the reference's step as in the paper. The methods
of a paper run alternately in one run. A ratio is the median over rounds of the alternative's time
over that of the paper's method, forward and backward. If the paper or its alternative chooses among
plans, the fastest plan counts. Nothing is computed: what could not run here is no headline here.
Published figures are those of `moesaic reproduce`.

A comparison is several methods on one cluster; a headline is a ratio between two of them. The book
(`read_book`) has the published figures by name.

    moesaic bench headlines --keep runs/headlines --json benchmarks/results/headlines.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from moesaic.balance.samples import TwoStage
from moesaic.planner.algorithm1 import choose
from moesaic.planner.simulator import Simulator
from moesaic.program.compile import Compiled, compile_plan
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
from moesaic_lab.layer.cells import SINGLES, LayerJob, all_ep
from moesaic_lab.layer.config import LayerPlace
from moesaic_lab.measure import TimedCell, timed
from moesaic_lab.netmoe import ranks as travel
from moesaic_lab.netmoe.benchmark import ALWAYS, BED_LAYER, GFLOPS, INTER, job_of
from moesaic_lab.netmoe.setting import Setting, routing
from moesaic_lab.reproduce.records import read_book
from moesaic_testbed.bed import Bed
from moesaic_testbed.cluster import Launcher

Rows = Sequence[Mapping[str, Any]]
Paper = Literal["parm", "schemoe", "tutel", "netmoe", "fastermoe"]
CORES = "the ranks share two cores, and both methods pay the processor time of messages"
STEPS = "the ranks share two cores, and each further part of an exchange costs them another message"
"""Reasons why speed-ups on an emulated cluster are smaller."""
OFF = 0.25
"""Largest share of a published gain by which the measured gain may differ, in either direction."""


@dataclass(frozen=True, kw_only=True)
class HeadlinesOptions(KeptOptions):
    """Options of `moesaic bench headlines`."""

    papers: tuple[Paper, ...] = ("parm", "schemoe", "tutel", "netmoe", "fastermoe")
    """Papers whose comparisons to run."""
    repeats: int = 16
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
    why: str = ""
    """Reason for a deviation of our ratio, for the table."""

    @property
    def published(self) -> float | None:
        """The published ratio of speeds; None if the paper does not print it."""
        if not self.cells:
            return None
        book = read_book()
        first, *others = self.cells
        ratio = book.value(first)
        if book.cells[first].unit == "gain %":
            ratio = 1 + ratio / 100
        for other in others:
            ratio /= book.value(other)
        return ratio


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
    of: str
    """Source of `share`."""
    reference: str
    """Method whose step has this share of communication."""
    headlines: tuple[Headline, ...]
    """The ratios. Each becomes a claim."""
    run: Callable[[Launcher, int], tuple[TimedCell, float]]
    """Called with (launcher, repeats); returns the measured times and the reference's seconds of
    computation."""

    @property
    def bed_in_words(self) -> str:
        """Nodes x ranks per node, and the rate between nodes."""
        return f"{self.bed.nodes}x{self.bed.ranks_per_node} {self.bed.inter}"


def of_layer(job: LayerJob, reference: str) -> Callable[[Launcher, int], tuple[TimedCell, float]]:
    """Return a `Comparison.run` that measures a layer's job."""

    def run(launcher: Launcher, repeats: int) -> tuple[TimedCell, float]:
        place = replace(job.place, repeats=repeats, pairs=repeats)
        with launcher.open(place.bed) as ranks:
            cell = layer.measure(ranks, replace(job, place=place))
        return cell, cell.charged[reference]

    return run


def parm(size: int) -> Comparison:
    """Return Parm's comparison in the proportions of its testbed of 32 GPUs, 4 per node, with N_MP
    = N_ESP = size.

    Communication has 68 to 96 % of the paper's 324 layers on 32 GPUs. `configs/layer.toml` derives
    the share here from bytes and operations. The paper's nodes send 5.7 GB/s, and a rank's
    MP-AllGather has 5.6 GB/s of output. So links here have 25 MB/s between nodes, and 62 inside
    them for four ranks, each of which receives half to three quarters of a gather's output.
    """
    place = LayerPlace(
        nodes=4,
        ranks_per_node=4,
        inter="200mbit",
        intra="500mbit",
        gflops=13.4,
        dim=256,
        hidden=1024,
        num_experts=16,
        top_k=2,
        tokens_per_rank=48,
    )
    grid = Grid(world=16, tp=size, ep=16 // size, etp=size, ranks_per_node=4)
    taken = choose(Simulator(place.cluster), place.workload(size), grid)  # Parm's Algorithm 1
    plans = {"baseline": SINGLES["baseline"], "Parm": taken, "S2 with SAA": SINGLES["s2, saa"]}
    book = read_book()
    return Comparison(
        paper="parm",
        name=f"parm-{size}",
        bed=place.bed,
        # The middle of two percentages.
        share=(book.value("parm.share.least") + book.value("parm.share.most")) / 200,
        of="the middle of its figure 1",
        reference="baseline",
        headlines=_headlines_of_parm(size, taken),
        run=of_layer(
            LayerJob(
                section="headlines",
                label=f"tp = etp = {size}",
                place=place,
                grid=grid,
                methods={name: compile_plan(plan, grid) for name, plan in plans.items()},
            ),
            "baseline",
        ),
    )


def _headlines_of_parm(size: int, taken: Plan) -> tuple[Headline, ...]:
    """Return Parm's ratios: of the plan that Algorithm 1 takes, and of S2 with SAA."""
    schedule = taken.schedule.upper()
    return (
        Headline(
            cells=(f"parm.chosen.b32.m{size}s{size}",),
            slow=("baseline",),
            fast=("Parm",),
            what=(
                f"a layer, N_MP = N_ESP = {size}: the baseline of equation 1 over Algorithm "
                f"1's choice, which is {schedule} here"
            ),
            why=CORES,
        ),
        Headline(
            cells=(f"parm.s2.b32.m{size}s{size}",),
            slow=("baseline",),
            fast=("S2 with SAA",),
            what=f"the same over S2 with SAA, N_MP = N_ESP = {size}, the published choice",
            why=CORES,
        ),
    )


SCHEMOE = {
    "nodes": 2,
    "ranks_per_node": 2,
    "dim": 256,
    "hidden": 1024,
    "num_experts": 16,
    "top_k": 1,
}
"""Mesh and sizes of the layer in ScheMoE's comparisons."""
TUTEL_DEGREES = (1, 2, 4)
"""Degrees of pipelining that Tutel tries."""


def schemoe_ablation() -> Comparison:
    """Return ScheMoE's ablation on the emulated cluster that `configs/layer.toml` derives from the
    paper's two times."""
    place = LayerPlace(
        **SCHEMOE,
        inter="100mbit",
        intra="200mbit",
        gflops=25,
        coded_mb_per_second=200,
        tokens_per_rank=1024,
    )
    plans = {
        "naive": Plan(order="fifo"),
        "+ zfp": Plan(order="fifo", codec="zfp", backward_codec="zfp"),
    }
    return Comparison(
        paper="schemoe",
        name="schemoe-ablation",
        bed=place.bed,
        share=0.72,
        of="computed from its ablation",
        reference="naive",
        headlines=(
            Headline(
                cells=("schemoe.ablation.naive", "schemoe.ablation.zfp"),
                slow=("naive",),
                fast=("+ zfp",),
                what="the ablation's layer: no codec over zfp",
                why="the paper does not give the rate of its codec; ours is assumed",
            ),
        ),
        run=of_layer(_schemoe_job(place, plans), "naive"),
    )


def schemoe() -> Comparison:
    """Return ScheMoE against Tutel, with the share of all-to-alls in the paper's CT-MoE steps under
    Tutel (51 to 59 %).

    Four times 512 rows x 1 KiB / 2 x 2 ranks at 25 MB/s take 84 ms, and 1.61 GFLOP of computation
    at 23.4 GFLOP/s take 69 ms. Codecs are as in the ablation.
    """
    place = LayerPlace(
        **SCHEMOE,
        inter="200mbit",
        intra="400mbit",
        gflops=23.4,
        coded_mb_per_second=400,
        tokens_per_rank=512,
    )
    plans = {f"Tutel, degree {n}": Plan(chunks=n) for n in TUTEL_DEGREES}
    coded = Plan(codec="zfp", backward_codec="zfp", all_to_all="pipelined")
    book = read_book()
    ours = {f"ScheMoE, r = {n}": replace(coded, chunks=n) for n in TUTEL_DEGREES}
    return Comparison(
        paper="schemoe",
        name="schemoe-tutel",
        bed=place.bed,
        share=(book.value("schemoe.share.least") + book.value("schemoe.share.most")) / 200,
        of="the middle of CT-MoE's steps, its Table 1",
        reference="Tutel, degree 1",
        headlines=(
            Headline(
                cells=("schemoe.layers.gain",),
                slow=tuple(plans),
                fast=("ScheMoE, r = 2",),
                what=(
                    "a layer: Tutel at its best degree over zfp, Pipe-A2A and OptSche at r = 2, "
                    "the degree of the paper's experiments"
                ),
                why="each chunk costs messages of its own",
            ),
            Headline(
                cells=(),
                slow=tuple(plans),
                fast=("ScheMoE, r = 1",),
                what="the codec alone: the same in one chunk, where OptSche orders nothing",
            ),
        ),
        run=of_layer(_schemoe_job(place, {**plans, **ours}), "Tutel, degree 1"),
    )


def _schemoe_job(place: LayerPlace, plans: Mapping[str, Plan]) -> LayerJob:
    """Return the job that measures ScheMoE's layer."""
    grid = all_ep(place)
    made = {name: compile_plan(plan, grid) for name, plan in plans.items()}
    return LayerJob(section="headlines", label="ScheMoE", place=place, grid=grid, methods=made)


def tutel() -> Comparison:
    """Return Tutel's adaptive pipelining in the proportions of its layer on 16 GPUs: T = 8 H, D = H
    of 2048, f = 1.

    All-to-alls have 34 % of a step. Four times 256 rows x 1 KiB / 2 x 4 ranks at 12.5 MB/s take 168
    ms, and 12.6 MFLOP of experts at 0.0386 GFLOP/s take 326 ms. Fairseq's layer, whose dispatch
    multiplies by masks, is not among the methods: nothing here runs it.
    """
    place = LayerPlace(
        nodes=2,
        ranks_per_node=4,
        inter="100mbit",
        intra="1gbit",
        gflops=0.0386,
        dim=256,
        hidden=16,
        num_experts=16,
        top_k=2,
        tokens_per_rank=128,
    )
    grid = all_ep(place)
    links = ("linear", "hier2d")
    ours = {
        f"Tutel, {link}, degree {n}": Plan(all_to_all=link, chunks=n)
        for link in links
        for n in TUTEL_DEGREES
    }
    made: dict[str, Compiled] = {name: compile_plan(plan, grid) for name, plan in ours.items()}
    first = next(iter(ours))
    book = read_book()
    job = LayerJob(section="headlines", label="Tutel", place=place, grid=grid, methods=made)
    return Comparison(
        paper="tutel",
        name="tutel",
        bed=place.bed,
        share=book.value("tutel.a2a.16") / book.value("tutel.step.16"),
        of="all-to-alls of a step on 16 GPUs",
        reference=first,
        headlines=(
            Headline(
                cells=("tutel.pipelining.linear1.16",),
                slow=(first,),
                fast=tuple(ours),
                what=(
                    "adaptive pipelining on 16 GPUs: linear and degree 1 over the best all-to-all "
                    "and degree"
                ),
                why=STEPS,
            ),
        ),
        run=of_layer(job, first),
    )


def fastermoe() -> Comparison:
    """Return FasterMoE's comparison in the proportions of MoE-GPT-S on the cluster johnny.

    There is one expert per rank, with F = 2 D. An expert's weights are twice the rows of a rank's
    copies, and half of all copies go to one expert (`moesaic reproduce fastermoe` finds 8.2 of 16).

    Johnny's constants (50 Gb/s per node, 11.5 TFLOP/s) give the share at this skew: 32 ms of
    messages and 37 ms of computation. Here the busiest node receives 0.71 of 256 rows x 1 KiB x 4
    ranks, 4 times, at 25 MB/s, in 118 ms. The busiest rank computes 3.9 times the mean rank's 201
    MFLOP at 5.65 GFLOP/s in 139 ms.
    """
    place = Skewed(
        name="johnny",
        nodes=2,
        ranks_per_node=4,
        inter="200mbit",
        intra="1gbit",
        gflops=5.65,
        dim=256,
        hidden=256,
        experts_per_rank=1,
        max_vio=(2.9,),
        calls=2,
        message_us=500,
    )
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
        share=0.46,
        of="computed from johnny's constants at this skew",
        reference=PLAIN,
        headlines=_headlines_of_fastermoe(),
        run=run,
    )


BOTH = ("both, published", "both")
"""Names of shadowing with the smart schedule: by the published policy and by ours."""


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


def _headlines_of_fastermoe() -> tuple[Headline, ...]:
    """Return FasterMoE's ratios."""
    load = "one synthetic load (a Zipf law) replaces the paper's trace of iterations"
    return (
        Headline(
            cells=("fastermoe.both.johnny",),
            slow=(PLAIN,),
            fast=BOTH,
            what="shadowing and smart schedule: FastMoE over both",
            why=load,
        ),
        Headline(
            cells=("fastermoe.shadow.johnny",),
            slow=(PLAIN,),
            fast=("shadow, published", "shadow"),
            what="shadowing alone",
            why=load,
        ),
        Headline(
            cells=("fastermoe.schedule.johnny",),
            slow=(PLAIN,),
            fast=(SMART,),
            what="smart schedule alone",
            why=STEPS,
        ),
    )


LOCALITY = 0.9
LAYERS = 8
"""Locality of the samples' choices, at which placement saves as much as NetMoE's Table 5 has for
its small model (39 % between nodes); and the number of consecutive MoE layers."""


def netmoe() -> Comparison:
    """Return NetMoE's comparison on 2 nodes: consecutive MoE layers, between which samples move
    towards their experts.

    The paper's Table 4 has 5.34 ms of scatter and 1.79 ms of computation at 4 samples per device,
    so messages have 86 % of a layer. Here, 1024 rows x 1 KiB / 2 x 2 ranks, 4 times per layer, at
    25 MB/s take 168 ms, and 1.61 GFLOP at 50 GFLOP/s take 32 ms. SmartMoE's placement moves no
    expert under even loads, where it would be FastMoE again; it has no headline.
    """
    setting = Setting(nodes=2, per_node=2, slots=8, layer=BED_LAYER, num_layers=LAYERS)
    bed = Bed(nodes=2, ranks_per_node=2, inter=INTER)
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
            of_ranks = ranks.run(travel.measure, job)
        copies = setting.on_a_rank.copies
        # 12 = 2 matrices, times 2 flops per element forward and 4 backward.
        computing = LAYERS * 12.0 * copies * BED_LAYER.dim * BED_LAYER.hidden / (1e9 * GFLOPS)
        return TimedCell(**timed([rank.spans for rank in of_ranks])), computing

    return Comparison(
        paper="netmoe",
        name="netmoe",
        bed=bed,
        share=moving / (moving + book.value("netmoe.compute.4")),
        of="its Table 4, 4 samples a device: two scatters and the computation",
        reference=fast,
        headlines=(
            Headline(
                cells=("netmoe.speedup.fastmoe",),
                slow=(fast,),
                fast=(placed,),
                what=f"{LAYERS} MoE layers in a row: FastMoE over NetMoE, up to",
                why="the first scatter and the last gather are not saved",
            ),
            Headline(
                cells=("netmoe.speedup.fastermoe",),
                slow=(faster,),
                fast=(placed,),
                what="FasterMoE over NetMoE, up to (even loads: nothing to shadow)",
                why=STEPS,
            ),
        ),
        run=run,
    )


COMPARISONS: dict[Paper, tuple[Callable[[], Comparison], ...]] = {
    "parm": (partial(parm, 4), partial(parm, 2)),
    "schemoe": (schemoe, schemoe_ablation),
    "tutel": (tutel,),
    "netmoe": (netmoe,),
    "fastermoe": (fastermoe,),
}
"""Comparisons by paper."""


def cases(options: HeadlinesOptions) -> list[Comparison]:
    """Return the comparisons of `options.papers`; fails on a machine that cannot emulate
    clusters."""
    require_cluster()
    return [make() for paper in options.papers for make in COMPARISONS[paper]]


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
    for headline in comparison.headlines:
        slow = fastest(headline.slow)
        fast = fastest(headline.fast)
        ratio = cell.ratio(slow, fast)
        off = None if headline.published is None else ratio.median / headline.published - 1
        rows.append(
            {
                "part": "headline",
                "paper": comparison.paper,
                "what": headline.what,
                "cells": list(headline.cells),
                "published": headline.published,
                **ratio.row("here"),
                "off": off,
                "slow": slow,
                "fast": fast,
                "bed": comparison.bed_in_words,
                "share": comparison.share,
                "share_of": comparison.of,
                "share_here": share_here,
                "why": headline.why,
            }
        )
    timed = [
        {
            "part": "method",
            "paper": comparison.paper,
            "comparison": comparison.name,
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
            f"{comparison.name}-{options.repeats}": partial(run, comparison)
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


def found(comparison: Comparison, headline: Headline, rows: Rows) -> MeasuredRatio | None:
    """Return the measured ratio of a headline; None if its methods were not run."""
    times = {
        row["method"]: row["median_seconds"]
        for row in rows
        if row["part"] == "method" and row["comparison"] == comparison.name
    }
    if any(name not in times for name in (*headline.slow, *headline.fast)):
        return None
    slow = min(headline.slow, key=lambda name: times[name])
    fast = min(headline.fast, key=lambda name: times[name])

    # The run has paired these two methods if its row of the headline names them.
    paired = (comparison.paper, slow, fast)
    for row in rows:
        is_same = not headline.cells or row.get("cells") == list(headline.cells)
        if is_same and (row["paper"], row.get("slow"), row.get("fast")) == paired:
            low, high = row["here_95"]
            return MeasuredRatio(median=row["here"], interval=(low, high))
    return MeasuredRatio(median=times[slow] / times[fast], interval=None)


def made() -> list[tuple[Comparison, Headline]]:
    """Return all headlines, each with its comparison."""
    comparisons = [make() for of_paper in COMPARISONS.values() for make in of_paper]
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


COLUMNS = ("paper", "what", "published", "here", "pairs", "share", "share_here", "off")

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
