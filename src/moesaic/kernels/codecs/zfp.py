"""zfp at a fixed rate: blocks of 4 rows x 4 columns, all of the same number of bits (ScheMoE section 6, there on CUDA).

Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays" (2014), through the package zfpy, on the CPU: rows on another
device are copied there and back, which waits for the device. Fixed rate is what lets both ends know a message's length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from moesaic.codecs import CodecSpec, blocks_of_bits
from moesaic.errors import InputError
from moesaic.kernels.code_formats import ZFP_BLOCK, ZFP_FLUSH, compute_dtype, multiply_by_power, saturate, with_cast
from moesaic.kernels.codecs.codec import AbstractCodec
from moesaic.kernels.codecs.zfp_bound import block_errors
from moesaic.kernels.pick import codes_by_triton

RATES = range(4, 33)
"""Bits per value that are accepted. zfpy 1.0.1 writes beyond its buffer where a block's bits do not hold its exponent."""
MOST_VALUES = 2**28
"""The Triton kernels count the bits of so many values with 32-bit integers; more go over the CPU."""


@final
@dataclass(frozen=True, kw_only=True)
class Zfp(AbstractCodec):
    """`rate` bits per value, shared among the 16 values of a block, most significant bits first.

    The message also holds a power of two (it moves the message's largest magnitude below 1) and a bit per row: a row with
    an infinity or a NaN decodes to NaN throughout, and its block sees zeros in its place. Rows and columns are filled up to
    multiples of 4 with copies of the last ones, so messages of 4k rows waste nothing.

    The error is relative to the largest value of the *block*: a row of small values beside a row of large ones loses its
    small digits or all of them. Smooth blocks gain, noise does not: for independent Gaussian values int8 is the better
    codec at 8 bits. Worst case at rate 8 and above: 0.62 * 2**e per block, e being the exponent of its largest value.
    `error_bound` counts the bits that each block's own coefficients take: a tenth of that or less for Gaussian values.
    """

    name: ClassVar[str] = "zfp"

    rate: int = 8
    """Bits per value, 4 to 32."""

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not isinstance(self.rate, int) or self.rate not in RATES:
            allowed = f"a whole number of bits from {RATES[0]} to {RATES[-1]}"
            raise InputError(f"codec zfp: rate is {self.rate!r}: write {allowed} per value, such as 8")

    def check_available(self) -> None:
        _zfpy()

    @property
    def spec(self) -> CodecSpec:
        return replace(super().spec, layout=partial(blocks_of_bits, rate=self.rate))

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        if codes_by_triton(rows.device, rows.dtype) and rows.numel() <= MOST_VALUES:
            from moesaic.kernels.triton.zfp import zfp_encode

            zfp_encode(rows, *fields, self.rate)
            return
        values, shift, bad = prepare(rows)
        stream = _zfpy().compress_numpy(pad(values).numpy(), rate=self.rate, write_header=False)
        assert len(stream) == fields[1].numel(), f"zfp: {len(stream)} bytes written, {fields[1].numel()} expected"
        fields[0].copy_(shift)
        fields[1].copy_(torch.frombuffer(bytearray(stream), dtype=torch.uint8))
        fields[2].copy_(torch.from_numpy(np.packbits(bad.numpy())))

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        if codes_by_triton(fields[0].device, dtype) and num_rows * dim <= MOST_VALUES:
            from moesaic.kernels.triton.zfp import zfp_decode

            shift, stream, flags = fields
            stream = stream.clone() if stream.storage_offset() % 2 else stream  # read by 16 bits
            on_device: Tensor = zfp_decode(shift, stream, flags, num_rows, dim, dtype, self.rate)
            return on_device
        shift, stream, flags = (field.cpu() for field in fields)
        zfpy = _zfpy()
        is_double = compute_dtype(dtype) == torch.float64
        shape = (num_rows + -num_rows % ZFP_BLOCK, dim + -dim % ZFP_BLOCK)
        ztype = zfpy.type_double if is_double else zfpy.type_float
        decoded = zfpy._decompress(stream.numpy().tobytes(), ztype, shape, rate=self.rate)
        values = multiply_by_power(torch.from_numpy(decoded)[:num_rows, :dim], -shift.to(torch.int32))
        bad = torch.from_numpy(np.unpackbits(flags.numpy(), count=num_rows).astype(bool))
        return saturate(values.masked_fill(bad[:, None], torch.nan), dtype).to(fields[0].device)

    def _bound(self, rows: Tensor) -> Tensor:
        values, shift, bad = prepare(rows)
        errors = torch.from_numpy(block_errors(pad(values).numpy(), self.rate))
        per_value = errors.repeat_interleave(ZFP_BLOCK, 0).repeat_interleave(ZFP_BLOCK, 1)[
            : rows.shape[0], : rows.shape[1]
        ]
        step = multiply_by_power(per_value + ZFP_FLUSH[values.dtype], -shift)
        return with_cast(rows.cpu(), step).masked_fill(bad[:, None], torch.inf).to(rows.device)


def prepare(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what zfp gets to see.

    Args:
        rows: (R, D).

    Returns:
        (R, D) float32 or float64 below 1 in magnitude, on the CPU, zero where the row is not finite or the value is below
        `ZFP_FLUSH`; (1,) int32, the exponent of the power of two that rows were multiplied with; (R,) bool, the rows that
        are not finite.
    """
    values = rows.cpu().to(compute_dtype(rows.dtype))
    bad = ~values.isfinite().all(1)
    values = values.masked_fill(bad[:, None], 0.0)
    shift = -torch.frexp(values.abs().max()).exponent.view(1)
    values = multiply_by_power(values, shift)
    return values.masked_fill(values.abs() < ZFP_FLUSH[values.dtype], 0.0), shift, bad


def pad(values: Tensor) -> Tensor:
    """Fill rows and columns up to multiples of 4 with the last ones: (R, D) -> (4 ceil(R / 4), 4 ceil(D / 4))."""
    rows, dim = (torch.arange(size + -size % ZFP_BLOCK).clamp(max=size - 1) for size in values.shape)
    return values[rows][:, dim].contiguous()


def _zfpy() -> Any:
    try:
        return import_module("zfpy")
    except ImportError as error:
        raise InputError("codec zfp needs zfpy: pip install 'moesaic[zfp]'") from error
