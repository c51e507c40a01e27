"""`AbstractLayoutIndex`: which pieces a slot holds on a rank, and which a movement takes where. Known before any count is.

A piece is (origin, expert, chunk): the rows that one rank contributes for one expert, or a chunk of them. Every layout is a
list of whole pieces, so a movement is a matching of pieces between two layouts. `sizes.py` adds how many rows each has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import FLOWS, Layout


@dataclass(frozen=True)
class Move:
    """A movement."""

    source: Layout
    """Of the slot that is read."""
    target: Layout
    """Of the slot that is written."""
    group: tuple[Axis, ...]
    """Axes over which ranks exchange."""
    reduce: bool
    """Every rank that holds a piece sends it and the target sums; else the target's own piece serves, or that of the
    lowest rank which holds it."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.source, self.target, self.group, self.reduce))

    def __hash__(self) -> int:
        """Worked out once: a movement is looked up several times in every call of a layer."""
        return self._hash


@dataclass(frozen=True)
class Pieces:
    """What a slot holds, in the order of its rows: experts ascending, within one by origin, then by chunk."""

    number: np.ndarray
    """(n,) int64, one per piece, the same on all ranks."""
    origin: np.ndarray
    expert: np.ndarray
    chunk: np.ndarray
    sorter: np.ndarray
    """Order of `number`."""


@dataclass(frozen=True)
class Matched:
    """The pieces that a rank sends to, or receives from, its peers in a movement, peer after peer."""

    peers: tuple[int, ...]
    """Ascending; those with at least one piece, the rank itself among them."""
    starts: np.ndarray
    """(peers + 1,) where each peer's pieces start in `places`."""
    places: np.ndarray
    """Places of the pieces in this rank's slot."""

    @cached_property
    def in_order(self) -> bool:
        """Whether these are the slot's first pieces in its order."""
        return np.array_equal(self.places, np.arange(len(self.places)))


class AbstractLayoutIndex(ABC):
    """The pieces of every slot and movement on a mesh.

    Args:
        grid: the mesh.
        num_experts: of the layer.
        num_chunks: parts that each run of copies is cut into.
        replicates: after these parts, each run has one more for every rank of ep, which that rank computes.

    Raises:
        InputError: if the experts do not split over ep.
    """

    def __init__(self, grid: Grid, num_experts: int, num_chunks: int, *, replicates: bool) -> None:
        if num_experts % grid.ep:
            raise InputError(
                f"num_experts={num_experts} does not split over mesh.ep={grid.ep}: choose ep as a divisor of it"
            )
        self.grid, self.num_experts, self.num_chunks, self.replicates = grid, num_experts, num_chunks, replicates
        self._all_chunks = num_chunks + grid.ep * replicates
        self._base = max(num_experts, grid.nodes_per_replica)
        self._stays: dict[tuple[Move, int], bool] = {}

    @abstractmethod
    def pieces(self, layout: Layout, rank: int) -> Pieces:
        """Return what a slot of a layout holds on a rank."""

    @abstractmethod
    def sent(self, move: Move, rank: int) -> Matched:
        """Return what a rank sends in a movement."""

    @abstractmethod
    def received(self, move: Move, rank: int) -> Matched:
        """Return what a rank receives in a movement."""

    @abstractmethod
    def tokens_later(self, copies: Layout, rank: int) -> np.ndarray | None:
        """Return by how many rows the tokens of each piece stand later in their slot than its origin counts, (pieces,) int64.

        None where they stand where tokens of that origin start.
        """

    def local_experts(self, rank: int) -> range:
        """Return the experts that live on a rank."""
        each = self.num_experts // self.grid.ep
        first = self.grid.coordinate(rank, "ep") * each
        return range(first, first + each)

    def node_experts(self, rank: int) -> range:
        """Return the experts of which a shard lives on a rank's node, within its copy of the experts."""
        grid = self.grid
        mates = [peer for peer in grid.group(rank, ("ep", "etp")) if grid.node_of(peer) == grid.node_of(rank)]
        held = [self.local_experts(peer) for peer in mates]
        return range(min(experts.start for experts in held), max(experts.stop for experts in held))

    def experts(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the experts of a layout; for visits, the nodes; for stops, the places of ep; for tokens, one."""
        if layout.flow == "node_tokens" and layout.experts == "node":
            return np.array([self.grid.coordinate(rank, "node")])
        if layout.flow == "rank_tokens" and layout.experts != "all":
            held = self.experts(replace(layout, flow="copies"), rank)
            return np.unique(held // (self.num_experts // self.grid.ep))
        if layout.chunk == "near":
            mates = [mate for mate in self.grid.group(rank, ("node",)) if self._shard(mate) == self._shard(rank)]
            return np.unique([self.local_experts(mate) for mate in mates])
        if layout.experts == "all":
            flow = FLOWS[layout.flow]
            return np.arange(self.num_experts if flow.is_per_expert else prod(map(self.grid.size, flow.homes)))
        return np.array(self.local_experts(rank) if layout.experts == "rank" else self.node_experts(rank))

    def _shard(self, rank: int) -> int:
        return self.grid.coordinate(rank, "etp")

    def number(self, origin: np.ndarray, expert: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the numbers of pieces."""
        return (origin * self._base + expert) * self._all_chunks + chunk

    def helper_chunk(self, rank: int) -> int:
        """Return the chunk that a rank computes for others."""
        return self.num_chunks + self.grid.coordinate(rank, "ep")

    def stays(self, move: Move, rank: int) -> bool:
        """Return whether a movement leaves all rows of a rank where they are, whatever the counts."""
        key = (move, rank)
        if key not in self._stays:
            out, back = self.sent(move, rank), self.received(move, rank)
            held = [len(self.pieces(layout, rank).number) for layout in (move.source, move.target)]
            all_here = out.peers == back.peers == (rank,) and held == [len(out.places), len(back.places)]
            depends = {move.source.chunk, move.target.chunk}.intersection(("near", "here"))
            self._stays[key] = all_here and not depends and np.array_equal(out.places, back.places)
        return self._stays[key]


class LayoutIndex(AbstractLayoutIndex):
    """The pieces of slots and movements that depend on layouts alone, shared between calls.

    Args:
        grid: the mesh.
        num_experts: of the layer.
        num_chunks: parts that each run of copies is cut into.
        replicates: after these parts, each run has one more for every rank of ep, which that rank computes.
        parts: chunks of a program, each of which takes its share of these parts; None: one each.

    Raises:
        InputError: if the experts do not split over ep.
    """

    def __init__(
        self, grid: Grid, num_experts: int, num_chunks: int = 1, *, replicates: bool = False, parts: int | None = None
    ) -> None:
        super().__init__(grid, num_experts, num_chunks, replicates=replicates)
        self._parts = num_chunks if parts is None else parts
        self._pieces: dict[tuple[Layout, int], Pieces] = {}
        self._sent: dict[tuple[Move, int], Matched] = {}
        self._received: dict[tuple[Move, int], Matched] = {}

    def pieces(self, layout: Layout, rank: int) -> Pieces:
        """Return what a slot of a layout holds on a rank."""
        key = (layout, rank)
        if key not in self._pieces:
            chunks = self._chunks(layout, rank)
            grids = np.meshgrid(self.experts(layout, rank), self._origins(layout, rank), chunks, indexing="ij")
            expert, origin, chunk = (values.reshape(-1) for values in grids)
            if layout.step is not None:
                inside = self._ahead(origin, expert, layout.step[1]) == layout.step[0]
                expert, origin, chunk = expert[inside], origin[inside], chunk[inside]
            number = self.number(origin, expert, chunk)
            self._pieces[key] = Pieces(number, origin, expert, chunk, np.argsort(number, kind="stable"))
        return self._pieces[key]

    def sent(self, move: Move, rank: int) -> Matched:
        """Return what a rank sends in a movement."""
        if (move, rank) not in self._sent:
            self._match(move, rank)
        return self._sent[(move, rank)]

    def received(self, move: Move, rank: int) -> Matched:
        """Return what a rank receives in a movement."""
        if (move, rank) not in self._received:
            self._match(move, rank)
        return self._received[(move, rank)]

    def tokens_later(self, copies: Layout, rank: int) -> np.ndarray | None:
        """Return None: tokens stand where those of their origin start."""
        return None

    def _match(self, move: Move, rank: int) -> None:
        """Match the pieces of all ranks that exchange with `rank`."""
        members = self.grid.group(rank, move.group)
        sends: dict[int, list[tuple[int, np.ndarray]]] = {member: [] for member in members}
        for target in members:
            wanted = self.pieces(move.target, target)
            still_open = np.ones(len(wanted.number), dtype=bool)
            splits: list[tuple[int, np.ndarray]] = []
            for source in sorted(members, key=lambda member: (member != target, member)):
                where = find(self.pieces(move.source, source), wanted.number)
                use = (where >= 0) & (still_open | move.reduce)
                still_open &= where < 0
                if use.any():
                    splits.append((source, np.flatnonzero(use)))
                    sends[source].append((target, where[use]))
            assert not still_open.any(), f"rank {target} wants pieces that no rank of its group holds"
            self._received[(move, target)] = matched(sorted(splits, key=lambda lot: lot[0]))
        for source, splits in sends.items():
            self._sent[(move, source)] = matched(splits)

    def _chunks(self, layout: Layout, rank: int) -> np.ndarray:
        if not FLOWS[layout.flow].is_cut:
            return np.zeros(1, dtype=np.int64)
        if layout.chunk is None:
            return np.arange(self._all_chunks if layout.flow == "copies" else self.num_chunks)
        if layout.chunk == "replicated":
            return np.arange(self.num_chunks, self._all_chunks)
        if layout.chunk == "here":
            return np.array([self.helper_chunk(rank)])
        assert isinstance(layout.chunk, int)
        start, end = (self.num_chunks * chunk // self._parts for chunk in (layout.chunk, layout.chunk + 1))
        return np.arange(start, end)

    def _origins(self, layout: Layout, rank: int) -> np.ndarray:
        grid, origins = self.grid, FLOWS[layout.flow].origins
        peers = grid.group(rank, layout.spread)
        if origins is not None:
            return np.unique([grid.coordinate(peer, origins[0]) for peer in peers] if origins else [0])
        if layout.whole_tp:
            peers = tuple(member for peer in peers for member in grid.group(peer, ("tp",)))
        return np.unique(peers)

    def _ahead(self, origin: np.ndarray, expert: np.ndarray, groups: int) -> np.ndarray:
        """Return how many groups of ep an expert's home stands after the origin, cyclically."""
        each = self.grid.ep // groups
        at = np.array([self.grid.coordinate(rank, "ep") for rank in range(self.grid.world)])
        home = expert // (self.num_experts // self.grid.ep)
        return (home // each - at[origin] // each) % groups


def find(held: Pieces, wanted: np.ndarray) -> np.ndarray:
    """Return the place of each wanted piece among the held ones, -1 where it is not held."""
    if not len(held.number):
        return np.full(len(wanted), -1)
    place = np.searchsorted(held.number, wanted, sorter=held.sorter)
    index = held.sorter[np.minimum(place, len(held.number) - 1)]
    return np.where(held.number[index] == wanted, index, -1)


def matched(splits: list[tuple[int, np.ndarray]]) -> Matched:
    """Return what goes to, or comes from, each peer as one; peers without a piece are left out."""
    given = [(peer, places) for peer, places in splits if len(places)]
    starts = np.cumsum([0, *(len(places) for _, places in given)])
    places = np.concatenate([np.zeros(0, dtype=np.int64), *(places for _, places in given)])
    return Matched(tuple(peer for peer, _ in given), starts, places)
