"""The layers that mix positions: attention, and a short convolution in front of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.models.split import Norm, RowLinear, StackedLinear
from moesaic.shapes import BlockConfig


class KeyValueCache:
    """The decoding state of one block: keys and values, (batch, heads, positions, width), and the
    last inputs of its convolution, (batch, convolution width - 1, dim)."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.recent: Tensor | None = None
        """The convolution's last inputs."""

    @property
    def length(self) -> int:
        """The number of cached positions."""
        return 0 if self.keys is None else self.keys.shape[2]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new positions; return those of all positions."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys = keys
        self.values = values
        return keys, values


class Attention(nn.Module):
    """Multi-head attention of each position to itself and to earlier ones.

    Under tensor parallelism a rank computes the heads in its shards of the projections.

    Args:
        dim: width of the hidden states.
        num_heads: number of query heads.
        block: options of the block: key-value heads, head widths, positions, norms, biases,
            dropout.
    """

    frequencies: Tensor
    """(width / 2 rounded up,) float32: by how much a position turns each pair of elements."""

    def __init__(self, dim: int, num_heads: int, block: BlockConfig | None = None) -> None:
        super().__init__()
        block = block or BlockConfig()
        width = block.head_dim or dim // num_heads
        self.width = width
        """Width of a head."""
        self.dropout = block.dropout
        kv_heads = block.kv_heads or num_heads
        self.shares = kv_heads != num_heads
        """Whether several query heads share a head of keys and values (grouped-query attention)."""
        self.qkv: StackedLinear | None = None
        self.q: StackedLinear | None = None
        self.kv: StackedLinear | None = None
        q_width = num_heads * width  # of all heads together
        if self.shares:
            kv_width = kv_heads * width
            self.q = StackedLinear(1, in_features=dim, out_features=q_width, bias=block.bias)
            self.kv = StackedLinear(2, in_features=dim, out_features=kv_width, bias=block.bias)
        else:  # queries, keys and values in one product
            self.qkv = StackedLinear(3, in_features=dim, out_features=q_width, bias=block.bias)
        self.out = RowLinear(q_width, dim, block.bias)
        self.q_norm = Norm(width, eps=block.norm_eps) if block.qk_norm else None
        self.k_norm = Norm(width, eps=block.norm_eps) if block.qk_norm else None
        self.rotates = block.positions == "rotary"
        """Whether queries and keys are rotated by their positions (RoPE)."""
        self.base = block.rope_theta
        """Base of the rotation's frequencies."""
        self.scaling = block.rope_factor
        """What positions are divided by before they rotate."""
        # one frequency for each pair of elements of a head
        self.register_buffer(
            "frequencies", torch.empty((width + 1) // 2, dtype=torch.float32), persistent=False
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the frequencies of the rotation, base^(-2i / width) for pair i; the modules inside
        have the parameters."""
        # in float64 on the CPU, so that they are the same on every device
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu") / self.width
        self.frequencies.copy_((self.base**-exponents).float())

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the attention output, (batch, positions, dim).

        Args:
            x: (batch, positions, dim).
            cache: keys and values of earlier positions, which x continues; extended by those of x.
        """
        start = 0 if cache is None else cache.length
        q, k, v = self.project(x, x, start)
        if cache is not None:
            k, v = cache.extend(k, v)
        if start == 0:
            return self.attend(q, k, v, None, is_causal=True)
        # query i is at position start + i, and sees all keys up to there
        length = q.shape[2]
        all_pairs = torch.ones(length, start + length, dtype=torch.bool, device=x.device)
        visible = all_pairs.tril(start)
        return self.attend(q, k, v, visible, is_causal=False)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, is_causal: bool
    ) -> Tensor:
        """Return the output, (batch, positions, dim), from what `project` returns.

        Args:
            visible: (queries, keys) bool, whether a query sees a key; None for all, or as
                `is_causal` says.
            is_causal: whether query i sees the keys up to i.
        """
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.shares,
        )
        return self.out(attended.transpose(1, 2).flatten(2))

    def project(self, x: Tensor, memory: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of x, and keys and values of `memory`, (batch, heads, positions, width)
        each, normed and rotated.

        With as many heads of keys as of queries, both arguments must be the same, since one product
        computes all three. `start` is the number of the first position.
        """

        def heads(projected: Tensor) -> Tensor:
            """Turn (batch, positions, count, heads * width) into (count, batch, heads, positions,
            width)."""
            return projected.unflatten(-1, (-1, self.width)).permute(2, 0, 3, 1, 4)

        if self.qkv is not None:
            q, k, v = heads(self.qkv(x))
        else:
            assert self.q is not None
            assert self.kv is not None
            q = heads(self.q(x))[0]  # its count is 1
            k, v = heads(self.kv(memory))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.rotates:
            q = self._rotate(q, start)
            k = self._rotate(k, start)
        return q, k, v

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """Rotate (batch, heads, positions, width) by position (RoPE, Su et al. 2021): element i of
        the first half and of the second half are a pair, turned by position * frequency i. `start`
        is the number of the first position."""
        end = start + x.shape[2]
        positions = torch.arange(start, end, device=x.device, dtype=torch.float32) / self.scaling
        angles = positions[:, None] * self.frequencies  # (positions, width / 2)
        cos = angles.cos().to(x.dtype)
        sin = angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class ShortConv(nn.Module):
    """A short convolution over positions, initialised to the identity:
    `y_t = x_t + sum_k w_k * x_{t-k}`, k from 1.

    Args:
        dim: width of the hidden states.
        width: number of positions that an output depends on, including its own.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(width - 1, dim))
        """The weights w_k, that of k at index k - 1."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the convolution the identity."""
        nn.init.zeros_(self.taps)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Mix each position with those before it.

        Args:
            x: (batch, positions, dim).
            cache: holds the inputs of the last positions before x; updated. Without earlier inputs
                x is padded with zeros.
        """
        reach = len(self.taps)  # how many positions before its own an output depends on
        length = x.shape[1]
        if cache is not None and cache.recent is not None:
            padded = torch.cat([cache.recent, x], dim=1)
        else:
            padded = F.pad(x, (0, 0, reach, 0))  # `reach` positions of zeros in front
        if cache is not None:
            cache.recent = padded[:, length:]  # the last `reach` inputs
        y = x
        for distance, tap in enumerate(self.taps, start=1):
            first = reach - distance
            earlier = padded[:, first : first + length]  # x, `distance` positions before
            y = y + earlier * tap.to(x.dtype)
        return y
