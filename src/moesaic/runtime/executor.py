"""The executor runs programs on one rank, and wraps a layer's dispatch, experts and combine in one
differentiable function.

`script_of` turns a program into an ordered list of steps, once. `interpret` runs the steps as a
generator that pauses where it needs other ranks: it yields a `Transfer` to issue, or a `Handle` to
wait for. It waits only when the data is read, so tasks in between overlap with the messages. The
same generator runs on every transport; `drive` feeds it on a blocking transport.

A slot is a named value of a program; a task reads and writes slots. A step is one task, or
movements that are sent together. A slot is arriving from the step that sends its messages to the
first step that reads it, before which the messages land (`program/life.py`).

A program with messages may also pause: after its first messages were issued, and after the last
ones. While a micro-batch is paused, another one computes (`moesaic.in_flight`). Where a program
pauses depends on the program alone, so all ranks pause alike, also those without messages.

A slot is freed once no later step reads it, which keeps a rank's memory small. Therefore no
variable of the generator may hold a value between steps: the value would live until the next
iteration.

`run_program` is one autograd Function per call, with its state on the call. So several layers in
flight, nested layers, gradient accumulation and recomputation do not interfere. Parameters are
inputs, so hooks and FSDP see them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.comm.transport import AbstractTransport, Handle, Transfer
from moesaic.comm.transport import Lane as TransportLane
from moesaic.experts.experts import Weights
from moesaic.program.compile import Compiled
from moesaic.program.layouts import Move, move_of
from moesaic.program.life import Life, Step, kept, life_of
from moesaic.program.sizes import Runs
from moesaic.program.task import Kind, Lane, Op, Program, Slot, Task
from moesaic.program.transpose import cotangent, saved
from moesaic.runtime.messages import Packets, pack, start, start_hop, unpack
from moesaic.runtime.tasks import Call, Environment, IndexedRows, Value, compute, parameters, tables


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program's steps, ready to run any number of times."""

    slots: Mapping[str, Slot]
    """The program's slots by name."""
    gathered: frozenset[str]
    """Slots whose rows may stay where they lie, since all that reads them gathers."""
    life: Life
    """The steps, in order, with the slots that each frees."""
    moves: tuple[tuple[Move, ...], ...]
    """By step, the movements of those tasks that are movements, one each."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order."""
        return self.life.steps

    @property
    def slowest(self) -> TransportLane:
        """The transport lane whose messages take longest."""
        return "intra" if self.life.slowest is Lane.INTRA else "inter"


@lru_cache(maxsize=512)
def script_of(program: Program, outputs: frozenset[str] | None) -> Script:
    """Return a program's script.

    Args:
        program: the program to run.
        outputs: slots that the run returns; None for all of them.
    """
    slots = {slot.name: slot for slot in program.slots}
    life = life_of(program, outputs)
    moves = tuple(
        tuple(move_of(task, slots) for task in step.tasks if task.op is Op.MOVE)
        for step in life.steps
    )
    return Script(slots=slots, gathered=_gathered(program, outputs), life=life, moves=moves)


_GATHER = (Op.COMBINE, Op.EXPERT, Op.EXPERT_GRAD, Op.MOVE, Op.PACK, Op.TAKE)
"""Tasks that read rows through an index as fast as in order."""


def _gathered(program: Program, outputs: frozenset[str] | None) -> frozenset[str]:
    """Return the slots of rows that only tasks of `_GATHER` read. A run that returns all slots
    returns them in order."""
    if outputs is None:
        return frozenset()
    names = {slot.name for slot in program.slots if slot.kind is Kind.ROWS}
    for task in program.tasks:
        if task.op not in _GATHER:
            names.difference_update(task.reads)
    return frozenset(names)


class Pause(Enum):
    """What a program yields where another micro-batch may compute."""

    PAUSE = "pause"


Steps = Generator[Transfer | Handle | Pause, Handle | None, Environment]


@dataclass(frozen=True)
class _Arriving:
    """The slots that one step's messages bring."""

    handle: Handle | None
    """The transfer of the messages; None if there are none."""
    builders: Mapping[str, Callable[[], Value | Packets]]
    """By slot, the function that builds its value from the received messages."""


def interpret(
    program: Program,
    values: Mapping[str, Value],
    call: Call,
    outputs: Collection[str] | None = None,
    *,
    pauses: bool = False,
) -> Steps:
    """Run a program for one rank.

    Args:
        values: the inputs of the program by name. Each is freed like any slot, unless the caller
            still references it.
        call: rank, sizes and experts.
        outputs: slots to return; every other slot is freed after it is last read. None: return all
            slots and free none.
        pauses: pause at the program's `Life.pauses`.

    Yields:
        a `Transfer`, to which the driver answers with a `Handle`; a `Handle` to wait for; or a
        `Pause`.

    Returns:
        the values of these slots.
    """
    script = script_of(program, None if outputs is None else frozenset(outputs))
    state = _RankState(script, call, dict(values))
    del values
    for place, step in enumerate(script.steps):
        if pauses and place in script.life.pauses:
            call.finish()  # while the messages are in flight
            yield Pause.PAUSE
        for sender in step.lands:
            yield from state.land(sender)
        call.finish(step.reads)
        if step.sends:
            yield from state.issue(place)
        else:
            state.run_local(step.tasks[0])
        state.free(step.dies)
    for sender in script.life.lands:
        yield from state.land(sender)
    call.finish()
    environment = state.environment
    return environment if outputs is None else {name: environment[name] for name in outputs}


@dataclass
class _RankState:
    """What a rank holds while it runs a program."""

    script: Script
    call: Call
    environment: Environment
    """The values of the slots that are here."""
    packets: dict[str, Packets] = field(default_factory=dict)
    """The packets of slots that an all-to-all passes on, hop by hop."""
    arriving: dict[int, _Arriving] = field(default_factory=dict)
    """By the step that sends them, the slots that are being received."""

    def land(self, sender: int) -> Generator[Transfer | Handle, Handle | None, None]:
        """Wait for the slots that a step's messages bring, and build them. There is nothing to do
        if their rows stayed on this rank.

        Args:
            sender: the place of the step in the script.
        """
        if sender not in self.arriving:
            return
        handle = self.arriving[sender].handle
        if handle is not None:
            if handle.transfer.lane == self.script.slowest:
                self.call.finish()  # while the messages are in flight
            yield handle
        builders = dict(self.arriving.pop(sender).builders)
        for name in list(builders):
            value = builders.pop(name)()  # so that no reference to the buffers remains
            if isinstance(value, Packets):
                self.packets[name] = value
            else:
                self.store(name, value)

    def issue(self, place: int) -> Generator[Transfer | Handle, Handle | None, None]:
        """Issue the transfer of a step, whose slots are then arriving. Slots whose rows stay on
        this rank are here at once.

        Args:
            place: of the step in the script.
        """
        step = self.script.steps[place]
        moves = self.script.moves[place]
        task = step.tasks[0]
        slots = self.script.slots
        call = self.call
        tag = call.first_tag + step.number
        builders: Sequence[Callable[[], Value | Packets]]  # of the slots that the step brings
        if task.op is Op.MOVE:
            if all(call.sizes.shapes.stays(move, call.rank) for move in moves):
                for each in step.tasks:
                    self.environment[each.writes[0]] = self.environment[each.reads[0]]
                return
            transfer, builders = start(step.tasks, moves, slots, self.environment, call, tag)
        else:
            packets = [self.packets[name] for name in task.reads]
            transfer, builder = start_hop(task, slots, packets, call, tag)
            builders = [builder]
        handle = None
        if transfer.sends or transfer.receives:
            handle = yield transfer
        self.arriving[place] = _Arriving(handle, dict(zip(step.born, builders)))

    def run_local(self, task: Task) -> None:
        """Run a task that needs no other rank, and store its result."""
        slots = self.script.slots
        if task.op is Op.PACK:
            value = self.environment[task.reads[0]]
            assert not isinstance(value, tuple)
            self.packets[task.writes[0]] = pack(task, slots, value, self.call)
        elif task.op is Op.UNPACK:
            received = [self.packets[name] for name in task.reads]
            self.store(task.writes[0], unpack(task, slots, received, self.call))
        else:
            for name, result in compute(task, slots, self.environment, self.call).items():
                self.store(name, result)

    def store(self, name: str, value: Value) -> None:
        """Store a slot's value; move its rows into order unless all that reads the slot gathers."""
        if isinstance(value, IndexedRows) and name not in self.script.gathered:
            value = value.in_order()
        self.environment[name] = value

    def free(self, names: Iterable[str]) -> None:
        """Forget slots that nothing reads any more."""
        for name in names:
            self.environment.pop(name, None)
            self.packets.pop(name, None)


def drive(steps: Steps, transport: AbstractTransport) -> Environment:
    """Run one rank's program to its end on a blocking transport, as in a process of its own; return
    its result. If it pauses, return {}: a further call goes on."""
    answer: Handle | None = None
    while True:
        started = perf_counter()
        try:
            request = steps.send(answer)
        except StopIteration as end:
            transport.compute += perf_counter() - started
            result: Environment = end.value
            return result
        now = perf_counter()
        transport.compute += now - started
        if isinstance(request, Pause):
            return {}
        if isinstance(request, Transfer):
            answer = transport.issue(request)
        else:
            answer = transport.wait(request)
            transport.note_wait(request.transfer, perf_counter() - now)
        del request  # so that its messages are freed before the next request


Layout = list[tuple[str, int, Callable[[Sequence[Tensor]], Value]]]
"""For each slot: its name, the number of tensors in its value, and the function that makes the
value of them."""


@dataclass
class LayerRun:
    """One rank's run of one call of a layer: the compiled plan, the transport, and the call's
    inputs."""

    compiled: Compiled
    transport: AbstractTransport
    call: Call
    """The inputs of the call, with the forward program's tags."""
    indices: Mapping[str, Tensor]
    """The program's INDEX inputs by name."""
    backward_tag: int = 0
    """The first tag of the backward program."""
    layer: int | None = None
    """The layer's number in order of creation; None if it is not known."""

    @property
    def backward_in_words(self) -> str:
        """What this rank does in the backward pass of the call; "" if that is not known."""
        return "" if self.layer is None else f"the backward pass of layer {self.layer}"

    def take_tags(self) -> None:
        """Reserve the tags of both programs. All ranks do so for the same calls in the same
        order."""
        num_forward = len(self.compiled.forward.tasks)
        num_backward = len(self.compiled.backward.tasks)
        self.call.first_tag = self.transport.take_tags(num_forward + num_backward)
        self.backward_tag = self.call.first_tag + num_forward

    def with_new_tags(self) -> LayerRun:
        """Return the run for a further backward pass of the same graph."""
        tag = self.transport.take_tags(len(self.compiled.backward.tasks))
        return replace(self, backward_tag=tag)


def run_program(
    run: LayerRun, x: Tensor, gates: Tensor, sharded: Weights, common: Weights
) -> Tensor:
    """Run dispatch, experts and combine: (tokens, dim) -> (tokens, dim); differentiable.

    All ranks call it in the same order, including ranks without tokens.

    Args:
        run: the call.
        x: (tokens, dim), the program's `x`.
        gates: (rows, 1) routing weights, in the order of the program's `gates`.
        sharded: the parameters of this rank's experts that etp splits: this rank's shards.
        common: the parameters that all shards of an expert have in common.
    """
    weights = (*sharded, *common)
    y: Tensor = RunProgram.apply(run, torch.is_grad_enabled(), len(sharded), x, gates, *weights)
    return y


class RunProgram(torch.autograd.Function):
    """See `run_program`."""

    @staticmethod
    def forward(
        ctx: Any,
        run: LayerRun,
        has_grad: bool,
        num_sharded: int,
        x: Tensor,
        gates: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Run the forward program, and keep what the backward program reads if there will be a
        backward pass."""
        needs_backward = has_grad and any(ctx.needs_input_grad)
        names = kept_names(run.compiled.logical) if needs_backward else ()
        inputs = inputs_of(run, x, gates, weights[:num_sharded], weights[num_sharded:])
        environment = drive(forward_steps(run, inputs, names), run.transport)
        flat, ctx.layout = flattened(environment, names)
        ctx.save_for_backward(*flat)
        ctx.run = run
        ctx.was_run = False
        y = environment["y"]
        assert isinstance(y, Tensor)
        # `.data` instead of a view, since FSDP2's hooks are lost when a view is changed in place.
        # No saved tensor shares its memory: every program ends with a combine, which allocates its
        # result.
        return y.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward program."""
        run: LayerRun = ctx.run
        # a peer may still be receiving messages of the previous backward pass of this graph
        if ctx.was_run:
            run = run.with_new_tags()
        ctx.was_run = True
        kept_values = by_name(ctx.saved_tensors, ctx.layout)
        # unless the graph is retained, nothing else references them
        ctx.maybe_clear_saved_tensors()
        # None for `run`, `has_grad` and `num_sharded`
        return None, None, None, *run_backward(run, kept_values, dy)


def forward_steps(
    run: LayerRun, inputs: Environment, keeps: Sequence[str], *, pauses: bool = False
) -> Steps:
    """Return the run of the forward program from its inputs, which are emptied; its result is y and
    what the backward program reads."""
    x = inputs["x"]
    assert isinstance(x, Tensor)
    upload_tables(run, x.device)
    values = dict(inputs)
    inputs.clear()
    run_steps = partial(interpret, pauses=True) if pauses else interpret
    return run_steps(run.compiled.forward, values, run.call, {*keeps, "y"})


def upload_tables(run: LayerRun, device: torch.device) -> None:
    """Copy all tables that both programs of a call read to the device, in one transfer."""
    if device.type == "cpu":
        return
    tables_of_tasks = []
    for program in (run.compiled.forward, run.compiled.backward):
        script = script_of(program, None)  # None: whatever slots the run will return
        for step in script.steps:
            for task in step.tasks:
                tables_of_tasks.append(tables(task, script.slots, run.call))
    run.call.indices.upload(chain.from_iterable(tables_of_tasks), device)


def inputs_of(
    run: LayerRun, x: Tensor, gates: Tensor, sharded: Weights, common: Weights
) -> Environment:
    """Return the forward program's inputs by name."""
    values: Environment = {"x": x, "gates": gates, **run.indices, "w": sharded}
    if common:
        values["b"] = common
    return values


@lru_cache(maxsize=256)
def kept_names(logical: Program) -> tuple[str, ...]:
    """Return what a plan's backward program reads: slots, and the expert tasks' activations."""
    experts = [task.name for task in logical.tasks if task.op is Op.EXPERT]
    return *saved(logical), *map(kept, experts)


def run_backward(run: LayerRun, values: Environment, dy: Tensor) -> tuple[Tensor, ...]:
    """Run the backward program from the kept values and dy, (tokens, dim); return the gradients of
    x, gates and all parameters. `values` is emptied, so that each value can be freed as soon as it
    was read."""
    environment = drive(backward_steps(run, values, dy), run.transport)
    run.transport.doing = ""
    return gradients_of(environment)


def backward_steps(
    run: LayerRun, values: Environment, dy: Tensor, *, pauses: bool = False
) -> Steps:
    """Return the run of the backward program from the kept values, which are emptied, and dy."""
    program = run.compiled.backward
    run.transport.doing = run.backward_in_words
    values[cotangent("y")] = dy.contiguous()
    call = replace(run.call, first_tag=run.backward_tag)
    call.known.update(run.call.known)
    run.call.known.clear()  # unless the graph is retained, nothing needs it any more
    inputs = dict(values)
    values.clear()  # a caller's frame may still hold the dict
    run_steps = partial(interpret, pauses=True) if pauses else interpret
    return run_steps(program, inputs, call, program.outputs)


def gradients_of(environment: Environment) -> tuple[Tensor, ...]:
    """Return the gradients of x, gates and all parameters from the result of a backward program."""
    d_common = parameters(environment.get(cotangent("b"), ()))
    d_x, d_gates, d_sharded = (environment[cotangent(name)] for name in ("x", "gates", "w"))
    assert isinstance(d_x, Tensor)
    assert isinstance(d_gates, Tensor)
    assert isinstance(d_sharded, tuple)
    return d_x, d_gates, *d_sharded, *d_common


def flattened(values: Environment, names: Sequence[str]) -> tuple[list[Tensor], Layout]:
    """Return the tensors of some slots in one list, and the layout from which `by_name` restores
    them."""
    flat: list[Tensor] = []
    layout: Layout = []
    for name in names:
        parts, make = _parts(values[name])
        layout.append((name, len(parts), make))
        flat += parts
    return flat, layout


def _parts(value: Value) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Value]]:
    """Return the tensors of a value, and the function that makes the value of them."""
    if isinstance(value, IndexedRows):
        return (value.source, value.index), partial(_indexed_rows, value.runs)
    if isinstance(value, tuple):
        return value, tuple
    return (value,), _only_tensor


def _indexed_rows(runs: Runs | None, parts: Sequence[Tensor]) -> IndexedRows:
    """Return the rows whose source and index are the two parts."""
    source, index = parts
    return IndexedRows(source, index, runs)


def _only_tensor(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor that is the only part."""
    return parts[0]


def by_name(flat: Sequence[Tensor], layout: Layout) -> Environment:
    """Return the slots by name; the inverse of `flattened`."""
    parts = iter(flat)
    return {name: make([next(parts) for _ in range(length)]) for name, length, make in layout}
