"""The gradient through the down projection and the activation, in one kernel.

Eager: gather the result's gradient into expert order, multiply by the matrices, run the
activation's backward by autograd, compute the hidden rows again for the matrices' gradient, and a
dot product per row for the routing weight's gradient. Here the epilogue has d(hidden) in registers.
It reads the pre-activations, the only saved tensor, and writes their gradient and the hidden rows.
The gradient of a routing weight is <d(hidden), hidden> (SonicMoE, Guo et al. 2025, section 4.2), so
the experts' output, R D elements, is neither saved nor recomputed. The kernel writes one partial
sum per column tile, and the caller sums them in order: no atomics.

FLOPs: 2 R D I. Bytes: R D + 2 R C I + R I + E D I elements at least, C being 2 with a gate and
else 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.activation import Clamp
from moesaic.kernels.triton.grouped import matrix_tile, rows_tile
from moesaic.kernels.triton.parts import (
    Schedules,
    act,
    gated,
    gated_slope,
    halves,
    place,
    rows_of_tile,
    slope,
)
from moesaic.kernels.triton.rows.launch import as_operand, launch_options, num_programs, unit_stride
from moesaic.kernels.triton.rows.tiles import Tile, num_column_splits
from moesaic.kernels.triton.rows.varying import VARYING


def down_grad(
    dy: Tensor,
    down: Tensor,
    pre: Tensor,
    ends: Tensor | Schedules,
    tile: Tile,
    *,
    activation: str,
    clamp: Clamp | None = None,
    weight: Tensor | None = None,
    token: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of the pre-activations, the hidden rows, and partial sums of the routing
    weights' gradients.

    Args:
        dy: (R, D) in expert order, or with `token` the (T, D) gradient of the tokens' results.
        down: (E, D, I).
        pre: (R, C I), the pre-activations from `up`.
        ends: (E,) int32, one past the last row of each expert; or the schedules of a pass.
        tile: the tile of the product.
        activation, clamp: as in `up`.
        weight: (R,) routing weights in expert order; None for 1.
        token: (R,) int32, the token of each row; None if `dy` is in expert order.

    Returns:
        d(pre), (R, C I); the hidden rows times their weights, (R, I); partial sums, (R, P) float32,
        which summed over the P column tiles give the gradient of each row's weight.
    """
    num_rows = len(pre)
    width = down.shape[2]
    column_tiles = triton.cdiv(width, tile.columns)
    d_pre = torch.empty_like(pre)
    hidden = pre.new_empty(num_rows, width)
    parts = pre.new_empty(num_rows, column_tiles, dtype=torch.float32)
    if num_rows == 0 or width == 0:
        return d_pre, hidden, parts.zero_()
    parts_of_up = pre.shape[1] // width
    is_long = parts_of_up > 1 or activation.startswith("gelu")
    constants = {
        "ACTIVATION": activation,
        "CLAMP": None if clamp is None else tuple(clamp.numbers),
        "PARTS": parts_of_up,
        "SPLITS": num_column_splits(tile, is_long=is_long),
    }
    results = _Results(d_pre, hidden, parts)
    _launch_down_grad(
        dy.contiguous(),
        unit_stride(down),
        pre.contiguous(),
        ends,
        tile,
        results,
        weight=weight,
        token=token,
        **constants,
    )
    return d_pre, hidden, parts


class _Results(NamedTuple):
    """The tensors that the kernel fills; `down_grad` describes them."""

    d_pre: Tensor
    hidden: Tensor
    parts: Tensor


def _launch_down_grad(
    dy: Tensor,
    down: Tensor,
    pre: Tensor,
    ends: Tensor | Schedules,
    tile: Tile,
    results: _Results,
    *,
    weight: Tensor | None,
    token: Tensor | None,
    **constants: Any,
) -> None:
    """Start the kernel that fills the results; `constants` are those of the activation."""
    num_rows, width = results.hidden.shape
    column_tiles = results.parts.shape[1]
    schedule, capacity = Schedules.of(ends, num_rows).tiles(tile.rows)
    matrix, by_descriptor = as_operand(down, (1, tile.depth, tile.columns), tile)
    rows, rows_by_descriptor = as_operand(
        dy, (tile.rows, tile.depth), tile if token is None else None
    )
    _down_grad_kernel[(num_programs(tile, capacity * column_tiles, dy.device),)](
        rows,
        matrix,
        pre=pre,
        **results._asdict(),
        token=dy if token is None else token,
        weight=dy if weight is None else weight,
        schedule=schedule,
        capacity=capacity,
        width=width,
        depth=dy.shape[1],
        stride_dy=dy.stride(0),
        stride_expert=down.stride(0),
        stride_w=down.stride(1),
        WEIGHTED=weight is not None,
        GATHERED=token is not None,
        ROWS_BY_DESCRIPTOR=rows_by_descriptor,
        BY_DESCRIPTOR=by_descriptor,
        **constants,
        **launch_options(tile, dy.dtype),
    )


@triton.jit(do_not_specialize=VARYING)
def _down_grad_kernel(
    dy: tl.tensor,
    down: tl.tensor,
    pre: tl.tensor,
    d_pre: tl.tensor,
    hidden: tl.tensor,
    parts: tl.tensor,
    token: tl.tensor,
    weight: tl.tensor,
    schedule: tl.tensor,
    capacity: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    stride_dy: tl.tensor,
    stride_expert: tl.tensor,
    stride_w: tl.tensor,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    PARTS: tl.constexpr,
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
        d_hidden = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for k in tl.range(0, depth, BLOCK_K):
            a = rows_tile(
                dy,
                first,
                source=source,
                is_row=is_row,
                k=k,
                depth=depth,
                stride_x=stride_dy,
                BY_DESCRIPTOR=ROWS_BY_DESCRIPTOR,
                BLOCK_K=BLOCK_K,
            )
            b = matrix_tile(
                down,
                expert,
                column=start,
                k=k,
                columns=width,
                depth=depth,
                stride_expert=stride_expert,
                stride_w=stride_w,
                TRANSPOSED=False,
                BY_DESCRIPTOR=BY_DESCRIPTOR,
                BLOCK_N=BLOCK_N,
                BLOCK_K=BLOCK_K,
            )
            d_hidden = tl.dot(a, b, d_hidden, input_precision=PRECISION)
        factor = tl.full((BLOCK_R,), 1.0, tl.float32)
        if WEIGHTED:
            factor = tl.load(weight + row, mask=is_row, other=0.0).to(tl.float32)
        d_row = activation_grad_in_splits(
            d_hidden,
            factor,
            pre=pre,
            d_pre=d_pre,
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
        tl.store(parts + row.to(tl.int64) * column_tiles + column_tile, d_row, mask=is_row)


@triton.jit
def activation_grad_in_splits(
    d_hidden: tl.tensor,
    factor: tl.tensor,
    pre: tl.tensor,
    d_pre: tl.tensor,
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
) -> tl.tensor:
    """Write a tile of d(pre) and of the weighted hidden rows; return the tile's partial sum of each
    row's weight gradient.

    This is done in SPLITS parts of the columns: in one part, the operands do not fit the registers.
    Parts are read by pairs: no load moves before an earlier store, so each part that is read alone
    waits for memory once more.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    if SPLITS == 1:
        first, second = load_pre(
            pre, row, is_row=is_row, start=start, width=width, PARTS=PARTS, BLOCK_N=BLOCK_N
        )
        d_row = activation_grad(
            d_hidden,
            first,
            second=second,
            factor=factor,
            d_pre=d_pre,
            hidden=hidden,
            row=row,
            is_row=is_row,
            start=start,
            width=width,
            ACTIVATION=ACTIVATION,
            CLAMP=CLAMP,
            PARTS=PARTS,
            BLOCK_N=BLOCK_N,
        )
    elif SPLITS == 2 and CLAMP is None:  # a clamp's formula leaves no registers for a second part
        left, right = halves(d_hidden, BLOCK_R, BLOCK_N)
        first, second = load_pre(
            pre, row, is_row=is_row, start=start, width=width, PARTS=PARTS, BLOCK_N=HALF
        )
        next_first, next_second = load_pre(
            pre, row, is_row=is_row, start=start + HALF, width=width, PARTS=PARTS, BLOCK_N=HALF
        )
        d_row = activation_grad(
            left,
            first,
            second=second,
            factor=factor,
            d_pre=d_pre,
            hidden=hidden,
            row=row,
            is_row=is_row,
            start=start,
            width=width,
            ACTIVATION=ACTIVATION,
            CLAMP=CLAMP,
            PARTS=PARTS,
            BLOCK_N=HALF,
        )
        d_row += activation_grad(
            right,
            next_first,
            second=next_second,
            factor=factor,
            d_pre=d_pre,
            hidden=hidden,
            row=row,
            is_row=is_row,
            start=start + HALF,
            width=width,
            ACTIVATION=ACTIVATION,
            CLAMP=CLAMP,
            PARTS=PARTS,
            BLOCK_N=HALF,
        )
    else:
        left, right = halves(d_hidden, BLOCK_R, BLOCK_N)
        d_row = activation_grad_in_splits(
            left,
            factor,
            pre=pre,
            d_pre=d_pre,
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
        d_row += activation_grad_in_splits(
            right,
            factor,
            pre=pre,
            d_pre=d_pre,
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
    return d_row


@triton.jit
def load_pre(
    pre: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load columns of both pre-activations in their own dtype; without a gate, the same twice."""
    column = start + tl.arange(0, BLOCK_N)
    inside = is_row[:, None] & (column < width)[None, :]
    places = pre + row.to(tl.int64)[:, None] * (width * PARTS) + column[None, :]
    first = tl.load(places, mask=inside, other=0.0)
    second = first
    if PARTS == 2:
        second = tl.load(places + width, mask=inside, other=0.0)
    return first, second


@triton.jit
def activation_grad(
    d_hidden: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    factor: tl.tensor,
    d_pre: tl.tensor,
    hidden: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Write columns of d(pre) and of the weighted hidden rows; return their part of each row's
    weight gradient."""
    column = start + tl.arange(0, BLOCK_N)
    inside = is_row[:, None] & (column < width)[None, :]
    first_element = row.to(tl.int64)[:, None] * width
    to_pre = d_pre + first_element * PARTS
    to_hidden = hidden + first_element
    offset = column[None, :]
    pre_first = first.to(tl.float32)
    active = act(pre_first, ACTIVATION, CLAMP)
    d_active = d_hidden * factor[:, None]
    d_first = d_active * slope(pre_first, ACTIVATION, CLAMP)
    if PARTS == 2:
        pre_second = second.to(tl.float32)
        d_second = gated_slope(d_active * active, pre_second, CLAMP)
        tl.store(to_pre + offset + width, d_second.to(d_pre.dtype.element_ty), mask=inside)
        passed = gated(pre_second, CLAMP)
        d_first *= passed
        active *= passed
    tl.store(to_pre + offset, d_first.to(d_pre.dtype.element_ty), mask=inside)
    tl.store(
        to_hidden + offset, (active * factor[:, None]).to(hidden.dtype.element_ty), mask=inside
    )
    return tl.sum(tl.where(inside, d_hidden * active, 0.0), 1)
