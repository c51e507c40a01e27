"""Top-k routing against a stable sort in float64, ties and padding columns included, and its gradient."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels.triton.route import SCORES, route, route_reference

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
