"""The configuration of `moesaic bench model`. It is read from a file: beds and layers are fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from moesaic.configfile import suggestion
from moesaic.errors import InputError
from moesaic.planner.workload import Workload as Layer
from moesaic.program.grid import Grid
from moesaic_lab.benchmark import read_parts
from moesaic_testbed.bed import Bed

COMMITTED = Path(__file__).parent.parent / "configs" / "model.toml"
PARTS = ("profile", "plans", "real")
"""Parts of the benchmark: profiles of the beds, plans of layers with virtual compute, and layers with real products."""


@dataclass(frozen=True, kw_only=True)
class BedFields:
    """A named emulated cluster, with fields of `Bed`."""

    name: str = "bed"
    """Name by which cases refer to the bed."""
    nodes: int = 2
    """Number of nodes."""
    ranks_per_node: int = 2
    """Ranks per node."""
    inter: str = "200mbit"
    """Rate of each node's link in each direction."""
    intra: str | None = None
    """Rate inside each node; None for no limit."""

    @property
    def bed(self) -> Bed:
        """The emulated cluster."""
        return Bed(nodes=self.nodes, ranks_per_node=self.ranks_per_node, inter=self.inter, intra=self.intra)


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A layer on a mesh of a bed, whose lossless plans are measured and predicted."""

    name: str = "case"
    """Name of the case in tables."""
    bed: str = "bed"
    """Name of the bed."""
    tp: int = 1
    """Ranks that hold the same tokens."""
    etp: int = 1
    """Shards of an expert; ep is the world divided by etp."""
    compute: Literal["virtual", "real"] = "virtual"
    """virtual: experts sleep for their time at `gflops`. real: experts multiply; predictions use the profile's rate."""
    gflops: float = 20.0
    """Rate of each rank's virtual accelerator in 1e9 FLOP/s."""
    dim: int = 256
    """Width of a token."""
    hidden: int = 1024
    """Inner width of an expert."""
    num_experts: int = 16
    """Number of experts."""
    top_k: int = 2
    """Copies per token."""
    tokens_per_rank: int = 64
    """Tokens per rank; a tensor-parallel group of tp ranks has tp times as many."""
    plans: int = 0
    """Number of plans to measure, evenly spaced in the sorted list; 0 for all."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "plans" and isinstance(value, int | float) and value <= 0:
                raise InputError(f"case {self.name}: {field.name}={value}: must be above 0")
        if self.tokens_per_rank % self.num_experts:
            raise InputError(
                f"case {self.name}: tokens_per_rank={self.tokens_per_rank} must be a multiple of num_experts="
                f"{self.num_experts}, so that loads are balanced"
            )
        _ = self.layer(1)

    @property
    def matrices(self) -> int:
        """Matrices per expert: two for virtual experts, three for real experts, which are SwiGLU."""
        return 2 if self.compute == "virtual" else 3

    def layer(self, tp: int) -> Layer:
        """Return the layer's description for the simulator, for a tensor-parallel group of `tp` ranks."""
        return Layer(
            tokens=self.tokens_per_rank * tp, num_experts=self.num_experts, top_k=self.top_k, dim=self.dim,
            hidden=self.hidden, matrices=self.matrices, dtype="fp32",
        )  # fmt: skip

    def grid(self, bed: Bed) -> Grid:
        """Return the mesh over all ranks of a bed.

        Raises:
            InputError: `etp` does not divide the number of ranks.
        """
        if bed.world % self.etp:
            raise InputError(f"case {self.name}: etp={self.etp} does not divide the bed's {bed.world} ranks")
        return Grid(
            world=bed.world, tp=self.tp, ep=bed.world // self.etp, etp=self.etp, ranks_per_node=bed.ranks_per_node
        )


@dataclass(frozen=True, kw_only=True)
class ModelBenchConfig:
    """The configuration of the whole benchmark."""

    seed: int = 0
    """Seed of the routing's pattern."""
    repeats: int = 3
    """Timed runs of each plan of a case, all plans in turn."""
    leaders: int = 4
    """Number of plans to time again because their measured times are shortest; 0 to time no plan again."""
    favourites: int = 3
    """Number of plans to time again because their predicted times are shortest."""
    leader_repeats: int = 12
    """Timed runs of each plan that is timed again."""
    beds: tuple[BedFields, ...] = ()
    cases: tuple[ModelCase, ...] = ()

    def bed_of(self, case: ModelCase) -> BedFields:
        """Return the bed of a case."""
        return next(bed for bed in self.beds if bed.name == case.bed)

    def part(self, case: ModelCase) -> str:
        """Return the part of the benchmark, "real" or "plans", to which a case belongs."""
        return "real" if case.compute == "real" else "plans"


def read_config(path: Path = COMMITTED) -> ModelBenchConfig:
    """Read the configuration from a TOML or JSON file: fields of `ModelBenchConfig`, a list `[[beds]]` and a list `[[cases]]`.

    Raises:
        InputError: the file is invalid; the message names the file and the field.
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
    """Return a copy of the configuration with only the cases of some parts, beds or names.

    Args:
        config: the configuration.
        only: names of parts, beds or cases; () for all cases.

    Raises:
        InputError: `only` has an unknown name.
    """
    if not only:
        return config
    beds, cases = ([entry.name for entry in group] for group in (config.beds, config.cases))
    for word in only:
        if word not in (*PARTS, *beds, *cases):
            raise InputError(f"--only {word}: unknown{suggestion(word, [*PARTS, *beds, *cases])}")
    chosen = tuple(case for case in config.cases if {case.name, case.bed, config.part(case)} & set(only))
    return replace(config, cases=chosen)
