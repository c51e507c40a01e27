"""The tasks of a program that need no other rank, and the state of one rank's run of a program.

`Call` holds the inputs of a run: sizes, experts and tags. `Environment` holds the values of its
slots, the named values that tasks read and write. `compute` runs a task. wgrad is the products that
give the gradients of weights.

The host describes the rows that move as runs of consecutive rows (`Runs`): some hundred numbers for
many thousand rows. `Indices` expands runs into row numbers where they are needed. On a CPU numpy
does this. A GPU gets the runs of all tasks of a call in one asynchronous copy from pinned memory
and expands them itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.comm.transport import Lane as TransportLane
from moesaic.experts.experts import AbstractExperts, DeferredWgrad, ExpertCall, Weights
from moesaic.kernels.codecs import AbstractCodec, codec_named
from moesaic.kernels.huge_pages import uploaded
from moesaic.kernels.permute import sum_rows
from moesaic.kernels.work import Dispatch, Places, accumulate_dtype
from moesaic.program.layouts import move_of
from moesaic.program.life import kept
from moesaic.program.sizes import CallSizes, Runs
from moesaic.program.task import Kind, Lane, Op, Slot, State, Task
from moesaic.routing.peers import stable_order


@dataclass(frozen=True)
class IndexedRows:
    """Rows of a slot that lie in another order: row i is `source[index[i]]`. Who reads them need
    not move them first."""

    source: Tensor
    """(any number of rows, width)."""
    index: Tensor
    """(rows,)."""
    runs: Runs | None = None
    """The slot's rows in the order in which they arrived or will leave; None if the index is no
    permutation."""

    def in_order(self) -> Tensor:
        """Return the rows in the slot's order."""
        return self.source.index_select(0, self.index)


Value = Tensor | Weights | IndexedRows
"""The value of a slot: rows, or parameters of experts."""
Environment = dict[str, Value]
"""Slot values by name. Under `kept(task)` it also has what an expert task saves for its
gradient."""
Slots = Mapping[str, Slot]
Codecs = Callable[[str], AbstractCodec]
"""Returns the codec of a name."""


@lru_cache(maxsize=64)
def known_codec(name: str) -> AbstractCodec:
    """Return the codec of that name with its default options, created once."""
    return codec_named(name)


class Indices:
    """Index tensors of one call, cached by the identity of their table (its `id`). Calls of the
    same sizes can share them."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[Runs | np.ndarray, Tensor]] = {}
        """By a table's identity: the table, and its numbers on the device; see `_as_numbers`."""
        self._rows: dict[int, Tensor] = {}
        """By the identity of runs, the result of `of`."""
        self._inverse: dict[int, tuple[Runs, Tensor]] = {}
        """By the identity of runs: the runs, and the result of `inverse`."""

    def upload(self, tables: Iterable[Runs | np.ndarray], device: torch.device) -> None:
        """Copy those tables that are not yet on the device, all in one transfer. On a CPU this does
        nothing."""
        if device.type == "cpu":
            return
        new = {id(table): table for table in tables if id(table) not in self._tables}
        if not new:
            return
        flat = [_as_numbers(table) for table in new.values()]
        on_device = uploaded(np.concatenate(flat).astype(np.int32), device)
        parts = on_device.split([len(numbers) for numbers in flat])
        for (key, table), part in zip(new.items(), parts):
            self._tables[key] = (table, part)  # the table is kept, so that no other has its id

    def of(self, runs: Runs, device: torch.device) -> Tensor:
        """Return the row numbers of runs: (total,), int32 on a GPU, int64 on a CPU."""
        if device.type == "cpu":
            return torch.from_numpy(runs.rows)
        if not runs.total:
            return torch.empty(0, dtype=torch.int32, device=device)
        if id(runs) not in self._rows:
            self.upload([runs], device)
            _, numbers = self._tables[id(runs)]
            offsets, sizes = numbers.split(len(runs.sizes))
            rows = offsets.repeat_interleave(sizes, output_size=runs.total)
            if not runs.is_constant:  # offsets are what to add to a position; see `Runs.offsets`
                rows = rows + torch.arange(runs.total, dtype=torch.int32, device=device)
            self._rows[id(runs)] = rows
        return self._rows[id(runs)]

    def inverse(self, runs: Runs, device: torch.device) -> Tensor:
        """Return the inverse of runs that form a permutation: the position of each row. The dtypes
        are those of `of`."""
        if id(runs) not in self._inverse:
            if device.type == "cpu":
                numbers = np.empty_like(runs.rows)
                numbers[runs.rows] = np.arange(runs.total)
                inverse = torch.from_numpy(numbers)
            else:
                rows = self.of(runs, device)
                place = torch.arange(runs.total, dtype=torch.int32, device=device)
                inverse = torch.empty_like(place).scatter_(0, rows.long(), place)
            self._inverse[id(runs)] = (runs, inverse)
        return self._inverse[id(runs)][1]

    def numbers(self, table: np.ndarray, device: torch.device) -> Tensor:
        """Return a table on the device, unexpanded, as int32."""
        if device.type == "cpu" and id(table) not in self._tables:
            self._tables[id(table)] = (table, torch.from_numpy(table.astype(np.int32)))
        self.upload([table], device)
        return self._tables[id(table)][1]


def _as_numbers(table: Runs | np.ndarray) -> np.ndarray:
    """Return a table as one array: of runs, their offsets and then their sizes."""
    return np.concatenate([table.offsets, table.sizes]) if isinstance(table, Runs) else table


@dataclass(kw_only=True)
class Call:
    """The inputs of one rank for one run of a program."""

    rank: int
    sizes: CallSizes
    experts: AbstractExperts
    """Computes the expert tasks. The weights come from the program's slots."""
    first_tag: int = 0
    """The first tag of this run's movements. Runs that are in flight at the same time need disjoint
    tag ranges."""
    weight_first: bool = False
    """Multiply by the routing weight before the expert rather than after it."""
    has_empty_rows: bool = False
    """Whether some rows have no token; their index is negative."""
    may_defer_wgrad: bool = True
    """Whether wgrad may be deferred until the rows' gradient is being sent. Its inputs stay in
    memory until then."""
    codecs: Codecs = known_codec
    """Returns the codec of a name. Every codec must have the message layout of the built-in codec
    of that name."""
    indices: Indices = field(default_factory=Indices, repr=False, compare=False)
    """Index tensors of the rows that move, on the computing device. Calls of the same sizes may
    share them."""
    known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Results that tasks derived from counts and indices, for later tasks, including those of the
    backward pass. `replace` does not copy them to a new call."""
    deferred_wgrad: dict[str, DeferredWgrad] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Deferred wgrad by slot of the weights' gradient. It must run before the slot is read."""

    def finish(self, names: Iterable[str] | None = None) -> None:
        """Run the deferred wgrad of some slots, or of all."""
        chosen = list(self.deferred_wgrad) if names is None else names
        for name in chosen:
            for work in self.deferred_wgrad.pop(name, ()):
                work()


def tables(task: Task, slots: Slots, call: Call) -> Iterator[Runs | np.ndarray]:
    """Yield the tables of the call's sizes that a task reads, to be copied to the device by
    `Indices.upload`."""
    sizes = call.sizes
    rank = call.rank
    if task.op in (Op.MOVE, Op.PACK, Op.UNPACK):
        move = move_of(task, slots)
        if not sizes.shapes.stays(move, rank):
            if task.op is not Op.UNPACK:
                yield sizes.outgoing(move, rank).runs
            if task.op is not Op.PACK:
                yield sizes.incoming(move, rank).runs
    elif task.op is Op.TAKE:
        for part in task.writes:
            yield sizes.part_rows(slots[part].layout, slots[task.reads[0]].layout, rank)
    elif task.op is Op.JOIN:
        for part in task.reads:
            yield sizes.part_rows(slots[part].layout, slots[task.writes[0]].layout, rank)
    elif task.op in (Op.PERMUTE, Op.COMBINE):
        tokens = task.reads[0] if task.op is Op.PERMUTE else task.writes[0]
        bases = sizes.token_bases(slots[tokens].layout, slots[task.reads[1]].layout, rank)
        if bases.starts.any():  # bases that are all 0 are not added
            yield bases
    elif task.op is Op.EXPERT:
        yield sizes.ends(slots[task.reads[0]].layout, rank)
    elif task.op is Op.EXPERT_GRAD:  # reads the cotangent of the results, then the rows
        yield sizes.ends(slots[task.reads[1]].layout, rank)


def rows(value: Value) -> Tensor:
    """Return a slot's value as rows.

    Raises:
        TypeError: if the slot holds parameters.
    """
    if isinstance(value, IndexedRows):
        return value.in_order()
    if not isinstance(value, Tensor):
        raise TypeError("a task reads rows where the slot holds parameters")
    return value


def compute(task: Task, slots: Slots, environment: Environment, call: Call) -> Environment:
    """Run a task that needs no other rank, and return the slots that it writes."""
    reads = [environment[name] for name in task.reads]
    if task.op is Op.EXPERT:
        return _expert(task, slots, reads, call)
    if task.op is Op.EXPERT_GRAD:
        return _expert_grad(task, slots, reads, environment, call)
    if task.op is Op.ADD:
        return {task.writes[0]: _add_values(reads)}
    if task.op is Op.COMBINE:
        return {task.writes[0]: _combine(task, slots, reads, call)}
    if task.op is Op.TAKE:
        whole = slots[task.reads[0]].layout
        value = reads[0]
        assert not isinstance(value, tuple)
        results: Environment = {}
        for name in task.writes:
            part = call.sizes.part_rows(slots[name].layout, whole, call.rank)
            results[name] = part_of(value, part, call.indices)
        return results
    return {task.writes[0]: _rows_task(task, slots, list(map(rows, reads)), call)}


def transport_lane(task: Task) -> TransportLane:
    """Return the transport lane of a movement."""
    return "intra" if task.lane is Lane.INTRA else "inter"


def _are_same(some: Runs, others: Runs) -> bool:
    """Return whether two tables have the same rows in the same order; False if they divide them
    into other runs."""
    return (
        some.is_constant == others.is_constant
        and np.array_equal(some.starts, others.starts)
        and np.array_equal(some.sizes, others.sizes)
    )


def part_of(value: Tensor | IndexedRows, runs: Runs, indices: Indices) -> Tensor | IndexedRows:
    """Return the rows of a value that runs name: of indexed rows, their part of the index, without
    moving them."""
    if not isinstance(value, IndexedRows):
        return take(value, runs, indices)
    if runs.are_all_of(len(value.index)):
        return value
    chosen = indices.of(runs, value.index.device)
    return IndexedRows(value.source, value.index.index_select(0, chosen))


def take(value: Tensor | IndexedRows, runs: Runs, indices: Indices) -> Tensor:
    """Return the rows of a value that runs name, contiguous. If they lie in this order, they are
    returned without a copy."""
    if isinstance(value, IndexedRows):
        # The source has the slot's rows in the order of `value.runs`.
        lies_as_wanted = value.runs is not None and _are_same(value.runs, runs)
        if lies_as_wanted and len(value.source) == runs.total:
            return value.source
        part = part_of(value, runs, indices)
        assert isinstance(part, IndexedRows)
        return part.in_order()
    if value.is_contiguous() and runs.are_all_of(len(value)):
        return value
    return value.index_select(0, indices.of(runs, value.device))


def placed(
    parts: Sequence[Tensor], runs: Runs, num_rows: int, sums: bool, indices: Indices
) -> Tensor | IndexedRows:
    """Return rows in their target places, which are all filled. With `sums`, rows with the same
    place are summed in order.

    16-bit rows are summed in float32. A single part, of which no rows are summed, is returned
    without a copy.

    Args:
        parts: tensors of rows, at least one.
        runs: the target places of the rows of all parts.
        num_rows: number of rows of the result.
        sums: rows of different parts may have the same place. Within one part all places differ, so
            its rows can be added at once.
        indices: the call's index tensors.
    """
    in_order = runs.are_all_of(num_rows)
    if in_order or not sums:
        joined = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if in_order:
            return joined
        return IndexedRows(joined, indices.inverse(runs, joined.device), runs)
    places_by_part = indices.of(runs, parts[0].device).split([len(part) for part in parts])
    dtype = accumulate_dtype(parts[0].dtype)
    out = torch.zeros(num_rows, parts[0].shape[1], dtype=dtype, device=parts[0].device)
    for part, places in zip(parts, places_by_part):
        out.index_add_(0, places, part.to(dtype))
    return out.to(parts[0].dtype)


def _rows_task(task: Task, slots: Slots, reads: list[Tensor], call: Call) -> Tensor | IndexedRows:
    """Return the rows that a task on this rank alone computes from others: an index, a factor, or
    parts joined."""
    target = slots[task.writes[0]]
    if task.op is Op.PERMUTE:
        indexed = _index_of(task.reads[0], task.reads[1], slots, reads[1], call)
        gathered = IndexedRows(reads[0], indexed.places)
        if indexed.is_full is None:
            return gathered
        return gathered.in_order().masked_fill(~indexed.is_full, 0)  # 0 * nan is nan
    if task.op is Op.SCALE:  # by a power of the group's size; power 0 changes nothing
        size = len(call.sizes.grid.group(call.rank, task.group))
        return reads[0] * float(size) ** task.power if task.power else reads[0]
    assert task.op is Op.JOIN, f"{task.op.value} needs other ranks"
    num_rows = call.sizes.num_rows(target.layout, call.rank)
    joined = reads[0].new_empty(num_rows, reads[0].shape[1])
    for name, part in zip(task.reads, reads):
        rows_of_part = call.sizes.part_rows(slots[name].layout, target.layout, call.rank)
        joined[call.indices.of(rows_of_part, part.device)] = part
    return joined


def _combine(task: Task, slots: Slots, reads: list[Value], call: Call) -> Tensor:
    """Return the sums of rows that an index brings together; rows that are not full count as
    zero."""
    indexed = _index_of(task.writes[0], task.reads[1], slots, rows(reads[1]), call)
    value = reads[0]
    if indexed.is_full is not None:
        return indexed.sum(rows(value).masked_fill(~indexed.is_full, 0))
    assert not isinstance(value, tuple)
    return indexed.sum(value)


def _add_values(values: list[Value]) -> Value:
    """Add rows, or parameters one by one. () stands for no parameters."""
    if all(isinstance(value, Tensor) for value in values):
        return _tensor_sum([rows(value) for value in values])
    summands = [parameters(value) for value in values]
    present = [summand for summand in summands if summand]
    if len(present) == 1:
        return present[0]
    return tuple(_tensor_sum(list(tensors)) for tensors in zip(*present))


def _tensor_sum(values: list[Tensor]) -> Tensor:
    """Return the sum of tensors. 16-bit ones are accumulated in float32, as torch's sum over a
    stack does by itself."""
    if values[0].element_size() < 4:
        return torch.stack(values).sum(0)
    out = values[0] + values[1] if len(values) > 1 else values[0]
    for value in values[2:]:
        out += value
    return out


def _index_of(tokens: str, index: str, slots: Slots, value: Tensor, call: Call) -> Indexed:
    """Return each copy's token as a row of the tokens' slot, cached for dispatch, combine and
    backward.

    Args:
        tokens: name of the tokens' slot.
        index: name of the index's slot.
        value: of the index, (rows, 1).
    """
    token_layout = slots[tokens].layout
    index_layout = slots[index].layout
    key = (token_layout, index_layout, value.data_ptr(), len(value))
    if key not in call.known:
        bases = call.sizes.token_bases(token_layout, index_layout, call.rank)
        num_tokens = call.sizes.num_rows(token_layout, call.rank)
        call.known[key] = Indexed(
            value, bases, num_tokens, call.indices, has_empty=call.has_empty_rows
        )
    indexed: Indexed = call.known[key]
    return indexed


def _source_and_index(value: Value, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the tensor that has an expert task's rows, and which of its rows each copy is,
    (rows,); None in place of this index if the tensor's rows are the copies, sorted by expert."""
    if isinstance(value, IndexedRows) and call.experts.gathers and not call.weight_first:
        return value.source, value.index
    return rows(value), None


def _expert(task: Task, slots: Slots, reads: list[Value], call: Call) -> Environment:
    """Run experts; return their result and the activations that backward needs.

    Args:
        reads: the values of rows, routing weights and parameters, in the order of the task's reads.
    """
    x_value, gates_value, *weights = reads
    gates = rows(gates_value).squeeze(1)
    # `x_rows` says which row of `tokens` each copy is; None: they are the copies.
    tokens, x_rows = _source_and_index(x_value, call)
    sharded, common = _weights(weights)
    ends = _ends(slots[task.reads[0]], tokens, call)
    shards = _shards(slots[task.reads[0]], call)
    if not len(ends):  # a rank that computes for no expert
        return {task.writes[0]: tokens, kept(task.name): ()}
    if call.weight_first:
        tokens = tokens * gates.to(tokens.dtype).unsqueeze(1)
    result_gates = None if call.weight_first else gates
    y_rows, value_of_out = _as_they_came(x_value, x_rows, call)
    places = Places(x=x_rows, y=y_rows)
    expert_call = ExpertCall(
        sharded, common, rows=tokens, gates=result_gates, ends=ends, shards=shards, places=places
    )
    out, activations = call.experts.run(expert_call)
    return {task.writes[0]: value_of_out(out), kept(task.name): activations}


def _as_they_came(
    value: Value, index: Tensor | None, call: Call
) -> tuple[Tensor | None, Callable[[Tensor], Tensor | IndexedRows]]:
    """Return where an expert task writes its rows, and a function that makes the slot's value of
    what it wrote.

    Rows that it read through an index are written to the places where they had arrived, so that
    they are sent back without another copy; others in the order of the experts, without places.
    """
    if index is None or not isinstance(value, IndexedRows) or value.runs is None:
        return None, _in_order
    runs = value.runs
    places = call.indices.inverse(runs, index.device)
    return places, lambda written: IndexedRows(written, places, runs)


def _in_order(written: Tensor) -> Tensor:
    """Return rows that were written in the slot's order: themselves."""
    return written


def _expert_grad(
    task: Task, slots: Slots, reads: list[Value], environment: Environment, call: Call
) -> Environment:
    """Run the backward pass of experts; return the gradients of what the forward task read.

    Args:
        reads: the values of the result's gradients, and of what the forward task read: rows,
            routing weights and parameters.
        environment: which has the activations that the forward task kept.
    """
    dy_value, x_value, gates_value, *weights = reads
    # `y_rows` and `x_rows` say which row of `dy` and `tokens` each copy is; None: they are copies.
    dy, y_rows = _source_and_index(dy_value, call)
    tokens, x_rows = _source_and_index(x_value, call)
    gates = rows(gates_value).squeeze(1)
    sharded, common = _weights(weights)
    ends = _ends(slots[task.reads[1]], tokens, call)
    shards = _shards(slots[task.reads[1]], call)
    if not len(ends):  # no expert and no row: empty gradients, like the values
        return dict(zip(task.writes, (dy_value, gates.unsqueeze(1), *weights)))
    activations = environment[kept(task.name)]
    assert isinstance(activations, tuple)
    d_x_rows, value_of_d_rows = _as_they_came(x_value, x_rows, call)
    places = Places(x=x_rows, y=y_rows, d_x=d_x_rows)
    inputs = tokens * gates.to(tokens.dtype).unsqueeze(1) if call.weight_first else tokens
    result_gates = None if call.weight_first else gates
    expert_call = ExpertCall(
        sharded, common, rows=inputs, gates=result_gates, ends=ends, shards=shards, places=places
    )
    deferred_wgrad: DeferredWgrad | None = [] if call.may_defer_wgrad else None
    d_rows, d_gates, *d_weights = call.experts.gradients(
        expert_call, activations, dy.contiguous(), deferred_wgrad
    )
    if deferred_wgrad:  # of the split weights, which come after rows and gates
        call.deferred_wgrad[task.writes[2]] = deferred_wgrad
    if d_gates is None:  # the experts' input was tokens * gates
        d_gates = (d_rows * tokens).sum(1).to(gates.dtype)
        d_rows = d_rows * gates.to(d_rows.dtype).unsqueeze(1)
    d_rows_value = value_of_d_rows(d_rows)
    gradients: list[Value] = [d_rows_value, d_gates.view_as(rows(gates_value)), *d_weights]
    return dict(zip(task.writes, gradients))


def _weights(values: list[Value]) -> tuple[Weights, Weights]:
    """Return split and common parameters from the slots that an expert task reads."""
    sharded = parameters(values[0])
    common = parameters(values[1]) if len(values) > 1 else ()
    return sharded, common


def parameters(value: Value) -> Weights:
    """Return parameters as a tuple. Those that an expert's shards have in common are sent as one
    tensor."""
    return value if isinstance(value, tuple) else (rows(value),)


def _ends(slot: Slot, tokens: Tensor, call: Call) -> Tensor:
    """Return one past the last row of each expert in a slot, on the device of the tokens."""
    return call.indices.numbers(call.sizes.ends(slot.layout, call.rank), tokens.device)


def _shards(slot: Slot, call: Call) -> int:
    """Return how many shards of an expert process a slot's rows: on axes over which these are
    replicated, each rank has another shard."""
    assert slot.kind is Kind.ROWS
    return math.prod(
        call.sizes.grid.size(axis) for axis, state in slot.state if state is State.REPLICATED
    )


class Indexed:
    """The token of each row, and index tensors derived from it. Built once per call of a layer.

    Args:
        index: (rows, 1) int64, the program's index: it numbers the tokens of each row's origin, and
            is negative for a row without a token. It is kept alive, because callers cache this
            object by the tensor's address.
        bases: for each row, the first row of its origin's tokens.
        num_tokens: number of tokens of all origins.
        indices: the call's index tensors.
        has_empty: some rows may have no token.
    """

    def __init__(
        self, index: Tensor, bases: Runs, num_tokens: int, indices: Indices, *, has_empty: bool
    ) -> None:
        self.index = index
        self.num_tokens = num_tokens
        self.is_full = index >= 0 if has_empty else None
        """(rows, 1) bool: which rows have a token; None if all have."""
        self.places = index.squeeze(1).clamp_min(0) if has_empty else index.squeeze(1)
        """(rows,): each row's token among all tokens; arbitrary for rows without a token."""
        if bases.starts.any():
            self.places = self.places + indices.of(bases, index.device)

    def sum(self, values: Tensor | IndexedRows) -> Tensor:
        """Return the sum of each token's rows, in their order: (rows, width) -> (num_tokens,
        width).

        16-bit rows are summed in float32. On a CPU, other rows are summed by torch's embedding
        bags, which take a quarter of the time of `index_add_`. On a GPU `index_add_` would add in a
        nondeterministic order.
        """
        source = values.source if isinstance(values, IndexedRows) else values
        accumulate = accumulate_dtype(source.dtype)
        is_on_cpu = source.device.type == "cpu"
        is_empty = not self.num_tokens or not len(self.places)
        if is_empty or (is_on_cpu and source.dtype != accumulate):  # or 16-bit rows
            shape = (self.num_tokens, source.shape[1])
            out = torch.zeros(shape, dtype=accumulate, device=source.device)
            return out.index_add_(0, self.places, rows(values).to(accumulate)).to(source.dtype)
        dispatch = self._dispatch
        if isinstance(values, IndexedRows):
            if not is_on_cpu and len(source) != len(self.places):
                # on a GPU without Triton, `sum_rows` takes as many rows as the index has
                source = values.in_order()
            else:  # `by_token` lists rows, token after token: let it list those of the source
                row_in_source = values.index.long().index_select(0, dispatch.by_token)
                dispatch = replace(dispatch, by_token=row_in_source)
        return sum_rows(source, dispatch)

    @cached_property
    def _dispatch(self) -> Dispatch:
        """The rows of each token, as kernels take them."""
        order = stable_order(self.places)
        if order.device.type == "cpu":
            rows_of_token = np.bincount(self.places.numpy(), minlength=self.num_tokens)
            starts = torch.from_numpy(rows_of_token.cumsum() - rows_of_token)
        else:
            tokens = torch.arange(self.num_tokens, dtype=self.places.dtype, device=order.device)
            starts = torch.searchsorted(self.places.index_select(0, order), tokens)
        return Dispatch(token=self.places, by_token=order, starts=starts, per_token=None)
