"""The logits of a linear router from 16-bit tokens, accurate as in float32, without a float32 copy
of the tokens.

Saved for backward are the tokens in their own dtype and the matrix. On a GPU the products take
16-bit operands and add up in float32 (`torch.mm(out_dtype=)`); a float32 operand, the matrix or the
gradient of the logits, enters as a sum of 16-bit pieces of decreasing size. float16 pieces are
scaled by a power of four first, since float16 has few exponents; they are exact to 2^-25 of the
operand's largest magnitude. T tokens, D dim, E experts; for bfloat16, error relative to a float64
product of the same operands, in units of 2^-24, and bytes beyond operands and results:

    product                       pieces           error    bytes
    logits, 16-bit matrix         1                1        0
    logits, float32 matrix        3 of the matrix  1        6 D E + 12 T E
    tokens' gradient              2, 3 terms       2^8      8 T E; rounded to 16 bits: 2^13 or more
    16-bit matrix's gradient      2                2^8      4 T E; rounded to 16 bits
    float32 matrix's gradient     3                1        8 T E

Other devices convert blocks of `BLOCK` tokens to float32 one after another, which on a CPU is as
fast as one conversion.

Piece 0 of a matrix is its rounding to 16 bits, piece 1 that of what is left, and so on. An `order`
lists the pieces that are written, which lie below one another or side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.operator import operator
from moesaic.kernels.pick import capability_of, kind_of
from moesaic.kernels.products import product_in_dtype, rows_product, sum_product

BLOCK = 4096
"""The number of tokens that are converted to float32 at a time."""


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T` in float32, differentiable once.

    Args:
        x: (T, D), a 16-bit dtype.
        weight: (E, D), a 16-bit dtype or float32.
    """
    logits: Tensor = _RouterLogits.apply(x, weight)
    return logits


@operator("router_logits")
def router_forward(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits, (T, E) float32."""
    if not _takes_pieces(x.device):
        logits = x.new_empty(len(x), len(weight), dtype=torch.float32)
        matrix = weight.float()
        for block in _blocks(x):
            rows_product(x[block].float(), matrix.t(), logits[block])
        return logits
    order = _order_of(weight, x.dtype)
    pieces, unit = pieces_of(weight, x.dtype, order, side_by_side=False)
    logits = product(x, pieces.t())
    if len(order) > 1:
        # the columns of one piece's logits follow those of another's
        logits = logits.view(len(x), len(order), len(weight)).sum(1)
    if unit is not None:
        logits = logits * unit
    return logits


@torch.library.register_fake(router_forward.overload)
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


@operator("router_gradients", refuses_gradient=True)
def router_backward(
    x: Tensor, weight: Tensor, grad: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the matrix, in their dtypes; empty if not wanted."""
    if not _takes_pieces(x.device):
        return _gradients_by_blocks(x, weight, grad, wants_x=wants_x, wants_weight=wants_weight)
    # Side by side, so that both gradients read neighbours: that of the tokens the first pieces
    # (0, 1) or (0, 1, 0), that of the matrix the last ones (0, 1) or (1, 0, 2).
    order = (0, 1) if weight.dtype == x.dtype else (0, 1, 0, 2)
    grads, unit = pieces_of(grad, x.dtype, order, side_by_side=True)
    d_x = _d_tokens(grads, weight, x.dtype, unit) if wants_x else x.new_empty(0)
    if not wants_weight:
        return d_x, weight.new_empty(0)

    num_experts = len(weight)
    num_columns = grads.shape[1]
    num_read = min(len(order), 3) * num_experts  # the last two or three pieces, see above
    # these last columns, transposed, as a view
    last_pieces = grads.as_strided(
        (num_read, len(grads)), stride=(1, num_columns), storage_offset=num_columns - num_read
    )
    # (pieces, E, D), whose sum over the pieces is the gradient
    d_matrix = product(last_pieces, x).view(-1, *weight.shape).sum(0)
    if unit is not None:
        d_matrix = d_matrix * unit
    if weight.dtype != torch.float32:
        d_matrix = d_matrix.to(weight.dtype)
    return d_x, d_matrix


def _gradients_by_blocks(
    x: Tensor, weight: Tensor, grad: Tensor, *, wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return `router_backward` by float32 products of some tokens at a time."""
    d_x = x.new_empty(x.shape if wants_x else 0)  # packed, also if x is transposed
    matrix = weight.float()
    grad = grad.contiguous()
    d_matrix = torch.zeros_like(matrix) if wants_weight else weight.new_empty(0)
    for block in _blocks(x):
        if wants_x:
            d_x[block] = product_in_dtype(grad[block], matrix)
        if wants_weight:
            sum_product(grad[block], x[block].float(), d_matrix, adds=block.start > 0)
    return d_x, d_matrix.to(weight.dtype)


def _d_tokens(grads: Tensor, weight: Tensor, dtype: torch.dtype, unit: Tensor | None) -> Tensor:
    """Return the tokens' gradient, the product of the logits' gradient and the matrix.

    It is the sum of the products of their pieces, of which each is smaller than the one before: two
    products if the matrix has one piece, else three. A fourth would be below the rounding.

    Args:
        grads: the pieces of the logits' gradient, divided by `unit`, side by side.
        weight: the matrix.
        dtype: that of the tokens and of the pieces.
        unit: a power of two; None for 1.
    """
    # one product sums over the pieces: those of the gradient, (0, 1) or (0, 1, 0), side by side,
    # meet those of the matrix, (0, 0) or (0, 0, 1), below one another
    matrix_unit = None
    if weight.dtype == dtype:
        matrix_pieces = torch.cat([weight, weight])
    else:
        matrix_pieces, matrix_unit = pieces_of(weight, dtype, (0, 0, 1), side_by_side=False)
        grads = grads[:, : len(matrix_pieces)]  # the first three of four pieces
    d_x = product_in_dtype(grads, matrix_pieces)
    if unit is None:
        return d_x

    if matrix_unit is not None:
        unit = unit * matrix_unit
    # a power of four, whose square root a float16 holds
    root = unit.sqrt().to(dtype)
    return d_x * root * root


@torch.library.register_fake(router_backward.overload)
def _(
    x: Tensor, weight: Tensor, grad: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    d_x = x.new_empty(x.shape if wants_x else (0,))
    d_weight = weight.new_empty(weight.shape if wants_weight else (0,))
    return d_x, d_weight


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        logits: Tensor = router_forward(x, weight)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        wants_x, wants_weight = ctx.needs_input_grad
        d_x, d_weight = router_backward(*ctx.saved_tensors, grad, wants_x, wants_weight)
        return d_x if wants_x else None, d_weight if wants_weight else None


def pieces_of(
    values: Tensor, dtype: torch.dtype, order: tuple[int, ...], *, side_by_side: bool
) -> tuple[Tensor, Tensor | None]:
    """Cut a matrix into 16-bit pieces. The different pieces, added up and multiplied by a unit, are
    nearly the matrix.

    Args:
        values: (rows, columns). Infinite and NaN values are those of the first piece.
        dtype: dtype of the pieces. In float16 the unit is a power of four, above the largest
            magnitude.
        order: the number of the piece at each of P places; a piece may have several places. Each
            piece has 8 (bfloat16) or 11 further bits. A matrix in `dtype` is its own only piece,
            and the order (0,).
        side_by_side: whether the places of a row follow one another; else the places are matrices,
            one below the other.

    Returns:
        The pieces as one matrix, (rows, P * columns) or (P * rows, columns); and the unit, ()
        float32, None for 1.
    """
    unit = None
    if values.dtype == dtype:
        return values, unit
    if dtype == torch.bfloat16 and kind_of(values.device) == "triton":
        from moesaic.kernels.triton.rows.pieces import pieces_by_triton

        return pieces_by_triton(values, order, side_by_side=side_by_side), unit
    values = values.float()
    if dtype == torch.float16 and values.numel():
        exponent = torch.frexp(values.abs().amax()).exponent
        even_exponent = exponent + exponent % 2  # for a power of four
        unit = torch.exp2(even_exponent.float())
        values = values / unit
    pieces = [values.to(dtype)]
    for _ in range(max(order)):  # up to the highest number that has a place
        # what is left; the difference of infinities is NaN
        values = (values - pieces[-1]).nan_to_num(nan=0.0)
        pieces.append(values.to(dtype))
    dim = 1 if side_by_side else 0
    return torch.cat([pieces[number] for number in order], dim), unit


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of 16-bit matrices in float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return product_in_dtype(a.float(), b.float())


def _order_of(weight: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the pieces of the router's matrix: one if it has the tokens' dtype."""
    return (0,) if weight.dtype == dtype else (0, 1, 2)


def _takes_pieces(device: torch.device) -> bool:
    """Return whether products of 16-bit operands have float32 results: on NVIDIA GPUs."""
    return capability_of(device) > (0, 0)


def _blocks(x: Tensor) -> Iterator[slice]:
    """Yield the tokens that are converted at a time."""
    return (slice(first, first + BLOCK) for first in range(0, len(x), BLOCK))
