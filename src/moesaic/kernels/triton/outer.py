"""Grouped outer products, for the gradients of the experts' matrices: each is a product over the
expert's own rows.

Eager: gather one side into expert order, then compute `p[a:b].T @ q[a:b]` for each expert. Here
either side may be read through the token index, which avoids the gathered copy (SonicMoE, Guo et
al. 2025, section 4.1). FLOPs: 2 R N K. Bytes: R N + R K + E N K elements at least. Each program
sums over all rows of its expert in order: no atomics, no partial results. An expert without rows
gets zeros. The reduction is not split, since many experts already give many programs. Programs of
the experts with most rows start first; otherwise they could run long after all others.

Full steps need no mask over rows, so a side in expert order is loaded by descriptor. An expert's
last rows, fewer than a step, are loaded by pointers. A descriptor would also load rows of the next
expert, and their infinities times zero would be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.parts import place
from moesaic.kernels.triton.rows.launch import as_operand, dot_precision, num_programs
from moesaic.kernels.triton.rows.tiles import Tile

RANKED = 16
"""The number of experts that one program ranks by their rows."""


class OuterForm(NamedTuple):
    """The constants for which the kernel of outer products is compiled."""

    is_wide: bool
    """Whether addresses of elements do not fit 32 bits."""
    precision: str
    """The `input_precision` of `tl.dot`."""
    block_n: int
    """Rows of a tile of the result, columns of `p`."""
    block_k: int
    """Columns of a tile of the result, columns of `q`."""
    block_r: int
    """Rows of `p` and `q` per step."""
    group: int
    """See `Tile.group`."""


def outer_products(
    p: Tensor,
    q: Tensor,
    ends: Tensor,
    tile: Tile,
    *,
    p_token: Tensor | None = None,
    q_token: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Multiply each expert's rows of `p` with its rows of `q`.

    Args:
        p: (R, N) in expert order, or with `p_token` (T, N), one row per token.
        q: (R, K) in expert order, or with `q_token` (T, K).
        ends: (E,) int32, one past the last row of each expert.
        tile: the tile of the product: rows and columns of the result, and how many expert rows a
            step takes.
        p_token: (R,) int32, the token of each row; None if `p` is in expert order.
        q_token: the same for `q`.
        order: (E,) int32, the experts in the order in which their programs start; None to call
            `longest_first`.

    Returns:
        (E, N, K) in the dtype of `p`, zero for an expert without rows.
    """
    out = p.new_empty(len(ends), p.shape[1], q.shape[1])
    if not out.numel():
        return out
    if order is None:
        order = longest_first(ends)
    _launch_outer(
        p.contiguous(), q.contiguous(), ends, tile, out, order, p_token=p_token, q_token=q_token
    )
    return out


def _launch_outer(
    p: Tensor,
    q: Tensor,
    ends: Tensor,
    tile: Tile,
    out: Tensor,
    order: Tensor,
    *,
    p_token: Tensor | None,
    q_token: Tensor | None,
) -> None:
    """Start the kernel that fills `out`, (E, height, width), where `outer_products` explains the
    other arguments. `p_steps` and `q_steps` load the rows of a step, by descriptors."""
    height = out.shape[1]
    width = out.shape[2]
    tiles_per_expert = triton.cdiv(height, tile.rows) * triton.cdiv(width, tile.columns)
    programs = num_programs(tile, len(ends) * tiles_per_expert, p.device)
    # if gathered, half of the stages load row numbers ahead of the rows
    is_gathered = p_token is not None or q_token is not None
    num_stages = 2 * tile.stages - 1 if is_gathered else tile.stages
    # None: a gathered side is loaded by pointers
    p_steps, p_by_descriptor = as_operand(
        p, (tile.depth, tile.rows), tile if p_token is None else None
    )
    q_steps, q_by_descriptor = as_operand(
        q, (tile.depth, tile.columns), tile if q_token is None else None
    )
    _outer_kernel[(programs,)](
        p,
        q,
        p_steps=p_steps if p_by_descriptor else None,
        q_steps=q_steps if q_by_descriptor else None,
        out=out,
        p_token=p_token,
        q_token=q_token,
        ends=ends,
        order=order,
        num_experts=len(ends),
        height=height,
        width=width,
        FORM=OuterForm(
            is_wide=max(p.numel(), q.numel()) >= 2**31,
            precision=dot_precision(p.dtype),
            block_n=tile.rows,
            block_k=tile.columns,
            block_r=tile.depth,
            group=tile.group,
        ),
        num_warps=tile.warps,
        num_stages=num_stages,
    )


def longest_first(ends: Tensor) -> Tensor:
    """Return the experts by decreasing number of rows, (E,) int32; experts with equally many keep
    their order."""
    order = torch.empty_like(ends)
    num_experts = len(ends)
    if num_experts:
        _order_kernel[(triton.cdiv(num_experts, RANKED),)](
            ends, order, num_experts, RANKED=RANKED, EXPERTS=triton.next_power_of_2(num_experts)
        )
    return order


@triton.jit
def _order_kernel(
    ends: tl.tensor,
    order: tl.tensor,
    num_experts: tl.tensor,
    RANKED: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Write each expert to its rank, the number of experts that come before it: those with more
    rows, or as many and a smaller number. A program ranks RANKED experts."""
    expert = tl.program_id(0) * RANKED + tl.arange(0, RANKED)
    rows = rows_of(ends, expert, num_experts)
    other = tl.arange(0, EXPERTS)
    others = rows_of(ends, other, num_experts)
    has_more = others[None, :] > rows[:, None]
    is_equal = (others[None, :] == rows[:, None]) & (other[None, :] < expert[:, None])
    is_before = (has_more | is_equal) & (other < num_experts)[None, :]
    rank = tl.sum(is_before.to(tl.int32), 1)
    tl.store(order + rank, expert, mask=expert < num_experts)


@triton.jit
def rows_of(ends: tl.tensor, expert: tl.tensor, num_experts: tl.tensor) -> tl.tensor:
    """Return the number of rows of experts; 0 for those that do not exist."""
    is_expert = expert < num_experts
    end = tl.load(ends + expert, mask=is_expert, other=0)
    return end - tl.load(ends + expert - 1, mask=is_expert & (expert > 0), other=0)


@triton.jit
def _outer_kernel(
    p: tl.tensor,
    q: tl.tensor,
    p_steps: tl.tensor,
    q_steps: tl.tensor,
    out: tl.tensor,
    p_token: tl.tensor,
    q_token: tl.tensor,
    ends: tl.tensor,
    order: tl.tensor,
    num_experts: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    """Compute tiles of the experts' products `p.T @ q`, (height, width) each. A program has one
    tile, or if persistent every `num_programs`-th. `p_steps` and `q_steps` are descriptors, None to
    load by pointers."""
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    GROUP: tl.constexpr = FORM.group
    height_tiles = tl.cdiv(height, BLOCK_N)
    width_tiles = tl.cdiv(width, BLOCK_K)
    per_expert = height_tiles * width_tiles
    for index in tl.range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0)):
        expert = tl.load(order + index // per_expert)
        height_tile, width_tile = place(index % per_expert, height_tiles, width_tiles, GROUP)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        first_n = height_tile * BLOCK_N
        first_k = width_tile * BLOCK_K

        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        # the steps before this row are full
        whole_steps_end = start + (end - start) // FORM.block_r * FORM.block_r
        left = Side(p, p_steps, p_token, first_n, height)
        right = Side(q, q_steps, q_token, first_k, width)
        for row in tl.range(start, whole_steps_end, FORM.block_r):
            a = step_tile(left, row, end, FORM, CUT=False, BLOCK=BLOCK_N)
            b = step_tile(right, row, end, FORM, CUT=False, BLOCK=BLOCK_K)
            total = tl.dot(tl.trans(a), b, total, input_precision=FORM.precision)
        if whole_steps_end < end:
            a = step_tile(left, whole_steps_end, end, FORM, CUT=True, BLOCK=BLOCK_N)
            b = step_tile(right, whole_steps_end, end, FORM, CUT=True, BLOCK=BLOCK_K)
            total = tl.dot(tl.trans(a), b, total, input_precision=FORM.precision)

        n = first_n + tl.arange(0, BLOCK_N)
        k = first_k + tl.arange(0, BLOCK_K)
        pointers = (
            out
            + expert.to(tl.int64) * height * width
            + n.to(tl.int64)[:, None] * width
            + k[None, :]
        )
        tl.store(
            pointers,
            total.to(out.dtype.element_ty),
            mask=(n < height)[:, None] & (k < width)[None, :],
        )


class Side(NamedTuple):
    """A factor of an outer product, and the columns of it that a tile takes."""

    x: tl.tensor
    steps: tl.tensor
    """Its descriptor; None to load it by pointers."""
    token: tl.tensor
    """The token of each row; None in expert order."""
    first: tl.tensor
    """The first column of the tile."""
    columns: tl.tensor
    """The number of columns of `x`."""


@triton.jit
def step_tile(
    side: Side,
    row: tl.tensor,
    end: tl.tensor,
    FORM: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Load a step's rows from `row` on, and BLOCK columns of them; zero beyond the columns and, if
    CUT, from row `end` on, where the expert's rows stop within the step."""
    if side.steps is not None and not CUT:
        tile = side.steps.load([row, side.first])
    else:
        step_row = row + tl.arange(0, FORM.block_r)
        column = side.first + tl.arange(0, BLOCK)
        inside = (column < side.columns)[None, :]
        if CUT:
            inside = (step_row < end)[:, None] & inside
        source = step_row
        if side.token is not None:
            to_token = side.token + step_row
            source = tl.load(to_token, mask=step_row < end, other=0) if CUT else tl.load(to_token)
        if FORM.is_wide:
            source = source.to(tl.int64)
        pointers = side.x + source[:, None] * side.columns + column[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile
