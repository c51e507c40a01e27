"""Relocation: the programs, their sizes, and their movements."""

from __future__ import annotations

import re

import numpy as np
import pytest

from helpers import refused
from moesaic.balance.samples import Homes
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.layouts import LayoutIndex
from moesaic.program.passes.relocate import INDEX, relocate
from moesaic.program.plan import Plan
from moesaic.program.sample_layouts import Placed, PlacedIndex, placed_sizes
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Layout, Op, Program
from moesaic.program.transpose import transpose
from moesaic.program.validate import validate

GRID = Grid(world=4, ep=4, ranks_per_node=2)
PLANS = [
    Plan(),
    Plan(chunks=3, order="early"),
    Plan(peer_groups=2, all_to_all="pipelined"),
    Plan(chunks=2, peer_groups=2, all_to_all="hier2d", codec="int8", backward_codec="bf16"),
]
LENGTH = 8
HOMES = Homes(np.array([[0, 4], [1, 5], [2, 6], [3, 7]]))


def random_copies(grid: Grid, slots: int, num_experts: int, seed: int = 0) -> np.ndarray:
    """Return random counts (world, slots, num_experts), some of them 0."""
    return np.random.default_rng(seed).integers(0, 4, (grid.world, slots, num_experts))


def sizes_of(grid: Grid, copies: np.ndarray, after: Homes, chunks: int = 1) -> CallSizes:
    slots, num_experts = copies.shape[1:]
    before = Homes.start(grid.world, slots)
    shapes = LayoutIndex(grid, num_experts, slots, parts=chunks)
    return placed_sizes(grid, copies, PlacedIndex(shapes, lambda: before.targets(after), LENGTH))


def messages(program: Program, task_name: str, sizes: CallSizes) -> dict[tuple[int, int], int]:
    task = next(task for task in program.tasks if task.name == task_name)
    slots = {slot.name: slot for slot in program.slots}
    return {(source, target): rows for source, target, rows in messages_of(task, slots, sizes)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_pass_comes_before_or_after_every_other(plan: Plan, bias: bool) -> None:
    plain = compile_plan(plan, GRID, bias=bias)
    for program in (plain.logical, plain.forward, plain.backward):
        validate(relocate(program))
    one = transpose(relocate(plain.logical))
    other = relocate(transpose(plain.logical))
    assert (one.tasks, one.inputs, one.outputs) == (other.tasks, other.inputs, other.outputs)
    assert set(one.slots) == set(other.slots)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_places_travel_when_results_do_and_no_earlier(plan: Plan) -> None:
    """The new homes can be computed during all dispatches and the first experts."""
    tasks = relocate(compile_plan(plan, GRID).forward).tasks
    names = [task.name for task in tasks]
    first_expert = next(number for number, task in enumerate(tasks) if task.op is Op.EXPERT)
    slots = {slot.name: slot for slot in relocate(compile_plan(plan, GRID).forward).slots}
    needs = [
        number
        for number, task in enumerate(tasks)
        for name in task.writes
        if isinstance(slots[name].layout, Placed)
    ]
    assert first_expert < names.index(INDEX) == min(needs)


def test_results_go_from_the_experts_to_the_new_homes() -> None:
    copies = random_copies(GRID, 2, 8)
    sizes = sizes_of(GRID, copies, HOMES)
    program = relocate(compile_plan(Plan(), GRID).logical)
    expected: dict[tuple[int, int], int] = {}
    places: dict[tuple[int, int], int] = {}
    for sample in range(8):
        home = int(HOMES.rank[sample])
        for expert in range(8):
            rows = int(copies[sample // 2, sample % 2, expert])
            for table, source in ((expected, expert // 2), (places, sample // 2)):
                if source != home and rows:
                    table[(source, home)] = table.get((source, home), 0) + rows
    assert messages(program, "z", sizes) == expected
    assert messages(program, INDEX, sizes) == places
    assert messages(transpose(program), "z'", sizes) == {
        (b, a): rows for (a, b), rows in expected.items()
    }
    plain = sizes_of(GRID, copies, Homes.start(4, 2))
    assert messages(program, "h", sizes) == messages(program, "h", plain), (
        "dispatch does not ask where samples go"
    )


def test_chunks_are_samples() -> None:
    shapes = LayoutIndex(GRID, 4, 3, parts=2)
    chunks = [shapes.pieces(Layout(chunk=chunk), 0).chunk for chunk in (0, 1)]
    assert [sorted(set(chunk.tolist())) for chunk in chunks] == [[0], [1, 2]]
    sizes = sizes_of(GRID, random_copies(GRID, 3, 4), Homes.start(4, 3), chunks=2)
    assert sum(sizes.num_rows(Layout(chunk=chunk), 0) for chunk in (0, 1)) == sizes.num_rows(
        Layout(), 0
    )


def test_where_samples_go_is_not_asked_before_results_travel() -> None:
    def not_yet() -> tuple[np.ndarray, np.ndarray]:
        raise AssertionError("asked too early")

    index = PlacedIndex(LayoutIndex(GRID, 8, 2, parts=1), not_yet, LENGTH)
    sizes = placed_sizes(GRID, random_copies(GRID, 2, 8), index, units=4)
    program = relocate(compile_plan(Plan(), GRID).logical)
    assert messages(program, "h", sizes)
    assert sizes.num_rows(Layout(spread=("ep", "etp"), experts="rank"), 0)
    with pytest.raises(AssertionError, match="asked too early"):
        messages(program, "z", sizes)


@pytest.mark.parametrize(
    ("plan", "grid", "words"),
    [
        (
            Plan(all_to_all="multicast"),
            GRID,
            r"clashes with plan\.all_to_all=multicast.*choose another",
        ),
        (Plan(replication="shadow"), GRID, r"clashes with replication.*leave replication none"),
        (
            Plan(gather_weights=1),
            Grid(world=4, ep=2, etp=2),
            r"clashes with plan\.gather_weights.*leave it unset",
        ),
        (Plan(schedule="s2"), GRID, r"needs plan\.schedule=s1.*got s2(, backward)?: choose s1"),
        (Plan(schedule="s3"), GRID, r"needs plan\.schedule=s1.*choose s1"),
        (Plan(schedule="baseline"), GRID, r"needs plan\.schedule=s1.*choose s1"),
        (Plan(schedule="ted"), GRID, r"needs plan\.schedule=s1.*choose s1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_programs_that_deliver_otherwise_are_refused(plan: Plan, grid: Grid, words: str) -> None:
    compiled = compile_plan(plan, grid)
    for program in (compiled.logical, compiled.forward, compiled.backward):
        assert re.search(words, refused(relocate, program))


def test_the_pass_is_applied_once() -> None:
    assert "relocates already" in refused(
        lambda: relocate(relocate(compile_plan(Plan(), GRID).logical))
    )
