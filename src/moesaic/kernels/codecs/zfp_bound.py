"""How far fixed-rate zfp may be off, from the block's exponent and the bits that its coefficients take.

zfp (Lindstrom 2014, section 2; the documentation's "Algorithm") turns a block of 4 x 4 values into 30-bit integers (62-bit
for float64) relative to the block's largest exponent, transforms rows and columns, writes the coefficients in negabinary
and sends their bit planes from the top, until the block's bits are used up. So with the number p of planes that are sent
whole, and the last one at place k:

- what is cut from a coefficient is at most 2/3 * 2**k in magnitude: all even or all odd negabinary places below k;
- of a plane that is sent in part, one coefficient may be given a bit that it does not have: 1/6 * 2**k more;
- the inverse transform adds up errors by at most 15/4 per dimension, and one coefficient's by at most 3/2;
- so values are off by at most (2/3 * (15/4)**2 + 1/6 * (3/2)**2) * 2**k = 9.75 * 2**k;
- the casts and the halvings of the transform lose at most 128 units of the integers, and the cast of a large integer to
  a float a few of the float's units.

From p = 6 on no integer wraps around. A block takes at most 16 p + 15 bits for p planes, so rate 8 reaches that always;
where a lower rate does not, only the range of the integers bounds the error: 3 times the block's largest power of two.
"""

from __future__ import annotations

import numpy as np

from moesaic.kernels.code_formats import ZFP_BLOCK, ZFP_ORDER

CUT = 9.75
"""The error of a value in units of the last whole plane's place (derived above)."""
LOSSES = 128
"""Units of the integers that casts and transforms lose at most (derived above)."""
SAFE_PLANES = 6
"""Planes that rule out that an integer wraps around."""
WRAPPED = 3.0
"""The error where integers may wrap around, in powers of two of the block's exponent."""


def block_errors(values: np.ndarray, rate: int) -> np.ndarray:
    """Return the largest error of each block.

    Args:
        values: (R, D) float32 or float64, multiples of 4, finite; magnitudes as `zfp.prepare` leaves them.
        rate: bits per value.

    Returns:
        (R / 4, D / 4) float64.
    """
    rows, dim = values.shape
    blocks = (
        values.reshape(rows // ZFP_BLOCK, ZFP_BLOCK, dim // ZFP_BLOCK, ZFP_BLOCK)
        .swapaxes(1, 2)
        .reshape(-1, ZFP_BLOCK, ZFP_BLOCK)
    )
    exponent = np.frexp(np.abs(blocks).max((1, 2)))[1].astype(np.int64)
    planes = whole_planes(coefficients(blocks, exponent), block_bits(values.dtype, rate))
    width = values.dtype.itemsize * 8
    relative = CUT * np.exp2(2.0 - planes) + LOSSES * 2.0 ** (2 - width) + 2 * float(np.finfo(values.dtype).eps)
    errors = np.ldexp(np.where(planes < SAFE_PLANES, WRAPPED, relative), exponent)
    errors[~blocks.any((1, 2))] = 0.0  # a block of zeros is sent as such
    return errors.reshape(rows // ZFP_BLOCK, dim // ZFP_BLOCK)


def block_bits(dtype: np.dtype, rate: int) -> int:
    """Return the bits of a block that are left for its planes: all but a flag and the exponent."""
    return ZFP_BLOCK * ZFP_BLOCK * rate - (9 if dtype == np.float32 else 12)


def coefficients(blocks: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Return the negabinary coefficients of blocks, in the order in which they are sent.

    Args:
        blocks: (B, 4, 4) float32 or float64.
        exponent: (B,) int64, as `frexp` gives it for the block's largest magnitude.

    Returns:
        (B, 16) uint32 or uint64.
    """
    width = blocks.dtype.itemsize * 8
    signed, unsigned = np.dtype(f"i{width // 8}"), np.dtype(f"u{width // 8}")
    integers = np.ldexp(blocks.astype(np.float64), (width - 2 - exponent)[:, None, None]).astype(signed)
    integers = _transform(_transform(integers).swapaxes(1, 2)).swapaxes(1, 2)
    mask = np.array(0xAAAAAAAAAAAAAAAA >> (64 - width), dtype=unsigned)
    twos_complement: np.ndarray = np.ascontiguousarray(integers).view(unsigned)
    negabinary: np.ndarray = np.bitwise_xor(twos_complement + mask, mask)
    return negabinary.reshape(-1, ZFP_BLOCK * ZFP_BLOCK)[:, ZFP_ORDER]


def _transform(integers: np.ndarray) -> np.ndarray:
    """Return zfp's lifting steps along the last axis: (B, 4, 4) -> (B, 4, 4), in integers, halves rounded down."""
    x, y, z, w = np.moveaxis(integers, -1, 0).copy()
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
    return np.stack([x, y, z, w], axis=-1)


def whole_planes(sent: np.ndarray, bits: int) -> np.ndarray:
    """Return how many bit planes of each block fit whole.

    A plane sends a bit for each coefficient before the first one that no plane has reached; from there on, a bit each up
    to the last coefficient that is set (the block's very last one needs none), a one before each run that ends in a set
    bit, and a zero if coefficients remain.

    Args:
        sent: (B, 16) uint32 or uint64, from `coefficients`.
        bits: that a block has.

    Returns:
        (B,) int64.
    """
    places = np.arange(1, ZFP_BLOCK * ZFP_BLOCK + 1)
    left = np.full(len(sent), bits, dtype=np.int64)
    reached = np.zeros(len(sent), dtype=np.int64)
    planes = np.zeros(len(sent), dtype=np.int64)
    for place in reversed(range(sent.dtype.itemsize * 8)):
        is_set = (sent >> sent.dtype.type(place)) & sent.dtype.type(1) != 0
        is_new = is_set & (places > reached[:, None])
        now = np.maximum(reached, (is_new * places).max(1))
        is_last_new = (now == ZFP_BLOCK * ZFP_BLOCK) & (reached < ZFP_BLOCK * ZFP_BLOCK)
        left -= now + is_new.sum(1) + (now < ZFP_BLOCK * ZFP_BLOCK) - is_last_new
        planes += left >= 0
        reached = now
    return planes
