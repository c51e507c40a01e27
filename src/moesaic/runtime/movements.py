"""Movements, ready to be issued: rows gathered into the messages that leave, and put in place out of those that came.

A row is copied once on each side: into the message of its peer, where several slots may stand one behind the other, and out
of the message that arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.comm.wire import Transfer, as_bytes
from moesaic.program.shapes import Move
from moesaic.program.sizes import Lots
from moesaic.program.task import Kind, Slot, Task
from moesaic.program.validate import reduces
from moesaic.runtime.call import Call, Environment, Value, rows
from moesaic.runtime.compute import in_order, index_like, placed, take, wire_lane


@dataclass(frozen=True)
class Movement:
    """What one movement takes from a rank and brings to it."""

    value: Tensor
    """(rows, width): the slot that is read."""
    outgoing: Lots
    incoming: Lots
    finish: Callable[[list[Tensor]], Value]
    """From the rows of each peer, in the order of `incoming`, to the slot that is written."""

    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return self.value.shape[1] * self.value.element_size()


def prepare(task: Task, slots: Mapping[str, Slot], environment: Environment, call: Call) -> Movement:
    """Return the movement of a task."""
    source, target = slots[task.reads[0]], slots[task.writes[0]]
    sizes, rank = call.sizes, call.rank
    move = Move(source.layout, target.layout, task.group, reduces(source, target))
    outgoing, incoming = sizes.outgoing(move, rank), sizes.incoming(move, rank)
    held = environment[source.name]
    value = _as_rows(source, environment, call, travels=bool(len(outgoing.rows)))
    experts = sizes.num_held(target.layout, rank) if target.layout.flow == "weights" else None

    def finish(parts: list[Tensor]) -> Value:
        if experts is not None and move.reduce and not len(incoming.rows):
            return ()  # nobody has computed anything for this rank's experts: no gradient, rather than one of zeros
        if experts == 0:
            assert not isinstance(held, Tensor)
            return call.experts.first(held, 0)
        parts = parts or [value.new_empty(0, value.shape[1])]
        out = placed(parts, incoming.rows, sizes.num_rows(target.layout, rank), move.reduce)
        return out if experts is None else call.experts.unpack(out, experts)

    return Movement(value, outgoing, incoming, finish)


def start(movements: Sequence[Movement], task: Task, rank: int, tag: int) -> tuple[Transfer, list[Callable[[], Value]]]:
    """Return the transfer that carries movements, and for each what makes its slot once the transfer has landed.

    Args:
        movements: of a bundle; their rows for a peer stand one behind the other in its message, wide numbers first, so that
            all are aligned.
        task: the first of the bundle.
        rank: this rank.
        tag: of the transfer.
    """
    sends, kept = _leaving(movements, rank) if len(movements) > 1 else _leaving_alone(movements[0], rank)
    receives, views = _coming(movements, rank)

    def settle(number: int) -> Callable[[], Value]:
        movement = movements[number]
        parts = {**views[number], **({rank: kept[number]} if rank in movement.incoming.peers else {})}
        return lambda: movement.finish([parts[peer] for peer in movement.incoming.peers])

    transfer = Transfer(rank, tag, sends, receives, wire_lane(task))
    return transfer, [settle(number) for number in range(len(movements))]


def _leaving_alone(movement: Movement, rank: int) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return messages by peer, and what stays, of a movement by itself: all are cut from one gathered tensor."""
    parts = dict(
        zip(movement.outgoing.peers, take(movement.value, movement.outgoing.rows).split(movement.outgoing.counts))
    )
    kept = parts.pop(rank, movement.value[:0])
    return {peer: as_bytes(part) for peer, part in parts.items() if part.numel()}, [kept]


def _leaving(movements: Sequence[Movement], rank: int) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return messages by peer, and what stays of each movement; rows are gathered straight into their message."""
    num_bytes = [{p: n * m.row_bytes() for p, n in zip(m.outgoing.peers, m.outgoing.counts)} for m in movements]
    device = movements[0].value.device
    peers = sorted({peer for each in num_bytes for peer, size in each.items() if size and peer != rank})
    sends = {p: torch.empty(sum(e.get(p, 0) for e in num_bytes), dtype=torch.uint8, device=device) for p in peers}
    filled = dict.fromkeys(peers, 0)
    kept = [movement.value[:0] for movement in movements]
    for number in _wide_first(movements):
        movement, begin = movements[number], 0
        straight = in_order(movement.outgoing.rows, len(movement.value))
        places = index_like(movement.outgoing.rows, movement.value)
        for peer, count in zip(movement.outgoing.peers, movement.outgoing.counts):
            cut = slice(begin, begin + count)
            begin += count
            if peer == rank:
                kept[number] = movement.value[cut] if straight else movement.value.index_select(0, places[cut])
            elif num_bytes[number][peer]:
                size = num_bytes[number][peer]
                into = _view(sends[peer], filled[peer], size, movement.value)
                filled[peer] += size
                if straight:
                    into.copy_(movement.value[cut])
                else:
                    torch.index_select(movement.value, 0, places[cut], out=into)
    return sends, kept


def _coming(movements: Sequence[Movement], rank: int) -> tuple[dict[int, Tensor], list[dict[int, Tensor]]]:
    """Return buffers by peer, and where in them each movement's rows will stand, by peer."""
    sizes: dict[int, int] = {}
    for movement in movements:
        for peer, count in zip(movement.incoming.peers, movement.incoming.counts):
            if peer != rank and count:
                sizes[peer] = sizes.get(peer, 0) + count * movement.row_bytes()
    device = movements[0].value.device
    receives = {peer: torch.empty(size, dtype=torch.uint8, device=device) for peer, size in sorted(sizes.items())}
    views: list[dict[int, Tensor]] = [{} for _ in movements]
    filled = dict.fromkeys(receives, 0)
    for number in _wide_first(movements):
        movement = movements[number]
        for peer, count in zip(movement.incoming.peers, movement.incoming.counts):
            size = count * movement.row_bytes()
            if peer == rank:
                continue
            if not size:
                views[number][peer] = movement.value.new_empty(count, movement.value.shape[1])
                continue
            views[number][peer] = _view(receives[peer], filled[peer], size, movement.value)
            filled[peer] += size
    return receives, views


def _wide_first(movements: Sequence[Movement]) -> list[int]:
    """Return the places of movements in the order in which their rows stand in a message."""
    return sorted(range(len(movements)), key=lambda number: -movements[number].value.element_size())


def _view(message: Tensor, begin: int, size: int, like: Tensor) -> Tensor:
    """Return bytes of a message as rows like those of a tensor."""
    return message[begin : begin + size].view(like.dtype).view(-1, like.shape[1])


def _as_rows(slot: Slot, environment: Environment, call: Call, *, travels: bool) -> Tensor:
    """Return a slot's value as rows to be sent. Of weights that do not travel, only what tells the width of a row."""
    value = environment[slot.name]
    if slot.kind is not Kind.WEIGHT:
        return rows(value)
    if slot.layout.flow == "bias":
        return value if isinstance(value, Tensor) else value[0]
    if not travels:
        value = environment["w"]
    assert not isinstance(value, Tensor)
    return call.experts.pack(value if travels else call.experts.first(value, 1))
