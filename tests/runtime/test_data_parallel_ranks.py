"""Routers that adapt outside the loss, and losses over the global batch, under DDP and FSDP2:
results equal one process's."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moesaic import LoadBalance, Mesh, MoE, Plan, balance_on_step, finish_step, set_loss_scale
from moesaic.parallel import prepare_ddp
from moesaic.routing.routers import ROUTERS
from worlds import on_ranks, refusal

DIM = 8
TOKENS = 8
STEPS = 3
MICRO = 2
ADAPTING = [name for name, make in ROUTERS.items() if make(DIM, 8).adapts]


def make_layer(router: str, **options: Any) -> MoE:
    torch.manual_seed(0)
    losses = (LoadBalance(0.5, level="global_batch"),)
    return MoE(DIM, 6, 8, 2, router=router, losses=losses, **options).double()


def tokens(step: int, micro: int, world: int) -> Tensor:
    """Return the tokens of all ranks, with a different distribution on each rank."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(world, TOKENS, DIM, generator=generator, dtype=torch.float64)
    return x + 2 * torch.eye(world, DIM, dtype=torch.float64).unsqueeze(1)


def train(
    layer: MoE, model: nn.Module, optimizer: torch.optim.Optimizer, parts: slice, world: int
) -> list[Tensor]:
    """Return bias and parameters after some steps of two micro-batches, without `no_sync`."""
    for step in range(STEPS):
        for micro in range(MICRO):
            set_loss_scale(model, 1 / MICRO)
            y = model(tokens(step, micro, world)[parts].flatten(0, 1))
            (y.sin().mean() / MICRO).backward()
        optimizer.step()
        optimizer.zero_grad()
    buffers = [
        buffer.clone() for name, buffer in layer.router.named_buffers() if name.endswith("bias")
    ]
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in layer.parameters()]
    return [*buffers, *(p.detach().clone() for p in whole)]


@functools.cache
def alone(router: str, world: int) -> list[Tensor]:
    layer = make_layer(router)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    balance_on_step(optimizer, layer)
    return train(layer, layer, optimizer, slice(None), world)


def by_ddp(layer: MoE) -> nn.Module:
    return DistributedDataParallel(layer)


def by_fsdp(layer: MoE) -> nn.Module:
    fully_shard(layer)
    return layer


def by_hybrid_fsdp(layer: MoE) -> nn.Module:
    fully_shard(
        layer,
        mesh=init_device_mesh(
            "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("copies", "shards")
        ),
    )
    return layer


def with_data_parallelism(router: str, wrap: Callable[[MoE], nn.Module], says: str) -> list[Tensor]:
    """Train a layer on this rank's tokens; `says` is the way in which the layer's ranks become
    known."""
    layer = make_layer(router)
    world = dist.get_world_size()
    rank = dist.get_rank()
    model = wrap(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    if says == "group":
        balance_on_step(optimizer, layer, dist.group.WORLD)
    elif says == "forward":
        # the layer itself, of which only DDP's forward pass knows that it is wrapped
        balance_on_step(optimizer, layer)
    else:
        balance_on_step(optimizer, model)
    return train(layer, model, optimizer, slice(rank, rank + 1), world)


class Recomputed(nn.Module):
    """The part of the layer that torch's own checkpoint recomputes in its backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def by_ddp_recomputed(layer: MoE) -> nn.Module:
    return DistributedDataParallel(Recomputed(layer))


def by_fsdp_recomputed(layer: MoE) -> nn.Module:
    model = Recomputed(layer)
    fully_shard(model)
    return model


def by_mesh_recomputed(layer: MoE) -> nn.Module:
    mesh = Mesh.create()
    layer.parallelize(mesh, Plan())
    model = Recomputed(layer)
    prepare_ddp(model, mesh)
    return DistributedDataParallel(model)


WAYS: dict[str, tuple[Callable[[MoE], nn.Module], str]] = {
    "ddp": (by_ddp, "model"),
    "ddp, its forward pass": (by_ddp, "forward"),
    "ddp, a group": (by_ddp, "group"),
    "fsdp": (by_fsdp, "model"),
    "hybrid fsdp": (by_hybrid_fsdp, "model"),
    "ddp, recomputed": (by_ddp_recomputed, "model"),
    "fsdp, recomputed": (by_fsdp_recomputed, "model"),
    "mesh, recomputed": (by_mesh_recomputed, "model"),
}


RUNS = [*((ADAPTING[0], way) for way in WAYS), *((router, "ddp") for router in ADAPTING[1:])]
"""Every way with one router, and every router in one way."""


def every_way() -> list[list[Tensor]]:
    return [with_data_parallelism(router, *WAYS[way]) for router, way in RUNS]


def everything() -> dict[str, Any]:
    found = {"ways": every_way(), "refusals": unknown()}
    return found | {
        "accelerate": by_accelerate() if find_spec("accelerate") else None
    }  # last: it changes the environment


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return on_ranks(2, everything)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.random)])
def test_data_parallel_ranks_adapt_as_one_process(world, two_ranks):
    for of_rank in (
        on_ranks(world, every_way) if world > 2 else [found["ways"] for found in two_ranks]
    ):
        for (router, way), of_way in zip(RUNS, of_rank, strict=True):
            expected = alone(router, world)
            assert expected[0].unique().numel() > 1, "the bias moved"
            assert torch.equal(of_way[0], expected[0]), (router, way)
            for found, wanted in zip(of_way[1:], expected[1:], strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_recomputing_in_one_process_changes_nothing():
    layer = make_layer("sigmoid")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    balance_on_step(optimizer, layer)
    for found, wanted in zip(
        train(layer, Recomputed(layer), optimizer, slice(None), 2), alone("sigmoid", 2), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def unknown() -> dict[str, str]:
    x = tokens(0, 0, 2)[dist.get_rank()]
    found = {}
    adapting = MoE(DIM, 6, 8, 2, router="sigmoid", losses=()).double()
    adapting(x).sum().backward()
    found["step"] = refusal(finish_step, adapting)
    found["alone"] = refusal(finish_step, adapting, None)
    found["bias"] = str(bool(adapting.router.bias.any()))
    copied = copy.deepcopy(adapting)
    found["copy"] = refusal(copied.finish_step)
    spanning = make_layer("softmax")
    found["forward"] = refusal(spanning, x)
    found["no training"] = refusal(spanning.eval(), x)
    found["nothing adapts"] = refusal(finish_step, MoE(DIM, 6, 8, 2))
    return found


def test_where_nobody_can_tell_the_layer_refuses(two_ranks):
    for found in (of_rank["refusals"] for of_rank in two_ranks):
        loss = "the loss load_balance_global_batch"
        for what, subject in (("step", "SigmoidTopK"), ("copy", "SigmoidTopK"), ("forward", loss)):
            assert found[what].startswith(f"InputError: {subject} spans the tokens of all ranks")
            assert "group=None" in found[what]
            assert "\n" not in found[what]
        assert (found["alone"], found["no training"], found["nothing adapts"]) == ("", "", "")
        assert found["bias"] == "True"


def test_routers_with_a_bias_adapt():
    routers = {name: make(DIM, 8) for name, make in ROUTERS.items()}
    assert [
        n for n, router in routers.items() if any("bias" in b for b, _ in router.named_buffers())
    ] == ADAPTING
    assert {"sigmoid", "group_limited"} <= set(ADAPTING)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that wraps another one without torch's own set-up, like Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def test_the_hook_reaches_an_optimizer_inside_others():
    layer = MoE(DIM, 6, 8, 2, router="sigmoid", losses=())
    optimizer = Wrapper(Wrapper(torch.optim.SGD(layer.parameters(), lr=0.0)))
    handle = balance_on_step(optimizer, layer)
    layer(torch.randn(9, DIM)).sum().backward()
    optimizer.step()
    assert layer.router.bias.any()
    handle.remove()
    before = layer.router.bias.clone()
    layer(torch.randn(9, DIM)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.router.bias, before)


def by_accelerate() -> list[Tensor]:
    import accelerate

    layer = make_layer("sigmoid")
    world = dist.get_world_size()
    rank = dist.get_rank()
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(size) for name, size in sizes.items()})  # as a launcher says it
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.5))
    assert isinstance(model, DistributedDataParallel)
    balance_on_step(optimizer, model)
    return train(layer, model, optimizer, slice(rank, rank + 1), world)


def test_accelerates_model_and_optimizer_adapt_as_one_process(two_ranks):
    pytest.importorskip("accelerate")
    expected = alone("sigmoid", 2)
    for of_rank in (each["accelerate"] for each in two_ranks):
        assert torch.equal(of_rank[0], expected[0])
        for found, wanted in zip(of_rank[1:], expected[1:], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
