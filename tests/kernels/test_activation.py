"""Activations against their formulas, and the in-place versions against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.kernels.activation import (
    ACTIVATIONS,
    Clamp,
    hidden_gradient_into,
    hidden_rows,
    hidden_rows_into,
)
from moesaic.testing.reference import reference_activation

SHAPES = [(0, 4), (1, 1), (3, 5), (7, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_equal_their_formulas(name: str, shape: tuple[int, int]) -> None:
    hidden = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(hidden_rows((hidden,), name), reference_activation(hidden, name))


def test_clamped_swiglu_is_what_gpt_oss_writes() -> None:
    gate = 20 * torch.randn(50, 3, dtype=torch.float64)
    up = 20 * torch.randn(50, 3, dtype=torch.float64)
    clamp = Clamp(limit=7.0, alpha=1.702, offset=1.0)
    clamped_gate = torch.where(gate > 7, 7, gate)
    clamped_up = torch.where(up > 7, 7, torch.where(up < -7, -7, up))
    expected = clamped_gate / (1 + torch.exp(-1.702 * clamped_gate)) * (clamped_up + 1)
    torch.testing.assert_close(hidden_rows((gate, up), "silu", clamp), expected)
    assert (gate > 7).any()
    assert (up < -7).any()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("clamp", [None, Clamp(0.5), Clamp(0.5, 1.702, 1.0)], ids=str)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_what_writes_into_memory_equals_what_autograd_finds(
    name: str, clamp: Clamp | None, keeps: bool
) -> None:
    for number in (1, 2) if clamp is None else (2,):
        pre = [torch.randn(7, 5, dtype=torch.float64, requires_grad=True) for _ in range(number)]
        expected = hidden_rows(pre, name, clamp)
        hidden = torch.empty(7, 5, dtype=torch.float64)
        gate: Tensor | None = torch.empty_like(hidden) if keeps and number == 2 else None
        with torch.no_grad():
            hidden_rows_into(pre, name, hidden, gate, clamp)
        torch.testing.assert_close(hidden, expected)
        if gate is not None or number == 1:
            d_hidden = torch.randn_like(hidden)
            d_pre = torch.autograd.grad(expected, pre, d_hidden)
            with torch.no_grad():
                hidden_gradient_into(pre, name, d_hidden, gate, clamp)
            torch.testing.assert_close(
                [d_hidden] if gate is None else [d_hidden, gate], list(d_pre)
            )
