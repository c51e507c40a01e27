"""Test your own expert-parallel layer on every small mesh:
pytest -p moesaic.testing.plugin examples/test_your_layer.py

The layer is naive on purpose: top-1, experts sharded over ep, one all-to-all for dispatch and one
for combine. Its training loop averages gradients over all ranks, but the experts' only over edp,
since "each rank has its own experts". The experts' gradients are then sums over the tokens of ep
ranks instead of means, so they are ep times too large. The loss still goes down and every shape is
right, so the bug is easy to miss. The test finds it; with the last line of `average_all` it passes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moesaic.testing.certify import Rank, assert_equivalent

DIM = 4
NUM_EXPERTS = 4


class PlainMoE(nn.Module):
    """The layer in one process: each token goes to its best expert."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate = nn.Parameter(
            torch.randn(NUM_EXPERTS, DIM, generator=generator, dtype=torch.float64)
        )
        self.weight = nn.Parameter(
            torch.randn(NUM_EXPERTS, DIM, DIM, generator=generator, dtype=torch.float64)
        )

    def forward(self, x: Tensor) -> Tensor:
        gates, expert = (x @ self.gate.T).softmax(-1).max(-1)
        return gates[:, None] * torch.einsum("td,tod->to", x, self.weight[expert])


class Exchange(torch.autograd.Function):
    """An all-to-all of rows over ep; backward, their gradients take the reverse way."""

    @staticmethod
    def forward(ctx, rank: Rank, rows: Tensor, counts: list[int], sizes: list[int]) -> Tensor:
        ctx.rank = rank
        ctx.counts = counts
        received = rank.all_to_all(rows.split(counts), "ep")
        sizes[:] = [len(part) for part in received]
        ctx.sizes = list(sizes)
        return torch.cat(received)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return None, torch.cat(ctx.rank.all_to_all(gradient.split(ctx.sizes), "ep")), None, None


class NaiveExpertParallelMoE(nn.Module):
    """The same layer with its experts sharded over ep."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        plain = PlainMoE()
        each = NUM_EXPERTS // rank.grid.ep
        first = rank.grid.coordinate(rank.number, "ep") * each
        self.rank = rank
        self.each = each
        self.gate = plain.gate
        self.weight = nn.Parameter(plain.weight.detach()[first : first + each].clone())

    def forward(self, x: Tensor) -> Tensor:
        probs = (x @ self.gate.T).softmax(-1)
        gates, expert = probs.max(-1)
        order = expert.argsort(stable=True)  # tokens by expert, so by the expert's rank too
        expert = expert[order]
        counts = torch.bincount(expert // self.each, minlength=self.rank.grid.ep).tolist()
        # dispatch the tokens, with the number of each one's expert on its rank
        sizes: list[int] = []
        rows = Exchange.apply(self.rank, x[order], counts, sizes)
        local = torch.cat(self.rank.all_to_all((expert % self.each).split(counts), "ep"))
        out = torch.einsum("td,tod->to", rows, self.weight[local])
        # combine: the results go back, and into the order of the tokens
        back = Exchange.apply(self.rank, out, list(sizes), [])
        return gates[:, None] * back[order.argsort()]


def average_all_but_experts(layer: nn.Module, rank: Rank) -> None:
    """Average gradients with the bug: the experts' gradients remain sums over the ranks of ep."""
    layer.gate.grad = rank.all_reduce(layer.gate.grad, "dp") / rank.grid.dp
    layer.weight.grad = rank.all_reduce(layer.weight.grad, "edp") / rank.grid.edp


def average_all(layer: nn.Module, rank: Rank) -> None:
    """Average gradients correctly: every gradient is a mean over the data-parallel groups."""
    layer.gate.grad = rank.all_reduce(layer.gate.grad, "dp") / rank.grid.dp
    layer.weight.grad = rank.all_reduce(layer.weight.grad, "edp") / rank.grid.dp


def shard(name: str, gradients: dict[str, Tensor], rank: Rank) -> Tensor:
    """Return the gradient that a rank must have: its own experts' part of `weight`, all of
    `gate`."""
    whole = gradients[name]
    return (
        whole.chunk(rank.grid.ep)[rank.grid.coordinate(rank.number, "ep")]
        if name == "weight"
        else whole
    )


@pytest.mark.moe_meshes(max_ranks=4, axes=("ep",))
def test_the_layer_is_right_on_every_mesh(moe_mesh):
    assert_equivalent(
        NaiveExpertParallelMoE, PlainMoE(), moe_mesh, dim=DIM, shard=shard, finish=average_all
    )


@pytest.mark.moe_meshes(max_ranks=4, axes=("ep",))
def test_the_bug_is_found_wherever_experts_are_spread(moe_mesh):
    """Your own test would only call `assert_equivalent` and would fail here, with this message."""

    def check() -> None:
        assert_equivalent(
            NaiveExpertParallelMoE,
            PlainMoE(),
            moe_mesh,
            dim=DIM,
            shard=shard,
            finish=average_all_but_experts,
        )

    if moe_mesh.ep == 1:
        check()
        return
    with pytest.raises(
        AssertionError, match=f"gradient of weight .* it is {moe_mesh.ep} times what it should be"
    ):
        check()


@pytest.mark.moe_meshes(max_ranks=2)
def test_code_of_your_own_on_all_ranks(moe_mesh, moe_ranks):
    totals = moe_ranks(lambda rank: int(rank.all_reduce(torch.tensor(rank.number + 1), "dp", "tp")))
    assert totals == [sum(range(1, moe_mesh.world + 1))] * moe_mesh.world
