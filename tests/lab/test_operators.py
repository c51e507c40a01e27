"""What a call of the layer costs besides its experts: operators, and bytes kept for backward."""

from __future__ import annotations

import pytest
import torch

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.program.grid import Grid
from moesaic.routing.routers import ROUTERS
from moesaic_lab.local_copies import unseen
from moesaic_lab.operators import (
    DIM,
    WORLD,
    HandWritten,
    OperatorCounter,
    claims,
    count_on_mesh,
    counted,
    hand_step,
    kept_row,
    make_layer,
)


def test_the_counter_sees_operators_inside_ours_and_leaves_the_experts_out():
    layer = make_layer()
    names = counted(layer, list(layer.parameters()))
    assert "aten.argmax.default" in names["forward"], "inside the choice"
    assert "aten._softmax_backward_data.default" in names["backward"], "inside its gradient"
    assert not any("moesaic" in name or "silu" in name for each in names.values() for name in each)
    with OperatorCounter() as counter:
        torch.ones(3).view(3, 1) + 1
    assert counter.names == ["aten.ones.default", "aten.view.default", "aten.add.Tensor"]


def test_a_call_on_a_mesh_issues_no_more_operators_than_these():
    grid = Grid(world=WORLD, ep=WORLD)

    def rank(transport: AbstractTransport) -> dict[str, int]:
        transport.issue = unseen(transport.issue)  # between threads, messages are many operators
        transport.wait = unseen(transport.wait)
        names = count_on_mesh(Mesh(grid, transport))
        return {each: len(operators) for each, operators in names.items()}

    for found in run_ranks(WORLD, rank):
        assert found["forward"] <= 95
        assert found["backward"] <= 57


def test_the_hand_written_layer_computes_what_the_layer_computes():
    layer = make_layer()
    hand = HandWritten(layer)
    x = torch.randn(4, 8, DIM, dtype=torch.float64)
    layer.double()
    mine = x.clone().requires_grad_()
    theirs = x.float().requires_grad_()
    out = layer(mine)
    out.backward(torch.ones_like(out))
    y = hand_step(hand, theirs)
    pairs = [(y, out), (theirs.grad, mine.grad), (hand.router.grad, layer.router.weight.grad)]
    for actual, true in [*pairs, (hand.w2.grad, layer.experts.w2.grad)]:
        torch.testing.assert_close(actual.double(), true, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_16_bit_layer_keeps_only_what_backward_needs(router):
    assert kept_row(router)["kept_over_need"] <= 1.02


@pytest.mark.parametrize("router", ROUTERS)
def test_under_autocast_a_layer_keeps_one_copy_of_its_tokens(router):
    assert kept_row(router, torch.float32)["kept_over_need"] <= 1.02


def test_claims_that_were_not_measured_say_so():
    rows = [
        {"path": "gpu", "pass": "forward", "operators": 35},
        {"path": "host", "host_over_hand": 1.2},
    ]
    values = {claim.name: claim.value for claim in claims(rows)}
    assert values["layer.operators_forward"] == 35
    assert values["layer.operators_forward_mesh"] is None
    assert values["layer.host_over_hand"] == 1.2
