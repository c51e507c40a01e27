"""What the layer benchmark runs: read from a file, so that shapes, links and the virtual rate are fixed before measuring."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.configfile import suggestion
from moesaic.cost.cluster import ClusterSpec, Device, Host, Tflops
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan.plan import AllToAll, Codec, Order
from moesaic_lab.benchmark import read_parts, require_positive
from moesaic_lab.emulated import emulated
from moesaic_testbed.bed import Bed

COMMITTED = Path(__file__).parent.parent / "configs" / "layer.toml"
TASK_US, MESSAGE_US = 200.0, 20.0
"""Processor time of the interpreter per task, and of a message that a rank sends or receives. With them the simulator's steps
are within 6 % of the 63 that 16 ranks on 2 cores took (mean error); they only rank plans: what is claimed is measured."""
COPIED_GIGABYTES_PER_SECOND = 4.0
"""Of rows that a rank puts in another order, read and written."""
PARTS = ("schedules", "adaptive_r", "pipelining", "codecs", "ablation")
"""Parts of the benchmark, as a user asks for them."""


@dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """A bed, the accelerators on it and the layer that runs there: what all parts share."""

    nodes: int = 4
    """Nodes of the bed."""
    ranks_per_node: int = 4
    """Ranks on each."""
    inter: str = "200mbit"
    """Rate of each node's link, each direction."""
    intra: str | None = None
    """Rate of `lo` inside each node; None: unshaped."""
    gflops: float = 10.0
    """Of each rank's virtual accelerator, in units of 1e9 per second."""
    coded_mb_per_second: float = 200.0
    """Rows that it encodes or decodes, in units of 1e6 bytes per second."""
    dim: int = 256
    """Width of a token."""
    hidden: int = 1024
    """Inner width of an expert, of two matrices."""
    num_experts: int = 16
    """Of the layer."""
    top_k: int = 2
    """Copies per token."""
    tokens_per_rank: int = 64
    """A tensor group of tp ranks has tp times as many."""
    repeats: int = 8
    """How often each method is timed."""
    pairs: int = 30
    """How often methods are timed whose times are less than 1.10 apart."""

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
        """The bed with its virtual accelerators, as the simulator sees it; ranks that share a core stretch the host's time."""
        shared = max(self.bed.world / (os.cpu_count() or 1), 1.0)
        device = Device(
            tflops=Tflops(fp32=self.gflops / 1e3), memory_gib=8.0, memory_gigabytes_per_second=COPIED_GIGABYTES_PER_SECOND,
            gemm_rows=(1,), gemm_share=(1.0,), codec_gigabytes_per_second=self.coded_mb_per_second / 1e3,
        )  # fmt: skip
        host = Host(runs_compute=True, task_us=TASK_US * shared, message_us=MESSAGE_US * shared)
        return emulated(self.bed, device=device, host=host)

    def workload(self, tp: int) -> Workload:
        """Return the layer as the simulator sees it, of a tensor group of so many ranks."""
        return Workload(
            tokens=self.tokens_per_rank * tp, num_experts=self.num_experts, top_k=self.top_k, dim=self.dim,
            hidden=self.hidden, matrices=2, dtype="fp32",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Schedules(LayerPlace):
    """Every schedule over sizes of tp and etp."""

    tp: tuple[int, ...] = (1, 2, 4)
    """Ranks that hold the same tokens."""
    etp: tuple[int, ...] = (1, 2, 4)
    """Shards of an expert."""
    trial_plans: int = 3
    """Plans, the best by prediction, that the search tries."""
    trial_repeats: int = 3
    """How often it tries each."""
    margin: float = 0.06
    """The best of ted, s1 and s2 by prediction is chosen unless another plan's trial is shorter by more than this share."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveR(LayerPlace):
    """Tutel's r over capacity factors, for one size of weights."""

    name: str = "base"
    """Of the size."""
    etp: int = 4
    """Shards of an expert; ep takes the other ranks."""
    factors: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """Capacity factors, padded: rows that each expert takes over the mean load."""


@dataclass(frozen=True, kw_only=True)
class Pipelining(LayerPlace):
    """Numbers of chunks, in OptSche's order."""

    chunks: tuple[int, ...] = (1, 2, 4, 8)
    """Tutel's pipelining degree."""
    codecs: tuple[Codec, ...] = ("none", "zfp")
    """Each with all of the above, both directions."""


@dataclass(frozen=True, kw_only=True)
class Orders(LayerPlace):
    """Orders of the tasks of one program."""

    orders: tuple[Order, ...] = ("optsche", "fifo", "early", "exact")
    """The first one is what the others are compared with."""
    chunks: int = 2
    """Of the program."""
    all_to_all: AllToAll = "linear"
    codec: Codec = "none"
    """In both directions."""


@dataclass(frozen=True, kw_only=True)
class Codecs(LayerPlace):
    """All codecs."""

    codecs: tuple[Codec, ...] = ("none", "bf16", "int8", "fp8", "zfp")
    """In both directions."""
    chunks: int = 2
    """Of each plan."""


@dataclass(frozen=True, kw_only=True)
class Ablation(LayerPlace):
    """ScheMoE's steps, one on top of the other."""

    codec: Codec = "zfp"
    """In both directions, as its code has it."""
    chunks: int = 2
    """Of the last step."""


@dataclass(frozen=True, kw_only=True)
class LayerBenchConfig:
    """The whole benchmark; None where a part is left out."""

    warmup: int = 1
    """Rounds before those that count."""
    seed: int = 0
    """Of the routing."""
    schedules: Schedules | None = None
    adaptive_r: tuple[AdaptiveR, ...] = ()
    pipelining: Pipelining | None = None
    orders: tuple[Orders, ...] = ()
    """They belong to pipelining."""
    codecs: Codecs | None = None
    ablation: Ablation | None = None

    def narrowed(self, *, only: tuple[str, ...] = (), repeats: int | None = None) -> LayerBenchConfig:
        """Return the part of the benchmark that was asked for.

        Args:
            only: parts; () for all.
            repeats: of every method, the close ones too; None as the file says.

        Raises:
            InputError: for a part that the configuration does not have, or repeats below 1.
        """
        for name in only:
            if name not in PARTS:
                raise InputError(f"--only {name}: unknown part{suggestion(name, list(PARTS))}")
            if not getattr(self, name):
                raise InputError(f"--only {name}: the configuration has no such part: add a table of that name")
        wanted = {*(only or PARTS), *(("orders",) if not only or "pipelining" in only else ())}
        changes: dict[str, Any] = dict.fromkeys(TABLES) | dict.fromkeys(LISTS, ())
        changes |= {name: getattr(self, name) for name in changes if name in wanted}
        if repeats is not None:
            changes = {name: _repeated(value, repeats) for name, value in changes.items()}
        return replace(self, **changes)


LISTS: dict[str, type[LayerPlace]] = {"adaptive_r": AdaptiveR, "orders": Orders}
"""Of the file: parts of which it may have several."""
TABLES: dict[str, type[LayerPlace]] = {
    "schedules": Schedules, "pipelining": Pipelining, "codecs": Codecs, "ablation": Ablation,
}  # fmt: skip
"""Those of which it may have one."""


def read_config(path: Path = COMMITTED) -> LayerBenchConfig:
    """Read the benchmark from a TOML or JSON file: fields of `LayerBenchConfig`, and a table, or a list of them, for each part.

    Raises:
        InputError: naming the file and the field.
    """
    lists = {name: (name, kind()) for name, kind in LISTS.items()}
    return read_parts(path, LayerBenchConfig(), lists=lists, tables={name: kind() for name, kind in TABLES.items()})


def _repeated(part: Any, repeats: int) -> Any:
    """Return a part, or several, or none, with another number of repeats."""
    if isinstance(part, tuple):
        return tuple(_repeated(each, repeats) for each in part)
    return part and replace(part, repeats=repeats, pairs=repeats)
