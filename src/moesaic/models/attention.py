"""What mixes positions: causal attention with rotary positions, and a short causal convolution in front of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.models.split import RowLinear, StackedLinear


class KeyValueCache:
    """What decoding keeps of one block: keys and values, (batch, heads, positions, width), and the last inputs."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.recent = RecentTokens()

    @property
    def length(self) -> int:
        """Positions seen."""
        return 0 if self.keys is None else self.keys.shape[2]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions and return all of them."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


class Attention(nn.Module):
    """Multi-head causal attention. Under tensor parallelism a rank computes the heads that its shard of `qkv` holds.

    Args:
        dim: width of the residual stream.
        num_heads: heads; must divide dim into even widths.
        base: of the rotary frequencies.
    """

    frequencies: Tensor

    def __init__(self, dim: int, num_heads: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        self.qkv = StackedLinear(3, dim, dim)
        self.out = RowLinear(dim, dim)
        self.width = width = dim // num_heads
        frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Attend to this position and the earlier ones.

        Args:
            x: (batch, positions, dim).
            cache: earlier positions; x continues them.
        """
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.width)).permute(2, 0, 3, 1, 4)
        length = q.shape[2]
        start = 0 if cache is None else cache.length
        q, k = self._rotate(q, start), self._rotate(k, start)
        if cache is not None:
            k, v = cache.extend(k, v)
        if start == 0:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            visible = torch.ones(length, start + length, dtype=torch.bool, device=x.device).tril(start)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """Rotate (batch, heads, positions, width) by position, in float32."""
        positions = torch.arange(start, start + x.shape[2], device=x.device, dtype=torch.float32)
        angles = positions[:, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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
