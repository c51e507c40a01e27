"""The sort of token copies by expert: a stable counting sort without host sync and without atomics.

Eager: `expert.argsort(stable=True)`, its inverse, `bincount`, `cumsum`. It is not differentiable
and saves nothing. There are three kernels: the first counts each expert's copies in each block of
copies; the second sums an expert's counts over the blocks; the third places the copies of each
block. Comparing all pairs of copies in a block tells how many earlier copies have the same expert.
Bytes: 4 R read twice, 8 R written, 12 E R / 128 for the blocks' counts. MegaBlocks and SonicMoE
also sort on the device; MegaBlocks uses a radix sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moesaic.kernels.operator import operator
from moesaic.kernels.triton.rows.varying import VARYING

BLOCK = 128
"""The number of copies that one program counts and places."""
SCANNED = 1024
"""The number of blocks whose counts are summed at a time."""


@operator("triton_sort")
def sort(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort token copies by expert; copies of one expert keep their order.

    Args:
        expert: (R,) int32 or int64, the expert of each copy, token after token. Copies with other
            numbers than 0 to E - 1 are not sent.
        num_experts: E.

    Returns:
        copy: (R,) int32, row i is copy `copy[i]`, of token `copy[i] // K`; 0 for rows from
            `ends[-1]` on.
        row: (R,) int32, copy i is in row `row[i]`; -1 for a copy that is not sent.
        ends: (E,) int32, one past the last row of each expert.
    """
    num_copies = len(expert)
    blocks = triton.cdiv(num_copies, BLOCK)
    ends = torch.zeros(num_experts, dtype=torch.int32, device=expert.device)
    copy = torch.zeros(num_copies, dtype=torch.int32, device=expert.device)
    row = torch.empty_like(copy)
    if num_copies == 0 or num_experts == 0:
        return copy, row, ends
    counts = ends.new_empty(num_experts, blocks)  # of each expert in each block of copies
    totals = torch.empty_like(ends)
    experts = triton.next_power_of_2(num_experts)  # a range in a kernel is a power of two
    _count_kernel[(blocks,)](
        expert, counts, num_copies, num_experts, blocks, BLOCK=BLOCK, EXPERTS=experts
    )
    _scan_kernel[(num_experts,)](counts, totals, blocks, SCANNED=SCANNED)
    _place_kernel[(blocks,)](
        expert,
        counts,
        totals=totals,
        copies=copy,
        rows=row,
        ends=ends,
        num_copies=num_copies,
        num_experts=num_experts,
        blocks=blocks,
        BLOCK=BLOCK,
        EXPERTS=experts,
    )
    return copy, row, ends


@torch.library.register_fake(sort.overload)
def _(expert: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    copy = expert.new_empty(expert.shape, dtype=torch.int32)
    return copy, torch.empty_like(copy), expert.new_empty(num_experts, dtype=torch.int32)


@triton.jit(do_not_specialize=VARYING)
def _count_kernel(
    expert: tl.tensor,
    counts: tl.tensor,
    num_copies: tl.tensor,
    num_experts: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Count each expert's copies in one block, into `counts`, (experts, blocks)."""
    block = tl.program_id(0)
    copy = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(expert + copy, mask=copy < num_copies, other=-1).to(tl.int32)
    number = tl.arange(0, EXPERTS)
    count = tl.sum((chosen[:, None] == number[None, :]).to(tl.int32), 0)
    tl.store(counts + number * blocks + block, count, mask=number < num_experts)


@triton.jit(do_not_specialize=VARYING)
def _scan_kernel(
    counts: tl.tensor, totals: tl.tensor, blocks: tl.tensor, SCANNED: tl.constexpr
) -> None:
    """Replace an expert's count in each block by the number of its copies in earlier blocks; write
    the expert's total. A program has one expert, a row of `counts`."""
    to_counts = counts + tl.program_id(0) * blocks
    total = 0
    for first in range(0, blocks, SCANNED):
        block = first + tl.arange(0, SCANNED)
        count = tl.load(to_counts + block, mask=block < blocks, other=0)
        tl.store(to_counts + block, tl.cumsum(count, 0) - count + total, mask=block < blocks)
        total += tl.sum(count, 0)
    tl.store(totals + tl.program_id(0), total)


@triton.jit(do_not_specialize=VARYING)
def _place_kernel(
    expert: tl.tensor,
    before: tl.tensor,
    totals: tl.tensor,
    copies: tl.tensor,
    rows: tl.tensor,
    ends: tl.tensor,
    num_copies: tl.tensor,
    num_experts: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Place the copies of one block: after those of smaller experts, of earlier blocks, and of
    earlier places in the block. `before` are the counts that `_scan_kernel` replaced."""
    block = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    total = tl.load(totals + number, mask=number < num_experts, other=0)
    end = tl.cumsum(total, 0)
    if block == 0:
        tl.store(ends + number, end, mask=number < num_experts)
    place = tl.arange(0, BLOCK)
    copy = block * BLOCK + place
    chosen = tl.load(expert + copy, mask=copy < num_copies, other=-1).to(tl.int32)
    is_sent = (chosen >= 0) & (chosen < num_experts)

    # Registers cannot be indexed, so the copies of smaller experts and the earlier copies of the
    # block are sums over comparisons.
    start = tl.sum(tl.where(number[None, :] < chosen[:, None], total[None, :], 0), 1)
    is_earlier = (chosen[:, None] == chosen[None, :]) & (place[None, :] < place[:, None])
    earlier = tl.sum(is_earlier.to(tl.int32), 1)
    row = start + earlier
    to_before = before + chosen.to(tl.int64) * blocks + block
    row = row + tl.load(to_before, mask=is_sent, other=0)
    tl.store(rows + copy, tl.where(is_sent, row, -1), mask=copy < num_copies)
    tl.store(copies + row, copy, mask=is_sent)
