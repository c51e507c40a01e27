"""Pieces of a float32 matrix by Triton against those of torch's operations, bit for bit."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels import router_product
from moesaic.kernels.router_product import pieces_of


@pytest.mark.parametrize(
    ("side_by_side", "order"), [(False, (0, 0, 1)), (True, (0, 1, 0, 2)), (True, (0,))], ids=str
)
@pytest.mark.parametrize("size", [(0, 8), (5, 7), (40, 64)], ids=str)
def test_the_kernel_cuts_as_torch_does(size, side_by_side, order, device, monkeypatch):
    torch.manual_seed(0)
    values = torch.randn(size) * torch.logspace(-30, 30, size[1])
    if len(values):
        values[1, :3] = torch.tensor([torch.inf, -torch.nan, -0.0])
    monkeypatch.setattr(router_product, "kind_of", lambda _: "cpu")
    expected, _ = pieces_of(values, torch.bfloat16, order, side_by_side=side_by_side)
    monkeypatch.setattr(router_product, "kind_of", lambda _: "triton")
    found, unit = pieces_of(values.to(device), torch.bfloat16, order, side_by_side=side_by_side)
    assert unit is None
    torch.testing.assert_close(found.cpu(), expected, atol=0, rtol=0, equal_nan=True)
