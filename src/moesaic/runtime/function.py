"""`run_program`: a layer's dispatch, experts and combine as one differentiable function over a wire.

One autograd Function per call, its state on the call: several layers in flight, nested layers, gradient accumulation and
recomputation do not meet. Parameters are inputs, so hooks and FSDP see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.comm.wire import AbstractWire
from moesaic.experts.experts import Weights
from moesaic.plan.compile import Compiled
from moesaic.program.task import Op
from moesaic.program.transpose import cotangent, saved
from moesaic.runtime.call import Call, Environment, Value, kept
from moesaic.runtime.drive import drive
from moesaic.runtime.interpret import interpret


@dataclass(frozen=True)
class Run:
    """One call of a layer on one rank."""

    compiled: Compiled
    wire: AbstractWire
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
    y: Tensor = RunProgram.apply(run, len(sharded), x, gates, *sharded, *common)
    return y


class RunProgram(torch.autograd.Function):
    """See `run_program`."""

    @staticmethod
    def forward(ctx: Any, run: Run, num_sharded: int, x: Tensor, gates: Tensor, *weights: Tensor) -> Tensor:
        """Run the forward program; keep what the backward one reads."""
        values: Environment = {"x": x, "gates": gates, **run.indices, "w": weights[:num_sharded]}
        if len(weights) > num_sharded:
            values["b"] = weights[num_sharded:]
        environment = drive(interpret(run.compiled.forward, values, run.call), run.wire)
        names = [*saved(run.compiled.logical), *_activations(run.compiled)]
        flat: list[Tensor] = []
        ctx.layout = []
        for name in names:
            value = environment[name]
            parts = (value,) if isinstance(value, Tensor) else value
            ctx.layout.append((name, None if isinstance(value, Tensor) else len(parts)))
            flat += parts
        ctx.save_for_backward(*flat)
        ctx.run, ctx.num_sharded, ctx.num_common = run, num_sharded, len(weights) - num_sharded
        ctx.was_run = False
        y = environment["y"]
        assert isinstance(y, Tensor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward program."""
        run: Run = ctx.run
        parts = iter(ctx.saved_tensors)
        values: dict[str, Value] = {}
        for name, length in ctx.layout:
            values[name] = next(parts) if length is None else tuple(next(parts) for _ in range(length))
        values[cotangent("y")] = dy.contiguous()
        again = len(run.compiled.backward.tasks)  # a peer may still receive what the backward pass before this one sent
        call = replace(run.call, first_tag=run.wire.take_tags(again) if ctx.was_run else run.backward_tag)
        ctx.was_run = True
        found = drive(interpret(run.compiled.backward, values, call), run.wire)
        d_common: Weights = ()
        if ctx.num_common:
            value = found[cotangent("b")]
            d_common = (value,) if isinstance(value, Tensor) else value
        d_x, d_gates, d_sharded = (found[cotangent(name)] for name in ("x", "gates", "w"))
        assert isinstance(d_x, Tensor)
        assert isinstance(d_gates, Tensor)
        return None, None, d_x, d_gates, *d_sharded, *d_common


def _activations(compiled: Compiled) -> list[str]:
    """Return where the expert tasks' activations stand."""
    return [kept(task.name) for task in compiled.logical.tasks if task.op is Op.EXPERT]
