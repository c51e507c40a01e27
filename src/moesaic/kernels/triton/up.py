"""The up projection with its epilogue: gather, grouped product, activation (gated or not), times the routing weight.

Eager: permute the tokens, one or two grouped products, activation, multiply. Here one kernel reads token rows through the
index and writes the pre-activation, which backward keeps, and the activated rows, which the down projection eats and
nobody keeps. The activation is taken of the rounded pre-activation, so that backward computes the very same from it.
FLOPs: 2 R D C I, C being 2 with a gate and else 1. Bytes: R D + R C I + R I + E C I D elements at least; a token's row is
read once per column tile, from L2 mostly. Source: SonicMoE (Guo et al. 2025), sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.grouped import matrix_tile, rows_tile
from moesaic.kernels.triton.parts import act, halves, max_tiles, place, row_tiles, rows_of_tile
from moesaic.kernels.triton.rows.launch import KernelLaunch, as_operands, dot_precision, unit_stride
from moesaic.kernels.triton.rows.tiles import Tile, num_bites


def up(
    x: Tensor,
    matrices: Sequence[Tensor],
    ends: Tensor,
    tile: Tile,
    *,
    activation: str,
    weight: Tensor | None = None,
    token: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Project rows to the hidden width and activate them.

    Args:
        x: (R, D) rows in expert order, or with `token` the (T, D) tokens.
        matrices: (E, I, D) each: one, or two, the first of which gates the second.
        ends: (E,) int32, one past the last row of each expert.
        tile: how the work is cut; its columns are of each matrix.
        activation: "silu", "gelu" or "relu"; of the gate where there is one.
        weight: (R,) routing weights in expert order; None for 1.
        token: (R,) int32, the token that each row is.

    Returns:
        The pre-activations, (R, I) for each matrix, and the hidden rows times their weights, (R, I), in the dtype of `x`.
    """
    x, num_rows, width = x.contiguous(), len(x) if token is None else len(token), matrices[0].shape[1]
    *pre, hidden = (x.new_empty(num_rows, width) for _ in (*matrices, x))
    if num_rows == 0 or width == 0:
        return pre, hidden
    capacity = max_tiles(num_rows, len(ends), tile.rows)
    launch = KernelLaunch.of(tile, capacity * triton.cdiv(width, tile.columns), x.device)
    one, two = unit_stride(matrices[0]), unit_stride(matrices[-1])
    (first, second), by_descriptor = as_operands((one, two), (1, tile.columns, tile.depth), tile)
    (rows,), rows_by_descriptor = as_operands((x,), (tile.rows, tile.depth), tile if token is None else None)
    _up_kernel[(launch.programs,)](
        rows, first, second, pre[0], pre[-1], hidden, x if token is None else token, x if weight is None else weight,
        row_tiles(ends, num_rows, tile.rows), capacity, width, x.shape[1], x.stride(0), one.stride(0), one.stride(1),
        two.stride(0), two.stride(1), ACTIVATION=activation, GATED=len(matrices) == 2, WEIGHTED=weight is not None,
        GATHERED=token is not None, ROWS_BY_DESCRIPTOR=rows_by_descriptor, BY_DESCRIPTOR=by_descriptor,
        PRECISION=dot_precision(x.dtype), FLATTEN=launch.flatten, BITES=num_bites(tile), BLOCK_R=tile.rows,
        BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=tile.group, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return pre, hidden


@triton.jit
def _up_kernel(
    x: tl.tensor, w_one: tl.tensor, w_two: tl.tensor, pre_one: tl.tensor, pre_two: tl.tensor, hidden: tl.tensor,
    token: tl.tensor, weight: tl.tensor, schedule: tl.tensor, capacity: tl.tensor, width: tl.tensor,
    depth: tl.tensor, stride_x: tl.tensor, stride_expert: tl.tensor, stride_w: tl.tensor,
    stride_two_expert: tl.tensor, stride_two: tl.tensor, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    WEIGHTED: tl.constexpr, GATHERED: tl.constexpr, ROWS_BY_DESCRIPTOR: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, FLATTEN: tl.constexpr, BITES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    column_tiles = tl.cdiv(width, BLOCK_N)
    num_row_tiles = tl.load(schedule)
    for index in tl.range(tl.program_id(0), num_row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        row_tile, column_tile = place(index, num_row_tiles, column_tiles, GROUP)
        expert, first, row, is_row, source = rows_of_tile(schedule, capacity, token, row_tile, GATHERED, BLOCK_R)
        start = column_tile * BLOCK_N
        one = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        two = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for k in tl.range(0, depth, BLOCK_K):
            a = rows_tile(x, first, source, is_row, k, depth, stride_x, ROWS_BY_DESCRIPTOR, BLOCK_K)
            b = matrix_tile(
                w_one, expert, start, k, width, depth, stride_expert, stride_w, True, BY_DESCRIPTOR, BLOCK_N, BLOCK_K
            )
            one = tl.dot(a, b, one, input_precision=PRECISION)
            if GATED:
                b = matrix_tile(
                    w_two, expert, start, k, width, depth, stride_two_expert, stride_two, True, BY_DESCRIPTOR,
                    BLOCK_N, BLOCK_K,
                )  # fmt: skip
                two = tl.dot(a, b, two, input_precision=PRECISION)
        factor = tl.full((BLOCK_R,), 1.0, tl.float32)
        if WEIGHTED:
            factor = tl.load(weight + row, mask=is_row, other=0.0).to(tl.float32)
        write_in_bites(
            one, two, factor, pre_one, pre_two, hidden, row, is_row, start, width,
            ACTIVATION, GATED, BLOCK_R, BLOCK_N, BITES,
        )  # fmt: skip


@triton.jit
def write_in_bites(
    one: tl.tensor,
    two: tl.tensor,
    factor: tl.tensor,
    pre_one: tl.tensor,
    pre_two: tl.tensor,
    hidden: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BITES: tl.constexpr,
) -> None:
    """Write pre-activations and hidden rows, BITES parts of the columns in turn: in one piece erf spills registers."""
    if BITES == 1:
        column = start + tl.arange(0, BLOCK_N)
        inside = is_row[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        rounded = one.to(pre_one.dtype.element_ty)
        tl.store(pre_one + at, rounded, mask=inside)
        active = act(rounded.to(tl.float32), ACTIVATION) * factor[:, None]
        if GATED:
            rounded = two.to(pre_two.dtype.element_ty)
            tl.store(pre_two + at, rounded, mask=inside)
            active *= rounded.to(tl.float32)
        tl.store(hidden + at, active.to(hidden.dtype.element_ty), mask=inside)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(one, BLOCK_R, BLOCK_N)
        other_left, other_right = left, right
        if GATED:
            other_left, other_right = halves(two, BLOCK_R, BLOCK_N)
        write_in_bites(
            left, other_left, factor, pre_one, pre_two, hidden, row, is_row, start, width,
            ACTIVATION, GATED, BLOCK_R, HALF, BITES // 2,
        )  # fmt: skip
        write_in_bites(
            right, other_right, factor, pre_one, pre_two, hidden, row, is_row, start + HALF, width,
            ACTIVATION, GATED, BLOCK_R, HALF, BITES // 2,
        )  # fmt: skip
