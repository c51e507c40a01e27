"""zfp at a fixed rate on the device; its messages are those of the oracle `kernels/codecs/zfp.py` and are decoded by zfpy.

Eager: copy the rows to the host, run zfpy and copy the bytes back. Here nothing waits for the host. Torch finds the largest
value. One kernel turns blocks into bit planes: block floating point, zfp's lifting transform, negabinary, planes across the 16
coefficients. Another kernel writes the embedded code of the planes, with a thread per block and a bit per step. A block has
16 * rate bits, a whole number of 16-bit units, and blocks follow one another. See Lindstrom 2014, section 2, and "Algorithm" in
the zfp documentation. Nothing is saved or differentiated. Bytes per value: 4 read, 4 written and read again for the planes,
rate / 8 written; about 25 integer operations per bit of code. The oracle encodes float64 rows.

The embedded code of a block is one bit that tells whether the block is not all zero, 8 bits of exponent, then its planes from
the highest. A plane first has the bits of the coefficients that an earlier plane has reached. Then, while coefficients remain,
it has a bit that tells whether any of them is set; if so, their bits follow, up to the first set bit. The last coefficient
needs no bit if it must be the set one. The code stops when the block's bits are used up. The kernels are state machines that
write or read one bit per step. All blocks of a program are at the same bit at the same time, so a step is a few selects and no
thread waits for another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.code_formats import ZFP_BLOCK, ZFP_FLUSH, ZFP_ORDER, multiply_by_power

HEADER = tl.constexpr(9)
"""The number of bits before the planes: a flag and the exponent."""
BIAS = tl.constexpr(127)


@triton.jit
def encode_kernel(
    planes: tl.tensor,
    exponents: tl.tensor,
    stream: tl.tensor,
    num_blocks: tl.tensor,
    RATE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Encode (PLANES, num_blocks) bit planes and the blocks' exponents, -127 for zeros, in RATE 16-bit units per block."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    exponent = tl.load(exponents + block, mask=is_block, other=-127)
    holds = exponent != -127
    header = tl.where(holds, 2 * (exponent + BIAS) + 1, 0)
    plane = tl.full((BLOCKS,), PLANES - 1, tl.int32)
    bits = tl.load(planes + plane * num_blocks + block, mask=is_block & holds, other=0).to(tl.int32) & 0xFFFF
    reached = tl.zeros((BLOCKS,), tl.int32)  # how many coefficients some plane has reached
    known = tl.zeros((BLOCKS,), tl.int32)  # how many of the reached coefficients' bits this plane still has to send
    searching = tl.zeros((BLOCKS,), tl.int32)  # 1 while sending bits up to the next set bit
    for unit in tl.range(0, RATE):
        word = tl.zeros((BLOCKS,), tl.int32)
        for place in tl.static_range(16):
            step = unit * 16 + place
            codes = holds & (step >= HEADER) & (plane >= 0)
            is_known = codes & (known > 0)
            is_test = codes & (known == 0) & (searching == 0)
            is_search = codes & (known == 0) & (searching == 1)
            bit = tl.where(is_test, (bits != 0).to(tl.int32), bits & 1)
            bit = tl.where(codes, bit, 0)
            bit = tl.where(step < HEADER, (header >> tl.minimum(step, 31)) & 1, bit)
            word |= bit << place
            # The last coefficient needs no bit if only it remains and the test is positive, or if a search reaches it.
            is_last = (is_test & (bit == 1) & (reached == 15)) | (is_search & (bit == 0) & (reached == 14))
            moves = is_search | (is_test & (bit == 1) & (reached == 15))
            searching = tl.where(is_test & (bit == 1) & (reached < 15), 1, searching)
            searching = tl.where(is_search & (bit == 1), 0, searching)
            known = tl.where(is_known, known - 1, known)
            bits = tl.where(is_known | moves, bits >> 1, bits)
            reached = tl.where(is_last, 16, tl.where(moves, reached + 1, reached))
            is_done = is_last | (is_test & (bit == 0)) | (is_known & (known == 0) & (reached == 16))
            plane = tl.where(is_done, plane - 1, plane)
            pointers = planes + tl.maximum(plane, 0) * num_blocks + block
            new = tl.load(pointers, mask=is_block & is_done & (plane >= 0), other=0).to(tl.int32) & 0xFFFF
            bits = tl.where(is_done, new, bits)
            known = tl.where(is_done, reached, known)
            searching = tl.where(is_done, 0, searching)
        tl.store(stream + block.to(tl.int64) * RATE + unit, word.to(tl.int16), mask=is_block)


@triton.jit
def decode_kernel(
    stream: tl.tensor,
    planes: tl.tensor,
    exponents: tl.tensor,
    num_blocks: tl.tensor,
    RATE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Decode the code of `encode_kernel` into `planes`, which must be all zeros.

    If the block ends during the search for a set bit, the next coefficient counts as set.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    header = tl.zeros((BLOCKS,), tl.int32)
    plane = tl.full((BLOCKS,), PLANES - 1, tl.int32)
    bits = tl.zeros((BLOCKS,), tl.int32)
    reached = tl.zeros((BLOCKS,), tl.int32)
    known = tl.zeros((BLOCKS,), tl.int32)
    searching = tl.zeros((BLOCKS,), tl.int32)
    for unit in tl.range(0, RATE):
        word = tl.load(stream + block.to(tl.int64) * RATE + unit, mask=is_block, other=0).to(tl.int32)
        for place in tl.static_range(16):
            step = unit * 16 + place
            bit = (word >> place) & 1
            header = tl.where(step < HEADER, header | (bit << tl.minimum(step, 31)), header)
            codes = ((header & 1) == 1) & (step >= HEADER) & (plane >= 0)
            is_known = codes & (known > 0)
            is_test = codes & (known == 0) & (searching == 0)
            is_search = codes & (known == 0) & (searching == 1)
            is_last = (is_test & (bit == 1) & (reached == 15)) | (is_search & (bit == 0) & (reached == 14))
            bits = tl.where(is_known, bits | (bit << tl.maximum(reached - known, 0)), bits)
            bits = tl.where(is_search & (bit == 1), bits | (1 << reached), bits)
            bits = tl.where(is_last, bits | (1 << 15), bits)
            searching = tl.where(is_test & (bit == 1) & (reached < 15), 1, searching)
            searching = tl.where(is_search & (bit == 1), 0, searching)
            known = tl.where(is_known, known - 1, known)
            reached = tl.where(is_last, 16, tl.where(is_search, reached + 1, reached))
            is_done = is_last | (is_test & (bit == 0)) | (is_known & (known == 0) & (reached == 16))
            pointers = planes + tl.maximum(plane, 0) * num_blocks + block
            tl.store(pointers, bits.to(tl.int16), mask=is_block & is_done)
            plane = tl.where(is_done, plane - 1, plane)
            bits = tl.where(is_done, 0, bits)
            known = tl.where(is_done, reached, known)
            searching = tl.where(is_done, 0, searching)
    holds = (header & 1) == 1
    bits = tl.where(searching == 1, bits | (1 << reached), bits)
    pointers = planes + tl.maximum(plane, 0) * num_blocks + block
    tl.store(pointers, bits.to(tl.int16), mask=is_block & holds & (plane >= 0))
    tl.store(exponents + block, tl.where(holds, (header >> 1) - BIAS, -127), mask=is_block)


PLANES = 32
"""The number of bit planes of a block of float32 values."""
BLOCKS = 64
"""The number of blocks that one program transforms or codes."""
PLACES = sum(int(place) << 4 * int(coefficient) for place, coefficient in enumerate(ZFP_ORDER))
"""Each coefficient's place in the order of sending (`ZFP_ORDER` inverted), packed as 16 numbers of 4 bits."""
ORDERED = tl.constexpr(PLACES - (1 << 64) if PLACES >= 1 << 63 else PLACES)
NEGABINARY = tl.constexpr(0xAAAAAAAA - (1 << 32))
"""The mask between two's complement and base -2, as an int32."""
TINY = tl.constexpr(ZFP_FLUSH[torch.float32])


@torch.library.custom_op("moesaic::triton_zfp_encode", mutates_args=("shift", "stream", "flags"))
def zfp_encode(rows: Tensor, shift: Tensor, stream: Tensor, flags: Tensor, rate: int) -> None:
    """Fill the fields of a `Zfp` message.

    Args:
        rows: (R, D) float16, bfloat16 or float32.
        shift: (1,) int16, written: the exponent of the power of two that moves the largest magnitude below 1.
        stream: (bytes,) uint8 at an even address, written.
        flags: (ceil(R / 8),) uint8, written: a bit per row, set if the row is not finite; the first row has the highest bit.
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
    # Two factors, since the power itself may be out of range; both are exact.
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
    """Decode the fields of a `Zfp` message of this rate into (num_rows, dim) rows in `dtype`."""
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
def unlift(x: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Invert `lift`, except for the bits that it rounded away."""
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
    """Return 2**exponent, made from bits, for exponents from -126 to 127."""
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
    """Turn blocks of 4 x 4 values, padded by repeating the last row and column, into bit planes and an exponent per block."""
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
    """Turn bit planes back into values, without the padding."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    place = tl.arange(0, 16)
    sent_as = ((tl.full((16,), ORDERED, tl.int64) >> (4 * place).to(tl.int64)) & 15).to(tl.int32)
    negabinary = tl.zeros((BLOCKS, 16), tl.int32)
    for plane in tl.static_range(PLANES):
        bits = tl.load(planes + plane * num_blocks + block, mask=is_block, other=0).to(tl.int32)
        negabinary |= ((bits[:, None] >> sent_as[None, :]) & 1) << plane
    integers = tl.reshape((negabinary ^ NEGABINARY) - NEGABINARY, (BLOCKS, 4, 4))
    integers = tl.permute(unlift(tl.permute(integers, (0, 2, 1)), BLOCKS), (0, 2, 1))
    integers = tl.reshape(unlift(integers, BLOCKS), (BLOCKS, 16))
    exponent = tl.load(exponents + block, mask=is_block, other=-127)
    is_zero = exponent == -127
    factor = power_of_two(tl.where(is_zero, 30, exponent) - 30)
    value = tl.where(is_zero[:, None], 0.0, integers.to(tl.float32) * factor[:, None])
    row = (block // across * 4)[:, None] + place[None, :] // 4
    column = (block % across * 4)[:, None] + place[None, :] % 4
    inside = is_block[:, None] & (row < num_rows) & (column < dim)
    tl.store(values + row.to(tl.int64) * dim + column, value, mask=inside)
