"""Top-k routing against a stable sort in float64, ties and padding columns included, and its gradient."""

from __future__ import annotations

import pytest
import torch

from helpers import ODD_LOGITS, ranked
from moesaic.kernels.triton.route import SCORES, route, route_reference
from moesaic.kernels.triton.sort import Order, sort
from moesaic.routing.routers import SigmoidTopK, SoftmaxTopK
from moesaic.routing.routing import Scores

SIZES = [(0, 4, 2), (1, 1, 1), (3, 5, 5), (7, 5, 2), (40, 64, 8), (300, 16, 1)]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_routes_as_a_stable_sort_does(score, num_tokens, num_experts, top_k, ties, device):
    logits = torch.randn(num_tokens, num_experts)
    logits = logits.round() * 0.5 if ties else logits
    bias = torch.randn(num_experts).round() if score == "sigmoid" else None
    leaf, exact = logits.clone().to(device).requires_grad_(), logits.double().requires_grad_()
    weight, expert = route(leaf, None if bias is None else bias.to(device), top_k, score)
    expected, chosen = route_reference(exact, bias, top_k, score)
    assert torch.equal(expert.long().cpu(), chosen)
    torch.testing.assert_close(weight.double().cpu(), expected, atol=3e-6, rtol=1e-6)
    grad = torch.randn(num_tokens, top_k)
    weight.backward(grad.to(device))
    expected.backward(grad.double())
    torch.testing.assert_close(leaf.grad.double().cpu(), exact.grad, atol=3e-6, rtol=1e-5)


def test_bfloat16_logits_give_a_bfloat16_gradient(device):
    logits = torch.randn(9, 6, dtype=torch.bfloat16, device=device).requires_grad_()
    weight, _ = route(logits, None, 2, "softmax")
    weight.square().sum().backward()
    assert weight.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.float().sum(1), torch.zeros(9, device=device), atol=5e-3, rtol=0)


def test_equal_zeros_of_both_signs_go_to_the_lowest_index(device):
    logits = torch.tensor([[0.0, -0.0, 0.0], [-0.0, 0.0, -1.0]], device=device)
    assert route(logits, None, 2, "softmax")[1].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_odd_rows_are_routed_as_on_a_cpu(score, top_k, device):
    """Experts, weights and gradients are those of the routers that run on a CPU, NaN for NaN; every expert exists."""
    logits = torch.tensor(list(ODD_LOGITS.values()))
    router = {
        "softmax": SoftmaxTopK(1, 5), "switch": SoftmaxTopK(1, 5, normalize="before"), "sigmoid": SigmoidTopK(1, 5),
    }[score]  # fmt: skip
    exact, leaf = logits.clone().requires_grad_(), logits.clone().to(device).requires_grad_()
    gates = exact.sigmoid() if score == "sigmoid" else exact.softmax(1)
    scores = Scores(exact, exact.softmax(1), gates, gates.detach() if score == "sigmoid" else logits)
    choice = router.choose(scores, top_k, None, None)
    expected = router.weigh(scores, choice, top_k).view(-1, top_k)
    weight, expert = route(leaf, None, top_k, score)
    assert torch.equal(expert.long().cpu().flatten(), choice.expert)
    torch.testing.assert_close(weight.cpu(), expected, equal_nan=True)
    if score != "sigmoid":
        assert expert.tolist() == [ranked(row)[:top_k] for row in ODD_LOGITS.values()]
    grad = torch.linspace(-1, 1, weight.numel()).view_as(weight)
    weight.backward(grad.to(device))
    expected.backward(grad)
    is_finite = expected.isfinite().all(1)
    torch.testing.assert_close(leaf.grad.cpu()[is_finite], exact.grad[is_finite])
    order = Order(*sort(expert.flatten(), 5))
    assert int(order.ends[-1]) == expert.numel()
    assert sorted(order.row.tolist()) == list(range(expert.numel()))


@pytest.mark.parametrize("num_experts", [5, 6, 7, 9])
def test_rows_of_nan_go_to_experts_that_exist(num_experts, device):
    logits = torch.full((3, num_experts), float("nan"), device=device)
    for score in SCORES:
        weight, expert = route(logits, None, num_experts, score)
        assert expert.tolist() == [list(range(num_experts))] * 3
        assert weight.isnan().all()
