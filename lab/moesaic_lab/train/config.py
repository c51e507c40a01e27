"""What the training benchmark runs: read from a file, so that model, links and plans are fixed before measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moesaic.configfile import suggestion
from moesaic.errors import InputError
from moesaic.plan.plan import AllToAll, Codec, Order, Plan
from moesaic_lab.benchmark import read_parts
from moesaic_testbed.bed import Bed

COMMITTED = Path(__file__).parent.parent / "configs" / "train.toml"
Pass = Literal["training", "inference"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan of ours, on all ranks without data parallelism of the experts."""

    etp: int = 1
    """Ranks that share each expert; the others spread the experts."""
    all_to_all: AllToAll = "linear"
    """How rows cross ep."""
    chunks: int = 1
    """Parts of which one travels while another is computed."""
    order: Order = "optsche"
    """Of the tasks."""
    codec: Codec = "none"
    """Of rows and of their gradients."""

    @property
    def plan(self) -> Plan:
        """The plan."""
        return Plan(
            all_to_all=self.all_to_all,
            chunks=self.chunks,
            order=self.order,
            codec=self.codec,
            backward_codec=self.codec,
        )

    def label(self, world: int) -> str:
        """Return the candidate in words, as "ep 4 multicast, 2 chunks"."""
        parts = [f"ep {world // self.etp}" + (f" etp {self.etp}" if self.etp > 1 else "") + f" {self.all_to_all}"]
        parts += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        parts += [self.order] if self.order != "optsche" else []
        parts += [self.codec] if self.codec != "none" else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class TrainCase:
    """One model on one bed, trained or only run forward."""

    name: str = "demo"
    """For people."""
    in_sweep: bool = False
    """One of the cases whose median the claims are about."""
    model: Literal["gpt", "swin"] = "gpt"
    """gpt: the model of `make demo`. swin: the vision model in a small size."""
    mode: Pass = "training"
    """training: forward, backward, gradients' reduction, optimizer. inference: forward without gradients."""
    inter: str = "200mbit"
    """Rate of each node's link, each direction."""
    batch_size: int = 8
    """Sequences or images per step over all ranks; the demo trains with 8."""
    top_k: int | None = None
    """Experts per token; None for the model's own."""
    repeats: int = 8
    """How often each system is timed; in the sweep our best plan and layers that are near it 30 times."""
    trials: int = 2
    """Repeats before, apart, on which our best lossless plan is chosen; the others are then left out unless `all_plans`."""
    all_plans: bool = False
    """Time every plan with all repeats, not only the best, the plain linear one and the coded ones."""
    coded: bool = True
    """Time the plans with lossy codecs too."""
    peers: tuple[str, ...] = ("plain", "deepspeed")
    """Layers of others beside ours."""
    share_low: float = 0.0
    """Where the papers see the plain layer's communication share of a step; reported beside what is measured."""
    share_high: float = 1.0
    """Its upper end."""

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
"""plain: expert parallelism as in torchtitan. deepspeed: its MoE layer."""


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Expert throughput against world size, with and without the flexible layout; one process, no links."""

    worlds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Ranks among which the rows of each expert come from."""
    rows_per_expert: int = 512
    """Rows that one expert gets in all, whatever the world."""
    num_experts: int = 2
    """Experts of this rank."""
    dim: int = 256
    """Width of a token."""
    hidden: int = 512
    """Inner width of an expert."""
    repeats: int = 8
    """How often each is timed."""

    def __post_init__(self) -> None:
        for name in ("rows_per_expert", "num_experts", "dim", "hidden", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"layout: {name}={getattr(self, name)}: must be at least 1")
        for world in self.worlds:
            if world < 1 or self.rows_per_expert % world:
                raise InputError(f"layout: worlds: {world} does not divide rows_per_expert={self.rows_per_expert}")


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig:
    """The whole benchmark."""

    nodes: int = 2
    """Nodes of the bed."""
    ranks_per_node: int = 2
    """Ranks on each."""
    seed: int = 0
    """Of weights and tokens."""
    tolerance: float = 1e-4
    """Largest relative difference of loss and gradients to the model in one process, for lossless systems."""
    candidates: tuple[Candidate, ...] = (Candidate(),)
    """Plans of ours; the first is the plain linear one."""
    cases: tuple[TrainCase, ...] = ()
    """In order."""
    layout: LayoutConfig | None = None
    """The flexible layout; None leaves it out."""

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
        """Ranks."""
        return self.nodes * self.ranks_per_node

    def bed(self, case: TrainCase) -> Bed:
        """Return the emulated cluster of a case."""
        return Bed(nodes=self.nodes, ranks_per_node=self.ranks_per_node, inter=case.inter)

    def narrowed(self, *, only: tuple[str, ...] = (), repeats: int | None = None) -> TrainBenchConfig:
        """Return the part that was asked for.

        Args:
            only: names of cases, or "layout"; () for all.
            repeats: of every case and of the layout; None as the file says.

        Raises:
            InputError: for a name that is none of these, or repeats below 1.
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
    """Read the benchmark from a TOML or JSON file: fields of `TrainBenchConfig`, [[candidate]], [[case]], [layout].

    Raises:
        InputError: naming the file and the field.
    """
    lists = {"candidate": ("candidates", Candidate()), "case": ("cases", TrainCase())}
    return read_parts(path, TrainBenchConfig(), lists=lists, tables={"layout": LayoutConfig()})
