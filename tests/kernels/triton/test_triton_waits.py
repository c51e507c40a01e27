"""No call of a layer on one GPU makes the host wait; checked on a simulated GPU, with the kernels
under the interpreter."""

from __future__ import annotations

import copy

import pytest
import torch

from moesaic import Capacity, GatedExperts, MoE
from stand_in import DEVICE, DeviceTensor, StandIn, interpreting, pretending, to_device, values

CASES = {
    "dropless": {},
    "by score": {
        "capacity": Capacity.fixed(0.5, order="score"),
        "shared_hidden": 8,
        "experts": lambda dim, hidden, n: GatedExperts(dim, hidden, n, bias=True),
    },
    "weight before": {"apply_weight": "before", "capacity": Capacity.fixed(0.75)},
}


def step(layer, x, mask):
    x = x.detach().requires_grad_()
    y = layer(x, mask=mask)
    (y * y).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


# rows of unsent copies hold arbitrary values
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("by score", torch.float16),
        pytest.param("dropless", torch.bfloat16, marks=pytest.mark.random),
        pytest.param("weight before", torch.float32, marks=pytest.mark.random),
    ],
    ids=str,
)
def test_one_gpu_waits_for_nothing(case, dtype, interpreted):
    if not interpreted:
        pytest.skip("the stand-in stands in for a GPU that is not there")
    layer = MoE(16, 24, 4, 2, losses=(), **CASES[case]).to(dtype)
    x = torch.randn(7, 16).to(dtype)
    mask = torch.arange(7) % 5 > 0
    expected = step(copy.deepcopy(layer), x, mask)
    with pretending(triton=True), interpreting(), StandIn() as stand_in:
        there = to_device(layer)
        x = x.to(DEVICE)
        mask = mask.to(DEVICE)
        step(there, x, mask)
        there.zero_grad(set_to_none=True)
        stand_in.record.clear()
        actual = step(there, x, mask)
    assert stand_in.record.waits == []
    assert stand_in.record.uploads == []
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    assert all(isinstance(each, DeviceTensor) for each in actual)
    for mine, true in zip(actual, expected, strict=True):
        torch.testing.assert_close(values(mine), true, atol=tolerance, rtol=tolerance)
