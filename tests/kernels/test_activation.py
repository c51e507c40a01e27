"""Activations with the routing weight multiplied in."""

from __future__ import annotations

import math

import pytest
import torch

from moesaic.kernels.activation import ACTIVATIONS, activate, swiglu, swiglu_reference

FORMULAS = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "relu": lambda x: torch.where(x > 0, x, 0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}
SHAPES = [(0, 4), (1, 1), (3, 5), (7, 8)]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_swiglu_equals_the_formula(dtype: torch.dtype, shape: tuple[int, int], weighted: bool) -> None:
    gate, up = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.rand(shape[0]) if weighted else None
    y = swiglu(gate, up, weight)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    weight = None if weight is None else weight.to(dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), swiglu_reference(gate, up, weight), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_equal_their_formulas(name: str, shape: tuple[int, int], weighted: bool) -> None:
    hidden = torch.randn(shape, dtype=torch.float64)
    weight = torch.rand(shape[0], dtype=torch.float64) if weighted else None
    expected = FORMULAS[name](hidden)
    expected = expected if weight is None else weight[:, None] * expected
    torch.testing.assert_close(activate(hidden, name, weight), expected)


def test_swiglu_gradients_are_exact() -> None:
    gate, up, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(3, 4), (3, 4), (3,)])
    assert torch.autograd.gradcheck(swiglu, (gate, up, weight))


def test_the_weight_scales_rows() -> None:
    ones = torch.ones(2, 3)
    assert activate(ones, "relu", torch.tensor([2.0, -1.0])).tolist() == [[2.0] * 3, [-1.0] * 3]
