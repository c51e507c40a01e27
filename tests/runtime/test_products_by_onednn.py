"""oneDNN's float32 product gets packed matrices only, also in layers whose weights travel.

Given a matrix whose rows lie apart in memory, the operator runs oneDNN's reference code, some
thousand times as long. Weights that travelled lie three matrices side by side, so their rows do.
"""

from __future__ import annotations

import pytest
import torch
from meshes import on_mesh
from torch import Tensor

from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.kernels import by_expert, products
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

DIM = 32
HIDDEN = 48
EXPERTS = 4
TOKENS = 64
EP = Grid(world=4, ep=4, ranks_per_node=2)
ETP = Grid(world=4, ep=2, etp=2, ranks_per_node=2)
PLANS = {
    "plain": (EP, Plan()),
    "published": (EP, Plan(replication="published")),
    "shadow": (EP, Plan(replication="shadow")),
    "eplb": (EP, Plan(replication="eplb")),
    "eplb, chunks": (EP, Plan(replication="eplb", chunks=2)),
    "eplb, shards": (ETP, Plan(replication="eplb")),
    "r=0": (ETP, Plan(schedule="s2", gather_weights=0)),
    "r=0, chunks": (ETP, Plan(schedule="s1", gather_weights=0, chunks=2)),
    "r=1": (ETP, Plan(schedule="s2", gather_weights=1)),
    "r=1, one expert": (Grid(world=4, etp=4), Plan(gather_weights=1)),
}


class Operands:
    """Stands for the operator and notes the strides of its matrices."""

    def __init__(self) -> None:
        self.calls = 0
        self.apart: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Shape and strides of each matrix whose rows lie apart."""

    def __call__(self, rows: Tensor, transposed: Tensor, *others: object) -> Tensor:
        self.calls += 1
        if not transposed.is_contiguous() and not transposed.t().is_contiguous():
            self.apart.append((tuple(transposed.shape), transposed.stride()))
        return rows @ transposed.t()


@pytest.fixture
def operands(monkeypatch) -> Operands:
    """Let all float32 products go through the stand-in that can go through oneDNN."""
    operands = Operands()
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", operands, raising=False)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "FEWEST", 0)
    monkeypatch.setattr(products, "NARROWEST", 1)
    return operands


@pytest.fixture
def travelled(monkeypatch) -> list[tuple[int, ...]]:
    """The strides of matrices with rows apart that the experts multiply by."""
    strides: list[tuple[int, ...]] = []

    def noted(rows: Tensor, matrix: Tensor, out: Tensor, behind: int = 0) -> None:
        if not matrix.is_contiguous() and not matrix.t().is_contiguous():
            strides.append(matrix.stride())
        products.rows_product(rows, matrix, out, behind)

    monkeypatch.setattr(by_expert, "rows_product", noted)
    return strides


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_weights_that_travelled_reach_onednn_packed(plan, kind, operands, travelled, monkeypatch):
    # copied, or left to MKL
    monkeypatch.setattr(products, "FEWEST_TO_COPY", 0 if kind == "swiglu" else 10**6)
    grid, chosen = PLANS[plan]
    torch.manual_seed(0)
    whole = MoE(DIM, HIDDEN, EXPERTS, 2, experts=kind, losses=())
    tokens = torch.randn(grid.world, TOKENS, DIM)
    tokens[..., 0] += 4.0 * (torch.rand(grid.world, TOKENS) < 0.6)
    with torch.no_grad():
        whole.router.weight[0, 0] = 20.0  # one expert gets most tokens

    def rank(transport: AbstractTransport) -> list[Tensor]:
        return _step(
            on_mesh(whole, grid, transport, chosen), tokens[grid.coordinate(transport.rank, "dp")]
        )

    found = run_ranks(grid.world, rank)
    assert bool(travelled) == (plan != "plain")
    assert operands.calls
    assert operands.apart == []
    for at, (y, dx) in enumerate(found):
        expected = _step(whole, tokens[grid.coordinate(at, "dp")])
        torch.testing.assert_close(y, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dx, expected[1], rtol=1e-4, atol=1e-4)


def _step(layer: MoE, tokens: Tensor) -> list[Tensor]:
    """Return a layer's result and its input's gradient."""
    x = tokens.clone().requires_grad_()
    y = layer(x)
    y.sin().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]
