"""Two micro-batches in flight against one after the other, with virtual compute over real messages;
part of `moesaic bench auto`.

The dense part of a block sleeps, and its experts do (`virtual.py`). The ways run in turn in one
process per rank, and every step routes other tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moesaic.auto import AT_ONCE, AutoPlan
from moesaic.comm.mesh import Mesh, open_transport
from moesaic.interleaved import AtOnce, in_flight
from moesaic.layer import MoE
from moesaic.measure.together import latest, start_together
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan, plan_in_words
from moesaic_lab.measure import Span
from moesaic_lab.measure import in_turn as timed_in_turn
from moesaic_lab.virtual import Accelerator, virtual_experts

ALONE = "without messages"
"""The way of a model that is not spread over ranks."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes of the model and of the measurement."""

    blocks: int = 2
    """Blocks of the model."""
    dim: int = 256
    """Width of a token."""
    tokens: int = 256
    """Tokens of a micro-batch per rank."""
    micro_batches: int = 4
    """Micro-batches per step."""
    dense_ms: float = 12.0
    """Milliseconds of a block's dense part forward; twice as long backward."""
    experts_ms: float = 8.0
    """Milliseconds of a block's experts forward, under even load; twice as long backward."""
    steps: int = 10
    """Timed steps of each way."""


class _Sleep(torch.autograd.Function):
    """The identity, which takes time forward and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class _Block(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        hidden = options.dim
        # Two copies per token, two matrices, two operations per element of a matrix.
        flops = 2 * 2 * options.tokens * 2 * options.dim * hidden
        accelerator = Accelerator(flops_per_second=1e3 * flops / options.experts_ms)
        self.moe = MoE(options.dim, hidden, 8, 2, experts=virtual_experts(accelerator), losses=())
        self._seconds = options.dense_ms / 1e3

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(_Sleep.apply(x, self._seconds))


class _Model(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(options) for _ in range(options.blocks))

    def layers(self) -> list[MoE]:
        """Return the MoE layers, in order."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


MOST_STEPS = 200
"""Steps within which plan="auto" must have chosen."""


def way_in_words(plan: Plan, at_once: int) -> str:
    """Return a name of a plan and of how many micro-batches run at a time."""
    return f"{plan_in_words(plan)}, {AT_ONCE[at_once]}"


def chosen_and_fixed(
    options: Options, *, seed: int
) -> tuple[str, list[str], dict[str, list[Span]]]:
    """Let the layers' plan="auto" choose a plan and how many micro-batches are in flight, then time
    steps of every plan that it timed, each with one and with two in flight, and of a model without
    messages; all ranks, one a node, call this together.

    Returns:
        the name of the chosen way, what was said, and the spans of each way by its name.
    """
    transport = open_transport(name="sockets")
    world = transport.world
    mesh = Mesh(Grid(world=world, ep=world, ranks_per_node=1), transport)
    torch.manual_seed(seed)
    model = _Model(options)
    layers = model.layers()
    for layer in layers:
        layer.parallelize(mesh, "auto", broadcast=True)
    generator = torch.Generator().manual_seed(1000 * seed + mesh.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # ends steps, and changes no weights
    shape = (options.tokens, options.dim)
    alone = _Model(options)

    def step(at_once: AtOnce, model: _Model = model) -> None:
        """Train on other micro-batches than before."""
        batches = [
            torch.randn(shape, generator=generator).requires_grad_()
            for _ in range(options.micro_batches)
        ]
        for losses in in_flight(model, batches, at_once=at_once):
            (torch.stack(losses).sum() / options.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    auto = AutoPlan.of(mesh)
    steps = 0
    while auto.table is None or auto.table.race is not None:
        step("auto")
        steps += 1
        assert steps < MOST_STEPS, "plan auto chooses"
    assert auto.table.running is not None
    chosen_plan = auto.table.plans[auto.table.running]
    chosen_at_once = 2 if AT_ONCE[2] in auto.said[-1] else 1
    for layer in layers:
        assert layer.on_mesh is not None
        layer.on_mesh.auto = None  # from here on, each way says its plan

    def run(plan: Plan, at_once: Literal[1, 2]) -> None:
        """Run a step under a plan."""
        for layer in layers:
            layer.use_plan(plan)
        step(at_once)

    ways: dict[str, Callable[[], None]] = {ALONE: partial(step, 1, alone)}
    for plan, at_once in itertools.product(dict.fromkeys(auto.table.plans), AT_ONCE):
        ways[way_in_words(plan, at_once)] = partial(run, plan, at_once)
    chosen = way_in_words(chosen_plan, chosen_at_once)
    barrier = start_together(latest)
    return chosen, auto.said, timed_in_turn(ways, options.steps, barrier=barrier, warmup=1)
