"""The configuration of the layer benchmark. It is read from a file: shapes, links and virtual rates are fixed beforehand."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.configfile import suggestion
from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Device, Host, Tflops
from moesaic.planner.workload import Workload
from moesaic.program.plan import AllToAll, Codec, Order
from moesaic_lab.benchmark import read_parts, require_positive
from moesaic_lab.emulated import emulated
from moesaic_testbed.bed import Bed

COMMITTED = Path(__file__).parent.parent / "configs" / "layer.toml"
TASK_US, MESSAGE_US = 200.0, 20.0
"""Processor time in microseconds of the interpreter per task, and of each message sent or received. With these values the
simulated steps have a mean error of 6 % against 63 steps measured with 16 ranks on 2 cores. Simulated times only rank plans;
all claims rest on measured times."""
COPIED_GIGABYTES_PER_SECOND = 4.0
"""Rate at which a rank permutes rows, with reads and writes both counted."""
PARTS = ("schedules", "adaptive_r", "pipelining", "codecs", "ablation")
"""Parts of the benchmark that `--only` accepts."""


@dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """Options of all parts: a bed, the virtual accelerators of its ranks, and the layer that runs on it."""

    nodes: int = 4
    """Nodes of the bed."""
    ranks_per_node: int = 4
    """Ranks per node."""
    inter: str = "200mbit"
    """Rate of each node's link in each direction."""
    intra: str | None = None
    """Rate of `lo` inside each node; None for no limit."""
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
    repeats: int = 8
    """Timed runs of each method."""
    pairs: int = 30
    """Timed runs of methods whose times differ by less than a factor of 1.10."""

    def __post_init__(self) -> None:
        require_positive(vars(self))
        if self.tokens_per_rank % self.num_experts:
            raise InputError(
                f"tokens_per_rank={self.tokens_per_rank} must be a multiple of num_experts={self.num_experts}, so that loads "
                "are balanced"
            )
        if self.top_k > self.num_experts:
            raise InputError(f"top_k={self.top_k} of num_experts={self.num_experts}")
        _ = self.bed

    @property
    def bed(self) -> Bed:
        """The emulated cluster."""
        return Bed(nodes=self.nodes, ranks_per_node=self.ranks_per_node, inter=self.inter, intra=self.intra)

    @property
    def cluster(self) -> ClusterSpec:
        """The bed and its virtual accelerators for the simulator. Ranks that share a core multiply the host's times."""
        shared = max(self.bed.world / (os.cpu_count() or 1), 1.0)
        device = Device(
            tflops=Tflops(fp32=self.gflops / 1e3), memory_gib=8.0, memory_gigabytes_per_second=COPIED_GIGABYTES_PER_SECOND,
            gemm_rows=(1,), gemm_share=(1.0,), codec_gigabytes_per_second=self.coded_mb_per_second / 1e3,
        )  # fmt: skip
        host = Host(runs_compute=True, task_us=TASK_US * shared, message_us=MESSAGE_US * shared)
        return emulated(self.bed, device=device, host=host)

    def workload(self, tp: int) -> Workload:
        """Return the layer's description for the simulator, for a tensor-parallel group of `tp` ranks."""
        return Workload(
            tokens=self.tokens_per_rank * tp, num_experts=self.num_experts, top_k=self.top_k, dim=self.dim,
            hidden=self.hidden, matrices=2, dtype="fp32",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Schedules(LayerPlace):
    """The part that compares all schedules and the best plan over sizes of tp and etp."""

    tp: tuple[int, ...] = (1, 2, 4)
    """Sizes of tp: ranks that hold the same tokens."""
    etp: tuple[int, ...] = (1, 2, 4)
    """Sizes of etp: shards of an expert."""
    trial_plans: int = 3
    """Number of plans that the search tries, the best by prediction."""
    trial_repeats: int = 3
    """Timed runs of each plan in the search."""
    margin: float = 0.06
    """The search chooses the best of ted, s1 and s2 by prediction, unless another plan's trial is shorter by more than this
    share."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveR(LayerPlace):
    """The part that compares Tutel's r over capacity factors, for one size of weights."""

    name: str = "base"
    """Name of the size."""
    etp: int = 4
    """Shards of an expert; ep is the world divided by etp."""
    factors: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """Capacity factors: the rows of each expert, padded, over the mean load."""


@dataclass(frozen=True, kw_only=True)
class Pipelining(LayerPlace):
    """The part that compares numbers of chunks in OptSche's order."""

    chunks: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of chunks (Tutel's pipelining degree)."""
    codecs: tuple[Codec, ...] = ("none", "zfp")
    """Codecs in both directions; each is measured with all numbers of chunks."""


@dataclass(frozen=True, kw_only=True)
class Orders(LayerPlace):
    """The part that compares orders of one program's tasks."""

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

    codecs: tuple[Codec, ...] = ("none", "bf16", "int8", "fp8", "zfp")
    """Codecs to compare, each in both directions."""
    chunks: int = 2
    """Chunks of each plan."""


@dataclass(frozen=True, kw_only=True)
class Ablation(LayerPlace):
    """The part that adds ScheMoE's steps one by one."""

    codec: Codec = "zfp"
    """Codec in both directions, as in ScheMoE's code."""
    chunks: int = 2
    """Chunks of the last step."""


@dataclass(frozen=True, kw_only=True)
class LayerBenchConfig:
    """The configuration of the whole benchmark; a part that is None or empty is not run."""

    warmup: int = 1
    """Unmeasured rounds before the measured ones."""
    seed: int = 0
    """Seed of the routing."""
    schedules: Schedules | None = None
    adaptive_r: tuple[AdaptiveR, ...] = ()
    pipelining: Pipelining | None = None
    orders: tuple[Orders, ...] = ()
    """Run together with `pipelining`."""
    codecs: Codecs | None = None
    ablation: Ablation | None = None

    def narrowed(self, *, only: tuple[str, ...] = (), repeats: int | None = None) -> LayerBenchConfig:
        """Return a copy of the configuration with only some parts or other repeats.

        Args:
            only: parts to keep; () for all.
            repeats: timed runs of every method, also of methods near the reference; None to keep the file's numbers.

        Raises:
            InputError: the configuration does not have a part, or `repeats` is below 1.
        """
        for name in only:
            if name not in PARTS:
                raise InputError(f"--only {name}: unknown part{suggestion(name, list(PARTS))}")
            if not getattr(self, name):
                raise InputError(f"--only {name}: the configuration has no such part: add a table of that name")
        chosen = {*(only or PARTS), *(("orders",) if not only or "pipelining" in only else ())}
        changes: dict[str, Any] = dict.fromkeys(TABLES) | dict.fromkeys(LISTS, ())
        changes |= {name: getattr(self, name) for name in changes if name in chosen}
        if repeats is not None:
            changes = {name: _repeated(value, repeats) for name, value in changes.items()}
        return replace(self, **changes)


LISTS: dict[str, type[LayerPlace]] = {"adaptive_r": AdaptiveR, "orders": Orders}
"""Parts that the file may have several of."""
TABLES: dict[str, type[LayerPlace]] = {
    "schedules": Schedules, "pipelining": Pipelining, "codecs": Codecs, "ablation": Ablation,
}  # fmt: skip
"""Parts that the file may have one of."""


def read_config(path: Path = COMMITTED) -> LayerBenchConfig:
    """Read the configuration from a TOML or JSON file: fields of `LayerBenchConfig`, and a table or list of tables per part.

    Raises:
        InputError: the file is invalid; the message names the file and the field.
    """
    lists = {name: (name, kind()) for name, kind in LISTS.items()}
    return read_parts(path, LayerBenchConfig(), lists=lists, tables={name: kind() for name, kind in TABLES.items()})


def _repeated(part: Any, repeats: int) -> Any:
    """Return a part, a tuple of parts, or None, with another number of repeats."""
    if isinstance(part, tuple):
        return tuple(_repeated(entry, repeats) for entry in part)
    return part and replace(part, repeats=repeats, pairs=repeats)
