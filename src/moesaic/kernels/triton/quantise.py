"""The int8 and fp8 codecs: encode rows and decode them, bit for bit like the oracles in
`kernels/codecs/eight.py`.

Eager: seven passes over the rows (absolute value, maximum, divide, round, clamp, replace NaN,
cast). Here a program reads a row or a block twice, the second time from L1, and writes each byte
once. Nothing is saved or differentiated. Bytes: 2 or 4 R D read and R D written, plus the scales.
Divisions are rounded to nearest and float8 numbers are made from bits: every device writes the
oracle's bytes, even without float8 support. The oracle encodes float64 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.code_formats import FP8_LARGEST, FP8_WIDTH, INT8_LARGEST
from moesaic.kernels.operator import operator

CHUNK = 1024
"""The number of a row's values that are processed at a time."""
BLOCKS = 8
"""The number of float8 blocks that one program encodes."""
SMALLEST = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal float32, the least scale."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds a float32 below 2**22 to the nearest integer, ties
to even."""


@operator("triton_int8_encode", mutates_args=("scale", "integers"))
def int8_encode(rows: Tensor, scale: Tensor, integers: Tensor) -> None:
    """Fill the fields of an `Int8` message.

    Args:
        rows: (R, D) float16, bfloat16 or float32.
        scale: (R, 1) float32, written.
        integers: (R, D) int8, written.
    """
    _int8_encode_kernel[(len(rows),)](
        rows.contiguous(), scale, integers, rows.shape[1], LEVELS=INT8_LARGEST, CHUNK=CHUNK
    )


@operator("triton_fp8_encode", mutates_args=("scale", "codes"))
def fp8_encode(rows: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Fill the fields of an `Fp8` message.

    Args:
        rows: (R, D) float16, bfloat16 or float32.
        scale: (R, ceil(D / 128)) float32, written.
        codes: (R, D) float8_e4m3fn, written.
    """
    grid = (len(rows), triton.cdiv(scale.shape[1], BLOCKS))
    _fp8_encode_kernel[grid](
        rows.contiguous(),
        scale,
        codes.view(torch.uint8),
        rows.shape[1],
        scale.shape[1],
        LARGEST=FP8_LARGEST,
        WIDTH=FP8_WIDTH,
        BLOCKS=BLOCKS,
    )


@operator("triton_decode")
def decode(scale: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the fields of an `Int8` or `Fp8` message into (R, D) rows in `dtype`."""
    is_float8 = codes.dtype == torch.float8_e4m3fn
    rows = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    grid = (len(rows), triton.cdiv(rows.shape[1], CHUNK))
    _decode_kernel[grid](
        scale,
        codes.view(torch.uint8) if is_float8 else codes,
        rows,
        rows.shape[1],
        scale.shape[1],
        PER_SCALE=FP8_WIDTH if is_float8 else 0,  # 0: a scale for the whole row
        LIMIT=torch.finfo(dtype).max,
        CHUNK=CHUNK,
    )
    return rows


@torch.library.register_fake(decode.overload)
def _(scale: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@triton.jit
def scale_of(largest: tl.tensor, is_finite: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """Return the scale that maps `largest` to LEVELS, like `codecs.eight.scales`."""
    levels = largest * 0.0 + LEVELS  # as a tensor, which `div_rn` needs
    scale = tl.maximum(tl.div_rn(largest, levels), SMALLEST)
    return tl.where(is_finite, scale, float("nan"))


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """Return the float8 e4m3 bits of float32 values of at most 448, rounded to nearest, ties to
    even; NaN gives 0."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # e4m3 has 3 of float32's 23 bits of the mantissa, and a bias of 7 instead of 127. Before the
    # last 20 bits are cut off, just below half of the last bit that stays is added, and that bit.
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2**-6, with the exponent 121 in float32, the spacing of e4m3 is 2**-9, that of float32
    # at 2**14: the last bits of the sum with 2**14, whose own bits are 0x46800000, are the code.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < (121 << 23), small, normal) | ((bits >> 24) & 0x80)
    return tl.where(x == x, code, 0)


@triton.jit
def from_e4m3(code: tl.tensor) -> tl.tensor:
    """Return the float32 values of float8 e4m3 bits: a sign, 4 of the exponent, with a bias of 7
    instead of float32's 127, and 3 of the mantissa."""
    exponent = (code >> 3) & 15
    mantissa = code & 7
    normal = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    # subnormal numbers are multiples of 2**-9; all bits but the sign's stand for NaN
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def _int8_encode_kernel(
    rows: tl.tensor,
    scales: tl.tensor,
    integers: tl.tensor,
    dim: tl.tensor,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Encode one row, in chunks of its columns: find its scale, then divide by it and round."""
    row = tl.program_id(0).to(tl.int64)
    # each element of a chunk keeps its own maximum, and whether it met a value that is not finite
    largest = tl.zeros((CHUNK,), tl.float32)
    is_wrong = tl.zeros((CHUNK,), tl.int32)
    for first in tl.range(0, dim, CHUNK):
        column = first + tl.arange(0, CHUNK)
        value = tl.load(rows + row * dim + column, mask=column < dim, other=0.0).to(tl.float32)
        magnitude = tl.abs(value)
        is_finite = magnitude < float("inf")
        is_wrong = tl.where(is_finite, is_wrong, 1)
        largest = tl.maximum(largest, tl.where(is_finite, magnitude, 0.0))
    scale = scale_of(tl.max(largest, 0), tl.max(is_wrong, 0) == 0, LEVELS)
    tl.store(scales + row, scale)

    for first in tl.range(0, dim, CHUNK):
        column = first + tl.arange(0, CHUNK)
        value = tl.load(rows + row * dim + column, mask=column < dim, other=0.0).to(tl.float32)
        # `div_rn` needs a divisor of the same shape
        quotient = tl.div_rn(value, tl.zeros((CHUNK,), tl.float32) + scale)
        level = tl.minimum(tl.maximum((quotient + ROUND) - ROUND, -LEVELS), LEVELS)
        level = tl.where(quotient == quotient, level, 0.0)  # NaN, which differs from itself
        tl.store(integers + row * dim + column, level.to(tl.int8), mask=column < dim)


@triton.jit
def _fp8_encode_kernel(
    rows: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    dim: tl.tensor,
    blocks: tl.tensor,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Encode BLOCKS of a row's `blocks` blocks, of WIDTH columns with a scale each."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(rows + row * dim + column, mask=column < dim, other=0.0).to(tl.float32)
    is_finite = tl.abs(value) < float("inf")
    largest = tl.max(tl.where(is_finite, tl.abs(value), 0.0), 1)
    scale = scale_of(largest, tl.min(is_finite.to(tl.int32), 1) == 1, LARGEST)
    tl.store(scales + row * blocks + block, scale, mask=block < blocks)
    # `div_rn` needs a divisor of the same shape
    scaled = tl.div_rn(value, tl.zeros((BLOCKS, WIDTH), tl.float32) + scale[:, None])
    is_number = scaled == scaled  # NaN differs from itself
    clamped = tl.where(is_number, tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), float("nan"))
    tl.store(codes + row * dim + column, to_e4m3(clamped).to(tl.uint8), mask=column < dim)


@triton.jit
def _decode_kernel(
    scales: tl.tensor,
    codes: tl.tensor,
    rows: tl.tensor,
    dim: tl.tensor,
    blocks: tl.tensor,
    PER_SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Multiply CHUNK codes of a row by their scales: int8 with a scale per row if PER_SCALE is 0,
    else float8 with PER_SCALE codes a scale, of which a row has `blocks`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    code = tl.load(codes + row * dim + column, mask=column < dim, other=0)
    if PER_SCALE == 0:
        value = code.to(tl.float32) * tl.load(scales + row)
    else:
        scale = tl.load(scales + row * blocks + column // PER_SCALE, mask=column < dim, other=0.0)
        value = from_e4m3(code.to(tl.int32)) * scale
    value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    tl.store(rows + row * dim + column, value.to(rows.dtype.element_ty), mask=column < dim)
