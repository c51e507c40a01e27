"""The configuration of `moesaic bench model`. It is read from a file: beds and layers are fixed
beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic_lab.beds import BedConfig, read_cells
from moesaic_lab.layer.config import LayerPlace
from moesaic_testbed.bed import Bed

COMMITTED = Path(__file__).parent.parent / "configs" / "model.toml"


@dataclass(frozen=True, kw_only=True)
class ModelCase(LayerPlace):
    """A layer on a mesh of a bed, whose lossless plans are measured and predicted."""

    name: str = "case"
    """Name of the case in tables."""
    nodes: int = 2
    ranks_per_node: int = 2
    intra: str | None = "400mbit"
    repeats: int = 3
    """Timed runs of each plan, all plans in turn."""
    tp: int = 1
    """Ranks that hold the same tokens."""
    etp: int = 1
    """Shards of an expert; ep is the world divided by etp."""
    compute: Literal["virtual", "real"] = "virtual"
    """virtual: experts sleep for their time at `gflops`. real: experts multiply; predictions use
    the profile's rate."""
    gflops: float = 20.0
    plans: int = 0
    """Number of plans to measure, evenly spaced in the sorted list; 0 for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world % self.etp:
            raise InputError(
                f"case {self.name}: etp={self.etp} does not divide the bed's {self.world} ranks"
            )
        _ = self.grid  # made now, so that an impossible one is refused

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """Names of the numbers that need not be above 0."""
        return (*super().may_be_zero, "plans")

    @property
    def part(self) -> str:
        """The part of the benchmark: "plans" of layers with virtual compute, or layers with "real"
        products."""
        return "real" if self.compute == "real" else "plans"

    @property
    def words(self) -> tuple[str, ...]:
        """The part, the bed and the name of the case."""
        return (self.part, self.shape, self.name)

    @property
    def matrices(self) -> int:
        """Matrices per expert: two for virtual experts, three for real experts, which are
        SwiGLU."""
        return 2 if self.compute == "virtual" else 3

    @property
    def grid(self) -> Grid:
        """The mesh over all ranks of the bed."""
        return Grid(
            world=self.world,
            tp=self.tp,
            ep=self.world // self.etp,
            etp=self.etp,
            ranks_per_node=self.ranks_per_node,
        )


@dataclass(frozen=True, kw_only=True)
class ModelBenchConfig(BedConfig[ModelCase]):
    """The configuration of the whole benchmark; `seed` is that of the routing's pattern."""

    leaders: int = 4
    """Number of plans to time again because their measured times are shortest; 0 to time no plan
    again."""
    favourites: int = 3
    """Number of plans to time again because their predicted times are shortest."""
    leader_repeats: int = 12
    """Timed runs of each plan that is timed again."""

    @property
    def beds(self) -> dict[Bed, list[ModelCase]]:
        """The beds, each with its cases."""
        beds: dict[Bed, list[ModelCase]] = {}
        for case in self.cells:
            beds.setdefault(case.bed, []).append(case)
        return beds


def read_config(path: Path = COMMITTED) -> ModelBenchConfig:
    """Read the configuration from a TOML or JSON file: fields of `ModelBenchConfig`, and a list
    `[[cases]]`.

    Raises:
        InputError: the file is invalid; the message names the file and the field.
    """
    return read_cells(path, ModelBenchConfig(), {"cases": ModelCase()})
