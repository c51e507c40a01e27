"""Movements, ready to be issued: rows gathered into the messages that leave, and put in place out of those that came.

A row is copied once on each side: into the message of its peer, where several slots may stand one behind the other, and out
of the message that arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moesaic.comm.transport import Transfer
from moesaic.program.shapes import Move
from moesaic.program.sizes import Splits
from moesaic.program.task import Kind, Slot, Task
from moesaic.runtime.bundled import Bundle
from moesaic.runtime.call import Call, Environment, Value, rows
from moesaic.runtime.compute import placed, take, transport_lane


@dataclass(frozen=True)
class Movement:
    """What one movement takes from a rank and brings to it."""

    value: Tensor
    """(rows, width): the slot that is read."""
    outgoing: Splits
    incoming: Splits
    sums: bool
    """Several peers send what is added up."""
    finish: Callable[[list[Tensor]], Value]
    """From the rows of each peer in the order of `incoming`, or all of them as one part, to the slot that is written."""


def prepare(task: Task, move: Move, slots: Mapping[str, Slot], environment: Environment, call: Call) -> Movement:
    """Return the movement of a task."""
    source, target = slots[task.reads[0]], slots[task.writes[0]]
    sizes, rank = call.sizes, call.rank
    outgoing, incoming = sizes.outgoing(move, rank), sizes.incoming(move, rank)
    value = _as_rows(source, environment, call, travels=bool(len(outgoing.rows)))
    # States tell of sums over axes of size 1 too. Rows of tokens all arrive, so as many as there are arrive once each.
    sums = move.reduce and not incoming.is_whole
    if sums and target.layout.flow not in ("weights", "bias"):
        sums = len(incoming.rows) != sizes.num_rows(target.layout, rank)
    if target.layout.flow != "weights":
        return Movement(value, outgoing, incoming, sums, partial(_put, move, incoming, call, sums))
    held, experts = environment[source.name], sizes.num_held(target.layout, rank)
    none_held = call.experts.first(held, 0) if experts == 0 and not isinstance(held, Tensor) else None

    def finish(parts: list[Tensor]) -> Value:
        if move.reduce and not len(incoming.rows):
            return ()  # nobody has computed anything for this rank's experts: no gradient, rather than one of zeros
        if none_held is not None:
            return none_held
        return call.experts.unpack(_put(move, incoming, call, sums, parts), experts)

    return Movement(value, outgoing, incoming, sums, finish)


def start(movements: Sequence[Movement], task: Task, rank: int, tag: int) -> tuple[Transfer, list[Callable[[], Value]]]:
    """Return the transfer that carries movements, and for each what makes its slot once the transfer has landed.

    Args:
        movements: of a bundle; see `bundled.py` for how their rows stand in a message.
        task: the first of the bundle.
        rank: this rank.
        tag: of the transfer.
    """
    if len(movements) == 1:
        sends, receives, settle = _alone(movements[0], rank)
        return Transfer(rank, tag, sends, receives, transport_lane(task)), [settle]
    values = [movement.value for movement in movements]
    leaving = Bundle([movement.outgoing for movement in movements], values)
    arriving = Bundle([movement.incoming for movement in movements], values)
    (memory, sends), (filled, receives) = leaving.buffer(), arriving.buffer()
    leaving.write(memory, values)
    if rank in sends and rank in receives:
        receives[rank].copy_(sends[rank])
    transfer = Transfer(rank, tag, _to_others(sends, rank), _to_others(receives, rank), transport_lane(task))
    read = partial(_read, arriving, filled)
    return transfer, [partial(read, n, m.value.dtype, m.sums, m.finish) for n, m in enumerate(movements)]


def _read(
    arriving: Bundle,
    filled: Tensor,
    number: int,
    dtype: torch.dtype,
    sums: bool,
    finish: Callable[[list[Tensor]], Value],
) -> Value:
    """Return the slot that a movement of a bundle writes. (No closure: it would keep what was sent until then.)"""
    if not sums:
        return arriving.read(filled, number, dtype, in_place=True)
    rows = arriving.read(filled, number, dtype, in_place=False)
    return finish(list(rows.split(arriving.splits[number].counts)))


def _put(move: Move, incoming: Splits, call: Call, sums: bool, parts: list[Tensor]) -> Tensor:
    """Return the slot that is written, of what came and what stayed; no copy where that is the slot already."""
    if incoming.is_whole and len(parts) == 1:
        return parts[0]
    return placed(parts, incoming.rows, call.sizes.num_rows(move.target, call.rank), sums)


def _alone(movement: Movement, rank: int) -> tuple[dict[int, Tensor], dict[int, Tensor], Callable[[], Value]]:
    """Return messages by peer, buffers by peer, and what makes the slot, of a movement by itself.

    All messages are cut from one tensor, which is the value itself where its rows leave in order. All buffers are cut from
    one too, with the rows that stay copied to their place in it: it is the slot where rows arrive in order.
    """
    value, outgoing, incoming = movement.value, movement.outgoing, movement.incoming
    leaving = value if outgoing.is_whole and value.is_contiguous() else take(value, outgoing.rows)
    sends = dict(zip(outgoing.peers, leaving.split(outgoing.counts)))
    counts = [0 if movement.sums and peer == rank else n for peer, n in zip(incoming.peers, incoming.counts)]
    joined = value.new_empty(sum(counts), value.shape[1])
    parts = dict(zip(incoming.peers, joined.split(counts)))
    receives = _to_others(parts, rank)
    kept = sends.pop(rank, None)
    if rank in parts and kept is not None:
        if movement.sums:  # added up peer after peer, so that 16-bit rows are widened part by part
            parts[rank] = kept
        else:
            parts[rank].copy_(kept)
    arrived = list(parts.values()) if movement.sums and parts else [joined]
    return _to_others(sends, rank), receives, partial(movement.finish, arrived)


def _to_others(messages: Mapping[int, Tensor], rank: int) -> dict[int, Tensor]:
    """Return the messages that have bytes and go to, or come from, other ranks."""
    return {peer: message for peer, message in messages.items() if peer != rank and message.numel()}


def _as_rows(slot: Slot, environment: Environment, call: Call, *, travels: bool) -> Tensor:
    """Return a slot's value as rows to be sent. Of weights that do not travel, only what tells the width of a row."""
    value = environment[slot.name]
    if slot.kind is Kind.INDEX:
        return rows(value).int()  # `INDEX_BYTES` wide
    if slot.kind is not Kind.WEIGHT:
        return rows(value)
    if slot.layout.flow == "bias":
        return value if isinstance(value, Tensor) else value[0]
    if not travels:
        value = environment["w"]
    assert not isinstance(value, Tensor)
    return call.experts.pack(value) if travels else call.experts.pack(call.experts.first(value, 1))[:0]
