"""Tasks that need no other rank. Token rows: their places, sums in row order, and sorting rows by expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.experts import GatedExperts, PlainExperts
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.passes.split import split_capacity
from moesaic.program.sizes import CallSizes, Runs
from moesaic.program.task import Op, Program, Task
from moesaic.program.transpose import transpose
from moesaic.runtime.tasks import (
    Call,
    Environment,
    Indexed,
    IndexedRows,
    Indices,
    compute,
    kept,
    placed,
    stable_order,
    take,
)

DIM = 4
ONE = Grid(world=1)


def runs_of(rows: list[int]) -> Runs:
    return Runs(np.array(rows, dtype=np.int64), np.ones(len(rows), dtype=np.int64))


def bases_of(rows: list[int]) -> Runs:
    return Runs(np.array(rows, dtype=np.int64), np.ones(len(rows), dtype=np.int64), is_constant=True)


def call_of(counts: list[int], tokens: int, chunks: int = 1, grid: Grid = ONE, **options: bool) -> Call:
    copies = np.array([counts] * grid.world)
    sizes = CallSizes(grid, copies, np.array([tokens] * grid.world), chunks)
    return Call(rank=0, sizes=sizes, experts=GatedExperts(DIM, 6, len(counts)).double(), **options)


def run(program: Program, name: str, environment: Environment, call: Call) -> Environment:
    task = next(task for task in program.tasks if task.name == name)
    written = compute(task, {slot.name: slot for slot in program.slots}, environment, call)
    call.finish(task.writes)
    return {slot: value.in_order() if isinstance(value, IndexedRows) else value for slot, value in written.items()}


def column(values: list[int]) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


S1, BACK = SCHEDULES["s1"](), transpose(SCHEDULES["s1"]())
TOKENS = column([2, 0, 1, 2, 0])
"""Three tokens with five copies: expert 0 gets two of them, expert 1 three."""


def test_permute_copies_tokens_and_combine_sums_them() -> None:
    call, x = call_of([2, 3], 3), torch.randn(3, DIM, dtype=torch.float64)
    rows = run(S1, "rows", {"x_mine": x, "index": TOKENS}, call)["rows"]
    assert isinstance(rows, Tensor)
    assert torch.equal(rows, x[[2, 0, 1, 2, 0]])
    y = run(S1, "y_mine", {"z": rows, "index": TOKENS}, call)["y_mine"]
    torch.testing.assert_close(y, x * torch.tensor([[2.0], [1.0], [2.0]], dtype=torch.float64))


def test_empty_rows_are_zeros_and_go_nowhere() -> None:
    call, x = call_of([2, 3], 3, has_empty_rows=True), torch.randn(3, DIM, dtype=torch.float64)
    index = column([2, -1, 1, -1, -1])
    rows = run(S1, "rows", {"x_mine": x, "index": index}, call)["rows"]
    assert isinstance(rows, Tensor)
    assert torch.equal(rows[[0, 2]], x[[2, 1]])
    noise = torch.randn(5, DIM, dtype=torch.float64)
    y = run(S1, "y_mine", {"z": noise, "index": index}, call)["y_mine"]
    assert isinstance(y, Tensor)
    assert torch.equal(y, torch.stack([torch.zeros(DIM, dtype=torch.float64), noise[2], noise[0]]))


def test_what_a_padding_token_holds_reaches_no_empty_row() -> None:
    call, index = call_of([2, 3], 3, has_empty_rows=True), column([2, -1, 1, -1, -1])
    x = torch.randn(3, DIM, dtype=torch.float64)
    x[0] = float("nan")
    rows = run(S1, "rows", {"x_mine": x, "index": index}, call)["rows"]
    assert isinstance(rows, Tensor)
    assert torch.equal(rows[[1, 3, 4]], torch.zeros(3, DIM, dtype=torch.float64))
    rows[[1, 3, 4]] = float("inf")
    y = run(S1, "y_mine", {"z": rows, "index": index}, call)["y_mine"]
    assert isinstance(y, Tensor)
    assert y.isfinite().all()


def test_no_rows_and_no_tokens() -> None:
    call, nothing = call_of([0, 0], 0), torch.zeros(0, DIM, dtype=torch.float64)
    empty = torch.zeros(0, 1, dtype=torch.int64)
    assert run(S1, "rows", {"x_mine": nothing, "index": empty}, call)["rows"].shape == (0, DIM)  # type: ignore[union-attr]
    assert run(S1, "y_mine", {"z": nothing, "index": empty}, call)["y_mine"].shape == (0, DIM)  # type: ignore[union-attr]


def test_sixteen_bit_rows_are_summed_in_float32() -> None:
    """The sum of 257 ones: accumulated in bfloat16 it would stop at 256."""
    call = call_of([257], 1)
    ones, index = torch.ones(257, DIM, dtype=torch.bfloat16), torch.zeros(257, 1, dtype=torch.int64)
    y = run(S1, "y_mine", {"z": ones, "index": index}, call)["y_mine"]
    assert isinstance(y, Tensor)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, torch.full((1, DIM), 257.0).bfloat16())
    many = torch.full((300, 1), 1.0, dtype=torch.bfloat16)
    assert float(placed([many], runs_of([0] * 300), 1, True, Indices())) == 300.0


def test_placed_puts_rows_in_their_places_or_sums_them() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0]])
    apart = placed([rows[:1], rows[1:]], runs_of([2, 0, 1]), 3, False, Indices())
    assert apart.in_order().flatten().tolist() == [2.0, 4.0, 1.0]
    assert take(apart, runs_of([2, 0, 1]), Indices()) is apart.source, "rows that leave as they came are not moved"
    assert take(apart, runs_of([1, 0]), Indices()).flatten().tolist() == [4.0, 2.0]
    assert placed([rows[:1], rows[1:]], runs_of([1, 1, 0]), 3, True, Indices()).flatten().tolist() == [4.0, 3.0, 0.0]
    assert take(rows, runs_of([2, 2, 0]), Indices()).flatten().tolist() == [4.0, 4.0, 1.0]


def test_take_cuts_every_run_and_join_puts_it_together() -> None:
    program, call = split_capacity(SCHEDULES["s1"](), 3), call_of([4, 0, 5], 9, chunks=3)
    rows = torch.arange(9.0, dtype=torch.float64).unsqueeze(1).expand(9, DIM).contiguous()
    parts = run(program, "take-rows", {"rows": rows}, call)
    assert [part[:, 0].tolist() for part in parts.values()] == [[0, 4], [1, 5, 6], [2, 3, 7, 8]]  # type: ignore[index]
    z = {name.replace("rows", "z"): value for name, value in parts.items()}
    assert torch.equal(run(program, "join-z", z, call)["z"], rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(("power", "expected"), [(0, 1.0), (1, 2.0), (-1, 0.5)])
def test_scales_are_powers_of_the_groups_size(power: int, expected: float) -> None:
    grid = Grid(world=2, tp=2, ep=2)
    program = SCHEDULES["baseline"]()
    call = call_of([1, 1], 1, grid=grid)
    task = next(task for task in program.tasks if task.op is Op.SCALE)
    slots = {slot.name: slot for slot in program.slots}
    ones = torch.ones(1, DIM)
    found = compute(replace(task, power=power), slots, {task.reads[0]: ones}, call)[task.writes[0]]
    assert torch.equal(found, ones * expected)  # type: ignore[arg-type]


def test_adding_takes_rows_or_parameters_one_by_one() -> None:
    slots = {slot.name: slot for slot in S1.slots}
    task = Task(name="+", op=Op.ADD, reads=("a", "b"), writes=("c",), stage=S1.tasks[0].stage)
    a, b = torch.randn(2, 3, DIM)
    call = call_of([1], 1)
    assert torch.equal(compute(task, slots, {"a": a, "b": b}, call)["c"], a + b)  # type: ignore[arg-type]
    both = compute(task, slots, {"a": (a, b[0]), "b": (b, a[0])}, call)["c"]
    assert isinstance(both, tuple)
    assert torch.equal(both[0], a + b)
    assert torch.equal(both[1], a[0] + b[0])


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_expert_task_and_its_gradient_equal_autograd(weight_first: bool, bias: bool) -> None:
    program = SCHEDULES["s1"](bias)
    experts = PlainExperts(DIM, 6, 2, bias=bias).double()
    call = replace(call_of([2, 3], 5), experts=experts, weight_first=weight_first)
    rows, dy = torch.randn(2, 5, DIM, dtype=torch.float64)
    gates = torch.rand(5, 1, dtype=torch.float64)
    sharded, common = (tuple(w.detach() for w in weights) for weights in experts.weights())
    values: Environment = {"h": rows, "g": gates, "w": sharded, "b_shards": common}
    found = run(program, "out", values, call)
    h, g = rows.clone().requires_grad_(), gates.clone().requires_grad_()
    ends = torch.tensor([2, 5], dtype=torch.int32)
    expected = experts(h * g, None, ends) if weight_first else experts(h, g.squeeze(1), ends)
    torch.testing.assert_close(found["out"], expected.detach())
    expected.backward(dy)

    backward = run(transpose(program), "out'", values | {"out'": dy, kept("out"): found[kept("out")]}, call)
    torch.testing.assert_close(backward["h'"], h.grad)
    torch.testing.assert_close(backward["g'"], g.grad)
    torch.testing.assert_close(backward["w'"], tuple(experts.get_parameter(n).grad for n in experts.names[0]))
    if bias:
        torch.testing.assert_close(backward["b_shards'"], (experts.get_parameter("b2").grad,))


def test_a_gradient_task_finds_what_its_expert_kept() -> None:
    assert kept("out.0~1'") == kept("out.0~1") == "out.0~1*"


@pytest.mark.parametrize("most", [1, 2**15 + 3, 2**16, 2**20])
def test_equal_numbers_keep_their_order(most: int) -> None:
    values = torch.randint(0, most, (999,), generator=torch.Generator().manual_seed(most))
    values[3], values[700] = most, most
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
    at = Indexed(torch.zeros(3, 1, dtype=torch.int64), bases_of([0] * 3), 1, Indices(), has_empty=False)
    assert float(at.sum(torch.tensor([[1.0], [1e8], [-1e8]]))) == 0.0
    assert float(at.sum(torch.tensor([[1e8], [-1e8], [1.0]]))) == 1.0


def test_an_index_counts_from_where_its_origins_tokens_start() -> None:
    index = torch.tensor([1, 0, 1, -1]).unsqueeze(1)
    at = Indexed(index, bases_of([0, 2, 2, 0]), 4, Indices(), has_empty=True)
    assert at.places.tolist() == [1, 2, 3, 0]
    assert at.is_full.flatten().tolist() == [True, True, True, False]
    assert Indexed(index[:3], bases_of([0] * 3), 2, Indices(), has_empty=False).is_full is None
