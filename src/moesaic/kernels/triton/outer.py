"""Grouped outer products: the gradient of an expert's matrix, a product over the expert's own rows.

Eager: gather one side into expert order, then `p[a:b].T @ q[a:b]` for each expert. Either side may be read through the
token index instead, so the gathered copy is not stored (SonicMoE, Guo et al. 2025, section 4.1). FLOPs: 2 R N K. Bytes:
R N + R K + E N K elements at least. Each program sums over all rows of its expert in order: no atomics, no partial
results; an expert without rows gets zeros. Many experts make many programs, so the reduction is not split; programs of the
longest experts start first, so that a skewed one is no tail behind all others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.triton.parts import place
from moesaic.kernels.triton.rows.launch import KernelLaunch, dot_precision
from moesaic.kernels.triton.rows.tiles import Tile


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
        tile: how the work is cut: rows and columns of the result, and how many expert rows a step takes.
        p_token: (R,) int32, the token that each row is.
        q_token: likewise.
        order: (E,) int32, the experts in the order in which their programs start, from `longest_first`; None to find it.

    Returns:
        (E, N, K) in the dtype of `p`, zero for an expert without rows.
    """
    out = p.new_empty(len(ends), p.shape[1], q.shape[1])
    if out.numel() == 0:
        return out
    p, q = p.contiguous(), q.contiguous()
    per_expert = triton.cdiv(out.shape[1], tile.rows) * triton.cdiv(out.shape[2], tile.columns)
    launch = KernelLaunch.of(tile, len(ends) * per_expert, p.device)
    _outer_kernel[(launch.programs,)](
        p, q, out, p if p_token is None else p_token, q if q_token is None else q_token, ends,
        longest_first(ends) if order is None else order, len(ends), out.shape[1], out.shape[2],
        P_GATHERED=p_token is not None, Q_GATHERED=q_token is not None,
        PRECISION=dot_precision(p.dtype), BLOCK_N=tile.rows, BLOCK_K=tile.columns, BLOCK_R=tile.depth, GROUP=tile.group,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def longest_first(ends: Tensor) -> Tensor:
    """Return the experts by falling number of rows, (E,) int32, from `ends`, (E,); equal ones as they stand."""
    rows = ends.diff(prepend=ends.new_zeros(1))
    return rows.argsort(descending=True, stable=True).to(torch.int32)


@triton.jit
def _outer_kernel(
    p: tl.tensor,
    q: tl.tensor,
    out: tl.tensor,
    p_token: tl.tensor,
    q_token: tl.tensor,
    ends: tl.tensor,
    order: tl.tensor,
    num_experts: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    P_GATHERED: tl.constexpr,
    Q_GATHERED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    height_tiles, width_tiles = tl.cdiv(height, BLOCK_N), tl.cdiv(width, BLOCK_K)
    per_expert = height_tiles * width_tiles
    for index in tl.range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0)):
        expert = tl.load(order + index // per_expert)
        height_tile, width_tile = place(index % per_expert, height_tiles, width_tiles, GROUP)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        n = height_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = width_tile * BLOCK_K + tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for row in tl.range(start, end, BLOCK_R):
            r = row + tl.arange(0, BLOCK_R)
            p_row, q_row = r, r
            if P_GATHERED:
                p_row = tl.load(p_token + r, mask=r < end, other=0)
            if Q_GATHERED:
                q_row = tl.load(q_token + r, mask=r < end, other=0)
            p_at = p + p_row.to(tl.int64)[:, None] * height + n[None, :]
            q_at = q + q_row.to(tl.int64)[:, None] * width + k[None, :]
            left = tl.load(p_at, mask=(r < end)[:, None] & (n < height)[None, :], other=0.0)
            right = tl.load(q_at, mask=(r < end)[:, None] & (k < width)[None, :], other=0.0)
            total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
        to = out + expert.to(tl.int64) * height * width + n.to(tl.int64)[:, None] * width + k[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=(n < height)[:, None] & (k < width)[None, :])
