"""NetMoE's comparison: bytes between nodes and time that moving samples saves, at several
localities of the routing.

Simulated: NetMoE's small model (768 wide, 4 samples of 1024 tokens per device, two experts per
device, top 2, float32, 8 MoE layers) on 4 nodes of 2, 4 and 8 devices of its cluster, with one port
per node. Measured: 3 layers forward and backward on emulated clusters with 200 Mbit/s between
nodes, all methods in turn, with real bytes and virtual experts; ranks share the machine's cores.
Predictions are the cost model's, with assumed host costs. Locality is as `moesaic trace show`
defines it. Routing of different layers is drawn independently. Further routing was recorded early
and late in the training of a GPT with 4 layers of 16 experts, on the source of Python's library and
on Django's messages in all languages; it is simulated on 2 nodes of 8 devices. The prediction of
the next layer's routing is exact. The last layer returns samples to their homes, in simulation and
measurement, and its cost is included. Decisions are timed on one core of this machine; the time
that hides them is simulated on NetMoE's 2 nodes of 8.

    moesaic bench netmoe --json benchmarks/results/netmoe.json \
        --picture docs/images/bench/netmoe.svg

Terms: a method is a policy that places samples (`METHODS`), None for plain expert parallelism. A
load is some routing, a `Trace`, with the keys of its rows. Rows are dictionaries; `inter` and
`intra` are bytes between and inside nodes, and `saved` is a share of plain's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from moesaic.balance.samples import TwoStage, Weighed
from moesaic.planner.cluster import Device, Tflops
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.plan import Plan
from moesaic.program.rates import Rates
from moesaic.traces.load import locality
from moesaic.traces.trace import Trace
from moesaic_lab.beds import BedCell, Place, joined
from moesaic_lab.benchmark import (
    Benchmark,
    DrawnOptions,
    KeptOptions,
    Shown,
    Told,
    each_kept,
    notes_of,
    on_beds,
)
from moesaic_lab.claims import Claim, claimed, figures
from moesaic_lab.emulated import UNSHAPED_GBPS, emulated
from moesaic_lab.kept_ranks import KeptRanks
from moesaic_lab.measure import Timing, spread
from moesaic_lab.netmoe.ranks import Method, TravelJob
from moesaic_lab.netmoe.ranks import measure as measure_steps
from moesaic_lab.netmoe.setting import (
    PAPER,
    Costs,
    Setting,
    decision_seconds,
    paper_cluster,
    paper_setting,
    recorded,
    routing,
    trained_traces,
    travel,
)
from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_lab.policies.stay import Stay

LOCALITIES = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8)
INTER = "200mbit"
INTER_GBPS = 0.2
GFLOPS = 50.0
BEDS = {bed.shape: bed for bed in (Place(nodes=2, inter=INTER), Place(nodes=4, inter=INTER))}
BED_LOCALITIES = {"2x2": (0.0, 0.2, 0.4, 0.8), "4x2": (0.0, 0.4, 0.8)}
BED_LAYER = Workload(
    tokens=64, num_experts=8, top_k=2, dim=256, hidden=512, matrices=2, dtype="fp32"
)
"""The layer on the emulated clusters; `tokens` are those of one sample."""
ALWAYS: dict[str, Any] = {"least_gain": 0.0, "rest": 0}
"""Settings of policies that decide in every pass and move for any gain, as published."""
METHODS: dict[str, Method] = {
    "plain": None,
    "nobody moves": Stay(),
    "two_stage": TwoStage(**ALWAYS),
    "weighed": Weighed(Rates(intra_gbps=UNSHAPED_GBPS, inter_gbps=INTER_GBPS), **ALWAYS),
}
BED_TOKENS = 512
"""Tokens of a rank on the emulated clusters."""
DECIDED = (64, 128, 256, 512, 1024)
"""Numbers of samples on all 16 devices together."""
Rows = list[dict[str, Any]]
Part = Literal["simulated", "decisions", "2x2", "4x2", "trained"]


@dataclass(frozen=True, kw_only=True)
class NetmoeOptions(KeptOptions, DrawnOptions):
    """Command-line options."""

    parts: tuple[Part, ...] = ("simulated", "decisions", "2x2", "4x2", "trained")
    """Parts to run. Parts that the folder of --keep already has are not run again."""
    repeats: int = 4
    """Timed rounds of every method at every locality."""


def simulated() -> Rows:
    """Return simulated bytes and times on NetMoE's cluster, by devices per node and locality."""
    rows = Rows()
    for per_node in (2, 4, 8):
        setting = paper_setting(4, per_node)
        costs = Costs(setting, paper_cluster(4, per_node))
        for wanted in LOCALITIES:
            trace = routing(setting, wanted)
            prediction = predicted(setting, costs, trace, TwoStage(**ALWAYS))
            about = {"per_node": per_node, "method": "two_stage", "locality": wanted}
            rows.append({**about, **prediction})
    return rows


def predicted(setting: Setting, costs: Costs, trace: Trace, placer: Method) -> dict[str, Any]:
    """Return the cost model's prediction for a policy under some routing, compared with plain
    expert parallelism."""
    counts = [trace.samples(layer, 0) for layer in range(setting.num_layers)]
    journey = travel(setting.grid, counts, setting.slots, placer or Stay())
    plain = costs.plain(counts)
    own = plain if placer is None else costs.placed(journey)
    plain_seconds, plain_inside, plain_across = plain
    seconds, inside, across = own
    moved_nodes, moved_devices = journey.moved
    return {
        "predicted_inter_bytes_plain": plain_across,
        "predicted_seconds": seconds,
        "predicted_time_ratio": seconds / plain_seconds,
        "predicted_inter_saved": 1 - across / plain_across,
        "predicted_intra_ratio": inside / plain_inside,
        "decided_inter_saved": 1 - journey.after.inter / journey.before.inter,
        "moved_nodes": moved_nodes,
        "moved_devices": moved_devices,
    }


def synthetic(name: str, repeats: int, told: Told) -> Rows:
    """Return what is measured on an emulated cluster under synthetic routing of several
    localities."""
    setting = bed_setting(name, BED_LAYER, 3)
    loads = [
        ({"locality": each}, routing(setting, each, tokens=True)) for each in BED_LOCALITIES[name]
    ]
    return on_bed(name, setting, loads, repeats, told)


def bed_setting(name: str, layer: Workload, num_layers: int) -> Setting:
    """Return layers on the emulated cluster of a name, with `BED_TOKENS` tokens per rank."""
    bed = BEDS[name]
    slots = BED_TOKENS // layer.tokens
    return Setting(
        nodes=bed.nodes,
        per_node=bed.ranks_per_node,
        slots=slots,
        layer=layer,
        num_layers=num_layers,
    )


def trained(repeats: int, told: Told) -> Rows:
    """Return bytes and times under the recorded routing of trained models, early and late: all
    steps simulated, the first and the last measured."""
    traces = trained_traces()
    shape = next(iter(traces.values())).shape
    paper = replace(
        paper_setting(2, 8, num_layers=shape.num_layers),
        layer=replace(PAPER, num_experts=shape.num_experts),
    )
    costs = Costs(paper, paper_cluster(2, 8))
    rows = Rows()
    about: dict[tuple[str, int], dict[str, Any]] = {}
    for text, trace in traces.items():
        for step in trace.steps:
            about[text, step] = {"text": text, "step": step, "locality": locality_of(trace, step)}
            load = recorded(paper, trace, step)
            prediction = predicted(paper, costs, load, TwoStage(**ALWAYS))
            head = {"bed": "NetMoE's 2x8", "method": "two_stage"}
            rows.append({**head, **about[text, step], **prediction})

    layer = replace(BED_LAYER, tokens=shape.seq_len, num_experts=shape.num_experts)
    for name in BEDS:
        setting = bed_setting(name, layer, shape.num_layers)
        loads = []
        for text, trace in traces.items():
            for step in (trace.steps[0], trace.steps[-1]):
                loads.append((about[text, step], recorded(setting, trace, step)))
        for row in on_bed(name, setting, loads, repeats, told):
            rows.append({"bed": name, **row})
    return rows


def locality_of(trace: Trace, step: int) -> float:
    """Return the mean locality of the layers in a step."""
    shape = trace.shape
    return statistics.mean(
        locality(trace.samples(layer, step), shape.top_k) for layer in range(shape.num_layers)
    )


def on_bed(
    name: str,
    setting: Setting,
    loads: Sequence[tuple[dict[str, Any], Trace]],
    repeats: int,
    told: Told,
) -> Rows:
    """Return measured bytes and times on an emulated cluster, together with predictions for it.

    Args:
        setting: the ranks and layers.
        loads: keys of a load's rows, and its routing.
        repeats: timed rounds of every method.
        told: called before each load.
    """
    bed = BEDS[name].bed
    device = Device(tflops=Tflops(fp32=GFLOPS / 1000), memory_gib=8, memory_gigabytes_per_second=5)
    costs = Costs(setting, emulated(bed, device=device))

    def measure(ranks: KeptRanks, load: tuple[dict[str, Any], Trace]) -> Rows:
        about, trace = load
        of_ranks = ranks.run(measure_steps, job_of(setting, trace, METHODS, repeats=repeats))
        cell = BedCell(**joined(of_ranks, bed))
        across = {method: cell.across[method][0] for method in METHODS}
        inside = {}
        for method in METHODS:
            messages = [message for rank in of_ranks for message in rank.sent[method][0]]
            inside[method] = sum(size for _, _, size in messages) - across[method]
        return [
            {
                "method": method,
                **about,
                **predicted(setting, costs, trace, placer),
                "repeats": repeats,
                "seconds": cell.timings[method].median,
                **spread("time_ratio", cell.ratio(method, "plain")),
                "inter_bytes": across[method],
                "inter_saved": 1 - across[method] / across["plain"],
                "intra_ratio": inside[method] / inside["plain"],
            }
            for method, placer in METHODS.items()
        ]

    def in_words(load: tuple[dict[str, Any], Trace]) -> str:
        about, _ = load
        return ", ".join([name, *(f"{key} {value}" for key, value in about.items())])

    by_load = on_beds(loads, lambda load: bed, in_words, measure, told)
    return [row for rows in by_load for row in rows]


def job_of(
    setting: Setting, trace: Trace, methods: Mapping[str, Method], **options: Any
) -> TravelJob:
    """Return the job that times methods under some routing of tokens; `options` are further fields
    of `TravelJob`."""
    layer = setting.layer
    experts = np.stack([trace.experts(number, 0) for number in range(setting.num_layers)])
    return TravelJob(
        grid=setting.grid,
        compiled=compile_plan(Plan(), setting.grid),
        methods=methods,
        gflops=GFLOPS,
        experts=torch.from_numpy(experts.astype(np.int64)),
        length=layer.tokens,
        dim=layer.dim,
        hidden=layer.hidden,
        num_experts=layer.num_experts,
        **options,
    )


def decisions() -> Rows:
    """Return the time of decisions, and the simulated time behind which they can hide."""
    rows = Rows()
    for samples in DECIDED:
        setting = paper_setting(2, 8, slots=samples // 16)
        hidden = Costs(setting, paper_cluster(2, 8)).hidden_seconds()
        for name, placer in (("two_stage", TwoStage(**ALWAYS)), ("weighed", Weighed(**ALWAYS))):
            times = Timing.of(decision_seconds(setting, placer, repeats=7, clock=time.perf_counter))
            rows.append(
                {
                    "samples": samples,
                    "method": name,
                    "decision_seconds": times.median,
                    "decision_high": times.high,
                    "hidden_seconds": hidden,
                    "share_of_hidden": times.median / hidden,
                }
            )
    return rows


def claims(rows: Rows) -> list[Claim]:
    """Return the figures that the documentation quotes. A claim of a part that was not run carries
    the reason instead of a value."""

    def figure(name: str, key: str, unit: str, op: Literal[">=", "<="], **where: Any) -> Claim:
        """Return a claim without a target: the largest `key` of the rows with values `where`."""
        return claimed(f"balance.{name}", lambda: max(figures(rows, key, **where)), None, op, unit)

    saved = [
        figure(
            f"netmoe_inter_bytes_saved{suffix}",
            "inter_saved",
            "share",
            ">=",
            part="2x2",
            method="two_stage",
            locality=at,
        )
        for at, suffix in ((0.4, ""), (0.2, ".locality_0.2"), (0.8, ".locality_0.8"))
    ]
    return [
        *saved,
        figure(
            "netmoe_time_ratio",
            "time_ratio",
            "1",
            "<=",
            part="2x2",
            method="two_stage",
            locality=0.4,
        ),
        figure(
            "netmoe_time_ratio.without_locality",
            "time_ratio",
            "1",
            "<=",
            part="2x2",
            method="two_stage",
            locality=0.0,
        ),
        figure(
            "netmoe_time_ratio.trained", "time_ratio", "1", "<=", part="trained", method="two_stage"
        ),
        figure(
            "netmoe_decision_over_hidden",
            "share_of_hidden",
            "1",
            "<=",
            part="decisions",
            method="two_stage",
        ),
    ]


def panels(rows: Rows) -> list[Panel]:
    """Return the panels of the picture."""
    charts = [_panel_of_bytes(rows), *_panels_of_times(rows), _panel_of_decisions(rows)]
    return [panel for panel in charts if any(series.x for series in panel.series)]


def _panel_of_bytes(rows: Rows) -> Panel:
    """Return the panel about the share of bytes saved, measured and simulated."""
    measured = [
        _line(rows, f"measured, {bed}", "locality", "inter_saved", part=bed, method="two_stage")
        for bed in BEDS
    ]
    return Panel(
        title="saved between nodes",
        x_title="locality",
        y_title="share of the bytes",
        series=(*measured, *_simulated(rows, "predicted_inter_saved")),
    )


def _panels_of_times(rows: Rows) -> list[Panel]:
    """Return the panels about times over those without placement."""
    emulated = [
        _line(rows, f"{what}, {bed}", "locality", key, part=bed, method="two_stage")
        for bed in BEDS
        for what, key in (("measured", "time_ratio"), ("predicted", "predicted_time_ratio"))
    ]
    simulated = _simulated(rows, "predicted_time_ratio")
    return [
        Panel(title=title, x_title="locality", y_title="ratio", series=tuple(series))
        for title, series in (
            ("time over plain, emulated", emulated),
            ("time over plain, simulated", simulated),
        )
    ]


def _panel_of_decisions(rows: Rows) -> Panel:
    """Return the panel about the time of a decision, and the work that hides it."""
    deciding = [
        _line(rows, name, "samples", "decision_seconds", part="decisions", method=name)
        for name in ("two_stage", "weighed")
    ]
    hiding = _line(
        rows,
        "dispatch and experts",
        "samples",
        "hidden_seconds",
        part="decisions",
        method="weighed",
    )
    return Panel(
        title="decision, and what hides it",
        x_title="samples",
        y_title="seconds",
        series=(*deciding, hiding),
        log_x=True,
        log_y=True,
    )


def _simulated(rows: Rows, y: str) -> list[PlottedSeries]:
    """Return a figure of simulated clusters over the locality, by ranks per node."""
    return [_line(rows, f"4x{n}", "locality", y, part="simulated", per_node=n) for n in (2, 4, 8)]


def _line(rows: Rows, name: str, x: str, y: str, **where: Any) -> PlottedSeries:
    """Return the series of the figure `y` over `x`, of rows with the values `where`."""
    points = []
    for row in rows:
        matches = all(row.get(key) == value for key, value in where.items())
        if matches and row.get(y) is not None:
            points.append(row)
    xs = tuple(row[x] for row in points)
    ys = tuple(row[y] for row in points)
    return PlottedSeries(name=name, x=xs, y=ys)


PREDICTED = ("predicted_inter_saved", "predicted_time_ratio", "moved_nodes", "moved_devices")
SAVED = ("inter_bytes", "inter_saved", "seconds", "time_ratio", "time_ratio_low", "time_ratio_high")
DECIDING = ("samples", "method", "decision_seconds", "hidden_seconds", "share_of_hidden")
TABLES = (
    Shown(
        title="NetMoE's cluster, simulated",
        where={"part": ("simulated",)},
        columns=(
            "per_node",
            "locality",
            "method",
            "decided_inter_saved",
            *PREDICTED,
            "predicted_intra_ratio",
        ),
    ),
    Shown(
        title="emulated clusters, 200 Mbit/s",
        where={"part": tuple(BEDS)},
        group_by=("part",),
        columns=("part", "locality", "method", *SAVED, *PREDICTED),
    ),
    Shown(
        title="recorded routing of trained models",
        where={"part": ("trained",)},
        group_by=("bed",),
        columns=("bed", "text", "step", "locality", "method", *SAVED, *PREDICTED),
    ),
    Shown(title="decisions", where={"part": ("decisions",)}, columns=DECIDING),
)


def measure(options: NetmoeOptions, cases: None, told: Told) -> Rows:
    """Run the parts that the folder of --keep does not have yet."""
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], Rows]] = {"simulated": simulated, "decisions": decisions}
    runs |= {name: partial(synthetic, name, options.repeats, told) for name in BEDS}
    runs["trained"] = partial(trained, options.repeats, told)
    by_part = each_kept(options.keep, {part: runs[part] for part in options.parts}, told)
    return [{"part": part, **row} for part, rows in by_part for row in rows]


BENCHMARK = Benchmark(
    name="netmoe",
    description="Measure what moving samples to their experts saves.",
    options=NetmoeOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    columns=TABLES,
    panels=panels,
    title="Samples that move",
)
