"""The top-k choice of routers: the columns of the K largest entries of each row.

Eager: a deterministic top-k (in float64, to break ties). Here one kernel reads a row once and picks the largest remaining entry
K times; of equal entries it picks the lowest index. NaN ranks above every number, as in `routing/router.py`, so every row has K
different entries. T E elements are read and 4 T K bytes are written. Comparisons: K T E.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TAKEN = tl.constexpr(-0x80000000)
"""The place of an entry that cannot be chosen, below that of every number."""
VALUES = 4096
"""The number of entries that one program holds."""


@torch.library.custom_op("moesaic::triton_top_k", mutates_args=())
def top_k_columns(rank_by: Tensor, top_k: int) -> Tensor:
    """Return the columns of each row's largest entries.

    Args:
        rank_by: (T, E); compared in float32.
        top_k: K, at most E.

    Returns:
        (T, K) int32, largest first; of equal entries the lowest column, and NaN before every number.
    """
    num_rows, num_columns = rank_by.shape
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=rank_by.device)
    if num_rows:
        columns = triton.next_power_of_2(num_columns)
        rows = max(1, VALUES // columns)
        _top_k_kernel[(triton.cdiv(num_rows, rows),)](
            rank_by.contiguous(), chosen, num_rows, num_columns,
            TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    return chosen


@top_k_columns.register_fake
def _(rank_by: Tensor, top_k: int) -> Tensor:
    return rank_by.new_empty(rank_by.shape[0], top_k, dtype=torch.int32)


@triton.jit
def place_of(value: tl.tensor) -> tl.tensor:
    """Return int32 in the order of float32 values: -0 equals 0, and NaN is above all numbers."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_at(place: tl.tensor) -> tl.tensor:
    """Return the float32 values at the places that `place_of` returned."""
    return (place ^ ((place >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def first_best(place: tl.tensor, num_columns: tl.tensor, COLUMNS: tl.constexpr) -> tl.tensor:
    """Return the first column with the largest place of each row of (rows, COLUMNS)."""
    is_best = place == tl.max(place, 1)[:, None]
    column = tl.arange(0, COLUMNS)
    return tl.minimum(tl.min(tl.where(is_best, column[None, :], COLUMNS), 1), num_columns - 1)


@triton.jit
def _top_k_kernel(
    rank_by: tl.tensor,
    chosen: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    read_pointers = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    value = tl.load(rank_by + read_pointers, mask=inside, other=float("-inf")).to(tl.float32)
    place = tl.where(inside, place_of(value), TAKEN)
    best = tl.zeros((ROWS, SLOTS), tl.int32)
    for k in tl.static_range(TOP_K):
        index = first_best(place, num_columns, COLUMNS)
        place = tl.where(column[None, :] == index[:, None], TAKEN, place)
        best = tl.where(slot[None, :] == k, index[:, None], best)
    write_pointers = row.to(tl.int64)[:, None] * TOP_K + slot[None, :]
    tl.store(chosen + write_pointers, best, mask=(row < num_rows)[:, None] & (slot < TOP_K)[None, :])
