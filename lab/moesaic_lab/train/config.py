"""The configuration of the training benchmark. It is read from a file: model, links and plans are
fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from moesaic.errors import InputError, suggestion
from moesaic.program.plan import AllToAll, Codec, Order, Plan
from moesaic_lab.beds import BedConfig, Place, read_cells

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
        etp = f" etp {self.etp}" if self.etp > 1 else ""
        parts = [f"ep {world // self.etp}{etp} {self.all_to_all}"]
        if self.chunks > 1:
            parts.append(f"{self.chunks} chunks")
        if self.order != "optsche":
            parts.append(self.order)
        if self.codec != "none":
            parts.append(self.codec)
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class TrainCase(Place):
    """One case: the demo's model on one bed, trained or only run forward."""

    name: str = "demo"
    """Name of the case in tables and `--only`."""
    in_sweep: bool = False
    """Whether the claims' medians include this case, whose best plan and peers near it are timed 30
    times."""
    mode: Pass = "training"
    """training: forward, backward, reduction of gradients, optimizer. inference: forward without
    gradients."""
    batch_size: int = 8
    """Sequences per step over all ranks; the demo trains with 8."""
    top_k: int | None = None
    """Experts per token; None for the model's own number."""
    trials: int = 2
    """Steps of each lossless plan in the trial that chooses the best one; the others are
    omitted."""
    coded: bool = True
    """Time the plans with lossy codecs as well."""
    peers: tuple[str, ...] = ("plain", "deepspeed")
    """Layers of others to compare with."""
    share_low: float = 0.0
    """Lower end of the plain layer's communication share of a step in the papers, reported with the
    measured share."""
    share_high: float = 1.0
    """Upper end of that share."""

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """Names of the numbers that need not be above 0."""
        return (*super().may_be_zero, "share_low", "share_high")

    @property
    def part(self) -> str:
        """The name by which --only chooses the case."""
        return self.name

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.world:
            raise InputError(
                f"case {self.name}: batch_size={self.batch_size} does not split over "
                f"{self.world} ranks"
            )
        for peer in self.peers:
            if peer not in PEERS:
                raise InputError(
                    f"case {self.name}: unknown peer {peer}{suggestion(peer, list(PEERS))}"
                )
        if not 0 <= self.share_low <= self.share_high <= 1:
            raise InputError(
                f"case {self.name}: share_low={self.share_low}, share_high={self.share_high}: "
                "give a range in 0 to 1"
            )


PEERS = ("plain", "deepspeed")
"""plain: expert parallelism as in torchtitan. deepspeed: DeepSpeed's MoE layer."""


@dataclass(frozen=True, kw_only=True)
class Layouts(Place):
    """Expert throughput over world sizes, with and without the flexible layout, in one process
    without links."""

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

    @property
    def part(self) -> str:
        """The name by which --only chooses the layouts."""
        return "layout"

    def __post_init__(self) -> None:
        super().__post_init__()
        for world in self.worlds:
            if world < 1 or self.rows_per_expert % world:
                raise InputError(
                    f"layout: worlds: {world} does not divide "
                    f"rows_per_expert={self.rows_per_expert}"
                )


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig(BedConfig[TrainCase | Layouts]):
    """The configuration of the whole benchmark."""

    tolerance: float = 1e-4
    """Largest allowed relative error of loss and gradients of lossless systems against the model in
    one process."""
    candidates: tuple[Candidate, ...] = (Candidate(),)
    """Our plans; the first is the plain linear one."""

    def __post_init__(self) -> None:
        for case, candidate in product(self.cases, self.candidates):
            if case.world % candidate.etp:
                raise InputError(
                    f"candidates: etp={candidate.etp} does not divide the {case.world} ranks"
                )

    @property
    def cases(self) -> list[TrainCase]:
        """The cells that train or run the model."""
        return [cell for cell in self.cells if isinstance(cell, TrainCase)]


def read_config(path: Path = COMMITTED) -> TrainBenchConfig:
    """Read the configuration from a TOML or JSON file: fields of `TrainBenchConfig`, [[candidate]],
    [[case]], [[layout]].

    Raises:
        InputError: the file is invalid; the message names the file and the field.
    """
    kinds = {"case": TrainCase(), "layout": Layouts()}
    return read_cells(path, TrainBenchConfig(), kinds, candidate=("candidates", Candidate()))
