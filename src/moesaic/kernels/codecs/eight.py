"""The 8-bit codecs: int8 with a scale per row, and float8 e4m3 with a scale per 128 values of a
row.

ScheMoE's int8 (its released code) is affine, truncates, divides by zero for constant rows and sends
its scales in separate exchanges. This int8 is symmetric and rounds to nearest. Zero stays zero, so
padding loses no accuracy and adds nothing to sums of rows. The float8 blocks are the tiles of
DeepSeek-V3 (its section 3.3.2), but for communication only.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.code_formats import (
    FP8_LARGEST,
    FP8_WIDTH,
    INT8_LARGEST,
    compute_dtype,
    saturate,
    with_cast,
)
from moesaic.kernels.codecs.codec import AbstractCodec
from moesaic.kernels.pick import codes_by_triton


class AbstractEightBit(AbstractCodec):
    """Sends one byte per value, and scales that several values share."""

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Decode rows from codes and scales."""
        scale, codes = fields
        if codes_by_triton(scale.device, dtype):
            from moesaic.kernels.triton.quantise import decode

            decoded: Tensor = decode(scale, codes, dtype)
            return decoded
        return saturate(codes.to(scale.dtype) * per_value(scale, dim), dtype)


@final
class Int8(AbstractEightBit):
    """Sends `round(127 x / max|x|)` for each row, and the scale `max|x| / 127` as float32 (float64
    for float64 rows).

    The scale is never below the smallest normal number. A row of zeros therefore stays zero, and a
    row with all values below 1.5e-36 (float32) is rounded to multiples of 1.2e-38. A row with an
    infinity or a NaN decodes to NaN throughout.
    """

    name: ClassVar[str] = "int8"

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        """Write the scales and the codes of rows; a NaN becomes 0."""
        if codes_by_triton(rows.device, rows.dtype):
            from moesaic.kernels.triton.quantise import int8_encode

            int8_encode(rows, *fields)
            return
        scale, integers = fields
        values = rows.to(scale.dtype)
        largest = values.abs().amax(1, keepdim=True)
        scale.copy_(scales(largest, INT8_LARGEST))
        rounded = (values / scale).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
        integers.copy_(rounded.nan_to_num_(0.0))

    def _bound(self, rows: Tensor) -> Tensor:
        """Return the largest error of each value."""
        values = rows.to(compute_dtype(rows.dtype))
        scale = scales(values.abs().amax(1, keepdim=True), INT8_LARGEST).double()
        # Half a step; 2**-14 steps cover the rounding of the scale and of the quotient: 3 x 127 x
        # 2**-24 in float32.
        step = scale * (0.5 + 2.0**-14)
        return with_cast(rows, step)


def scales(largest: Tensor, levels: float) -> Tensor:
    """Return the scale that maps `largest` to `levels`: at least the smallest normal number; NaN if
    `largest` is not finite.

    Args:
        largest: largest magnitudes, any shape, float32 or float64.
        levels: the largest number of the 8-bit format.
    """
    smallest = torch.finfo(largest.dtype).smallest_normal
    # a division by a number would be a product with its rounded reciprocal on a GPU
    quotient = largest / torch.full_like(largest, levels)
    return quotient.clamp_(min=smallest).where(largest.isfinite(), torch.nan)


@final
class Fp8(AbstractEightBit):
    """Scales each block to a largest magnitude of 448 and casts it to e4m3, to nearest.

    The error of a value is at most 1/16 of the value, or 2**-10 of the scale where e4m3 is
    subnormal: for values below 2**-6 / 448, i.e. 3.5e-5, of the block's largest. Scales are float32
    (float64 for float64 rows), never below the smallest normal number. A block with an infinity or
    a NaN decodes to NaN throughout; other blocks of the row are not affected.
    """

    name: ClassVar[str] = "fp8"

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        """Write the scales and the codes of rows; a NaN becomes 0."""
        if codes_by_triton(rows.device, rows.dtype):
            from moesaic.kernels.triton.quantise import fp8_encode

            fp8_encode(rows, *fields)
            return
        scale, codes = fields
        values = rows.to(scale.dtype)
        scale.copy_(scales(block_max(values), FP8_LARGEST))
        scaled = values / per_value(scale, rows.shape[1])
        codes.copy_(scaled.clamp_(-FP8_LARGEST, FP8_LARGEST).nan_to_num_(0.0))

    def _bound(self, rows: Tensor) -> Tensor:
        """Return the largest error of each value."""
        values = rows.to(compute_dtype(rows.dtype))
        scale = per_value(scales(block_max(values), FP8_LARGEST), rows.shape[1]).double()
        # e4m3 has 4 significant bits, and subnormal numbers are 2**-9 apart
        rounding = torch.maximum(rows.double().abs() * 2.0**-4, scale * 2.0**-10)
        # The factor covers the rounding of scale and quotient: at most 4 x 2**-24 of the value in
        # float32.
        return with_cast(rows, rounding * (1 + 2.0**-18))


def block_max(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block of `FP8_WIDTH` values: (R, D) -> (R, ceil(D /
    FP8_WIDTH))."""
    num_rows, dim = values.shape
    padded = F.pad(values, (0, -dim % FP8_WIDTH))
    return padded.view(num_rows, -1, FP8_WIDTH).abs().amax(2)


def per_value(scale: Tensor, dim: int) -> Tensor:
    """Return each value's scale: (R, ceil(D / FP8_WIDTH)) -> (R, D), or (R, 1) unchanged."""
    if scale.shape[1] == 1:
        return scale
    return scale.repeat_interleave(FP8_WIDTH, dim=1)[:, :dim]
