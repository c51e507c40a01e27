"""What `moesaic bench model` measures and predicts: beds and workloads, read from a file so that they are fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from moesaic.configfile import suggestion
from moesaic.cost.workload import Workload as Layer
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic_lab.benchmark import read_parts
from moesaic_testbed.bed import Bed

COMMITTED = Path(__file__).parent.parent / "configs" / "model.toml"
PARTS = ("profile", "plans", "real")
"""Parts of the benchmark: what the model may know, every plan of some workloads, real products."""


@dataclass(frozen=True, kw_only=True)
class BedFields:
    """An emulated cluster, by name."""

    name: str = "bed"
    """What workloads call it."""
    nodes: int = 2
    """As of `Bed`; so are the others."""
    ranks_per_node: int = 2
    """Ranks on each node."""
    inter: str = "200mbit"
    """Rate of each node's link, each direction."""
    intra: str | None = None
    """Rate inside each node; None: unshaped."""

    @property
    def bed(self) -> Bed:
        """The bed itself."""
        return Bed(nodes=self.nodes, ranks_per_node=self.ranks_per_node, inter=self.inter, intra=self.intra)


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One layer on one mesh of a bed: every lossless plan of it is measured and predicted."""

    name: str = "case"
    """Shown in tables."""
    bed: str = "bed"
    """A bed's name."""
    tp: int = 1
    """Ranks that hold the same tokens."""
    etp: int = 1
    """Shards of an expert; ep takes the other ranks."""
    compute: Literal["virtual", "real"] = "virtual"
    """virtual: experts sleep for their time at `gflops`; real: they multiply, at the rate that the profile measured."""
    gflops: float = 20.0
    """Of each rank's virtual accelerator, in units of 1e9 per second."""
    dim: int = 256
    """Width of a token."""
    hidden: int = 1024
    """Inner width of an expert."""
    num_experts: int = 16
    """Of the layer."""
    top_k: int = 2
    """Copies per token."""
    tokens_per_rank: int = 64
    """A tensor group of tp ranks has tp times as many."""
    plans: int = 0
    """Measure only so many plans, evenly picked; 0: all of them."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "plans" and isinstance(value, int | float) and value <= 0:
                raise InputError(f"case {self.name}: {each.name}={value}: must be above 0")
        if self.tokens_per_rank % self.num_experts:
            raise InputError(
                f"case {self.name}: tokens_per_rank={self.tokens_per_rank} must be a multiple of num_experts="
                f"{self.num_experts}, so that loads are balanced"
            )
        _ = self.layer(1)

    @property
    def matrices(self) -> int:
        """Of an expert: virtual ones have two, real ones are SwiGLU."""
        return 2 if self.compute == "virtual" else 3

    def layer(self, tp: int) -> Layer:
        """Return what the simulator is told of the layer."""
        return Layer(
            tokens=self.tokens_per_rank * tp, num_experts=self.num_experts, top_k=self.top_k, dim=self.dim,
            hidden=self.hidden, matrices=self.matrices, dtype="fp32",
        )  # fmt: skip

    def grid(self, bed: Bed) -> Grid:
        """Return the mesh on all ranks of a bed."""
        if bed.world % self.etp:
            raise InputError(f"case {self.name}: etp={self.etp} does not divide the bed's {bed.world} ranks")
        return Grid(
            world=bed.world, tp=self.tp, ep=bed.world // self.etp, etp=self.etp, ranks_per_node=bed.ranks_per_node
        )


@dataclass(frozen=True, kw_only=True)
class ModelBenchConfig:
    """The whole benchmark."""

    seed: int = 0
    """Of the routing's pattern."""
    repeats: int = 3
    """How often each plan of a case is timed, all in turn."""
    leaders: int = 4
    """Plans that are timed again: the fastest so many by these times ..."""
    favourites: int = 3
    """... and the first so many by prediction."""
    leader_repeats: int = 12
    """How often they are."""
    beds: tuple[BedFields, ...] = ()
    cases: tuple[ModelCase, ...] = ()

    def bed_of(self, case: ModelCase) -> BedFields:
        """Return the bed that a case names."""
        return next(bed for bed in self.beds if bed.name == case.bed)

    def part(self, case: ModelCase) -> str:
        """Return which part of the benchmark a case belongs to."""
        return "real" if case.compute == "real" else "plans"


def read_config(path: Path = COMMITTED) -> ModelBenchConfig:
    """Read the benchmark from a TOML or JSON file: fields of `ModelBenchConfig`, a list `[[beds]]` and a list `[[cases]]`.

    Raises:
        InputError: naming the file and the field.
    """
    lists = {"beds": ("beds", BedFields()), "cases": ("cases", ModelCase())}
    config, source = read_parts(path, ModelBenchConfig(), lists=lists), f"config {path}"
    for name in lists:
        if not getattr(config, name):
            raise InputError(f"{source}: {name} must be a list of tables: write [[{name}]] above each")
    known = [bed.name for bed in config.beds]
    for case in config.cases:
        if case.bed not in known:
            raise InputError(f"{source}: case {case.name}: bed={case.bed!r} is unknown{suggestion(case.bed, known)}")
        case.grid(config.bed_of(case).bed)
    return config


def narrowed(config: ModelBenchConfig, only: tuple[str, ...]) -> ModelBenchConfig:
    """Return the part of the benchmark that was asked for: parts, names of beds or of cases.

    Raises:
        InputError: for a word that is none of them.
    """
    if not only:
        return config
    beds, cases = ([each.name for each in found] for found in (config.beds, config.cases))
    for word in only:
        if word not in (*PARTS, *beds, *cases):
            raise InputError(f"--only {word}: unknown{suggestion(word, [*PARTS, *beds, *cases])}")
    kept = tuple(case for case in config.cases if {case.name, case.bed, config.part(case)} & set(only))
    return replace(config, cases=kept)
