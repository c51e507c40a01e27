"""The configuration of the training benchmark. It is read from a file: model, links and plans are fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moesaic.configfile import suggestion
from moesaic.errors import InputError
from moesaic.program.plan import AllToAll, Codec, Order, Plan
from moesaic_lab.benchmark import read_parts
from moesaic_testbed.bed import Bed

COMMITTED = Path(__file__).parent.parent / "configs" / "train.toml"
Pass = Literal["training", "inference"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of our plans, on a mesh of all ranks without replicas of the experts (edp 1)."""

    etp: int = 1
    """Ranks that share each expert; ep is the world divided by etp."""
    all_to_all: AllToAll = "linear"
    """All-to-all along ep."""
    chunks: int = 1
    """Number of chunks; one chunk is sent while another is computed."""
    order: Order = "optsche"
    """Order of the tasks."""
    codec: Codec = "none"
    """Codec of rows and of their gradients."""

    @property
    def plan(self) -> Plan:
        """The plan with these choices."""
        return Plan(
            all_to_all=self.all_to_all,
            chunks=self.chunks,
            order=self.order,
            codec=self.codec,
            backward_codec=self.codec,
        )

    def label(self, world: int) -> str:
        """Return the candidate in words, e.g. "ep 4 multicast, 2 chunks"."""
        parts = [f"ep {world // self.etp}" + (f" etp {self.etp}" if self.etp > 1 else "") + f" {self.all_to_all}"]
        parts += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        parts += [self.order] if self.order != "optsche" else []
        parts += [self.codec] if self.codec != "none" else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class TrainCase:
    """One case: a model on one bed, trained or only run forward."""

    name: str = "demo"
    """Name of the case in tables and `--only`."""
    in_sweep: bool = False
    """Whether the claims' medians include this case."""
    model: Literal["gpt", "swin"] = "gpt"
    """gpt: the model of `make demo`. swin: a small vision model."""
    mode: Pass = "training"
    """training: forward, backward, reduction of gradients, optimizer. inference: forward without gradients."""
    inter: str = "200mbit"
    """Rate of each node's link in each direction."""
    batch_size: int = 8
    """Sequences or images per step over all ranks; the demo trains with 8."""
    top_k: int | None = None
    """Experts per token; None for the model's own number."""
    repeats: int = 8
    """Timed steps of each system. With `in_sweep`, our best plan and peers near it are timed 30 times."""
    trials: int = 2
    """Steps of each lossless plan in the trial that chooses the best one; the others are omitted unless `all_plans`."""
    all_plans: bool = False
    """Time every plan with all repeats, not only the best, the plain linear one and the coded ones."""
    coded: bool = True
    """Time the plans with lossy codecs as well."""
    peers: tuple[str, ...] = ("plain", "deepspeed")
    """Layers of others to compare with."""
    share_low: float = 0.0
    """Lower end of the plain layer's communication share of a step in the papers, reported with the measured share."""
    share_high: float = 1.0
    """Upper end of that share."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "repeats", "trials"):
            if getattr(self, name) < 1:
                raise InputError(f"case {self.name}: {name}={getattr(self, name)}: must be at least 1")
        for peer in self.peers:
            if peer not in PEERS:
                raise InputError(f"case {self.name}: unknown peer {peer}{suggestion(peer, list(PEERS))}")
        if not 0 <= self.share_low <= self.share_high <= 1:
            raise InputError(
                f"case {self.name}: share_low={self.share_low}, share_high={self.share_high}: give a range in 0 to 1"
            )


PEERS = ("plain", "deepspeed")
"""plain: expert parallelism as in torchtitan. deepspeed: DeepSpeed's MoE layer."""


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Measures expert throughput over world sizes, with and without the flexible layout, in one process without links."""

    worlds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """World sizes: numbers of ranks from which each expert's rows come."""
    rows_per_expert: int = 512
    """Rows of one expert in total, the same for every world."""
    num_experts: int = 2
    """Experts of this rank."""
    dim: int = 256
    """Width of a token."""
    hidden: int = 512
    """Inner width of an expert."""
    repeats: int = 8
    """Timed runs of each layout."""

    def __post_init__(self) -> None:
        for name in ("rows_per_expert", "num_experts", "dim", "hidden", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"layout: {name}={getattr(self, name)}: must be at least 1")
        for world in self.worlds:
            if world < 1 or self.rows_per_expert % world:
                raise InputError(f"layout: worlds: {world} does not divide rows_per_expert={self.rows_per_expert}")


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig:
    """The configuration of the whole benchmark."""

    nodes: int = 2
    """Nodes of the bed."""
    ranks_per_node: int = 2
    """Ranks per node."""
    seed: int = 0
    """Seed of weights and tokens."""
    tolerance: float = 1e-4
    """Largest allowed relative error of loss and gradients of lossless systems against the model in one process."""
    candidates: tuple[Candidate, ...] = (Candidate(),)
    """Our plans; the first is the plain linear one."""
    cases: tuple[TrainCase, ...] = ()
    """Cases in the order in which they run."""
    layout: LayoutConfig | None = None
    """The comparison of layouts; None to skip it."""

    def __post_init__(self) -> None:
        for candidate in self.candidates:
            if self.world % candidate.etp:
                raise InputError(f"candidates: etp={candidate.etp} does not divide the {self.world} ranks")
        for case in self.cases:
            if case.batch_size % self.world:
                raise InputError(
                    f"case {case.name}: batch_size={case.batch_size} does not split over {self.world} ranks"
                )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def bed(self, case: TrainCase) -> Bed:
        """Return the emulated cluster of a case."""
        return Bed(nodes=self.nodes, ranks_per_node=self.ranks_per_node, inter=case.inter)

    def narrowed(self, *, only: tuple[str, ...] = (), repeats: int | None = None) -> TrainBenchConfig:
        """Return a copy of the configuration with only some cases or other repeats.

        Args:
            only: names of cases, or "layout"; () for all.
            repeats: timed runs in every case and layout; None to keep the file's numbers.

        Raises:
            InputError: `only` has an unknown name, or `repeats` is below 1.
        """
        names = [*(case.name for case in self.cases), *(["layout"] if self.layout else [])]
        for name in only:
            if name not in names:
                raise InputError(f"--only {name}: no such case{suggestion(name, names)}")
        cases = tuple(case for case in self.cases if not only or case.name in only)
        layout = self.layout if not only or "layout" in only else None
        if repeats is not None:
            cases = tuple(replace(case, repeats=repeats) for case in cases)
            layout = layout and replace(layout, repeats=repeats)
        return replace(self, cases=cases, layout=layout)


def read_config(path: Path = COMMITTED) -> TrainBenchConfig:
    """Read the configuration from a TOML or JSON file: fields of `TrainBenchConfig`, [[candidate]], [[case]], [layout].

    Raises:
        InputError: the file is invalid; the message names the file and the field.
    """
    lists = {"candidate": ("candidates", Candidate()), "case": ("cases", TrainCase())}
    return read_parts(path, TrainBenchConfig(), lists=lists, tables={"layout": LayoutConfig()})
