"""The pieces of which every slot consists, and the pieces that a movement sends where, before any
count is known.

A piece is (origin, expert, chunk): the rows that one rank contributes for one expert, or a chunk of
them. Every layout is a list of whole pieces, so a movement is a matching of pieces between two
layouts. `sizes.py` adds the numbers of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import FLOWS, HELPERS, Layout, Slot, Task
from moesaic.program.validate import reduces


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
    """Whether the target sums the pieces of all ranks that hold them. If False, the target uses its
    own piece, or the piece of the lowest rank that holds one."""

    @property
    def is_for_helpers(self) -> bool:
        """Whether the movement brings something to ranks that help with replicated experts, which
        depends on counts."""
        return not {self.source.chunk, self.target.chunk}.isdisjoint(HELPERS)

    @cached_property
    def _hash(self) -> int:
        return hash((self.source, self.target, self.group, self.reduce))

    def __hash__(self) -> int:
        """Return the cached hash: a movement is looked up several times in every call of a
        layer."""
        return self._hash


def ends_of(task: Task, slots: Mapping[str, Slot]) -> tuple[Slot, Move]:
    """Return the source slot of a movement or of a part of one, and the whole movement."""
    ends = task.of or (task.reads[0], task.writes[0])
    source, target = (slots[name] for name in ends)
    return source, Move(
        source.layout, target=target.layout, group=task.group, reduce=reduces(source, target)
    )


def move_of(task: Task, slots: Mapping[str, Slot]) -> Move:
    """Return the movement that a task performs, wholly or in part."""
    return ends_of(task, slots)[1]


@dataclass(frozen=True)
class Pieces:
    """The pieces that a slot holds, in the order of its rows: by expert, then origin, then
    chunk."""

    number: np.ndarray
    """(n,) int64: identifies each piece, identically on all ranks."""
    origin: np.ndarray
    expert: np.ndarray
    chunk: np.ndarray
    sorter: np.ndarray
    """(n,) the argsort of `number`."""


@dataclass(frozen=True)
class Matched:
    """The pieces that a rank sends to, or receives from, its peers in a movement, peer after
    peer."""

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


class _HeldNumbers(NamedTuple):
    """The origins, experts or chunks of some pieces, and which of these each rank holds."""

    held: np.ndarray
    """(ranks, n) bool."""
    number: np.ndarray
    """(pieces,) int64: the number of each piece."""

    def num_candidates(self, piece: np.ndarray) -> int:
        """Return how many pairs `holders` returns."""
        return int(self.held.sum(0)[self.number[piece]].sum())

    def holders(self, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs (rank, piece) in which the rank holds the piece's number."""
        ranks_per_number = self.held.sum(0)
        counts = ranks_per_number[self.number[piece]]
        starts = (np.cumsum(ranks_per_number) - ranks_per_number)[self.number[piece]]
        return np.nonzero(self.held.T)[1][runs(starts, counts)], np.repeat(piece, counts)


@dataclass(frozen=True)
class Held:
    """The pieces that slots of a layout hold on each rank: each combination of its origins, experts
    and chunks, if in `inside`."""

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

    def by(
        self, origin: np.ndarray, expert: np.ndarray, chunk: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (rank, position among the given pieces) of every rank that holds one of them,
        (pairs,) int64 each.

        Args:
            origin, expert, chunk: (n,) each, of the given pieces.
        """
        piece = (
            np.arange(len(origin))
            if self.inside is None
            else np.flatnonzero(self.inside[origin, expert])
        )
        axes = {
            "origin": _HeldNumbers(self.origins, origin),
            "expert": _HeldNumbers(self.experts, expert),
            "chunk": _HeldNumbers(self.chunks, chunk),
        }
        for axis in axes.values():
            is_held = np.logical_or.reduce(axis.held, axis=0)
            if not is_held.all():
                piece = piece[is_held[axis.number[piece]]]
        if self.homes is not None:
            rank = self.homes[origin[piece], chunk[piece]]
        elif self._kinds is not None:
            rank, piece = self._by_origin_and_kind(axes.pop("origin"), axes.pop("expert"), piece)
        else:
            fewest = min(axes, key=lambda name: axes[name].num_candidates(piece))
            rank, piece = axes.pop(fewest).holders(piece)
        for axis in axes.values():
            if axis.held.all():
                continue
            holds = axis.held.ravel()[rank * axis.held.shape[1] + axis.number[piece]]
            if not holds.all():
                rank = rank[holds]
                piece = piece[holds]
        return rank, piece

    def _by_origin_and_kind(
        self, origins: _HeldNumbers, experts: _HeldNumbers, piece: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs (rank, piece) in which the rank holds the piece's origin, and the set of
        experts that the piece's expert is in."""
        assert self._kinds is not None
        kind_of_rank, kind_of_expert, num_kinds = self._kinds
        ranks = np.argsort(kind_of_rank, kind="stable")
        origin_held, order = np.nonzero(self.origins[ranks].T)
        ranks = ranks[order]
        holders = np.bincount(
            origin_held * num_kinds + kind_of_rank[ranks],
            minlength=self.origins.shape[1] * num_kinds,
        )
        pair = origins.number[piece] * num_kinds + kind_of_expert[experts.number[piece]]
        selected = runs((np.cumsum(holders) - holders)[pair], holders[pair])
        return ranks[selected], np.repeat(piece, holders[pair])

    @cached_property
    def _kinds(self) -> tuple[np.ndarray, np.ndarray, int] | None:
        """The set of experts that each rank holds, (ranks,), and the one that contains each expert,
        (experts,), as numbers; and the number of sets.

        None if an expert belongs to several sets.
        """
        kinds, kind_of_rank = self._distinct_sets[0]
        is_of_several = kinds.sum(0) > 1
        if is_of_several.any():
            return None
        return kind_of_rank, kinds.argmax(0), len(kinds)

    @cached_property
    def _distinct_sets(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The different sets of experts and of chunks that ranks hold, (sets, experts or chunks)
        bool, with the number of each rank's set, (ranks,)."""
        return [distinct_rows(self.experts), distinct_rows(self.chunks)]

    def sums(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of rows that each rank holds, (ranks,) float64 with whole numbers. Not
        defined if pieces have `homes`.

        Ranks with equal experts and chunks share one sum per origin, which is then added up over
        each rank's origins.

        Args:
            rows: (origins, experts, chunks) int64: rows of every piece; chunks at the end may be
                left out.
        """
        assert self.homes is None, "pieces that have homes are held one by one"
        table = (
            rows.astype(np.float64)
            if self.inside is None
            else (rows * self.inside[:, :, None]).astype(np.float64)
        )
        (expert_sets, expert_set), (chunk_sets, chunk_set) = self._distinct_sets
        # (origins, chunks, sets of experts), then (origins, sets of experts, sets of chunks)
        per_origin = (table.swapaxes(1, 2) @ expert_sets.T).swapaxes(1, 2) @ chunk_sets.T[
            : rows.shape[2]
        ]
        rank, origin = np.divmod(np.flatnonzero(self.origins), self.origins.shape[1])
        rows_held = per_origin[origin, expert_set[rank], chunk_set[rank]]
        return np.bincount(rank, rows_held, len(self.origins))


def distinct_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different rows of a bool table and the number of each row among them, as
    `np.unique` of axis 0 does."""
    packed = np.packbits(table, axis=1)
    _, first, number = np.unique(
        packed.view(f"S{packed.shape[1]}").ravel(), return_index=True, return_inverse=True
    )
    return table[first], number


Method = TypeVar("Method", bound=Callable[..., Any])


def memoised(method: Method) -> Method:
    """Keep a method's results in `self.results`, by its name and its arguments."""
    name = method.__name__

    @wraps(method)
    def look_up(self: Any, *arguments: Any, **options: Any) -> Any:
        key = (name, *arguments, *options.items())
        if key not in self.results:
            self.results[key] = method(self, *arguments, **options)
        return self.results[key]

    return look_up  # type: ignore[return-value]


class AbstractLayoutIndex(ABC):
    """The pieces of every slot and movement on a mesh.

    Args:
        num_chunks: number of parts into which each run of copies is cut.
        replicates: whether each run has one more chunk per ep rank, after these parts, which that
            rank computes.

    Raises:
        InputError: if the experts cannot be split over ep.
    """

    def __init__(self, grid: Grid, num_experts: int, num_chunks: int, *, replicates: bool) -> None:
        if num_experts % grid.ep:
            raise InputError(
                f"num_experts={num_experts} does not split over mesh.ep={grid.ep}: choose ep "
                "as a divisor of it"
            )
        self.grid = grid
        self.num_experts = num_experts
        self.num_chunks = num_chunks
        self.replicates = replicates
        self._all_chunks = num_chunks + grid.ep * replicates
        self._base = max(num_experts, grid.nodes_per_replica)
        self.results: dict[tuple[Any, ...], Any] = {}
        """Results of memoised methods."""

    @abstractmethod
    def pieces(self, layout: Layout, rank: int) -> Pieces:
        """Return the pieces that a slot of a layout holds on a rank."""

    @abstractmethod
    def matched(self, move: Move, rank: int) -> tuple[Matched, Matched]:
        """Return the pieces that a rank sends in a movement, and those that it receives."""

    def sent(self, move: Move, rank: int) -> Matched:
        """Return the pieces that a rank sends in a movement."""
        return self.matched(move, rank)[0]

    def received(self, move: Move, rank: int) -> Matched:
        """Return the pieces that a rank receives in a movement."""
        return self.matched(move, rank)[1]

    @abstractmethod
    def held(self, layout: Layout) -> Held:
        """Return which pieces slots of a layout hold on each rank, without listing them."""

    @abstractmethod
    def tokens_later(self, copies: Layout, rank: int) -> np.ndarray | None:
        """Return by how many rows the tokens of each piece stand later in their slot than at their
        origin, (pieces,) int64.

        None if they stand where the tokens of their origin start.
        """

    def local_experts(self, rank: int) -> range:
        """Return the experts stored on a rank."""
        num_local = self.num_experts // self.grid.ep
        first = self.grid.coordinate(rank, "ep") * num_local
        return range(first, first + num_local)

    def node_experts(self, rank: int) -> range:
        """Return the experts of which a shard is stored on a rank's node, within the rank's replica
        of the experts."""
        grid = self.grid
        mates = (
            peer
            for peer in grid.group(rank, ("ep", "etp"))
            if grid.node_of(peer) == grid.node_of(rank)
        )
        local = list(map(self.local_experts, mates))
        return range(
            min(experts.start for experts in local), max(experts.stop for experts in local)
        )

    def experts(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the second index of a layout's pieces: experts, nodes (node_tokens), ep ranks
        (rank_tokens), or 0 (tokens)."""
        if layout.flow == "node_tokens" and layout.experts == "node":
            return np.array([self.grid.coordinate(rank, "node")])
        if layout.flow == "rank_tokens" and layout.experts != "all":
            experts = self.experts(replace(layout, flow="copies"), rank)
            return np.unique(experts // (self.num_experts // self.grid.ep))
        if layout.chunk == "near":
            node = self.grid.group(rank, ("node",))
            shard = partial(self.grid.coordinate, axis="etp")
            return np.unique(
                [self.local_experts(mate) for mate in node if shard(mate) == shard(rank)]
            )
        if layout.experts == "all":
            flow = FLOWS[layout.flow]
            return np.arange(
                self.num_experts if flow.is_per_expert else prod(map(self.grid.size, flow.homes))
            )
        return np.array(
            self.local_experts(rank) if layout.experts == "rank" else self.node_experts(rank)
        )

    def number(self, origin: np.ndarray, expert: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the numbers of pieces."""
        return (origin * self._base + expert) * self._all_chunks + chunk

    @memoised
    def stays(self, move: Move, rank: int) -> bool:
        """Return whether a movement leaves all rows of a rank where they are, for any counts."""
        sent = self.sent(move, rank)
        received = self.received(move, rank)
        counts = [len(self.pieces(layout, rank).number) for layout in (move.source, move.target)]
        all_stay = sent.peers == received.peers == (rank,) and counts == [
            len(sent.places),
            len(received.places),
        ]
        return all_stay and not move.is_for_helpers and np.array_equal(sent.places, received.places)


class LayoutIndex(AbstractLayoutIndex):
    """The pieces of slots and movements that depend on layouts alone, shared between calls.

    Args:
        num_chunks: number of parts into which each run of copies is cut.
        replicates: whether each run has one more chunk per ep rank, after these parts, which that
            rank computes.
        parts: number of chunks of the program, which share the `num_chunks` parts evenly. None: one
            part per chunk.

    Raises:
        InputError: if the experts cannot be split over ep.
    """

    def __init__(
        self,
        grid: Grid,
        num_experts: int,
        num_chunks: int = 1,
        *,
        replicates: bool = False,
        parts: int | None = None,
    ) -> None:
        super().__init__(grid, num_experts, num_chunks, replicates=replicates)
        self._parts = num_chunks if parts is None else parts
        self._matched: dict[tuple[Move, int], tuple[Matched, Matched]] = {}

    @memoised
    def pieces(self, layout: Layout, rank: int) -> Pieces:
        """Return the pieces that a slot of a layout holds on a rank."""
        chunks = self._chunks(layout, rank)
        grids = np.meshgrid(
            self.experts(layout, rank), self._origins(layout, rank), chunks, indexing="ij"
        )
        expert, origin, chunk = (values.reshape(-1) for values in grids)
        if layout.step is not None:
            inside = self._ahead(origin, expert, layout.step[1]) == layout.step[0]
            expert = expert[inside]
            origin = origin[inside]
            chunk = chunk[inside]
        number = self.number(origin, expert, chunk)
        return Pieces(number, origin, expert, chunk, sorter=np.argsort(number, kind="stable"))

    @memoised
    def held(self, layout: Layout) -> Held:
        """Return which pieces slots of a layout hold on each rank."""
        flow = FLOWS[layout.flow]
        size = self.grid.size
        widths = (
            self.grid.world if flow.origins is None else prod(map(size, flow.origins)),
            self.num_experts if flow.is_per_expert else prod(map(size, flow.homes)),
            self._all_chunks if flow.is_cut else 1,
        )
        origins, experts, chunks = (
            np.zeros((self.grid.world, width), dtype=bool) for width in widths
        )
        for table, numbers in (
            (origins, self._origins),
            (experts, self.experts),
            (chunks, self._chunks),
        ):
            for rank in range(self.grid.world):
                table[rank, numbers(layout, rank)] = True
        inside = None
        if layout.step is not None:
            origin, expert = np.ogrid[: widths[0], : widths[1]]
            inside = self._ahead(origin, expert, layout.step[1]) == layout.step[0]
        return Held(origins, experts, chunks, inside)

    def tokens_later(self, copies: Layout, rank: int) -> np.ndarray | None:
        """Return None: tokens stand where the tokens of their origin start."""
        return None

    def matched(self, move: Move, rank: int) -> tuple[Matched, Matched]:
        """Return the pieces that a rank sends and receives, computed for all ranks that exchange
        with it at once."""
        if (move, rank) not in self._matched:
            members = self.grid.group(rank, move.group)
            found = self._exchanged(move, members)
            sent = _by_member(members, found.source, found.target, found.source_place)
            received = _by_member(members, found.target, found.source, found.target_place)
            self._matched |= {
                (move, member): pair for member, pair in zip(members, zip(sent, received))
            }
        return self._matched[(move, rank)]

    def _exchanged(self, move: Move, members: tuple[int, ...]) -> _Exchanged:
        """Match the pieces of a group of ranks, with one sort of all pieces that they hold."""
        held_numbers = [self.pieces(move.source, member).number for member in members]
        wanted_numbers = [self.pieces(move.target, member).number for member in members]
        holder, target = (
            np.repeat(np.arange(len(members)), list(map(len, lists)))
            for lists in (held_numbers, wanted_numbers)
        )
        source_place, target_place = (
            np.concatenate([np.arange(len(piece_numbers)) for piece_numbers in lists])
            for lists in (held_numbers, wanted_numbers)
        )
        number = np.concatenate(held_numbers)
        wanted = np.concatenate(wanted_numbers)
        # Sorted by piece, then rank: the lowest rank that holds a piece comes first.
        keys = number * len(members) + holder
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        number = number[order]
        holder = holder[order]
        source_place = source_place[order]
        first, end = (np.searchsorted(number, wanted, side=side) for side in ("left", "right"))
        missing = np.unique(target[first == end]).tolist()
        assert not missing, (
            f"ranks {[members[index] for index in missing]} want pieces that no rank of their "
            "group holds"
        )
        if move.reduce:
            count = end - first
            position = runs(first, count)
            target = np.repeat(target, count)
            target_place = np.repeat(target_place, count)
        elif len(keys):  # the target's own piece, else the lowest rank's
            own_position = np.minimum(
                np.searchsorted(keys, wanted * len(members) + target), len(keys) - 1
            )
            position = np.where(
                keys[own_position] == wanted * len(members) + target, own_position, first
            )
        else:
            position = first
        return _Exchanged(
            holder[position], target, source_place=source_place[position], target_place=target_place
        )

    def _chunks(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the numbers of the chunks of a layout's rows on a rank."""
        if not FLOWS[layout.flow].is_cut:
            return np.zeros(1, dtype=np.int64)
        if layout.chunk is None:
            return np.arange(self._all_chunks if layout.flow == "copies" else self.num_chunks)
        if layout.chunk == "replicated":
            return np.arange(self.num_chunks, self._all_chunks)
        if layout.chunk == "here":
            return np.array([self.num_chunks + self.grid.coordinate(rank, "ep")])
        assert isinstance(layout.chunk, int)
        start, end = (
            self.num_chunks * chunk // self._parts for chunk in (layout.chunk, layout.chunk + 1)
        )
        return np.arange(start, end)

    def _origins(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the places from which a layout's rows on a rank come, ascending."""
        grid = self.grid
        origins = FLOWS[layout.flow].origins
        peers = grid.group(rank, layout.spread)
        if origins is not None:
            peers = tuple(grid.coordinate(peer, origins[0]) for peer in peers) if origins else (0,)
        elif layout.whole_tp:
            peers = tuple(member for peer in peers for member in grid.group(peer, ("tp",)))
        return np.array(sorted({*peers}))

    def _ahead(self, origin: np.ndarray, expert: np.ndarray, groups: int) -> np.ndarray:
        """Return by how many of the `groups` groups of ep ranks each expert's home follows the
        origin, cyclically."""
        ranks_per_group = self.grid.ep // groups
        ep_rank = np.array([self.grid.coordinate(rank, "ep") for rank in range(self.grid.world)])
        home = expert // (self.num_experts // self.grid.ep)
        return (home // ranks_per_group - ep_rank[origin] // ranks_per_group) % groups


class _Exchanged(NamedTuple):
    """The pieces that the ranks of a group exchange, (n,) each. Ranks are positions in the
    group."""

    source: np.ndarray
    target: np.ndarray
    source_place: np.ndarray
    """Position in the source's slot."""
    target_place: np.ndarray
    """Position in the target's slot."""


def _by_member(
    members: tuple[int, ...], own: np.ndarray, peer: np.ndarray, places: np.ndarray
) -> list[Matched]:
    """Return the exchanged pieces of each member of a group, peer after peer, from the member and
    the peer of each piece."""
    order = np.lexsort((peer, own))
    cuts = np.searchsorted(own[order], np.arange(len(members) + 1))
    found = []
    for begin, end in pairwise(cuts):
        selected = order[begin:end]
        starts = (
            np.flatnonzero(np.diff(peer[selected], prepend=-1, append=-1))
            if len(selected)
            else np.zeros(1, int)
        )
        peers = tuple(members[index] for index in peer[selected][starts[:-1]].tolist())
        found.append(Matched(peers, starts, places[selected]))
    return found


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers start, ..., start + count - 1 of all runs, one run after the other, (sum
    of counts,) int64."""
    if len(counts) and (counts == counts[0]).all():
        return (starts[:, None] + np.arange(counts[0])).ravel()
    return np.arange(counts.sum()) + np.repeat(starts - (counts.cumsum() - counts), counts)


def find(held: Pieces, wanted: np.ndarray) -> np.ndarray:
    """Return the position of each wanted piece among the held ones, -1 for pieces that are not
    held."""
    if not len(held.number):
        return np.full(len(wanted), -1)
    position = np.searchsorted(held.number, wanted, sorter=held.sorter)
    index = held.sorter[np.minimum(position, len(held.number) - 1)]
    return np.where(held.number[index] == wanted, index, -1)


def joined(splits: list[tuple[int, np.ndarray]]) -> Matched:
    """Return the pieces per peer as one `Matched`, without the peers that have none."""
    non_empty = [(peer, places) for peer, places in splits if len(places)]
    starts = np.cumsum([0, *(len(places) for _, places in non_empty)])
    none = np.zeros(0, dtype=np.int64)
    places = np.concatenate([none, *(places for _, places in non_empty)])
    return Matched(tuple(peer for peer, _ in non_empty), starts, places)
