"""`run_program`: a layer's dispatch, experts and combine as one differentiable function over a transport.

One autograd Function per call, its state on the call: several layers in flight, nested layers, gradient accumulation and
recomputation do not meet. Parameters are inputs, so hooks and FSDP see them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.comm.transport import AbstractTransport
from moesaic.experts.experts import Weights
from moesaic.plan.compile import Compiled
from moesaic.program.task import Op, Program
from moesaic.program.transpose import cotangent, saved
from moesaic.runtime.call import Call, Environment, kept
from moesaic.runtime.executor import drive, interpret

Layout = list[tuple[str, int | None]]
"""Slots in the order of their tensors; None for one tensor, else how many."""


@dataclass(frozen=True)
class Run:
    """One call of a layer on one rank."""

    compiled: Compiled
    transport: AbstractTransport
    call: Call
    """Its tags are those of the forward program."""
    backward_tag: int
    """First tag of the backward program."""
    indices: Mapping[str, Tensor]
    """The program's INDEX inputs by name."""


def run_program(run: Run, x: Tensor, gates: Tensor, sharded: Weights, common: Weights) -> Tensor:
    """Run dispatch, experts and combine.

    All ranks call it in the same order, those without a token too.

    Args:
        run: the call.
        x: (tokens, dim), the program's `x`.
        gates: (rows, 1) routing weights, in the order of the program's `gates`.
        sharded: this rank's shards of its experts' parameters.
        common: what its shards hold in common with the other shards.

    Returns:
        (tokens, dim), the program's `y`.
    """
    y: Tensor = RunProgram.apply(run, torch.is_grad_enabled(), len(sharded), x, gates, *sharded, *common)
    return y


class RunProgram(torch.autograd.Function):
    """See `run_program`."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, has_grad: bool, num_sharded: int, x: Tensor, gates: Tensor, *weights: Tensor
    ) -> Tensor:
        """Run the forward program; keep what the backward one reads, if there will be one."""
        names = kept_names(run.compiled) if has_grad and any(ctx.needs_input_grad) else []
        inputs = inputs_of(run, x, gates, weights[:num_sharded], weights[num_sharded:])
        environment = run_forward(run, run.compiled.forward, inputs, {*names, "y"})
        flat, ctx.layout = flattened(environment, names)
        ctx.save_for_backward(*flat)
        ctx.run, ctx.was_run = run, False
        y = environment["y"]
        assert isinstance(y, Tensor)
        # No view, since FSDP2's hooks are lost where somebody changes one in place. Nothing that is saved shares its memory:
        # every program ends with a combine, which writes anew.
        return y.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward program."""
        run: Run = ctx.run
        if ctx.was_run:  # a peer may still receive what the backward pass before this one sent
            run = replace(run, backward_tag=run.transport.take_tags(len(run.compiled.backward.tasks)))
        ctx.was_run = True
        return None, None, None, *run_backward(run, _take_kept(ctx), dy)


def inputs_of(run: Run, x: Tensor, gates: Tensor, sharded: Weights, common: Weights) -> Environment:
    """Return the forward program's inputs by name."""
    values: Environment = {"x": x, "gates": gates, **run.indices, "w": sharded}
    if common:
        values["b"] = common
    return values


def kept_names(compiled: Compiled) -> list[str]:
    """Return what the backward program reads of the forward one: slots, and the expert tasks' activations."""
    return list(_kept_names(compiled.logical))


@lru_cache(maxsize=256)
def _kept_names(logical: Program) -> tuple[str, ...]:
    experts = [task.name for task in logical.tasks if task.op is Op.EXPERT]
    return *saved(logical), *map(kept, experts)


def run_forward(run: Run, program: Program, inputs: Environment, wanted: Collection[str]) -> Environment:
    """Run the forward program of a call, or a part of it; returns what is wanted of its values.

    Args:
        run: the call.
        program: what to run.
        inputs: by name.
        wanted: slots, and places of activations.
    """
    return drive(interpret(program, inputs, run.call, wanted), run.transport)


def run_backward(run: Run, values: Environment, dy: Tensor) -> tuple[Tensor, ...]:
    """Run the backward program; returns the gradients of x, gates, and all parameters.

    Args:
        run: the call.
        values: what was kept; emptied, so that each is freed on the way.
        dy: (tokens, dim), gradient of the result.
    """
    program, has_common = run.compiled.backward, "b" in run.compiled.logical.inputs
    values[cotangent("y")] = dy.contiguous()
    call = replace(run.call, first_tag=run.backward_tag)
    call.known.update(run.call.known)
    run.call.known.clear()  # unless the graph is retained nothing needs it any more
    given = dict(values)
    values.clear()  # a caller's frame may still hold it
    steps = interpret(program, given, call, program.outputs)
    del given
    found = drive(steps, run.transport)
    d_common: Weights = ()
    if has_common:
        value = found[cotangent("b")]
        d_common = (value,) if isinstance(value, Tensor) else value
    d_x, d_gates, d_sharded = (found[cotangent(name)] for name in ("x", "gates", "w"))
    assert isinstance(d_x, Tensor)
    assert isinstance(d_gates, Tensor)
    return d_x, d_gates, *d_sharded, *d_common


def flattened(values: Environment, names: Sequence[str]) -> tuple[list[Tensor], Layout]:
    """Return the tensors of some slots in one list, and how it is cut."""
    flat: list[Tensor] = []
    layout: Layout = []
    for name in names:
        value = values[name]
        parts = (value,) if isinstance(value, Tensor) else value
        layout.append((name, None if isinstance(value, Tensor) else len(parts)))
        flat += parts
    return flat, layout


def by_name(flat: Sequence[Tensor], layout: Layout) -> Environment:
    """Return slots by name; the inverse of `flattened`."""
    parts = iter(flat)
    return {
        name: next(parts) if length is None else tuple(next(parts) for _ in range(length)) for name, length in layout
    }


def _take_kept(ctx: Any) -> Environment:
    """Return what the forward pass kept. Unless the graph is retained nothing else holds it any more."""
    values = by_name(ctx.saved_tensors, ctx.layout)
    ctx.maybe_clear_saved_tensors()
    return values
