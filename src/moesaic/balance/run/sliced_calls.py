"""Runs a call in slices, one after another, if it does not fit the memory budget as a whole.

As many of the first slices as fit (`Cut.kept`, at least one) are kept for the backward pass, as a
whole call would be. In the first slice every rank has as many of its rows as fit, so ranks that are
not overloaded compute nothing twice. For each other slice, the backward pass dispatches the rows
again and runs the experts again, but does not send their results again. Kept slices run last in the
forward pass and first in the backward pass, so their memory never adds to that of another slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.balance.slices import Cut
from moesaic.comm.collectives import all_gather
from moesaic.experts.experts import Weights
from moesaic.kernels.work import accumulate_dtype
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Program
from moesaic.runtime.executor import (
    LayerRun,
    by_name,
    drive,
    flattened,
    inputs_of,
    interpret,
    kept_names,
    run_backward,
)
from moesaic.runtime.expert_parallel import UncutCall
from moesaic.runtime.tasks import Environment, Indices


@dataclass(frozen=True)
class Slice:
    """The part of a call that one slice runs."""

    rows: Tensor
    """(rows,) int64: which of the call's routing weights belong to the slice."""
    sizes: Callable[[], CallSizes]
    """Returns the sizes, created anew for each pass, since their cached tables grow with the
    rows."""
    indices: Mapping[str, Tensor]
    """The inputs of the program with kind INDEX, by name."""


def slices_of(cut: Cut, call: UncutCall) -> list[Slice]:
    """Return the slices of a call. Under multicast all ranks call this together.

    Args:
        cut: how the call is cut.
    """
    transport = call.whole.transport
    token = call.token
    expert = call.expert
    compiled = call.whole.compiled
    rows = []
    node_tokens = []  # under multicast, the tokens that each slice sends to each node
    for number in range(cut.num_slices):
        indices_of_rows, origin = cut.rows(number, call.origins)
        rows.append(torch.from_numpy(indices_of_rows).to(token.device))
        if call.find is not None:  # multicast: it finds the node tokens of rows
            assert expert is not None
            is_own = origin == transport.rank
            own = torch.from_numpy(indices_of_rows[is_own]).to(token.device)
            node_tokens.append(call.find(token[own], expert[own]))
    if node_tokens:
        counts = torch.stack([each.counts for each in node_tokens])
        counts_of_ranks = all_gather(transport, tuple(range(transport.world)), counts)
        all_counts = torch.stack(counts_of_ranks).cpu().numpy()  # (ranks, slices, ...)
        # every rank also needs how many tokens the others send
        node_tokens = [
            each.with_counts(all_counts[:, number], transport.rank)
            for number, each in enumerate(node_tokens)
        ]

    slices = []
    for number in range(cut.num_slices):
        table = None
        indices: Mapping[str, Tensor]
        if node_tokens:
            table = node_tokens[number].of_all
            indices = node_tokens[number].indices
        else:  # (rows, 1): the token that each row reads
            indices = {"index": token[rows[number]].unsqueeze(1)}
        sizes = partial(
            compiled.sizes,
            cut.copies(number),
            tokens=call.tokens,
            units=call.units,
            node_tokens=table,
            replicated=cut.replicated(number),
        )
        slices.append(Slice(rows[number], sizes, indices))
    return slices


@dataclass(frozen=True)
class SlicedRun:
    """One rank's run of a layer's call in slices."""

    whole: LayerRun
    """The run of the whole call. Its sizes, indices and tags are not those of any slice."""
    slices: Sequence[Slice]
    kept: int
    """Number of slices, from the first, that are kept for the backward pass."""

    @property
    def names(self) -> tuple[str, ...]:
        """The values that a slice keeps for its backward pass."""
        return kept_names(self.whole.compiled.logical)

    @property
    def again(self) -> Program:
        """The program that recomputes these values."""
        assert self.whole.compiled.again is not None, "only plans with a budget are run in slices"
        return self.whole.compiled.again

    def take_tags(self) -> list[int]:
        """Reserve tags for a forward and a backward program of each slice; return the first tag of
        each slice."""
        programs = self.whole.compiled.forward, self.whole.compiled.backward
        tags_per_slice = sum(len(program.tasks) for program in programs)
        first = self.whole.transport.take_tags(tags_per_slice * len(self.slices))
        return [first + tags_per_slice * number for number in range(len(self.slices))]

    def run(self, number: int, first_tag: int) -> LayerRun:
        """Return the run of one slice, whose forward pass has the tags from `first_tag` on: one for
        each task, then those of the backward pass."""
        part = self.slices[number]
        num_forward_tags = len(self.whole.compiled.forward.tasks)
        call = replace(
            self.whole.call,
            sizes=part.sizes(),
            first_tag=first_tag,
            may_defer_wgrad=False,  # the inputs of wgrad would stay in memory meanwhile
            indices=Indices(),
        )
        return replace(
            self.whole, call=call, backward_tag=first_tag + num_forward_tags, indices=part.indices
        )


def run_slices(
    cut: Cut, call: UncutCall, x: Tensor, gates: Tensor, sharded: Weights, common: Weights
) -> Tensor:
    """Run dispatch, experts and combine slice by slice. Other arguments and the result are those of
    `run_program`.

    Args:
        cut: how the call is cut.
    """
    sliced_run = SlicedRun(call.whole, slices_of(cut, call), cut.kept)
    weights = (*sharded, *common)
    y: Tensor = RunSlices.apply(
        sliced_run, torch.is_grad_enabled(), len(sharded), x, gates, *weights
    )
    return y


class RunSlices(torch.autograd.Function):
    """The autograd function of `run_slices`."""

    @staticmethod
    def forward(
        ctx: Any,
        sliced_run: SlicedRun,
        has_grad: bool,
        num_sharded: int,
        x: Tensor,
        gates: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Run the slices, the last first, and sum their results; keep the inputs, and the values of
        the slices that are kept."""
        tags = sliced_run.take_tags()
        needs_backward = has_grad and any(ctx.needs_input_grad)
        names = sliced_run.names if needs_backward else ()
        sharded, common = _split(weights, num_sharded)

        total = torch.zeros_like(x, dtype=accumulate_dtype(x.dtype))
        states = [_RunState.now(x)] * len(sliced_run.slices)  # each is set before its slice runs
        flat: list[Tensor] = []  # the kept values of all kept slices
        layouts = []  # by kept slice, the last one first: how `by_name` restores its values
        for number in reversed(range(len(sliced_run.slices))):
            states[number] = _RunState.now(x)
            kept_values = names if number < sliced_run.kept else ()
            run = sliced_run.run(number, tags[number])
            gates_of_slice = gates[sliced_run.slices[number].rows]
            inputs = inputs_of(run, x, gates_of_slice, sharded, common)
            steps = interpret(run.compiled.forward, inputs, run.call, {*kept_values, "y"})
            values = drive(steps, run.transport)
            y = values["y"]
            assert isinstance(y, Tensor)
            total += y
            if kept_values:
                tensors, layout = flattened(values, kept_values)
                flat += tensors
                layouts.append(layout)
                del tensors
            # freed, since the next slice's memory must not add to it
            del values, y, inputs, steps, gates_of_slice

        ctx.save_for_backward(x, gates, *weights, *flat)
        ctx.work = sliced_run
        ctx.num_sharded = num_sharded
        ctx.num_inputs = 2 + len(weights)
        ctx.states = states
        ctx.layouts = layouts
        ctx.tags = sliced_run.take_tags()  # of the backward pass, which runs slices again
        return total.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward programs of kept slices; for each other slice, run its experts again,
        then its backward program."""
        (x, gates, *weights), kept = _take_saved(ctx)
        sliced_run: SlicedRun = ctx.work
        # a second backward pass needs new tags
        tags = ctx.tags or sliced_run.take_tags()
        ctx.tags = None
        sharded, common = _split(weights, ctx.num_sharded)

        d_gates = torch.zeros_like(gates)
        totals: list[Tensor] = []
        for number, part in enumerate(sliced_run.slices):
            run = sliced_run.run(number, tags[number])
            if not kept:  # neither this slice nor a later one was kept
                inputs = inputs_of(run, x, gates[part.rows], sharded, common)
                with ctx.states[number].again():
                    again = interpret(sliced_run.again, inputs, run.call, set(sliced_run.names))
                    kept.append(drive(again, run.transport))
                del inputs, again
            # the last entry is this slice's
            d_x, d_gates_of_slice, *d_parameters = run_backward(run, kept.pop(), dy)
            d_gates[part.rows] = d_gates_of_slice
            if not totals:
                totals = [
                    torch.zeros_like(value, dtype=accumulate_dtype(value.dtype))
                    for value in (x, *weights)
                ]
            for total, value in zip(totals, (d_x, *d_parameters), strict=True):
                total += value
            del d_x, d_parameters

        # in the order of `forward`'s arguments
        gradients = []
        for total, value in zip(totals, (x, *weights)):
            gradients.append(total.to(value.dtype))
        d_x, *d_weights = gradients
        return None, None, None, d_x, d_gates, *d_weights


def _take_saved(ctx: Any) -> tuple[list[Tensor], list[Environment]]:
    """Return the inputs, and the kept values of the first slices, the first slice's last, in lists
    without other references."""
    saved = ctx.saved_tensors
    start = ctx.num_inputs
    kept = []
    ctx.maybe_clear_saved_tensors()  # so that memory is freed slice by slice, as values are used
    for layout in ctx.layouts:  # name, number of tensors and constructor of each kept value
        size = sum(length for _, length, _ in layout)
        kept.append(by_name(saved[start : start + size], layout))
        start += size
    return list(saved[: ctx.num_inputs]), kept


def _split(weights: Sequence[Tensor], num_sharded: int) -> tuple[Weights, Weights]:
    """Return split and common parameters."""
    return tuple(weights[:num_sharded]), tuple(weights[num_sharded:])


@dataclass(frozen=True)
class _RunState:
    """State around a slice's experts that affects their result: autocast, and the random
    generators."""

    device: torch.device
    """The device of the layer's input."""
    autocast: tuple[bool, torch.dtype]
    """Whether it is enabled, and its dtype."""
    random_state: Tensor
    """The state of the CPU's generator."""
    device_state: Tensor | None
    """The state of the device's generator; None on a CPU."""

    @classmethod
    def now(cls, x: Tensor) -> _RunState:
        """Return the present state, on the device of x."""
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        device_state = torch.cuda.get_rng_state(x.device) if x.is_cuda else None
        return cls(x.device, autocast, torch.get_rng_state(), device_state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Return a context with the same state."""
        enabled, dtype = self.autocast
        devices = [self.device] if self.device_state is not None else []
        with torch.random.fork_rng(devices):
            torch.set_rng_state(self.random_state)
            if self.device_state is not None:
                torch.cuda.set_rng_state(self.device_state, self.device)
            with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
                yield
