"""Functions that the grouped products share: activations, their derivatives, and the schedule of
tiles.

Device functions return once, at their end. The compiler removes a branch on a constant, but not the
code after a return in it.

The rows of each tile of a grouped product are computed on the device, which alone knows how many
rows each expert has. Eager: copy the counts to the host, list (expert, first row, last row) and
copy the list back. The kernel avoids that wait. Nothing is saved for backward. Bytes: each program
reads 4 E, and 12 are written per tile; FLOPs are negligible. An expert's first tile starts at its
first row, so no rows are padded and no tile spans two experts. In return, the last tile of an
expert is half empty on average.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.rows.varying import VARYING

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Return the logistic function of float32 values."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def act(x: tl.tensor, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr) -> tl.tensor:
    """Apply a key of `ACTIVATIONS` to float32 values, or with `Clamp.numbers` as CLAMP the gate of
    clamped SwiGLU.

    CLAMP is (limit, alpha, offset). A NaN remains NaN, which `tl.minimum` and `tl.maximum` would
    not promise. 0.5 * (1 + tanh(u)) of gelu_tanh is sigmoid(2 u).
    """
    if CLAMP is not None:
        gate = tl.where(x > CLAMP[0], CLAMP[0], x)
        y = gate * sigmoid(CLAMP[1] * gate)
    elif ACTIVATION == "silu":
        y = x * sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        y = x * sigmoid(x * TWO_SQRT_2_OVER_PI * (1.0 + x * TANH_CUBIC * x))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        y = tl.where(x <= 0, 0.0, x)
        if ACTIVATION == "relu2":
            y *= y
    return y


@triton.jit
def slope(x: tl.tensor, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr) -> tl.tensor:
    """Return the derivative of `act`; the derivative of relu at 0 is 0, as in PyTorch.

    The product rule gives that of `x * sigmoid(u(x))`: `s * (1 + x * (1 - s) * u'(x))`, s being
    `sigmoid(u(x))`.
    """
    if CLAMP is not None:
        s = sigmoid(CLAMP[1] * x)
        y = tl.where(x > CLAMP[0], 0.0, s * (1.0 + CLAMP[1] * x * (1.0 - s)))
    elif ACTIVATION == "silu":
        s = sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu":  # x Phi(x), with the normal distribution Phi
        y = 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(x * TWO_SQRT_2_OVER_PI * (1.0 + x * TANH_CUBIC * x))
        y = s * (1.0 + x * (1.0 - s) * TWO_SQRT_2_OVER_PI * (1.0 + x * (3.0 * TANH_CUBIC) * x))
    elif ACTIVATION == "relu2":
        y = tl.where(x <= 0, 0.0, 2.0 * x)
    else:
        y = tl.where(x > 0, 1.0, 0.0)
    return y


@triton.jit
def gated(x: tl.tensor, CLAMP: tl.constexpr) -> tl.tensor:
    """Return what the activated gate multiplies: the second pre-activation, or with CLAMP the
    clamped one plus the offset."""
    y = x
    if CLAMP is not None:
        y = tl.where(x > CLAMP[0], CLAMP[0], tl.where(x < -CLAMP[0], -CLAMP[0], x)) + CLAMP[2]
    return y


@triton.jit
def gated_slope(d: tl.tensor, x: tl.tensor, CLAMP: tl.constexpr) -> tl.tensor:
    """Return the gradient of the second pre-activation from that of `gated(x)`."""
    y = d
    if CLAMP is not None:
        y = tl.where(tl.abs(x) > CLAMP[0], 0.0, d)
    return y


@triton.jit
def place(
    index: tl.tensor, num_row_tiles: tl.tensor, num_column_tiles: tl.tensor, GROUP: tl.constexpr
) -> tl.tensor:
    """Return the (row tile, column tile) that is processed as number `index`.

    The order goes through the columns of GROUP row tiles, then through those of the next GROUP row
    tiles.
    """
    per_group = GROUP * num_column_tiles
    first = index // per_group * GROUP
    height = min(num_row_tiles - first, GROUP)  # the last group may have fewer
    index_in_group = index % per_group
    return first + index_in_group % height, index_in_group // height


@triton.jit
def halves(x: tl.tensor) -> tl.tensor:
    """Split a tile into its left and its right half, in registers."""
    HALF: tl.constexpr = x.shape[1] // 2
    sides = tl.reshape(x, (x.shape[0], 2, HALF))
    return tl.split(tl.permute(sides, (0, 2, 1)))  # splits the last dimension, of two


class RowTile(NamedTuple):
    """The rows of a tile, which belong to one expert."""

    expert: tl.tensor
    first: tl.tensor
    """The number of the first row."""
    row: tl.tensor
    """All row numbers."""
    is_row: tl.tensor
    """Which of them are rows of the expert."""
    source: tl.tensor
    """The rows of the input to read: tokens if the input is gathered, else the row numbers."""


class Part(NamedTuple):
    """Some columns of a tile, which an epilogue processes at once."""

    rows: RowTile
    factor: tl.tensor
    """The rows' weights."""
    start: tl.tensor
    """The first column."""
    width: tl.tensor
    """The number of columns of the product."""


@triton.jit
def rows_of_tile(
    schedule: tl.tensor,
    capacity: tl.tensor,
    token: tl.tensor,
    row_tile: tl.tensor,
    BLOCK_R: tl.constexpr,
) -> RowTile:
    """Return the `RowTile` of number `row_tile` in a schedule of `row_tiles`; `token` is None if
    the input is not gathered."""
    # the schedule has the number of tiles, then `capacity` experts, first rows and ends each
    expert = tl.load(schedule + 1 + row_tile)
    first = tl.load(schedule + 1 + capacity + row_tile)
    row = first + tl.arange(0, BLOCK_R)
    is_row = row < tl.load(schedule + 1 + 2 * capacity + row_tile)
    source = row
    if token is not None:
        source = tl.load(token + row, mask=is_row, other=0)
    return RowTile(expert, first, row, is_row, source)


WIDTH = 32
"""The number of tiles that one program schedules."""


def max_tiles(num_rows: int, num_experts: int, height: int) -> int:
    """Return the most tiles of `height` rows that `num_rows` rows can need, however they are spread
    over experts."""
    # besides full tiles, each expert with rows may have one that is not full
    return num_rows // height + min(num_experts, num_rows)


class Schedules:
    """The tiles of the experts' rows, scheduled once for each height that a pass uses.

    Args:
        ends: (E,) int32, one past the last row of each expert, ascending; `ends[-1] <= num_rows`.
        num_rows: R; rows from `ends[-1]` on belong to no expert.
    """

    def __init__(self, ends: Tensor, num_rows: int) -> None:
        self._ends = ends
        self._num_rows = num_rows
        self._by_height: dict[int, Tensor] = {}
        """The schedule of `row_tiles` by the height of its tiles."""

    @classmethod
    def of(cls, ends: Tensor | Schedules, num_rows: int) -> Schedules:
        """Return the schedules themselves, or those for the ends of experts."""
        return ends if isinstance(ends, Schedules) else cls(ends, num_rows)

    def tiles(self, height: int) -> tuple[Tensor, int]:
        """Return the schedule of tiles of `height` rows, see `row_tiles`, and how many there are
        at most."""
        if height not in self._by_height:
            self._by_height[height] = row_tiles(self._ends, self._num_rows, height)
        return self._by_height[height], max_tiles(self._num_rows, len(self._ends), height)


def row_tiles(ends: Tensor, num_rows: int, height: int) -> Tensor:
    """Cut each expert's rows into tiles.

    Args:
        ends: (E,) int32, one past the last row of each expert, ascending; `ends[-1] <= num_rows`.
        num_rows: R; rows from `ends[-1]` on belong to no expert.
        height: rows of a tile.

    Returns:
        (1 + 3 M,) int32, M being `max_tiles`: the number of tiles, then M experts, M first rows and
        M ends of the experts' rows. Entries of tiles beyond the number of tiles are undefined.
    """
    num_experts = len(ends)
    capacity = max_tiles(num_rows, num_experts, height)
    schedule = torch.empty(1 + 3 * capacity, dtype=torch.int32, device=ends.device)
    if capacity == 0:
        return schedule.zero_()
    grid = (triton.cdiv(capacity, WIDTH),)
    _schedule_kernel[grid](
        ends,
        schedule,
        num_experts,
        capacity,
        HEIGHT=height,
        EXPERTS=triton.next_power_of_2(num_experts),
        WIDTH=WIDTH,
    )
    return schedule


@triton.jit(do_not_specialize=VARYING)
def _schedule_kernel(
    ends: tl.tensor,
    schedule: tl.tensor,
    num_experts: tl.tensor,
    capacity: tl.tensor,
    HEIGHT: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write the entries of WIDTH tiles of a schedule, and in the first program the number of tiles;
    `row_tiles` says in which form."""
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < num_experts, other=0)
    start = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    tiles = tl.where(expert < num_experts, (end - start + HEIGHT - 1) // HEIGHT, 0)
    tiles_end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)

    # a tile's expert is the number of experts whose tiles all come before it
    tile = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    owner = tl.sum((tiles_end[None, :] <= tile[:, None]).to(tl.int32), 1)
    is_real = tile < total
    tiles_before_owner = tl.sum(tl.where(expert[None, :] < owner[:, None], tiles[None, :], 0), 1)
    owner_start = tl.load(ends + owner - 1, mask=is_real & (owner > 0), other=0)
    first = owner_start + (tile - tiles_before_owner) * HEIGHT
    owner_end = tl.load(ends + owner, mask=is_real, other=0)

    if tl.program_id(0) == 0:
        tl.store(schedule, total)
    tl.store(schedule + 1 + tile, owner, mask=is_real)
    tl.store(schedule + 1 + capacity + tile, first, mask=is_real)
    tl.store(schedule + 1 + 2 * capacity + tile, owner_end, mask=is_real)
