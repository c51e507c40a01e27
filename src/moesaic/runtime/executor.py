"""The executor: one rank's run of a program.

A program is walked through once to find its steps in order (`script_of`, kept). `interpret` runs them as a generator that stops
where it needs other ranks: it yields a `Transfer` to issue, and a `Handle` to wait for, only when the data is read, so that
whatever the program's order puts in between overlaps. The same generator runs on every transport; `drive` is what feeds it on
one that blocks.

A slot is freed once nothing is left to read it, so that a rank holds what is under way and not all that it ever had. No
variable of the generator may hold a value meanwhile: it would live until the loop comes round again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from moesaic.comm.transport import AbstractTransport, Handle, Transfer
from moesaic.comm.transport import Lane as TransportLane
from moesaic.program.bundles import bundles
from moesaic.program.shapes import Move
from moesaic.program.task import Op, Program, Slot, Task
from moesaic.program.validate import reduces
from moesaic.runtime.call import Call, Environment, Value, kept, rows
from moesaic.runtime.compute import compute, transport_lane
from moesaic.runtime.movements import prepare, start
from moesaic.runtime.packets import Packets, pack, start_hop, unpack


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tasks that start together."""

    number: int
    """Of the first task in the program: tags are counted by it."""
    tasks: tuple[Task, ...]
    """One, or movements that travel as one."""
    moves: tuple[Move, ...]
    """Of tasks that are movements, one each."""
    reads: tuple[str, ...]
    """Of all tasks."""
    unread: tuple[str, ...]
    """Slots that nothing reads any more and nobody wants."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program, ready to be run any number of times."""

    slots: Mapping[str, Slot]
    """By name."""
    steps: tuple[Step, ...]
    """In order."""

    @cached_property
    def slowest(self) -> TransportLane:
        """The lane whose messages are waited for longest: between nodes, where any cross."""
        lanes = {transport_lane(step.tasks[0]) for step in self.steps if step.tasks[0].op in (Op.MOVE, Op.HOP)}
        return "inter" if "inter" in lanes else "intra"


@lru_cache(maxsize=512)
def script_of(program: Program, wanted: frozenset[str] | None) -> Script:
    """Return a program's script.

    Args:
        program: what is to run.
        wanted: slots that are returned in the end; None for all of them.
    """
    slots = {slot.name: slot for slot in program.slots}
    numbers = bundles(program)
    splits = [tuple(program.tasks[number] for number in bundle) for bundle in numbers]
    steps = [
        Step(
            number=bundle[0],
            tasks=tasks,
            moves=tuple(_move(task, slots) for task in tasks if task.op is Op.MOVE),
            reads=tuple(name for task in tasks for name in task.reads),
            unread=tuple(unread),
        )
        for bundle, tasks, unread in zip(numbers, splits, _last_read(splits, wanted))
    ]
    return Script(slots=slots, steps=tuple(steps))


def _move(task: Task, slots: Mapping[str, Slot]) -> Move:
    source, target = slots[task.reads[0]], slots[task.writes[0]]
    return Move(source.layout, target.layout, task.group, reduces(source, target))


def _last_read(splits: Sequence[Sequence[Task]], wanted: frozenset[str] | None) -> list[list[str]]:
    """Return after each step which slots are read, or written, for the last time and not wanted."""
    found: list[list[str]] = [[] for _ in splits]
    if wanted is None:
        return found
    last: dict[str, int] = {}
    for number, tasks in enumerate(splits):
        for task in tasks:
            last.update(dict.fromkeys((*task.reads, *task.writes), number))
            if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
                last[kept(task.name)] = number
    for name, number in last.items():
        if name not in wanted and name != "w":  # stored anyway, and any movement of weights looks at their shape
            found[number].append(name)
    return found


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


def drive(steps: Steps, transport: AbstractTransport) -> Environment:
    """Run one rank to its end on a transport that blocks, as each process of a real world does."""
    answer: Handle | None = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            result: Environment = end.value
            return result
        answer = transport.issue(request) if isinstance(request, Transfer) else transport.wait(request)
        del request  # its messages need not live until the next one
