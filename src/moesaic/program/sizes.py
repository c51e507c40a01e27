"""Computes which rows a slot holds on a rank, and which rows a movement sends where. All sizes come from this module.

A piece is (origin, expert, chunk): the rows that one rank contributes for one expert, or a chunk of them. Every layout
is a list of whole pieces, so a movement is a matching of pieces between two layouts. `LayoutIndex` knows the pieces of
every slot and movement before any count is known.

`CallSizes` adds the number of rows of each piece, from the number of copies that each origin sends to each expert.
Every rank has all counts, so it derives the sizes of all other ranks without further communication. Executor, loopback
and simulator share this code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import FLOWS, ONCE, Flow, Layout


@dataclass(frozen=True)
class Move:
    """A movement between two layouts."""

    source: Layout
    """Layout of the slot that is read."""
    target: Layout
    """Layout of the slot that is written."""
    group: tuple[Axis, ...]
    """Axes over which ranks exchange."""
    reduce: bool
    """Whether the target sums the pieces of all ranks that hold them. If False, the target uses its own piece, or the
    piece of the lowest rank that holds one."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.source, self.target, self.group, self.reduce))

    def __hash__(self) -> int:
        """Return the cached hash: a movement is looked up several times in every call of a layer."""
        return self._hash


@dataclass(frozen=True)
class Pieces:
    """The pieces that a slot holds, in the order of its rows: by expert, then origin, then chunk."""

    number: np.ndarray
    """(n,) int64: identifies each piece, identically on all ranks."""
    origin: np.ndarray
    expert: np.ndarray
    chunk: np.ndarray
    sorter: np.ndarray
    """(n,) the argsort of `number`."""


@dataclass(frozen=True)
class Matched:
    """The pieces that a rank sends to, or receives from, its peers in a movement, peer after peer."""

    peers: tuple[int, ...]
    """The peers with at least one piece, ascending; they may include the rank itself."""
    starts: np.ndarray
    """(peers + 1,) where each peer's pieces start in `places`."""
    places: np.ndarray
    """Positions of the pieces in this rank's slot."""

    @cached_property
    def in_order(self) -> bool:
        """Whether these are the first pieces of the slot, in the slot's order."""
        return np.array_equal(self.places, np.arange(len(self.places)))


@dataclass(frozen=True)
class Held:
    """The pieces that slots of a layout hold on each rank: each combination of its origins, experts and chunks, if in
    `inside`."""

    origins: np.ndarray
    """(ranks, origins) bool."""
    experts: np.ndarray
    """(ranks, experts) bool."""
    chunks: np.ndarray
    """(ranks, chunks) bool."""
    inside: np.ndarray | None = None
    """(origins, experts) bool: the runs that belong to the layout's step. None: all runs."""
    homes: np.ndarray | None = None
    """(origins, chunks) int64: the only rank that holds these pieces. None: no such restriction."""

    def by(self, origin: np.ndarray, expert: np.ndarray, chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (rank, position among the given pieces) of every rank that holds one of them, (pairs,) int64 each.

        Args:
            origin, expert, chunk: (n,) each, of the given pieces.
        """
        piece = np.arange(len(origin)) if self.inside is None else np.flatnonzero(self.inside[origin, expert])
        axes = [(self.origins, origin), (self.experts, expert), (self.chunks, chunk)]
        for table, number in axes:
            is_held = np.logical_or.reduce(table, axis=0)
            if not is_held.all():
                piece = piece[is_held[number[piece]]]
        if self.homes is not None:
            rank = self.homes[origin[piece], chunk[piece]]
        elif self._kinds is not None:  # look up by origin and set of experts together
            kind_of_rank, kind_of_expert = self._kinds
            num_kinds = int(kind_of_rank.max()) + 1
            ranks = np.argsort(kind_of_rank, kind="stable")
            origin_held, order = np.nonzero(self.origins[ranks].T)
            ranks = ranks[order]
            holders = np.bincount(
                origin_held * num_kinds + kind_of_rank[ranks], minlength=self.origins.shape[1] * num_kinds
            )
            pair = origin[piece] * num_kinds + kind_of_expert[expert[piece]]
            selected = runs((np.cumsum(holders) - holders)[pair], holders[pair])
            rank, piece, axes = ranks[selected], np.repeat(piece, holders[pair]), axes[2:]
        else:  # look up on the axis that leaves the fewest candidate ranks
            ranks_per_index = [table.sum(0) for table, _ in axes]
            counts = [count[number[piece]] for count, (_, number) in zip(ranks_per_index, axes)]
            smallest = min(range(3), key=lambda axis: int(counts[axis].sum()))
            table, number = axes.pop(smallest)
            starts = (np.cumsum(ranks_per_index[smallest]) - ranks_per_index[smallest])[number[piece]]
            ranks = np.nonzero(table.T)[1]
            rank, piece = ranks[runs(starts, counts[smallest])], np.repeat(piece, counts[smallest])
        for table, number in axes:
            if table.all():
                continue
            holds = table.ravel()[rank * table.shape[1] + number[piece]]
            if not holds.all():
                rank, piece = rank[holds], piece[holds]
        return rank, piece

    @cached_property
    def _kinds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The set of experts that each rank holds, (ranks,), and the one that contains each expert, (experts,), as numbers.

        None if an expert belongs to several sets.
        """
        kinds, kind_of_rank = np.unique(self.experts, axis=0, return_inverse=True)
        return None if (kinds.sum(0) > 1).any() else (kind_of_rank.ravel(), kinds.argmax(0))

    @cached_property
    def _distinct_sets(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The different sets of experts that ranks hold, (experts, sets) float64, with the number of each rank's set,
        (ranks,).

        The second entry is the same for chunks.
        """
        uniques = (np.unique(table, axis=0, return_inverse=True) for table in (self.experts, self.chunks))
        return [(sets.T.astype(np.float64), set_of_rank.ravel()) for sets, set_of_rank in uniques]

    def sums(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of rows that each rank holds, (ranks,) float64 with whole numbers. Not defined if pieces
        have `homes`.

        Ranks with equal experts and chunks share one sum per origin, which is then added up over each rank's origins.

        Args:
            rows: (origins, experts, chunks) int64: rows of every piece.
        """
        assert self.homes is None, "pieces that have homes are held one by one"
        table = rows.astype(np.float64) if self.inside is None else (rows * self.inside[:, :, None]).astype(np.float64)
        (expert_sets, expert_set), (chunk_sets, chunk_set) = self._distinct_sets
        # (origins, chunks, sets of experts), then (origins, sets of experts, sets of chunks)
        per_origin = (table.swapaxes(1, 2) @ expert_sets).swapaxes(1, 2) @ chunk_sets
        rank, origin = np.nonzero(self.origins)
        rows_held = per_origin[origin, expert_set[rank], chunk_set[rank]]
        return np.bincount(rank, rows_held, len(self.origins))


class AbstractLayoutIndex(ABC):
    """The pieces of every slot and movement on a mesh.

    Args:
        num_chunks: number of parts into which each run of copies is cut.
        replicates: whether each run has one more chunk per ep rank, after these parts, which that rank computes.

    Raises:
        InputError: if the experts cannot be split over ep.
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
        """Return the pieces that a slot of a layout holds on a rank."""

    @abstractmethod
    def sent(self, move: Move, rank: int) -> Matched:
        """Return the pieces that a rank sends in a movement."""

    @abstractmethod
    def received(self, move: Move, rank: int) -> Matched:
        """Return the pieces that a rank receives in a movement."""

    @abstractmethod
    def held(self, layout: Layout) -> Held:
        """Return which pieces slots of a layout hold on each rank, without listing them."""

    @abstractmethod
    def tokens_later(self, copies: Layout, rank: int) -> np.ndarray | None:
        """Return by how many rows the tokens of each piece stand later in their slot than at their origin, (pieces,) int64.

        None if they stand where the tokens of their origin start.
        """

    def local_experts(self, rank: int) -> range:
        """Return the experts stored on a rank."""
        num_local = self.num_experts // self.grid.ep
        first = self.grid.coordinate(rank, "ep") * num_local
        return range(first, first + num_local)

    def node_experts(self, rank: int) -> range:
        """Return the experts of which a shard is stored on a rank's node, within the rank's replica of the experts."""
        grid = self.grid
        mates = [peer for peer in grid.group(rank, ("ep", "etp")) if grid.node_of(peer) == grid.node_of(rank)]
        local = [self.local_experts(peer) for peer in mates]
        return range(min(experts.start for experts in local), max(experts.stop for experts in local))

    def experts(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the second index of a layout's pieces: experts, nodes (node_tokens), ep ranks (rank_tokens), or 0
        (tokens)."""
        if layout.flow == "node_tokens" and layout.experts == "node":
            return np.array([self.grid.coordinate(rank, "node")])
        if layout.flow == "rank_tokens" and layout.experts != "all":
            experts = self.experts(replace(layout, flow="copies"), rank)
            return np.unique(experts // (self.num_experts // self.grid.ep))
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
        """Return the chunk of replicated copies that a rank computes."""
        return self.num_chunks + self.grid.coordinate(rank, "ep")

    def stays(self, move: Move, rank: int) -> bool:
        """Return whether a movement leaves all rows of a rank where they are, for any counts."""
        key = (move, rank)
        if key not in self._stays:
            sent, received = self.sent(move, rank), self.received(move, rank)
            counts = [len(self.pieces(layout, rank).number) for layout in (move.source, move.target)]
            all_stay = sent.peers == received.peers == (rank,) and counts == [len(sent.places), len(received.places)]
            depends_on_counts = {move.source.chunk, move.target.chunk}.intersection(("near", "here"))
            self._stays[key] = all_stay and not depends_on_counts and np.array_equal(sent.places, received.places)
        return self._stays[key]


class LayoutIndex(AbstractLayoutIndex):
    """The pieces of slots and movements that depend on layouts alone, shared between calls.

    Args:
        num_chunks: number of parts into which each run of copies is cut.
        replicates: whether each run has one more chunk per ep rank, after these parts, which that rank computes.
        parts: number of chunks of the program, which share the `num_chunks` parts evenly. None: one part per chunk.

    Raises:
        InputError: if the experts cannot be split over ep.
    """

    def __init__(
        self, grid: Grid, num_experts: int, num_chunks: int = 1, *, replicates: bool = False, parts: int | None = None
    ) -> None:
        super().__init__(grid, num_experts, num_chunks, replicates=replicates)
        self._parts = num_chunks if parts is None else parts
        self._pieces: dict[tuple[Layout, int], Pieces] = {}
        self._sent: dict[tuple[Move, int], Matched] = {}
        self._received: dict[tuple[Move, int], Matched] = {}
        self._held: dict[Layout, Held] = {}

    def pieces(self, layout: Layout, rank: int) -> Pieces:
        """Return the pieces that a slot of a layout holds on a rank."""
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
        """Return the pieces that a rank sends in a movement."""
        if (move, rank) not in self._sent:
            self._match(move, rank)
        return self._sent[(move, rank)]

    def received(self, move: Move, rank: int) -> Matched:
        """Return the pieces that a rank receives in a movement."""
        if (move, rank) not in self._received:
            self._match(move, rank)
        return self._received[(move, rank)]

    def held(self, layout: Layout) -> Held:
        """Return which pieces slots of a layout hold on each rank."""
        if layout not in self._held:
            ranks = range(self.grid.world)
            flow, size = FLOWS[layout.flow], self.grid.size
            widths = (
                self.grid.world if flow.origins is None else prod(map(size, flow.origins)),
                self.num_experts if flow.is_per_expert else prod(map(size, flow.homes)),
                self._all_chunks if flow.is_cut else 1,
            )
            origins, experts, chunks = (np.zeros((self.grid.world, width), dtype=bool) for width in widths)
            for table, numbers in ((origins, self._origins), (experts, self.experts), (chunks, self._chunks)):
                for rank in ranks:
                    table[rank, numbers(layout, rank)] = True
            inside = None
            if layout.step is not None:
                origin, expert = np.ogrid[: widths[0], : widths[1]]
                inside = self._ahead(origin, expert, layout.step[1]) == layout.step[0]
            self._held[layout] = Held(origins, experts, chunks, inside)
        return self._held[layout]

    def tokens_later(self, copies: Layout, rank: int) -> np.ndarray | None:
        """Return None: tokens stand where the tokens of their origin start."""
        return None

    def _match(self, move: Move, rank: int) -> None:
        """Compute the sent and received pieces of all ranks that exchange with `rank`."""
        members = self.grid.group(rank, move.group)
        exchanged = self._exchanged(move, members)
        for table, own, peer, places in (
            (self._sent, exchanged.source, exchanged.target, exchanged.source_place),
            (self._received, exchanged.target, exchanged.source, exchanged.target_place),
        ):
            order = np.lexsort((peer, own))
            cuts = np.searchsorted(own[order], np.arange(len(members) + 1))
            for number, member in enumerate(members):
                selected = order[cuts[number] : cuts[number + 1]]
                starts = (
                    np.flatnonzero(np.diff(peer[selected], prepend=-1, append=-1))
                    if len(selected)
                    else np.zeros(1, dtype=np.int64)
                )
                peers = tuple(members[index] for index in peer[selected][starts[:-1]].tolist())
                table[(move, member)] = Matched(peers, starts, places[selected])

    def _exchanged(self, move: Move, members: tuple[int, ...]) -> _Exchanged:
        """Match the pieces of a group of ranks, with one sort of all pieces that they hold."""
        held_numbers = [self.pieces(move.source, member).number for member in members]
        wanted_numbers = [self.pieces(move.target, member).number for member in members]
        holder, target = (
            np.repeat(np.arange(len(members)), list(map(len, lists))) for lists in (held_numbers, wanted_numbers)
        )
        source_place, target_place = (
            np.concatenate([np.arange(len(piece_numbers)) for piece_numbers in lists])
            for lists in (held_numbers, wanted_numbers)
        )
        number, wanted = np.concatenate(held_numbers), np.concatenate(wanted_numbers)
        # Sorted by piece, then rank: the lowest rank that holds a piece comes first.
        keys = number * len(members) + holder
        order = np.argsort(keys, kind="stable")
        keys, number, holder, source_place = keys[order], number[order], holder[order], source_place[order]
        first, end = (np.searchsorted(number, wanted, side=side) for side in ("left", "right"))
        missing = np.unique(target[first == end]).tolist()
        assert not missing, (
            f"ranks {[members[index] for index in missing]} want pieces that no rank of their group holds"
        )
        if move.reduce:
            count = end - first
            position = runs(first, count)
            target, target_place = np.repeat(target, count), np.repeat(target_place, count)
        elif len(keys):  # the target's own piece, else the lowest rank's
            own_position = np.minimum(np.searchsorted(keys, wanted * len(members) + target), len(keys) - 1)
            position = np.where(keys[own_position] == wanted * len(members) + target, own_position, first)
        else:
            position = first
        return _Exchanged(holder[position], target, source_place[position], target_place)

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
            peers = tuple(grid.coordinate(peer, origins[0]) for peer in peers) if origins else (0,)
        elif layout.whole_tp:
            peers = tuple(member for peer in peers for member in grid.group(peer, ("tp",)))
        return np.array(sorted({*peers}))

    def _ahead(self, origin: np.ndarray, expert: np.ndarray, groups: int) -> np.ndarray:
        """Return by how many of the `groups` groups of ep ranks each expert's home follows the origin, cyclically."""
        ranks_per_group = self.grid.ep // groups
        ep_rank = np.array([self.grid.coordinate(rank, "ep") for rank in range(self.grid.world)])
        home = expert // (self.num_experts // self.grid.ep)
        return (home // ranks_per_group - ep_rank[origin] // ranks_per_group) % groups


class _Exchanged(NamedTuple):
    """The pieces that the ranks of a group exchange, (n,) each. Ranks are positions in the group."""

    source: np.ndarray
    target: np.ndarray
    source_place: np.ndarray
    """Position in the source's slot."""
    target_place: np.ndarray
    """Position in the target's slot."""


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers start, ..., start + count - 1 of all runs, one run after the other, (sum of counts,) int64."""
    if len(counts) and (counts == counts[0]).all():
        return (starts[:, None] + np.arange(counts[0])).ravel()
    return np.arange(counts.sum()) + np.repeat(starts - (counts.cumsum() - counts), counts)


def find(held: Pieces, wanted: np.ndarray) -> np.ndarray:
    """Return the position of each wanted piece among the held ones, -1 for pieces that are not held."""
    if not len(held.number):
        return np.full(len(wanted), -1)
    position = np.searchsorted(held.number, wanted, sorter=held.sorter)
    index = held.sorter[np.minimum(position, len(held.number) - 1)]
    return np.where(held.number[index] == wanted, index, -1)


def matched(splits: list[tuple[int, np.ndarray]]) -> Matched:
    """Return the pieces per peer as one `Matched`, without the peers that have none."""
    non_empty = [(peer, places) for peer, places in splits if len(places)]
    starts = np.cumsum([0, *(len(places) for _, places in non_empty)])
    places = np.concatenate([np.zeros(0, dtype=np.int64), *(places for _, places in non_empty)])
    return Matched(tuple(peer for peer, _ in non_empty), starts, places)


@dataclass(frozen=True)
class Runs:
    """Rows of a slot as runs of consecutive rows: some hundred numbers for many thousand rows."""

    starts: np.ndarray
    """(runs,) int64: the first row of each run, or its only row if `is_constant`."""
    sizes: np.ndarray
    """(runs,) int64: the number of rows in each run."""
    is_constant: bool = False
    """Whether each run repeats one row."""

    @cached_property
    def total(self) -> int:
        """Number of rows in all runs."""
        return int(self.sizes.sum())

    @cached_property
    def rows(self) -> np.ndarray:
        """(total,) int64: the row numbers, run after run."""
        if self.is_constant:
            return np.repeat(self.starts, self.sizes)
        return np.arange(self.total) + np.repeat(self.offsets, self.sizes)

    @cached_property
    def offsets(self) -> np.ndarray:
        """(runs,) int64: what to add to a position in the concatenated runs to get its row. With `is_constant`, the row
        itself."""
        return self.starts if self.is_constant else self.starts - (self.sizes.cumsum() - self.sizes)

    def are_all_of(self, num_rows: int) -> bool:
        """Return whether these are the rows 0, 1, ... num_rows - 1."""
        return self.total == num_rows and not self.offsets[self.sizes > 0].any()


@dataclass(frozen=True)
class MovedRows:
    """The number of rows that each rank sends to each other rank in a movement. Rows that stay on a rank are not counted."""

    world: int
    source: np.ndarray
    """(n,) int64, ascending; the targets of one source ascend too."""
    target: np.ndarray
    rows: np.ndarray
    """(n,) int64, above 0."""

    def between(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the number of rows sent from `source[i]` to `target[i]` for each pair of ranks, (pairs,) int64."""
        if not len(self.rows):
            return np.zeros(len(source), dtype=np.int64)
        pairs, wanted_pairs = self.source * self.world + self.target, source * self.world + target
        position = np.minimum(np.searchsorted(pairs, wanted_pairs), len(pairs) - 1)
        return np.where(pairs[position] == wanted_pairs, self.rows[position], 0)

    def on_legs(self, legs: np.ndarray) -> MovedRows:
        """Return the rows that each rank sends in one hop.

        Args:
            legs: (4, packets): source and target of each packet, then source and target of its leg, as `legs_by_hop`
                returns them.
        """
        return moved_rows(self.world, legs[2] * self.world + legs[3], self.between(legs[0], legs[1]))


def _stands_at(ascending: np.ndarray, position: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return whether `ascending` has each wanted number at the given position, (n,) bool."""
    if not len(ascending):
        return np.zeros(len(wanted), dtype=bool)
    is_there: np.ndarray = ascending[np.minimum(position, len(ascending) - 1)] == wanted
    return is_there


def _among(ascending: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return whether each wanted number occurs in `ascending`, (n,) bool."""
    return _stands_at(ascending, np.searchsorted(ascending, wanted), wanted)


def moved_rows(world: int, pairs: np.ndarray, rows: np.ndarray) -> MovedRows:
    """Return rows summed by pair of ranks. A pair is source * world + target."""
    is_sent = (rows > 0) & (pairs % (world + 1) != 0)
    pairs, rows = pairs[is_sent], rows[is_sent]
    if world * world <= 8 * len(pairs):  # a table of all pairs is smaller than sorting these
        table = np.bincount(pairs, weights=rows, minlength=world * world)
        distinct = np.flatnonzero(table)
        summed = table[distinct]
    else:
        distinct, number = np.unique(pairs, return_inverse=True)
        summed = np.bincount(number, weights=rows, minlength=len(distinct))
    return MovedRows(world, distinct // world, distinct % world, summed.astype(np.int64))


@dataclass(frozen=True)
class Splits:
    """The rows that a rank sends to, or receives from, its peers, peer after peer."""

    peers: tuple[int, ...]
    """Ascending; they may include the rank itself, and peers without rows."""
    counts: tuple[int, ...]
    """Number of rows per peer."""
    runs: Runs
    """Rows of the rank's slot, in the order in which they are sent or received."""
    is_whole: bool
    """Whether these are all rows of the slot, in the slot's order."""


class CallSizes:
    """The rows of every slot and movement in one call of a layer.

    Args:
        copies: (world, num_experts) int64: copies that each origin sends to each expert.
        tokens: (world,) int64: tokens that belong to each origin.
        num_chunks: number of parts into which each run of copies is cut.
        node_tokens: (world, sum of `Grid.cast_levels`, num_chunks) int64: distinct tokens that each origin sends to
            each node, then to each ep rank; only for multicast programs.
        units: rows into which one shard of an expert is packed when weights are moved.
        replicated: (world, num_experts, ep) int64: of each run, the copies that each ep rank computes for the expert's
            home; only for programs that replicate. The first copies of a run stay with the home. None: all of them do.
        shapes: the pieces for the same grid, experts and chunks, shared between calls. None: computed here.
        parts: (world, num_experts, num_chunks) int64: copies in each part of each run. None: equal parts.

    Raises:
        InputError: if the experts cannot be split over ep, or the counts do not fit the mesh.
    """

    def __init__(
        self,
        grid: Grid,
        copies: np.ndarray,
        tokens: np.ndarray,
        num_chunks: int = 1,
        *,
        node_tokens: np.ndarray | None = None,
        units: int = 0,
        replicated: np.ndarray | None = None,
        shapes: AbstractLayoutIndex | None = None,
        parts: np.ndarray | None = None,
    ) -> None:
        if copies.ndim != 2 or copies.shape[0] != grid.world or tokens.shape != (grid.world,):
            raise InputError(
                f"counts of shape {copies.shape} and {tokens.shape} do not fit {grid.world} ranks: "
                f"give ({grid.world}, num_experts) and ({grid.world},)"
            )
        self.grid, self.num_chunks = grid, num_chunks
        self.shapes: AbstractLayoutIndex = shapes or LayoutIndex(
            grid, int(copies.shape[1]), num_chunks, replicates=replicated is not None
        )
        self.num_experts = self.shapes.num_experts
        if replicated is None and self.shapes.replicates:
            replicated = np.zeros((*copies.shape, grid.ep), dtype=np.int64)
        staying = copies if replicated is None else copies - replicated.sum(2)
        assert (staying >= 0).all(), "more copies are replicated than there are"
        cuts = staying[:, :, None]
        if parts is not None:
            cuts = parts
        elif num_chunks > 1:
            cuts = np.diff(cuts * np.arange(num_chunks + 1) // num_chunks, axis=2)
        self._replicated = replicated
        self._rows: dict[Flow, np.ndarray] = {
            "copies": cuts if replicated is None else np.concatenate([cuts, replicated], axis=2),
            "tokens": tokens.reshape(-1, 1, 1),
            "weights": np.full((grid.etp, self.num_experts, 1), units),
            "bias": np.ones((1, self.num_experts, 1), dtype=np.int64),
        }
        if node_tokens is not None:
            nodes = sum(grid.cast_levels) - grid.ep
            self._rows["node_tokens"], self._rows["rank_tokens"] = node_tokens[:, :nodes], node_tokens[:, nodes:]
        self._offsets: dict[tuple[Layout, int], np.ndarray] = {}
        self._bases: dict[tuple[Layout, Layout, int], Runs] = {}
        self._parts: dict[tuple[Layout, Layout, int], Runs] = {}
        self._ends: dict[tuple[Layout, int], np.ndarray] = {}
        self._helped: dict[int, np.ndarray] = {}
        self._needed_on_node: dict[int, np.ndarray] = {}
        self._outgoing: dict[tuple[Move, int], Splits] = {}
        self._incoming: dict[tuple[Move, int], Splits] = {}
        self._moved: dict[Move, MovedRows] = {}
        self._pieces_of_flow: dict[tuple[Flow, bool], tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
        self._holders: dict[tuple[Layout, bool], tuple[np.ndarray, np.ndarray]] = {}

    def helped(self, rank: int) -> np.ndarray:
        """Return the experts of which a rank computes replicated copies, (num_experts,) bool."""
        if rank not in self._helped:
            mates = self.grid.group(rank, ("ep", "etp"))
            origins = sorted({origin for mate in mates for origin in self.grid.group(mate, ("tp",))})
            assert self._replicated is not None, "these sizes replicate nothing"
            replicated = self._replicated[origins, :, self.grid.coordinate(rank, "ep")]
            self._helped[rank] = replicated.sum(0) > 0
        return self._helped[rank]

    def held(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the experts of which a slot of this layout has rows or weights on a rank, ascending."""
        if layout.chunk == "here":
            return np.flatnonzero(self.helped(rank))
        experts = self.shapes.experts(layout, rank)
        return experts[self._needs_weights(layout, rank)[experts]] if layout.chunk == "near" else experts

    def _needs_weights(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the experts whose weights replicated copies need on the rank ("here") or its node ("near"),
        (num_experts,) bool."""
        if layout.chunk == "here":
            return self.helped(rank)
        if rank not in self._needed_on_node:
            shard = self.grid.coordinate(rank, "etp")
            mates = [mate for mate in self.grid.group(rank, ("local",)) if self.grid.coordinate(mate, "etp") == shard]
            self._needed_on_node[rank] = np.any([self.helped(mate) for mate in mates], axis=0)
        return self._needed_on_node[rank]

    def num_held(self, layout: Layout, rank: int) -> int:
        """Return the number of experts of which a slot of this layout has rows or weights on a rank."""
        return len(self.held(layout, rank))

    def num_rows(self, layout: Layout, rank: int) -> int:
        """Return the number of rows that a slot of this layout has on a rank."""
        return int(self.offsets(layout, rank)[-1])

    def rows_of_ranks(self, layout: Layout) -> np.ndarray:
        """Return the number of rows that a slot of this layout has on each rank, (world,) int64."""
        held = self.shapes.held(layout)
        if held.homes is None and layout.chunk not in ("near", "here"):
            return held.sums(self._rows[layout.flow]).astype(np.int64)
        rank, piece = self._held_by(layout)
        return np.bincount(rank, self._pieces(layout)[3][piece], self.grid.world).astype(np.int64)

    def offsets(self, layout: Layout, rank: int) -> np.ndarray:
        """Return where each piece of a slot starts, and where the last one ends, (pieces + 1,) int64."""
        key = (layout, rank)
        if key not in self._offsets:
            pieces = self.shapes.pieces(layout, rank)
            offsets = np.zeros(len(pieces.number) + 1, dtype=np.int64)
            rows = self._rows[layout.flow][pieces.origin, pieces.expert, pieces.chunk]
            if layout.chunk in ("near", "here") and layout.flow in ("weights", "bias"):
                rows = rows * self._needs_weights(layout, rank)[pieces.expert]
            np.cumsum(rows, out=offsets[1:])
            self._offsets[key] = offsets
        return self._offsets[key]

    def rows_per_expert(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the rows of each expert in a slot of copies, (experts of the layout,) int64."""
        rows = np.diff(self.offsets(layout, rank))
        expert = self.shapes.pieces(layout, rank).expert
        # Sums in float64, exact below 2^53, take a fifth of the time of np.add.at.
        per_expert = np.bincount(expert, weights=rows, minlength=self.num_experts).astype(np.int64)
        return per_expert[self.held(layout, rank)]

    def rows_per_expert_of_ranks(self, layout: Layout) -> np.ndarray:
        """Return the rows of each expert in slots of copies, (world, experts) int64, starting with each rank's first expert.

        Ranks that have fewer experts than others have zeros at the end.
        """
        experts = self.shapes.held(layout).experts
        first, num_experts = experts.argmax(1), experts.shape[1]
        width = int((num_experts - experts[:, ::-1].argmax(1) - first).max())
        rank, piece = self._held_by(layout, by_expert=True)
        _, expert, _, rows = self._pieces(layout, by_expert=True)
        table = np.bincount(rank * width + expert[piece] - first[rank], rows[piece], self.grid.world * width)
        return table.astype(np.int64).reshape(self.grid.world, width)

    def ends(self, layout: Layout, rank: int) -> np.ndarray:
        """Return one past the last row of each expert in a slot of copies, (experts of the layout,) int64."""
        key = (layout, rank)
        if key not in self._ends:
            self._ends[key] = self.rows_per_expert(layout, rank).cumsum()
        return self._ends[key]

    def token_bases(self, tokens: Layout, copies: Layout, rank: int) -> Runs:
        """Return where the tokens of each copy's origin start in a slot of tokens, node_tokens or rank_tokens.

        A tensor-parallel group that routes all its tokens together numbers them together, so its copies start at 0. The
        tokens sent to a node or to an ep rank are numbered per origin and chunk.
        """
        key = (tokens, copies, rank)
        if key not in self._bases:
            starts = self._find_bases(tokens, copies, rank)
            self._bases[key] = Runs(starts, np.diff(self.offsets(copies, rank)), is_constant=True)
        return self._bases[key]

    def part_rows(self, part: Layout, whole: Layout, rank: int) -> Runs:
        """Return the rows of a whole slot that a part of it holds, in the part's order."""
        key = (part, whole, rank)
        if key not in self._parts:
            where = find(self.shapes.pieces(whole, rank), self.shapes.pieces(part, rank).number)
            assert (where >= 0).all(), "a part that its whole does not hold"
            self._parts[key] = Runs(self.offsets(whole, rank)[:-1][where], np.diff(self.offsets(part, rank)))
        return self._parts[key]

    def outgoing(self, move: Move, rank: int) -> Splits:
        """Return the rows that a rank sends in a movement, including those that stay on it."""
        key = (move, rank)
        if key not in self._outgoing:
            self._outgoing[key] = self._splits(move.source, move.target, self.shapes.sent(move, rank), rank)
        return self._outgoing[key]

    def incoming(self, move: Move, rank: int) -> Splits:
        """Return the rows that a rank receives in a movement, including those that stay on it."""
        key = (move, rank)
        if key not in self._incoming:
            self._incoming[key] = self._splits(move.target, move.source, self.shapes.received(move, rank), rank)
        return self._incoming[key]

    def moved(self, move: Move) -> MovedRows:
        """Return the number of rows that each rank sends to each other rank in a movement."""
        if move not in self._moved:
            self._moved[move] = moved_rows(self.grid.world, *self._exchanged(move))
        return self._moved[move]

    def _exchanged(self, move: Move) -> tuple[np.ndarray, np.ndarray]:
        """Return one entry per piece that is sent: source * world + target, and its rows, (n,) int64 each."""
        world, rows = self.grid.world, self._pieces(move.source)[3]
        group = np.array([self.grid.group(rank, move.group)[0] for rank in range(world)])
        (holder, held), (target, wanted) = (self._held_by(layout) for layout in (move.source, move.target))
        wanted_keys = group[target] * len(rows) + wanted
        # Sorted by piece, then by holder.
        held_by_rank = np.sort((group[holder] * len(rows) + held) * world + holder)
        held_keys, holder = np.divmod(held_by_rank, world)
        if not move.reduce:  # the target's own piece, else the lowest rank's
            foreign = ~_among(held_by_rank, wanted_keys * world + target)
            target, wanted, wanted_keys = target[foreign], wanted[foreign], wanted_keys[foreign]
            lowest = np.flatnonzero(np.diff(held_keys, prepend=-1))
            held_keys, holder = held_keys[lowest], holder[lowest]
        first = np.searchsorted(held_keys, wanted_keys)
        if move.reduce:
            end = np.searchsorted(held_keys, wanted_keys, side="right")
        else:
            end = first + _stands_at(held_keys, first, wanted_keys)
        # Replicated weights that no rank needs are not sent.
        may_be_unneeded = {move.source.chunk, move.target.chunk}.intersection(("near", "here"))
        assert may_be_unneeded or (first < end).all(), "ranks want pieces that no rank of their group holds"
        count = end - first
        return holder[runs(first, count)] * world + np.repeat(target, count), np.repeat(rows[wanted], count)

    def _pieces(
        self, layout: Layout, *, by_expert: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return origin, expert, chunk and rows of all pieces of a flow that have rows, (n,) each.

        The experts of one home are held together, so they are merged under their first expert. They are kept apart with
        `by_expert`, and for weights and bias, of which ranks may hold those of single experts.
        """
        flow = layout.flow
        by_expert = by_expert or flow in ("weights", "bias")
        if (flow, by_expert) not in self._pieces_of_flow:
            experts_per_home = 1 if by_expert or not FLOWS[flow].is_per_expert else self.num_experts // self.grid.ep
            rows = self._rows[flow]
            merged = rows
            if experts_per_home > 1:
                merged = rows.reshape(len(rows), -1, experts_per_home, rows.shape[2]).sum(2)
            origin, home, chunk = np.nonzero(merged)
            self._pieces_of_flow[flow, by_expert] = origin, home * experts_per_home, chunk, merged[origin, home, chunk]
        return self._pieces_of_flow[flow, by_expert]

    def _held_by(self, layout: Layout, *, by_expert: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return which ranks hold which of `_pieces`, as pairs (rank, position in `_pieces`), (pairs,) int64 each."""
        if (layout, by_expert) not in self._holders:
            origin, expert, chunk, _ = self._pieces(layout, by_expert=by_expert)
            rank, piece = self.shapes.held(layout).by(origin, expert, chunk)
            if layout.chunk in ("near", "here") and layout.flow in ("weights", "bias"):
                tables = np.stack([self._needs_weights(layout, member) for member in range(self.grid.world)])
                is_needed = tables[rank, expert[piece]]
                rank, piece = rank[is_needed], piece[is_needed]
            self._holders[layout, by_expert] = rank, piece
        return self._holders[layout, by_expert]

    def num_moved(self, move: Move, source: int, target: int) -> int:
        """Return the number of rows that one rank sends to another in a movement."""
        incoming = self.incoming(move, target)
        return incoming.counts[incoming.peers.index(source)] if source in incoming.peers else 0

    def _splits(self, mine: Layout, theirs: Layout, matched: Matched, rank: int) -> Splits:
        """Return the rows of matched pieces. A helper gets weights only of the experts of which it computes copies."""
        offsets = self.offsets(mine, rank)
        sizes = np.diff(offsets)[matched.places]
        if theirs.chunk in ("near", "here") and theirs.flow in ("weights", "bias"):
            experts = self.shapes.pieces(mine, rank).expert[matched.places]
            cuts = zip(matched.peers, matched.starts[:-1], matched.starts[1:])
            sizes = sizes * np.concatenate(
                [self._needs_weights(theirs, peer)[experts[start:end]] for peer, start, end in cuts]
            )
        ends = [0, *sizes.cumsum()[matched.starts[1:] - 1].tolist()] if len(sizes) else [0]
        counts = tuple(end - start for start, end in pairwise(ends))
        is_whole = matched.in_order and ends[-1] == offsets[-1]
        return Splits(matched.peers, counts, Runs(offsets[matched.places], sizes), is_whole)

    def _find_bases(self, tokens: Layout, copies: Layout, rank: int) -> np.ndarray:
        """Return the base of each piece of the copies; see `token_bases`."""
        copy_pieces, later = self.shapes.pieces(copies, rank), self.shapes.tokens_later(copies, rank)
        if later is not None:
            return later
        token_pieces = self.shapes.pieces(tokens, rank)
        if copies.whole_tp or tokens.whole_tp or len(token_pieces.number) == 1:
            return np.zeros(len(copy_pieces.number), dtype=np.int64)
        if tokens.flow in ONCE:
            grid = self.grid
            ep_rank = copy_pieces.expert
            if copies.flow != "rank_tokens":
                ep_rank = ep_rank // (self.num_experts // grid.ep)
            destination = ep_rank if tokens.flow == "rank_tokens" else ep_rank // (grid.ep // grid.nodes_per_replica)
            position = find(token_pieces, self.shapes.number(copy_pieces.origin, destination, copy_pieces.chunk))
        else:
            position = np.searchsorted(token_pieces.origin, copy_pieces.origin)
        return self.offsets(tokens, rank)[:-1][position]
