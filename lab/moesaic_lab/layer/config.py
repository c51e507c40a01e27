"""The configuration of the layer benchmark. It is read from a file: shapes, links and virtual rates
are fixed beforehand."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Device, Host, Tflops
from moesaic.planner.workload import Workload
from moesaic.program.plan import AllToAll, Codec, Order
from moesaic_lab.beds import BedConfig, Place, read_cells
from moesaic_lab.emulated import emulated

COMMITTED = Path(__file__).parent.parent / "configs" / "layer.toml"
TASK_US = 200.0
MESSAGE_US = 20.0
"""Processor time in microseconds of the interpreter per task, and of each message sent or received.
With these values the simulated steps have a mean error of 6 % against 63 steps measured with 16
ranks on 2 cores. Simulated times only rank plans; all claims rest on measured times."""
COPIED_GIGABYTES_PER_SECOND = 4.0
"""Rate at which a rank permutes rows, with reads and writes both counted."""


@dataclass(frozen=True, kw_only=True)
class LayerPlace(Place):
    """Options of all parts: a bed, the virtual accelerators of its ranks, and the layer that runs
    on it."""

    section: ClassVar[str] = ""
    """Name of the part in results."""
    nodes: int = 4
    ranks_per_node: int = 4
    gflops: float = 10.0
    """Rate of each rank's virtual accelerator in 1e9 FLOP/s."""
    coded_mb_per_second: float = 200.0
    """Rate at which each accelerator encodes and decodes rows, in 1e6 bytes per second."""
    dim: int = 256
    """Width of a token."""
    hidden: int = 1024
    """Inner width of an expert, which has two matrices."""
    num_experts: int = 16
    """Number of experts."""
    top_k: int = 2
    """Copies per token."""
    tokens_per_rank: int = 64
    """Tokens per rank; a tensor-parallel group of tp ranks has tp times as many."""
    pairs: int = 30
    """Timed runs of methods whose times differ by less than a factor of 1.10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens_per_rank % self.num_experts:
            raise InputError(
                f"tokens_per_rank={self.tokens_per_rank} must be a multiple of "
                f"num_experts={self.num_experts}, so that loads are balanced"
            )
        if self.top_k > self.num_experts:
            raise InputError(f"top_k={self.top_k} of num_experts={self.num_experts}")

    @property
    def part(self) -> str:
        """The name by which --only chooses the part; orders run together with pipelining."""
        return "pipelining" if self.section == "orders" else self.section

    @property
    def cluster(self) -> ClusterSpec:
        """The bed and its virtual accelerators for the simulator. Ranks that share a core multiply
        the host's times."""
        shared = max(self.bed.world / (os.cpu_count() or 1), 1.0)
        device = Device(
            tflops=Tflops(fp32=self.gflops / 1e3),
            memory_gib=8.0,
            memory_gigabytes_per_second=COPIED_GIGABYTES_PER_SECOND,
            gemm_rows=(1,),
            gemm_share=(1.0,),
            codec_gigabytes_per_second=self.coded_mb_per_second / 1e3,
        )
        host = Host(runs_compute=True, task_us=TASK_US * shared, message_us=MESSAGE_US * shared)
        return emulated(self.bed, device=device, host=host)

    @property
    def matrices(self) -> int:
        """Matrices per expert."""
        return 2

    def workload(self, tp: int) -> Workload:
        """Return the layer's description for the simulator, for a tensor-parallel group of `tp`
        ranks."""
        return Workload(
            tokens=self.tokens_per_rank * tp,
            num_experts=self.num_experts,
            top_k=self.top_k,
            dim=self.dim,
            hidden=self.hidden,
            matrices=self.matrices,
            dtype="fp32",
        )


@dataclass(frozen=True, kw_only=True)
class Schedules(LayerPlace):
    """The part that compares all schedules and the best plan over sizes of tp and etp."""

    section: ClassVar[str] = "schedules"
    tp: tuple[int, ...] = (1, 2, 4)
    """Sizes of tp: ranks that hold the same tokens."""
    etp: tuple[int, ...] = (1, 2, 4)
    """Sizes of etp: shards of an expert."""
    trial_plans: int = 3
    """Number of plans that the search tries, the best by prediction."""
    trial_repeats: int = 3
    """Timed runs of each plan in the search."""
    margin: float = 0.06
    """The search chooses the best of ted, s1 and s2 by prediction, unless another plan's trial is
    shorter by more than this share."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveR(LayerPlace):
    """The part that compares Tutel's r over capacity factors, for one size of weights."""

    section: ClassVar[str] = "adaptive_r"
    name: str = "base"
    """Name of the size."""
    etp: int = 4
    """Shards of an expert; ep is the world divided by etp."""
    factors: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """Capacity factors: the rows of each expert, padded, over the mean load."""


@dataclass(frozen=True, kw_only=True)
class Pipelining(LayerPlace):
    """The part that compares numbers of chunks in OptSche's order."""

    section: ClassVar[str] = "pipelining"
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of chunks (Tutel's pipelining degree)."""
    codecs: tuple[Codec, ...] = ("none", "zfp")
    """Codecs in both directions; each is measured with all numbers of chunks."""


@dataclass(frozen=True, kw_only=True)
class Orders(LayerPlace):
    """The part that compares orders of one program's tasks."""

    section: ClassVar[str] = "orders"
    orders: tuple[Order, ...] = ("optsche", "fifo", "early")
    """Orders to compare; the first is the reference."""
    chunks: int = 2
    """Chunks of the program."""
    all_to_all: AllToAll = "linear"
    """All-to-all of the program."""
    codec: Codec = "none"
    """Codec in both directions."""


@dataclass(frozen=True, kw_only=True)
class Codecs(LayerPlace):
    """The part that compares codecs."""

    section: ClassVar[str] = "codecs"
    codecs: tuple[Codec, ...] = ("none", "bf16", "int8", "fp8", "zfp")
    """Codecs to compare, each in both directions."""
    chunks: int = 2
    """Chunks of each plan."""


@dataclass(frozen=True, kw_only=True)
class Ablation(LayerPlace):
    """The part that adds ScheMoE's steps one by one."""

    section: ClassVar[str] = "ablation"
    codec: Codec = "zfp"
    """Codec in both directions, as in ScheMoE's code."""
    chunks: int = 2
    """Chunks of the last step."""


@dataclass(frozen=True, kw_only=True)
class LayerBenchConfig(BedConfig[LayerPlace]):
    """The configuration of the whole benchmark."""

    @staticmethod
    def repeated(cell: LayerPlace, repeats: int) -> LayerPlace:
        """Return a part in which methods near the reference are not timed more often than the
        others."""
        return replace(cell, repeats=repeats, pairs=repeats)


def read_config(path: Path = COMMITTED) -> LayerBenchConfig:
    """Read the configuration from a TOML or JSON file: fields of `LayerBenchConfig`, and a list of
    tables per kind of part.

    Raises:
        InputError: the file is invalid; the message names the file and the field.
    """
    kinds = (Schedules, AdaptiveR, Pipelining, Orders, Codecs, Ablation)
    return read_cells(path, LayerBenchConfig(), {kind.section: kind() for kind in kinds})
