"""The messages that a rank sends and receives: movements, bundles of movements, and packets of
lowered movements.

A movement gathers rows into outgoing messages, and puts arriving rows in their places. A row is
copied once on each side: into the message to its peer, which may hold several slots one after
another, and out of the message that arrived. Movements that start together send one message per
peer (`Bundle`). If a movement was lowered to an all-to-all algorithm or has a codec, its rows are
packed, sent in hops, and unpacked (`Packets`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from moesaic.comm.transport import Transfer
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import Leg, NodeMap
from moesaic.program.grid import Axis, Grid
from moesaic.program.layouts import Move, move_of
from moesaic.program.sizes import Splits
from moesaic.program.task import Kind, Slot, Task
from moesaic.runtime.tasks import (
    Call,
    Environment,
    IndexedRows,
    Indices,
    Value,
    part_of,
    placed,
    rows,
    take,
    transport_lane,
)


@dataclass(frozen=True)
class PendingMove:
    """What one rank sends and receives in one movement."""

    value: Tensor | IndexedRows
    """(rows, width): the value of the slot that is read."""
    outgoing: Splits
    incoming: Splits
    sums: bool
    """Whether rows of several peers are summed."""
    finish: Callable[[list[Tensor]], Value]
    """Builds the written slot from the rows of each peer in the order of `incoming`, or from all of
    them as one part."""


def _pending_move(
    task: Task, move: Move, slots: Mapping[str, Slot], environment: Environment, call: Call
) -> PendingMove:
    """Return what this rank sends and receives in the movement of a task."""
    source = slots[task.reads[0]]
    target = slots[task.writes[0]]
    sizes = call.sizes
    rank = call.rank
    outgoing = sizes.outgoing(move, rank)
    incoming = sizes.incoming(move, rank)
    value = _as_rows(
        source, environment, call, travels=bool(outgoing.runs.total), is_gradient=move.reduce
    )
    # States also mark sums over axes of size 1. If as many token rows arrive as the slot has, each
    # arrives exactly once.
    sums = move.reduce and not incoming.is_whole
    if sums and target.layout.flow not in ("weights", "bias"):
        sums = incoming.runs.total != sizes.num_rows(target.layout, rank)
    if target.layout.flow != "weights":
        return PendingMove(
            value, outgoing, incoming, sums, finish=partial(_place_rows, move, incoming, call, sums)
        )
    weights = environment[source.name]
    num_experts = sizes.num_held(target.layout, rank)
    no_weights = (
        call.experts.first(weights, 0) if num_experts == 0 and isinstance(weights, tuple) else None
    )

    def finish(parts: list[Tensor]) -> Value:
        """Return the value that the arrived parts make up."""
        if move.reduce and not incoming.runs.total:
            # no rank computed rows for this rank's experts: return no gradient instead of zeros
            return ()
        if no_weights is not None:
            return no_weights
        return call.experts.unpack(
            rows(_place_rows(move, incoming, call, sums, parts)), num_experts
        )

    return PendingMove(value, outgoing, incoming, sums, finish)


def start(
    tasks: Sequence[Task],
    moves: Sequence[Move],
    slots: Mapping[str, Slot],
    environment: Environment,
    call: Call,
    tag: int,
) -> tuple[Transfer, list[Callable[[], Value]]]:
    """Return the transfer that sends movements as one message per peer, and for each a function
    that builds its slot.

    The functions are called once the messages have arrived. `tasks` and `moves` describe the same
    movements, whose rows are read from the environment.
    """
    pending_moves = [_pending_move(*each, slots, environment, call) for each in zip(tasks, moves)]
    rank = call.rank
    lane = transport_lane(tasks[0])
    indices = call.indices
    if len(pending_moves) == 1:
        sends, receives, settle = _single_move(pending_moves[0], rank, indices)
        return Transfer(rank, tag, sends, receives, lane), [settle]
    values = [pending.value for pending in pending_moves]
    # tensors with the width and dtype of each movement's rows
    likes = [value.source if isinstance(value, IndexedRows) else value for value in values]
    leaving = Bundle([pending.outgoing for pending in pending_moves], likes, indices)
    arriving = Bundle([pending.incoming for pending in pending_moves], likes, indices)
    memory, sends = leaving.buffer()
    filled, receives = arriving.buffer()
    leaving.write(memory, values)
    if rank in sends and rank in receives:
        receives[rank].copy_(sends[rank])
    transfer = Transfer(
        rank, tag, sends=_to_others(sends, rank), receives=_to_others(receives, rank), lane=lane
    )
    read = partial(_read_bundled, arriving, filled)
    return transfer, [
        partial(read, number, like.dtype, pending.sums, pending.finish)
        for number, (pending, like) in enumerate(zip(pending_moves, likes))
    ]


def _read_bundled(
    arriving: Bundle,
    filled: Tensor,
    number: int,
    dtype: torch.dtype,
    sums: bool,
    finish: Callable[[list[Tensor]], Value],
) -> Value:
    """Return the slot that a movement of a bundle writes. (A closure of `start` would keep the sent
    tensors alive.)"""
    if not sums:
        return arriving.read(filled, number, dtype, in_place=True)
    received = rows(arriving.read(filled, number, dtype, in_place=False))
    return finish(list(received.split(arriving.splits[number].counts)))


def _place_rows(
    move: Move, incoming: Splits, call: Call, sums: bool, parts: list[Tensor]
) -> Tensor | IndexedRows:
    """Return the written slot from the received rows and those that stayed; without a copy if they
    are the slot already."""
    if incoming.is_whole and len(parts) == 1:
        return parts[0]
    return placed(
        parts, incoming.runs, call.sizes.num_rows(move.target, call.rank), sums, call.indices
    )


def _single_move(
    pending: PendingMove, rank: int, indices: Indices
) -> tuple[dict[int, Tensor], dict[int, Tensor], Callable[[], Value]]:
    """Return messages by peer, buffers by peer, and a function that builds the slot, for a single
    movement.

    All messages are parts of one tensor, which is the value itself if its rows are sent in order.
    All buffers are parts of one tensor too, into which the rows that stay are copied. If rows
    arrive in order, that tensor is the slot.
    """
    outgoing = pending.outgoing
    incoming = pending.incoming
    leaving = take(pending.value, outgoing.runs, indices)
    sends = dict(zip(outgoing.peers, leaving.split(outgoing.counts)))
    counts = [
        0 if pending.sums and peer == rank else n
        for peer, n in zip(incoming.peers, incoming.counts)
    ]
    joined = leaving.new_empty(sum(counts), leaving.shape[1])
    parts = dict(zip(incoming.peers, joined.split(counts)))
    receives = _to_others(parts, rank)
    own_rows = sends.pop(rank, None)
    if rank in parts and own_rows is not None:
        # parts are added peer by peer, so that 16-bit rows are widened one part at a time
        if pending.sums:
            parts[rank] = own_rows
        else:
            parts[rank].copy_(own_rows)
    arrived = list(parts.values()) if pending.sums and parts else [joined]
    return _to_others(sends, rank), receives, partial(pending.finish, arrived)


def _to_others(messages: Mapping[int, Tensor], rank: int) -> dict[int, Tensor]:
    """Return the messages that are not empty and whose peer is another rank."""
    return {peer: message for peer, message in messages.items() if peer != rank and message.numel()}


def _as_rows(
    slot: Slot, environment: Environment, call: Call, *, travels: bool, is_gradient: bool
) -> Tensor | IndexedRows:
    """Return a slot's value as rows to send. For weights that are not sent, return no rows, only
    the right width."""
    value = environment[slot.name]
    if slot.kind is Kind.INDEX:
        assert isinstance(value, Tensor)
        return value.int()  # `INDEX_BYTES` per number
    if slot.kind is not Kind.WEIGHT:
        assert not isinstance(value, tuple)
        return value
    if slot.layout.flow == "bias":
        return value[0] if isinstance(value, tuple) else rows(value)
    if travels:
        assert isinstance(value, tuple)
        return call.experts.pack(value)
    weights = environment["w"]
    assert isinstance(weights, tuple)
    first = call.experts.first(weights, 1)
    return call.experts.pack(call.experts.trained(first) if is_gradient else first)[:0]


_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype in which messages are addressed, by the element size of their smallest dtype, unless
the widest rows have such elements."""


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor viewed in a dtype; itself if it has that dtype, since a view is two
    operators."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class Bundle:
    """One side of a bundle of movements at a rank: its outgoing messages, or its incoming ones.

    Args:
        splits: the rows of each movement, by peer.
        values: (rows, width) of each movement. Only width and dtype are used, so either side's will
            do; not kept.
        indices: the call's index tensors.
    """

    def __init__(
        self, splits: Sequence[Splits], values: Sequence[Tensor], indices: Indices
    ) -> None:
        self._indices = indices
        self.splits = splits
        size = min(value.element_size() for value in values)
        self._widths = [value.shape[1] * value.element_size() // size for value in values]
        order = sorted(range(len(splits)), key=lambda number: -self._widths[number])
        self._widest = order[0]
        widest_width = self._widths[order[0]]
        widest = values[self._widest]
        self._unit = widest.dtype if widest.element_size() == size else _UNITS[size]
        self._device = widest.device
        counts = [dict(zip(split.peers, split.counts)) for split in splits]
        self._starts: list[dict[int, int]] = [{} for _ in splits]
        self._peers = sorted({peer for split in splits for peer in split.peers})
        self._cuts = []
        offset = 0
        for peer in self._peers:
            message_start = offset
            for number in order:
                self._starts[number][peer] = offset
                offset += counts[number].get(peer, 0) * self._widths[number]
            self._cuts += [offset - message_start, -offset % widest_width]
            offset += -offset % widest_width
        self._size = offset

    def buffer(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Allocate memory for all messages; return it with each peer's part of it."""
        memory = torch.empty(self._size, dtype=self._unit, device=self._device)
        return memory, dict(zip(self._peers, memory.split(self._cuts)[::2]))

    def write(self, memory: Tensor, values: Sequence[Tensor | IndexedRows]) -> None:
        """Gather the rows of all movements into their messages."""
        if memory.device.type != "cpu":
            for number, (split, value) in enumerate(zip(self.splits, values)):
                part = part_of(value, split.runs, self._indices)
                if isinstance(
                    part, IndexedRows
                ):  # a launch beside each message's own, instead of moving the rows twice
                    units = _viewed(part.source.contiguous(), self._unit)
                    for index, message in zip(
                        part.index.split(split.counts), self._messages(memory, number)
                    ):
                        torch.index_select(units, 0, index, out=message.view(-1, units.shape[1]))
                    continue
                units = _viewed(part.contiguous(), self._unit).reshape(-1)
                parts = units.split([count * self._widths[number] for count in split.counts])
                torch._foreach_copy_(self._messages(memory, number), list(parts))
            return
        split = self.splits[self._widest]
        width = self._widths[self._widest]
        if split.runs.total:
            # Rows between the messages are padding, which no rank reads.
            source = np.zeros(self._size // width, dtype=np.int64)
            source[self._row_offsets(self._widest) // width] = split.runs.rows
            index = torch.from_numpy(source)
            value = values[self._widest]
            if isinstance(value, IndexedRows):
                index = value.index.index_select(0, index)
                value = value.source
            torch.index_select(
                _viewed(value.contiguous(), self._unit), 0, index, out=memory.view(-1, width)
            )
        for number, (split, value) in enumerate(zip(self.splits, values)):
            if number != self._widest and split.runs.total:
                units = _viewed(take(value, split.runs, self._indices).contiguous(), self._unit)
                memory.scatter_(
                    0, self._unit_offsets(number, self._row_offsets(number)), units.reshape(-1)
                )

    def read(
        self, memory: Tensor, number: int, dtype: torch.dtype, *, in_place: bool
    ) -> Tensor | IndexedRows:
        """Return the rows of a movement: (rows, width). On a CPU, the rows of the widest remain in
        the messages.

        Args:
            memory: all messages.
            number: the place of the movement in the bundle.
            dtype: the dtype of its rows.
            in_place: return the rows in the order of the written slot instead of peer by peer.
        """
        split = self.splits[number]
        width = self._widths[number]
        if memory.device.type != "cpu":
            joined = _viewed(
                torch.cat(self._messages(memory, number) or [memory[:0]]).view(-1, width), dtype
            )
            if not in_place or split.is_whole:
                return joined
            return IndexedRows(joined, self._indices.inverse(split.runs, memory.device), split.runs)
        offsets = self._row_offsets(number)
        if in_place and not split.is_whole:
            by_row = np.empty_like(offsets)
            by_row[split.runs.rows] = offsets
            offsets = by_row
        if number == self._widest:
            lying = _viewed(memory.view(-1, width), dtype)
            return IndexedRows(lying, torch.from_numpy(offsets // width), split.runs)
        return _viewed(
            memory.index_select(0, self._unit_offsets(number, offsets)).view(-1, width), dtype
        )

    def _messages(self, memory: Tensor, number: int) -> list[Tensor]:
        """Return each peer's part of a movement, peer by peer, as slices of `memory`."""
        split = self.splits[number]
        starts = self._starts[number]
        return [
            memory.narrow(0, starts[peer], count * self._widths[number])
            for peer, count in zip(split.peers, split.counts)
        ]

    def _row_offsets(self, number: int) -> np.ndarray:
        """Return the offset in memory, in units, at which each row of a movement starts, peer by
        peer."""
        split = self.splits[number]
        width = self._widths[number]
        counts = np.array(split.counts, dtype=np.int64)
        starts = np.array([self._starts[number][peer] for peer in split.peers], dtype=np.int64)
        return (
            np.repeat(starts - (counts.cumsum() - counts) * width, counts)
            + np.arange(split.runs.total) * width
        )

    def _unit_offsets(self, number: int, row_offsets: np.ndarray) -> Tensor:
        """Return the offset in memory of every unit of the rows that start at `row_offsets`."""
        width = self._widths[number]
        return torch.from_numpy(
            row_offsets if width == 1 else (row_offsets[:, None] + np.arange(width)).reshape(-1)
        )


Pair = tuple[int, int]
"""Source and target rank of a packet."""


@dataclass
class Packets:
    """Encoded messages at a rank. The rank's message to itself is in `own`, as rows."""

    dim: int
    dtype: torch.dtype
    device: torch.device
    codec: str
    items: dict[Pair, Tensor] = field(default_factory=dict)
    """Encoded messages by source and target, each (bytes,) uint8."""
    own: Tensor | None = None


def pack(task: Task, slots: Mapping[str, Slot], value: Tensor | IndexedRows, call: Call) -> Packets:
    """Encode what this rank sends, message by message."""
    codec = call.codecs(task.codec or "none")
    outgoing = call.sizes.outgoing(move_of(task, slots), call.rank)
    leaving = take(value, outgoing.runs, call.indices)
    packets = Packets(leaving.shape[1], leaving.dtype, leaving.device, codec=task.codec or "none")
    for peer, part in zip(outgoing.peers, leaving.split(outgoing.counts)):
        if peer == call.rank:
            packets.own = part
        elif len(part):
            packets.items[(call.rank, peer)] = codec.encode(part)
    return packets


def start_hop(
    task: Task, slots: Mapping[str, Slot], sources: list[Packets], call: Call, tag: int
) -> tuple[Transfer, Callable[[], Packets]]:
    """Return the transfer of a hop, with one message of packets per peer, and a function that
    splits what arrived."""
    arriving = Packets(sources[0].dim, sources[0].dtype, sources[0].device, sources[0].codec)
    items = {pair: item for packets in sources for pair, item in packets.items.items()}
    codec = call.codecs(arriving.codec)
    move = move_of(task, slots)
    leaving: dict[int, list[Tensor]] = {}
    order: dict[int, list[tuple[Pair, int]]] = {}
    for pair, leg in _legs(task.link, call.sizes.grid, task.group, call.rank, task.hop):
        rows = call.sizes.num_moved(move, *pair)
        size = codec.num_bytes(rows, arriving.dim, arriving.dtype) if rows else 0
        if not size:
            continue
        if leg.source == call.rank:
            leaving.setdefault(leg.target, []).append(items[pair])
        else:
            order.setdefault(leg.source, []).append((pair, size))
    receives = {
        peer: torch.empty(
            sum(size for _, size in packets), dtype=torch.uint8, device=arriving.device
        )
        for peer, packets in order.items()
    }
    sends = {peer: torch.cat(parts) for peer, parts in leaving.items()}
    transfer = Transfer(call.rank, tag, sends, receives, lane=transport_lane(task))
    return transfer, partial(_split_messages, arriving, receives, order)


def _split_messages(
    arriving: Packets,
    receives: Mapping[int, Tensor],
    order: Mapping[int, Sequence[tuple[Pair, int]]],
) -> Packets:
    """Return `arriving` with the packets of the received messages; `order` has each message's
    packets and their bytes."""
    for peer, packets in order.items():
        parts = receives[peer].split([size for _, size in packets])
        arriving.items.update({pair: part for (pair, _), part in zip(packets, parts)})
    return arriving


def unpack(
    task: Task, slots: Mapping[str, Slot], sources: list[Packets], call: Call
) -> Tensor | IndexedRows:
    """Decode what arrived and put it in place. Rows from several ranks are summed in the order of
    the ranks."""
    codec = call.codecs(task.codec or "none")
    first = sources[0]
    move = move_of(task, slots)
    items = {pair: item for packets in sources for pair, item in packets.items.items()}
    incoming = call.sizes.incoming(move, call.rank)
    parts = []
    for peer, count in zip(incoming.peers, incoming.counts):
        if peer == call.rank:
            assert first.own is not None
            parts.append(first.own)
        elif count:
            parts.append(codec.decode(items[(peer, call.rank)], count, first.dim, first.dtype))
    parts = parts or [torch.empty(0, first.dim, dtype=first.dtype, device=first.device)]
    return placed(
        parts, incoming.runs, call.sizes.num_rows(move.target, call.rank), move.reduce, call.indices
    )


@lru_cache(maxsize=4096)
def _legs(
    algorithm: str, grid: Grid, group: tuple[Axis, ...], rank: int, hop: int
) -> tuple[tuple[Pair, Leg], ...]:
    """Return the packets that leave or reach a rank in a hop, with their legs, sorted by source,
    then target; `algorithm` is a key of `ALL_TO_ALLS`."""
    ranks = grid.group(rank, group)
    places = NodeMap(grid, ranks)
    legs = []
    for source in ranks:
        for target in ranks:
            if source == target:
                continue
            for leg in ALL_TO_ALLS[algorithm].path(places, source, target):
                if leg.hop == hop and rank in (leg.source, leg.target):
                    legs.append(((source, target), leg))
    return tuple(legs)
