"""The grouped product of rows: each expert's rows times that expert's matrix.

It is the forward of the down projection, and gives the gradient of the up projection's input rows.

Eager: `torch.cat([x[a:b] @ w[e].T for each expert e])`. Nothing is saved here. FLOPs: 2 R K N.
Bytes: R K + R N + E K N elements at least; tiles of one expert that run at the same time share its
matrix and its rows in L2. Sums are accumulated in float32, in a fixed order: deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.parts import Schedules, bias_tile, place, rows_of_tile
from moesaic.kernels.triton.rows.launch import as_operand, launch_options, num_programs, unit_stride
from moesaic.kernels.triton.rows.tiles import Tile
from moesaic.kernels.triton.rows.varying import VARYING


def rows_times(
    x: Tensor,
    w: Tensor,
    ends: Tensor | Schedules,
    tile: Tile,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Multiply each expert's rows by its matrix.

    Args:
        x: (R, K) rows in expert order.
        w: (E, N, K) if `transposed`, as `nn.Linear` stores it, else (E, K, N).
        ends: (E,) int32, one past the last row of each expert; or the schedules of a pass.
        transposed: multiply by the transpose of each matrix.
        bias: (E, N), added to each row of its expert.
        weight: (R,) factors of the bias, since the rows have theirs already; None for 1.
        places: (R,) int32, the row of the result that each row becomes; None for expert order.

    Returns:
        (R, N) in the dtype of the rows; rows from `ends[-1]` on are uninitialised.
    """
    x = x.contiguous()
    w = unit_stride(w)
    num_rows = len(x)
    columns, depth = (w.shape[1], w.shape[2]) if transposed else (w.shape[2], w.shape[1])
    out = x.new_empty(num_rows, columns)
    if num_rows == 0 or columns == 0:
        return out
    schedule, capacity = Schedules.of(ends, num_rows).tiles(tile.rows)
    programs = num_programs(tile, capacity * triton.cdiv(columns, tile.columns), x.device)
    block = (1, tile.columns, tile.depth) if transposed else (1, tile.depth, tile.columns)
    matrix, by_descriptor = as_operand(w, block, tile)
    source, rows_by_descriptor = as_operand(x, (tile.rows, tile.depth), tile)
    _rows_kernel[(programs,)](
        source,
        matrix,
        out=out,
        bias=out if bias is None else bias.contiguous(),
        weight=out if weight is None else weight,
        places=out if places is None else places,
        schedule=schedule,
        capacity=capacity,
        columns=columns,
        depth=depth,
        stride_x=x.stride(0),
        stride_expert=w.stride(0),
        stride_w=w.stride(1),
        BIASED=bias is not None,
        WEIGHTED=weight is not None,
        PLACED=places is not None,
        TRANSPOSED=transposed,
        ROWS_BY_DESCRIPTOR=rows_by_descriptor,
        BY_DESCRIPTOR=by_descriptor,
        **launch_options(tile, x.dtype),
    )
    return out


@triton.jit(do_not_specialize=VARYING)
def _rows_kernel(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    weight: tl.tensor,
    places: tl.tensor,
    schedule: tl.tensor,
    capacity: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_w: tl.tensor,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PLACED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS_BY_DESCRIPTOR: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    column_tiles = tl.cdiv(columns, BLOCK_N)
    num_row_tiles = tl.load(schedule)
    for index in tl.range(
        tl.program_id(0), num_row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN
    ):
        row_tile, column_tile = place(index, num_row_tiles, column_tiles, GROUP)
        expert, first, row, is_row, source = rows_of_tile(
            schedule, capacity, schedule, row_tile, False, BLOCK_R
        )
        start = column_tile * BLOCK_N
        factor = tl.full((BLOCK_R,), 1.0, tl.float32)
        if WEIGHTED:
            factor = tl.load(weight + row, mask=is_row, other=0.0).to(tl.float32)
        total = bias_tile(
            bias,
            factor,
            expert=expert,
            column=start,
            width=columns,
            BIASED=BIASED,
            PARTS=1,
            BLOCK_R=BLOCK_R,
            BLOCK_N=BLOCK_N,
        )
        for k in tl.range(0, depth, BLOCK_K):
            a = rows_tile(
                x,
                first,
                source=source,
                is_row=is_row,
                k=k,
                depth=depth,
                stride_x=stride_x,
                BY_DESCRIPTOR=ROWS_BY_DESCRIPTOR,
                BLOCK_K=BLOCK_K,
            )
            b = matrix_tile(
                w,
                expert,
                column=start,
                k=k,
                columns=columns,
                depth=depth,
                stride_expert=stride_expert,
                stride_w=stride_w,
                TRANSPOSED=TRANSPOSED,
                BY_DESCRIPTOR=BY_DESCRIPTOR,
                BLOCK_N=BLOCK_N,
                BLOCK_K=BLOCK_K,
            )
            total = tl.dot(a, b, total, input_precision=PRECISION)
        column = start + tl.arange(0, BLOCK_N)
        own_place = tl.load(places + row, mask=is_row, other=0) if PLACED else row
        pointers = out + own_place.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(
            pointers,
            total.to(out.dtype.element_ty),
            mask=is_row[:, None] & (column < columns)[None, :],
        )


@triton.jit
def rows_tile(
    x: tl.tensor,
    first: tl.tensor,
    source: tl.tensor,
    is_row: tl.tensor,
    k: tl.tensor,
    depth: tl.tensor,
    stride_x: tl.tensor,
    BY_DESCRIPTOR: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Load BLOCK_K columns, from column k on, of the rows in `source`; elements beyond the rows and
    columns are zero.

    A descriptor loads the rows from `first` on instead, including rows of the next expert, whose
    results are not written.
    """
    if BY_DESCRIPTOR:
        rows = x.load([first, k])
    else:
        step = k + tl.arange(0, BLOCK_K)
        pointers = x + source.to(tl.int64)[:, None] * stride_x + step[None, :]
        rows = tl.load(pointers, mask=is_row[:, None] & (step < depth)[None, :], other=0.0)
    return rows


@triton.jit
def matrix_tile(
    w: tl.tensor,
    expert: tl.tensor,
    column: tl.tensor,
    k: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    stride_expert: tl.tensor,
    stride_w: tl.tensor,
    TRANSPOSED: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Load the (BLOCK_K, BLOCK_N) tile of an expert's matrix that starts at (k, column); elements
    beyond the matrix are zero.

    The matrix is stored (columns, depth) if TRANSPOSED, else (depth, columns). A descriptor checks
    the bounds itself.
    """
    n = column + tl.arange(0, BLOCK_N)
    step = k + tl.arange(0, BLOCK_K)
    if BY_DESCRIPTOR:
        if TRANSPOSED:
            matrix = tl.trans(w.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K))
        else:
            matrix = w.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
    else:
        inside = (step < depth)[:, None] & (n < columns)[None, :]
        base = w + expert.to(tl.int64) * stride_expert
        if TRANSPOSED:
            matrix = tl.load(base + n[None, :] * stride_w + step[:, None], mask=inside, other=0.0)
        else:
            matrix = tl.load(base + step[:, None] * stride_w + n[None, :], mask=inside, other=0.0)
    return matrix
