"""Shardable layers, when not sharded, compute the same as torch's layers, from the same random weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moesaic.models.split import Norm, RowLinear, StackedLinear, local_part, unembed


def test_a_stacked_linear_is_several_linears():
    torch.manual_seed(0)
    layer = StackedLinear(3, 4, 6)
    x = torch.randn(2, 5, 4)
    y = layer(x)
    assert y.shape == (2, 5, 3, 6)
    for index in range(3):
        torch.testing.assert_close(y[..., index, :], F.linear(x, layer.weight[index]))


def test_a_stacked_linear_draws_as_one_linear():
    torch.manual_seed(3)
    layer = StackedLinear(3, 8, 8)
    torch.manual_seed(3)
    plain = nn.Linear(8, 24, bias=False)
    assert torch.equal(layer.weight.flatten(0, 1), plain.weight)


def test_row_linear_and_norm_are_torchs():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    linear, norm = RowLinear(4, 5, bias=False), Norm(4)
    assert linear.bias is None
    assert torch.equal(linear(x), nn.Linear.forward(linear, x))
    with torch.no_grad():
        norm.weight.uniform_()
    assert torch.equal(norm(x), nn.RMSNorm.forward(norm, x))


def test_plain_tensors_are_their_own_part():
    weight = torch.randn(7, 4)
    assert local_part(weight) is weight
    x = torch.randn(2, 3, 4)
    assert torch.equal(unembed(x, weight), x @ weight.T)
