"""The interpreter: one rank's run of a program, as a generator that stops where it needs other ranks.

It yields a `Transfer` to issue, and a `Ticket` to wait for, only when the data is read: whatever the program's order
puts in between overlaps. The same generator runs on loopback, on Gloo and on NCCL; only the driver differs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from torch import Tensor

from moesaic.comm.wire import Ticket, Transfer
from moesaic.program.shapes import Move
from moesaic.program.task import Kind, Op, Program, Slot, Task
from moesaic.program.validate import reduces
from moesaic.runtime.call import Call, Environment, Value, rows
from moesaic.runtime.compute import compute, placed, take, wire_lane
from moesaic.runtime.parcels import Parcels, pack, start_hop, unpack

Steps = Generator[Transfer | Ticket, Ticket | None, Environment]


@dataclass
class _Arriving:
    """A slot that is under way."""

    ticket: Ticket
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
        if arrived.ticket.transfer.sends or arrived.ticket.transfer.receives:
            yield arrived.ticket
        value = arrived.settle()
        if isinstance(value, Parcels):
            parcels[name] = value
        else:
            environment[name] = value

    for number, task in enumerate(program.tasks):
        for name in task.reads:
            if name in arriving:
                yield from settle(name)
        if task.op in (Op.MOVE, Op.HOP):
            tag = call.first_tag + number
            moved = _start_move(task, slots, environment, call, tag) if task.op is Op.MOVE else None
            moved = moved or _start_hop(task, slots, [parcels[name] for name in task.reads], call, tag)
            if moved.ticket.transfer.sends or moved.ticket.transfer.receives:
                ticket = yield moved.ticket.transfer
                assert ticket is not None
                moved.ticket = ticket
            arriving[task.writes[0]] = moved
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


def _start_hop(task: Task, slots: Mapping[str, Slot], held: list[Parcels], call: Call, tag: int) -> _Arriving:
    hopping = start_hop(task, slots, held, call, tag)
    return _Arriving(Ticket(hopping.transfer), hopping.settle)


def _start_move(task: Task, slots: Mapping[str, Slot], environment: Environment, call: Call, tag: int) -> _Arriving:
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

    return _Arriving(Ticket(Transfer(rank, tag, sends, receives, wire_lane(task))), settle)


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
