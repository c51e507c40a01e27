"""zfp at a fixed rate: blocks of 4 rows x 4 columns, each encoded in the same number of bits.

ScheMoE (section 6) uses it on CUDA. The algorithm is Lindstrom, "Fixed-Rate Compressed
Floating-Point Arrays" (2014). The package zfpy computes it on the CPU. Rows on another device are
copied to the CPU and back, which waits for the device. The fixed rate lets sender and receiver know
a message's length.

The error bound follows from the block's exponent and the rate. zfp (Lindstrom 2014, section 2; the
documentation's "Algorithm") turns a block of 4 x 4 values into 30-bit integers (62-bit for float64)
relative to the block's largest exponent. It transforms rows and columns, writes the coefficients in
negabinary and sends their bit planes from the top until the block's bits are used up. If p planes
are sent whole, the last one at place k, then:

- the bits cut from a coefficient are at most 2/3 * 2**k in magnitude: all even or all odd
  negabinary places below k;
- in a plane that is sent in part, one coefficient may get a bit that it does not have: another
  1/6 * 2**k;
- the inverse transform amplifies errors of all coefficients at most 15/4 times per dimension, and
  of a single one 3/2 times;
- the error of a value is therefore at most (2/3 * (15/4)**2 + 1/6 * (3/2)**2) * 2**k = 9.75 * 2**k;
- the casts and the halvings of the transform lose at most 128 units of the integers, and the cast
  of a large integer to a float loses a few units of the float.

From p = 6 on no integer wraps around. A block takes at most 16 p + 15 bits for p planes, so rate 8
always reaches p = 6. Below that only the range of the integers bounds the error: 3 times the
block's largest power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from moesaic.codecs import CodecSpec, codec_spec
from moesaic.errors import InputError, to_install
from moesaic.kernels.code_formats import compute_dtype, multiply_by_power, saturate, with_cast
from moesaic.kernels.codecs.codec import AbstractCodec

BLOCK = 4
"""The number of rows, and of columns, of a zfp block."""
FLUSH = {torch.float32: 2.0**-90, torch.float64: 2.0**-900}
"""Values below this fraction of the message's largest value are sent as zero. Blocks below 2**-98
(float32) or 2**-962 (float64) would decode to noise, since zfp's own scale overflows for them."""


@final
@dataclass(frozen=True, kw_only=True)
class Zfp(AbstractCodec):
    """Sends `rate` bits per value, shared among the 16 values of a block, most significant bits
    first.

    The message also holds a power of two, which moves the message's largest magnitude below 1, and
    a bit per row. A row with an infinity or a NaN decodes to NaN throughout; its block is encoded
    with zeros in its place. Rows and columns are padded to multiples of 4 with copies of the last
    row and column.

    The error is relative to the largest value of the *block*: small values in a block with large
    ones lose some or all of their digits. zfp suits smooth blocks. For independent Gaussian values
    int8 is the better codec at 8 bits. The worst error at rate 8 and above is 0.62 * 2**e per
    block, e being the exponent of its largest value; Gaussian values have a tenth of that.
    """

    name: ClassVar[str] = "zfp"

    rate: int = 8
    """Bits per value, 4 to 32. Below 4, zfpy 1.0.1 writes beyond its buffer, since a block's bits
    do not hold its exponent."""

    def __post_init__(self) -> None:
        codec_spec(f"{self.name}:{self.rate!r}")

    def check_available(self) -> None:
        _zfpy()

    @property
    def spec(self) -> CodecSpec:
        return codec_spec(f"{self.name}:{self.rate}")

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        """Encode rows on the CPU, into the exponent of a power of two, zfp's stream and a bit per
        row."""
        shift_field, stream_field, bits_field = fields
        values, shift, is_nonfinite = prepare(rows)
        stream = _zfpy().compress_numpy(pad(values).numpy(), rate=self.rate, write_header=False)
        assert len(stream) == stream_field.numel(), (
            f"zfp: {len(stream)} bytes written, {stream_field.numel()} expected"
        )
        shift_field.copy_(shift)
        stream_field.copy_(torch.frombuffer(bytearray(stream), dtype=torch.uint8))
        bits_field.copy_(torch.from_numpy(np.packbits(is_nonfinite.numpy())))

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Decode rows on the CPU, and return them on the device of the fields."""
        shift, stream, bits = (field.cpu() for field in fields)
        zfpy = _zfpy()
        is_double = compute_dtype(dtype) == torch.float64
        ztype = zfpy.type_double if is_double else zfpy.type_float
        padded_shape = (_padded_size(num_rows), _padded_size(dim))
        decoded = zfpy._decompress(stream.numpy().tobytes(), ztype, padded_shape, rate=self.rate)
        scaled = torch.from_numpy(decoded)[:num_rows, :dim]
        values = multiply_by_power(scaled, -shift.to(torch.int32))

        flags = np.unpackbits(bits.numpy(), count=num_rows)
        is_nonfinite = torch.from_numpy(flags.astype(bool))
        values = values.masked_fill(is_nonfinite[:, None], torch.nan)
        return saturate(values, dtype).to(fields[0].device)

    def _bound(self, rows: Tensor) -> Tensor:
        """Return the largest error of each value: that of its block; infinity in rows that are not
        finite."""
        values, shift, is_nonfinite = prepare(rows)
        by_block = torch.from_numpy(block_errors(pad(values).numpy(), self.rate))
        by_padded_value = by_block.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        num_rows, dim = rows.shape
        # without the padding; values below `FLUSH` are sent as zero
        scaled_errors = by_padded_value[:num_rows, :dim] + FLUSH[values.dtype]
        errors = with_cast(rows.cpu(), multiply_by_power(scaled_errors, -shift))
        return errors.masked_fill(is_nonfinite[:, None], torch.inf).to(rows.device)


def prepare(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale rows for zfp and replace what it cannot encode.

    Args:
        rows: (R, D).

    Returns:
        Three tensors on the CPU. The scaled rows, (R, D) float32 or float64, below 1 in magnitude;
        zero in rows that are not finite and for values below `FLUSH`. The exponent of the power of
        two by which rows were multiplied, (1,) int32. Whether each row is not finite, (R,) bool.
    """
    values = rows.cpu().to(compute_dtype(rows.dtype))
    is_nonfinite = ~values.isfinite().all(1)
    values = values.masked_fill(is_nonfinite[:, None], 0.0)
    shift = -torch.frexp(values.abs().max()).exponent.view(1)
    values = multiply_by_power(values, shift)
    is_tiny = values.abs() < FLUSH[values.dtype]
    return values.masked_fill(is_tiny, 0.0), shift, is_nonfinite


def pad(values: Tensor) -> Tensor:
    """Repeat the last row and column up to multiples of 4: (R, D) -> (4 ceil(R / 4), 4 ceil(D /
    4))."""
    num_rows, dim = values.shape
    rows = torch.arange(_padded_size(num_rows)).clamp(max=num_rows - 1)
    columns = torch.arange(_padded_size(dim)).clamp(max=dim - 1)
    return values[rows][:, columns].contiguous()


def _padded_size(size: int) -> int:
    """Return a number of rows or columns, rounded up to whole blocks."""
    return math.ceil(size / BLOCK) * BLOCK


def _zfpy() -> Any:
    """Return the package zfpy."""
    try:
        return import_module("zfpy")
    except ImportError as error:
        raise InputError(f"codec zfp needs zfpy: {to_install('.[zfp]')}") from error


CUT = 9.75
"""The largest error of a value from planes that are not sent, in units of the last whole plane's
place (derived above)."""
LOSSES = 128
"""The most that casts and transforms lose, in units of the integers (derived above)."""
SAFE_PLANES = 6
"""The fewest whole planes with which no integer wraps around."""
WRAPPED = 3.0
"""The largest error if integers may wrap around, in units of 2**e, e being the block's exponent."""


def block_errors(values: np.ndarray, rate: int) -> np.ndarray:
    """Return the largest error of each block.

    Args:
        values: (R, D) float32 or float64, finite, both sizes multiples of 4; from `prepare` and
            `pad`.
        rate: bits per value.

    Returns:
        (R / 4, D / 4) float64.
    """
    num_rows, dim = values.shape
    blocks = values.reshape(num_rows // BLOCK, BLOCK, dim // BLOCK, BLOCK)
    largest = np.abs(blocks).max((1, 3))
    _, exponent = np.frexp(largest)

    # A block's planes get its bits but for a flag of 1 bit and the exponent.
    exponent_bits = 8 if values.dtype == np.float32 else 11
    plane_bits = BLOCK * BLOCK * rate - 1 - exponent_bits
    planes = (plane_bits - 15) // 16  # p planes take at most 16 p + 15 bits
    if planes < SAFE_PLANES:
        relative = WRAPPED
    else:
        # Relative to the block's power of two, the last whole plane is at place 2 - planes, and a
        # unit of the integers at 2 - width. The last term is the cast of an integer to a float.
        cut = CUT * 2.0 ** (2 - planes)
        width = values.dtype.itemsize * 8  # in bits
        losses = LOSSES * 2.0 ** (2 - width)
        relative = cut + losses + 2 * float(np.finfo(values.dtype).eps)
    errors = np.ldexp(relative, exponent)
    return np.where(largest == 0, 0.0, errors)  # a block of zeros is sent as such
