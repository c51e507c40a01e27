"""Packing, hops and unpacking: the tasks of a movement that an all-to-all algorithm or a codec has been put into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from moesaic.comm.transport import Transfer
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import Leg, NodeMap
from moesaic.program.grid import Axis, Grid
from moesaic.program.shapes import Move
from moesaic.program.task import Slot, Task
from moesaic.program.validate import reduces
from moesaic.runtime.call import Call
from moesaic.runtime.compute import placed, take, transport_lane

Pair = tuple[int, int]
"""Source and target rank of a packet."""


@dataclass
class Packets:
    """Messages at a rank, encoded; a rank's message to itself stands in `own`, as rows."""

    dim: int
    dtype: torch.dtype
    device: torch.device
    codec: str
    items: dict[Pair, Tensor] = field(default_factory=dict)
    """(bytes,) uint8 each."""
    own: Tensor | None = None


@dataclass
class Hopping:
    """A hop under way: the buffers that arrive, and which packets they hold."""

    transfer: Transfer
    arriving: Packets
    order: dict[int, list[tuple[Pair, int]]]
    """Peer to (packet, bytes), in the order in which they stand in the message."""

    def settle(self) -> Packets:
        """Cut what arrived into packets."""
        for peer, packets in self.order.items():
            parts = self.transfer.receives[peer].split([size for _, size in packets])
            self.arriving.items.update({pair: part for (pair, _), part in zip(packets, parts)})
        return self.arriving


def pack(task: Task, slots: Mapping[str, Slot], value: Tensor, call: Call) -> Packets:
    """Encode what this rank sends, message by message."""
    codec = call.codecs(task.codec or "none")
    packets = Packets(value.shape[1], value.dtype, value.device, task.codec or "none")
    outgoing = call.sizes.outgoing(_move(task, slots), call.rank)
    for peer, rows in zip(outgoing.peers, take(value, outgoing.rows).split(outgoing.counts)):
        if peer == call.rank:
            packets.own = rows
        elif len(rows):
            packets.items[(call.rank, peer)] = codec.encode(rows)
    return packets


def start_hop(task: Task, slots: Mapping[str, Slot], held: list[Packets], call: Call, tag: int) -> Hopping:
    """Join the packets that go to a peer in this hop to one message, and make buffers for those that come."""
    arriving = Packets(held[0].dim, held[0].dtype, held[0].device, held[0].codec)
    at_hand = {pair: item for packets in held for pair, item in packets.items.items()}
    codec, move = call.codecs(arriving.codec), _move(task, slots)
    leaving: dict[int, list[Tensor]] = {}
    order: dict[int, list[tuple[Pair, int]]] = {}
    for pair, leg in _legs(task.link, call.sizes.grid, task.group, call.rank, task.hop):
        rows = call.sizes.num_moved(move, *pair)
        size = codec.num_bytes(rows, arriving.dim, arriving.dtype) if rows else 0
        if not size:
            continue
        if leg.source == call.rank:
            leaving.setdefault(leg.target, []).append(at_hand[pair])
        else:
            order.setdefault(leg.source, []).append((pair, size))
    receives = {
        peer: torch.empty(sum(size for _, size in packets), dtype=torch.uint8, device=arriving.device)
        for peer, packets in order.items()
    }
    sends = {peer: torch.cat(items) for peer, items in leaving.items()}
    return Hopping(Transfer(call.rank, tag, sends, receives, transport_lane(task)), arriving, order)


def unpack(task: Task, slots: Mapping[str, Slot], held: list[Packets], call: Call) -> Tensor:
    """Decode what arrived and put it in place; rows that several ranks sent are summed in the order of the ranks."""
    codec, first, move = call.codecs(task.codec or "none"), held[0], _move(task, slots)
    items = {pair: item for packets in held for pair, item in packets.items.items()}
    incoming = call.sizes.incoming(move, call.rank)
    parts = []
    for peer, count in zip(incoming.peers, incoming.counts):
        if peer == call.rank:
            assert first.own is not None
            parts.append(first.own)
        elif count:
            parts.append(codec.decode(items[(peer, call.rank)], count, first.dim, first.dtype))
    parts = parts or [torch.empty(0, first.dim, dtype=first.dtype, device=first.device)]
    return placed(parts, incoming.rows, call.sizes.num_rows(move.target, call.rank), move.reduce)


def _move(task: Task, slots: Mapping[str, Slot]) -> Move:
    """Return the movement that a task is a part of."""
    assert task.of is not None
    source, target = (slots[name] for name in task.of)
    return Move(source.layout, target.layout, task.group, reduces(source, target))


@lru_cache(maxsize=4096)
def _legs(link: str, grid: Grid, group: tuple[Axis, ...], rank: int, hop: int) -> tuple[tuple[Pair, Leg], ...]:
    """Return the packets that leave or reach a rank in a hop, with their legs, by source, then target."""
    ranks = grid.group(rank, group)
    places = NodeMap(grid, ranks)
    found = []
    for source in ranks:
        for target in ranks:
            if source == target:
                continue
            for leg in ALL_TO_ALLS[link].path(places, source, target):
                if leg.hop == hop and rank in (leg.source, leg.target):
                    found.append(((source, target), leg))
    return tuple(found)
