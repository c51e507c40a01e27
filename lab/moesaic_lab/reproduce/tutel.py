"""Tutel's layers as our programs: adaptive pipelining, 2DH, r, and what Fairseq's layer does instead.

Hwang et al. (MLSys 2023), on nodes of eight A100 with a port of 200 Gb/s each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from moesaic.cost.cluster import ClusterSpec, Tflops, read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.timing import Simulated
from moesaic.cost.workload import Workload
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.plan.plan import AllToAll
from moesaic.program.grid import Grid
from moesaic_lab.reproduce.records import Book
from moesaic_lab.reproduce.sweep import sweep_simulator

DEGREES = (1, 2, 4, 8)
"""Parts that a layer is pipelined in."""
ALGORITHMS: tuple[AllToAll, ...] = ("linear", "hier2d")
PER_NODE = 8
EXPERTS_PER_GPU, WIDTHS, TOKENS = (0.5, 1.0, 2.0), (1024, 2048, 4096), (4096, 16384, 65536)
"""Of the sweep of adaptive pipelining."""


@dataclass(frozen=True, kw_only=True)
class TutelLayer:
    """A layer on so many GPUs."""

    gpus: int
    tokens: int
    """Per GPU."""
    dim: int
    hidden: int
    experts_per_gpu: float = 2.0
    factor: float = 1.0
    top_k: int = 2
    is_cut: bool = True
    """Where there are fewer experts than GPUs they are cut in shards; False: they are copied."""

    @property
    def workload(self) -> Workload:
        """The layer."""
        return Workload(
            tokens=self.tokens, num_experts=round(self.gpus * self.experts_per_gpu), top_k=self.top_k, dim=self.dim,
            hidden=self.hidden, matrices=2, dtype="fp16", capacity_factor=self.factor,
        )  # fmt: skip

    @property
    def grid(self) -> Grid:
        """The mesh; experts are cut in shards, or copied, where there are fewer than GPUs."""
        shards = max(1, round(1 / self.experts_per_gpu))
        etp = shards if self.is_cut else 1
        return Grid(world=self.gpus, ep=self.gpus // shards, etp=etp, ranks_per_node=PER_NODE)

    @property
    def rows_per_message(self) -> float:
        """Rows that one GPU sends to one expert."""
        return self.workload.copies / self.workload.num_experts


@dataclass(frozen=True, kw_only=True)
class RLayer:
    """A layer of the map of parallelism: 16 experts on 64 GPUs, each in four shards."""

    tokens: int
    """Per GPU."""
    hidden: int

    def workload(self, factor: float) -> Workload:
        """Return the layer at a capacity factor."""
        return Workload(
            tokens=self.tokens, num_experts=16, top_k=2, dim=2048, hidden=self.hidden, matrices=2, dtype="fp16",
            capacity_factor=factor,
        )  # fmt: skip


class TutelCluster:
    """The cluster at every size.

    Args:
        book: tells the constants.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self._simulators: dict[tuple[int, float | None], Simulator] = {}
        self._compiled: dict[tuple[Plan, Grid], Compiled] = {}

    def runs(self, plan: Plan, layer: TutelLayer, *, flexible: bool = True) -> tuple[Simulated, Simulated]:
        """Return the forward and the backward pass of a layer.

        Args:
            plan: the plan.
            layer: the layer.
            flexible: the experts multiply all rows at once (Tutel's flexible all-to-all), not message by message.
        """
        rows = None if flexible else layer.rows_per_message
        key = (layer.gpus, rows)
        if key not in self._simulators:
            self._simulators[key] = sweep_simulator(cluster(self.book, layer.gpus, rows))
        if (plan, layer.grid) not in self._compiled:
            self._compiled[plan, layer.grid] = compile_plan(plan, layer.grid)
        made = self._compiled[plan, layer.grid]
        simulator = self._simulators[key]
        return (
            simulator.run(made.forward, layer.workload, made.grid),
            simulator.run(made.backward, layer.workload, made.grid),
        )

    def seconds(self, plan: Plan, layer: TutelLayer, *, flexible: bool = True, trains: bool = True) -> float:
        """Return the time of a layer, forward and, where it trains, backward."""
        there, back = self.runs(plan, layer, flexible=flexible)
        return there.seconds + (back.seconds if trains else 0.0)

    def with_r(self, r: int, layer: RLayer, factor: float) -> float:
        """Return the time of a layer of the map of parallelism under Tutel's r, forward and backward."""
        made = compile_plan(Plan(gather_weights=r), Grid(world=64, ep=16, etp=4, ranks_per_node=PER_NODE))
        simulator = Simulator(cluster(self.book, 64))
        runs = (simulator.run(program, layer.workload(factor), made.grid) for program in (made.forward, made.backward))
        return sum(run.seconds for run in runs)

    def parts_ms(self, layer: TutelLayer) -> tuple[float, float]:
        """Return computing and all-to-all of a layer in one piece, milliseconds."""
        runs = self.runs(Plan(), layer)
        computing = sum(run.compute_seconds for run in runs)
        return 1e3 * computing, 1e3 * (sum(run.seconds for run in runs) - computing)

    def by_plan(self, layer: TutelLayer, *, trains: bool = True) -> dict[tuple[AllToAll, int], float]:
        """Return the time of a layer by all-to-all and degree."""
        return {
            (algorithm, degree): self.seconds(Plan(all_to_all=algorithm, chunks=degree), layer, trains=trains)
            for algorithm in ALGORITHMS
            for degree in DEGREES
        }

    def einsum_seconds(self, layer: TutelLayer, *, trains: bool = True) -> float:
        """Return the time of Fairseq's dispatch and combine: products with (tokens, experts, capacity) masks.

        One of each forward; backward one of dispatch, whose mask is boolean and has no gradient, and two of combine (fairseq's
        `moe_layer.py` and `top2gate.py`): 2 * tokens * copies * dim operations each time.
        """
        operations = 2.0 * layer.tokens * layer.workload.copies * layer.dim
        return (5 if trains else 2) * operations / (self.book.constant("tutel.einsum") * 1e12)


def cluster(book: Book, gpus: int, rows: float | None = None) -> ClusterSpec:
    """Return the cluster at a size: its preset with the constants in place.

    Args:
        book: tells the constants.
        gpus: in use.
        rows: of each product, message by message; None for all rows of an expert at once. 8 rows reach the fitted share of the
            rate, 1024 that of the preset, and those between a share between them.
    """
    spec = read_cluster("tutel", nodes=gpus // PER_NODE)
    nvlink, nic = spec.links
    nic = replace(
        nic, gbps=(book.constant("tutel.nic"),), fabric=book.constant("tutel.fabric"),
        connection_us=1e-3 * book.constant("tutel.message"), connection_gbps=book.constant("tutel.connection"),
    )  # fmt: skip
    device = replace(spec.device, tflops=Tflops(fp16=book.constant("tutel.tflops")))
    if rows is not None:
        whole = float(np.interp(np.log(1024), np.log(device.gemm_rows), device.gemm_share))
        share = float(np.interp(np.log(rows), np.log([8.0, 1024.0]), [book.constant("tutel.batched"), whole]))
        device = replace(device, gemm_rows=(1.0,), gemm_share=(share,))
    return replace(
        spec, device=device, links=(nvlink, nic), host=replace(spec.host, task_us=book.constant("tutel.issue"))
    )


SWIN_LAYERS = ((9, 144, 512), (1, 36, 1024))
"""MoE layers of SwinV2-MoE-B at 192 x 192: how many, tokens of a picture, width."""
SWIN_BATCH, SWIN_EXPERTS, SWIN_DENSE = 128, 32, 11.78e9
"""Pictures per GPU, which the paper does not tell; experts of each layer; operations of a picture, multiply and add as one."""
SWIN_TRAINS = {"train": True, "infer": False}


def swin_seconds(bed: TutelCluster, gpus: int, name: str) -> tuple[float, float]:
    """Return what the MoE layers of SwinV2-MoE-B take per batch, seconds: Fairseq's, and Tutel's by the best plan.

    Args:
        bed: the cluster.
        gpus: in use.
        name: train or infer.
    """
    trains, fairseq, tutel = SWIN_TRAINS[name], 0.0, 0.0
    for count, tokens, dim in SWIN_LAYERS:
        layer = TutelLayer(
            gpus=gpus, tokens=SWIN_BATCH * tokens, dim=dim, hidden=4 * dim, experts_per_gpu=SWIN_EXPERTS / gpus, top_k=1
        )
        copied = replace(layer, is_cut=False)  # Fairseq's experts cannot be cut
        plain = bed.seconds(Plan(), copied, flexible=False, trains=trains)
        fairseq += count * (plain + bed.einsum_seconds(layer, trains=trains))
        gathered = (0, 1) if layer.grid.etp > 1 else ()
        by_r = [bed.seconds(Plan(gather_weights=r), layer, trains=trains) for r in gathered]
        tutel += count * min(*bed.by_plan(layer, trains=trains).values(), *by_r)
    return fairseq, tutel


def swin_pictures(bed: TutelCluster, gpus: int, name: str) -> tuple[float, float]:
    """Return pictures per second and GPU of SwinV2-MoE-B, with Fairseq's layers and with Tutel's; arguments as before.

    What is dense takes its operations over a rate that was fitted, three times as many in training.
    """
    dense = SWIN_BATCH * 2 * SWIN_DENSE * (3 if SWIN_TRAINS[name] else 1)
    rate = bed.book.constant(f"tutel.swin.{name}") * 1e12
    fairseq, tutel = (SWIN_BATCH / (dense / rate + moe) for moe in swin_seconds(bed, gpus, name))
    return fairseq, tutel


def big(gpus: int) -> TutelLayer:
    """Return the layer whose all-to-all and computing are told apart."""
    return TutelLayer(gpus=gpus, tokens=65536, dim=4096, hidden=4096)


def single(gpus: int) -> TutelLayer:
    """Return the layer that is held against Fairseq's."""
    return TutelLayer(gpus=gpus, tokens=16384, dim=2048, hidden=2048)


def sweep(gpus: int) -> Iterator[TutelLayer]:
    """Yield the 81 layers of the sweep of adaptive pipelining on so many GPUs."""
    for experts, dim, hidden, tokens in itertools.product(EXPERTS_PER_GPU, WIDTHS, WIDTHS, TOKENS):
        yield TutelLayer(gpus=gpus, tokens=tokens, dim=dim, hidden=hidden, experts_per_gpu=experts)


def gains(bed: TutelCluster, gpus: int) -> dict[str, float]:
    """Return the gains of the best all-to-all and degree over fixed ones, per cent: means, and the largest over degree 8."""
    times = [bed.by_plan(layer) for layer in sweep(gpus)]
    over = {
        "linear1": [each["linear", 1] / min(each.values()) for each in times],
        "hier2d1": [each["hier2d", 1] / min(each.values()) for each in times],
    }
    found = {name: 100 * (float(np.mean(values)) - 1) for name, values in over.items()}
    found["worst"] = 100 * (max(each["linear", 8] / min(each.values()) for each in times) - 1)
    return found


@dataclass(frozen=True)
class Breakdown:
    """Fairseq's layer, and Tutel's parts one after the other, seconds."""

    fairseq: float
    kernels: float
    hier2d: float
    flexible: float


def breakdown(bed: TutelCluster, gpus: int) -> Breakdown:
    """Return the time of a layer with one part of Tutel after the other, in one piece; 2DH only where it is faster."""
    layer = single(gpus)
    plain = bed.seconds(Plan(), layer, flexible=False)
    both = {name: bed.seconds(Plan(all_to_all=name), layer, flexible=False) for name in ALGORITHMS}
    best = min(both, key=lambda name: both[name])
    return Breakdown(
        fairseq=plain + bed.einsum_seconds(layer),
        kernels=plain,
        hier2d=both[best],
        flexible=bed.seconds(Plan(all_to_all=best), layer),
    )
