"""`Sizes`: from a layout and the counts to rows, from two layouts to the messages of a movement. The one place for sizes.

Counts say how many copies each origin sends to each expert; every rank has all of them, so every rank derives every
other rank's sizes and nobody waits for anybody's decision. Executor, loopback and simulator share this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import Layout


@dataclass(frozen=True)
class Message:
    """What one rank sends to another, or to itself, in a movement."""

    source: int
    target: int
    send_rows: np.ndarray
    """(n,) int64: rows of the source's slot, in the order in which they travel."""
    receive_rows: np.ndarray
    """(n,) int64: the rows of the target's slot that they become."""


class Sizes:
    """The rows of every slot and the messages of every movement, for one call.

    Args:
        grid: the mesh.
        copies: (world, num_experts) int64: copies that each origin sends to each expert.
        tokens: (world,) int64: tokens of which each origin is responsible.
        num_chunks: parts that each run of copies is cut into.

    Raises:
        InputError: if the experts do not split over ep, or the counts do not fit the mesh.
    """

    def __init__(self, grid: Grid, copies: np.ndarray, tokens: np.ndarray, num_chunks: int = 1) -> None:
        if copies.ndim != 2 or copies.shape[0] != grid.world or tokens.shape != (grid.world,):
            raise InputError(
                f"counts of shape {copies.shape} and {tokens.shape} do not fit {grid.world} ranks: "
                f"give ({grid.world}, num_experts) and ({grid.world},)"
            )
        if copies.shape[1] % grid.ep:
            raise InputError(
                f"num_experts={copies.shape[1]} does not split over mesh.ep={grid.ep}: choose ep as a divisor of it"
            )
        self.grid = grid
        self.num_experts = int(copies.shape[1])
        self.num_chunks = num_chunks
        cuts = copies[:, :, None] * np.arange(num_chunks + 1) // num_chunks
        self._pieces = {"copies": np.diff(cuts, axis=2), "tokens": tokens.reshape(-1, 1, 1)}
        self._layouts: dict[tuple[Layout, int], tuple[np.ndarray, np.ndarray]] = {}

    def local_experts(self, rank: int) -> range:
        """Return the experts that live on a rank."""
        each = self.num_experts // self.grid.ep
        first = self.grid.coordinate(rank, "ep") * each
        return range(first, first + each)

    def num_rows(self, layout: Layout, rank: int) -> int:
        """Return how many rows a slot of this layout has on a rank."""
        return int(self._layout(layout, rank)[1][-1])

    def rows_per_expert(self, layout: Layout, rank: int) -> np.ndarray:
        """Return the rows of each expert in a slot of copies, (experts of the layout,) int64."""
        pieces, offsets = self._layout(layout, rank)
        width = self.num_experts if not layout.local_experts else self.num_experts // self.grid.ep
        first = self.local_experts(rank).start if layout.local_experts else 0
        expert = pieces // self.num_chunks % self.num_experts - first
        return np.bincount(expert, weights=np.diff(offsets), minlength=width).astype(np.int64)

    def token_bases(self, tokens: Layout, copies: Layout, rank: int) -> np.ndarray:
        """Return where the tokens of each copy's origin start in a slot of tokens, (copies,) int64.

        A tensor group that routes as one numbers its tokens together, so its copies start at 0.
        """
        pieces, offsets = self._layout(copies, rank)
        if copies.whole_tp:
            return np.zeros(int(offsets[-1]), dtype=np.int64)
        held, starts = self._layout(tokens, rank)
        origin_of_copy = pieces // self.num_chunks // self.num_experts
        origin_of_token = held // self.num_chunks // self.num_experts
        place = np.searchsorted(origin_of_token, origin_of_copy)
        return np.repeat(starts[:-1][place], np.diff(offsets))

    def chunk_rows(self, chunk: Layout, whole: Layout, rank: int) -> np.ndarray:
        """Return which rows of a whole slot a chunk of it holds, in the chunk's order, (rows of the chunk,) int64."""
        wanted, wanted_offsets = self._layout(chunk, rank)
        held, held_offsets = self._layout(whole, rank)
        where = self._find(held, wanted)
        assert (where >= 0).all(), "a chunk that its whole does not hold"
        return _expand(held_offsets[:-1][where], np.diff(wanted_offsets))

    def messages(self, source: Layout, target: Layout, group: tuple[Axis, ...], reduce: bool) -> list[Message]:
        """Return every message of a movement over all ranks, ordered by target, then source.

        Args:
            source: layout of the slot that is read.
            target: layout of the slot that is written.
            group: axes over which ranks exchange.
            reduce: every rank that holds a piece sends it and the target sums; else the target's own piece serves, or
                that of the lowest rank which holds it.
        """
        return [
            message
            for target_rank in range(self.grid.world)
            for message in self.messages_to(target_rank, source, target, group, reduce)
        ]

    def messages_to(
        self, target_rank: int, source: Layout, target: Layout, group: tuple[Axis, ...], reduce: bool
    ) -> list[Message]:
        """Return the messages of a movement that one rank receives, ordered by source; see `messages`."""
        wanted, wanted_offsets = self._layout(target, target_rank)
        members = self.grid.group(target_rank, group)
        open_pieces = np.ones(len(wanted), dtype=bool)
        found: list[Message] = []
        for rank in sorted(members, key=lambda member: (member != target_rank, member)):
            held, held_offsets = self._layout(source, rank)
            where = self._find(held, wanted)
            use = (where >= 0) & (open_pieces | reduce)
            open_pieces &= where < 0
            sizes = np.diff(wanted_offsets)[use]
            if sizes.sum():
                send = _expand(held_offsets[:-1][where[use]], sizes)
                found.append(Message(rank, target_rank, send, _expand(wanted_offsets[:-1][use], sizes)))
        assert not (open_pieces & (np.diff(wanted_offsets) > 0)).any(), "a piece that no rank of the group holds"
        return sorted(found, key=lambda message: message.source)

    def _layout(self, layout: Layout, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces of a slot in order, and the offsets of their rows (one more than pieces)."""
        key = (layout, rank)
        if key not in self._layouts:
            origins = self._origins(layout, rank)
            table = self._pieces[layout.flow]
            experts = np.arange(table.shape[1]) if not layout.local_experts else np.array(self.local_experts(rank))
            chunks = np.arange(table.shape[2]) if layout.chunk is None else np.array([layout.chunk])
            expert, origin, chunk = np.meshgrid(experts, origins, chunks, indexing="ij")
            pieces = (origin * self.num_experts + expert) * self.num_chunks + chunk
            sizes = table[origin, expert, chunk].reshape(-1)
            self._layouts[key] = (pieces.reshape(-1), np.concatenate([[0], sizes.cumsum()]).astype(np.int64))
        return self._layouts[key]

    def _origins(self, layout: Layout, rank: int) -> np.ndarray:
        grid = self.grid
        peers = grid.group(rank, layout.spread)
        if layout.whole_tp:
            peers = tuple(member for peer in peers for member in grid.group(peer, ("tp",)))
        return np.array(sorted(set(peers)))

    @staticmethod
    def _find(held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Return the place of each wanted piece among the held ones, -1 where it is not held."""
        order = np.argsort(held, kind="stable")
        place = np.searchsorted(held[order], wanted)
        place = np.where(place < len(held), place, 0)
        index = order[place] if len(held) else np.zeros(len(wanted), dtype=np.int64)
        return np.where(held[index] == wanted, index, -1) if len(held) else index - 1


def _expand(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the concatenation of arange(start, start + size)."""
    ends = sizes.cumsum()
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    return np.repeat(starts, sizes) + within
