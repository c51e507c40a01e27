"""int8 with a scale per row, symmetric, rounded to nearest.

ScheMoE's int8 (its released code) is affine, truncates, divides by zero for constant rows and sends its scales in
separate exchanges. Symmetric keeps zero at zero, so that padding costs no accuracy and adds nothing where rows are summed.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from moesaic.kernels.code_formats import INT8_LARGEST, compute_dtype, saturate, with_cast
from moesaic.kernels.codecs.codec import AbstractCodec
from moesaic.kernels.pick import codes_by_triton


@final
class Int8(AbstractCodec):
    """`round(127 x / max|x|)` per row, and `max|x| / 127` as float32 (float64 for float64 rows).

    The scale is never below the smallest normal number, so a row of zeros stays zero and a row whose largest value is
    below 1.5e-36 (float32) is rounded to multiples of 1.2e-38. A row with an infinity or a NaN decodes to NaN throughout.
    """

    name: ClassVar[str] = "int8"

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        if codes_by_triton(rows.device, rows.dtype):
            from moesaic.kernels.triton.quantise import int8_encode

            int8_encode(rows, *fields)
            return
        scale, integers = fields
        values = rows.to(scale.dtype)
        scale.copy_(scales(values.abs().amax(1, keepdim=True), INT8_LARGEST))
        integers.copy_((values / scale).round_().clamp_(-INT8_LARGEST, INT8_LARGEST).nan_to_num_(0.0))

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        if codes_by_triton(fields[0].device, dtype):
            from moesaic.kernels.triton.quantise import int8_decode

            decoded: Tensor = int8_decode(*fields, dtype)
            return decoded
        scale, integers = fields
        return saturate(integers * scale, dtype)

    def _bound(self, rows: Tensor) -> Tensor:
        values = rows.to(compute_dtype(rows.dtype))
        scale = scales(values.abs().amax(1, keepdim=True), INT8_LARGEST).double()
        # Half a step; 2**-14 steps cover the rounding of the scale and of the quotient: 3 x 127 x 2**-24 in float32.
        step = scale * (0.5 + 2.0**-14)
        return with_cast(rows, step)


def scales(largest: Tensor, levels: float) -> Tensor:
    """Return the scale that maps `largest` to `levels`: at least the smallest normal number, NaN if not finite.

    Args:
        largest: magnitudes, any shape, float32 or float64.
        levels: the largest number that is sent.
    """
    smallest = torch.finfo(largest.dtype).smallest_normal
    return (largest / levels).clamp_(min=smallest).where(largest.isfinite(), torch.nan)
