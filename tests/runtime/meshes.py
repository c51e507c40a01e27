"""Layers on loopback meshes and the same layers on no mesh: shared by the tests of the runtime."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.experts import ModuleExperts, PlainExperts
from moesaic.layer import MoE
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.runtime.routing_cache import checkpoint
from moesaic.testing.equivalence import budget_by_rows

DIM = 4
HIDDEN = 8
EXPERTS = 4


def own_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, DIM))


KINDS = {
    "swiglu": "swiglu",
    "biases": partial(PlainExperts, bias=True),
    "modules": lambda dim, hidden, count: ModuleExperts(own_expert, dim, count),
}


def make_layer(
    kind: str = "swiglu", seed: int = 0, num_experts: int = EXPERTS, **options: object
) -> MoE:
    torch.manual_seed(seed)
    options = {"losses": (), **options}
    return MoE(DIM, HIDDEN, num_experts, 2, experts=KINDS[kind], **options).double()  # type: ignore[arg-type]


def tokens_of(group: int, count: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + group)
    return torch.randn(count, DIM, generator=generator, dtype=torch.float64)


def on_mesh(layer: MoE, grid: Grid, transport: AbstractTransport, plan: Plan | Compiled) -> MoE:
    """Return a copy of a layer on a mesh. A memory budget in the plan counts rows at a rank's
    experts."""
    layer = copy.deepcopy(layer)
    layer.parallelize(Mesh(grid, transport), plan)
    budget_by_rows(layer)
    return layer


@functools.cache
def compiled(plan: Plan, grid: Grid, kind: str = "swiglu") -> Compiled:
    """Return the programs of a plan, compiled once for all ranks and tests."""
    return compile_plan(plan, grid, bias=kind == "biases")


def part_of(layer: MoE, whole: Tensor, name: str, grid: Grid, rank: int) -> Tensor:
    """Return a rank's part of a tensor shaped like a parameter of the whole layer's stacked
    experts."""
    each = EXPERTS // grid.ep
    first = grid.coordinate(rank, "ep") * each
    part = whole[first : first + each]
    dim = layer.experts.shard_dim(name)
    return part if dim is None else part.chunk(grid.etp, dim)[grid.coordinate(rank, "etp")]


def every_rank(
    grid: Grid, function: Callable[[AbstractTransport, Tensor], object], seed: int = 0
) -> list[object]:
    """Run a function on all ranks, with the rank's transport and the tokens of its tensor-parallel
    group."""
    return run_ranks(
        grid.world,
        lambda transport: function(
            transport, tokens_of(grid.coordinate(transport.rank, "dp")).requires_grad_()
        ),
        seed=seed,
    )


def step(layer: nn.Module, x: Tensor, recompute: bool = False) -> list[Tensor]:
    """Return a layer's results, its input's gradient, and its parameters' gradients, which are then
    cleared."""
    x = x.clone().requires_grad_()
    y = checkpoint(layer, x) if recompute else layer(x)
    y.sin().sum().backward()
    assert x.grad is not None
    found = [y.detach(), x.grad]
    for parameter in layer.parameters():
        found.append(parameter.grad.clone())
        parameter.grad = None
    return found
