"""The configuration of the communication benchmark. It is read from a file: shapes and rates are fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moesaic.configfile import suggestion
from moesaic.errors import InputError
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic_lab.benchmark import read_parts
from moesaic_testbed.bed import Bed

Kind = Literal["exchange", "limit", "lanes", "dispatch"]
KINDS: tuple[Kind, ...] = ("exchange", "limit", "lanes", "dispatch")
TORCH = "torch"
"""Name of the method that is torch's `all_to_all_single`."""
MULTICAST = "multicast"
METHODS = (*ALL_TO_ALLS, TORCH)
COMMITTED = Path(__file__).parent.parent / "configs" / "comm.toml"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Methods timed over several sizes on one bed."""

    kind: Kind = "exchange"
    """exchange: compare all-to-alls. limit: compare all-to-alls with the link limit. lanes: compare pipelined with each of its
    lanes alone. dispatch: send copies of tokens to their experts by linear and by multicast."""
    nodes: int = 2
    """Nodes of the bed."""
    ranks_per_node: int = 2
    """Ranks per node."""
    inter: str = "200mbit"
    """Rate of each node's link in each direction."""
    intra: str | None = None
    """Rate of `lo` inside each node; None for no limit."""
    per_message: int = 0
    """Least bytes that each packet is charged."""
    sizes_kib: tuple[int, ...] = (1024,)
    """Sizes in KiB per rank, including the rows that a rank keeps. Each must be a whole number of rows per pair of ranks. Not
    used by a dispatch."""
    methods: tuple[str, ...] = ("linear",)
    """Names of the all-to-alls of exchange and limit; "torch" is `all_to_all_single`."""
    tokens: int = 1024
    """Tokens per rank of a dispatch."""
    num_experts: int = 16
    """Number of experts of a dispatch."""
    top_k: int = 8
    """Copies per token of a dispatch."""
    chunks: tuple[int, ...] = (1,)
    """Numbers of chunks of multicast in a dispatch, each timed; one chunk crosses nodes while another fans out inside them."""
    repeats: int = 8
    """Timed runs of each method; a ratio under 1.10 needs 30."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "tokens", "num_experts", "top_k", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{self.kind}: {name}={getattr(self, name)}: must be at least 1")
        if min(self.chunks, default=0) < 1:
            raise InputError(f"{self.kind} on {self.shape}: chunks={self.chunks}: list numbers from 1 on")
        for method in self.methods:
            if method not in METHODS:
                raise InputError(f"{self.kind}: unknown method {method}{suggestion(method, list(METHODS))}")
        if self.kind != "dispatch" and not self.sizes_kib:
            raise InputError(f"{self.kind} on {self.shape}: sizes_kib is empty: list at least one size")
        if self.kind == "dispatch" and self.num_experts % self.world:
            raise InputError(
                f"dispatch on {self.shape}: num_experts={self.num_experts} does not split over {self.world} ranks"
            )
        if self.kind == "dispatch" and self.top_k > self.num_experts:
            raise InputError(f"dispatch on {self.shape}: top_k={self.top_k} of num_experts={self.num_experts}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def shape(self) -> str:
        """Nodes x ranks per node, e.g. "2x2"."""
        return f"{self.nodes}x{self.ranks_per_node}"

    @property
    def dispatches(self) -> tuple[tuple[str, int], ...]:
        """(name, chunks) of the methods of a dispatch."""
        return (("linear", 1), *((MULTICAST, chunks) for chunks in self.chunks))

    @property
    def label(self) -> str:
        """Description of the bed, and of a dispatch's experts, for tables and messages."""
        parts = [f"{self.shape} {self.inter}"]
        parts += [f"lo {self.intra}"] if self.intra else []
        parts += [f"{self.per_message} B/message"] if self.per_message else []
        parts += [f"top {self.top_k} of {self.num_experts}"] if self.kind == "dispatch" else []
        return ", ".join(parts)

    @property
    def bed(self) -> Bed:
        """The emulated cluster."""
        return Bed(
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            inter=self.inter,
            intra=self.intra,
            per_message=self.per_message,
        )

    def rows_of(self, size_kib: int, dim: int) -> int:
        """Return the number of float32 rows that a rank holds.

        Raises:
            InputError: the rows do not split evenly over the ranks.
        """
        rows, remainder = divmod(size_kib * 1024, dim * 4 * self.world)
        if remainder or not rows:
            raise InputError(
                f"{self.kind} on {self.shape}: {size_kib} KiB are not a whole number of rows of {dim} float32 for each of "
                f"{self.world} ranks: choose a multiple of {max(dim * 4 * self.world // 1024, 1)}, or another dim"
            )
        return rows * self.world


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """The configuration of the whole benchmark."""

    dim: int = 256
    """Columns of a row, in float32."""
    warmup: int = 1
    """Unmeasured rounds before the measured ones."""
    seed: int = 0
    """Seed of the routing."""
    sweeps: tuple[Sweep, ...] = ()
    """Sweeps in the order in which they run."""

    def __post_init__(self) -> None:
        if self.dim < 1 or self.warmup < 0:
            raise InputError(f"dim={self.dim}, warmup={self.warmup}: must be at least 1 and 0")
        for sweep in self.sweeps:
            for size in sweep.sizes_kib:
                sweep.rows_of(size, self.dim)

    def narrowed(self, *, only: tuple[str, ...] = (), repeats: int | None = None) -> CommConfig:
        """Return a copy of the configuration with only some sweeps or other repeats.

        Args:
            only: shapes of beds, e.g. "2x2"; () for all.
            repeats: timed runs of every method; None to keep the file's numbers.

        Raises:
            InputError: no sweep has a shape in `only`, or `repeats` is below 1.
        """
        shapes = sorted({sweep.shape for sweep in self.sweeps})
        for shape in only:
            if shape not in shapes:
                raise InputError(f"--only {shape}: no sweep has this shape: choose from {', '.join(shapes)}")
        sweeps = [sweep for sweep in self.sweeps if not only or sweep.shape in only]
        if repeats is not None:
            sweeps = [replace(sweep, repeats=repeats) for sweep in sweeps]
        return replace(self, sweeps=tuple(sweeps))


def in_chunks(name: str, chunks: int) -> str:
    """Return a method's name with its number of chunks, for tables."""
    return name if chunks == 1 else f"{name}/{chunks}"


def read_config(path: Path = COMMITTED) -> CommConfig:
    """Read the configuration from a TOML or JSON file: fields of `CommConfig`, and lists of sweeps under their kind.

    Raises:
        InputError: the file is invalid; the message names the file and the field.
    """
    return read_parts(path, CommConfig(), lists={kind: ("sweeps", Sweep(kind=kind)) for kind in KINDS})
