"""zfp's embedded code of bit planes, as a machine that writes or reads one bit per step; the arithmetic is in `zfp.py`.

A block's code: one bit that tells whether it holds anything, 8 bits of exponent, then planes from the highest. Of a plane
come the bits of the coefficients that an earlier plane has reached, then, while coefficients remain, a bit that tells
whether any of the others is set, followed by their bits up to the first that is set (the very last one goes without saying).
The code stops where the block's bits are used up. Every block of a program is at the same bit at the same time, so a step
is a handful of selects and no thread waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADER = tl.constexpr(9)
"""Bits before the planes: a flag and the exponent."""
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
    """Write each block's RATE units of 16 bits from its (PLANES, num_blocks) planes and its exponent, -127 for none."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    exponent = tl.load(exponents + block, mask=is_block, other=-127)
    holds = exponent != -127
    header = tl.where(holds, 2 * (exponent + BIAS) + 1, 0)
    plane = tl.full((BLOCKS,), PLANES - 1, tl.int32)
    bits = tl.load(planes + plane * num_blocks + block, mask=is_block & holds, other=0).to(tl.int32) & 0xFFFF
    reached = tl.zeros((BLOCKS,), tl.int32)  # coefficients that a plane has reached
    known = tl.zeros((BLOCKS,), tl.int32)  # of those, how many bits of this plane are still to come
    searching = tl.zeros((BLOCKS,), tl.int32)  # 1 on the way to the next set bit
    for unit in tl.range(0, RATE):
        word = tl.zeros((BLOCKS,), tl.int32)
        for place in tl.static_range(16):
            step = unit * 16 + place
            codes = holds & (step >= HEADER) & (plane >= 0)
            is_known = codes & (known > 0)
            is_test = codes & (known == 0) & (searching == 0)
            is_search = codes & (known == 0) & (searching == 1)
            sent = tl.where(is_test, (bits != 0).to(tl.int32), bits & 1)
            sent = tl.where(codes, sent, 0)
            sent = tl.where(step < HEADER, (header >> tl.minimum(step, 31)) & 1, sent)
            word |= sent << place
            # A test that finds the last coefficient alone, and a search that comes to it, need no bit for it.
            is_last = (is_test & (sent == 1) & (reached == 15)) | (is_search & (sent == 0) & (reached == 14))
            moves = is_search | (is_test & (sent == 1) & (reached == 15))
            searching = tl.where(is_test & (sent == 1) & (reached < 15), 1, searching)
            searching = tl.where(is_search & (sent == 1), 0, searching)
            known = tl.where(is_known, known - 1, known)
            bits = tl.where(is_known | moves, bits >> 1, bits)
            reached = tl.where(is_last, 16, tl.where(moves, reached + 1, reached))
            is_done = is_last | (is_test & (sent == 0)) | (is_known & (known == 0) & (reached == 16))
            plane = tl.where(is_done, plane - 1, plane)
            at = planes + tl.maximum(plane, 0) * num_blocks + block
            new = tl.load(at, mask=is_block & is_done & (plane >= 0), other=0).to(tl.int32) & 0xFFFF
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
    """Undo `encode_kernel`; `planes` comes filled with zeros. A search that the block's end cuts off counts as a set bit."""
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
            got = (word >> place) & 1
            header = tl.where(step < HEADER, header | (got << tl.minimum(step, 31)), header)
            codes = ((header & 1) == 1) & (step >= HEADER) & (plane >= 0)
            is_known = codes & (known > 0)
            is_test = codes & (known == 0) & (searching == 0)
            is_search = codes & (known == 0) & (searching == 1)
            is_last = (is_test & (got == 1) & (reached == 15)) | (is_search & (got == 0) & (reached == 14))
            bits = tl.where(is_known, bits | (got << tl.maximum(reached - known, 0)), bits)
            bits = tl.where(is_search & (got == 1), bits | (1 << reached), bits)
            bits = tl.where(is_last, bits | (1 << 15), bits)
            searching = tl.where(is_test & (got == 1) & (reached < 15), 1, searching)
            searching = tl.where(is_search & (got == 1), 0, searching)
            known = tl.where(is_known, known - 1, known)
            reached = tl.where(is_last, 16, tl.where(is_search, reached + 1, reached))
            is_done = is_last | (is_test & (got == 0)) | (is_known & (known == 0) & (reached == 16))
            at = planes + tl.maximum(plane, 0) * num_blocks + block
            tl.store(at, bits.to(tl.int16), mask=is_block & is_done)
            plane = tl.where(is_done, plane - 1, plane)
            bits = tl.where(is_done, 0, bits)
            known = tl.where(is_done, reached, known)
            searching = tl.where(is_done, 0, searching)
    holds = (header & 1) == 1
    bits = tl.where(searching == 1, bits | (1 << reached), bits)
    at = planes + tl.maximum(plane, 0) * num_blocks + block
    tl.store(at, bits.to(tl.int16), mask=is_block & holds & (plane >= 0))
    tl.store(exponents + block, tl.where(holds, (header >> 1) - BIAS, -127), mask=is_block)
