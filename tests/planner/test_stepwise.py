"""Compares the bytes that eager PyTorch reads and writes, operation by operation, with `STEPWISE`
of `planner/step.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers import refused
from moesaic.planner.cluster import Host, ScoreShares
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import STEPWISE, StepCostModel, StepModel
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from planner.clusters import DEVICE, flat

ROWS = 64
WIDTH = 256
EXPERTS = 4


class Counted(TorchDispatchMode):
    """Adds up the bytes that operations read and write. Views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {
            id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }.values()
        written = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in read}
        name = func.__name__
        if name.startswith("empty") or (
            "_unsafe" not in name
            and any(each.untyped_storage().data_ptr() in storages for each in written)
        ):
            return result
        for each in (*read, *written):
            # A broadcast tensor is read once.
            strides = [size if step else 1 for size, step in zip(each.shape, each.stride())]
            self.num_bytes += each.element_size() * torch.Size(strides).numel()
        return result


def counted(function: Callable[..., torch.Tensor], *values: torch.Tensor) -> tuple[float, float]:
    """Return the bytes of a forward and a backward pass."""
    with Counted() as there:
        result = function(*values)
    gradient = torch.ones_like(result)
    with Counted() as back:
        torch.autograd.grad(result, [each for each in values if each.requires_grad], gradient)
    return there.num_bytes, back.num_bytes


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def factor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * scaled.to(x.dtype)


def first_bias(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows + each for rows, each in zip(x.split(ROWS // EXPERTS), bias)])


def last_bias(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = zip(x.split(ROWS // EXPERTS), bias, weight.split(ROWS // EXPERTS))
    return torch.cat([rows + each * by for rows, each, by in parts]).to(x.dtype)


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], float, float]] = {
    "norms": (norm, (bf16(ROWS, WIDTH), bf16(WIDTH)), 4, 8),
    "first_bias": (first_bias, (bf16(ROWS, WIDTH), bf16(EXPERTS, WIDTH)), 0, 0),
    "last_bias": (
        last_bias,
        (bf16(ROWS, WIDTH), bf16(EXPERTS, WIDTH), factor(ROWS, 1).requires_grad_()),
        0,
        0,
    ),
}
"""By name: the function, its inputs, and the bytes per value that the step model counts for a fused
kernel, forward and backward."""


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_that_the_operations_read_and_write(name: str) -> None:
    function, values, *fused = CASES[name]
    bytes_per_value = [
        total / (ROWS * WIDTH) - less for total, less in zip(counted(function, *values), fused)
    ]
    # Sums over rows, and factors of a row, are not counted.
    assert list(STEPWISE[name]) == pytest.approx(bytes_per_value, rel=0.03, abs=0.5)


SPEC = flat(1, 4, device=DEVICE, host=Host(task_us=0.001))
MODEL = StepModel(
    num_layers=3,
    layer=Workload(tokens=1024, num_experts=8, top_k=2, dim=256, hidden=512),
    seq_len=1024,
    attention_normed=64,
)


def small(*names: str, **fields: Any) -> float:
    """Return the seconds of small kernels in a micro-batch of three layers."""
    cost_model = StepCostModel(
        replace(MODEL, stepwise=names, **fields), Grid(world=4, ep=4), Simulator(SPEC)
    )
    return cost_model.around["small kernels"]


def test_small_kernels_by_hand() -> None:
    per_layer = {
        "norms": 1024 * (2 * 256 + 64) * (32 + 84),
        "first_bias": 2048 * 2 * 512 * (8 + 6),
        "last_bias": 2048 * 256 * (28 + 40),
    }
    for name, num_bytes in per_layer.items():
        assert small(name) == pytest.approx(3 * num_bytes / 1e12)
    assert small(*STEPWISE) == pytest.approx(sum(map(small, per_layer)))
    assert small() == 0


def test_what_backward_computes_again_launches_its_kernels_again() -> None:
    again = small("norms", "last_bias", recomputed=("block",)) - small("norms", "last_bias")
    assert again == pytest.approx(3 * (1024 * 576 * 32 + 2048 * 256 * 28) / 1e12)


def test_scores_are_slower_for_narrow_heads_and_older_kernels() -> None:
    shares = ScoreShares(heads=(64, 128), best=(0.4, 0.6), flash2=(0.3, 0.35))
    assert [shares.of("best", width) for width in (0, 32, 64, 96, 128, 256)] == pytest.approx(
        [0.6, 0.4, 0.4, 0.5, 0.6, 0.6]
    )
    assert shares.of("flash2", 64) == 0.3
    assert shares.of("flex", 128) == 0.6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heads": (128, 64), "best": (1, 1)}, "give widths above 0 in ascending order"),
        ({"heads": ()}, "give widths above 0 in ascending order"),
        (
            {"best": (0.5, 0.6)},
            "scores.best=[0.5, 0.6]: give a share above 0 for each of heads=[128.0]",
        ),
        ({"flex": (0.0,)}, "scores.flex=[0.0]: give a share above 0"),
        ({"best": ()}, "scores.best=[]: give a share above 0"),
    ],
)
def test_invalid_shares_are_refused_in_one_line(fields: dict[str, Any], words: str) -> None:
    assert words in refused(ScoreShares, **fields)


def test_an_unknown_step_is_refused_in_one_line() -> None:
    assert "model.stepwise='dropout': choose of norms, first_bias" in refused(
        replace, MODEL, stepwise=("dropout",)
    )
