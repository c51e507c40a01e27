"""bfloat16 and float16 on the wire.

Rows of a wider range than the transport's carry a power of two per row, which moves the row's largest value to the top of the
range. Scaling by it is exact, so a row that float16 could hold comes back as a plain cast would give it (what the cast
would make subnormal, closer); one that it could not hold neither overflows nor vanishes.
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
    """A cast to 16 bits, to nearest. Infinities and NaN stay where and what they are."""

    transport: ClassVar[torch.dtype]
    """The dtype that is sent."""
    top: ClassVar[int]
    """The row's largest value is moved below 2**top; rounding up to 2**top must not overflow `transport`."""

    def _is_scaled(self, dtype: torch.dtype) -> bool:
        """Whether `dtype` reaches further than the transport, so that a power of two travels with each row."""
        return len(self.layout(1, 1, dtype)) > 1

    def _shift(self, values: Tensor) -> Tensor:
        """Return (R, 1) int32, the exponents that rows are multiplied with; values that are not finite have no say."""
        largest = values.abs().where(values.isfinite(), 0.0).amax(1, keepdim=True)
        return self.top - torch.frexp(largest).exponent

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        values = rows.to(compute_dtype(rows.dtype))
        if self._is_scaled(rows.dtype):
            shift = self._shift(values)
            fields[0].copy_(shift)
            values = multiply_by_power(values, shift)
        fields[-1].copy_(saturate_finite(values, self.transport))

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        transport = fields[-1]
        if not self._is_scaled(dtype):
            return saturate_finite(transport.to(compute_dtype(dtype)), dtype)
        values = multiply_by_power(transport.to(compute_dtype(dtype)), -fields[0].to(torch.int32))
        return torch.where(transport.isinf(), transport.to(dtype), saturate(values, dtype))

    def _bound(self, rows: Tensor) -> Tensor:
        values = rows.double()
        if rows.dtype == self.transport:
            return torch.zeros_like(values).where(values.isfinite(), torch.inf)
        if self._is_scaled(rows.dtype):
            shift = self._shift(rows.to(compute_dtype(rows.dtype)))
            on_transport = multiply_by_power(cast_error(multiply_by_power(values.abs(), shift), self.transport), -shift)
        else:
            on_transport = cast_error(values.abs(), self.transport)
        return with_cast(rows, on_transport)


@final
class Bf16(AbstractSixteenBit):
    """bfloat16: 8 significant bits, the range of float32. A power of two per row is sent for float64 rows only."""

    name: ClassVar[str] = "bf16"
    transport: ClassVar[torch.dtype] = torch.bfloat16
    top: ClassVar[int] = 127


@final
class Fp16(AbstractSixteenBit):
    """float16: 11 significant bits. A power of two per row is sent unless the rows are float16 themselves."""

    name: ClassVar[str] = "fp16"
    transport: ClassVar[torch.dtype] = torch.float16
    top: ClassVar[int] = 15
