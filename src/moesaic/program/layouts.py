"""The pieces of which every slot consists, and the pieces that a movement sends where, before any
count is known.

A slot is a named value of a program, with rows on every rank; its `Layout` (`task.py`) says which.
A piece is (origin, expert, chunk): the rows that one rank, the origin, contributes for one expert,
or a chunk of them; other flows than copies put a node or an ep rank in the expert's place (`FLOWS`
in `task.py`). Every layout is a list of whole pieces, so a movement is a matching of pieces between
two layouts. A piece has a number, the same on all ranks, and on each rank that holds it a place,
its position in the slot there. `sizes.py` adds the numbers of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, wraps
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
        """The hash of all fields."""
        return hash((self.source, self.target, self.group, self.reduce))

    def __hash__(self) -> int:
        """Return the cached hash: a movement is looked up several times in every call of a
        layer."""
        return self._hash


def ends_of(task: Task, slots: Mapping[str, Slot]) -> tuple[Slot, Move]:
    """Return the source slot of a movement or of a part of one, and the whole movement."""
    source_name, target_name = task.of or (task.reads[0], task.writes[0])
    source = slots[source_name]
    target = slots[target_name]
    movement = Move(
        source.layout, target=target.layout, group=task.group, reduce=reduces(source, target)
    )
    return source, movement


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
        """Return how many pairs `holders` returns for these pieces."""
        return int(self.held.sum(0)[self.number[piece]].sum())

    def holders(self, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs (rank, piece) in which the rank holds the piece's number, (pairs,) int64
        each.

        Args:
            piece: indices of pieces, into `number`.
        """
        ranks_per_number = self.held.sum(0)
        # The ranks that hold number 0, then those that hold number 1, and so on.
        ranks_by_number = np.nonzero(self.held.T)[1]
        first_of_number = np.cumsum(ranks_per_number) - ranks_per_number

        number = self.number[piece]
        counts = ranks_per_number[number]
        selected = runs(first_of_number[number], counts)
        return ranks_by_number[selected], np.repeat(piece, counts)


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
        if self.inside is None:
            piece = np.arange(len(origin))
        else:
            piece = np.flatnonzero(self.inside[origin, expert])
        # The three indices of the pieces, with what each rank holds of each.
        axes = {
            "origin": _HeldNumbers(self.origins, origin),
            "expert": _HeldNumbers(self.experts, expert),
            "chunk": _HeldNumbers(self.chunks, chunk),
        }
        # Leave out the pieces that no rank holds.
        for axis in axes.values():
            is_held = np.logical_or.reduce(axis.held, axis=0)
            if not is_held.all():
                piece = piece[is_held[axis.number[piece]]]

        # Pair each piece with the ranks that may hold it, as far as one or two axes tell.
        if self.homes is not None:  # at most its home does
            rank = self.homes[origin[piece], chunk[piece]]
        elif self._kinds is not None:  # those that hold its origin, and its set of experts
            rank, piece = self._by_origin_and_kind(axes.pop("origin"), axes.pop("expert"), piece)
        else:  # those that hold it by one axis: by the one that leaves the fewest pairs
            fewest = min(axes, key=lambda name: axes[name].num_candidates(piece))
            rank, piece = axes.pop(fewest).holders(piece)

        # Keep the pairs whose rank holds the piece by the other axes too, those not popped above.
        for axis in axes.values():
            if axis.held.all():
                continue
            # Where the table `held` has the entry (rank, number), row after row.
            position = rank * axis.held.shape[1] + axis.number[piece]
            holds = axis.held.ravel()[position]
            if not holds.all():
                rank = rank[holds]
                piece = piece[holds]
        return rank, piece

    def _by_origin_and_kind(
        self, origins: _HeldNumbers, experts: _HeldNumbers, piece: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs (rank, piece) in which the rank holds the piece's origin, and the set of
        experts (its kind) that contains the piece's expert, (pairs,) int64 each."""
        assert self._kinds is not None
        kind_of_rank, kind_of_expert, num_kinds = self._kinds
        # List the ranks that hold each origin: by origin, then by the rank's kind.
        ranks_by_kind = np.argsort(kind_of_rank, kind="stable")
        held_origin, position = np.nonzero(self.origins[ranks_by_kind].T)
        holders = ranks_by_kind[position]

        # A section of that list belongs to one origin and one kind.
        section_of_holder = held_origin * num_kinds + kind_of_rank[holders]
        num_sections = self.origins.shape[1] * num_kinds
        section_sizes = np.bincount(section_of_holder, minlength=num_sections)
        section_starts = np.cumsum(section_sizes) - section_sizes

        section = origins.number[piece] * num_kinds + kind_of_expert[experts.number[piece]]
        counts = section_sizes[section]
        selected = runs(section_starts[section], counts)
        return holders[selected], np.repeat(piece, counts)

    @cached_property
    def _kinds(self) -> tuple[np.ndarray, np.ndarray, int] | None:
        """The number of the set of experts that each rank holds, (ranks,); the number of the set
        that contains each expert, (experts,); and how many different sets there are.

        None if an expert belongs to several sets.
        """
        sets, set_of_rank = self._expert_sets
        is_in_several = sets.sum(0) > 1
        if is_in_several.any():
            return None
        set_of_expert = sets.argmax(0)
        return set_of_rank, set_of_expert, len(sets)

    @cached_property
    def _expert_sets(self) -> tuple[np.ndarray, np.ndarray]:
        """The different sets of experts that ranks hold, (sets, experts) bool, and the number of
        each rank's set, (ranks,)."""
        return distinct_rows(self.experts)

    @cached_property
    def _chunk_sets(self) -> tuple[np.ndarray, np.ndarray]:
        """The different sets of chunks that ranks hold, (sets, chunks) bool, and the number of each
        rank's set, (ranks,)."""
        return distinct_rows(self.chunks)

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
        if self.inside is not None:
            rows = rows * self.inside[:, :, None]
        table = rows.astype(np.float64)
        expert_sets, expert_set_of_rank = self._expert_sets
        chunk_sets, chunk_set_of_rank = self._chunk_sets
        num_chunks = rows.shape[2]

        # (origins, chunks, sets of experts), then (origins, sets of experts, sets of chunks)
        per_expert_set = table.swapaxes(1, 2) @ expert_sets.T
        per_sets = per_expert_set.swapaxes(1, 2) @ chunk_sets.T[:num_chunks]

        # All pairs of a rank and an origin that it holds.
        rank, origin = np.divmod(np.flatnonzero(self.origins), self.origins.shape[1])
        rows_held = per_sets[origin, expert_set_of_rank[rank], chunk_set_of_rank[rank]]
        return np.bincount(rank, rows_held, len(self.origins))


def distinct_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different rows of a bool table, (distinct, columns), and the number of each row
    among them, (rows,), as `np.unique` of axis 0 does."""
    # Each row as one byte string, which NumPy sorts faster than rows of a table.
    packed = np.packbits(table, axis=1)
    row_strings = packed.view(f"S{packed.shape[1]}").ravel()
    _, first, number = np.unique(row_strings, return_index=True, return_inverse=True)
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
        num_helper_chunks = grid.ep if replicates else 0
        self._all_chunks = num_chunks + num_helper_chunks
        """Chunks of a run, with those of replicated copies."""
        self._base = max(num_experts, grid.nodes_per_replica)
        """A number above every second index of a piece, for `number`."""
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
        of the experts. They are consecutive if all shards of an expert are on one node, as
        multicast requires; otherwise the range may have other experts too."""
        grid = self.grid
        local = [
            self.local_experts(peer)
            for peer in grid.group(rank, ("ep", "etp"))
            if grid.node_of(peer) == grid.node_of(rank)
        ]
        first = min(experts.start for experts in local)
        end = max(experts.stop for experts in local)
        return range(first, end)

    def experts(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the second index of a layout's pieces on a rank, ascending: experts, nodes
        (node_tokens), ep ranks (rank_tokens), or 0 (tokens)."""
        grid = self.grid
        if layout.flow == "node_tokens" and layout.experts == "node":
            return np.array([grid.coordinate(rank, "node")])
        if layout.flow == "rank_tokens" and layout.experts != "all":  # the ep ranks of its experts
            experts = self.experts(replace(layout, flow="copies"), rank)
            experts_per_rank = self.num_experts // grid.ep
            return np.unique(experts // experts_per_rank)
        if layout.chunk == "near":  # weights from the ranks with the same place on other nodes
            shard = grid.coordinate(rank, "etp")
            counterparts = [
                peer
                for peer in grid.group(rank, ("node",))
                if grid.coordinate(peer, "etp") == shard
            ]
            return np.unique([self.local_experts(peer) for peer in counterparts])
        if layout.experts == "all":
            return np.arange(self._num_experts_of(layout))
        if layout.experts == "rank":
            return np.array(self.local_experts(rank))
        return np.array(self.node_experts(rank))  # "node"

    def _num_experts_of(self, layout: Layout) -> int:
        """Return the number of experts, or of the nodes or ep ranks that stand for experts, of a
        layout's flow; 1 for tokens, which have neither."""
        flow = FLOWS[layout.flow]
        return self.num_experts if flow.is_per_expert else prod(map(self.grid.size, flow.homes))

    def number(self, origin: np.ndarray, expert: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Return the numbers of pieces, which identify them on all ranks: digits of a mixed
        base."""
        return (origin * self._base + expert) * self._all_chunks + chunk

    @memoised
    def stays(self, move: Move, rank: int) -> bool:
        """Return whether a movement leaves all rows of a rank where they are, for any counts."""
        sent = self.sent(move, rank)
        received = self.received(move, rank)
        if move.is_for_helpers or not sent.peers == received.peers == (rank,):
            return False
        sends_all = len(sent.places) == len(self.pieces(move.source, rank).number)
        receives_all = len(received.places) == len(self.pieces(move.target, rank).number)
        return sends_all and receives_all and np.array_equal(sent.places, received.places)


class LayoutIndex(AbstractLayoutIndex):
    """The pieces of slots and movements that depend on layouts alone, shared between calls.

    Args:
        num_chunks: number of parts into which each run of copies is cut: the chunks of pieces.
        replicates: whether each run has one more chunk per ep rank, after these parts, which that
            rank computes.
        parts: number of chunks of the program, each of which is several of these parts, equally
            many. None: one part each.

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
        self._program_chunks = num_chunks if parts is None else parts
        """The number of chunks of the program."""
        self._matched: dict[tuple[Move, int], tuple[Matched, Matched]] = {}
        """By movement and rank: the pieces that it sends, and those that it receives."""

    @memoised
    def pieces(self, layout: Layout, rank: int) -> Pieces:
        """Return the pieces that a slot of a layout holds on a rank."""
        # Every combination, with the chunk changing fastest and the expert slowest.
        combinations = np.meshgrid(
            self.experts(layout, rank),
            self._origins(layout, rank),
            self._chunks(layout, rank),
            indexing="ij",
        )
        expert, origin, chunk = (values.reshape(-1) for values in combinations)
        if layout.step is not None:  # keep the runs whose expert lives that many groups ahead
            step, num_groups = layout.step
            inside = self._ahead(origin, expert, num_groups) == step
            expert = expert[inside]
            origin = origin[inside]
            chunk = chunk[inside]
        number = self.number(origin, expert, chunk)
        return Pieces(number, origin, expert, chunk, sorter=np.argsort(number, kind="stable"))

    @memoised
    def held(self, layout: Layout) -> Held:
        """Return which pieces slots of a layout hold on each rank."""
        flow = FLOWS[layout.flow]
        grid = self.grid
        num_origins = grid.world if flow.origins is None else prod(map(grid.size, flow.origins))
        num_experts = self._num_experts_of(layout)
        num_chunks = self._all_chunks if flow.is_cut else 1

        origins = np.zeros((grid.world, num_origins), dtype=bool)
        experts = np.zeros((grid.world, num_experts), dtype=bool)
        chunks = np.zeros((grid.world, num_chunks), dtype=bool)
        for rank in range(grid.world):
            origins[rank, self._origins(layout, rank)] = True
            experts[rank, self.experts(layout, rank)] = True
            chunks[rank, self._chunks(layout, rank)] = True

        inside = None
        if layout.step is not None:  # the runs whose expert lives that many groups ahead
            step, num_groups = layout.step
            origin, expert = np.ogrid[:num_origins, :num_experts]
            inside = self._ahead(origin, expert, num_groups) == step
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
            for index, member in enumerate(members):
                self._matched[(move, member)] = (sent[index], received[index])
        return self._matched[(move, rank)]

    def _exchanged(self, move: Move, members: tuple[int, ...]) -> _Exchanged:
        """Return which rank of a group gets each piece that it wants from which one that holds it,
        found with one sort of all pieces that the ranks hold."""
        wanted = self._pieces_of_members(move.target, members)
        held = self._pieces_of_members(move.source, members).sorted(len(members))
        # The holders of each wanted piece, the lowest first, are the entries of `held` from `first`
        # to before `end`.
        first = np.searchsorted(held.number, wanted.number, side="left")
        end = np.searchsorted(held.number, wanted.number, side="right")
        missing = np.unique(wanted.member[first == end]).tolist()
        assert not missing, (
            f"ranks {[members[index] for index in missing]} want pieces that no rank of their "
            "group holds"
        )

        target = wanted.member
        target_place = wanted.place
        if move.reduce:  # every holder sends its piece, and the target sums them
            num_holders = end - first
            sent = runs(first, num_holders)
            target = np.repeat(target, num_holders)
            target_place = np.repeat(target_place, num_holders)
        else:
            sent = _own_or_lowest(held, wanted, first, len(members))
        return _Exchanged(
            held.member[sent], target, source_place=held.place[sent], target_place=target_place
        )

    def _pieces_of_members(self, layout: Layout, members: tuple[int, ...]) -> _GroupPieces:
        """Return the pieces that the ranks of a group hold in slots of a layout, rank after
        rank."""
        numbers = [self.pieces(layout, member).number for member in members]
        counts = [len(piece_numbers) for piece_numbers in numbers]
        return _GroupPieces(
            number=np.concatenate(numbers),
            member=np.repeat(np.arange(len(members)), counts),
            place=np.concatenate([np.arange(count) for count in counts]),
        )

    def _chunks(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the numbers of the chunks of a layout's rows on a rank."""
        if not FLOWS[layout.flow].is_cut:
            return np.zeros(1, dtype=np.int64)
        if layout.chunk is None:  # only copies are replicated
            return np.arange(self._all_chunks if layout.flow == "copies" else self.num_chunks)
        if layout.chunk == "replicated":  # one chunk for each ep rank that may compute them
            return np.arange(self.num_chunks, self._all_chunks)
        if layout.chunk == "here":  # that of this rank's place on ep
            return np.array([self.num_chunks + self.grid.coordinate(rank, "ep")])
        # A chunk of the program covers an even share of the parts into which runs are cut.
        assert isinstance(layout.chunk, int)
        start = self.num_chunks * layout.chunk // self._program_chunks
        end = self.num_chunks * (layout.chunk + 1) // self._program_chunks
        return np.arange(start, end)

    def _origins(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the origins of a layout's rows on a rank, ascending: ranks, or coordinates on the
        axis that the flow names, or 0."""
        grid = self.grid
        peers = grid.group(rank, layout.spread)
        axes = FLOWS[layout.flow].origins
        if axes == ():  # the flow has a single origin
            return np.array([0])
        if axes is not None:  # origins are coordinates on an axis
            return np.array(sorted({grid.coordinate(peer, axes[0]) for peer in peers}))
        if not layout.whole_tp:  # origins are ranks
            return np.array(sorted(peers))
        tp_groups = [grid.group(peer, ("tp",)) for peer in peers]
        return np.array(sorted(set().union(*tp_groups)))

    def _ahead(self, origin: np.ndarray, expert: np.ndarray, groups: int) -> np.ndarray:
        """Return by how many of the `groups` groups of ep ranks each expert's home follows the
        origin, cyclically."""
        ranks_per_group = self.grid.ep // groups
        ep_rank = np.array([self.grid.coordinate(rank, "ep") for rank in range(self.grid.world)])
        home = expert // (self.num_experts // self.grid.ep)
        return (home // ranks_per_group - ep_rank[origin] // ranks_per_group) % groups


class _GroupPieces(NamedTuple):
    """The pieces that the ranks of a group hold, (n,) int64 each."""

    number: np.ndarray
    member: np.ndarray
    """Position in the group of the rank that holds the piece."""
    place: np.ndarray
    """Position in that rank's slot."""

    def keys(self, num_members: int) -> np.ndarray:
        """Return one number for each piece on each rank, ascending by piece, then by rank."""
        return self.number * num_members + self.member

    def sorted(self, num_members: int) -> _GroupPieces:
        """Return the same entries, by piece, then by rank."""
        order = np.argsort(self.keys(num_members), kind="stable")
        return _GroupPieces(self.number[order], self.member[order], self.place[order])


def _own_or_lowest(
    held: _GroupPieces, wanted: _GroupPieces, lowest: np.ndarray, num_members: int
) -> np.ndarray:
    """Return which entry of `held` serves each wanted piece, (n,): the target's own piece if it
    holds it, else that of the lowest rank that does.

    Args:
        held: sorted.
        lowest: (n,) the entries of the lowest ranks.
    """
    if not len(held.number):  # then nothing is wanted either
        return lowest
    held_keys = held.keys(num_members)
    own_keys = wanted.keys(num_members)
    # where the own piece stands, if it is there
    own = np.minimum(np.searchsorted(held_keys, own_keys), len(held_keys) - 1)
    return np.where(held_keys[own] == own_keys, own, lowest)


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
    """Return the exchanged pieces of each member of a group, peer after peer.

    Args:
        members: the ranks of the group.
        own: (n,) positions in the group: the member whose piece each entry is.
        peer: (n,) positions in the group: the rank that it exchanges the piece with.
        places: (n,) positions of the pieces in the member's slot.
    """
    order = np.lexsort((peer, own))  # by member, then by peer
    # Where each member's entries start in this order, and the end of the last one's.
    member_starts = np.searchsorted(own[order], np.arange(len(members) + 1))
    matched = []
    for begin, end in pairwise(member_starts):
        selected = order[begin:end]
        peers = peer[selected]
        starts = np.zeros(1, int)
        if len(selected):  # where the peer changes, the beginning and the end included
            starts = np.flatnonzero(np.diff(peers, prepend=-1, append=-1))
        distinct_peers = tuple(members[index] for index in peers[starts[:-1]].tolist())
        matched.append(Matched(distinct_peers, starts, places[selected]))
    return matched


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers start, ..., start + count - 1 of all runs, one run after the other, (sum
    of counts,) int64."""
    if len(counts) and (counts == counts[0]).all():
        return (starts[:, None] + np.arange(counts[0])).ravel()
    # Count through all entries, then shift each run from its place in the result to its start.
    position = counts.cumsum() - counts
    return np.arange(counts.sum()) + np.repeat(starts - position, counts)


def find(held: Pieces, wanted: np.ndarray) -> np.ndarray:
    """Return the position of each wanted piece among the held ones, -1 for pieces that are not
    held."""
    if not len(held.number):
        return np.full(len(wanted), -1)
    position = np.searchsorted(held.number, wanted, sorter=held.sorter)
    # the position of a number above all others is one past the end
    index = held.sorter[np.minimum(position, len(held.number) - 1)]
    return np.where(held.number[index] == wanted, index, -1)


def joined(splits: list[tuple[int, np.ndarray]]) -> Matched:
    """Return the places of pieces per peer as one `Matched`, without the peers that have none."""
    peers = []
    lengths = []
    places = [np.zeros(0, dtype=np.int64)]  # concatenate refuses an empty list
    for peer, places_of_peer in splits:
        if len(places_of_peer):
            peers.append(peer)
            lengths.append(len(places_of_peer))
            places.append(places_of_peer)
    return Matched(tuple(peers), np.cumsum([0, *lengths]), np.concatenate(places))
