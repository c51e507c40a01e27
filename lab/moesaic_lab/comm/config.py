"""The configuration of the communication benchmark. It is read from a file: shapes and rates are
fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moesaic.errors import InputError, suggestion
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic_lab.beds import BedConfig, Place, read_cells

Kind = Literal["exchange", "limit", "lanes", "dispatch"]
KINDS: tuple[Kind, ...] = ("exchange", "limit", "lanes", "dispatch")
TORCH = "torch"
"""Name of the method that is torch's `all_to_all_single`."""
MULTICAST = "multicast"
METHODS = (*ALL_TO_ALLS, TORCH)
COMMITTED = Path(__file__).parent.parent / "configs" / "comm.toml"


@dataclass(frozen=True, kw_only=True)
class Sweep(Place):
    """Methods timed over several sizes on one bed."""

    kind: Kind = "exchange"
    """exchange: compare all-to-alls. limit: compare all-to-alls with the link limit. lanes: compare
    pipelined with each of its lanes alone. dispatch: send copies of tokens to their experts by
    linear and by multicast."""
    sizes_kib: tuple[int, ...] = (1024,)
    """Sizes in KiB per rank, including the rows that a rank keeps. Each must be a whole number of
    rows per pair of ranks. Not used by a dispatch."""
    methods: tuple[str, ...] = ("linear",)
    """Names of the all-to-alls of exchange and limit; "torch" is `all_to_all_single`."""
    tokens: int = 1024
    """Tokens per rank of a dispatch."""
    num_experts: int = 16
    """Number of experts of a dispatch."""
    top_k: int = 8
    """Copies per token of a dispatch."""
    chunks: tuple[int, ...] = (1,)
    """Numbers of chunks of multicast in a dispatch, each timed; one chunk crosses nodes while
    another fans out inside them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        head = f"{self.kind} on {self.shape}"
        if min(self.chunks, default=0) < 1:
            raise InputError(f"{head}: chunks={self.chunks}: list numbers from 1 on")
        for method in self.methods:
            if method not in METHODS:
                raise InputError(
                    f"{head}: unknown method {method}{suggestion(method, list(METHODS))}"
                )
        if self.kind != "dispatch" and not self.sizes_kib:
            raise InputError(f"{head}: sizes_kib is empty: list at least one size")
        if self.kind == "dispatch" and self.num_experts % self.world:
            raise InputError(
                f"{head}: num_experts={self.num_experts} does not split over {self.world} ranks"
            )
        if self.kind == "dispatch" and self.top_k > self.num_experts:
            raise InputError(f"{head}: top_k={self.top_k} of num_experts={self.num_experts}")

    @property
    def dispatches(self) -> dict[str, tuple[str, int]]:
        """(all-to-all, chunks) of the methods of a dispatch, by name."""
        methods = {"linear": ("linear", 1)}
        for chunks in self.chunks:
            name = MULTICAST if chunks == 1 else f"{MULTICAST}/{chunks}"
            methods[name] = (MULTICAST, chunks)
        return methods

    @property
    def label(self) -> str:
        """Description of the bed, and of a dispatch's experts, for tables and messages."""
        return self.in_words + (
            f", top {self.top_k} of {self.num_experts}" if self.kind == "dispatch" else ""
        )

    def rows_of(self, size_kib: int, dim: int) -> int:
        """Return the number of float32 rows that a rank holds; it sends equally many to each rank.

        Args:
            size_kib: size of all rows of a rank, in KiB.
            dim: columns of a row.

        Raises:
            InputError: the rows do not split evenly over the ranks.
        """
        step_bytes = dim * 4 * self.world  # one row for each rank
        rows_per_target, remainder = divmod(size_kib * 1024, step_bytes)
        if remainder or not rows_per_target:
            raise InputError(
                f"{self.kind} on {self.shape}: {size_kib} KiB are not a whole number of rows of "
                f"{dim} float32 for each of {self.world} ranks: choose a multiple of "
                f"{max(step_bytes // 1024, 1)}, or another dim"
            )
        return rows_per_target * self.world


@dataclass(frozen=True, kw_only=True)
class CommConfig(BedConfig[Sweep]):
    """The configuration of the whole benchmark."""

    dim: int = 256
    """Columns of a row, in float32."""

    def __post_init__(self) -> None:
        if self.dim < 1 or self.warmup < 0:
            raise InputError(f"dim={self.dim}, warmup={self.warmup}: must be at least 1 and 0")
        for sweep in self.cells:
            for size in sweep.sizes_kib:
                sweep.rows_of(size, self.dim)


def read_config(path: Path = COMMITTED) -> CommConfig:
    """Read the configuration from a TOML or JSON file: fields of `CommConfig`, and lists of sweeps
    under their kind.

    Raises:
        InputError: the file is invalid; the message names the file and the field.
    """
    return read_cells(path, CommConfig(), {kind: Sweep(kind=kind) for kind in KINDS})
