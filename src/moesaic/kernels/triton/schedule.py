"""Which rows each tile of a grouped product takes: made on the device, since only the device knows the group sizes.

Eager: counts to the host, a list of (expert, first row, last row), back to the device; that wait is what this kernel
avoids. Nothing is saved for backward. Bytes: 4 E read by each program and 12 per tile written; no FLOPs worth counting.
Tiles start at an expert's first row, so no rows are padded and a tile never spans two experts; the price is that the last
tile of an expert is half empty on average.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 32
"""Tiles that one program places."""


def max_tiles(num_rows: int, num_experts: int, height: int) -> int:
    """Return how many tiles of `height` rows there can be, whatever the group sizes."""
    return num_rows // height + min(num_experts, num_rows)


def row_tiles(ends: Tensor, num_rows: int, height: int) -> Tensor:
    """Cut each expert's rows into tiles.

    Args:
        ends: (E,) int32, one past the last row of each expert, ascending; `ends[-1] <= num_rows`.
        num_rows: R, of which those from `ends[-1]` on belong to nobody.
        height: rows of a tile.

    Returns:
        (1 + 3 M,) int32: the number of tiles, then the expert, the first row and the end of the expert's rows of each,
        M being `max_tiles`. What stands beyond the number of tiles means nothing.
    """
    num_experts = len(ends)
    capacity = max_tiles(num_rows, num_experts, height)
    schedule = torch.empty(1 + 3 * capacity, dtype=torch.int32, device=ends.device)
    if capacity == 0:
        return schedule.zero_()
    grid = (triton.cdiv(capacity, WIDTH),)
    _schedule_kernel[grid](
        ends, schedule, num_experts, capacity, HEIGHT=height, EXPERTS=triton.next_power_of_2(num_experts), WIDTH=WIDTH
    )
    return schedule


@triton.jit
def _schedule_kernel(
    ends: tl.tensor,
    schedule: tl.tensor,
    num_experts: tl.tensor,
    capacity: tl.tensor,
    HEIGHT: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < num_experts, other=0)
    start = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    tiles = tl.where(expert < num_experts, (end - start + HEIGHT - 1) // HEIGHT, 0)
    tiles_end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    tile = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    owner = tl.sum((tiles_end[None, :] <= tile[:, None]).to(tl.int32), 1)
    is_real = tile < total
    before = tl.sum(tl.where(expert[None, :] < owner[:, None], tiles[None, :], 0), 1)
    first = tl.load(ends + owner - 1, mask=is_real & (owner > 0), other=0) + (tile - before) * HEIGHT
    last = tl.load(ends + owner, mask=is_real, other=0)
    if tl.program_id(0) == 0:
        tl.store(schedule, total)
    tl.store(schedule + 1 + tile, owner, mask=is_real)
    tl.store(schedule + 1 + capacity + tile, first, mask=is_real)
    tl.store(schedule + 1 + 2 * capacity + tile, last, mask=is_real)
