"""Two micro-batches in flight against one after the other, with virtual compute over real messages.

    moesaic testbed run --nodes 2 --ranks-per-node 1 --inter 50mbit -- \\
        python -m moesaic_lab.in_flight

The dense part of a block sleeps, and its experts do (`virtual.py`). The ways run in turn in one
process per rank, and every step routes other tokens. The first rank prints the median step of each
way, the best plan among those with chunks, the wire's share (1 - a step without messages / a step),
and what each way takes of the best plan without micro-batches in flight.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

from moesaic.comm.mesh import Mesh
from moesaic.interleaved import in_flight
from moesaic.layer import MoE
from moesaic.program.plan import Plan
from moesaic.runtime.routing_cache import checkpoint
from moesaic_lab.virtual import Accelerator, virtual_experts

CHUNKS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes of the model and of the measurement."""

    blocks: int = 4
    """Blocks of the model."""
    dim: int = 256
    """Width of a token."""
    tokens: int = 256
    """Tokens of a micro-batch per rank."""
    micro_batches: int = 4
    """Micro-batches per step."""
    dense_ms: float = 30.0
    """Milliseconds of a block's dense part forward; twice as long backward."""
    experts_ms: float = 20.0
    """Milliseconds of a block's experts forward, under even load; twice as long backward."""
    steps: int = 5
    """Timed steps of each way."""
    recompute: bool = False
    """Recompute each block in the backward pass."""


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
        self._recompute = options.recompute

    def layers(self) -> list[MoE]:
        """Return the MoE layers, in order."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x) if self._recompute else block(x)
        return x.square().mean()


def _seconds(step: Callable[[], None]) -> float:
    """Return how long a step takes on all ranks together."""
    dist.barrier()
    started = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - started


def measure(options: Options) -> dict[str, float]:
    """Return the median seconds of a step of every way, by its name."""
    torch.manual_seed(0)
    models = {chunks: _Model(options) for chunks in CHUNKS}
    alone = _Model(options)  # never parallelized: sends no messages
    mesh = Mesh.create(ep=dist.get_world_size())
    for chunks, model in models.items():
        for layer in model.layers():
            layer.parallelize(mesh, Plan(chunks=chunks), broadcast=True)
    generator = torch.Generator().manual_seed(mesh.rank)

    def batches() -> list[Tensor]:
        """Draw the micro-batches of a step, (tokens, dim) each."""
        shape = (options.tokens, options.dim)
        return [
            torch.randn(shape, generator=generator).requires_grad_()
            for _ in range(options.micro_batches)
        ]

    def in_turn(model: nn.Module) -> None:
        """Run a step with one micro-batch after the other."""
        for batch in batches():
            (model(batch) / options.micro_batches).backward()

    def together(model: nn.Module) -> None:
        """Run a step with two micro-batches in flight."""
        for losses in in_flight(model, batches()):
            (torch.stack(losses).sum() / options.micro_batches).backward()

    ways: dict[str, Callable[[], None]] = {"without messages": lambda: in_turn(alone)}
    for chunks, model in models.items():
        ways[f"in turn, chunks={chunks}"] = lambda model=model: in_turn(model)  # type: ignore[misc]
        ways[f"in flight, chunks={chunks}"] = lambda model=model: together(model)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(options.steps + 1):
        for name, run in ways.items():
            seconds = _seconds(run)
            if step > 0:  # the first step warms up
                times[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main(options: Options) -> None:
    """Measure on the ranks of a process group, and print the figures on the first."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    seconds = measure(options)
    if dist.get_rank() == 0:
        best = min(value for name, value in seconds.items() if name.startswith("in turn"))
        share = 1 - seconds["without messages"] / best
        print(f"virtual compute; the wire takes {share:.0%} of the best step one after another")
        for name, value in seconds.items():
            print(f"{name:22} {value:7.3f} s {value / best:6.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Options))
