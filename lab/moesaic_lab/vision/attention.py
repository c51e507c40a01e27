"""Attention within windows of an image (Liu et al., "Swin Transformer V2", 2022, sections 3.2 and
3.3).

Similarity is a cosine over a learnt temperature, which keeps values from growing with depth. A
small network computes a position bias from logarithms of relative coordinates, so weights can be
reused for windows of another size.

An image here is a square of tokens. It is cut into square windows, and tokens only attend to tokens
of their window. In every second block the windows are shifted.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.models.split import RowLinear, StackedLinear

SHARPEST = 100.0
"""Largest factor on the cosines (section 3.2: a temperature of at least 0.01)."""
BIAS_RANGE = 16.0
"""The bias of a pair of positions lies between 0 and this."""


class WindowAttention(nn.Module):
    """Multi-head attention among the tokens of each window.

    Args:
        num_heads: heads; must divide dim.
        resolution: tokens along a side of the image.
        window: tokens along a side of a window; must divide the resolution.
        shift: number of tokens by which windows are shifted to the right and down. Windows wrap
            around the image; in those that do, tokens only attend to tokens from the same side of
            the image.
    """

    coordinates: Tensor
    pairs: Tensor
    hidden: Tensor | None

    def __init__(
        self, dim: int, num_heads: int, *, resolution: int, window: int, shift: int = 0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        self.shift = shift
        self.per_side = resolution // window
        self.qkv = StackedLinear(3, dim, dim)
        # Keys have no bias in Swin V2: it would rotate all of them.
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.full((num_heads,), math.log(10.0)))
        self.position_bias = nn.Sequential(
            nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, num_heads, bias=False)
        )
        self.out = RowLinear(dim, dim, bias=True)
        self.register_buffer("coordinates", log_coordinates(window), persistent=False)
        self.register_buffer("pairs", pair_index(window), persistent=False)
        hidden = strangers(resolution, window, shift) if shift else None
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output, of the same shape as x.

        Args:
            x: (batch, height, width, dim); height and width must be `resolution`.
        """
        if self.shift:
            x = x.roll((-self.shift, -self.shift), dims=(1, 2))
        attended = self._attend(self._windows(x))
        y = self._image(attended)
        if self.shift:
            y = y.roll((self.shift, self.shift), dims=(1, 2))
        return y

    def _attend(self, x: Tensor) -> Tensor:
        """Attend within windows: (batch, windows, tokens, dim) to the same shape."""
        windows = x.shape[1]
        bias = torch.stack([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        head_dim = len(self.q_bias) // self.num_heads
        # (batch, windows, tokens, q k v, heads, head_dim)
        qkv = (self.qkv(x) + bias).unflatten(-1, (-1, head_dim))
        # Windows and heads share an axis, so the bias need not be copied over a batch axis.
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).flatten(2, 3)
        # cosine attention: one scale for each head
        scale = self.log_scale.clamp(max=math.log(SHARPEST)).exp()
        scale = scale.repeat(windows)[:, None, None]
        q = F.normalize(q, dim=-1) * scale.to(q.dtype)
        k = F.normalize(k, dim=-1)
        position_bias = self._bias(windows).to(q.dtype)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=position_bias, scale=1.0)
        # (batch, windows, heads, tokens, head_dim)
        by_window = attended.unflatten(1, (windows, -1))
        return self.out(by_window.transpose(2, 3).flatten(3))

    def _bias(self, num_windows: int) -> Tensor:
        """Return the bias of the similarities, (1, windows * heads, tokens, tokens)."""
        table = BIAS_RANGE * self.position_bias(self.coordinates).sigmoid()
        # (tokens, tokens, heads) to (windows, heads, tokens, tokens)
        bias = table[self.pairs].permute(2, 0, 1)
        bias = bias.expand(num_windows, -1, -1, -1)
        if self.hidden is not None:
            bias = bias.masked_fill(self.hidden[:, None], -math.inf)
        return bias.flatten(0, 1)[None]

    def _windows(self, x: Tensor) -> Tensor:
        """Cut an image into windows: (batch, height, width, dim) to (batch, windows, tokens,
        dim)."""
        columns = x.unflatten(2, (self.per_side, self.window))
        # (batch, window row, row within, window column, column within, dim)
        tiles = columns.unflatten(1, (self.per_side, self.window))
        return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def _image(self, x: Tensor) -> Tensor:
        """Join windows to an image, the inverse of `_windows`."""
        tokens = x.unflatten(2, (self.window, self.window))
        # (batch, window row, window column, row within, column within, dim)
        tiles = tokens.unflatten(1, (self.per_side, self.per_side))
        return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def log_coordinates(window: int) -> Tensor:
    """Return the relative positions of a window on a logarithmic scale (section 3.3, equation 4).

    Distances are first scaled to a window with a side of 8.

    Returns:
        ((2 * window - 1) ** 2, 2): vertical and horizontal, in units of log2(8).
    """
    scale = 8 / max(window - 1, 1)
    distances = torch.arange(1 - window, window, dtype=torch.float32) * scale
    logs = distances.sign() * (distances.abs() + 1).log2() / 3  # log2(8) is 3
    return torch.cartesian_prod(logs, logs)


def pair_index(window: int) -> Tensor:
    """Return for each pair of tokens of a window the index of its row in `log_coordinates`,
    (tokens, tokens) int64."""
    side = torch.arange(window)
    distances = side[:, None] - side + window - 1  # along one side, from 0
    # (row, column, other row, other column)
    rows = distances[:, None, :, None]
    columns = distances[None, :, None, :]
    return (rows * (2 * window - 1) + columns).reshape(window**2, window**2)


def strangers(resolution: int, window: int, shift: int) -> Tensor:
    """Return which pairs of tokens share a shifted window only because the image wraps around.

    Args:
        resolution: tokens along a side of the image.
        window: tokens along a side of a window.
        shift: number of tokens by which windows are shifted; at least 1.

    Returns:
        (windows, tokens, tokens) bool.
    """
    # Along a side, the last `shift` tokens of the rolled image came from its start.
    wrapped = (torch.arange(resolution) >= resolution - shift).view(-1, window)
    # The image's four regions by number: (window row, window column, row within, column within).
    region = 2 * wrapped[:, None, :, None] + wrapped[None, :, None, :].long()
    region = region.reshape(-1, window**2)
    return region[:, :, None] != region[:, None, :]
