"""Experts in float8: rows and weights are rounded to e4m3 before every product, one scale per row and per matrix row.

Hopper's grouped product does it (`torch._scaled_grouped_mm`, accumulated in float32). Rounded are the token rows, the hidden
rows and the weights in forward, and the gradients of rows and the weights again, along the other dimension, in backward; the
weights' gradients are products of bfloat16, as in torchao's recipe `wgrad_with_hp`. Scales are powers of two, so that
scaling itself rounds nothing. An error is at most 2^-4 of each factor, or 2^-10 of its row's scale where that is more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.whole_batch import by_products

LARGEST = 448.0
"""Of float8_e4m3fn."""


def rows_times(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: (R, K) x (E, K, N) -> (R, N) in bfloat16; rows behind all are anything."""
    if not len(x):
        return x.new_empty(0, w.shape[2])
    rows, of_rows = rounded(x)
    matrices, of_matrices = rounded(w.transpose(1, 2))
    found: Tensor = torch._scaled_grouped_mm(
        rows, matrices.transpose(1, 2), of_rows, of_matrices, offs=ends, out_dtype=torch.bfloat16
    )
    return found


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return values over the scale of their last dimension, in e4m3, and the scales: (..., K) -> (..., K), (...) float32."""
    scale = powers(exponents(x))
    return (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn, memory_format=torch.contiguous_format), scale


def powers(exponent: Tensor) -> Tensor:
    """Return 2 ** exponent, float32, of int32 in -126 to 127, exactly; infinity of 128."""
    return (exponent + 127 << 23).view(torch.float32)


def exponents(x: Tensor) -> Tensor:
    """Return the exponents of the smallest powers of two over which a last dimension fits e4m3: (..., K) -> (...) int32.

    Where some value is not finite it is 128, so that all come out as NaN: to cast infinity may give the largest number.
    """
    largest = x.abs().amax(-1).float()
    mantissa, exponent = torch.frexp(largest / LARGEST)
    return (exponent - (mantissa == 0.5).int()).clamp(-126, 127).masked_fill(~largest.isfinite(), 128)


forward, backward = by_products("fp8", (9,), 16, rows_times)
