"""Experts in float8 with row-wise scales: operands are rounded to e4m3 with one scale per row of
tokens and per matrix row.

The product is Hopper's `torch._scaled_grouped_mm`, which accumulates in float32. Forward rounds the
token rows, the hidden rows and the weights. Backward rounds the gradients of rows and, along the
other dimension, the weights. The wgrad products are bfloat16, as in torchao's recipe
`wgrad_with_hp`. Scales are powers of two, so scaling itself does not round. The error of a factor
is at most 2^-4 of it, or 2^-10 of its row's scale if that is larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.whole_batch import by_products

LARGEST = 448.0
"""The largest float8_e4m3fn number."""


def rows_times(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: (R, K) x (E, K, N) -> (R, N) bfloat16; undefined
    from row `ends[-1]` on."""
    if not len(x):
        return x.new_empty(0, w.shape[2])
    rows, row_scales = rounded(x)
    matrices, matrix_scales = rounded(w.transpose(1, 2))
    product: Tensor = torch._scaled_grouped_mm(
        rows,
        matrices.transpose(1, 2),
        row_scales,
        matrix_scales,
        offs=ends,
        out_dtype=torch.bfloat16,
    )
    return product


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each last dimension by a scale; return the e4m3 quotients, (..., K), and the scales,
    (...) float32."""
    scale = powers(exponents(x))
    quotients = x / scale.unsqueeze(-1)
    codes = quotients.to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    return codes, scale


def powers(exponent: Tensor) -> Tensor:
    """Return exactly 2**exponent in float32, for int32 exponents from -126 to 127; infinity
    for 128."""
    return (exponent + 127 << 23).view(torch.float32)


def exponents(x: Tensor) -> Tensor:
    """Return the exponent of the smallest power-of-two scale with which a last dimension fits e4m3:
    (..., K) -> (...) int32.

    If some value is not finite, the exponent is 128, which makes infinities NaN: a plain cast may
    give the largest number.
    """
    largest = x.abs().amax(-1).float()
    # quotient = mantissa * 2**exponent with a mantissa from 0.5: at 0.5 half the power suffices
    mantissa, exponent = torch.frexp(largest / LARGEST)
    is_power = (mantissa == 0.5).int()
    smallest = (exponent - is_power).clamp(-126, 127)  # the exponents of normal float32 numbers
    return smallest.masked_fill(~largest.isfinite(), 128)


forward, backward = by_products("fp8", majors=(9,), multiple=16, rows_times=rows_times)
