"""The interpreter: one rank's run of a program, as a generator that stops where it needs other ranks.

It yields a `Transfer` to issue, and a `Ticket` to wait for, only when the data is read: whatever the program's order
puts in between overlaps. The same generator runs on loopback, on Gloo and on NCCL; only the driver differs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.comm.wire import Ticket, Transfer, as_bytes
from moesaic.program.bundles import bundles
from moesaic.program.shapes import Move
from moesaic.program.task import Kind, Op, Program, Slot, Task
from moesaic.program.validate import reduces
from moesaic.runtime.call import Call, Environment, Value, rows
from moesaic.runtime.compute import compute, placed, take, wire_lane
from moesaic.runtime.parcels import Parcels, pack, start_hop, unpack

Steps = Generator[Transfer | Ticket, Ticket | None, Environment]


@dataclass
class _Flight:
    """A transfer under way."""

    ticket: Ticket
    unload: Callable[[], None]
    """Puts what arrived where each movement of the transfer wants it."""
    has_landed: bool = False


@dataclass
class _Arriving:
    """A slot that is under way."""

    flight: _Flight
    settle: Callable[[], Value | Parcels]
    """Makes the slot's value of what arrived."""


def interpret(program: Program, values: Mapping[str, Value], call: Call) -> Steps:
    """Run a program for one rank.

    Args:
        program: what to run.
        values: its inputs by name.
        call: rank, sizes and experts.

    Yields:
        a `Transfer`, answered by its `Ticket`; a `Ticket` to wait for.

    Returns:
        every slot's value.
    """
    slots = {slot.name: slot for slot in program.slots}
    environment: Environment = dict(values)
    parcels: dict[str, Parcels] = {}
    arriving: dict[str, _Arriving] = {}

    def settle(name: str) -> Generator[Transfer | Ticket, Ticket | None, None]:
        arrived = arriving.pop(name)
        flight = arrived.flight
        if not flight.has_landed:
            if flight.ticket.transfer.sends or flight.ticket.transfer.receives:
                yield flight.ticket
            flight.unload()
            flight.has_landed = True
        value = arrived.settle()
        if isinstance(value, Parcels):
            parcels[name] = value
        else:
            environment[name] = value

    for bundle in bundles(program):
        tasks = [program.tasks[number] for number in bundle]
        for name in (name for task in tasks for name in task.reads):
            if name in arriving:
                yield from settle(name)
        task, tag = tasks[0], call.first_tag + bundle[0]
        if task.op in (Op.MOVE, Op.HOP):
            if task.op is Op.MOVE:
                flight, settles = _start_moves(
                    [_prepare(each, slots, environment, call) for each in tasks], task, call.rank, tag
                )
            else:
                flight, settles = _start_hop(task, slots, [parcels[name] for name in task.reads], call, tag)
            if flight.ticket.transfer.sends or flight.ticket.transfer.receives:
                ticket = yield flight.ticket.transfer
                assert ticket is not None
                flight.ticket = ticket
            arriving.update({each.writes[0]: _Arriving(flight, settled) for each, settled in zip(tasks, settles)})
        elif task.op is Op.PACK:
            parcels[task.writes[0]] = pack(task, slots, rows(environment[task.reads[0]]), call)
        elif task.op is Op.UNPACK:
            held = [parcels[name] for name in task.reads]
            environment[task.writes[0]] = unpack(task, slots, held, call)
        else:
            environment.update(compute(task, slots, environment, call))
    for name in list(arriving):
        yield from settle(name)
    return environment


def _start_hop(
    task: Task, slots: Mapping[str, Slot], held: list[Parcels], call: Call, tag: int
) -> tuple[_Flight, list[Callable[[], Value | Parcels]]]:
    hopping = start_hop(task, slots, held, call, tag)
    return _Flight(Ticket(hopping.transfer), _nothing), [hopping.settle]


@dataclass
class _Movement:
    """What one movement sends and receives, by peer, and what makes the slot's value of it."""

    sends: dict[int, Tensor]
    receives: dict[int, Tensor]
    settle: Callable[[], Value | Parcels]


def _start_moves(
    movements: list[_Movement], task: Task, rank: int, tag: int
) -> tuple[_Flight, list[Callable[[], Value | Parcels]]]:
    """Start movements as one transfer: their bytes stand one behind the other, wide numbers first, so that all are aligned."""
    settles = [movement.settle for movement in movements]
    if len(movements) == 1:
        transfer = Transfer(rank, tag, movements[0].sends, movements[0].receives, wire_lane(task))
        return _Flight(Ticket(transfer), _nothing), settles
    leaving, coming = (_by_peer([getattr(m, side) for m in movements]) for side in ("sends", "receives"))
    sends = {peer: torch.cat([as_bytes(part) for part in parts]) for peer, parts in leaving.items()}
    sizes = {peer: [part.numel() * part.element_size() for part in parts] for peer, parts in coming.items()}
    receives = {
        peer: torch.empty(sum(sizes[peer]), dtype=torch.uint8, device=parts[0].device) for peer, parts in coming.items()
    }

    def unload() -> None:
        for peer, parts in coming.items():
            for part, arrived in zip(parts, receives[peer].split(sizes[peer])):
                part.copy_(arrived.view(part.dtype).view_as(part))

    return _Flight(Ticket(Transfer(rank, tag, sends, receives, wire_lane(task))), unload), settles


def _by_peer(sides: list[dict[int, Tensor]]) -> dict[int, list[Tensor]]:
    """Return what several movements have for each peer, wide numbers first."""
    peers = sorted({peer for side in sides for peer in side})
    found = {peer: [side[peer] for side in sides if peer in side] for peer in peers}
    return {peer: sorted(parts, key=lambda part: -part.element_size()) for peer, parts in found.items()}


def _nothing() -> None:
    """Leave what arrived where it is."""


def _prepare(task: Task, slots: Mapping[str, Slot], environment: Environment, call: Call) -> _Movement:
    """Gather what goes out, make buffers for what comes in, keep what stays."""
    source, target = slots[task.reads[0]], slots[task.writes[0]]
    sizes, rank = call.sizes, call.rank
    move = Move(source.layout, target.layout, task.group, reduces(source, target))
    outgoing, incoming = sizes.outgoing(move, rank), sizes.incoming(move, rank)
    held = environment[source.name]
    value = _as_rows(source, environment, call, travels=bool(len(outgoing.rows)))
    experts = sizes.num_held(target.layout, rank) if target.layout.flow == "weights" else None
    leaving = dict(zip(outgoing.peers, take(value, outgoing.rows).split(outgoing.counts)))
    arrived = value.new_empty(len(incoming.rows), value.shape[1])
    buffers = dict(zip(incoming.peers, arrived.split(incoming.counts)))
    if rank in buffers:
        buffers.pop(rank).copy_(leaving.pop(rank))
    sends = {peer: part for peer, part in leaving.items() if len(part)}
    receives = {peer: buffer for peer, buffer in buffers.items() if len(buffer)}

    def settle() -> Value:
        if experts is not None and move.reduce and not len(incoming.rows):
            return ()  # nobody has computed anything for this rank's experts: no gradient, rather than one of zeros
        if experts == 0:
            assert not isinstance(held, Tensor)
            return call.experts.first(held, 0)
        out = placed(arrived, incoming.rows, sizes.num_rows(target.layout, rank), move.reduce)
        return out if experts is None else call.experts.unpack(out, experts)

    return _Movement(sends, receives, settle)


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
