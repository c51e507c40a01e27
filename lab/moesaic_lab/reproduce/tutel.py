"""Tutel's layers as our programs, with adaptive pipelining, 2DH and r, compared with Fairseq's
layer.

Hwang et al. (MLSys 2023), on nodes of eight A100 with one port of 200 Gb/s per GPU. Gates and
Fairseq's dispatch by masks are not part of the programs. Their times come from formulas: products,
plus the bytes that PyTorch's operations read and write, counted in the sources of both systems.

2DH is the two-dimensional hierarchical all-to-all ("hier2d" of our plans); r says how an expert in
several shards runs (`R`). A degree of pipelining is the number of chunks of a layer.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.planner.cluster import ClusterSpec, Tflops, read_cluster
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic.program.plan import AllToAll, Plan
from moesaic_lab.reproduce.records import Book, Chart, PaperFinding, Reproduction
from moesaic_lab.reproduce.schemoe import exchange_seconds
from moesaic_lab.reproduce.sweep import SweptRuns

DEGREES = (1, 2, 4, 8)
"""Degrees of pipelining: the number of chunks of a layer."""
ALGORITHMS: tuple[AllToAll, ...] = ("linear", "hier2d")
PER_NODE = 8
EXPERTS_PER_GPU = (0.5, 1.0, 2.0)
WIDTHS = (1024, 2048, 4096)
TOKENS = (4096, 16384, 65536)
"""Values in the sweep of adaptive pipelining."""
Passes = tuple[tuple[int, int], tuple[int, int]]
"""Bytes read and written per element: ((forward, backward) with one expert per token, (forward,
backward) per further one)."""
TUTEL_GATE: Passes = ((102, 32), (86, 16))
"""Bytes per element of (tokens, experts) in fp16, with one-hot masks in int64 (`extract_critical`,
`fast_cumsum_sub_one`). The first choice takes top-k 2, mask 8, softmax 4, weights 14, balance loss
26, positions 20 + 28. The next choice adds its mask, weights, positions and the sums of the
previous masks."""
FAIRSEQ_GATE: Passes = ((208, 70), (388, 40))
"""Bytes per element of (tokens, experts) in fp32, with one-hot masks in int64 (`top1gate.py`,
`top2gate.py`). The first choice takes cast 6, softmax 8, entropy 32, choice 12, weights 20,
cumulative sum 32, balance loss 20, drop 26, positions 32, gates 20. The second choice adds noise
68 + 12, the first one's mask 18, choice, weights 20 and both weights again 40, cumulative sum,
offsets 24, shares of overflow 84, drop, positions and gates."""
FAIRSEQ_MASKS: Passes = ((18, 10), (16, 4))
"""Bytes per element of (tokens, experts, capacity). Forward: an outer product in fp32 4, its test
for zero 5, casts to fp16 of combine 6 and dispatch 3. The second choice adds its product 4 and the
sum of both 12. Backward: a cast 6, and the outer product's read 4 per choice."""


@dataclass(frozen=True, kw_only=True)
class TutelLayer:
    """An MoE layer on a number of GPUs."""

    gpus: int
    tokens: int
    """Tokens per GPU."""
    dim: int
    hidden: int
    experts_per_gpu: float = 2.0
    factor: float = 1.0
    top_k: int = 2
    is_cut: bool = True
    """With fewer experts than GPUs: whether experts are split into shards (True) or replicated
    (False)."""

    @property
    def workload(self) -> Workload:
        """The layer as a `Workload` in float16."""
        return Workload(
            tokens=self.tokens,
            num_experts=round(self.gpus * self.experts_per_gpu),
            top_k=self.top_k,
            dim=self.dim,
            hidden=self.hidden,
            matrices=2,
            dtype="fp16",
            capacity_factor=self.factor,
        )

    @property
    def grid(self) -> Grid:
        """The mesh. If there are fewer experts than GPUs, experts are split into shards or
        replicated."""
        shards = max(1, round(1 / self.experts_per_gpu))
        etp = shards if self.is_cut else 1
        return Grid(world=self.gpus, ep=self.gpus // shards, etp=etp, ranks_per_node=PER_NODE)

    @property
    def rows_per_message(self) -> float:
        """Rows that one GPU sends to one expert."""
        return self.workload.copies / self.workload.num_experts


class TutelCluster:
    """Simulates layers on the paper's cluster, with any number of GPUs.

    Args:
        book: gives the constants.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self._memory = read_cluster("tutel").device.memory_gigabytes_per_second * 1e9
        self._runs: dict[tuple[int, float | None, int], SweptRuns] = {}

    def runs(
        self, plan: Plan, layer: TutelLayer, *, flexible: bool = True
    ) -> tuple[Simulated, Simulated]:
        """Return the forward and the backward pass of a layer, from dispatch to combine.

        The chunks of a linear all-to-all are sent expert by expert, as in Tutel's
        `nccl_all_to_all_scatter_async`: the rows of two experts of one GPU are not contiguous once
        the capacity is split. Routing weights are not sent, since both systems apply them at the
        tokens' home ranks (`is_postscore` of Tutel's `fast_dispatch.py`; `combine_weights` of
        Fairseq's `moe_layer.py`).

        Args:
            flexible: whether an expert multiplies all its rows at once (Tutel's flexible
                all-to-all) or message by message.
        """
        rows = None if flexible else layer.rows_per_message
        messages_per_peer = 1
        if plan.all_to_all == "linear" and plan.chunks > 1:
            messages_per_peer = max(1, round(layer.experts_per_gpu))
        key = (layer.gpus, rows, messages_per_peer)  # the arguments of `cluster`
        if key not in self._runs:
            self._runs[key] = SweptRuns(cluster(self.book, *key), sends_gates=False)
        return self._runs[key].run(plan, layer.grid, layer.workload)

    def seconds(
        self, plan: Plan, layer: TutelLayer, *, flexible: bool = True, trains: bool = True
    ) -> float:
        """Return the seconds of a layer, gate included: the forward pass and, if `trains`, the
        backward pass."""
        moving = self._moves_seconds(plan, layer, flexible=flexible, trains=trains)
        return self.gate_seconds(layer, trains=trains) + moving

    def fairseq_seconds(self, layer: TutelLayer, *, trains: bool = True) -> float:
        """Return the seconds of Fairseq's layer: its gate, its masks, and experts that multiply all
        their rows at once.

        Each expert is called once, on the rows from all GPUs (`moe_layer.py`), and PyTorch's matmul
        folds all dimensions except the last.
        """
        gate = self.gate_seconds(layer, trains=trains, passes=FAIRSEQ_GATE)
        masks = self.einsum_seconds(layer, trains=trains)
        return gate + masks + self._moves_seconds(Plan(), layer, flexible=True, trains=trains)

    def _moves_seconds(
        self, plan: Plan, layer: TutelLayer, *, flexible: bool, trains: bool
    ) -> float:
        """Return the seconds of a plan's experts and messages."""
        forward, backward = self.runs(plan, layer, flexible=flexible)
        return forward.seconds + (backward.seconds if trains else 0.0)

    def parts_ms(self, layer: TutelLayer) -> tuple[float, float]:
        """Return the milliseconds of computation, gate included, and of all-to-alls in a layer
        without chunks."""
        runs = self.runs(Plan(), layer)
        computing = sum(run.compute_seconds for run in runs)
        moving = sum(run.seconds for run in runs) - computing
        return 1e3 * (computing + self.gate_seconds(layer)), 1e3 * moving

    def by_plan(
        self, layer: TutelLayer, *, trains: bool = True
    ) -> dict[tuple[AllToAll, int], float]:
        """Return the seconds of a layer by (all-to-all, degree of pipelining)."""
        return {
            (algorithm, degree): self.seconds(
                Plan(all_to_all=algorithm, chunks=degree), layer, trains=trains
            )
            for algorithm in ALGORITHMS
            for degree in DEGREES
        }

    def einsum_seconds(self, layer: TutelLayer, *, trains: bool = True) -> float:
        """Return the seconds of Fairseq's dispatch and combine: products with (tokens, experts,
        capacity) masks.

        Forward, each has one product. Backward, dispatch has one, since its mask is boolean and has
        no gradient, and combine has two (fairseq's `moe_layer.py` and `top2gate.py`). A product
        takes 2 * tokens * copies * dim operations.
        """
        elements = layer.tokens * layer.workload.copies  # of a mask
        rate = self.book.constant("tutel.einsum") * 1e12
        num_products = 5 if trains else 2
        products = num_products * 2.0 * elements * layer.dim / rate
        return products + elements * _bytes_of(FAIRSEQ_MASKS, layer.top_k, trains) / self._memory

    def gate_seconds(
        self, layer: TutelLayer, *, trains: bool = True, passes: Passes = TUTEL_GATE
    ) -> float:
        """Return the seconds of a gate: its passes over memory, and its product.

        The product (tokens, dim) x (dim, experts) takes place once forward and twice backward.
        """
        elements = layer.tokens * layer.workload.num_experts  # of the logits
        rate = self.book.constant("tutel.tflops") * 1e12
        computing = 2.0 * elements * layer.dim / rate
        moving = 2.0 * (layer.tokens * layer.dim + elements) / self._memory
        product = max(computing, moving)
        num_products = 3 if trains else 1
        num_bytes = elements * _bytes_of(passes, layer.top_k, trains)
        return num_products * product + num_bytes / self._memory


def _bytes_of(passes: Passes, top_k: int, trains: bool) -> int:
    """Return the bytes of the passes over memory, for one element."""
    first, others = passes
    forward, backward = (one + (top_k - 1) * more for one, more in zip(first, others))
    return forward + backward if trains else forward


def cluster(book: Book, gpus: int, rows: float | None = None, per_peer: int = 1) -> ClusterSpec:
    """Return the cluster's preset at a given size, with the constants in place.

    Args:
        book: gives the constants.
        gpus: number of GPUs in use.
        rows: rows per product if experts multiply message by message; None if they multiply all
            rows at once. Products of 8 rows reach the fitted share of the rate, those of 1024 the
            preset's share. In between, the share is interpolated over the logarithm of the rows.
        per_peer: number of messages that a GPU sends to each other GPU at once, each with its own
            start-up.
    """
    spec = read_cluster("tutel", nodes=gpus // PER_NODE)
    nvlink, nic = spec.links
    nic = replace(
        nic,
        gbps=(book.constant("tutel.nic"),),
        fabric=book.constant("tutel.fabric"),
        message_us=per_peer * nic.message_us,
        connection_us=per_peer * 1e-3 * book.constant("tutel.message"),  # which is in ns
        connection_gbps=book.constant("tutel.connection"),
    )
    nvlink = replace(nvlink, message_us=per_peer * nvlink.message_us)
    device = replace(spec.device, tflops=Tflops(fp16=book.constant("tutel.tflops")))
    if rows is not None:
        share_of_1024 = float(np.interp(np.log(1024), np.log(device.gemm_rows), device.gemm_share))
        ends = [book.constant("tutel.batched"), share_of_1024]
        share = float(np.interp(np.log(rows), np.log([8.0, 1024.0]), ends))
        device = replace(device, gemm_rows=(1.0,), gemm_share=(share,))
    return replace(
        spec,
        device=device,
        links=(nvlink, nic),
        host=replace(spec.host, task_us=book.constant("tutel.issue")),
    )


SWIN_LAYERS = ((9, 144, 512), (1, 36, 1024))
"""MoE layers of SwinV2-MoE-B at 192 x 192: (number of layers, tokens per image, width)."""
SWIN_BATCH = 128
SWIN_EXPERTS = 32
SWIN_DENSE = 11.78e9
"""Images per GPU, which the paper does not give; experts per layer; multiply-adds of the dense part
per image."""
SWIN_TRAINS = {"train": True, "infer": False}


def swin_seconds(bed: TutelCluster, gpus: int, name: str) -> tuple[float, float]:
    """Return the seconds per batch of SwinV2-MoE-B's MoE layers: Fairseq's, and Tutel's under the
    best plan.

    Args:
        gpus: number of GPUs in use.
        name: "train" or "infer".
    """
    trains = SWIN_TRAINS[name]
    fairseq = 0.0
    tutel = 0.0
    for count, tokens, dim in SWIN_LAYERS:
        layer = TutelLayer(
            gpus=gpus,
            tokens=SWIN_BATCH * tokens,
            dim=dim,
            hidden=4 * dim,
            experts_per_gpu=SWIN_EXPERTS / gpus,
            top_k=1,
        )
        replicated = replace(layer, is_cut=False)  # Fairseq's experts cannot be cut
        fairseq += count * bed.fairseq_seconds(replicated, trains=trains)
        seconds = list(bed.by_plan(layer, trains=trains).values())
        if layer.grid.etp > 1:
            for r in (0, 1):
                seconds.append(bed.seconds(Plan(gather_weights=r), layer, trains=trains))
        tutel += count * min(seconds)
    return fairseq, tutel


def swin_dense_flops(name: str) -> float:
    """Return the operations of SwinV2-MoE-B's dense part for a batch, three times as many in
    training; `name` is a key of `SWIN_TRAINS`."""
    passes = 3 if SWIN_TRAINS[name] else 1
    return SWIN_BATCH * 2 * SWIN_DENSE * passes


def swin_pictures(bed: TutelCluster, gpus: int, name: str) -> tuple[float, float]:
    """Return SwinV2-MoE-B's images per second and GPU, with Fairseq's layers and with Tutel's.

    The dense part takes its operations over a fitted rate. The arguments are those of
    `swin_seconds`.
    """
    rate = bed.book.constant(f"tutel.swin.{name}") * 1e12
    dense_seconds = swin_dense_flops(name) / rate
    fairseq, tutel = swin_seconds(bed, gpus, name)
    return SWIN_BATCH / (dense_seconds + fairseq), SWIN_BATCH / (dense_seconds + tutel)


def big(gpus: int) -> TutelLayer:
    """Return the layer for which the paper gives all-to-all and computation separately."""
    return TutelLayer(gpus=gpus, tokens=65536, dim=4096, hidden=4096)


def single(gpus: int) -> TutelLayer:
    """Return the layer that the paper compares with Fairseq's."""
    return TutelLayer(gpus=gpus, tokens=16384, dim=2048, hidden=2048)


def mapped(tokens: int, hidden: int, factor: float = 1.0) -> TutelLayer:
    """Return a layer of the paper's comparison of r: 16 experts on 64 GPUs, each in four shards."""
    return TutelLayer(
        gpus=64, tokens=tokens, dim=2048, hidden=hidden, experts_per_gpu=0.25, factor=factor
    )


def sweep(gpus: int) -> Iterator[TutelLayer]:
    """Yield the 81 layers of the sweep of adaptive pipelining on `gpus` GPUs."""
    for experts, dim, hidden, tokens in itertools.product(EXPERTS_PER_GPU, WIDTHS, WIDTHS, TOKENS):
        yield TutelLayer(gpus=gpus, tokens=tokens, dim=dim, hidden=hidden, experts_per_gpu=experts)


ByPlan = Mapping[tuple[AllToAll, int], float]
"""Seconds of a layer by (all-to-all, degree of pipelining)."""
ByR = dict[float, dict[int, float]]
"""Seconds of a layer by capacity factor and r."""
Exchanged = Mapping[tuple[AllToAll, int, int], float]
"""Seconds of one all-to-all by (algorithm, GPUs, bytes per GPU)."""


def gains(times: Sequence[ByPlan]) -> dict[str, float]:
    """Return the gains in per cent of the best all-to-all and degree over fixed choices.

    "linear1" and "hier2d1" are means over the sweep against degree 1. "worst" is the largest gain
    over linear with degree 8.

    Args:
        times: seconds of the layers of a sweep.
    """
    linear1 = [by_plan["linear", 1] / min(by_plan.values()) for by_plan in times]
    hier2d1 = [by_plan["hier2d", 1] / min(by_plan.values()) for by_plan in times]
    linear8 = [by_plan["linear", 8] / min(by_plan.values()) for by_plan in times]
    return {
        "linear1": 100 * (float(np.mean(linear1)) - 1),
        "hier2d1": 100 * (float(np.mean(hier2d1)) - 1),
        "worst": 100 * (max(linear8) - 1),
    }


@dataclass(frozen=True)
class Breakdown:
    """Seconds of Fairseq's layer, and of the same layer as Tutel's features are added one after
    another."""

    fairseq: float
    kernels: float
    """With Tutel's kernels."""
    hier2d: float
    """With 2DH too, if it is faster."""
    flexible: float
    """With flexible all-to-all too."""


def breakdown(bed: TutelCluster, gpus: int) -> Breakdown:
    """Return the times of a layer without chunks as Tutel's features are added; 2DH is used only if
    it is faster."""
    layer = single(gpus)
    plain = bed.seconds(Plan(), layer, flexible=False)
    both = {name: bed.seconds(Plan(all_to_all=name), layer, flexible=False) for name in ALGORITHMS}
    best = min(both, key=lambda name: both[name])
    return Breakdown(
        fairseq=bed.fairseq_seconds(layer),
        kernels=plain,
        hier2d=both[best],
        flexible=bed.seconds(Plan(all_to_all=best), layer),
    )


SIZES = (16, 32, 64, 128, 256)
"""Numbers of GPUs in the sweep of adaptive pipelining."""
FACTORS = (1.0, 2.0, 4.0, 8.0)
"""Capacity factors in the comparison of r."""
R = (0, 1, 2, 4)
"""Values of r for an expert in four shards: from 0, where all weights are gathered, to 4, where
tokens visit all shards."""
BASE = mapped(4096, 2048)
LARGE = mapped(1024, 32768)


def reproduce(book: Book) -> Reproduction:
    """Simulate the layers and compare them with the paper's figures."""
    bed = TutelCluster(book)
    figures: dict[str, float] = {}
    for gpus in (16, 64, 256):
        computing, moving = bed.parts_ms(big(gpus))
        figures[f"tutel.compute.{gpus}"] = computing
        figures[f"tutel.a2a.{gpus}"] = moving
        figures[f"tutel.step.{gpus}"] = computing + moving
        figures[f"tutel.potential.{gpus}"] = (computing + moving) / max(computing, moving)
    figures |= _against_fairseq(bed)
    sweeps = {gpus: [bed.by_plan(layer) for layer in sweep(gpus)] for gpus in SIZES}
    for gpus, times in sweeps.items():
        for name, gain in gains(times).items():
            figures[f"tutel.pipelining.{name}.{gpus}"] = gain
    for factor in (4, 8):
        factor_gains = [_over_degree_1(bed, gpus, float(factor)) for gpus in SIZES]
        figures[f"tutel.pipelining.f{factor}"] = max(factor_gains)

    maps = {"base": by_r(bed, BASE), "large": by_r(bed, LARGE)}
    gaps = []
    best_gains = []
    for by_factor in maps.values():
        for seconds in by_factor.values():  # by r
            gaps.append(100 * abs(seconds[1] / seconds[4] - 1))
            best_gains.append(max(seconds.values()) / min(seconds.values()))
    figures["tutel.r.gap.least"] = min(gaps)
    figures["tutel.r.gap.most"] = max(gaps)
    figures["tutel.r.gain.least"] = min(best_gains)
    figures["tutel.r.gain.most"] = max(best_gains)
    for name, gpus in itertools.product(SWIN_TRAINS, (8, 128)):
        fairseq, tutel = swin_pictures(bed, gpus, name)
        figures[f"tutel.swin.{name}.fairseq.{gpus}"] = fairseq
        figures[f"tutel.swin.{name}.tutel.{gpus}"] = tutel
    exchanged = exchanges(book)
    findings = (*_findings(maps), *_exchange_findings(sweeps, exchanged))
    charts = (*_charts(bed, maps), *_exchange_charts(sweeps, exchanged))
    return book.reproduction("tutel", book.rows(figures), findings, charts)


WORLDS = (64, 256, 1024, 2048)
BYTES = (2**20, 2**25, 2**28)
"""GPUs and bytes per GPU of the all-to-alls alone, as in the paper's figures 16 and 18."""


def exchanges(book: Book) -> Exchanged:
    """Return the seconds of one all-to-all by (algorithm, GPUs, bytes per GPU)."""
    seconds: dict[tuple[AllToAll, int, int], float] = {}
    for gpus, size in itertools.product(WORLDS, BYTES):
        spec = cluster(book, gpus)
        grid = Grid(world=gpus, ep=gpus, ranks_per_node=PER_NODE)
        rows = Workload(
            tokens=gpus,
            num_experts=gpus,
            top_k=1,
            dim=size // gpus // 2,  # one row of 2-byte numbers for each other GPU
            hidden=1,
            matrices=2,
            dtype="fp16",
        )
        for algorithm in ALGORITHMS:
            seconds[algorithm, gpus, size] = exchange_seconds(spec, algorithm, rows, grid)
    return seconds


def _exchange_findings(
    sweeps: Mapping[int, Sequence[ByPlan]], exchanged: Exchanged
) -> Iterator[PaperFinding]:
    """Yield the findings about all-to-alls and pipelining.

    Args:
        sweeps: seconds of the layers of the sweep, by number of GPUs.
        exchanged: seconds of one all-to-all, as `exchanges` returns them.
    """
    for gpus in (SIZES[0], SIZES[-1]):
        best = _best_plans(sweeps[gpus])
        words = ", ".join(
            f"{name} {degree}: {count}" for (name, degree), count in best.most_common()
        )
        yield PaperFinding(
            f"figure 5, no plan is the best for all 81 layers on {gpus} GPUs", words, len(best) > 1
        )
    for size in BYTES:
        ratios = [
            exchanged["linear", gpus, size] / exchanged["hier2d", gpus, size] for gpus in WORLDS
        ]
        yield PaperFinding(
            f"figure 18, 2DH gains with the number of GPUs at {size >> 20} MiB",
            ", ".join(f"{gpus} GPUs: {ratio:.2f}x" for gpus, ratio in zip(WORLDS, ratios)),
            ratios[-1] > max(1.0, ratios[0]),
        )


def _best_plans(times: Sequence[ByPlan]) -> Counter[tuple[AllToAll, int]]:
    """Return for how many layers of a sweep each plan is the fastest."""
    return Counter(min(by_plan, key=lambda plan: by_plan[plan]) for by_plan in times)


def _exchange_charts(
    sweeps: Mapping[int, Sequence[ByPlan]], exchanged: Exchanged
) -> Iterator[Chart]:
    """Yield the charts about all-to-alls and pipelining; the arguments are those of
    `_exchange_findings`."""
    plans = tuple(itertools.product(ALGORITHMS, DEGREES))
    places = tuple(float(index) for index in range(len(plans)))
    counts = []
    for gpus in SIZES:
        best = _best_plans(sweeps[gpus])
        num_layers = tuple(float(best[plan]) for plan in plans)
        counts.append((f"{gpus} GPUs", places, num_layers))
    labels = tuple(f"{name}\n{degree}" for name, degree in plans)
    yield Chart(
        "figure 5: layers of which a plan is the best",
        "all-to-all and degree",
        "layers",
        tuple(counts),
        labels,
    )

    sizes = tuple(float(size) for size in BYTES)
    rates = []
    for gpus in WORLDS:
        gigabytes = tuple(size / exchanged["linear", gpus, size] / 1e9 for size in BYTES)
        rates.append((f"{gpus} GPUs", sizes, gigabytes))
    title = "figure 16: rate of the linear all-to-all"
    yield Chart(title, "bytes per GPU", "GB/s per GPU", tuple(rates), log_x=True, log_y=True)

    worlds = tuple(float(gpus) for gpus in WORLDS)
    lines = []
    for name in ALGORITHMS:
        for size in BYTES:
            milliseconds = tuple(1e3 * exchanged[name, gpus, size] for gpus in WORLDS)
            lines.append((f"{name}, {size >> 20} MiB", worlds, milliseconds))
    title = "figure 18: one all-to-all"
    yield Chart(title, "GPUs", "milliseconds", tuple(lines), log_x=True, log_y=True)


def by_r(bed: TutelCluster, layer: TutelLayer) -> ByR:
    """Return the seconds of a layer, forward and backward, by capacity factor and r."""
    return {
        factor: {r: bed.seconds(Plan(gather_weights=r), replace(layer, factor=factor)) for r in R}
        for factor in FACTORS
    }


def _against_fairseq(bed: TutelCluster) -> dict[str, float]:
    """Return the figures of layers against Fairseq's."""
    figures = {}
    for gpus in (16, 128, 2048):
        parts = breakdown(bed, gpus)
        best = min(bed.by_plan(single(gpus)).values())
        figures[f"tutel.layer.{gpus}"] = parts.fairseq / best
        # the parts of the gain, as far as the paper prints them
        if gpus != 128:
            figures[f"tutel.kernels.{gpus}"] = parts.fairseq / parts.kernels
            figures[f"tutel.degree.{gpus}"] = parts.flexible / best
        if gpus == 2048:
            figures["tutel.hier2d.2048"] = parts.kernels / parts.hier2d
            figures["tutel.flexible.2048"] = parts.hier2d / parts.flexible
    return figures


def _over_degree_1(bed: TutelCluster, gpus: int, factor: float) -> float:
    """Return the gain in per cent of the best degree over degree 1, each with its best
    all-to-all."""
    layer = TutelLayer(gpus=gpus, tokens=4096, dim=4096, hidden=4096, factor=factor)
    times = bed.by_plan(layer)
    degree_1 = min(times[algorithm, 1] for algorithm in ALGORITHMS)
    return 100 * (degree_1 / min(times.values()) - 1)


def _findings(maps: dict[str, ByR]) -> Iterator[PaperFinding]:
    """Yield the findings about the best r, from seconds by layer, capacity factor f and r."""
    for name, by_factor in maps.items():
        best = [min(times, key=lambda r: times[r]) for times in by_factor.values()]
        yield PaperFinding(
            f"the best r falls as f rises ({name}: E 16, D 2048, 64 GPUs)",
            ", ".join(f"f {factor:g}: r = {r}" for factor, r in zip(by_factor, best)),
            best == sorted(best, reverse=True),
        )


def _charts(bed: TutelCluster, maps: dict[str, ByR]) -> Iterator[Chart]:
    """Yield the charts about the best r, from seconds by layer, capacity factor and r, and about
    the layer that is compared with Fairseq's."""
    for name, by_factor in maps.items():
        factors = tuple(by_factor)
        curves = []
        for r in R:
            milliseconds = tuple(1e3 * times[r] for times in by_factor.values())
            curves.append((f"r = {r}", factors, milliseconds))
        title = f"r, {name} setting"
        unit = "milliseconds"
        yield Chart(title, "capacity factor", unit, tuple(curves), log_x=True, log_y=True)

    gpus = tuple(float(size) for size in SIZES)
    lines = []
    for algorithm, degree in itertools.product(ALGORITHMS, (1, 4)):
        plan = Plan(all_to_all=algorithm, chunks=degree)
        milliseconds = tuple(1e3 * bed.seconds(plan, single(size)) for size in SIZES)
        lines.append((f"{algorithm}, degree {degree}", gpus, milliseconds))
    yield Chart(
        "layer of 16,384 tokens, D = H = 2048",
        "GPUs",
        "milliseconds",
        tuple(lines),
        log_x=True,
        log_y=True,
    )
