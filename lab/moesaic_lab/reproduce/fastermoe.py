"""FasterMoE's layers as our programs on its two clusters: the smart schedule, shadows, and ZeRO for
comparison.

He et al. (PPoPP 2022). The paper's traces are not public. Instead, expert loads follow a Zipf law
with one fitted exponent, and all ranks prefer the same experts. Shadows are exchanged before and
after the layer by broadcast and reduce trees over the NIC, as in the paper's artifact. Counts are
(gpus, gpus) arrays: the copies from a GPU to an expert, of which each GPU has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.compute import rates_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import reduce_seconds
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import Workload, zipf_counts
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.traces.trace import Trace
from moesaic_lab.balance.loads import identical_counts, recorded_shares
from moesaic_lab.netmoe.setting import CONFIGS, trained_traces
from moesaic_lab.reproduce.fastermoe_model import (
    FasterMoEMachine,
    Rule,
    ideal,
    semi_ideal,
    shadows,
    stay_home,
)
from moesaic_lab.reproduce.records import Book, Chart, PaperFinding, Reproduction

SEEDS = (1, 2, 3)
"""Seeds of the order of experts by load."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One of the paper's models, on the cluster where it ran: johnny or trevor."""

    cluster: str
    gpus: int
    tokens: int
    """Tokens per GPU."""
    dim: int

    @property
    def layer(self) -> Workload:
        """An MoE layer of the model: as many experts as GPUs, top-2, F = 2 D, float32."""
        return Workload(
            tokens=self.tokens,
            num_experts=self.gpus,
            top_k=2,
            dim=self.dim,
            hidden=2 * self.dim,
            matrices=2,
            dtype="fp32",
        )


LAER_LAYERS = (5, 11, 17)
LAER_STEPS = (9, 12)
"""Layers and iterations of LAER-MoE's recording."""
GPT_S, GPT, GPT_L = (
    Model(cluster="johnny", gpus=16, tokens=1024, dim=dim) for dim in (1024, 2048, 4096)
)
WIDE = Model(cluster="trevor", gpus=64, tokens=2048, dim=1024)
PLAIN = Plan()
"""FastMoE's schedule: dispatch all tokens, run all experts, combine all tokens."""


@dataclass(frozen=True)
class FasterMoEPass:
    """Simulated times of a layer, forward and backward, in seconds."""

    seconds: float
    computing: float
    """Compute time of the busiest GPU."""
    moving: float
    """Communication time of the busiest link."""

    @property
    def limit(self) -> float:
        """The time if computation and communication overlapped fully."""
        return max(self.computing, self.moving)


class FasterMoEBed:
    """Simulates the layers of one model on its cluster.

    Args:
        spec: its cluster; None for the paper's.
    """

    def __init__(self, model: Model, spec: ClusterSpec | None = None) -> None:
        self.model = model
        self.spec = spec or read_cluster(f"fastermoe-{model.cluster}")
        per_node = self.spec.devices_per_node
        self.grid = Grid(world=model.gpus, ep=model.gpus, ranks_per_node=per_node)
        group_size = 2 if model.cluster == "johnny" else 4  # as in the paper's artifact
        self.smart = Plan(peer_groups=model.gpus // group_size)
        """The smart schedule."""
        links = {link.name: link for link in self.spec.links}
        self.nic = links["nic"].slowest(self.spec.nodes)
        """Bytes per second of a node's NIC."""
        self.machine = FasterMoEMachine(
            flops=self.spec.device.tflops.of("fp32"), bandwidth=self.nic, dim=model.dim
        )
        self._simulator = Simulator(self.spec)
        self._compiled: dict[Plan, Compiled] = {}

    def counts(self, skew: float, seed: int) -> np.ndarray:
        """Return the copies from each rank to each expert, (gpus, gpus), under a Zipf law with
        exponent `skew`."""
        return zipf_counts(self.model.gpus, self.model.layer, exponent=skew, seed=seed)

    def run(self, plan: Plan, counts: np.ndarray) -> FasterMoEPass:
        """Return the times of a layer under a plan without shadows."""
        if plan not in self._compiled:
            self._compiled[plan] = compile_plan(plan, self.grid)
        compiled = self._compiled[plan]
        shapes = compiled.shapes(self.model.gpus)
        sizes = sizes_of(compiled.forward, self.model.layer, self.grid, counts, shapes=shapes)
        runs: list[Simulated] = [
            self._simulator.run(program, self.model.layer, self.grid, sizes=sizes)
            for program in (compiled.forward, compiled.backward)
        ]
        computing = sum(run.compute_seconds for run in runs)
        moving = sum(run.communication_seconds for run in runs)
        return FasterMoEPass(sum(run.seconds for run in runs), computing, moving)

    def predicted(self, counts: np.ndarray) -> tuple[float, float]:
        """Return the seconds of computation and communication that equations 1 and 2 predict for
        both passes of a layer.

        Equation 2 uses the busiest directed link, out of or into any group of GPUs that share a
        link.
        """
        ranks = np.arange(len(counts))
        node = ranks // self.spec.devices_per_node
        crosses_nodes = node[:, None] != node[None, :]  # (from, to)
        seconds = []
        for link in self.spec.links:
            group = ranks // link.devices
            crosses = group[:, None] != group[None, :]
            if link.carries == "outside":
                crosses &= crosses_nodes
            elif link.carries == "inside":
                crosses &= ~crosses_nodes
            crossing = counts * crosses
            into = np.bincount(group, crossing.sum(0))
            out_of = np.bincount(group, crossing.sum(1))
            rows = max(into.max(), out_of.max())
            seconds.append(rows * self.model.dim * 4 / link.slowest(self.spec.nodes))
        # Backward computes twice as much as forward; each of them exchanges rows twice.
        computing = 3 * self.machine.compute_seconds(counts.sum(0).max())
        return computing, 4 * max(seconds)

    def shadowed(self, plan: Plan, counts: np.ndarray, experts: Sequence[int]) -> float:
        """Return the time of a layer with shadows: broadcast of their weights, the layer, reduction
        of their gradients."""
        remaining = stay_home(counts, list(experts))
        layer = self.model.layer
        expert_bytes = layer.matrices * layer.dim * layer.hidden * 4
        tree = tree_seconds(self.model.gpus, expert_bytes, alpha=10e-6, beta=1 / self.nic)
        return self.run(plan, remaining).seconds + len(experts) * (tree + tree)  # out and back

    def chosen(self, counts: np.ndarray, rule: Rule = "printed") -> list[int]:
        """Return the experts that FasterMoE's policy shadows."""
        return shadows(self.machine, counts, rule)

    def zero_seconds(self, stage: int) -> float:
        """Return the time of a layer under ZeRO: every GPU runs all experts, so weights and
        gradients move instead of tokens.

        Args:
            stage: 3 gathers weights in both passes and reduce-scatters gradients; 2 reduces
                gradients and gathers weights once.
        """
        layer = self.model.layer
        rows = layer.copies / layer.num_experts
        rates = rates_of(self.spec, "fp32")
        seconds = rates.product_seconds(  # of one pass, by expert
            np.full(layer.num_experts, rows),
            flops_per_row=4.0 * layer.dim * layer.hidden,  # of two matrices
            weight_bytes=0.0,  # the products count, not the reading of their weights
        )
        nbytes = layer.num_experts * layer.matrices * layer.dim * layer.hidden * 4
        exchange = reduce_seconds(self.spec, self.grid, nbytes, stride=1, ranks=self.model.gpus)
        # a gather is half of an all-reduce: ZeRO-3 gathers once more
        num_exchanges = 1.5 if stage == 3 else 1.0
        num_passes = 3  # backward computes twice as much as forward
        return num_passes * float(seconds.sum()) + exchange * num_exchanges


def tree_seconds(ranks: int, num_bytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of a broadcast by a pipelined tree. A reduction is the reverse and takes
    as long.

    The time is the tree's depth in start-ups, plus the bytes once over a link: Thakur, Rabenseifner
    and Gropp, "Optimization of collective communication operations in MPICH" (2005).

    Args:
        ranks: number of ranks in the tree.
        num_bytes: bytes that each rank receives.
        alpha: start-up time of a message in seconds.
        beta: seconds per byte of one rank's link.
    """
    if ranks == 1:
        return 0.0
    depth = math.ceil(math.log2(ranks))
    return depth * alpha + beta * num_bytes


def predictor_r2(beds: Sequence[FasterMoEBed], skews: Sequence[float]) -> float:
    """Return R^2 of the sum of equations 1 and 2 against the simulator's time of a layer, over all
    skews and `SEEDS`."""
    pairs = []
    for bed in beds:
        for skew in skews:
            for seed in SEEDS:
                counts = bed.counts(skew, seed)
                pairs.append((sum(bed.predicted(counts)), bed.run(PLAIN, counts).seconds))
    predicted, simulated = np.array(pairs).T
    error_squares = ((simulated - predicted) ** 2).sum()
    total_squares = ((simulated - simulated.mean()) ** 2).sum()
    return float(1 - error_squares / total_squares)


@dataclass(frozen=True)
class Gains:
    """Speed-ups over FastMoE, as means over several loads unless noted otherwise."""

    schedule: float
    """Speed-up by the smart schedule."""
    shadow: float
    """Speed-up by shadows."""
    both: float
    """Speed-up by the smart schedule and shadows."""
    experts: float
    """Share of the experts that are shadowed."""
    bound: float
    """Speed-up that full overlap would give FastMoE; the largest over the loads."""
    layer: float
    """Speed-up by the smart schedule; the largest over the loads."""
    one: float
    """Speed-up by a shadow of the hottest expert alone; the largest over the loads."""
    seconds: float
    """Time of a layer with the smart schedule and shadows."""


def skew_of(book: Book) -> float:
    """Return the fitted Zipf exponent of the expert loads."""
    return book.constant("fastermoe.skew")


def shadow_gain(bed: FasterMoEBed, skew: float, rule: Rule = "printed") -> float:
    """Return the speed-up by shadows alone, as a mean over the seeds."""
    speedups = []
    for seed in SEEDS:
        counts = bed.counts(skew, seed)
        plain = bed.run(PLAIN, counts).seconds
        shadowed = bed.shadowed(PLAIN, counts, bed.chosen(counts, rule))
        speedups.append(plain / shadowed)
    return float(np.mean(speedups))


def gains(bed: FasterMoEBed, tables: Iterable[np.ndarray]) -> Gains:
    """Return all speed-ups of a model, with the printed rule, over tables of the copies from each
    GPU to each expert."""
    rows = []
    for counts in tables:
        experts = bed.chosen(counts)
        plain = bed.run(PLAIN, counts)
        smart = bed.run(bed.smart, counts)
        hottest = int(counts.sum(0).argmax())
        both = bed.shadowed(bed.smart, counts, experts)
        rows.append(
            (  # in the order in which the means and the maxima are taken apart below
                plain.seconds / smart.seconds,
                plain.seconds / bed.shadowed(PLAIN, counts, experts),
                plain.seconds / both,
                len(experts) / bed.model.gpus,
                plain.seconds / plain.limit,
                plain.seconds / bed.shadowed(PLAIN, counts, [hottest]),
                both,
            )
        )
    schedule, shadow, both_gain, share, _, _, seconds = np.mean(rows, axis=0).tolist()
    most_schedule, _, _, _, most_bound, most_one, _ = np.max(rows, axis=0).tolist()
    return Gains(
        schedule=schedule,
        shadow=shadow,
        both=both_gain,
        experts=share,
        bound=most_bound,
        layer=most_schedule,
        one=most_one,
        seconds=seconds,
    )


def reproduce(book: Book) -> Reproduction:
    """Simulate the layers and compare them with the paper's figures."""
    skew = skew_of(book)
    beds = {model: FasterMoEBed(model) for model in (GPT_S, GPT, GPT_L, WIDE)}
    on_johnny = {}
    for model in (GPT_S, GPT, GPT_L):
        tables = [beds[model].counts(skew, seed) for seed in SEEDS]
        on_johnny[model] = gains(beds[model], tables)
    wide = gains(beds[WIDE], [beds[WIDE].counts(skew, SEEDS[0])])
    middle = on_johnny[GPT]
    best = max(on_johnny.values(), key=lambda model_gains: model_gains.layer)
    figures = {
        "fastermoe.shadow.johnny": middle.shadow,
        "fastermoe.shadow.trevor": wide.shadow,
        "fastermoe.schedule.johnny": middle.schedule,
        "fastermoe.both.johnny": middle.both,
        "fastermoe.both.trevor": wide.both,
        "fastermoe.schedule.layer": best.layer,
        "fastermoe.schedule.bound": best.bound,
        "fastermoe.shadow.one": max(model_gains.one for model_gains in on_johnny.values()),
        "fastermoe.shadow.experts": 100 * middle.experts,
        "fastermoe.zero3.johnny": max(_over_zero(beds[m], on_johnny[m], 3) for m in on_johnny),
        "fastermoe.zero3.trevor": _over_zero(beds[WIDE], wide, 3),
        "fastermoe.zero2": max(_over_zero(beds[m], on_johnny[m], 2) for m in on_johnny),
    }
    skews = (0.0, 0.4, 0.8, skew)
    figures |= {
        "fastermoe.predictor.johnny": predictor_r2([beds[model] for model in on_johnny], skews),
        "fastermoe.predictor.trevor": predictor_r2([beds[WIDE]], skews),
    }
    return book.reproduction(
        "fastermoe",
        book.rows(figures),
        _findings(book, beds[GPT], middle),
        _charts(beds[GPT], skew),
    )


def _over_zero(bed: FasterMoEBed, ours: Gains, stage: int) -> float:
    """Return the speed over that of ZeRO."""
    return bed.zero_seconds(stage) / ours.seconds


def recorded_tables(bed: FasterMoEBed) -> dict[str, list[np.ndarray]]:
    """Return recorded copies from each GPU to each expert, a table per layer, by their source.

    The sources are the loads of ranks that LAER-MoE's authors recorded, an expert per rank, and our
    own trained models, early and late.
    """
    gpus = bed.model.gpus
    copies = int(bed.model.layer.copies)
    laer = Trace.open(CONFIGS / "laer_e16k4.npz")
    shares = [
        recorded_shares(laer, layer, step, ranks=gpus, experts_per_rank=1)
        for layer in LAER_LAYERS
        for step in LAER_STEPS
    ]
    tables = {"LAER-MoE's Mixtral": [identical_counts(each, gpus, copies) for each in shares]}
    for text, trace in trained_traces().items():
        # scaled up to the copies of the model's layer
        scale = copies * gpus // (trace.shape.tokens * trace.shape.top_k)
        for when, step in (("early", trace.steps[0]), ("late", trace.steps[-1])):
            tables[f"our GPT on {text}, {when}"] = [
                scale * trace.counts(layer, step, groups=gpus)
                for layer in range(trace.shape.num_layers)
            ]
    return tables


def _recorded(bed: FasterMoEBed) -> Iterator[PaperFinding]:
    """Yield the speed-ups under recorded loads: mean, least and largest over the layers."""
    for source, tables in recorded_tables(bed).items():
        layer_gains = [gains(bed, [counts]) for counts in tables]
        speedups = {
            "schedule": [each.schedule for each in layer_gains],
            "shadowing": [each.shadow for each in layer_gains],
            "both": [each.both for each in layer_gains],
        }
        words = [
            f"{name} {mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            for name, values in speedups.items()
        ]
        words.append(f"{mean(each.experts for each in layer_gains):.0%} of the experts shadowed")
        loads = [counts.sum(0) for counts in tables]
        busiest = mean(float(load.max() / load.mean()) for load in loads)
        yield PaperFinding(
            f"loads of {source}, the busiest {busiest:.1f} times the mean", ", ".join(words)
        )


def _findings(book: Book, bed: FasterMoEBed, middle: Gains) -> tuple[PaperFinding, ...]:
    """Return the findings about the paper's statements; `middle` holds the gains of MoE-GPT."""
    skew = skew_of(book)
    reached = book.value("fastermoe.schedule.reached")
    counts = bed.counts(skew, SEEDS[0])
    load = counts.sum(0)
    printed = shadow_gain(bed, skew)
    corrected = shadow_gain(bed, skew, "corrected")
    return (
        PaperFinding(
            "shadowing gains more than the schedule, and both together more than either",
            f"{middle.schedule:.2f}, {middle.shadow:.2f}, {middle.both:.2f}",
            middle.schedule < middle.shadow < middle.both,
        ),
        PaperFinding(
            f"the schedule reaches up to {reached:g} % of its bound",
            f"{middle.schedule / middle.bound:.0%} for MoE-GPT",
        ),
        PaperFinding(
            "equation 8 as corrected, with the best prefix, is never worse than as printed",
            f"{corrected:.2f} against {printed:.2f}",
            corrected >= printed * 0.999,
        ),
        PaperFinding(
            "load of the busiest expert over the mean, under the synthetic Zipf law",
            f"{load.max() / load.mean():.1f}",
        ),
        *_recorded(bed),
    )


def _charts(bed: FasterMoEBed, skew: float) -> tuple[Chart, ...]:
    """Return the charts of the paper."""
    peak = bed.machine.flops / 1e12
    ratios = tuple(np.geomspace(0.1, 10.0, 61).tolist())
    roofline = (
        ("all hidden (eq. 5)", ratios, tuple(ideal(peak, r) for r in ratios)),
        ("nothing hidden (eq. 6)", ratios, tuple(semi_ideal(peak, r) for r in ratios)),
    )
    layer = bed.model.layer
    tera_operations = 12 * layer.copies * layer.dim * layer.hidden / 1e12  # of both passes
    skews = tuple(sorted((0.0, 0.4, 0.8, 1.2, skew)))
    plain = []
    smart = []
    both = []
    for exponent in skews:
        counts = bed.counts(exponent, SEEDS[0])
        plain.append(tera_operations / bed.run(PLAIN, counts).seconds)
        smart.append(tera_operations / bed.run(bed.smart, counts).seconds)
        shadowed = bed.shadowed(bed.smart, counts, bed.chosen(counts))
        both.append(tera_operations / shadowed)
    by_skew = (
        ("FastMoE", skews, tuple(plain)),
        ("schedule", skews, tuple(smart)),
        ("schedule and shadows", skews, tuple(both)),
    )
    unit = "TFLOP/s per GPU"
    return (
        Chart(
            "roofline of johnny",
            "computing over communication",
            unit,
            roofline,
            log_x=True,
            log_y=True,
        ),
        Chart("MoE-GPT on johnny by skew", "exponent of the Zipf law", unit, by_skew),
    )
