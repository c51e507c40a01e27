"""Activations between an expert's products, with the routing weight multiplied in.

The weight enters the hidden row, not the output row: `w * (a @ W2) = (w * a) @ W2`. The combine stage is then a plain
sum that saves nothing, and the weight's gradient is a dot product of two hidden rows that backward has anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


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


def _weighted(hidden: Tensor, weight: Tensor | None) -> Tensor:
    return hidden if weight is None else hidden * weight.to(hidden.dtype).unsqueeze(1)
