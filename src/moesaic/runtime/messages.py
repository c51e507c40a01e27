"""The messages that a rank sends and receives: movements, bundles of movements, and packets of
lowered movements.

A movement gathers rows into outgoing messages, and puts arriving rows in their places. A row is
copied once on each side: into the message to its peer, which may hold several slots one after
another, and out of the message that arrived. Movements that start together send one message per
peer (`Bundle`). If a movement was lowered to an all-to-all algorithm or has a codec, its rows are
packed, sent in hops (rounds of messages), and unpacked (`Packets`).

A slot is a named value of a program; the environment has the values of all slots on this rank. A
`Splits` says how many rows go to or come from each peer, this rank included, and which rows of the
slot they are, as runs of consecutive rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from moesaic.comm.transport import Transfer
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import Leg, NodeMap
from moesaic.program.grid import Axis, Grid
from moesaic.program.layouts import Move, move_of
from moesaic.program.sizes import Splits
from moesaic.program.task import Kind, Layout, Slot, Task
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
    outgoing = call.sizes.outgoing(move, call.rank)
    incoming = call.sizes.incoming(move, call.rank)
    sends_rows = outgoing.runs.total > 0
    value = _as_rows(source, environment, call, travels=sends_rows, is_gradient=move.reduce)
    sums = move.reduce and _may_repeat_rows(incoming, move.target, call)
    finish: Callable[[list[Tensor]], Value] = partial(_place_rows, move, incoming, call, sums)
    if move.target.flow == "weights":  # they travel as rows, and become parameters again
        finish = _unpacker(environment[source.name], move, incoming, call, place_rows=finish)
    return PendingMove(value, outgoing, incoming, sums, finish)


def _may_repeat_rows(incoming: Splits, target: Layout, call: Call) -> bool:
    """Return whether a row of the written slot may arrive more than once. `Move.reduce` alone does
    not say so: it follows from states, which also mark sums over an axis of one rank."""
    if incoming.is_whole:  # the slot's rows, in its order
        return False
    if target.flow in ("weights", "bias"):  # a row may arrive several times, or never
        return True
    # each row of tokens or copies arrives at least once
    return incoming.runs.total != call.sizes.num_rows(target, call.rank)


def _unpacker(
    own: Value,
    move: Move,
    incoming: Splits,
    call: Call,
    place_rows: Callable[[list[Tensor]], Value],
) -> Callable[[list[Tensor]], Value]:
    """Return a function that makes parameters of the rows of weights, or of their gradients, that
    arrived, given what this rank itself has in the slot that is read."""
    if move.reduce and not incoming.runs.total:
        # no rank computed rows for this rank's experts: no gradient (`()`) instead of zeros
        return lambda parts: ()
    num_experts = call.sizes.num_held(move.target, call.rank)
    if num_experts == 0 and isinstance(own, tuple):
        no_weights = call.experts.first(own, 0)  # of no expert, with the shapes of the others
        return lambda parts: no_weights
    return lambda parts: call.experts.unpack(rows(place_rows(parts)), num_experts)


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

    The functions are called once the messages have arrived.

    Args:
        tasks: the movements.
        moves: the same movements, as layouts.
        slots: the program's slots by name.
        environment: the values of slots, from which the rows are read.
        tag: of the transfer; equal on all ranks.
    """
    pending_moves = [
        _pending_move(task, move, slots, environment, call) for task, move in zip(tasks, moves)
    ]
    rank = call.rank
    lane = transport_lane(tasks[0])
    indices = call.indices
    if len(pending_moves) == 1:
        sends, receives, build_slot = _single_move(pending_moves[0], rank, indices)
        return Transfer(rank, tag, sends, receives, lane), [build_slot]
    values = [pending.value for pending in pending_moves]
    # tensors with the width and dtype of each movement's rows
    likes = [value.source if isinstance(value, IndexedRows) else value for value in values]
    leaving = Bundle([pending.outgoing for pending in pending_moves], likes, indices)
    arriving = Bundle([pending.incoming for pending in pending_moves], likes, indices)
    send_memory, sends = leaving.buffer()
    receive_memory, receives = arriving.buffer()
    leaving.write(send_memory, values)
    if rank in sends and rank in receives:  # rows that stay on this rank
        receives[rank].copy_(sends[rank])
    transfer = Transfer(
        rank, tag, sends=_to_others(sends, rank), receives=_to_others(receives, rank), lane=lane
    )
    read = partial(_read_bundled, arriving, receive_memory)
    build_slots: list[Callable[[], Value]] = [
        partial(read, number=number, dtype=like.dtype, sums=pending.sums, finish=pending.finish)
        for number, (pending, like) in enumerate(zip(pending_moves, likes))
    ]
    return transfer, build_slots


def _read_bundled(
    arriving: Bundle,
    memory: Tensor,
    number: int,
    dtype: torch.dtype,
    sums: bool,
    finish: Callable[[list[Tensor]], Value],
) -> Value:
    """Return the slot that the movement with this number in a bundle writes, from the memory of the
    received messages. (A closure of `start` would keep the sent tensors alive.)"""
    if not sums:  # `finish` would only put the rows in their places, since a bundle has no weights
        return arriving.read(memory, number, dtype, in_place=True)
    received = rows(arriving.read(memory, number, dtype, in_place=False))
    return finish(list(received.split(arriving.splits[number].counts)))


def _place_rows(
    move: Move, incoming: Splits, call: Call, sums: bool, parts: list[Tensor]
) -> Tensor | IndexedRows:
    """Return the written slot from the received rows and those that stayed; without a copy if they
    are the slot already.

    Args:
        incoming: which rows of the slot they are.
        sums: whether rows of several peers are summed.
        parts: the rows of each peer, or all of them as one part.
    """
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
    # Where rows are summed, this rank's own need no room: they are added from where they lie.
    counts = list(incoming.counts)
    if pending.sums and rank in incoming.peers:
        counts[incoming.peers.index(rank)] = 0
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
    # rows that are summed are given peer by peer, others as one part
    arrived = list(parts.values()) if pending.sums and parts else [joined]
    return _to_others(sends, rank), receives, partial(pending.finish, arrived)


def _to_others(messages: Mapping[int, Tensor], rank: int) -> dict[int, Tensor]:
    """Return the messages that are not empty and whose peer is another rank."""
    return {peer: message for peer, message in messages.items() if peer != rank and message.numel()}


def _as_rows(
    slot: Slot, environment: Environment, call: Call, *, travels: bool, is_gradient: bool
) -> Tensor | IndexedRows:
    """Return a slot's value as rows to send. For weights that are not sent, return no rows, only
    the right width.

    Args:
        travels: whether this rank sends any of the rows.
        is_gradient: of weights, whether they are gradients, which only trained parameters have.
    """
    value = environment[slot.name]
    if slot.kind is Kind.INDEX:
        assert isinstance(value, Tensor)
        return value.int()  # `INDEX_BYTES` per number
    if slot.kind is not Kind.WEIGHT:  # rows as they are
        assert not isinstance(value, tuple)
        return value
    if slot.layout.flow == "bias":  # one tensor, a row per expert
        return value[0] if isinstance(value, tuple) else rows(value)
    if travels:
        assert isinstance(value, tuple)
        return call.experts.pack(value)
    weights = environment["w"]  # those that this rank stores tell the width
    assert isinstance(weights, tuple)
    one_expert = call.experts.first(weights, 1)
    if is_gradient:
        one_expert = call.experts.trained(one_expert)
    return call.experts.pack(one_expert)[:0]


_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype in which messages are addressed, by the element size of their smallest dtype, unless
the widest rows have such elements."""


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor viewed in a dtype; itself if it has that dtype, since a view is two
    operators."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class Bundle:
    """One side of a bundle of movements at a rank: its outgoing messages, or its incoming ones.

    All messages lie in one tensor, peer after peer. The message of a peer has the rows of one
    movement after those of another, the widest rows first, and then padding to a multiple of the
    widest row, so that the memory can be viewed as such rows. The tensor's elements are units:
    numbers as large as the smallest element of any movement's rows. Widths are in units.

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
        unit_bytes = min(value.element_size() for value in values)
        self._widths = [value.shape[1] * value.element_size() // unit_bytes for value in values]
        """The width of each movement's rows, in units."""
        by_width = sorted(range(len(splits)), key=lambda number: -self._widths[number])
        self._widest = by_width[0]
        """The number of the movement with the widest rows."""
        widest_width = self._widths[self._widest]
        widest = values[self._widest]
        self._unit = widest.dtype if widest.element_size() == unit_bytes else _UNITS[unit_bytes]
        """The dtype of a unit."""
        self._device = widest.device
        counts = [dict(zip(split.peers, split.counts)) for split in splits]
        self._peers = sorted({peer for split in splits for peer in split.peers})
        self._starts: list[dict[int, int]] = [{} for _ in splits]
        """By movement and peer, where its rows start in memory, in units."""
        self._sections: list[int] = []
        """The units of each message and of the padding after it, in turn."""
        offset = 0
        for peer in self._peers:
            message_start = offset
            for number in by_width:
                self._starts[number][peer] = offset
                offset += counts[number].get(peer, 0) * self._widths[number]
            padding = -offset % widest_width
            self._sections += [offset - message_start, padding]
            offset += padding
        self._size = offset
        """The units of all messages, with padding."""

    def buffer(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Allocate memory for all messages; return it with each peer's part of it."""
        memory = torch.empty(self._size, dtype=self._unit, device=self._device)
        messages = memory.split(self._sections)[::2]  # without the padding
        return memory, dict(zip(self._peers, messages))

    def write(self, memory: Tensor, values: Sequence[Tensor | IndexedRows]) -> None:
        """Gather the rows of all movements into their messages.

        Args:
            memory: of all messages.
            values: of the slot that each movement reads.
        """
        if memory.device.type != "cpu":
            for number, value in enumerate(values):
                self._write_on_gpu(memory, number, value)
            return
        # First the widest rows, since that writes everywhere; then each other movement's.
        self._write_widest(memory, values[self._widest])
        for number, (split, value) in enumerate(zip(self.splits, values)):
            if number != self._widest and split.runs.total:
                units = _viewed(take(value, split.runs, self._indices).contiguous(), self._unit)
                offsets = self._unit_offsets(number, self._row_offsets(number))
                memory.scatter_(0, offsets, units.reshape(-1))

    def _write_on_gpu(self, memory: Tensor, number: int, value: Tensor | IndexedRows) -> None:
        """Gather the rows of the movement with this number into the messages."""
        split = self.splits[number]
        part = part_of(value, split.runs, self._indices)
        messages = self._messages(memory, number)
        if isinstance(part, IndexedRows):
            # a launch for each message, instead of moving the rows twice
            units = _viewed(part.source.contiguous(), self._unit)
            for index, message in zip(part.index.split(split.counts), messages):
                torch.index_select(units, 0, index, out=message.view(-1, units.shape[1]))
        else:
            units = _viewed(part.contiguous(), self._unit).reshape(-1)
            parts = units.split([count * self._widths[number] for count in split.counts])
            torch._foreach_copy_(messages, list(parts))

    def _write_widest(self, memory: Tensor, value: Tensor | IndexedRows) -> None:
        """Gather the widest rows into the messages on a CPU, by one `index_select` over the whole
        memory. What it writes elsewhere is overwritten next, or padding."""
        split = self.splits[self._widest]
        width = self._widths[self._widest]
        if not split.runs.total:
            return
        # The memory as rows of this width: which row of the slot each gets, 0 if none.
        slot_rows = np.zeros(self._size // width, dtype=np.int64)
        slot_rows[self._row_offsets(self._widest) // width] = split.runs.rows
        index = torch.from_numpy(slot_rows)
        if isinstance(value, IndexedRows):
            index = value.index.index_select(0, index)
            value = value.source
        units = _viewed(value.contiguous(), self._unit)
        torch.index_select(units, 0, index, out=memory.view(-1, width))

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
        if memory.device.type != "cpu":  # joined peer by peer; `in_place`, an index into these rows
            messages = self._messages(memory, number) or [memory[:0]]
            joined = _viewed(torch.cat(messages).view(-1, width), dtype)
            if not in_place or split.is_whole:
                return joined
            index = self._indices.inverse(split.runs, memory.device)
            return IndexedRows(joined, index, runs=split.runs)
        offsets = self._row_offsets(number)  # of the rows, peer by peer
        if in_place and not split.is_whole:  # in the order of the slot's rows instead
            offsets_by_row = np.empty_like(offsets)
            offsets_by_row[split.runs.rows] = offsets
            offsets = offsets_by_row
        if number == self._widest:  # an index into memory, as rows of this width
            rows_of_memory = _viewed(memory.view(-1, width), dtype)
            index = torch.from_numpy(offsets // width)
            return IndexedRows(rows_of_memory, index, runs=split.runs)
        # other rows may start anywhere in memory: copy them unit by unit
        units = memory.index_select(0, self._unit_offsets(number, offsets))
        return _viewed(units.view(-1, width), dtype)

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
        # As if rows lay one after another, then each peer's shifted to where its message has them.
        rows_before = counts.cumsum() - counts
        shifts = np.repeat(starts - rows_before * width, counts)
        return shifts + np.arange(split.runs.total) * width

    def _unit_offsets(self, number: int, row_offsets: np.ndarray) -> Tensor:
        """Return the offset in memory of every unit of the rows that start at `row_offsets`."""
        width = self._widths[number]
        if width == 1:
            return torch.from_numpy(row_offsets)
        return torch.from_numpy((row_offsets[:, None] + np.arange(width)).reshape(-1))


Pair = tuple[int, int]
"""Source and target rank of a packet."""


@dataclass
class Packets:
    """Encoded messages at a rank. The rank's message to itself is in `own`, as rows."""

    dim: int
    """Width of the rows before they are encoded."""
    dtype: torch.dtype
    """Their dtype."""
    device: torch.device
    codec: str
    """Name of the codec; "none" for no codec."""
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
    splits what arrived.

    Args:
        sources: the slots that the hop reads.
        tag: of the transfer; equal on all ranks.
    """
    first = sources[0]
    codec = call.codecs(first.codec)
    move = move_of(task, slots)
    items = _all_items(sources)
    # A message has its packets in the order of `_legs`, on both sides.
    leaving: dict[int, list[Tensor]] = {}
    arriving: dict[int, dict[Pair, int]] = {}  # by peer, the bytes of each packet of its message
    for pair, leg in _legs(task.link, call.sizes.grid, task.group, call.rank, task.hop):
        num_rows = call.sizes.num_moved(move, *pair)
        num_bytes = codec.num_bytes(num_rows, first.dim, first.dtype) if num_rows else 0
        if not num_bytes:
            continue
        if leg.source == call.rank:
            leaving.setdefault(leg.target, []).append(items[pair])
        else:
            arriving.setdefault(leg.source, {})[pair] = num_bytes
    receives = {
        peer: torch.empty(sum(packets.values()), dtype=torch.uint8, device=first.device)
        for peer, packets in arriving.items()
    }
    sends = {peer: torch.cat(parts) for peer, parts in leaving.items()}
    transfer = Transfer(call.rank, tag, sends, receives, lane=transport_lane(task))
    empty = Packets(first.dim, first.dtype, first.device, first.codec)
    return transfer, partial(_split_messages, empty, receives, arriving)


def _all_items(sources: Sequence[Packets]) -> dict[Pair, Tensor]:
    """Return the encoded messages of several slots."""
    items: dict[Pair, Tensor] = {}
    for packets in sources:
        items |= packets.items
    return items


def _split_messages(
    empty: Packets, receives: Mapping[int, Tensor], arriving: Mapping[int, Mapping[Pair, int]]
) -> Packets:
    """Return `empty` filled with the packets of the received messages.

    Args:
        receives: the received messages by peer.
        arriving: by peer, the bytes of each packet in its message, in order.
    """
    for peer, packets in arriving.items():
        parts = receives[peer].split(list(packets.values()))
        empty.items.update(zip(packets, parts))
    return empty


def unpack(
    task: Task, slots: Mapping[str, Slot], sources: list[Packets], call: Call
) -> Tensor | IndexedRows:
    """Decode what arrived and put it in place. Rows from several ranks are summed in the order of
    the ranks."""
    codec = call.codecs(task.codec or "none")
    packed = sources[0]  # what this rank packed, with its rows for itself
    move = move_of(task, slots)
    items = _all_items(sources)
    incoming = call.sizes.incoming(move, call.rank)
    parts = []
    for peer, count in zip(incoming.peers, incoming.counts):
        if peer == call.rank:
            assert packed.own is not None
            parts.append(packed.own)
        elif count:
            parts.append(codec.decode(items[(peer, call.rank)], count, packed.dim, packed.dtype))
    if not parts:
        parts = [torch.empty(0, packed.dim, dtype=packed.dtype, device=packed.device)]
    num_rows = call.sizes.num_rows(move.target, call.rank)
    return placed(parts, incoming.runs, num_rows, sums=move.reduce, indices=call.indices)


@lru_cache(maxsize=4096)
def _legs(
    algorithm: str, grid: Grid, group: tuple[Axis, ...], rank: int, hop: int
) -> tuple[tuple[Pair, Leg], ...]:
    """Return the packets that leave or reach a rank in a hop, with their legs, sorted by source,
    then target. A leg is a packet's way in one hop.

    Args:
        algorithm: a key of `ALL_TO_ALLS`.
        group: axes over which ranks exchange.
    """
    ranks = grid.group(rank, group)
    node_map = NodeMap(grid, ranks)
    legs = []
    for source, target in permutations(ranks, 2):
        for leg in ALL_TO_ALLS[algorithm].path(node_map, source, target):
            if leg.hop == hop and rank in (leg.source, leg.target):
                legs.append(((source, target), leg))
    return tuple(legs)
