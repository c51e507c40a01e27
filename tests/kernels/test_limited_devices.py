"""Devices without float64, `segment_reduce` or grouped products: layers run, and what is slow says
so."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moesaic import MoE
from moesaic.kernels import choice, permute, pick
from stand_in import DEVICE, StandIn, pretending, to_device, values


class Limited(TorchDispatchMode):
    """Refuses what Apple's GPUs lack."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "segment_reduce" in str(func):
            raise NotImplementedError(f"{func} is not there")
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # a single number is the host's
            assert not isinstance(leaf, Tensor) or leaf.dtype != torch.float64 or not leaf.dim()
        return result


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library take the CPU for such a device."""
    for module in (pick, permute, choice):
        monkeypatch.setattr(module, "kind_of", lambda _: "other")
    monkeypatch.setattr(pick, "LIMITED", ("cpu",))


def step(layer: MoE, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    layer(x).square().sum().backward()
    grads = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    return [layer(x).detach(), x.grad, *grads]


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 11, "bias": True},
        {"top_k": 2, "router": "expert_choice", "losses": ()},
        {"top_k": 3, "capacity": 0.75, "bias": True},
    ],
    ids=str,
)
def test_a_layer_needs_neither_float64_nor_segment_reduce(options, request) -> None:
    torch.manual_seed(0)
    layer = MoE(16, 8, 12, **options)
    x = torch.randn(19, 16)
    expected = step(copy.deepcopy(layer).double(), x.double())
    request.getfixturevalue("limited")
    with Limited():
        found = step(layer, x)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), true, atol=1e-4, rtol=1e-4)


def test_tokens_without_rows_sum_to_zero() -> None:
    rows = torch.arange(1.0, 8.0).unsqueeze(1)
    starts = torch.tensor([0, 0, 1, 6, 7])
    sums = permute._sum_by_doubling(rows, starts, torch.tensor([0, 1, 5, 1, 0]))
    assert sums.squeeze(1).tolist() == [0, 1, 20, 7, 0]
    assert permute._sum_by_doubling(rows[:0], starts * 0, starts * 0).tolist() == [[0]] * 5


def test_a_loop_over_experts_on_a_device_says_so_in_one_line() -> None:
    layer = MoE(16, 8, 4)
    x = torch.randn(19, 16).half()
    expected = layer(x.float())
    with pretending(), StandIn() as stand_in:
        there = to_device(copy.deepcopy(layer).half())
        with pytest.warns(
            UserWarning, match="experts in torch.float16 on this cuda device"
        ) as said:
            found = values(there(x.to(DEVICE)))
        assert stand_in.record.waits
    assert len({str(each.message) for each in said}) == 1
    assert "\n" not in str(said[0].message)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pretending(), StandIn():
            to_device(layer.bfloat16())(x.bfloat16().to(DEVICE))
