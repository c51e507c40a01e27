"""The 16-bit codecs: bfloat16 and float16.

If the rows' dtype has a wider range than the 16-bit dtype, each row is scaled by a power of two
that moves its largest value to the top of the range. The scaling is exact. A row within float16's
range therefore decodes to the result of a plain cast, or closer to the original for values that the
cast makes subnormal. Other rows neither overflow nor vanish.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from moesaic.kernels.code_formats import (
    cast_error,
    compute_dtype,
    multiply_by_power,
    saturate,
    saturate_finite,
    with_cast,
)
from moesaic.kernels.codecs.codec import AbstractCodec


class AbstractSixteenBit(AbstractCodec):
    """Casts rows to a 16-bit dtype, to nearest. Infinities and NaN are kept."""

    transport: ClassVar[torch.dtype]
    """The 16-bit dtype that is sent."""
    top: ClassVar[int]
    """Scaling moves a row's largest value below 2**top. 2**top must be a finite number of
    `transport`."""

    def _is_scaled(self, dtype: torch.dtype) -> bool:
        """Return whether the message has a power of two per row, since `dtype` has a wider range
        than `transport`."""
        return len(self.layout(1, 1, dtype)) > 1

    def _shift(self, values: Tensor) -> Tensor:
        """Return each row's power of two, (R, 1) int32 exponents; values that are not finite are
        ignored."""
        largest = values.abs().where(values.isfinite(), 0.0).amax(1, keepdim=True)
        return self.top - torch.frexp(largest).exponent

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        """Write rows in the 16-bit dtype, multiplied by a power of two where its range is too
        small.

        The fields are (exponents, values), or (values,) if rows are not scaled.
        """
        values = rows.to(compute_dtype(rows.dtype))
        if self._is_scaled(rows.dtype):
            shift = self._shift(values)
            fields[0].copy_(shift)
            values = multiply_by_power(values, shift)
        fields[-1].copy_(saturate_finite(values, self.transport))

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        sent = fields[-1]
        values = sent.to(compute_dtype(dtype))
        if not self._is_scaled(dtype):
            return saturate_finite(values, dtype)
        shift = fields[0].to(torch.int32)
        unscaled = multiply_by_power(values, -shift)
        # `saturate` is for finite values that scaling back takes beyond the dtype's range
        return torch.where(sent.isinf(), sent.to(dtype), saturate(unscaled, dtype))

    def _bound(self, rows: Tensor) -> Tensor:
        """Return the largest error of each value: none if the dtype is sent as it is, else that of
        the cast."""
        values = rows.double()
        if rows.dtype == self.transport:
            return torch.zeros_like(values).where(values.isfinite(), torch.inf)
        if self._is_scaled(rows.dtype):
            shift = self._shift(rows.to(compute_dtype(rows.dtype)))
            scaled = multiply_by_power(values.abs(), shift)
            error = multiply_by_power(cast_error(scaled, self.transport), -shift)
        else:
            error = cast_error(values.abs(), self.transport)
        return with_cast(rows, error)


@final
class Bf16(AbstractSixteenBit):
    """Sends bfloat16: 8 significant bits, the range of float32. Only float64 rows are scaled by
    powers of two."""

    name: ClassVar[str] = "bf16"
    transport: ClassVar[torch.dtype] = torch.bfloat16
    top: ClassVar[int] = 127


@final
class Fp16(AbstractSixteenBit):
    """Sends float16: 11 significant bits. All rows but float16 ones are scaled by powers of two."""

    name: ClassVar[str] = "fp16"
    transport: ClassVar[torch.dtype] = torch.float16
    top: ClassVar[int] = 15
