"""Bfloat16 pieces whose sum is nearly a float32 matrix, each of the remainder of those before it.

Eager: a cast, a difference and a check of NaN for each piece, and a concatenation. Here a value is
read once and its pieces are written where the products of `kernels/router_product.py` read them.
Nothing is saved. Bytes: 4 read and 2 for each piece written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.rows.varying import VARYING

BLOCK = 1024
"""The number of values that one program cuts."""


def pieces_by_triton(values: Tensor, order: tuple[int, ...], *, side_by_side: bool) -> Tensor:
    """Return the pieces of a matrix as one matrix, in which a piece may be written several times.

    Args:
        values: (rows, columns) float32.
        order: the number of the piece at each of P places.
        side_by_side: whether the places of a row follow one another; else the places are matrices,
            one below the other.

    Returns:
        (rows, P * columns) or (P * rows, columns) bfloat16.
    """
    values = values.contiguous()
    num_rows, columns = values.shape
    num_written = len(order)
    wide = (num_rows, num_written * columns)
    tall = (num_written * num_rows, columns)
    shape = wide if side_by_side else tall
    pieces = torch.empty(shape, dtype=torch.bfloat16, device=values.device)
    if values.numel():
        _pieces_kernel[(triton.cdiv(values.numel(), BLOCK),)](
            values,
            pieces,
            num_rows=num_rows,
            columns=columns,
            ORDER=order,
            NUMBER=num_written,
            PIECES=max(order) + 1,
            SIDE_BY_SIDE=side_by_side,
            BLOCK=BLOCK,
        )
    return pieces


@triton.jit(do_not_specialize=VARYING)
def _pieces_kernel(
    values: tl.tensor,
    pieces: tl.tensor,
    num_rows: tl.tensor,
    columns: tl.tensor,
    ORDER: tl.constexpr,
    NUMBER: tl.constexpr,
    PIECES: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Cut BLOCK values into PIECES pieces and write each at its positions in ORDER, NUMBER in
    all."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_rows.to(tl.int64) * columns
    rest = tl.load(values + place, mask=inside, other=0.0)
    # where the piece at position 0 is written, and how far apart positions are
    out_place = place
    step = num_rows.to(tl.int64) * columns
    if SIDE_BY_SIDE:
        out_place = place // columns * (NUMBER * columns) + place % columns
        step = columns.to(tl.int64)
    for number in tl.static_range(PIECES):
        piece = rest.to(tl.bfloat16)
        for position in tl.static_range(NUMBER):
            if ORDER[position] == number:
                tl.store(pieces + out_place + step * position, piece, mask=inside)
        rest = rest - piece.to(tl.float32)
        # NaN, left by an infinite or NaN value, which the first piece has: 0 in the further pieces
        rest = tl.where(rest != rest, 0.0, rest)
