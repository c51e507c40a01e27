"""An MoE layer on a mesh inside ordinary modules: several calls in flight, nesting, recomputation,
gradient accumulation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from meshes import DIM, EXPERTS, every_rank, make_layer, on_mesh, own_expert, tokens_of
from torch import Tensor, nn

from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.experts import ModuleExperts
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.routing.capacity import Capacity
from moesaic.routing.losses import LoadBalance
from moesaic.runtime.routing_cache import checkpoint
from moesaic_lab.recorder import Recorder

GRID = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)
PLANS = {
    "s1": Plan(schedule="s1", chunks=2),
    "s3": Plan(schedule="s3", all_to_all="hier2d"),
    "ted": Plan(schedule="ted"),
    "r=0": Plan(schedule="s2", gather_weights=0),
    "multicast": Plan(schedule="s2", all_to_all="multicast"),
}


def alone(layer: MoE, group: int, times: int = 1) -> tuple[Tensor, Tensor]:
    """Return the output and `times` input gradients of a layer on no mesh."""
    x = tokens_of(group).requires_grad_()
    y = layer(x)
    for _ in range(times):
        y.sin().sum().backward(retain_graph=True)
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize(
    ("plan", "backward_first"), [("s1", "both"), ("r=0", "first"), ("multicast", "second")]
)
def test_two_layers_in_flight_do_not_meet(plan: str, backward_first: str) -> None:
    one = make_layer(seed=1)
    two = make_layer("biases", seed=2)

    def rank(transport: AbstractTransport, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = on_mesh(one, GRID, transport, PLANS[plan])
        second = on_mesh(two, GRID, transport, PLANS["s3"])
        a = first(x)
        b = second(x)
        losses = [a.sin().sum(), b.sin().sum()]
        if backward_first == "both":
            (losses[0] + losses[1]).backward()
        for loss in {"first": losses, "second": losses[::-1], "both": []}[backward_first]:
            loss.backward(retain_graph=True)
        assert x.grad is not None
        return a.detach(), b.detach(), x.grad

    for at, (a, b, dx) in enumerate(every_rank(GRID, rank, seed=3)):  # type: ignore[misc]
        group = GRID.coordinate(at, "dp")
        torch.testing.assert_close(a, alone(one, group)[0])
        torch.testing.assert_close(b, alone(two, group)[0])
        torch.testing.assert_close(dx, alone(one, group)[1] + alone(two, group)[1])


def test_layers_stack_and_nest() -> None:
    """An MoE layer on the mesh with MoE layers as user-defined experts, after another layer."""

    def nested(dim: int, hidden: int, count: int) -> ModuleExperts:
        return ModuleExperts(
            lambda: nn.Sequential(own_expert(), MoE(DIM, 4, 2, 2, losses=())), dim, count
        )

    grid = Grid(world=4, ep=4, tp=2)
    torch.manual_seed(0)
    inner = make_layer()
    outer = MoE(DIM, 8, EXPERTS, 2, experts=nested, losses=()).double()

    def rank(transport: AbstractTransport, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = on_mesh(outer, grid, transport, Plan(schedule="s2"))(
            on_mesh(inner, grid, transport, Plan(schedule="s1"))(x)
        )
        y.sin().sum().backward()
        return y.detach(), x.grad

    for at, (y, dx) in enumerate(every_rank(grid, rank)):  # type: ignore[misc]
        x = tokens_of(grid.coordinate(at, "dp")).requires_grad_()
        expected = outer(inner(x))
        expected.sin().sum().backward()
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(dx, x.grad)


@pytest.mark.parametrize(
    ("plan", "grid"),
    [("s1", GRID), ("s2", Grid(world=2, tp=2)), ("s3", Grid(world=2, ep=2))],
    ids=str,
)
def test_backward_runs_again_on_a_retained_graph(plan: str, grid: Grid) -> None:
    """Another backward pass is correct even if a rank starts it while a peer is still receiving
    from the previous one."""
    whole = make_layer()

    def rank(transport: AbstractTransport, x: Tensor) -> Tensor:
        y = on_mesh(whole, grid, transport, Plan(schedule=plan))(x).sin().sum()  # type: ignore[arg-type]
        for _ in range(3):
            y.backward(retain_graph=True)
        assert x.grad is not None
        return x.grad

    for seed in range(2):
        for at, dx in enumerate(every_rank(grid, rank, seed=seed)):
            torch.testing.assert_close(dx, alone(whole, grid.coordinate(at, "dp"), times=3)[1])


@pytest.mark.parametrize("plan", ["s1", "s3", "ted"])
def test_recomputation_exchanges_no_counts(plan: str) -> None:
    """Counted on the wire: checkpointing does not change the number of small exchanges, which only
    routing makes."""
    whole = make_layer(losses=(LoadBalance(0.1),))

    def rank(transport: AbstractTransport) -> list[tuple[Counter[int], Tensor]]:
        found = []
        for recompute in (False, True):
            x = tokens_of(GRID.coordinate(transport.rank, "dp")).requires_grad_()
            recorder = Recorder(transport)
            layer = on_mesh(whole, GRID, recorder, PLANS[plan])  # type: ignore[arg-type]
            y = checkpoint(layer, x) if recompute else layer(x)
            y.sin().sum().backward()
            assert x.grad is not None
            found.append((Counter(r.length for r in recorder.ranges), x.grad))
        return found

    for (plain, dx), (recomputed, dx_again) in run_ranks(4, rank):
        program = max(plain)
        assert plain[program] == 1
        assert recomputed[program] == 2
        assert {k: n for k, n in plain.items() if k != program} == {
            k: n for k, n in recomputed.items() if k != program
        }
        assert torch.equal(dx, dx_again)


@pytest.mark.parametrize("plan", ["s1", "baseline"])
def test_a_padded_capacity_computes_what_the_plain_one_does(plan: str) -> None:
    whole = make_layer("biases")
    mask = torch.tensor([False, True, True, True, False, True])

    def rank(transport: AbstractTransport) -> list[tuple[Tensor, ...]]:
        found = []
        for padded in (False, True):
            x = tokens_of(GRID.coordinate(transport.rank, "dp"))
            x[~mask] = float("nan")
            x.requires_grad_()
            layer = on_mesh(whole, GRID, transport, Plan(schedule=plan, chunks=2))  # type: ignore[arg-type]
            y = layer(x, mask=mask, capacity=Capacity.fixed(8.0, scope="rank", padded=padded))
            y[mask].sin().sum().backward()
            grads = [p.grad for p in layer.parameters()]
            found.append((y[mask].detach(), x.grad[mask], *grads))  # type: ignore[index]
        return found  # type: ignore[return-value]

    for plain, padded in run_ranks(4, rank):
        for one, other in zip(plain, padded):
            torch.testing.assert_close(one, other)
