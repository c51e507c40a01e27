"""The choice of experts as one operation against the routers' own steps, in float64, and as an
operator."""

from __future__ import annotations

import pytest
import torch

from helpers import pairwise
from moesaic.kernels.choice import choose, choose_backward, choose_forward
from moesaic.kernels.choice_call import ChoiceRule, WantedSums
from moesaic.routing.capacity import Capacity, Dropless
from moesaic.routing.losses import LoadBalance, ZLoss
from moesaic.routing.route import TokenInfo, route
from moesaic.routing.routers import ROUTERS

NAMES = ("softmax", "switch", "sigmoid", "group_limited")
LOSSES = {"none": (), "both": (LoadBalance(0.1), ZLoss(0.01)), "z": (ZLoss(0.5),)}


def routed(router, x, *, in_steps, losses, capacity, valid):
    """Return the routing and the gradients, by the one operation or by the router's own steps."""
    if in_steps:
        # replaced by the caller: no longer one operation
        router.choose = type(router).choose.__get__(router)
    x = x.clone().requires_grad_()
    result = route(
        router, x, top_k=2, capacity=capacity, losses=losses, batch=TokenInfo(valid_T=valid)
    )
    total = (
        result.routing.weight * torch.linspace(-1, 1, len(result.routing.weight), dtype=x.dtype)
    ).sum()
    total = total if result.loss is None else total + result.loss
    grads = torch.autograd.grad(total, [x, *router.parameters()], materialize_grads=True)
    router.__dict__.pop("choose", None)
    return result, grads


@pytest.mark.parametrize(
    ("name", "losses", "padded", "capacity", "dtype"),
    pairwise(
        NAMES,
        LOSSES,
        (False, True),
        (Dropless(), Capacity.fixed(0.7)),
        (torch.float64, torch.float32),
    ),
    ids=str,
)
def test_one_operation_does_what_the_steps_do(name, losses, padded, capacity, dtype):
    torch.manual_seed(0)
    router = ROUTERS[name](12, 8).to(dtype)
    x = torch.randn(40, 12, dtype=dtype)
    valid = torch.arange(40) % 3 > 0 if padded else None
    options = {"losses": LOSSES[losses], "capacity": capacity, "valid": valid}
    (expected, true_grads), (actual, grads) = (
        routed(router, x, in_steps=each, **options) for each in (True, False)
    )
    assert router.fused(2) is not None
    for field in ("token", "expert", "counts", "requested", "num_valid", "nonfinite"):
        assert torch.equal(getattr(actual.routing, field), getattr(expected.routing, field)), field
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for mine, true in zip(
        (actual.routing.weight, *grads), (expected.routing.weight, *true_grads), strict=True
    ):
        torch.testing.assert_close(mine, true, atol=tolerance, rtol=tolerance)
    assert actual.routing.losses.keys() == expected.routing.losses.keys()
    for loss, value in expected.routing.losses.items():
        torch.testing.assert_close(actual.routing.losses[loss], value)


@pytest.mark.parametrize("by_sigmoid", [False, True])
def test_the_operators_hold_what_they_promise(by_sigmoid):
    rule = ChoiceRule(2, by_sigmoid, True, 1.5)
    wanted = WantedSums(balance=True, z=True, reduced=True)
    logits = torch.randn(6, 4)
    settings = (*rule, *wanted)
    torch.library.opcheck(choose_forward.overload, (logits, None, None, None, *settings))
    chosen = choose(logits, rule, wanted)
    grads = torch.ones(12), torch.ones(()), torch.ones(())
    arguments = (logits, None, chosen.expert, chosen.counts, chosen.num_valid, *grads, *settings)
    torch.library.opcheck(choose_backward.overload, arguments)


def test_a_router_with_a_step_of_its_own_is_not_fused():
    class Own(type(ROUTERS["softmax"](4, 4))):
        def weigh(self, scores, choice, top_k):
            return super().weigh(scores, choice, top_k) * 2

    assert Own(4, 4).fused(2) is None
