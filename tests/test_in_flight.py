"""Two micro-batches in flight compute what they compute one after the other, and share nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshes import DIM, EXPERTS, HIDDEN
from torch import Tensor, nn

from moesaic import LoadBalance, Mesh, MoE, ZLoss, in_flight, set_loss_scale
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from worlds import on_ranks


class Model(nn.Module):
    """Blocks of a dense layer and a MoE layer, and a head."""

    def __init__(self, num_blocks: int = 3, **options: Any) -> None:
        super().__init__()
        options = {"losses": (), **options}
        self.dense = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_blocks))
        self.moe = nn.ModuleList(MoE(DIM, HIDDEN, EXPERTS, 2, **options) for _ in range(num_blocks))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        for dense, moe in zip(self.dense, self.moe):
            x = x + moe(torch.tanh(dense(x)))
        return self.head(x).square().mean()


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def batches_of(rank: int, count: int = 2, tokens: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(tokens, DIM, generator=generator, dtype=torch.float64) for _ in range(count)
    ]


def spread(model: Model, mesh: Mesh, plan: Plan | None = None) -> Model:
    for layer in model.moe:
        layer.parallelize(mesh, plan or Plan())
    return model


def take_gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        found.append(local.clone())
        parameter.grad = None
    return found


def one_after_another(
    model: nn.Module, batches: list[Tensor], loss_of: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[float], list[Tensor]]:
    losses = []
    for batch in batches:
        loss = (loss_of or model)(batch)
        (loss / len(batches)).backward()
        losses.append(float(loss.detach()))
    return losses, take_gradients(model)


def together(
    model: nn.Module, batches: list[Tensor], loss_of: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[float], list[Tensor]]:
    found = []
    for losses in in_flight(loss_of or model, batches):
        (torch.stack(losses).sum() / len(batches)).backward()
        found += [float(loss.detach()) for loss in losses]
    return found, take_gradients(model)


def largest_difference(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


def both_ways(rank_batches: int = 2) -> tuple[list[float], list[float], float]:
    mesh = Mesh.create(ep=2)
    model = spread(make_model(), mesh)
    batches = batches_of(mesh.rank, rank_batches)
    expected = one_after_another(model, batches)
    found = together(model, batches)
    return expected[0], found[0], largest_difference(expected[1], found[1])


def test_two_ranks_over_gloo_get_the_same_bits() -> None:
    for expected, found, difference in on_ranks(2, both_ways):
        assert found == expected
        assert difference == 0


def on_loopback(
    function: Callable[[Mesh], Any], *, in_order: bool = False, **sizes: int
) -> list[Any]:
    """Run a function on all ranks of a loopback mesh of these sizes."""
    grid = Grid(**sizes)

    def of_rank(transport: AbstractTransport) -> Any:
        return function(Mesh(grid, transport))

    return run_ranks(grid.world, of_rank, in_order=in_order)


SCHEDULES = {
    "baseline": (Plan(schedule="baseline"), {"world": 2, "ep": 2}),
    "s1 in chunks": (Plan(schedule="s1", chunks=2), {"world": 4, "tp": 2, "ep": 2, "etp": 2}),
    "s2": (Plan(schedule="s2"), {"world": 4, "tp": 2, "ep": 4}),
    "weights gathered": (
        Plan(schedule="s2", gather_weights=0),
        {"world": 4, "tp": 2, "ep": 2, "etp": 2},
    ),
    "multicast": (
        Plan(schedule="s2", all_to_all="multicast"),
        {"world": 4, "ep": 4, "ranks_per_node": 2},
    ),
    "hier2d": (
        Plan(schedule="s3", all_to_all="hier2d"),
        {"world": 4, "ep": 4, "ranks_per_node": 2},
    ),
    "data parallel experts": (Plan(), {"world": 4, "ep": 2}),
}


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_gets_the_same_bits(schedule: str, in_order: bool) -> None:
    """With `in_order`, messages match in the order of issue, as on NCCL."""
    plan, sizes = SCHEDULES[schedule]
    whole = make_model(losses=(LoadBalance(0.1), ZLoss(0.01)))

    def rank(mesh: Mesh) -> tuple[list[float], list[float], float]:
        model = spread(copy.deepcopy(whole), mesh, plan)
        batches = batches_of(mesh.grid.coordinate(mesh.rank, "dp"))
        set_loss_scale(model, 0.5)
        expected = one_after_another(model, batches)
        found = together(model, batches)
        return expected[0], found[0], largest_difference(expected[1], found[1])

    for expected, found, difference in on_loopback(rank, in_order=in_order, **sizes):
        assert found == expected
        assert difference == 0
