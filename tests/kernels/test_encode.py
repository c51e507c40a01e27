"""Fast encode and decode against GShard's einsum and against values computed by hand."""

from __future__ import annotations

import pytest
import torch

from helpers import refused
from moesaic.kernels.encode import encoding, fast_decode, fast_encode
from moesaic_lab.device.ops import decode_reference, encode_reference

SHAPES = [(0, 2, 2, 3), (1, 1, 1, 1), (7, 4, 2, 2), (13, 5, 5, 13), (16, 8, 2, 0), (9, 3, 1, 20)]
"""(tokens, experts, top_k, capacity): with dropped copies, without, and with a capacity of 0."""


def chosen(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(tokens, experts).argsort(1)[:, :top_k]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_the_einsum(shape: tuple[int, int, int, int]) -> None:
    tokens, experts, top_k, capacity = shape
    form = encoding(chosen(tokens, experts, top_k), experts, capacity)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(tokens, top_k, dtype=torch.float64, requires_grad=True)
    actual = []
    upstream = torch.randn(tokens, 3, dtype=torch.float64)
    for encode, decode in ((fast_encode, fast_decode), (encode_reference, decode_reference)):
        rows = encode(x, form)
        y = decode(rows * rows.cos(), gates, form)
        actual.append([rows, y, *torch.autograd.grad(y, (x, gates), upstream)])
    assert actual[0][0].shape == (experts, capacity, 3)
    torch.testing.assert_close(actual[0], actual[1])


def test_first_choices_come_first_and_the_rest_is_dropped() -> None:
    form = encoding(torch.tensor([[0, 1], [1, 0], [0, 1]]), 2, 2)
    assert form.place.tolist() == [
        [0, 3],
        [2, 4],
        [1, 4],
    ]  # 4 means dropped; expert 1 gets token 1's first choice, then token 0's
    x = torch.tensor([[1.0], [2.0], [3.0]])
    assert fast_encode(x, form).tolist() == [[[1.0], [3.0]], [[2.0], [1.0]]]
    gates = torch.tensor([[0.5, 0.25], [1.0, 7.0], [2.0, 7.0]])
    assert fast_decode(fast_encode(x, form), gates, form).tolist() == [[0.75], [2.0], [6.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    form = encoding(chosen(6, 4, 2), 4, 3)
    x = torch.randn(6, 3).to(dtype).requires_grad_()
    y = fast_decode(fast_encode(x, form), torch.rand(6, 2), form)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)


@pytest.mark.parametrize(
    ("expert", "capacity"), [(torch.zeros(3, dtype=torch.int64), 1), (torch.zeros(3, 1).long(), -1)]
)
def test_what_is_no_choice_is_refused(expert: torch.Tensor, capacity: int) -> None:
    assert "give (tokens, top_k) and at least 0" in refused(encoding, expert, 2, capacity)
