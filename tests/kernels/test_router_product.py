"""The logits of 16-bit tokens and their gradients against float64, by blocks and by 16-bit
pieces."""

from __future__ import annotations

import pytest
import torch

from helpers import pairwise
from moesaic.kernels import router_product
from moesaic.kernels.router_product import pieces_of, router_logits

DTYPES = (torch.bfloat16, torch.float16)
ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
"""Relative error that the dtype of a result allows; float32 sums round a few times."""


def of_size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().abs().max())


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "by_pieces", "size"),
    pairwise(DTYPES, ("same", torch.float32), (False, True), ((0, 8, 4), (5, 24, 7), (40, 64, 16))),
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_products_are_those_of_float64(dtype, weight_dtype, by_pieces, size, scale, monkeypatch):
    monkeypatch.setattr(router_product, "_takes_pieces", lambda device: by_pieces)
    monkeypatch.setattr(router_product, "BLOCK", 16)
    torch.manual_seed(0)
    num_tokens, dim, num_experts = size
    x = torch.randn(num_tokens, dim).to(dtype).requires_grad_()
    weight = (
        torch.randn(num_experts, dim)
        .to(dtype if weight_dtype == "same" else weight_dtype)
        .requires_grad_()
    )
    grad = torch.randn(num_tokens, num_experts) * scale
    with torch.autocast("cpu", dtype):  # changes nothing, also where people call backward in it
        logits = router_logits(x, weight)
        logits.backward(grad)
    assert logits.dtype == torch.float32
    expected = x.detach().double() @ weight.detach().double().t()
    d_x = grad.double() @ weight.detach().double()
    d_weight = grad.double().t() @ x.detach().double()
    checked = [
        (logits, expected, torch.float32),
        (weight.grad, d_weight, weight.dtype),
        (x.grad, d_x, dtype),
    ]
    for actual, true, rounded in checked:
        assert actual.shape == true.shape
        if true.numel():
            subnormal = torch.finfo(rounded).smallest_normal * torch.finfo(rounded).eps
            assert of_size(actual.double() - true) <= of_size(true) * ULP[rounded] + subnormal


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_tokens_and_the_matrix_are_saved(dtype):
    x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        router_logits(x, weight)
    assert {tensor.data_ptr() for tensor in saved} == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_add_up_to_float32_and_keep_infinity_and_nan(dtype):
    values = torch.randn(4, 16) * torch.logspace(-4, 4, 16)
    odd = torch.tensor([[float("inf"), float("nan"), 1.0]])
    for side_by_side in (False, True):
        pieces, unit = pieces_of(values, dtype, (0, 1, 2), side_by_side=side_by_side)
        parts = pieces.double().chunk(3, int(side_by_side))
        total = sum(parts) * (1 if unit is None else unit.double())
        assert of_size(total - values) <= 2**-23 * of_size(values)
        pieces, _ = pieces_of(odd, torch.bfloat16, (0, 1), side_by_side=side_by_side)
        total = sum(pieces.chunk(2, int(side_by_side)))
        assert total.isinf().tolist() == [[True, False, False]]
        assert total.isnan().tolist() == [[False, True, False]]


@pytest.mark.parametrize("missing", ["x", "weight"])
@pytest.mark.parametrize("by_pieces", [False, True])
def test_a_gradient_that_nobody_wants_is_left_out(missing, by_pieces, monkeypatch):
    monkeypatch.setattr(router_product, "_takes_pieces", lambda device: by_pieces)
    x = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=missing != "x")
    weight = torch.randn(4, 8, requires_grad=missing != "weight")
    router_logits(x, weight).sum().backward()
    assert (x.grad is None, weight.grad is None) == (missing == "x", missing == "weight")


def test_the_operators_hold_what_they_promise():
    x = torch.randn(5, 8, dtype=torch.bfloat16)
    weight = torch.randn(4, 8)
    torch.library.opcheck(router_product.router_forward.overload, (x, weight))
    torch.library.opcheck(
        router_product.router_backward.overload, (x, weight, torch.randn(5, 4), True, True)
    )
