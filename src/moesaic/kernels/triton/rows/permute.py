"""The sum of each token's rows, from expert order into token order.

Eager: `zeros.index_add_(0, token, rows * weight)`. Rows are read through indices and every output
is written once, so it is deterministic without atomics. A token's copies are summed in float32, in
their order. FLOPs are negligible; R D elements are read and T D are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.operator import operator
from moesaic.kernels.triton.rows.varying import VARYING

WIDEST = 1024
"""The most columns that one program sums."""


@operator("triton_sum_tokens")
def sum_tokens(
    rows: Tensor,
    by_token: Tensor,
    starts: Tensor,
    weights: Tensor | None,
    per_token: int,
    dtype: torch.dtype,
) -> Tensor:
    """Sum each token's rows like `kernels.permute.sum_rows`; the arguments are a flattened
    `Dispatch`. Not differentiable.

    Args:
        rows: (R, D) in expert order, 16-bit or float32.
        by_token: (R,) int64 or int32, the rows of each token, token after token; -1 adds nothing.
        starts: (T,) int64, where each token's rows start in `by_token`.
        weights: (R,) in the order of `rows`, or None for 1.
        per_token: the number of rows of each token; 0 if it varies.
        dtype: dtype of the result.

    Returns:
        (T, D).
    """
    out = torch.empty(len(starts), rows.shape[1], dtype=dtype, device=rows.device)
    if out.numel():
        width = min(WIDEST, triton.next_power_of_2(rows.shape[1]))
        _sum_tokens_kernel[(len(out), triton.cdiv(rows.shape[1], width))](
            rows.contiguous(),
            by_token,
            starts=starts,
            weights=rows if weights is None else weights,  # without weights, not read
            out=out,
            num_tokens=len(out),
            num_rows=len(by_token),
            dim=rows.shape[1],
            WEIGHTED=weights is not None,
            PER_TOKEN=per_token,
            WIDTH=width,
        )
    return out


@torch.library.register_fake(sum_tokens.overload)
def _(
    rows: Tensor,
    by_token: Tensor,
    starts: Tensor,
    weights: Tensor | None,
    per_token: int,
    dtype: torch.dtype,
) -> Tensor:
    return rows.new_empty(starts.shape[0], rows.shape[1], dtype=dtype)


@triton.jit(do_not_specialize=VARYING)
def _sum_tokens_kernel(
    rows: tl.tensor,
    by_token: tl.tensor,
    starts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    dim: tl.tensor,
    WEIGHTED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Sum WIDTH columns of one token's rows."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    first = tl.load(starts + token)
    if PER_TOKEN > 0:
        for slot in tl.static_range(PER_TOKEN):
            total += weighted_row(
                rows,
                by_token,
                weights=weights,
                place=first + slot,
                column=column,
                dim=dim,
                WEIGHTED=WEIGHTED,
            )
    else:
        # one past the token's last place in `by_token`
        last = tl.load(starts + token + 1, mask=token + 1 < num_tokens, other=num_rows)
        for place in tl.range(first, last):
            total += weighted_row(
                rows,
                by_token,
                weights=weights,
                place=place,
                column=column,
                dim=dim,
                WEIGHTED=WEIGHTED,
            )
    tl.store(out + token * dim + column, total.to(out.dtype.element_ty), mask=column < dim)


@triton.jit
def weighted_row(
    rows: tl.tensor,
    by_token: tl.tensor,
    weights: tl.tensor,
    place: tl.tensor,
    column: tl.tensor,
    dim: tl.tensor,
    WEIGHTED: tl.constexpr,
) -> tl.tensor:
    """Load columns of row `by_token[place]` in float32, times the row's weight; zeros for row
    -1."""
    source = tl.load(by_token + place).to(tl.int64)
    inside = (source >= 0) & (column < dim)
    pointers = rows + source * dim + column
    values = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        values *= tl.load(weights + source, mask=source >= 0, other=0.0).to(tl.float32)
    return values
