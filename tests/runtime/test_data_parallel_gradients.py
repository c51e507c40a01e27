"""Averaging over data parallelism: dense gradients summed over dp, expert gradients over edp, both
divided by dp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.experts import GatedExperts
from moesaic.program.grid import Grid
from moesaic.runtime import data_parallel
from moesaic.runtime.data_parallel import average_gradients, expert_parameters
from moesaic.runtime.sharding import shard_experts
from worlds import refusal


class Holder(nn.Module):
    """A dense parameter, spread experts, and a frozen and an unused parameter."""

    def __init__(self, grid: Grid, rank: int) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(3))
        self.experts = GatedExperts(2, 4, 4)
        self.shared = GatedExperts(2, 2, 1)
        shard_experts(self.experts, grid, rank, None)


@pytest.mark.parametrize(
    ("grid", "bucket_bytes"),
    [
        (Grid(world=4, tp=2, ep=2), 16),
        (Grid(world=8, tp=2, ep=2, etp=2), data_parallel.BUCKET_BYTES),
        (Grid(world=8, ep=2, etp=2, innermost="ep"), 16),
        (Grid(world=1), data_parallel.BUCKET_BYTES),
    ],
    ids=str,
)
def test_dense_is_averaged_over_dp_and_experts_are_summed_over_their_copies_and_divided_by_dp(
    grid: Grid, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", bucket_bytes)

    def rank(transport: AbstractTransport) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        module = Holder(grid, transport.rank)
        spread = {id(p) for p in expert_parameters(module)}
        assert spread == {id(p) for p in module.experts.parameters()}, "a shared expert is dense"
        for parameter in module.parameters():
            if parameter.requires_grad and parameter is not module.unused:
                parameter.grad = torch.full_like(parameter, float(2**transport.rank))
        average_gradients(module, Mesh(grid, transport))
        assert module.experts.w13.grad is not None
        torch.testing.assert_close(module.shared.w13.grad[0, 0, 0, 0], module.dense.grad[0])
        assert torch.equal(module.unused.grad, torch.zeros(3))  # type: ignore[arg-type]
        return (
            module.dense.grad,
            module.experts.w13.grad,
            module.experts.w2.grad,
            module.frozen.grad,
        )  # type: ignore[return-value]

    for at, (dense, w1, w2, frozen) in enumerate(run_ranks(grid.world, rank)):
        over_dp = sum(2.0**peer for peer in range(at % grid.tp, grid.world, grid.tp)) / grid.dp
        copies = (
            sum(
                2.0**peer
                for peer in range(at % (grid.ep * grid.etp), grid.world, grid.ep * grid.etp)
            )
            / grid.dp
        )
        assert torch.equal(dense, torch.full_like(dense, over_dp))
        assert torch.equal(w1, torch.full_like(w1, copies))
        assert torch.equal(w2, torch.full_like(w2, copies))
        assert frozen is None


def test_ranks_need_not_agree_on_which_gradients_exist() -> None:
    def rank(transport: AbstractTransport) -> Tensor | None:
        module = nn.Linear(2, 1, bias=False)
        if transport.rank == 1:
            module.weight.grad = torch.full_like(module.weight, 6.0)
        average_gradients(module, Mesh(Grid(world=3), transport))
        return module.weight.grad

    for found in run_ranks(3, rank):
        assert found.tolist() == [[2.0, 2.0]]


def test_gradients_without_a_mesh_are_refused() -> None:
    with pytest.raises(
        InputError, match="mesh=None is no Mesh: give the mesh of the module's layers"
    ):
        average_gradients(nn.Linear(1, 1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dense", "experts.w13"])
def test_ranks_that_froze_different_parameters_are_told_which(name: str) -> None:
    grid = Grid(world=2, ep=2)

    def rank(transport: AbstractTransport) -> str:
        module = Holder(grid, transport.rank)
        mesh = Mesh(grid, transport)
        average_gradients(module, mesh)
        other = Holder(grid, transport.rank)
        other.get_parameter(name).requires_grad_(transport.rank == 0)
        return refusal(average_gradients, other, mesh)

    for said in run_ranks(2, rank):
        assert said.startswith(
            f"InputError: requires_grad of {name} differs: True on rank 0, False on rank 1: freeze"
        )
