"""Windowed attention against pixel pairs written out, with shifts; windows, coordinates and biases
are in the pairs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moesaic_lab.vision.attention import WindowAttention

SHAPES = [(8, 4, 0), (8, 4, 2), (8, 4, 1), (6, 3, 1), (12, 4, 3), (6, 2, 1), (4, 4, 0), (3, 1, 0)]
"""Resolution, window, shift."""


def drawn(
    resolution: int, window: int, shift: int, dim: int = 6, heads: int = 2
) -> WindowAttention:
    """A layer whose parameters are all away from where they start, in float64."""
    layer = WindowAttention(dim, heads, resolution=resolution, window=window, shift=shift).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return layer


def place(apart: int, window: int) -> float:
    """Equation 4 of Swin V2 for one coordinate, the window's side scaled to 8."""
    scaled = 8 * apart / max(window - 1, 1)
    return math.copysign(math.log2(1 + abs(scaled)) / math.log2(8), scaled)


def by_pixel_pairs(layer: WindowAttention, image: Tensor) -> Tensor:
    """Attention of one image, (height, width, dim), with every pair of pixels looked at on its own.

    Two pixels see each other if the same lines of the grid, which the shift moves, lie around both.
    """
    side = len(image)
    window = layer.window
    heads = layer.num_heads
    weights = layer.qkv.weight.unbind()
    q = image @ weights[0].T + layer.q_bias
    k = image @ weights[1].T
    v = image @ weights[2].T + layer.v_bias
    width = image.shape[2] // heads
    scale = layer.log_scale.exp().clamp(max=100)
    out = torch.zeros_like(image)
    for r in range(side):
        for c in range(side):
            own = ((r - layer.shift) // window, (c - layer.shift) // window)
            seen = [
                (i, j)
                for i in range(side)
                for j in range(side)
                if ((i - layer.shift) // window, (j - layer.shift) // window) == own
            ]
            apart = torch.tensor(
                [[place(r - i, window), place(c - j, window)] for i, j in seen], dtype=torch.float64
            )
            bias = 16 / (1 + torch.exp(-layer.position_bias(apart)))
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                cosines = torch.stack(
                    [torch.cosine_similarity(q[r, c, part], k[i, j, part], dim=0) for i, j in seen]
                )
                shares = (scale[head] * cosines + bias[:, head]).softmax(0)
                out[r, c, part] = sum(share * v[i, j, part] for share, (i, j) in zip(shares, seen))
    return out @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_equal_attention_over_pixel_pairs(shape: tuple[int, int, int]) -> None:
    layer = drawn(*shape)
    images = torch.randn(2, shape[0], shape[0], 6, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([by_pixel_pairs(layer, image) for image in images])
        torch.testing.assert_close(layer(images), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 4, 2), (6, 3, 1)], ids=str)
def test_gradients_equal_those_over_pixel_pairs(shape: tuple[int, int, int]) -> None:
    layer = drawn(*shape, dim=4)
    image = torch.randn(shape[0], shape[0], 4, dtype=torch.float64, requires_grad=True)
    wanted = [image, *layer.parameters()]
    found = torch.autograd.grad(layer(image[None])[0].sin().sum(), wanted)
    expected = torch.autograd.grad(by_pixel_pairs(layer, image).sin().sum(), wanted)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_no_temperature_falls_below_a_hundredth() -> None:
    layer = drawn(4, 2, 1)
    image = torch.randn(1, 4, 4, 6, dtype=torch.float64)
    layer.log_scale.data.fill_(math.log(100))
    limit = layer(image)
    layer.log_scale.data.fill_(9.0)
    torch.testing.assert_close(layer(image), limit)
    layer.log_scale.data.fill_(math.log(50))
    assert not torch.allclose(layer(image), limit)
