"""The grouped product of rows with NF4 matrices: the kernel loads four-bit codes and dequantizes a
tile in each step.

Eager: dequantize every matrix, then the product of `grouped.py`. Here the matrix of an expert is
read in a quarter of its 16-bit size, and never written. One kernel serves both passes: forward
reduces over the rows of a matrix, 64 numbers and one scale a step; the gradient of the rows reduces
over its columns. FLOPs: 2 R K N. Bytes: R K + R N elements, and 9/16 E K N for codes and scales, at
least. Sums are accumulated in float32, in a fixed order: deterministic. A number is rounded to the
dtype of the rows before the product, as if it had been dequantized.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.grouped import rows_tile
from moesaic.kernels.triton.parts import max_tiles, place, row_tiles, rows_of_tile
from moesaic.kernels.triton.rows.launch import dot_precision
from moesaic.kernels.triton.rows.tiles import power_of_two
from moesaic.kernels.triton.rows.varying import VARYING

BLOCK = 64
"""Numbers of a row that share a scale, and the width of every tile of a matrix."""
MOST_ROWS = 64
"""The most rows of a tile."""


def rows_times_by_triton(
    x: Tensor, codes: Tensor, scales: Tensor, values: Tensor, ends: Tensor, *, transposed: bool
) -> Tensor:
    """Return `nf4.rows_times` of float32, bfloat16 or float16 rows. `values` are the codes' values,
    (16,) float32."""
    x = x.contiguous()
    codes = codes.contiguous()
    scales = scales.contiguous()
    num_rows = len(x)
    num_experts, height, row_bytes = codes.shape
    width = 2 * row_bytes  # two codes in a byte
    columns = height if transposed else width
    out = x.new_empty(num_rows, columns)
    if num_rows == 0 or columns == 0:
        return out

    rows_per_expert = num_rows // max(1, num_experts)
    tile_rows = min(MOST_ROWS, max(16, power_of_two(rows_per_expert)))  # `tl.dot` needs 16
    capacity = max_tiles(num_rows, num_experts, tile_rows)
    _nf4_kernel[(capacity * triton.cdiv(columns, BLOCK),)](
        x,
        codes,
        scales=scales,
        values=values,
        out=out,
        schedule=row_tiles(ends, num_rows, tile_rows),
        capacity=capacity,
        height=height,
        width=width,
        TRANSPOSED=transposed,
        PRECISION=dot_precision(x.dtype),
        BLOCK_R=tile_rows,
        BLOCK=BLOCK,
        GROUP=8,
        num_warps=4,
        num_stages=3,
    )
    return out


@triton.jit(do_not_specialize=VARYING)
def _nf4_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    schedule: tl.tensor,
    capacity: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Compute a tile of `rows_times_by_triton`. Each program has one tile; those beyond the
    schedule's have none. GROUP is as in `Tile`, the schedule that of `row_tiles`."""
    columns = height if TRANSPOSED else width
    depth = width if TRANSPOSED else height
    column_tiles = tl.cdiv(columns, BLOCK)
    num_row_tiles = tl.load(schedule)
    index = tl.program_id(0)
    if index < num_row_tiles * column_tiles:
        row_tile, column_tile = place(index, num_row_tiles, column_tiles, GROUP)
        # None: the rows are in expert order
        rows = rows_of_tile(schedule, capacity, None, row_tile, BLOCK_R)
        start = column_tile * BLOCK  # the tile's first column

        total = tl.zeros((BLOCK_R, BLOCK), tl.float32)
        for k in tl.range(0, depth, BLOCK):
            a = rows_tile(
                x, rows, k=k, depth=depth, stride_x=depth, BY_DESCRIPTOR=False, BLOCK_K=BLOCK
            )
            b = matrix_tile(
                codes,
                scales,
                values=values,
                expert=rows.expert,
                row=start if TRANSPOSED else k,
                column=k if TRANSPOSED else start,
                height=height,
                width=width,
                BLOCK=BLOCK,
            )
            if TRANSPOSED:
                b = tl.trans(b)
            total = tl.dot(a, b.to(a.dtype), total, input_precision=PRECISION)

        column = start + tl.arange(0, BLOCK)
        inside = rows.is_row[:, None] & (column < columns)[None, :]
        pointers = out + rows.row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(pointers, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def matrix_tile(
    codes: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Dequantize the (BLOCK, BLOCK) tile of an expert's matrix at (row, column), float32; rows
    beyond the matrix are zero.

    A width is a multiple of BLOCK, so a tile has one scale in each row.
    """
    matrix_row = row + tl.arange(0, BLOCK)
    inside = matrix_row < height
    stored_row = expert.to(tl.int64) * height + matrix_row  # among those of all experts
    byte = column // 2 + tl.arange(0, BLOCK // 2)
    packed = tl.load(
        codes + stored_row[:, None] * (width // 2) + byte[None, :], mask=inside[:, None], other=0
    ).to(tl.int32)
    # the values of a byte's upper and lower half become neighbours
    pairs = tl.join(tl.load(values + (packed >> 4)), tl.load(values + (packed & 15)))
    to_scales = scales + stored_row * (width // BLOCK) + column // BLOCK
    scale = tl.load(to_scales, mask=inside, other=0.0)
    return tl.reshape(pairs, (BLOCK, BLOCK)) * scale[:, None]
