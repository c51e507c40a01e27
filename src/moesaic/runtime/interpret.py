"""The interpreter: one rank's run of a program, as a generator that stops where it needs other ranks.

It yields a `Transfer` to issue, and a `Ticket` to wait for, only when the data is read: whatever the program's order
puts in between overlaps. The same generator runs on loopback, on Gloo and on NCCL; only the driver differs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesaic.comm.wire import Ticket, Transfer
from moesaic.program.sizes import Message, Sizes
from moesaic.program.task import Op, Program, Slot, Task
from moesaic.program.validate import reduces

Environment = dict[str, Tensor]
Steps = Generator[Transfer | Ticket, Ticket | None, Environment]

ExpertFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows, gates (R,), ends) -> rows: the rank's experts."""
ExpertGradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(cotangent of the output, rows, gates (R, 1)) -> cotangents of rows and of gates (R,)."""


@dataclass
class Call:
    """What one rank brings to one run of a program."""

    rank: int
    sizes: Sizes
    experts: ExpertFunction | None = None
    """For a forward program."""
    expert_gradient: ExpertGradient | None = None
    """For a backward program."""
    first_tag: int = 0
    """Tags of this run's movements start here; runs in flight at once need ranges apart."""


@dataclass
class _Arriving:
    """A slot whose rows are under way."""

    ticket: Ticket
    out: Tensor
    parts: list[tuple[Message, Tensor]] = field(default_factory=list)
    """What becomes which rows, in ascending order of the source rank."""


def interpret(program: Program, values: Mapping[str, Tensor], call: Call) -> Steps:
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
    arriving: dict[str, _Arriving] = {}
    for number, task in enumerate(program.tasks):
        for name in task.reads:
            if name in arriving:
                yield arriving[name].ticket
                environment[name] = _settled(arriving.pop(name))
        if task.op is not Op.MOVE:
            environment.update(_compute(task, slots, environment, call))
            continue
        moved = _start_move(task, slots, environment, call, call.first_tag + number)
        if moved.ticket.transfer.sends or moved.ticket.transfer.receives:
            ticket = yield moved.ticket.transfer
            assert ticket is not None
            moved.ticket = ticket
            arriving[task.writes[0]] = moved
        else:
            environment[task.writes[0]] = _settled(moved)
    for name, moved in arriving.items():
        yield moved.ticket
        environment[name] = _settled(moved)
    return environment


def _start_move(task: Task, slots: Mapping[str, Slot], environment: Environment, call: Call, tag: int) -> _Arriving:
    """Gather what goes out, make buffers for what comes in, keep what stays."""
    source, target = slots[task.reads[0]], slots[task.writes[0]]
    value, sizes, rank = environment[source.name], call.sizes, call.rank
    reduce = reduces(source, target)
    move = (source.layout, target.layout, task.group, reduce)
    sends: dict[int, Tensor] = {}
    for peer in sizes.grid.group(rank, task.group):
        if peer != rank:
            for message in sizes.messages_to(peer, *move):
                if message.source == rank:
                    sends[peer] = _take(value, message.send_rows)
    parts: list[tuple[Message, Tensor]] = []
    receives: dict[int, Tensor] = {}
    for message in sizes.messages_to(rank, *move):
        if message.source == rank:
            parts.append((message, _take(value, message.send_rows)))
        else:
            receives[message.source] = value.new_empty(len(message.send_rows), value.shape[1])
            parts.append((message, receives[message.source]))
    dtype = torch.promote_types(value.dtype, torch.float32) if reduce else value.dtype
    out = torch.zeros(sizes.num_rows(target.layout, rank), value.shape[1], dtype=dtype, device=value.device)
    return _Arriving(Ticket(Transfer(rank, tag, sends, receives)), out, parts)


def _settled(moved: _Arriving) -> Tensor:
    """Put what arrived in place; rows that several ranks sent are summed in the order of the ranks."""
    dtype = moved.parts[0][1].dtype if moved.parts else moved.out.dtype
    for message, part in moved.parts:
        moved.out.index_add_(0, _index(message.receive_rows, part), part.to(moved.out.dtype))
    return moved.out.to(dtype)


def _compute(task: Task, slots: Mapping[str, Slot], environment: Environment, call: Call) -> Environment:
    """Run a task that needs no other rank; returns what it writes."""
    reads = [environment[name] for name in task.reads]
    target = slots[task.writes[0]]
    if task.op is Op.PERMUTE:
        tokens, index = reads
        return {target.name: tokens.index_select(0, _places(task.reads[0], task.reads[1], slots, index, call))}
    if task.op is Op.COMBINE:
        rows, index = reads
        accumulate = torch.promote_types(rows.dtype, torch.float32)
        out = torch.zeros(
            call.sizes.num_rows(target.layout, call.rank), rows.shape[1], dtype=accumulate, device=rows.device
        )
        places = _places(target.name, task.reads[1], slots, index, call)
        return {target.name: out.index_add_(0, places, rows.to(accumulate)).to(rows.dtype)}
    if task.op is Op.SCALE:
        size = len(call.sizes.grid.group(call.rank, task.group))
        return {target.name: reads[0] * float(size) ** task.power if task.power else reads[0]}
    if task.op is Op.TAKE:
        whole = slots[task.reads[0]].layout
        return {
            name: _take(reads[0], call.sizes.chunk_rows(slots[name].layout, whole, call.rank)) for name in task.writes
        }
    if task.op is Op.JOIN:
        joined = reads[0].new_empty(call.sizes.num_rows(target.layout, call.rank), reads[0].shape[1])
        for name, part in zip(task.reads, reads):
            joined[_index(call.sizes.chunk_rows(slots[name].layout, target.layout, call.rank), part)] = part
        return {target.name: joined}
    if task.op is Op.ADD:
        return {target.name: torch.stack(reads).sum(0)}
    if task.op is Op.EXPERT:
        assert call.experts is not None
        counts = call.sizes.rows_per_expert(target.layout, call.rank)
        ends = torch.from_numpy(counts.cumsum()).to(torch.int32).to(reads[0].device)
        return {target.name: call.experts(reads[0], reads[1].squeeze(1), ends)}
    assert task.op is Op.EXPERT_GRAD, f"{task.op.value} is not something to run"
    assert call.expert_gradient is not None
    rows, gates = call.expert_gradient(*reads)
    return {task.writes[0]: rows, task.writes[1]: gates.unsqueeze(1)}


def _places(tokens: str, index: str, slots: Mapping[str, Slot], value: Tensor, call: Call) -> Tensor:
    """Return each copy's token as a row of the tokens' slot."""
    bases = call.sizes.token_bases(slots[tokens].layout, slots[index].layout, call.rank)
    return value.squeeze(1) + _index(bases, value)


def _take(value: Tensor, rows: object) -> Tensor:
    return value.index_select(0, _index(rows, value))


def _index(rows: object, like: Tensor) -> Tensor:
    return torch.as_tensor(rows, device=like.device)
