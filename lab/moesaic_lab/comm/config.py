"""What the communication benchmark runs: read from a file, so that shapes and rates are fixed before measuring."""

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
"""The method that is torch's own `all_to_all_single`."""
MULTICAST = "multicast"
METHODS = (*ALL_TO_ALLS, TORCH)
COMMITTED = Path(__file__).parent.parent / "configs" / "comm.toml"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Methods over sizes on one bed."""

    kind: Kind = "exchange"
    """exchange: all-to-alls. limit: the same, towards the link limit. lanes: pipelined, and each lane of it alone. dispatch:
    copies of tokens to their experts, linear and multicast."""
    nodes: int = 2
    """Nodes of the bed."""
    ranks_per_node: int = 2
    """Ranks on each."""
    inter: str = "200mbit"
    """Rate of each node's link, each direction."""
    intra: str | None = None
    """Rate of `lo` inside each node; None: unshaped."""
    per_message: int = 0
    """Bytes that every packet is charged at least."""
    sizes_kib: tuple[int, ...] = (1024,)
    """KiB per rank, what it keeps for itself included; a whole number of rows for each rank. Not of a dispatch."""
    methods: tuple[str, ...] = ("linear",)
    """All-to-alls, by name; "torch" is `all_to_all_single`. Of exchange and limit."""
    tokens: int = 1024
    """Per rank, of a dispatch."""
    num_experts: int = 16
    """Of a dispatch."""
    top_k: int = 8
    """Copies per token, of a dispatch."""
    chunks: tuple[int, ...] = (1,)
    """In how many parts multicast runs in turn, one part crossing while another fans out; of a dispatch."""
    repeats: int = 8
    """How often each method is timed. A ratio under 1.10 needs 30."""

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
        """Ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def shape(self) -> str:
        """Nodes x ranks, as "2x2"."""
        return f"{self.nodes}x{self.ranks_per_node}"

    @property
    def dispatches(self) -> tuple[tuple[str, int], ...]:
        """What a dispatch is measured by: names and chunks."""
        return (("linear", 1), *((MULTICAST, chunks) for chunks in self.chunks))

    @property
    def label(self) -> str:
        """The bed, and what a dispatch is made of, for people."""
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
        """Return the float32 rows that a rank holds.

        Raises:
            InputError: if they do not split evenly over the ranks.
        """
        rows, rest = divmod(size_kib * 1024, dim * 4 * self.world)
        if rest or not rows:
            raise InputError(
                f"{self.kind} on {self.shape}: {size_kib} KiB are no whole number of rows of {dim} float32 for each of "
                f"{self.world} ranks: choose a multiple of {max(dim * 4 * self.world // 1024, 1)}, or another dim"
            )
        return rows * self.world


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """The whole benchmark."""

    dim: int = 256
    """Columns of a row, float32."""
    warmup: int = 1
    """Rounds before those that count."""
    seed: int = 0
    """Of the routing."""
    sweeps: tuple[Sweep, ...] = ()
    """In order."""

    def __post_init__(self) -> None:
        if self.dim < 1 or self.warmup < 0:
            raise InputError(f"dim={self.dim}, warmup={self.warmup}: must be at least 1 and 0")
        for sweep in self.sweeps:
            for size in sweep.sizes_kib:
                sweep.rows_of(size, self.dim)

    def narrowed(self, *, only: tuple[str, ...] = (), repeats: int | None = None) -> CommConfig:
        """Return the part of the benchmark that was asked for.

        Args:
            only: shapes of beds, as "2x2"; () for all.
            repeats: of every sweep; None as the file says.

        Raises:
            InputError: for a shape that no sweep has, or repeats below 1.
        """
        shapes = sorted({sweep.shape for sweep in self.sweeps})
        for shape in only:
            if shape not in shapes:
                raise InputError(f"--only {shape}: no sweep runs there: choose of {', '.join(shapes)}")
        sweeps = [sweep for sweep in self.sweeps if not only or sweep.shape in only]
        if repeats is not None:
            sweeps = [replace(sweep, repeats=repeats) for sweep in sweeps]
        return replace(self, sweeps=tuple(sweeps))


def in_chunks(name: str, chunks: int) -> str:
    """Return the name of a method in chunks, for people."""
    return name if chunks == 1 else f"{name}/{chunks}"


def read_config(path: Path = COMMITTED) -> CommConfig:
    """Read the benchmark from a TOML or JSON file: fields of `CommConfig`, and tables of sweeps by their kind.

    Raises:
        InputError: naming the file and the field.
    """
    return read_parts(path, CommConfig(), lists={kind: ("sweeps", Sweep(kind=kind)) for kind in KINDS})
