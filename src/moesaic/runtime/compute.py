"""The tasks that need no other rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.comm.transport import Lane as TransportLane
from moesaic.experts.experts import DeferredWgrad, Weights
from moesaic.program.task import Kind, Lane, Op, Slot, State, Task
from moesaic.runtime.call import Call, Environment, Value, kept, rows
from moesaic.runtime.indexed import Indexed

Slots = Mapping[str, Slot]


def compute(task: Task, slots: Slots, environment: Environment, call: Call) -> Environment:
    """Run a task that needs no other rank; returns what it writes."""
    reads = [environment[name] for name in task.reads]
    if task.op is Op.EXPERT:
        return _expert(task, slots, reads, call)
    if task.op is Op.EXPERT_GRAD:
        return _expert_grad(task, slots, reads, environment, call)
    if task.op is Op.ADD:
        return {task.writes[0]: _sum(reads)}
    return dict(zip(task.writes, _rows_task(task, slots, list(map(rows, reads)), call)))


def transport_lane(task: Task) -> TransportLane:
    """Return the lane of the transport that a movement takes."""
    return "intra" if task.lane is Lane.INTRA else "inter"


def take(value: Tensor, places: np.ndarray) -> Tensor:
    """Return rows by their places, contiguous; the value itself where these are all its rows in order."""
    if value.is_contiguous() and in_order(places, len(value)):
        return value
    return value.index_select(0, index_like(places, value))


def placed(parts: Sequence[Tensor], places: np.ndarray, num_rows: int, sums: bool) -> Tensor:
    """Return rows put in their places, which are all filled; with `sums` rows of one place are summed in order.

    16-bit rows are summed in float32. Rows that come in order are returned as they are.

    Args:
        parts: tensors of rows, at least one.
        places: (rows of all parts,) int64.
        num_rows: of the result.
        sums: several rows may have one place.
    """
    if in_order(places, num_rows):
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if not sums and len(parts) == 1:  # to gather takes a quarter of the time of putting row after row in its place
        inverse = np.empty_like(places)
        inverse[places] = np.arange(len(places))
        return parts[0].index_select(0, index_like(inverse, parts[0]))
    cuts = index_like(places, parts[0]).split([len(part) for part in parts])
    dtype = torch.promote_types(parts[0].dtype, torch.float32) if sums else parts[0].dtype
    make = torch.zeros if sums else torch.empty
    out = make(num_rows, parts[0].shape[1], dtype=dtype, device=parts[0].device)
    for part, cut in zip(parts, cuts):
        if sums:
            out.index_add_(0, cut, part.to(dtype))
        else:
            out.index_copy_(0, cut, part)
    return out.to(parts[0].dtype)


def in_order(places: np.ndarray, num_rows: int) -> bool:
    """Whether places are 0, 1, ... num_rows - 1: nothing has to be copied then."""
    return len(places) == num_rows and bool((places[1:] > places[:-1]).all()) and (not num_rows or places[0] == 0)


def index_like(places: np.ndarray, like: Tensor) -> Tensor:
    """Return numpy places as a tensor where `like` is."""
    return torch.as_tensor(places, device=like.device)


def _rows_task(task: Task, slots: Slots, reads: list[Tensor], call: Call) -> list[Tensor]:
    target = slots[task.writes[0]]
    if task.op is Op.PERMUTE:
        at = _indexed(task.reads[0], task.reads[1], slots, reads[1], call)
        taken = reads[0].index_select(0, at.places)
        return [taken if at.is_full is None else taken.masked_fill(~at.is_full, 0)]  # 0 * nan is nan
    if task.op is Op.COMBINE:
        at = _indexed(target.name, task.reads[1], slots, reads[1], call)
        values = reads[0] if at.is_full is None else reads[0].masked_fill(~at.is_full, 0)
        return [at.sum(values)]
    if task.op is Op.SCALE:
        size = len(call.sizes.grid.group(call.rank, task.group))
        return [reads[0] * float(size) ** task.power if task.power else reads[0]]
    if task.op is Op.TAKE:
        whole = slots[task.reads[0]].layout
        return [take(reads[0], call.sizes.part_rows(slots[name].layout, whole, call.rank)) for name in task.writes]
    assert task.op is Op.JOIN, f"{task.op.value} is not something to run"
    joined = reads[0].new_empty(call.sizes.num_rows(target.layout, call.rank), reads[0].shape[1])
    for name, part in zip(task.reads, reads):
        joined[index_like(call.sizes.part_rows(slots[name].layout, target.layout, call.rank), part)] = part
    return [joined]


def _sum(values: list[Value]) -> Value:
    """Add rows, or parameters one by one, of which () stands for none."""
    if all(isinstance(value, Tensor) for value in values):
        return _added(list(map(rows, values)))
    given = [value for value in (_parameters(value) for value in values) if value]
    return given[0] if len(given) == 1 else tuple(_added(list(parameters)) for parameters in zip(*given))


def _added(values: list[Tensor]) -> Tensor:
    """Return the sum of tensors, of 16-bit ones by way of float32, which a stack's sum does by itself."""
    if values[0].element_size() < 4:
        return torch.stack(values).sum(0)
    out = values[0] + values[1] if len(values) > 1 else values[0]
    for value in values[2:]:
        out += value
    return out


def _indexed(tokens: str, index: str, slots: Slots, value: Tensor, call: Call) -> Indexed:
    """Return each copy's token as a row of the tokens' slot; worked out once for dispatch, combine and backward."""
    layout = slots[tokens].layout
    key = (layout, slots[index].layout, value.data_ptr(), len(value))
    found: Indexed | None = call.known.get(key)
    if found is None:
        bases = call.sizes.token_bases(layout, slots[index].layout, call.rank)
        num_tokens = call.sizes.num_rows(layout, call.rank)
        found = call.known[key] = Indexed.of(value, bases, num_tokens, has_empty=call.has_empty_rows)
    return found


def _expert(task: Task, slots: Slots, reads: list[Value], call: Call) -> Environment:
    tokens, gates = rows(reads[0]), rows(reads[1]).squeeze(1)
    sharded, common = _weights(reads[2:])
    ends, shards = _ends(slots[task.reads[0]], tokens, call), _shards(slots[task.reads[0]], call)
    if not len(ends):  # a rank that helps nobody
        return {task.writes[0]: tokens, kept(task.name): ()}
    if call.weight_first:
        tokens = tokens * gates.to(tokens.dtype).unsqueeze(1)
    gate = None if call.weight_first else gates
    out, activations = call.experts.run(sharded, common, tokens, gate, ends, shards)
    return {task.writes[0]: out, kept(task.name): activations}


def _expert_grad(task: Task, slots: Slots, reads: list[Value], environment: Environment, call: Call) -> Environment:
    dy, tokens, gates = rows(reads[0]), rows(reads[1]), rows(reads[2]).squeeze(1)
    sharded, common = _weights(reads[3:])
    ends, shards = _ends(slots[task.reads[1]], tokens, call), _shards(slots[task.reads[1]], call)
    if not len(ends):
        return dict(zip(task.writes, (dy, gates.unsqueeze(1), *reads[3:])))
    activations = environment[kept(task.name)]
    assert not isinstance(activations, Tensor)
    seen = tokens * gates.to(tokens.dtype).unsqueeze(1) if call.weight_first else tokens
    gate = None if call.weight_first else gates
    deferred_wgrad: DeferredWgrad | None = [] if call.may_defer_wgrad else None
    d_rows, d_gates, *d_weights = call.experts.gradients(
        sharded, common, seen, gate, ends, activations, dy.contiguous(), shards, deferred_wgrad
    )
    if deferred_wgrad:
        call.deferred_wgrad[task.writes[2]] = deferred_wgrad
    if d_gates is None:
        d_gates = (d_rows * tokens).sum(1).to(gates.dtype)
        d_rows = d_rows * gates.to(d_rows.dtype).unsqueeze(1)
    written: list[Value] = [d_rows, d_gates.unsqueeze(1), *d_weights]
    return dict(zip(task.writes, written))


def _weights(values: list[Value]) -> tuple[Weights, Weights]:
    """Return split and common parameters from the slots that an expert task reads."""
    found = list(map(_parameters, values))
    return found[0], found[1] if len(found) > 1 else ()


def _parameters(value: Value) -> Weights:
    """Return parameters as a tuple: what an expert's shards hold in common travels as one tensor."""
    return (value,) if isinstance(value, Tensor) else value


def _ends(slot: Slot, tokens: Tensor, call: Call) -> Tensor:
    key = ("ends", slot.layout)
    if key not in call.known:
        counts = call.sizes.rows_per_expert(slot.layout, call.rank)
        call.known[key] = torch.from_numpy(counts.cumsum()).to(device=tokens.device, dtype=torch.int32)
    ends: Tensor = call.known[key]
    return ends


def _shards(slot: Slot, call: Call) -> int:
    """Return how many shards of an expert see a slot's rows."""
    assert slot.kind is Kind.ROWS
    return math.prod(call.sizes.grid.size(axis) for axis, state in slot.state if state is State.REPLICATED)
