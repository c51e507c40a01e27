"""zfp at a fixed rate on the device: the very message of `kernels/codecs/zfp.py`, the oracle, which zfpy decodes.

Eager: rows to the host, zfpy, the bytes back. Here three kernels and no wait: rows' maxima; blocks to bit planes (block
floating point, zfp's lifting transform, negabinary, planes across the 16 coefficients); planes to the embedded code, a
thread per block and a bit per step, so that all threads agree on where in their block they write. A block has 16 * rate
bits, a whole number of 16-bit units, and blocks stand one after the other. Lindstrom 2014, section 2; the zfp documentation's
"Algorithm". Nothing is saved, nothing differentiated. Bytes: 4 read, 4 written and read again for the planes, rate / 8
written per value; about 25 integer operations per bit of code. float64 rows stay with the oracle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.code_formats import ZFP_BLOCK, ZFP_FLUSH, ZFP_ORDER, multiply_by_power
from moesaic.kernels.triton.zfp_code import decode_kernel, encode_kernel

PLANES = 32
"""Bit planes of a block of float32 values."""
BLOCKS = 64
"""Blocks that one program transforms or codes."""
PLACES = sum(int(place) << 4 * int(coefficient) for place, coefficient in enumerate(ZFP_ORDER))
"""Where each coefficient, row by row, stands among those sent: 16 places of 4 bits."""
ORDERED = tl.constexpr(PLACES - (1 << 64) if PLACES >= 1 << 63 else PLACES)
NEGABINARY = tl.constexpr(0xAAAAAAAA - (1 << 32))
"""The mask between two's complement and base -2, as an int32."""
TINY = tl.constexpr(ZFP_FLUSH[torch.float32])


@torch.library.custom_op("moesaic::triton_zfp_encode", mutates_args=("shift", "stream", "flags"))
def zfp_encode(rows: Tensor, shift: Tensor, stream: Tensor, flags: Tensor, rate: int) -> None:
    """Fill the fields of a `Zfp` message.

    Args:
        rows: (R, D) float16, bfloat16 or float32.
        shift: (1,) int16, written: the power of two that moves the largest magnitude below 1.
        stream: (bytes,) uint8 at an even address, written.
        flags: (ceil(R / 8),) uint8, written: a bit per row that is not finite, the first row's the highest.
        rate: bits per value.
    """
    rows = rows.contiguous()
    is_bad = ~rows.isfinite().all(1)
    largest = rows.float().masked_fill(is_bad[:, None], 0.0).abs().amax()
    exponent = -torch.frexp(largest).exponent.view(1)
    shift.copy_(exponent)
    bits = torch.nn.functional.pad(is_bad, (0, -len(is_bad) % 8)).view(-1, 8)
    flags.copy_((bits * (128 >> torch.arange(8, device=rows.device))).sum(1))
    across, down = triton.cdiv(rows.shape[1], ZFP_BLOCK), triton.cdiv(len(rows), ZFP_BLOCK)
    planes = torch.empty(PLANES, across * down, dtype=torch.int16, device=rows.device)
    exponents = torch.empty(across * down, dtype=torch.int32, device=rows.device)
    # In two steps: the power itself may be out of range. Exact.
    powers = multiply_by_power(
        torch.ones(2, device=rows.device), torch.cat([exponent >> 1, exponent - (exponent >> 1)])
    )
    grid = (triton.cdiv(across * down, BLOCKS),)
    _planes_kernel[grid](
        rows, is_bad, powers, planes, exponents, len(rows), rows.shape[1], across, across * down,
        PLANES=PLANES, BLOCKS=BLOCKS,
    )  # fmt: skip
    stream.zero_()
    encode_kernel[grid](
        planes, exponents, stream.view(torch.int16), across * down, RATE=rate, PLANES=PLANES, BLOCKS=BLOCKS
    )


@torch.library.custom_op("moesaic::triton_zfp_decode", mutates_args=())
def zfp_decode(
    shift: Tensor, stream: Tensor, flags: Tensor, num_rows: int, dim: int, dtype: torch.dtype, rate: int
) -> Tensor:
    """Return (num_rows, dim) rows in `dtype` from the fields of a `Zfp` message of that rate."""
    across, down = triton.cdiv(dim, ZFP_BLOCK), triton.cdiv(num_rows, ZFP_BLOCK)
    planes = torch.zeros(PLANES, across * down, dtype=torch.int16, device=stream.device)
    exponents = torch.empty(across * down, dtype=torch.int32, device=stream.device)
    grid = (triton.cdiv(across * down, BLOCKS),)
    decode_kernel[grid](
        stream.view(torch.int16), planes, exponents, across * down, RATE=rate, PLANES=PLANES, BLOCKS=BLOCKS
    )
    values = torch.empty(num_rows, dim, dtype=torch.float32, device=stream.device)
    _values_kernel[grid](planes, exponents, values, num_rows, dim, across, across * down, PLANES=PLANES, BLOCKS=BLOCKS)
    bits = (flags[:, None] >> (7 - torch.arange(8, device=flags.device))) & 1
    is_bad = bits.reshape(-1)[:num_rows].bool()
    values = multiply_by_power(values, -shift.to(torch.int32)).masked_fill(is_bad[:, None], torch.nan)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


@zfp_decode.register_fake
def _(shift: Tensor, stream: Tensor, flags: Tensor, num_rows: int, dim: int, dtype: torch.dtype, rate: int) -> Tensor:
    return stream.new_empty(num_rows, dim, dtype=dtype)


@triton.jit
def lift(x: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Apply zfp's forward lifting steps along the last axis of (BLOCKS, 4, 4) integers."""
    even, odd = tl.split(tl.reshape(x, (BLOCKS, 4, 2, 2)))
    x, z = tl.split(even)
    y, w = tl.split(odd)
    x = (x + w) >> 1
    w = w - x
    z = (z + y) >> 1
    y = y - z
    x = (x + z) >> 1
    z = z - x
    w = (w + y) >> 1
    y = y - w
    w = w + (y >> 1)
    y = y - (w >> 1)
    return tl.reshape(tl.join(tl.join(x, z), tl.join(y, w)), (BLOCKS, 4, 4))


@triton.jit
def drop(x: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Undo `lift`, but for the bits that it rounded away."""
    even, odd = tl.split(tl.reshape(x, (BLOCKS, 4, 2, 2)))
    x, z = tl.split(even)
    y, w = tl.split(odd)
    y = y + (w >> 1)
    w = w - (y >> 1)
    y = y + w
    w = (w << 1) - y
    z = z + x
    x = (x << 1) - z
    y = y + z
    z = (z << 1) - y
    w = w + x
    x = (x << 1) - w
    return tl.reshape(tl.join(tl.join(x, z), tl.join(y, w)), (BLOCKS, 4, 4))


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """Return 2**exponent, from bits; for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _planes_kernel(
    rows: tl.tensor,
    is_bad: tl.tensor,
    powers: tl.tensor,
    planes: tl.tensor,
    exponents: tl.tensor,
    num_rows: tl.tensor,
    dim: tl.tensor,
    across: tl.tensor,
    num_blocks: tl.tensor,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Turn blocks of 4 x 4 values, edges filled up with the last row and column, into bit planes and an exponent each."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    place = tl.arange(0, 16)
    row = tl.minimum((block // across * 4)[:, None] + place[None, :] // 4, num_rows - 1)
    column = tl.minimum((block % across * 4)[:, None] + place[None, :] % 4, dim - 1)
    value = tl.load(rows + row.to(tl.int64) * dim + column, mask=is_block[:, None], other=0.0).to(tl.float32)
    bad = tl.load(is_bad + row, mask=is_block[:, None], other=0)
    value = tl.where(bad != 0, 0.0, value) * tl.load(powers) * tl.load(powers + 1)
    value = tl.where(tl.abs(value) < TINY, 0.0, value)
    largest = tl.max(tl.abs(value), 1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 126
    tl.store(exponents + block, tl.where(largest == 0.0, -127, exponent), mask=is_block)
    exponent = tl.where(largest == 0.0, 0, exponent)
    integers = (value * power_of_two(30 - exponent)[:, None]).to(tl.int32)
    integers = lift(tl.reshape(integers, (BLOCKS, 4, 4)), BLOCKS)
    integers = tl.permute(lift(tl.permute(integers, (0, 2, 1)), BLOCKS), (0, 2, 1))
    coefficient = tl.reshape(integers, (BLOCKS, 16))
    coefficient = (coefficient + NEGABINARY) ^ NEGABINARY
    sent_as = ((tl.full((16,), ORDERED, tl.int64) >> (4 * place).to(tl.int64)) & 15).to(tl.int32)
    for plane in tl.static_range(PLANES):
        bits = ((coefficient >> plane) & 1).to(tl.int32) << sent_as[None, :]
        tl.store(planes + plane * num_blocks + block, tl.sum(bits, 1).to(tl.int16), mask=is_block)


@triton.jit
def _values_kernel(
    planes: tl.tensor,
    exponents: tl.tensor,
    values: tl.tensor,
    num_rows: tl.tensor,
    dim: tl.tensor,
    across: tl.tensor,
    num_blocks: tl.tensor,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Turn bit planes back into values, those beyond the edges left out."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    place = tl.arange(0, 16)
    sent_as = ((tl.full((16,), ORDERED, tl.int64) >> (4 * place).to(tl.int64)) & 15).to(tl.int32)
    negabinary = tl.zeros((BLOCKS, 16), tl.int32)
    for plane in tl.static_range(PLANES):
        bits = tl.load(planes + plane * num_blocks + block, mask=is_block, other=0).to(tl.int32)
        negabinary |= ((bits[:, None] >> sent_as[None, :]) & 1) << plane
    integers = tl.reshape((negabinary ^ NEGABINARY) - NEGABINARY, (BLOCKS, 4, 4))
    integers = tl.permute(drop(tl.permute(integers, (0, 2, 1)), BLOCKS), (0, 2, 1))
    integers = tl.reshape(drop(integers, BLOCKS), (BLOCKS, 16))
    exponent = tl.load(exponents + block, mask=is_block, other=-127)
    is_zero = exponent == -127
    factor = power_of_two(tl.where(is_zero, 30, exponent) - 30)
    value = tl.where(is_zero[:, None], 0.0, integers.to(tl.float32) * factor[:, None])
    row = (block // across * 4)[:, None] + place[None, :] // 4
    column = (block % across * 4)[:, None] + place[None, :] % 4
    inside = is_block[:, None] & (row < num_rows) & (column < dim)
    tl.store(values + row.to(tl.int64) * dim + column, value, mask=inside)
