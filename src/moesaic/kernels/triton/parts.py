"""Device functions that the kernels share: activations with their slopes, and which tile comes next.

Functions return once, at their end: the compiler leaves out a branch on a constant, but not what follows a return in one.
"""

from __future__ import annotations

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Return the logistic function of float32 values."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def act(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Return an activation of float32 values; "gelu" is the exact one."""
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu" or ACTIVATION == "relu")
    if ACTIVATION == "silu":
        y = x * sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    else:
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def slope(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Return the derivative of `act`; that of relu is 0 at 0, as in PyTorch."""
    if ACTIVATION == "silu":
        s = sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu":
        y = 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    else:
        y = tl.where(x > 0, 1.0, 0.0)
    return y


@triton.jit
def place(index: tl.tensor, num_row_tiles: tl.tensor, num_column_tiles: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Return (row tile, column tile) of a place in the order of work: GROUP row tiles, column by column, then the next."""
    per_group = GROUP * num_column_tiles
    first = index // per_group * GROUP
    height = min(num_row_tiles - first, GROUP)
    within = index % per_group
    return first + within % height, within // height


@triton.jit
def halves(x: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Return the left and the right half of a (ROWS, COLUMNS) tile; in registers, an epilogue in smaller bites."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def rows_of_tile(
    schedule: tl.tensor,
    capacity: tl.tensor,
    token: tl.tensor,
    row_tile: tl.tensor,
    GATHERED: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """Return (expert, first row, rows, which of them are the expert's, where each is read) of a tile of `schedule.py`."""
    expert = tl.load(schedule + 1 + row_tile)
    first = tl.load(schedule + 1 + capacity + row_tile)
    row = first + tl.arange(0, BLOCK_R)
    is_row = row < tl.load(schedule + 1 + 2 * capacity + row_tile)
    source = row
    if GATHERED:
        source = tl.load(token + row, mask=is_row, other=0)
    return expert, first, row, is_row, source
