"""The interpreter: one rank's run of a program, as a generator that stops where it needs other ranks.

It yields a `Transfer` to issue, and a `Ticket` to wait for, only when the data is read: whatever the program's order
puts in between overlaps. The same generator runs on loopback, on Gloo and on NCCL; only the driver differs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from moesaic.comm.wire import Ticket, Transfer
from moesaic.program.bundles import bundles
from moesaic.program.task import Op, Program
from moesaic.runtime.call import Call, Environment, Value, rows
from moesaic.runtime.compute import compute
from moesaic.runtime.movements import prepare, start
from moesaic.runtime.parcels import Parcels, pack, start_hop, unpack

Steps = Generator[Transfer | Ticket, Ticket | None, Environment]


@dataclass
class _Flight:
    """A transfer under way."""

    ticket: Ticket
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
        if not arrived.flight.has_landed:
            yield arrived.flight.ticket
            arrived.flight.has_landed = True
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
        settles: Sequence[Callable[[], Value | Parcels]]
        if task.op in (Op.MOVE, Op.HOP):
            if task.op is Op.MOVE:
                movements = [prepare(each, slots, environment, call) for each in tasks]
                transfer, settles = start(movements, task, call.rank, tag)
            else:
                hopping = start_hop(task, slots, [parcels[name] for name in task.reads], call, tag)
                transfer, settles = hopping.transfer, [hopping.settle]
            has_messages = bool(transfer.sends or transfer.receives)
            ticket = (yield transfer) if has_messages else Ticket(transfer)
            assert ticket is not None
            flight = _Flight(ticket, has_landed=not has_messages)
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
