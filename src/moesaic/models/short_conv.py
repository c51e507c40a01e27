"""A short causal convolution per channel, added to the residual stream in front of a block.

With bytes as tokens a word is many positions long. A few learnt weights per channel bring the last positions together
without spending attention on it: So et al., "Primer" (2021), section 4, put such a convolution behind the projections of
attention; Allen-Zhu, "Canon Layers" (2025), puts it with a residual in front of the layers, as here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RecentTokens:
    """The last inputs of one convolution when decoding; (batch, width - 1, dim)."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None


class ShortConv(nn.Module):
    """`y_t = x_t + sum_k w_k * x_{t-k}` for k from 1 to `width - 1`; starts as the identity.

    Args:
        dim: width of the residual stream.
        width: positions that an output sees, its own included.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(width - 1, dim))

    def forward(self, x: Tensor, recent: RecentTokens | None = None) -> Tensor:
        """Mix each position with the ones before it.

        Args:
            x: (batch, positions, dim).
            recent: what came before x; zeros where nothing did.
        """
        reach, length = len(self.taps), x.shape[1]
        if recent is not None and recent.inputs is not None:
            padded = torch.cat([recent.inputs, x], dim=1)
        else:
            padded = F.pad(x, (0, 0, reach, 0))
        if recent is not None:
            recent.inputs = padded[:, length:]
        y = x
        for k in range(1, reach + 1):
            y = y + padded[:, reach - k : reach - k + length] * self.taps[k - 1].to(x.dtype)
        return y
