"""The up projection with its epilogue: gather, grouped product, activation (gated or not), times
the routing weight.

Eager: permute the tokens, multiply by the matrices, activate, multiply by the weights. Here one
kernel reads token rows through the index. It writes the pre-activations, which are saved for
backward, and the activated rows for the down projection, which are not saved. The activation is
applied to the rounded pre-activation, since backward computes it from that. With a gate, a tile
holds equally many columns of both matrices side by side: they share one product, and the epilogue
combines the halves in registers.

FLOPs: 2 R D C I, C being 2 with a gate and else 1. Bytes: R D + R C I + R I + E C I D elements at
least; a token's row is read once per column tile, mostly from L2. Source: SonicMoE (Guo et al.
2025), sections 4.1 and 4.2.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.activation import Clamp
from moesaic.kernels.triton.grouped import rows_tile
from moesaic.kernels.triton.parts import (
    Schedules,
    act,
    bias_tile,
    gated,
    halves,
    place,
    rows_of_tile,
)
from moesaic.kernels.triton.rows.launch import as_operand, launch_options, num_programs, unit_stride
from moesaic.kernels.triton.rows.tiles import Tile, num_column_splits
from moesaic.kernels.triton.rows.varying import VARYING


def up(
    x: Tensor,
    matrices: Tensor,
    ends: Tensor | Schedules,
    tile: Tile,
    *,
    activation: str,
    clamp: Clamp | None = None,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    token: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Project rows to the hidden width and activate them.

    Args:
        x: (R, D) rows in expert order, or with `token` the (T, D) tokens.
        matrices: (E, C, I, D): one matrix per expert, or two, of which the first gates the second.
        ends: (E,) int32, one past the last row of each expert; or the schedules of a pass.
        tile: the tile of the product; its columns count per matrix.
        activation: a key of `ACTIVATIONS`; applied to the gate, if any.
        clamp: the constants of clamped SwiGLU.
        bias: (E, C, I), added to the pre-activations.
        weight: (R,) routing weights in expert order; None for 1.
        token: (R,) int32, the token of each row; None if `x` is in expert order.

    Returns:
        The pre-activations, (R, C I), and the hidden rows times their weights, (R, I), in the dtype
        of `x`.
    """
    x = x.contiguous()
    w = unit_stride(matrices)
    num_rows = len(x if token is None else token)
    parts = w.shape[1]
    width = w.shape[2]
    pre = x.new_empty(num_rows, parts * width)
    hidden = x.new_empty(num_rows, width)
    if num_rows and width:
        constants = {
            "ACTIVATION": activation,
            "CLAMP": None if clamp is None else tuple(clamp.numbers),
            "PARTS": parts,
        }
        _launch_up(
            x, w, ends, tile, pre, hidden, bias=bias, weight=weight, token=token, **constants
        )
    return pre, hidden


def _launch_up(
    x: Tensor,
    w: Tensor,
    ends: Tensor | Schedules,
    tile: Tile,
    pre: Tensor,
    hidden: Tensor,
    *,
    bias: Tensor | None,
    weight: Tensor | None,
    token: Tensor | None,
    **constants: Any,
) -> None:
    """Start the kernel that fills the pre-activations and the hidden rows; `constants` are those of
    the activation."""
    num_rows, width = hidden.shape
    parts = w.shape[1]
    schedule, capacity = Schedules.of(ends, num_rows).tiles(tile.rows)
    programs = num_programs(tile, capacity * triton.cdiv(width, tile.columns), x.device)
    matrix, by_descriptor = as_operand(w, (1, parts, tile.columns, tile.depth), tile)
    rows, rows_by_descriptor = as_operand(
        x, (tile.rows, tile.depth), tile if token is None else None
    )
    _up_kernel[(programs,)](
        rows,
        matrix,
        pre=pre,
        hidden=hidden,
        bias=x if bias is None else bias.contiguous(),
        token=x if token is None else token,
        weight=x if weight is None else weight,
        schedule=schedule,
        capacity=capacity,
        width=width,
        depth=x.shape[1],
        stride_x=x.stride(0),
        stride_expert=w.stride(0),
        stride_part=w.stride(1),
        stride_w=w.stride(2),
        BIASED=bias is not None,
        WEIGHTED=weight is not None,
        GATHERED=token is not None,
        ROWS_BY_DESCRIPTOR=rows_by_descriptor,
        BY_DESCRIPTOR=by_descriptor,
        SPLITS=num_column_splits(tile),
        **constants,
        **launch_options(tile, x.dtype),
    )


@triton.jit(do_not_specialize=VARYING)
def _up_kernel(
    x: tl.tensor,
    w: tl.tensor,
    pre: tl.tensor,
    hidden: tl.tensor,
    bias: tl.tensor,
    token: tl.tensor,
    weight: tl.tensor,
    schedule: tl.tensor,
    capacity: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_part: tl.tensor,
    stride_w: tl.tensor,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATHERED: tl.constexpr,
    ROWS_BY_DESCRIPTOR: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    column_tiles = tl.cdiv(width, BLOCK_N)
    num_row_tiles = tl.load(schedule)
    for index in tl.range(
        tl.program_id(0), num_row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN
    ):
        row_tile, column_tile = place(index, num_row_tiles, column_tiles, GROUP)
        expert, first, row, is_row, source = rows_of_tile(
            schedule, capacity, token, row_tile, GATHERED, BLOCK_R
        )
        start = column_tile * BLOCK_N
        ones = tl.full((BLOCK_R,), 1.0, tl.float32)
        total = bias_tile(
            bias,
            ones,
            expert=expert,
            column=start,
            width=width,
            BIASED=BIASED,
            PARTS=PARTS,
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
            b = parts_tile(
                w,
                expert,
                column=start,
                k=k,
                columns=width,
                depth=depth,
                stride_expert=stride_expert,
                stride_part=stride_part,
                stride_w=stride_w,
                PARTS=PARTS,
                BY_DESCRIPTOR=BY_DESCRIPTOR,
                BLOCK_N=BLOCK_N,
                BLOCK_K=BLOCK_K,
            )
            total = tl.dot(a, b, total, input_precision=PRECISION)
        pre_first = total
        pre_second = total
        if PARTS == 2:
            pre_first, pre_second = halves(total, BLOCK_R, 2 * BLOCK_N)
        factor = ones
        if WEIGHTED:
            factor = tl.load(weight + row, mask=is_row, other=0.0).to(tl.float32)
        write_in_splits(
            pre_first,
            pre_second,
            factor=factor,
            pre=pre,
            hidden=hidden,
            row=row,
            is_row=is_row,
            start=start,
            width=width,
            ACTIVATION=ACTIVATION,
            CLAMP=CLAMP,
            PARTS=PARTS,
            BLOCK_R=BLOCK_R,
            BLOCK_N=BLOCK_N,
            SPLITS=SPLITS,
        )


@triton.jit
def parts_tile(
    w: tl.tensor,
    expert: tl.tensor,
    column: tl.tensor,
    k: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    stride_expert: tl.tensor,
    stride_part: tl.tensor,
    stride_w: tl.tensor,
    PARTS: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Load the (BLOCK_K, PARTS BLOCK_N) tile of an expert's matrices that starts at (k, column),
    side by side.

    The matrices are stored (PARTS, columns, depth); elements beyond them are zero. A descriptor
    checks the bounds itself.
    """
    if BY_DESCRIPTOR:
        matrices = tl.trans(w.load([expert, 0, column, k]).reshape(PARTS * BLOCK_N, BLOCK_K))
    else:
        n = tl.arange(0, PARTS * BLOCK_N)
        own_column = column + n % BLOCK_N
        step = k + tl.arange(0, BLOCK_K)
        base = w + expert.to(tl.int64) * stride_expert
        pointers = (
            base + ((n // BLOCK_N) * stride_part + own_column * stride_w)[None, :] + step[:, None]
        )
        matrices = tl.load(
            pointers, mask=(step < depth)[:, None] & (own_column < columns)[None, :], other=0.0
        )
    return matrices


@triton.jit
def write_in_splits(
    pre_first: tl.tensor,
    pre_second: tl.tensor,
    factor: tl.tensor,
    pre: tl.tensor,
    hidden: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Write pre-activations and hidden rows in SPLITS parts of the columns: in one part, erf spills
    registers."""
    if SPLITS == 1:
        column = start + tl.arange(0, BLOCK_N)
        inside = is_row[:, None] & (column < width)[None, :]
        first = row.to(tl.int64)[:, None] * width
        to_pre = pre + first * PARTS + column[None, :]
        rounded = pre_first.to(pre.dtype.element_ty)
        tl.store(to_pre, rounded, mask=inside)
        active = act(rounded.to(tl.float32), ACTIVATION, CLAMP) * factor[:, None]
        if PARTS == 2:
            rounded = pre_second.to(pre.dtype.element_ty)
            tl.store(to_pre + width, rounded, mask=inside)
            active *= gated(rounded.to(tl.float32), CLAMP)
        tl.store(hidden + first + column[None, :], active.to(hidden.dtype.element_ty), mask=inside)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(pre_first, BLOCK_R, BLOCK_N)
        other_left = left
        other_right = right
        if PARTS == 2:
            other_left, other_right = halves(pre_second, BLOCK_R, BLOCK_N)
        write_in_splits(
            left,
            other_left,
            factor=factor,
            pre=pre,
            hidden=hidden,
            row=row,
            is_row=is_row,
            start=start,
            width=width,
            ACTIVATION=ACTIVATION,
            CLAMP=CLAMP,
            PARTS=PARTS,
            BLOCK_R=BLOCK_R,
            BLOCK_N=HALF,
            SPLITS=SPLITS // 2,
        )
        write_in_splits(
            right,
            other_right,
            factor=factor,
            pre=pre,
            hidden=hidden,
            row=row,
            is_row=is_row,
            start=start + HALF,
            width=width,
            ACTIVATION=ACTIVATION,
            CLAMP=CLAMP,
            PARTS=PARTS,
            BLOCK_R=BLOCK_R,
            BLOCK_N=HALF,
            SPLITS=SPLITS // 2,
        )
