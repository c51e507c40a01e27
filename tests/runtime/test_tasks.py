"""Tasks that need no other rank: the order and the precision of sums, and sorting rows by
expert."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.experts import GatedExperts
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes, Runs
from moesaic.program.task import Program
from moesaic.runtime.tasks import (
    Call,
    Environment,
    Indexed,
    IndexedRows,
    Indices,
    compute,
    placed,
    stable_order,
    take,
)

DIM = 4
ONE = Grid(world=1)


def runs_of(rows: list[int]) -> Runs:
    return Runs(np.array(rows, dtype=np.int64), np.ones(len(rows), dtype=np.int64))


def bases_of(rows: list[int]) -> Runs:
    return Runs(
        np.array(rows, dtype=np.int64), np.ones(len(rows), dtype=np.int64), is_constant=True
    )


def call_of(
    counts: list[int], tokens: int, chunks: int = 1, grid: Grid = ONE, **options: bool
) -> Call:
    copies = np.array([counts] * grid.world)
    sizes = CallSizes(grid, copies, np.array([tokens] * grid.world), chunks)
    return Call(rank=0, sizes=sizes, experts=GatedExperts(DIM, 6, len(counts)).double(), **options)


def run(program: Program, name: str, environment: Environment, call: Call) -> Environment:
    task = next(task for task in program.tasks if task.name == name)
    written = compute(task, {slot.name: slot for slot in program.slots}, environment, call)
    call.finish(task.writes)
    return {
        slot: value.in_order() if isinstance(value, IndexedRows) else value
        for slot, value in written.items()
    }


def column(values: list[int]) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


S1 = SCHEDULES["s1"]()


def test_sixteen_bit_rows_are_summed_in_float32() -> None:
    """The sum of 257 ones: accumulated in bfloat16 it would stop at 256."""
    call = call_of([257], 1)
    ones = torch.ones(257, DIM, dtype=torch.bfloat16)
    index = torch.zeros(257, 1, dtype=torch.int64)
    y = run(S1, "y_mine", {"z": ones, "index": index}, call)["y_mine"]
    assert isinstance(y, Tensor)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, torch.full((1, DIM), 257.0).bfloat16())
    many = torch.full((300, 1), 1.0, dtype=torch.bfloat16)
    assert float(placed([many], runs_of([0] * 300), 1, True, Indices())) == 300.0


def test_what_a_padding_token_holds_reaches_no_empty_row_and_what_that_holds_no_token() -> None:
    call = call_of([2, 3], 3, has_empty_rows=True)
    index = column([2, -1, 1, -1, -1])
    x = torch.randn(3, DIM, dtype=torch.float64)
    x[0] = float("nan")
    rows = run(S1, "rows", {"x_mine": x, "index": index}, call)["rows"]
    assert torch.equal(rows[[1, 3, 4]], torch.zeros(3, DIM, dtype=torch.float64))
    assert torch.equal(rows[[0, 2]], x[[2, 1]])
    rows[[1, 3, 4]] = float("inf")
    y = run(S1, "y_mine", {"z": rows, "index": index}, call)["y_mine"]
    assert torch.equal(y, torch.cat([torch.zeros(1, DIM, dtype=torch.float64), x[1:]]))


def test_placed_puts_rows_in_their_places_or_sums_them() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0]])
    apart = placed([rows[:1], rows[1:]], runs_of([2, 0, 1]), 3, False, Indices())
    assert apart.in_order().flatten().tolist() == [2.0, 4.0, 1.0]
    assert take(apart, runs_of([2, 0, 1]), Indices()) is apart.source, (
        "rows that leave as they came are not moved"
    )
    assert take(apart, runs_of([1, 0]), Indices()).flatten().tolist() == [4.0, 2.0]
    assert placed(
        [rows[:1], rows[1:]], runs_of([1, 1, 0]), 3, True, Indices()
    ).flatten().tolist() == [4.0, 3.0, 0.0]
    assert take(rows, runs_of([2, 2, 0]), Indices()).flatten().tolist() == [4.0, 4.0, 1.0]


@pytest.mark.parametrize("most", [1, 2**15 + 3, 2**16, 2**20])
def test_equal_numbers_keep_their_order(most: int) -> None:
    values = torch.randint(0, most, (999,), generator=torch.Generator().manual_seed(most))
    values[3] = most
    values[700] = most
    assert torch.equal(stable_order(values), values.argsort(stable=True))
    assert stable_order(values[:0]).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_tokens_rows_are_summed_and_tokens_without_rows_are_zero(dtype: torch.dtype) -> None:
    index = torch.tensor([3, 0, 3, 1, 0, 3]).unsqueeze(1)
    rows = torch.tensor([1.0, 2, 4, 8, 16, 32], dtype=dtype).unsqueeze(1).expand(6, 3).contiguous()
    at = Indexed(index, bases_of([0] * 6), 5, Indices(), has_empty=False)
    assert at.sum(rows)[:, 1].tolist() == [18.0, 8.0, 0.0, 37.0, 0.0]
    assert at.sum(rows).dtype == dtype


def test_rows_are_added_in_their_order() -> None:
    """The float32 sum of 1, 1e8 and -1e8 depends on the order."""
    at = Indexed(
        torch.zeros(3, 1, dtype=torch.int64), bases_of([0] * 3), 1, Indices(), has_empty=False
    )
    assert float(at.sum(torch.tensor([[1.0], [1e8], [-1e8]]))) == 0.0
    assert float(at.sum(torch.tensor([[1e8], [-1e8], [1.0]]))) == 1.0
