"""Experts in MXFP8: like `fp8_rowwise`, but with one scale for every 32 values of a row, as
Blackwell's products support it.

The format is the Open Compute Project's (Microscaling Formats 1.0, 2023): e4m3 values, and scales
that are one-byte exponents. `torch._scaled_grouped_mm` requires the scales in tiles of 128 rows by
4 columns, swizzled as cuBLAS documents it ("1D block scaling factors layout"). Each expert's rows
start at the first row of a tile; their places are computed on the device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.fp8_rowwise import exponents, powers
from moesaic.kernels.whole_batch import by_products

BLOCK = 32
"""The number of values that share a scale."""
TILE = 128
"""The number of rows of a tile of scales."""


def rows_times(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: (R, K) x (E, K, N) -> (R, N) bfloat16; undefined
    from row `ends[-1]` on."""
    if not len(x):
        return x.new_empty(0, w.shape[2])
    rows, row_scales = rounded(x)
    matrices, matrix_scales = rounded(w.transpose(1, 2))
    # the rows in whole tiles, and one more for each expert, whose last tile may not be full
    num_tiles = math.ceil(len(x) / TILE) + len(ends)
    tiled_scales = row_scales.new_zeros(num_tiles * TILE, row_scales.shape[1])
    tiled_scales[_tiled_rows(ends, len(x))] = row_scales
    product: Tensor = torch._scaled_grouped_mm(
        rows,
        matrices.transpose(1, 2),
        swizzled(tiled_scales),
        swizzled(matrix_scales).flatten(1),  # a row of bytes for each expert
        offs=ends,
        out_dtype=torch.bfloat16,
    )
    return product


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each block by a scale; return the e4m3 quotients, (..., K), and the scales' biased
    exponents, (..., K / 32)."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    exponent = exponents(blocks)
    quotients = (blocks / powers(exponent).unsqueeze(-1)).flatten(-2)
    codes = quotients.to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    biased_exponent = (exponent + 127).to(torch.uint8)
    return codes, biased_exponent


def swizzled(scales: Tensor) -> Tensor:
    """Reorder scales tile by tile: (..., rows, columns) bytes -> e8m0, with both sizes rounded up
    to whole tiles."""
    rows, columns = scales.shape[-2:]
    padded = F.pad(scales, (0, -columns % 4, 0, -rows % TILE))
    # (..., tile row, 4, 32, tile column, 4): a tile's 128 rows are 4 groups of 32
    tiles = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))
    # tile by tile (-5, -2); in a tile the four groups of a row (-3) lie side by side (-4)
    leading = range(tiles.dim() - 5)
    by_tile = tiles.permute(*leading, -5, -2, -3, -4, -1)
    return by_tile.reshape(padded.shape).view(torch.float8_e8m0fnu)


def _tiled_rows(ends: Tensor, num_rows: int) -> Tensor:
    """Return the row of the tiled scales that each row's scales occupy, (R,); each expert starts a
    new tile."""
    sizes = ends.diff(prepend=ends.new_zeros(1))
    starts = ends - sizes
    tiled_sizes = (sizes + TILE - 1) // TILE * TILE  # rounded up to whole tiles
    tiled_starts = tiled_sizes.cumsum(0) - tiled_sizes
    shift = tiled_starts - starts
    row = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    expert = torch.searchsorted(ends, row, right=True).clamp_max(len(ends) - 1)
    return row + shift.index_select(0, expert)


forward, backward = by_products("mxfp8", majors=(10,), multiple=BLOCK, rows_times=rows_times)
