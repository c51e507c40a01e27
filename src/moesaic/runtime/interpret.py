"""The interpreter: one rank's run of a program, as a generator that stops where it needs other ranks.

It yields a `Transfer` to issue, and a `Handle` to wait for, only when the data is read: whatever the program's order
puts in between overlaps. The same generator runs on loopback, on sockets and on NCCL; only the driver differs.

A slot is freed once nothing is left to read it, so that a rank holds what is under way and not all that it ever had. No
variable of the generator may hold a value meanwhile: it would live until the loop comes round again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass

from moesaic.comm.transport import Handle, Transfer
from moesaic.program.task import Op, Program, Slot, Task
from moesaic.runtime.call import Call, Environment, Value, rows
from moesaic.runtime.compute import compute
from moesaic.runtime.movements import prepare, start
from moesaic.runtime.packets import Packets, pack, start_hop, unpack
from moesaic.runtime.script import Step, script_of

Steps = Generator[Transfer | Handle, Handle | None, Environment]


@dataclass(frozen=True)
class _Arriving:
    """A slot that is under way."""

    flight: Handle | None
    """Of its messages, which other slots may travel in; None where there are none."""
    settle: Callable[[], Value | Packets]
    """Makes the slot's value of what arrived."""


def interpret(
    program: Program, values: Mapping[str, Value], call: Call, wanted: Collection[str] | None = None
) -> Steps:
    """Run a program for one rank.

    Args:
        program: what to run.
        values: its inputs by name; each is freed like any slot, where nobody else holds it.
        call: rank, sizes and experts.
        wanted: slots that are returned; every other one is freed after its last reading. None: all, and nothing is freed.

    Yields:
        a `Transfer`, answered by its `Handle`; a `Handle` to wait for.

    Returns:
        the values of the slots that are wanted.
    """
    script = script_of(program, None if wanted is None else frozenset(wanted))
    environment: Environment = dict(values)
    del values
    packets: dict[str, Packets] = {}
    arriving: dict[str, _Arriving] = {}

    def settle(name: str) -> Generator[Transfer | Handle, Handle | None, None]:
        flight = arriving[name].flight
        if flight is not None:
            if flight.transfer.lane == script.slowest:
                call.finish()  # while the messages are on their way
            yield flight
        landed = [name] if flight is None else [each for each, other in arriving.items() if other.flight is flight]
        for each in landed:  # all that came in the same messages, so that nothing holds their buffers any longer
            value = arriving.pop(each).settle()
            if isinstance(value, Packets):
                packets[each] = value
            else:
                environment[each] = value

    for step in script.steps:
        for name in step.reads:
            if name in arriving:
                yield from settle(name)
        call.finish(step.reads)
        if step.tasks[0].op in (Op.MOVE, Op.HOP):
            yield from _depart(step, script.slots, environment, packets, arriving, call)
        else:
            _compute(step.tasks[0], script.slots, environment, packets, call)
        for name in step.unread:
            environment.pop(name, None)
            packets.pop(name, None)
    while arriving:
        yield from settle(next(iter(arriving)))
    call.finish()
    return environment if wanted is None else {name: environment[name] for name in wanted}


def _depart(
    step: Step,
    slots: Mapping[str, Slot],
    environment: Environment,
    packets: Mapping[str, Packets],
    arriving: dict[str, _Arriving],
    call: Call,
) -> Generator[Transfer | Handle, Handle | None, None]:
    """Issue a transfer; what it brings is added to what is under way, or to the environment where nothing has to move."""
    task, tag = step.tasks[0], call.first_tag + step.number
    settles: Sequence[Callable[[], Value | Packets]]
    if task.op is Op.MOVE:
        if all(call.sizes.shapes.stays(move, call.rank) for move in step.moves):
            environment.update({each.writes[0]: environment[each.reads[0]] for each in step.tasks})
            return
        movements = [prepare(*each, slots, environment, call) for each in zip(step.tasks, step.moves)]
        transfer, settles = start(movements, task, call.rank, tag)
    else:
        hopping = start_hop(task, slots, [packets[name] for name in task.reads], call, tag)
        transfer, settles = hopping.transfer, [hopping.settle]
    has_messages = bool(transfer.sends or transfer.receives)
    flight = (yield transfer) if has_messages else None
    arriving.update({each.writes[0]: _Arriving(flight, settled) for each, settled in zip(step.tasks, settles)})


def _compute(
    task: Task, slots: Mapping[str, Slot], environment: Environment, packets: dict[str, Packets], call: Call
) -> None:
    """Run a task that needs no other rank."""
    if task.op is Op.PACK:
        packets[task.writes[0]] = pack(task, slots, rows(environment[task.reads[0]]), call)
    elif task.op is Op.UNPACK:
        held = [packets[name] for name in task.reads]
        environment[task.writes[0]] = unpack(task, slots, held, call)
    else:
        environment.update(compute(task, slots, environment, call))
