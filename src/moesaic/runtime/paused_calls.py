"""Calls of a layer that pause while their messages travel, so that another micro-batch computes.

A call is three autograd functions instead of one: `Start` issues its first messages, `GoOn` waits
for them and issues the last ones, `Finish` waits for those. Forward, the micro-batch hands its turn
over between them. Backward, each runs a third of the backward program, in reverse. torch's engine
runs ready nodes by descending sequence number, which is the order of the forward pass, so it
interleaves the backward passes of micro-batches as their forward passes were. Nothing hands over
inside a backward pass, and so neither does a recomputation. An empty tensor, the token, passes from
one function to the next, so that autograd orders them.

`Finish` alone saves tensors, the same in the same order as `RunProgram`: a checkpoint's
recomputation, which runs the call as a whole, saves as many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.comm.transport import AbstractTurn
from moesaic.experts.experts import Weights
from moesaic.program.grid import Grid
from moesaic.program.task import Op, Program
from moesaic.runtime.executor import (
    LayerRun,
    Steps,
    backward_steps,
    by_name,
    drive,
    flattened,
    forward_steps,
    gradients_of,
    inputs_of,
    kept_names,
)
from moesaic.runtime.tasks import Environment


@lru_cache(maxsize=512)
def sends_messages(program: Program, grid: Grid) -> bool:
    """Return whether ranks of a mesh exchange anything in a program."""
    return any(
        task.op in (Op.MOVE, Op.HOP) and len(grid.group(0, task.group)) > 1
        for task in program.tasks
    )


@dataclass
class _PausingCall:
    """A call of a layer in three parts, and the program that it is in."""

    run: LayerRun
    num_sharded: int
    """The number of parameters that etp splits; they come first."""
    has_grad: bool
    """Whether gradients are on where the layer is called."""
    keeps: tuple[str, ...] = ()
    """The slots that the backward program reads; () if there will be no backward pass."""
    steps: Steps | None = None
    """The program that runs; None if none does, or it has ended."""
    result: Environment = field(default_factory=dict)
    """The result of the program that has ended last, until it is taken."""
    had_backward: bool = False
    """Whether a backward pass has begun; a further one needs new tags."""

    def begin(self, steps: Steps) -> None:
        """Run a program to its first pause."""
        self.steps = steps
        self.go_on()

    def go_on(self) -> None:
        """Run the program to its next pause, unless it has ended."""
        if self.steps is not None:
            self.result = drive(self.steps, self.run.transport)
            if self.result:  # {} at a pause
                self.steps = None

    def end(self) -> Environment:
        """Run the program to its end, and return its result."""
        while self.steps is not None:
            self.go_on()
        result = self.result
        self.result = {}
        return result


def run_in_parts(
    turn: AbstractTurn, run: LayerRun, x: Tensor, gates: Tensor, sharded: Weights, common: Weights
) -> Tensor:
    """Run a call as `run_program` does, and hand the turn over wherever its program pauses.

    Forward has two pauses at most. What the transport says it is doing is that of this call again
    when the turn comes back.
    """
    call = _PausingCall(run, len(sharded), torch.is_grad_enabled())
    doing = run.transport.doing
    token = Start.apply(call, x, gates, *sharded, *common)
    del x, gates, sharded, common  # so that they can be freed while another micro-batch computes
    if call.steps is not None:  # it has paused
        turn.hand_over()
        run.transport.doing = doing
    token = GoOn.apply(call, token)
    if call.steps is not None:  # it has paused again
        turn.hand_over()
        run.transport.doing = doing
    y: Tensor = Finish.apply(call, token)
    return y


class Start(torch.autograd.Function):
    """Forward, a call up to its first pause; backward, the end of its backward program."""

    @staticmethod
    def forward(ctx: Any, call: _PausingCall, x: Tensor, gates: Tensor, *weights: Tensor) -> Tensor:
        run = call.run
        if call.has_grad and any(ctx.needs_input_grad):
            call.keeps = kept_names(run.compiled.logical)
        inputs = inputs_of(run, x, gates, weights[: call.num_sharded], weights[call.num_sharded :])
        pauses = sends_messages(run.compiled.forward, run.compiled.grid)
        call.begin(forward_steps(run, inputs, call.keeps, pauses=pauses))
        ctx.call = call
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        call: _PausingCall = ctx.call
        call.run.transport.doing = call.run.backward_in_words
        return None, *gradients_of(call.end())


class GoOn(torch.autograd.Function):
    """Forward and backward, a call's program from its first pause to its next."""

    @staticmethod
    def forward(ctx: Any, call: _PausingCall, token: Tensor) -> Tensor:
        call.go_on()
        ctx.call = call
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[None, Tensor]:
        call: _PausingCall = ctx.call
        call.run.transport.doing = call.run.backward_in_words
        call.go_on()
        return None, token


class Finish(torch.autograd.Function):
    """Forward, the end of a call; backward, its backward program up to its first pause."""

    @staticmethod
    def forward(ctx: Any, call: _PausingCall, token: Tensor) -> Tensor:
        environment = call.end()
        flat, ctx.layout = flattened(environment, call.keeps)
        ctx.save_for_backward(*flat)
        ctx.call = call
        y = environment["y"]
        assert isinstance(y, Tensor)
        return y.data  # as in `RunProgram`

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        call: _PausingCall = ctx.call
        if call.had_backward:
            call.run = call.run.with_new_tags()
        call.had_backward = True
        kept_values = by_name(ctx.saved_tensors, ctx.layout)
        ctx.maybe_clear_saved_tensors()
        call.begin(backward_steps(call.run, kept_values, dy, pauses=True))
        return None, dy.new_empty(0)
