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

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.activation import Clamp
from moesaic.kernels.triton.grouped import run_grouped, weights_of
from moesaic.kernels.triton.parts import (
    Part,
    RowTile,
    Schedules,
    act,
    gated,
    gated_slope,
    halves,
    slope,
)
from moesaic.kernels.triton.rows.tiles import Tile, num_column_splits


class ActivationGrad(NamedTuple):
    """The tensors of the epilogue of `down_grad`, which describes them."""

    pre: tl.tensor
    d_pre: tl.tensor
    hidden: tl.tensor
    parts: tl.tensor
    """The partial sums of the routing weights' gradients, one for each column tile."""
    weight: tl.tensor


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
    is_gated = pre.shape[1] > width
    # formulas that need many registers, see `num_column_splits`
    is_long = is_gated or activation.startswith("gelu")
    run_grouped(
        dy,
        down,
        ends,
        tile,
        activation_grad,
        ActivationGrad(pre.contiguous(), d_pre, hidden, parts, weight),
        product="down_grad",
        transposed=False,
        token=token,
        activation=activation,
        is_gated=is_gated,
        clamp=None if clamp is None else tuple(clamp.numbers),
        splits=num_column_splits(tile, is_long=is_long),
    )
    return d_pre, hidden, parts


@triton.jit
def activation_grad(
    d_hidden: tl.tensor,
    rows: RowTile,
    column_tile: tl.tensor,
    columns: tl.tensor,
    tensors: ActivationGrad,
    FORM: tl.constexpr,
) -> None:
    """Write a tile of d(pre) and of the weighted hidden rows, and the tile's partial sum of each
    row's weight gradient.

    Args:
        d_hidden: the tile of the product, (rows, columns): the gradient of the hidden rows.
        columns: I, the number of columns of the product.
    """
    BLOCK_N: tl.constexpr = FORM.block_n
    SPLITS: tl.constexpr = FORM.splits
    factor = weights_of(tensors.weight, rows, FORM)
    part = Part(rows, factor, column_tile * BLOCK_N, columns)
    d_row = grad_in_splits(d_hidden, part, tensors, FORM, SPLITS)
    column_tiles = tl.cdiv(columns, BLOCK_N)
    to_parts = tensors.parts + rows.row.to(tl.int64) * column_tiles + column_tile
    tl.store(to_parts, d_row, mask=rows.is_row)


@triton.jit
def grad_in_splits(
    d_hidden: tl.tensor,
    part: Part,
    tensors: ActivationGrad,
    FORM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """Write columns of d(pre) and of the weighted hidden rows; return their part of each row's
    weight gradient.

    This is done in SPLITS parts of the columns, a power of two, by halving them again and again: in
    one part, the operands do not fit the registers.
    Parts are read by pairs: no load moves before an earlier store, so each part that is read alone
    waits for memory once more.
    """
    if SPLITS == 1:
        pre = load_pre(part, tensors, FORM, d_hidden.shape[1])
        d_row = write_grads(d_hidden, pre, part, tensors, FORM)
    else:
        HALF: tl.constexpr = d_hidden.shape[1] // 2
        REST: tl.constexpr = SPLITS // 2
        # `width` is that of the whole row; how many columns a part has, its d_hidden says
        next_part = Part(part.rows, part.factor, part.start + HALF, part.width)
        left, right = halves(d_hidden)
        if SPLITS == 2 and FORM.clamp is None:  # a clamp leaves no registers for a second part
            pre = load_pre(part, tensors, FORM, HALF)
            next_pre = load_pre(next_part, tensors, FORM, HALF)
            d_row = write_grads(left, pre, part, tensors, FORM)
            d_row += write_grads(right, next_pre, next_part, tensors, FORM)
        else:
            d_row = grad_in_splits(left, part, tensors, FORM, REST)
            d_row += grad_in_splits(right, next_part, tensors, FORM, REST)
    return d_row


@triton.jit
def load_pre(
    part: Part, tensors: ActivationGrad, FORM: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load columns of both pre-activations in their own dtype; without a gate, the same twice."""
    PARTS: tl.constexpr = 2 if FORM.is_gated else 1
    column = part.start + tl.arange(0, COLUMNS)
    inside = part.rows.is_row[:, None] & (column < part.width)[None, :]
    row = part.rows.row.to(tl.int64)
    # a row has the columns of the first pre-activation, then those of the second
    places = tensors.pre + row[:, None] * (part.width * PARTS) + column[None, :]
    first = tl.load(places, mask=inside, other=0.0)
    second = first
    if FORM.is_gated:
        second = tl.load(places + part.width, mask=inside, other=0.0)
    return first, second


@triton.jit
def write_grads(
    d_hidden: tl.tensor, pre: tl.tuple, part: Part, tensors: ActivationGrad, FORM: tl.constexpr
) -> tl.tensor:
    """Write a part of d(pre) and of the weighted hidden rows; return its part of each row's weight
    gradient."""
    ACTIVATION: tl.constexpr = FORM.activation
    CLAMP: tl.constexpr = FORM.clamp
    PARTS: tl.constexpr = 2 if FORM.is_gated else 1
    column = part.start + tl.arange(0, d_hidden.shape[1])
    inside = part.rows.is_row[:, None] & (column < part.width)[None, :]
    first_element = part.rows.row.to(tl.int64)[:, None] * part.width
    to_pre = tensors.d_pre + first_element * PARTS
    to_hidden = tensors.hidden + first_element
    factor = part.factor[:, None]
    dtype = tensors.pre.dtype.element_ty
    offset = column[None, :]

    # hidden = active, with a gate times `multiplied`; d_hidden is still without the factor
    pre_first = pre[0].to(tl.float32)
    active = act(pre_first, ACTIVATION, CLAMP)
    d_active = d_hidden * factor
    d_first = d_active * slope(pre_first, ACTIVATION, CLAMP)
    if FORM.is_gated:
        pre_second = pre[1].to(tl.float32)
        d_second = gated_slope(d_active * active, pre_second, CLAMP)
        tl.store(to_pre + offset + part.width, d_second.to(dtype), mask=inside)
        multiplied = gated(pre_second, CLAMP)
        d_first *= multiplied
        active *= multiplied
    tl.store(to_pre + offset, d_first.to(dtype), mask=inside)
    tl.store(to_hidden + offset, (active * factor).to(dtype), mask=inside)
    return tl.sum(tl.where(inside, d_hidden * active, 0.0), 1)
