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

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.activation import Clamp
from moesaic.kernels.triton.grouped import run_grouped, weights_of
from moesaic.kernels.triton.parts import Part, RowTile, Schedules, act, gated, halves
from moesaic.kernels.triton.rows.tiles import Tile, num_column_splits


class Activated(NamedTuple):
    """The tensors of the epilogue of `up`: both results, and the routing weights or None."""

    pre: tl.tensor
    hidden: tl.tensor
    weight: tl.tensor


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
    num_rows = len(x if token is None else token)
    parts, width = matrices.shape[1:3]
    pre = x.new_empty(num_rows, parts * width)
    hidden = x.new_empty(num_rows, width)
    run_grouped(
        x,
        matrices,
        ends,
        tile,
        activate_rows,
        Activated(pre, hidden, weight),
        product="up",
        transposed=True,
        token=token,
        bias=bias,
        activation=activation,
        is_gated=parts == 2,
        clamp=None if clamp is None else tuple(clamp.numbers),
        splits=num_column_splits(tile),
    )
    return pre, hidden


@triton.jit
def activate_rows(
    total: tl.tensor,
    rows: RowTile,
    column_tile: tl.tensor,
    columns: tl.tensor,
    tensors: Activated,
    FORM: tl.constexpr,
) -> None:
    """Write a tile of the pre-activations and of the hidden rows.

    Args:
        total: the tile of the product, of both matrices side by side with a gate.
        columns: I, the number of columns of each matrix's product.
    """
    SPLITS: tl.constexpr = FORM.splits
    pre_first = total
    pre_second = total  # not read without a gate
    if FORM.is_gated:
        pre_first, pre_second = halves(total)
    factor = weights_of(tensors.weight, rows, FORM)
    part = Part(rows, factor, column_tile * FORM.block_n, columns)
    write_in_splits(pre_first, pre_second, part, tensors, FORM, SPLITS)


@triton.jit
def write_in_splits(
    pre_first: tl.tensor,
    pre_second: tl.tensor,
    part: Part,
    tensors: Activated,
    FORM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Write columns of pre-activations and hidden rows in SPLITS parts, a power of two, by halving
    them again and again: in one part, erf spills registers."""
    if SPLITS == 1:
        write_part(pre_first, pre_second, part, tensors, FORM)
    else:
        REST: tl.constexpr = SPLITS // 2
        # `width` is that of the whole row; how many columns a part has, its pre-activations say
        next_part = Part(part.rows, part.factor, part.start + pre_first.shape[1] // 2, part.width)
        first_left, first_right = halves(pre_first)
        second_left = first_left
        second_right = first_right
        if FORM.is_gated:
            second_left, second_right = halves(pre_second)
        write_in_splits(first_left, second_left, part, tensors, FORM, REST)
        write_in_splits(first_right, second_right, next_part, tensors, FORM, REST)


@triton.jit
def write_part(
    pre_first: tl.tensor, pre_second: tl.tensor, part: Part, tensors: Activated, FORM: tl.constexpr
) -> None:
    """Write a part of pre-activations and hidden rows."""
    ACTIVATION: tl.constexpr = FORM.activation
    CLAMP: tl.constexpr = FORM.clamp
    PARTS: tl.constexpr = 2 if FORM.is_gated else 1
    pre = tensors.pre
    hidden = tensors.hidden
    width = part.width
    column = part.start + tl.arange(0, pre_first.shape[1])
    inside = part.rows.is_row[:, None] & (column < width)[None, :]
    first_element = part.rows.row.to(tl.int64)[:, None] * width
    # a row has the columns of the first pre-activation, then those of the second
    to_pre = pre + first_element * PARTS + column[None, :]
    rounded = pre_first.to(pre.dtype.element_ty)
    tl.store(to_pre, rounded, mask=inside)
    active = act(rounded.to(tl.float32), ACTIVATION, CLAMP) * part.factor[:, None]
    if FORM.is_gated:
        rounded = pre_second.to(pre.dtype.element_ty)
        tl.store(to_pre + width, rounded, mask=inside)
        active *= gated(rounded.to(tl.float32), CLAMP)
    to_hidden = hidden + first_element + column[None, :]
    tl.store(to_hidden, active.to(hidden.dtype.element_ty), mask=inside)
