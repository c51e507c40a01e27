"""The activations between an expert's products, and their gradients.

`pre` are the pre-activations, the outputs of the one or two up matrices, for R rows of hidden width
H. Of two the first is the gate. The hidden rows, (R, H), are what the down matrix reads.
Functions that end in `_into` write to tensors of the caller. Called for one expert at a time, they
work in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def relu_squared(x: Tensor) -> Tensor:
    """Return `relu(x) ** 2` (So et al., "Primer", 2021)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu_squared,
    "silu": F.silu,
}


@dataclass(frozen=True)
class Clamp:
    """The constants of clamped SwiGLU: `g * sigmoid(alpha * g) * (u + offset)`, with
    `g = min(gate, limit)` and with `u`, the other pre-activation, clamped to +-limit.

    gpt-oss uses limit 7, alpha 1.702 and offset 1; DeepSeek-V4 uses a limit alone.
    """

    limit: float
    """The largest gate, and the largest magnitude of the gated pre-activation."""
    alpha: float = 1.0
    """The factor of the gate within the sigmoid."""
    offset: float = 0.0
    """The number added to the gated pre-activation."""

    @property
    def numbers(self) -> list[float]:
        """The fields in order, as the argument of a custom op."""
        return [self.limit, self.alpha, self.offset]


BY_ONEDNN = ("gelu", "gelu_tanh")
"""The activations that torch may leave to oneDNN on a CPU. It writes nothing at all to a result
that is not contiguous."""


def hidden_rows(pre: Sequence[Tensor], activation: str, clamp: Clamp | None = None) -> Tensor:
    """Return the hidden rows, (R, H) in the dtype of `pre`, differentiable.

    Args:
        pre: one or two tensors, (R, H) each. Of two the first gates the second; with silu that is
            SwiGLU (Shazeer, "GLU Variants", 2020).
        activation: a key of `ACTIVATIONS`.
        clamp: the constants of clamped SwiGLU; None for no clamping.
    """
    if len(pre) == 1:
        return ACTIVATIONS[activation](pre[0])
    gate, up = pre
    if clamp is None:
        return ACTIVATIONS[activation](gate) * up
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up + clamp.offset)


def hidden_rows_into(
    pre: Sequence[Tensor],
    activation: str,
    hidden: Tensor,
    gate: Tensor | None = None,
    clamp: Clamp | None = None,
) -> None:
    """Write the hidden rows.

    Args:
        pre, activation, clamp: as for `hidden_rows`.
        hidden: (R, H), contiguous, written.
        gate: (R, H), written if `pre` has two: the activation of the first, for
            `hidden_gradient_into`. None to not keep it.
    """
    if len(pre) == 1:
        _activation_into(pre[0], activation, hidden)
        return
    gate_pre, up_pre = pre
    if gate is not None and clamp is None and activation in BY_ONEDNN:
        # `gate` may not be contiguous, which oneDNN needs; `hidden` is
        _activation_into(gate_pre, activation, hidden)
        gate.copy_(hidden)
        hidden.mul_(up_pre)
        return
    active = hidden if gate is None else gate
    if clamp is None:
        _activation_into(gate_pre, activation, active)
        torch.mul(active, up_pre, out=hidden)
        return
    # g * sigmoid(alpha * g) = silu(alpha * g) / alpha
    torch.clamp_max(gate_pre, clamp.limit, out=active).mul_(clamp.alpha)
    torch.ops.aten.silu.out(active, out=active)
    active.div_(clamp.alpha)
    gated = up_pre.clamp(-clamp.limit, clamp.limit).add_(clamp.offset)
    torch.mul(active, gated, out=hidden)


def hidden_gradient_into(
    pre: Sequence[Tensor],
    activation: str,
    grad: Tensor,
    gate: Tensor | None = None,
    clamp: Clamp | None = None,
) -> None:
    """Turn the gradient of the hidden rows into the gradients of `pre`, in place.

    Args:
        pre, activation, clamp: as for `hidden_rows`.
        grad: (R, H), the gradient of the hidden rows; becomes the gradient of `pre[0]`.
        gate: (R, H), the activated gate, which `hidden_rows_into` wrote: what multiplies `pre[1]`
            in the hidden rows. Becomes the gradient of `pre[1]`. None if `pre` has one.
    """
    if gate is None:
        _gradient_into(pre[0], activation, grad)
        return
    gate_pre, up_pre = pre
    # of a product of two factors, the gradient of each has the other as a factor
    gate.mul_(grad)
    if clamp is None:
        grad.mul_(up_pre)
        _gradient_into(gate_pre, activation, grad)
        return
    # the gradient of a clamp is 1 within its limits and 0 outside
    gate.mul_(up_pre.abs() <= clamp.limit)
    grad.mul_(up_pre.clamp(-clamp.limit, clamp.limit).add_(clamp.offset))
    # that of silu(alpha * g) / alpha is silu'(alpha * g): alpha cancels
    silu_argument = gate_pre.clamp(max=clamp.limit).mul_(clamp.alpha)
    _gradient_into(silu_argument, "silu", grad)
    grad.mul_(gate_pre <= clamp.limit)


def _activation_into(x: Tensor, activation: str, out: Tensor) -> None:
    """Write the activation of `x` into `out`."""
    may_write = out.is_contiguous() or activation not in BY_ONEDNN
    assert may_write, "oneDNN writes to contiguous results only"
    if activation == "gelu":
        torch.ops.aten.gelu.out(x, out=out)
    elif activation == "gelu_tanh":
        torch.ops.aten.gelu.out(x, approximate="tanh", out=out)
    elif activation == "silu":
        torch.ops.aten.silu.out(x, out=out)
    else:  # relu, or its square
        torch.clamp_min(x, 0, out=out)
        if activation == "relu2":
            out.mul_(out)


def _gradient_into(x: Tensor, activation: str, grad: Tensor) -> None:
    """Replace the gradient of an activation's result by that of its argument, in place."""
    if activation == "gelu":
        torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=grad)
    elif activation == "gelu_tanh":
        torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad)
    elif activation == "silu":
        torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=grad)
    elif activation == "relu2":
        grad.mul_(x.clamp(min=0)).mul_(2)
    else:  # relu
        torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad)
