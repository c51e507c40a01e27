"""Shared by codecs and their Triton kernels: constants of the formats, casts that never overflow,
and bounds of cast errors."""

from __future__ import annotations

import torch
from torch import Tensor

INT8_LARGEST = 127
"""The largest integer in an int8 message; -128 is not used."""
FP8_WIDTH = 128
"""The number of values of a row that share a scale in an fp8 message; the last block of a row may
be narrower."""
FP8_LARGEST = 448.0
"""The largest e4m3 number. The format has no infinity, and a cast of a larger number gives NaN, so
codecs clamp first."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which codecs compute with rows of `dtype` and their scales: float64 for
    float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def saturate(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to nearest; larger magnitudes become the largest finite number of `dtype`. NaN stays
    NaN."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def saturate_finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast like `saturate`, but keep infinities."""
    return torch.where(values.isinf(), values.to(dtype), saturate(values, dtype))


def cast_error(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bound of the error of a cast to nearest, saturation excluded.

    Args:
        magnitude: upper bounds of the values' magnitudes, any shape, float64.
        dtype: the dtype of the cast.

    Returns:
        The shape of `magnitude`, float64: half an ulp plus the spacing of subnormals. (Half the
        spacing would suffice, but is not a float64 number for every dtype.)
    """
    numbers = torch.finfo(dtype)
    return magnitude * (numbers.eps / 2) + numbers.smallest_normal * numbers.eps


def with_cast(rows: Tensor, error: Tensor) -> Tensor:
    """Return a bound of the error of decoded values after their cast to the dtype of the rows.

    Args:
        rows: (R, D), the original rows.
        error: a bound of the error before the cast, float64, broadcast against `rows`.

    Returns:
        (R, D) float64. Not `cast_error(|rows| + error)`, which overflows for the largest float64
        rows.
    """
    half_ulp = torch.finfo(rows.dtype).eps / 2
    return error * (1 + half_ulp) + cast_error(rows.double().abs(), rows.dtype)


def multiply_by_power(values: Tensor, exponent: Tensor) -> Tensor:
    """Return `values * 2**exponent`, exact except for underflow and overflow.

    There are two multiplications, since 2**exponent itself may be out of range. Powers are made
    from bits, since `exp2`, `pow` and therefore `ldexp` are not exact on every device.

    Args:
        values: (...) float32 or float64.
        exponent: int32, broadcast against `values`; at most 252 in magnitude for float32, 2044 for
            float64.
    """
    first = exponent >> 1
    second = exponent - first
    return values * _power_of_two(first, values.dtype) * _power_of_two(second, values.dtype)


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2**exponent in float64 or float32: the biased exponent above the bits of the
    mantissa."""
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
