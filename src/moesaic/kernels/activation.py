"""Activations between an expert's products, with the routing weight multiplied in.

The weight enters the hidden row, not the output row: `w * (a @ W2) = (w * a) @ W2`. The combine stage is then a plain
sum that saves nothing, and the weight's gradient is a dot product of two hidden rows that backward has anyway.

The functions that end in `_into` write into memory that is given: run over one expert's rows at a time they work in the
processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
GATE = "silu"
"""The activation of the first of two matrices, of gated experts."""


def activate(hidden: Tensor, activation: str, weight: Tensor | None) -> Tensor:
    """Apply an activation, then the rows' routing weights.

    Args:
        hidden: (R, H).
        activation: a key of `ACTIVATIONS`.
        weight: (R,) or None for weights of 1.

    Returns:
        (R, H) in the dtype of `hidden`.
    """
    return _weighted(ACTIVATIONS[activation](hidden), weight)


def swiglu(gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
    """Return `silu(gate) * up`, times the rows' weights (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        gate: (R, H).
        up: (R, H).
        weight: (R,) or None for weights of 1.
    """
    return _weighted(F.silu(gate) * up, weight)


def swiglu_reference(gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
    """Return `swiglu` written out, in float64."""
    gate, up = gate.double(), up.double()
    hidden = gate / (1 + torch.exp(-gate)) * up
    return hidden if weight is None else hidden * weight.double()[:, None]


def hidden_rows(pre: Sequence[Tensor], activation: str, weight: Tensor | None) -> Tensor:
    """Return the hidden rows of plain (one pre-activation) or gated (two) experts, differentiable; shapes as above."""
    return swiglu(pre[0], pre[1], weight) if len(pre) > 1 else activate(pre[0], activation, weight)


def hidden_rows_into(pre: Sequence[Tensor], activation: str, hidden: Tensor, gate: Tensor | None = None) -> None:
    """Write the hidden rows, without routing weights.

    Args:
        pre: one or two of (R, H): what the matrices that read the token give.
        activation: a key of `ACTIVATIONS`, for one; two are gated by `GATE`.
        hidden: (R, H), written.
        gate: (R, H), written: the activation of the first of two, which `hidden_gradient_into` reads; None: not kept.
    """
    if len(pre) == 1:
        _activation_into(pre[0], activation, hidden)
        return
    _activation_into(pre[0], GATE, hidden if gate is None else gate)
    torch.mul(hidden if gate is None else gate, pre[1], out=hidden)


def hidden_gradient_into(pre: Sequence[Tensor], activation: str, grad: Tensor, gate: Tensor | None = None) -> None:
    """Turn the gradient of the hidden rows into those of `pre`, in place.

    Args:
        pre: as for `hidden_rows_into`.
        activation: the same.
        grad: (R, H), the hidden rows' gradient; becomes that of `pre[0]`.
        gate: (R, H), what `hidden_rows_into` wrote; becomes the gradient of `pre[1]`. None for one.
    """
    if gate is None:
        _gradient_into(pre[0], activation, grad)
        return
    gate.mul_(grad)
    grad.mul_(pre[1])
    _gradient_into(pre[0], GATE, grad)


def _activation_into(x: Tensor, activation: str, out: Tensor) -> None:
    if activation == "gelu":
        torch.ops.aten.gelu.out(x, out=out)
    elif activation == "silu":
        torch.ops.aten.silu.out(x, out=out)
    else:
        torch.clamp_min(x, 0, out=out)


def _gradient_into(x: Tensor, activation: str, grad: Tensor) -> None:
    if activation == "gelu":
        torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=grad)
    elif activation == "silu":
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=grad)
    else:
        torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad)


def _weighted(hidden: Tensor, weight: Tensor | None) -> Tensor:
    return hidden if weight is None else hidden * weight.to(hidden.dtype).unsqueeze(1)
