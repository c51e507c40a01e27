"""Computes which rows a slot holds on a rank, and which rows a movement sends where. All sizes come
from this module.

`layouts.py` knows the pieces (origin, expert, chunk) of every slot and movement. `CallSizes` adds
the number of rows of each piece, from the number of copies that each origin sends to each expert.
Every rank has all counts, so it derives the sizes of all other ranks without further communication.
Executor, loopback and simulator share this code.

The home of an expert is the ep rank that stores it. A helper is another ep rank that computes some
of the expert's copies, which are then called replicated; they are the chunks after the numbered
ones of their run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.layouts import (
    AbstractLayoutIndex,
    LayoutIndex,
    Matched,
    Move,
    Pieces,
    find,
    memoised,
    runs,
)
from moesaic.program.replications import NOTHING, Replications
from moesaic.program.task import FLOWS, HELPERS, ONCE, Flow, Layout


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
        """(runs,) int64: what to add to a position in the concatenated runs to get its row. With
        `is_constant`, the row itself."""
        if self.is_constant:
            return self.starts
        positions = self.sizes.cumsum() - self.sizes
        return self.starts - positions

    def are_all_of(self, num_rows: int) -> bool:
        """Return whether these are the rows 0, 1, ... num_rows - 1; not for `is_constant`."""
        # with an offset of 0, the rows of a run stand at their own positions
        return self.total == num_rows and not self.offsets[self.sizes > 0].any()


@dataclass(frozen=True)
class MovedRows:
    """The number of rows that each rank sends to each other rank in a movement. Rows that stay on a
    rank are not counted."""

    world: int
    source: np.ndarray
    """(n,) int64, ascending; the targets of one source ascend too."""
    target: np.ndarray
    rows: np.ndarray
    """(n,) int64, above 0."""

    def between(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the number of rows sent from `source[i]` to `target[i]` for each pair of ranks,
        (pairs,) int64."""
        if not len(self.rows):
            return np.zeros(len(source), dtype=np.int64)
        pairs = self.source * self.world + self.target
        wanted_pairs = source * self.world + target
        # Where each wanted pair stands, or would; if another one stands there, nothing is sent.
        position = np.minimum(np.searchsorted(pairs, wanted_pairs), len(pairs) - 1)
        return np.where(pairs[position] == wanted_pairs, self.rows[position], 0)

    def on_legs(self, legs: np.ndarray) -> MovedRows:
        """Return the rows that each rank sends in one hop.

        Args:
            legs: (4, packets): source and target of each packet, then source and target of its leg,
                as `legs_by_hop` returns them.
        """
        source, target, leg_source, leg_target = legs
        rows = self.between(source, target)
        return moved_rows(self.world, leg_source * self.world + leg_target, rows)


def _stands_at(ascending: np.ndarray, position: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return whether `ascending` has each wanted number at the given position, (n,) bool."""
    # A position may be one past the end, as `np.searchsorted` returns them.
    if not len(ascending):
        return np.zeros(len(wanted), dtype=bool)
    is_there: np.ndarray = ascending[np.minimum(position, len(ascending) - 1)] == wanted
    return is_there


def _is_missing(ascending: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return whether `ascending` lacks each wanted number, (n,) bool."""
    return ~_stands_at(ascending, np.searchsorted(ascending, wanted), wanted)


def moved_rows(world: int, pairs: np.ndarray, rows: np.ndarray) -> MovedRows:
    """Return rows summed by pair of ranks, without those that stay on a rank.

    Args:
        world: number of ranks.
        pairs: (n,) int64: source * world + target; a pair may occur several times.
        rows: (n,) the rows that each entry sends.
    """
    is_to_itself = pairs % (world + 1) == 0  # source * world + source
    is_sent = (rows > 0) & ~is_to_itself
    pairs = pairs[is_sent]
    rows = rows[is_sent]
    # A table with a cell for every possible pair, if that is at most 8 cells for each given one, is
    # cheaper than sorting.
    if world * world <= 8 * len(pairs):
        table = np.bincount(pairs, weights=rows, minlength=world * world)
        distinct = np.flatnonzero(table)
        summed = table[distinct]
    else:
        distinct, number = np.unique(pairs, return_inverse=True)
        summed = np.bincount(number, weights=rows, minlength=len(distinct))
    return MovedRows(
        world, source=distinct // world, target=distinct % world, rows=summed.astype(np.int64)
    )


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


class _FlowPieces(NamedTuple):
    """Pieces of a flow with their rows, (n,) int64 each."""

    origin: np.ndarray
    expert: np.ndarray
    chunk: np.ndarray
    rows: np.ndarray


class CallSizes:
    """The rows of every slot and movement in one call of a layer.

    Args:
        copies: (world, num_experts) int64: copies that each origin sends to each expert.
        tokens: (world,) int64: tokens that belong to each origin.
        num_chunks: number of parts into which each run of copies is cut.
        node_tokens: (world, sum of `Grid.cast_levels`, num_chunks) int64: distinct tokens that each
            origin sends to each node, then to each ep rank; only for multicast programs.
        units: rows into which one shard of an expert is packed when weights are moved.
        replicated: of each run, the copies that each ep rank computes for the expert's home; only
            for programs that replicate. The first copies of a run stay with the home. None: all of
            them do.
        shapes: the pieces for the same grid, experts and chunks, shared between calls. None:
            computed here.
        parts: (world, num_experts, num_chunks) int64: copies in each part of each run. None: equal
            parts.

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
        replicated: Replications | None = None,
        shapes: AbstractLayoutIndex | None = None,
        parts: np.ndarray | None = None,
    ) -> None:
        if copies.ndim != 2 or copies.shape[0] != grid.world or tokens.shape != (grid.world,):
            raise InputError(
                f"counts of shape {copies.shape} and {tokens.shape} do not fit {grid.world} ranks: "
                f"give ({grid.world}, num_experts) and ({grid.world},)"
            )
        self.grid = grid
        self.num_chunks = num_chunks
        self.shapes: AbstractLayoutIndex = shapes or LayoutIndex(
            grid, int(copies.shape[1]), num_chunks, replicates=replicated is not None
        )
        self.num_experts = self.shapes.num_experts
        self._replicated = replicated or NOTHING
        staying = copies if replicated is None else replicated.staying(copies)
        assert (staying >= 0).all(), "more copies are replicated than there are"
        rows_of_chunks = staying[:, :, None]
        if parts is not None:
            rows_of_chunks = parts
        elif num_chunks > 1:  # as equal as whole rows can be
            chunk_bounds = rows_of_chunks * np.arange(num_chunks + 1) // num_chunks
            rows_of_chunks = np.diff(chunk_bounds, axis=2)

        self._rows: dict[Flow, np.ndarray] = {
            "copies": rows_of_chunks,
            "tokens": tokens.reshape(-1, 1, 1),
            "weights": np.full((grid.etp, self.num_experts, 1), units),
            "bias": np.ones((1, self.num_experts, 1), dtype=np.int64),
        }
        """Rows of every piece that is not replicated, (origins, experts, chunks) int64, by flow."""
        if node_tokens is not None:  # of the nodes, if they are a level of their own, then ep ranks
            num_nodes = sum(grid.cast_levels) - grid.ep
            self._rows["node_tokens"] = node_tokens[:, :num_nodes]
            self._rows["rank_tokens"] = node_tokens[:, num_nodes:]
        self.results: dict[tuple[Any, ...], Any] = {}
        """Results of memoised methods."""

    @memoised
    def helped(self, rank: int) -> np.ndarray:
        """Return the experts of which a rank computes replicated copies, (num_experts,) bool."""
        # Only origins that share the rank's replica of the experts send copies to it.
        replica = self.grid.group(rank, ("ep", "etp"))
        origins = sorted(set().union(*(self.grid.group(peer, ("tp",)) for peer in replica)))
        is_computed_here = self._replicated.helper == self.grid.coordinate(rank, "ep")
        is_of_replica = np.isin(self._replicated.origin, origins)

        helped = np.zeros(self.num_experts, dtype=bool)
        helped[self._replicated.expert[is_computed_here & is_of_replica]] = True
        return helped

    def held(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the experts of which a slot of this layout has rows or weights on a rank,
        ascending."""
        if layout.chunk == "here":
            return np.flatnonzero(self.helped(rank))
        experts = self.shapes.experts(layout, rank)
        if layout.chunk == "near":
            return experts[self._needs_weights(layout, rank)[experts]]
        return experts

    def _needs_weights(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the experts whose weights replicated copies need on the rank ("here") or its node
        ("near"), (num_experts,) bool."""
        return self.helped(rank) if layout.chunk == "here" else self._helped_on_node(rank)

    @memoised
    def _helped_on_node(self, rank: int) -> np.ndarray:
        """Return the experts that are replicated to this rank, or to a rank on its node that holds
        the same shards."""
        shard = self.grid.coordinate(rank, "etp")
        mates = [
            mate
            for mate in self.grid.group(rank, ("local",))
            if self.grid.coordinate(mate, "etp") == shard
        ]
        on_node: np.ndarray = np.any([self.helped(mate) for mate in mates], axis=0)
        return on_node

    def num_held(self, layout: Layout, rank: int) -> int:
        """Return the number of experts of which a slot of this layout has rows or weights on a
        rank."""
        return len(self.held(layout, rank))

    def num_rows(self, layout: Layout, rank: int) -> int:
        """Return the number of rows that a slot of this layout has on a rank."""
        return int(self.offsets(layout, rank)[-1])

    def rows_of_ranks(self, layout: Layout) -> np.ndarray:
        """Return the number of rows that a slot of this layout has on each rank, (world,) int64."""
        held = self.shapes.held(layout)
        depends_on_counts = layout.chunk in HELPERS or self._may_be_replicated(layout)
        # Combinations of origins, experts and chunks are summed without a list of the pieces.
        if held.homes is None and not depends_on_counts:
            return held.sums(self._rows[layout.flow]).astype(np.int64)
        rank, piece = self._held_by(layout)
        rows = self._pieces(layout.flow).rows[piece]
        return np.bincount(rank, rows, self.grid.world).astype(np.int64)

    @memoised
    def offsets(self, layout: Layout, rank: int) -> np.ndarray:
        """Return where each piece of a slot starts, and where the last one ends, (pieces + 1,)
        int64."""
        pieces = self.shapes.pieces(layout, rank)
        offsets = np.zeros(len(pieces.number) + 1, dtype=np.int64)
        rows = self._rows_of(layout, pieces)
        if layout.is_on_demand:  # no rows of experts that need not be there
            rows = rows * self._needs_weights(layout, rank)[pieces.expert]
        np.cumsum(rows, out=offsets[1:])
        return offsets

    def rows_per_expert(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the rows of each expert in a slot of copies, (experts of the layout,) int64."""
        rows = np.diff(self.offsets(layout, rank))
        expert = self.shapes.pieces(layout, rank).expert
        # Sums in float64, exact below 2^53, take a fifth of the time of np.add.at.
        per_expert = np.bincount(expert, weights=rows, minlength=self.num_experts).astype(np.int64)
        return per_expert[self.held(layout, rank)]

    def rows_per_expert_of_ranks(self, layout: Layout) -> np.ndarray:
        """Return the rows of each expert in slots of copies, (world, experts) int64, starting with
        each rank's first expert.

        Ranks that have fewer experts than others have zeros at the end.
        """
        is_held = self.shapes.held(layout).experts
        # Of each rank, its first expert, and the one after its last.
        first = is_held.argmax(1)
        end = is_held.shape[1] - is_held[:, ::-1].argmax(1)
        width = int((end - first).max())

        # One cell per rank and expert, numbered row by row.
        rank, piece = self._held_by(layout, by_expert=True)
        pieces = self._pieces(layout.flow, by_expert=True)
        cell = rank * width + pieces.expert[piece] - first[rank]
        table = np.bincount(cell, pieces.rows[piece], self.grid.world * width)
        return table.astype(np.int64).reshape(self.grid.world, width)

    @memoised
    def ends(self, layout: Layout, rank: int) -> np.ndarray:
        """Return one past the last row of each expert in a slot of copies, (experts of the layout,)
        int64."""
        return self.rows_per_expert(layout, rank).cumsum()

    @memoised
    def token_bases(self, tokens: Layout, copies: Layout, rank: int) -> Runs:
        """Return where the tokens of each copy's origin start in a slot of tokens, node_tokens or
        rank_tokens.

        A tensor-parallel group that routes all its tokens together numbers them together, so its
        copies start at 0. The tokens sent to a node or to an ep rank are numbered per origin and
        chunk.
        """
        return Runs(
            self._find_bases(tokens, copies, rank),
            np.diff(self.offsets(copies, rank)),
            is_constant=True,
        )

    @memoised
    def part_rows(self, part: Layout, whole: Layout, rank: int) -> Runs:
        """Return the rows of a whole slot that a part of it holds, in the part's order."""
        part_pieces = self.shapes.pieces(part, rank)
        place_in_whole = find(self.shapes.pieces(whole, rank), part_pieces.number)
        assert (place_in_whole >= 0).all(), "a part that its whole does not hold"
        starts = self.offsets(whole, rank)[:-1]
        return Runs(starts[place_in_whole], np.diff(self.offsets(part, rank)))

    @memoised
    def outgoing(self, move: Move, rank: int) -> Splits:
        """Return the rows that a rank sends in a movement, including those that stay on it."""
        return self._splits(move.source, move.target, self.shapes.sent(move, rank), rank)

    @memoised
    def incoming(self, move: Move, rank: int) -> Splits:
        """Return the rows that a rank receives in a movement, including those that stay on it."""
        return self._splits(move.target, move.source, self.shapes.received(move, rank), rank)

    @memoised
    def moved(self, move: Move) -> MovedRows:
        """Return the number of rows that each rank sends to each other rank in a movement."""
        return moved_rows(self.grid.world, *self._exchanged(move))

    def _exchanged(self, move: Move) -> tuple[np.ndarray, np.ndarray]:
        """Return one entry per piece that is sent: source * world + target, and its rows, (n,)
        int64 each."""
        world = self.grid.world
        rows = self._pieces(move.source.flow).rows
        # A piece is exchanged within a group of ranks, which its lowest rank stands for. A key is
        # one number for a piece in a group, and an address one for a piece on a rank: the key, with
        # the rank as a further digit.
        group = np.array([self.grid.group(rank, move.group)[0] for rank in range(world)])
        holder, held = self._held_by(move.source)
        target, wanted = self._held_by(move.target)
        held_addresses = (group[holder] * len(rows) + held) * world + holder
        wanted_keys = group[target] * len(rows) + wanted

        held_addresses.sort()  # by group and piece, then by holder
        held_keys, holder = np.divmod(held_addresses, world)
        # The senders of each wanted piece stand from `first` to before `end` of `holder`.
        if move.reduce:  # all that hold it, the target included
            first = np.searchsorted(held_keys, wanted_keys)
            end = np.searchsorted(held_keys, wanted_keys, side="right")
        else:
            lacks = _is_missing(held_addresses, wanted_keys * world + target)
            target = target[lacks]  # what the target holds itself is not sent
            wanted = wanted[lacks]
            wanted_keys = wanted_keys[lacks]
            lowest = np.flatnonzero(np.diff(held_keys, prepend=-1))  # the first with each key
            holder = holder[lowest]
            held_keys = held_keys[lowest]
            first = np.searchsorted(held_keys, wanted_keys)
            end = first + _stands_at(held_keys, first, wanted_keys)  # one sender, or none
        # Replicated weights that no rank needs are not sent.
        assert move.is_for_helpers or (first < end).all(), (
            f"a movement over {'+'.join(move.group)} wants pieces that no rank of the group "
            f"holds: from {move.source} to {move.target}"
        )
        num_senders = end - first
        sender = holder[runs(first, num_senders)]
        pairs = sender * world + np.repeat(target, num_senders)
        return pairs, np.repeat(rows[wanted], num_senders)

    @memoised
    def _pieces(self, flow: Flow, *, by_expert: bool = False) -> _FlowPieces:
        """Return all pieces of a flow that have rows.

        The experts of one home are held together, so they are merged under their first expert. They
        are kept apart with `by_expert`, and for weights and bias, of which ranks may hold those of
        single experts.
        """
        experts_per_home = 1
        if FLOWS[flow].is_per_expert and not by_expert and flow not in ("weights", "bias"):
            experts_per_home = self.num_experts // self.grid.ep
        rows = self._rows[flow]  # (origins, experts, chunks)
        if experts_per_home > 1:
            # (origins, homes, experts of a home, chunks), summed over the experts
            rows = rows.reshape(len(rows), -1, experts_per_home, rows.shape[2]).sum(2)
        origin, home, chunk = np.nonzero(rows)
        unreplicated = _FlowPieces(
            origin, expert=home * experts_per_home, chunk=chunk, rows=rows[origin, home, chunk]
        )
        if flow != "copies" or self._replicated.is_empty:
            return unreplicated
        origin, expert, helper, amount = self._replicated
        first_of_home = expert // experts_per_home * experts_per_home
        replicated = (origin, first_of_home, self.num_chunks + helper, amount)
        return _FlowPieces(*np.concatenate([unreplicated, replicated], axis=1))

    def _may_be_replicated(self, layout: Layout) -> bool:
        """Return whether slots of a layout have pieces of replicated copies: with all chunks (None)
        or one that has a name."""
        return (
            self.shapes.replicates and layout.flow == "copies" and not isinstance(layout.chunk, int)
        )

    def _rows_of(self, layout: Layout, pieces: Pieces) -> np.ndarray:
        """Return the number of rows of each of a slot's pieces, (pieces,) int64."""
        rows = self._rows[layout.flow]
        if not self._may_be_replicated(layout):
            return rows[pieces.origin, pieces.expert, pieces.chunk]

        # Chunks of replicated copies are not in the table: 0 rows first, then the rows listed.
        last_chunk = rows.shape[2] - 1
        piece_rows = rows[pieces.origin, pieces.expert, np.minimum(pieces.chunk, last_chunk)]
        piece_rows[pieces.chunk > last_chunk] = 0
        origin, expert, helper, amount = self._replicated
        position = find(pieces, self.shapes.number(origin, expert, self.num_chunks + helper))
        is_in_slot = position >= 0
        np.add.at(piece_rows, position[is_in_slot], amount[is_in_slot])
        return piece_rows

    @memoised
    def _held_by(self, layout: Layout, *, by_expert: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return which ranks hold which of `_pieces`, as pairs (rank, position in `_pieces`),
        (pairs,) int64 each."""
        # Results are memoised by their arguments as written, so the default is left out.
        pieces = (
            self._pieces(layout.flow, by_expert=True) if by_expert else self._pieces(layout.flow)
        )
        rank, piece = self.shapes.held(layout).by(pieces.origin, pieces.expert, pieces.chunk)
        if layout.is_on_demand:
            needs_expert = np.stack(
                [self._needs_weights(layout, member) for member in range(self.grid.world)]
            )
            is_needed = needs_expert[rank, pieces.expert[piece]]
            rank = rank[is_needed]
            piece = piece[is_needed]
        return rank, piece

    def num_moved(self, move: Move, source: int, target: int) -> int:
        """Return the number of rows that one rank sends to another in a movement."""
        incoming = self.incoming(move, target)
        return incoming.counts[incoming.peers.index(source)] if source in incoming.peers else 0

    def _splits(self, mine: Layout, theirs: Layout, matched: Matched, rank: int) -> Splits:
        """Return the rows of matched pieces. A helper gets weights only of the experts of which it
        computes copies.

        Args:
            mine: layout of this rank's slot.
            theirs: layout of the slot at the other end of the movement.
            matched: the pieces that this rank exchanges.
        """
        offsets = self.offsets(mine, rank)
        sizes = np.diff(offsets)[matched.places]
        if theirs.is_on_demand:
            experts = self.shapes.pieces(mine, rank).expert[matched.places]
            is_needed = []
            for peer, (start, end) in zip(matched.peers, pairwise(matched.starts)):
                is_needed.append(self._needs_weights(theirs, peer)[experts[start:end]])
            sizes = sizes * np.concatenate(is_needed)

        bounds = [0]  # the rows before each peer's, then all rows
        if len(sizes):
            last_pieces = matched.starts[1:] - 1
            bounds += sizes.cumsum()[last_pieces].tolist()
        counts = tuple(end - start for start, end in pairwise(bounds))
        is_whole = matched.in_order and bounds[-1] == offsets[-1]
        rows = Runs(offsets[matched.places], sizes)
        return Splits(matched.peers, counts, runs=rows, is_whole=is_whole)

    def _find_bases(self, tokens: Layout, copies: Layout, rank: int) -> np.ndarray:
        """Return the base of each piece of the copies, (pieces,) int64: the row in the slot of
        tokens of the first token of its origin. The program's index of a copy counts from there."""
        copy_pieces = self.shapes.pieces(copies, rank)
        rows_later = self.shapes.tokens_later(copies, rank)
        # Samples have moved to this rank: so many rows after where the index says, from row 0.
        if rows_later is not None:
            return rows_later
        token_pieces = self.shapes.pieces(tokens, rank)
        has_one_origin = len(token_pieces.number) == 1
        # The index then counts all tokens of the slot, from its row 0.
        if copies.whole_tp or tokens.whole_tp or has_one_origin:
            return np.zeros(len(copy_pieces.number), dtype=np.int64)
        # Find the piece of tokens that each piece of copies belongs to; it starts at its offset.
        if tokens.flow in ONCE:  # a piece of tokens for each node or ep rank to which they are sent
            destination = self._destinations(tokens.flow, copies.flow, copy_pieces.expert)
            number = self.shapes.number(copy_pieces.origin, destination, copy_pieces.chunk)
            position = find(token_pieces, number)
        else:  # one piece of tokens for each origin
            position = np.searchsorted(token_pieces.origin, copy_pieces.origin)
        return self.offsets(tokens, rank)[:-1][position]

    def _destinations(
        self, tokens_flow: Flow, copies_flow: Flow, second_index: np.ndarray
    ) -> np.ndarray:
        """Return where the tokens of some pieces are sent, (n,) int64: ep ranks if these tokens are
        rank_tokens, nodes if they are node_tokens.

        Args:
            tokens_flow: rank_tokens or node_tokens.
            copies_flow: the flow of the pieces: copies, or rank_tokens made of node_tokens.
            second_index: (n,) int64, of the pieces: an expert, or the ep rank of rank_tokens.
        """
        ep_rank = second_index
        if copies_flow != "rank_tokens":
            ep_rank = second_index // (self.num_experts // self.grid.ep)
        if tokens_flow == "rank_tokens":
            return ep_rank
        ep_ranks_per_node = self.grid.ep // self.grid.nodes_per_replica
        return ep_rank // ep_ranks_per_node
