"""What codecs and their Triton kernels share: constants of the formats, casts that never overflow, and their errors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

INT8_LARGEST = 127
"""The largest integer sent; -128 is not used."""
FP8_WIDTH = 128
"""Values of a row under one scale; the last block of a row may be narrower."""
FP8_LARGEST = 448.0
"""The largest e4m3 number; the format has no infinity, and a cast of more gives NaN, hence the clamp."""
ZFP_BLOCK = 4
"""Rows and columns of a block."""
ZFP_ORDER = np.array([0, 1, 4, 5, 2, 8, 6, 9, 3, 12, 10, 7, 13, 11, 14, 15])
"""The coefficients of a block (row-major places) in the order in which a plane's bits are sent: by total frequency."""
ZFP_FLUSH = {torch.float32: 2.0**-90, torch.float64: 2.0**-900}
"""Smaller values, as parts of the message's largest, are sent as zero: zfp's own scale overflows for blocks below 2**-98
(float32) or 2**-962 (float64), and such blocks would come back as noise."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what rows of `dtype` are computed in, their scales included: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def saturate(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to nearest; what lies beyond the largest finite number of `dtype` becomes that number. NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def saturate_finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as `saturate` does, but keep infinities."""
    return torch.where(values.isinf(), values.to(dtype), saturate(values, dtype))


def cast_error(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far a cast to nearest may move a value of at most this magnitude, saturation excluded.

    Args:
        magnitude: any shape, float64.
        dtype: cast to.

    Returns:
        The shape of `magnitude`, float64: half an ulp, never below the spacing of subnormals (half of it would do,
        but is not a float64 number for every dtype).
    """
    numbers = torch.finfo(dtype)
    return magnitude * (numbers.eps / 2) + numbers.smallest_normal * numbers.eps


def with_cast(rows: Tensor, error: Tensor) -> Tensor:
    """Return how far decoded values are off once they are cast to the dtype of the rows.

    Args:
        rows: (R, D), the originals.
        error: how far values are off before the cast, float64, broadcast against `rows`.

    Returns:
        (R, D) float64. Not `cast_error(|rows| + error)`, which overflows for the largest float64 rows.
    """
    return error * (1 + torch.finfo(rows.dtype).eps / 2) + cast_error(rows.double().abs(), rows.dtype)


def multiply_by_power(values: Tensor, exponent: Tensor) -> Tensor:
    """Return `values * 2**exponent`, exact but for underflow and overflow.

    In two steps, since 2**exponent itself may be out of range; and from bits, since `exp2`, `pow` and so `ldexp` promise
    no exact powers on every device.

    Args:
        values: (...) float32 or float64.
        exponent: int32, broadcast against `values`; at most 252 in magnitude for float32, 2044 for float64.
    """
    half = exponent >> 1
    return values * _power_of_two(half, values.dtype) * _power_of_two(exponent - half, values.dtype)


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
