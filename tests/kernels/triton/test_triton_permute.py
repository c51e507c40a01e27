"""Gathering and summing rows against float64, with copies that are not sent, and both gradients."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels.triton.permute import dot_rows, gather_rows, sum_rows, sum_rows_reference
from moesaic.kernels.triton.sort import Order, sort

SIZES = [(0, 2, 8), (1, 1, 1), (5, 2, 40), (9, 8, 24), (6, 3, 1030)]
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def order_of(num_tokens: int, top_k: int, device: str, *, dropped: bool) -> Order:
    expert = torch.randint(0, 4, (num_tokens * top_k,))
    if dropped:
        expert[torch.rand(len(expert)) < 0.4] = -1
    return Order(*sort(expert.to(device), 4))


@pytest.mark.parametrize(("num_tokens", "top_k", "dim"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropped", [False, True], ids=["all", "dropped"])
def test_sum_rows_and_its_gradients(num_tokens, top_k, dim, dtype, dropped, device):
    order = order_of(num_tokens, top_k, device, dropped=dropped)
    rows = torch.randn(num_tokens * top_k, dim, device=device).to(dtype)
    rows[int(order.ends[-1]) :] = torch.nan  # rows that nobody sent must not be read
    weight = torch.rand(num_tokens * top_k, device=device)
    leaf, weights = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    exact, exact_weight = rows.double().requires_grad_(), weight.double().requires_grad_()
    found = sum_rows(leaf, order.copy, order.row, top_k, weights)
    expected = sum_rows_reference(exact, order.row, top_k, exact_weight)
    tolerance = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype]}
    torch.testing.assert_close(found.double(), expected, **tolerance)
    grad = torch.randn_like(found)
    if not num_tokens:
        return
    found.backward(grad)
    expected.backward(grad.double())
    used = slice(0, int(order.ends[-1]))
    torch.testing.assert_close(leaf.grad[used].double(), exact.grad[used], **tolerance)
    of_weight = exact_weight.grad if exact_weight.grad is not None else torch.zeros_like(exact_weight)
    torch.testing.assert_close(weights.grad.double(), of_weight, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_tokens", "top_k", "dim"), SIZES)
def test_gather_rows_and_its_gradient(num_tokens, top_k, dim, device):
    order = order_of(num_tokens, top_k, device, dropped=True)
    x = torch.randn(num_tokens, dim, device=device).requires_grad_()
    weight = torch.rand(num_tokens * top_k, device=device)
    used = order.copy[: int(order.ends[-1])].long()
    found = gather_rows(x, order.copy, order.row, top_k, weight)
    assert torch.equal(found[: len(used)], x[used // top_k] * weight[used, None])
    if not num_tokens:
        return
    grad = torch.randn_like(found)
    found.backward(grad)
    expected = torch.zeros(num_tokens, dim, dtype=torch.float64, device=device)
    expected.index_add_(0, used // top_k, (grad[: len(used)] * weight[used, None]).double())
    torch.testing.assert_close(x.grad.double(), expected, atol=1e-5, rtol=1e-5)


def test_dot_rows_are_zero_for_copies_that_were_not_sent(device):
    order = order_of(7, 2, device, dropped=True)
    rows, dy = torch.randn(14, 30, device=device), torch.randn(7, 30, device=device)
    found = dot_rows(dy, rows, order.row, 2)
    for copy, row in enumerate(order.row.tolist()):
        expected = 0.0 if row < 0 else float(dy[copy // 2].double() @ rows[row].double())
        assert abs(found[copy].item() - expected) < 1e-4


def test_the_operators_hold_what_they_promise(device):
    order = order_of(6, 2, device, dropped=False)
    x = torch.randn(6, 10, device=device, requires_grad=True)
    torch.library.opcheck(gather_rows, (x, order.copy, order.row, 2, None))
    rows = torch.randn(12, 10, device=device, requires_grad=True)
    weight = torch.rand(12, device=device, requires_grad=True)
    torch.library.opcheck(sum_rows, (rows, order.copy, order.row, 2, weight))
