"""Cells on a bed: the frame of the benchmarks on emulated clusters.

A configuration file lists cells. Each has a place: a bed, and how often methods are timed on it.
One after another the cells are sent to the ranks of their bed, which check the methods, record what
they send and time them in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from moesaic.errors import InputError, suggestion
from moesaic_lab.benchmark import read_parts, require_positive
from moesaic_lab.bounds import Limit, Message, crossing, link_limit
from moesaic_lab.measure import Span, TimedCell, timed
from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_testbed.bed import Bed


@dataclass(frozen=True, kw_only=True)
class Place:
    """The bed of a cell, and how often its methods are timed."""

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
    repeats: int = 8
    """Timed runs of each method; a ratio under 1.10 needs 30."""

    def __post_init__(self) -> None:
        numbers = {
            name: value for name, value in vars(self).items() if name not in self.may_be_zero
        }
        require_positive(numbers, f"{self.part}: " if self.part else "")
        _ = self.bed  # made now, so that an impossible one is refused

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """Names of the numbers that need not be above 0."""
        return ("per_message",)

    @property
    def part(self) -> str:
        """The name by which --only chooses the cell."""
        return self.shape

    @property
    def words(self) -> tuple[str, ...]:
        """All words by which --only chooses the cell."""
        return (self.part,)

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

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def shape(self) -> str:
        """Nodes x ranks per node, e.g. "2x2"."""
        return f"{self.nodes}x{self.ranks_per_node}"

    @property
    def in_words(self) -> str:
        """The bed for tables and messages."""
        parts = [f"{self.shape} {self.inter}"]
        if self.intra:
            parts.append(f"lo {self.intra}")
        if self.per_message:
            parts.append(f"{self.per_message} B/message")
        return ", ".join(parts)


P = TypeVar("P", bound=Place)
C = TypeVar("C", bound="BedConfig[Any]")


@dataclass(frozen=True, kw_only=True)
class BedConfig(Generic[P]):
    """The configuration of a benchmark: what its file says of all cells, and the cells."""

    warmup: int = 1
    """Unmeasured rounds before the measured ones."""
    seed: int = 0
    """Seed of weights, tokens and routing."""
    cells: tuple[P, ...] = ()
    """Cells in the order in which they run."""

    def narrowed(self: C, *, only: tuple[str, ...] = (), repeats: int | None = None) -> C:
        """Return a copy with only the cells of some parts, and with other repeats if given.

        Raises:
            InputError: no cell has a part of `only`, or `repeats` is below 1.
        """
        known = list(dict.fromkeys(word for cell in self.cells for word in cell.words))
        for name in only:
            if name not in known:
                raise InputError(
                    f"--only {name}: the configuration has no such part{suggestion(name, known)}"
                )
        cells = [cell for cell in self.cells if not only or set(cell.words) & set(only)]
        if repeats is not None:
            cells = [self.repeated(cell, repeats) for cell in cells]
        return replace(self, cells=tuple(cells))

    @staticmethod
    def repeated(cell: Any, repeats: int) -> Any:
        """Return a cell with another number of repeats."""
        return replace(cell, repeats=repeats)


def read_cells(path: Path, whole: C, kinds: Mapping[str, Place], **lists: tuple[str, object]) -> C:
    """Read a configuration from a TOML or JSON file.

    Args:
        whole: the configuration with its defaults; the file may set its numbers and words.
        kinds: by the name of a list of tables in the file, the cell whose fields each of these
            tables overrides.
        lists: further lists of tables; see `read_parts`.
    """
    cell_lists = {name: ("cells", cell) for name, cell in kinds.items()}
    return read_parts(path, whole, lists=cell_lists | lists)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a rank measured of the methods of one cell."""

    spans: Mapping[str, list[Span]]
    """Spans by method, of the rounds in which all ran."""
    pairs: Mapping[str, list[Span]] = field(default_factory=dict)
    """Spans of further rounds, in which only the reference and the methods near it ran."""
    sent: Mapping[str, Sequence[list[Message]]]
    """Messages that this rank sent in each phase of one run, by method."""


@dataclass(frozen=True, kw_only=True)
class BedCell(TimedCell):
    """The measurements of one cell, over all ranks."""

    limits: Mapping[str, Sequence[Limit]]
    """Least time in which the links carry the messages of each phase of a run, by method."""
    across: Mapping[str, tuple[int, int]]
    """(bytes, messages) between nodes in one run, by method."""

    def bound(self, name: str) -> float:
        """Return a lower bound on the seconds of a run."""
        return sum(limit.seconds for limit in self.limits[name])

    def row(self, name: str) -> dict[str, Any]:
        """Return times, bound and what crossed the nodes as keys of a method's row."""
        return {
            **self.timings[name].row(),
            "bound_seconds": self.bound(name),
            "bound_link": self.limits[name][0].link,
            "across_bytes": self.across[name][0],
            "across_messages": self.across[name][1],
        }


def joined(of_ranks: Sequence[Timed], bed: Bed) -> dict[str, Any]:
    """Return the fields of a `BedCell` from what every rank measured of it."""
    limits = {}
    across = {}
    for name in of_ranks[0].spans:
        # For each phase, the messages of all ranks.
        phases = [
            list(itertools.chain.from_iterable(by_rank))
            for by_rank in zip(*(rank.sent[name] for rank in of_ranks))
        ]
        limits[name] = [link_limit(messages, bed) for messages in phases]
        across[name] = crossing(itertools.chain.from_iterable(phases), bed.node_of)

    times = timed([rank.spans for rank in of_ranks], [rank.pairs for rank in of_ranks])
    return times | {"limits": limits, "across": across}


def drawn(
    cells: Sequence[BedCell],
    at: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
    names: Mapping[str, Callable[[BedCell], str]] | None = None,
) -> tuple[PlottedSeries, ...]:
    """Return a series per method over the cells in which it was timed.

    Args:
        cells: the cells of a panel.
        at: place of each cell on the x axis; None for 0, 1, 2 and so on, the places of bars.
        scales: factor by which each cell's seconds are multiplied; None for milliseconds.
        names: by the name of a series, which method of a cell it shows; None for one series per
            method.
    """
    at = at or [float(place) for place in range(len(cells))]
    scales = scales or [1e3] * len(cells)
    if names is None:
        methods = dict.fromkeys(name for cell in cells for name in cell.timings)
        names = {name: lambda cell, name=name: name for name in methods}  # type: ignore[misc]
    series = []
    for name, method_of in names.items():
        points = []
        point_scales = []
        for x, cell, scale in zip(at, cells, scales):
            method = method_of(cell)
            if method in cell.timings:
                points.append((x, cell.timings[method], cell.bound(method)))
                point_scales.append(scale)
        series.append(PlottedSeries.of(name, points, point_scales))
    return tuple(series)


def bars(
    title: str,
    cells: Sequence[BedCell],
    label: Callable[[Any], str],
    y_title: str = "ms",
    **options: Any,
) -> Panel:
    """Return a panel with a group of bars per cell, named by `label`; `options` are further
    arguments of `drawn`."""
    series = drawn(cells, **options)
    return Panel(
        title=title, x_title="", y_title=y_title, series=series, categories=tuple(map(label, cells))
    )
