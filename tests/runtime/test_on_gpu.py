"""A layer on a GPU: results against the CPU, host waits, CUDA graphs, and meshes whose ranks share
one GPU without NCCL.

Without a GPU the stand-in takes its place. It cannot replay a graph, so there a step is searched
for what no graph can hold. `moesaic bench device --device cuda` runs this file on the GPU.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from host_waits import CAPACITIES, WaitCase, cases
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.cuda_graphs import capture
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.routing.capacity import AbstractCapacity, Capacity
from stand_in import DEVICE, StandIn, pretending, to_device, values

HAS_GPU = torch.cuda.is_available()
DTYPES = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest allowed relative error by dtype; float32 leaves room for TF32, which the CPU does not
have."""
ROUTERS = ("softmax", "sigmoid", "switch", "expert_choice")
PLANS = (
    "linear.dropless",
    "linear.padded",
    "hier2d.dropless",
    "multicast.dropless",
    "s2.dropless",
    "int8.dropless",
)
SIZES = (64, 96, 8, 2)
TOKENS = 200
"""(dim, hidden, experts, top_k) and the number of tokens."""
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
capacities = pytest.mark.parametrize("capacity", ["dropless", "capacity"])
EVERY_CAPACITY: dict[str, AbstractCapacity] = CAPACITIES | {
    "fitted": Capacity.fitted(at_most=1.5),
    "by score": Capacity.fixed(0.75, order="score"),
}


def layer_of(dtype: torch.dtype, capacity: str, router: str = "softmax") -> tuple[MoE, Tensor]:
    layer = MoE(*SIZES, losses=(), router=router, capacity=EVERY_CAPACITY[capacity]).to(dtype)
    return layer, torch.randn(TOKENS, SIZES[0]).to(dtype)


def step(layer: MoE, x: Tensor) -> list[Any]:
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = layer(x)
    (y * y).sum().backward()
    return [
        y.detach(),
        x.grad,
        *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None),
    ]


@contextmanager
def device() -> Iterator[tuple[torch.device, Callable[[Any], Any], StandIn | None]]:
    """Yield a device, a function that moves a layer to it, and the stand-in (None on a GPU)."""
    if HAS_GPU:
        yield DEVICE, lambda layer: layer.to(DEVICE), None
        return
    with pretending(), StandIn() as stand_in:
        yield DEVICE, to_device, stand_in


def largest_error(results: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(results, exact, strict=True)
    on_cpu = [(values(result).cpu().float(), each.cpu().float()) for result, each in pairs]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in on_cpu)


QUICK = [(torch.bfloat16, "softmax")]
MORE = [pair for pair in itertools.product(DTYPES, ROUTERS) if pair not in QUICK]


@capacities
@pytest.mark.parametrize(
    ("dtype", "router"), [*QUICK, *(pytest.param(*pair, marks=on_gpu) for pair in MORE)], ids=str
)
def test_results_are_those_of_float32_on_the_cpu(
    dtype: torch.dtype, router: str, capacity: str
) -> None:
    layer, x = layer_of(dtype, capacity, router)
    expected = step(copy.deepcopy(layer).float(), x.float())
    with device() as (where, move, _):
        assert largest_error(step(move(layer), x.to(where)), expected) < DTYPES[dtype]


@on_gpu
@capacities
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_second_step_makes_no_host_wait(dtype: torch.dtype, capacity: str) -> None:
    layer, x = layer_of(dtype, capacity)
    layer = layer.cuda()
    x = x.cuda()
    step(layer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_graph(layer: MoE, x: Tensor, transport: AbstractTransport | None = None) -> None:
    """Capture a step and replay it on other tokens; on the stand-in, look for waits and uploads."""
    with device() as (where, move, stand_in):
        layer = move(layer)
        x = x.to(where)
        if transport is not None:
            transport.device = where
        step(layer, x)
        if stand_in is not None:
            stand_in.record.clear()
            step(layer, x)
            assert (stand_in.record.waits, stand_in.record.uploads) == ([], [])
            return
        static = x.clone().requires_grad_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(layer, static)
        torch.cuda.current_stream().wait_stream(stream)
        layer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        other = x.flip(0)
        with torch.cuda.graph(graph):
            y = layer(static)
            (y * y).sum().backward()
        with torch.no_grad():
            static.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [y.detach().clone(), static.grad.clone()]
        assert largest_error(replayed, step(layer, other)[:2]) < DTYPES[x.dtype]


@pytest.mark.parametrize("capacity", EVERY_CAPACITY)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(dtype, marks=on_gpu) for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_a_graph_can_hold_a_step(dtype: torch.dtype, capacity: str) -> None:
    check_graph(*layer_of(dtype, capacity))


@on_gpu
@pytest.mark.parametrize("capacity", EVERY_CAPACITY)
@pytest.mark.parametrize("router", ROUTERS[:3])
def test_a_captured_layer_equals_the_layer(router: str, capacity: str) -> None:
    layer, x = layer_of(torch.bfloat16, capacity, router)
    layer = layer.cuda()
    x = x.cuda().requires_grad_()
    captured = capture(layer, x)
    for other in (x.detach().flip(0).requires_grad_(), x):
        results = []
        for run in (layer, captured):
            layer.zero_grad(set_to_none=True)
            for _ in range(2):  # gradients add up
                other.grad = None
                y = run(other)
                (y * y).sum().backward()
            results.append(
                [y.detach().clone(), other.grad, *(each.grad for each in layer.parameters())]
            )
        assert largest_error(*results) == 0


@on_gpu
def test_a_layer_that_waits_is_not_captured() -> None:
    layer = MoE(*SIZES, losses=()).cuda().double()
    with pytest.raises(InputError, match="the host waits for the GPU in"):
        capture(
            layer,
            torch.randn(TOKENS, SIZES[0], device="cuda", dtype=torch.float64, requires_grad=True),
        )


def test_a_graph_can_hold_a_plan_of_a_padded_capacity() -> None:
    """On a mesh of one rank, which runs a plan's tasks without messages."""
    layer, x = layer_of(torch.bfloat16, "padded")

    def rank(transport: AbstractTransport) -> None:
        layer.parallelize(Mesh(Grid(world=1), transport))
        check_graph(layer, x, transport)

    run_ranks(1, rank)


@on_gpu
@pytest.mark.parametrize(
    "case", [case for case in cases() if case.name in PLANS], ids=lambda case: case.name
)
def test_ranks_that_share_a_gpu_equal_those_on_the_cpu(case: WaitCase) -> None:
    whole = MoE(*SIZES, capacity=CAPACITIES[case.capacity], losses=()).bfloat16()
    tokens = [torch.randn(32, SIZES[0]).bfloat16() for _ in range(case.grid.world)]

    def rank(transport: AbstractTransport, where: str) -> list[Tensor]:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(case.grid, transport), case.plan)
        transport.device = torch.device(where)
        x = tokens[case.grid.coordinate(transport.rank, "dp")].to(where)
        return [tensor.cpu() for tensor in step(layer.to(where), x)[:2]]

    there, here = (
        run_ranks(case.grid.world, partial(rank, where=where)) for where in ("cuda", "cpu")
    )
    assert max(map(largest_error, there, here)) < DTYPES[torch.bfloat16]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
@capacities
def test_a_layer_on_the_second_gpu_needs_no_current_device(capacity: str) -> None:
    """Eagerly and replayed, forward and backward, while the caller stays on the first."""
    layer, x = layer_of(torch.bfloat16, capacity)
    expected = step(copy.deepcopy(layer).to("cuda:0"), x.to("cuda:0"))
    there = layer.to("cuda:1")
    x = x.to("cuda:1")
    assert torch.cuda.current_device() == 0
    assert largest_error(step(there, x), expected) < 1e-6
    captured = capture(there, x.requires_grad_())
    there.zero_grad(set_to_none=True)
    y = captured(x)
    (y * y).sum().backward()
    assert largest_error([y.detach()], expected[:1]) < 1e-6
    assert torch.cuda.current_device() == 0
