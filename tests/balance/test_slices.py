"""Tests of slices: they contain every row once, stay within the budget on every rank, and are as
few as possible."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import numpy as np
import pytest

from helpers import pairwise
from moesaic.balance.budget import holders_of
from moesaic.balance.replication.bounded import (
    fitting_tables,
    limits,
    rows_for_weights,
    seconds,
    within_budget,
)
from moesaic.balance.replication.cost import CallLoad, replica_loads
from moesaic.balance.replication.spill import MOST_HELPED, overflow
from moesaic.balance.replication.tables import within
from moesaic.balance.slices import cut
from moesaic.errors import InputError
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Op
from replication_loads import computed, dense

GRIDS = {
    "ep 4": Grid(world=4, ep=4, ranks_per_node=2),
    "tp, ep and etp": Grid(world=8, tp=2, ep=2, etp=2, ranks_per_node=4),
    "replicas": Grid(world=8, ep=2, etp=2, ranks_per_node=2),
    "etp 4": Grid(world=4, tp=4, etp=4, ranks_per_node=2),
}
PLANS = {
    "s1": Plan(),
    "s2": Plan(schedule="s2", chunks=2),
    "s3": Plan(schedule="s3"),
    "baseline": Plan(schedule="baseline"),
    "ted": Plan(schedule="ted"),
    "r = 0": Plan(gather_weights=0),
    "r = 1": Plan(gather_weights=1),
    "r = 2": Plan(gather_weights=2),
    "peers": Plan(peer_groups=2),
    "lends": Plan(replication="spill", chunks=3),
    "replicates by peers": Plan(schedule="s2", replication="spill", peer_groups=2),
}
EXPERTS = 4


@functools.cache
def compiled(grid: str, plan: str) -> Compiled | None:
    """Return a compiled plan; None if it does not fit the grid."""
    with contextlib.suppress(InputError):
        return compile_plan(PLANS[plan], GRIDS[grid])
    return None


def fits(grid: str, plan: str, budget: int) -> bool:
    return compiled(grid, plan) is not None


def draw(work: Compiled, seed: int) -> tuple[np.ndarray, Replications | None]:
    """Return copies, with the first half of the experts much hotter, and a table of replicated
    copies."""
    rng = np.random.default_rng(seed)
    copies = rng.integers(0, 9, size=(work.grid.world, EXPERTS)) * np.array([6, 4, 1, 0])
    if not work.replicates:
        return copies, None
    replicated = rng.integers(0, 5, size=(*copies.shape, work.grid.ep)) * (
        rng.random((*copies.shape, work.grid.ep)) < 0.5
    )
    replicated[:, np.arange(EXPERTS), np.arange(EXPERTS) // (EXPERTS // work.grid.ep)] = 0
    before = np.cumsum(replicated, axis=2) - replicated
    return copies, Replications.of(
        np.minimum(replicated, np.maximum(copies[:, :, None] - before, 0))
    )


def rows_at_experts(
    work: Compiled, copies: np.ndarray, replicated: Replications | None
) -> np.ndarray:
    """Return the rows at each rank's experts in the expert tasks of the program itself,
    (world,)."""
    sizes = CallSizes(
        work.grid,
        copies,
        copies.sum(1),
        work.plan.chunks,
        replicated=replicated,
        units=4,
        shapes=work.shapes(EXPERTS),
    )
    layouts = [
        work.logical.slot(task.reads[0]).layout
        for task in work.logical.tasks
        if task.op is Op.EXPERT
    ]
    return np.array(
        [sum(sizes.num_rows(each, rank) for each in layouts) for rank in range(work.grid.world)]
    )


@pytest.mark.parametrize(
    ("grid", "plan", "budget"), pairwise(GRIDS, PLANS, (1, 7, 40, 10_000), fits=fits)
)
def test_no_slice_puts_more_than_the_budget_at_any_ranks_experts(
    grid: str, plan: str, budget: int
) -> None:
    work = compiled(grid, plan)
    copies, replicated = draw(work, seed=budget)
    slices = cut(holders_of(work, EXPERTS), copies, replicated, budget)
    whole = rows_at_experts(work, copies, replicated)
    by_slice = [
        rows_at_experts(work, slices.copies(n), slices.replicated(n))
        for n in range(slices.num_slices)
    ]
    assert np.max(by_slice) <= budget
    assert (np.sum(by_slice, axis=0) == whole).all(), "a row is missing, or there twice"
    assert slices.num_slices == max(1, -(-int(whole.max()) // budget)), "more slices than need be"
    alone = [int(slices.loads[rank]) for rank in range(work.grid.world)]
    assert max(alone) == whole.max()


@pytest.mark.parametrize("plan", ["s2", "replicates by peers"])
def test_the_slices_of_a_tensor_group_take_each_of_its_rows_once_and_in_order(plan: str) -> None:
    work = compiled("tp, ep and etp", plan)
    copies, replicated = draw(work, seed=3)
    slices = cut(holders_of(work, EXPERTS), copies, replicated, 5)
    for group in ((0, 1), (6, 7), (2,)):
        taken, origins = zip(*(slices.rows(number, group) for number in range(slices.num_slices)))
        assert all((np.diff(rows) > 0).all() for rows in taken)
        assert sorted(np.concatenate(taken).tolist()) == list(range(copies[list(group)].sum()))
        for number, origin in enumerate(origins):
            assert [int((origin == member).sum()) for member in group] == slices.copies(number)[
                list(group)
            ].sum(1).tolist()


def test_a_slice_by_hand() -> None:
    """Rank 1 gets 2 + 3 + 4 rows for its expert, in slices of 4 rows."""
    work = compile_plan(Plan(), Grid(world=3, ep=3))
    copies = np.array([[1, 2, 0], [0, 3, 1], [0, 4, 0]])
    slices = cut(holders_of(work, 3), copies, None, 4)
    assert slices.num_slices == 3
    assert [slices.copies(n).tolist() for n in range(3)] == [
        [[1, 2, 0], [0, 2, 1], [0, 0, 0]],
        [[0, 0, 0], [0, 1, 0], [0, 3, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 1, 0]],
    ]
    assert slices.rows(1, (1,))[0].tolist() == [2]
    assert slices.rows(0, (1,))[0].tolist() == [0, 1, 3]
    assert slices.loads.tolist() == [1, 9, 1]
    assert (slices.share_again, replace(slices, kept=2).share_again) == (5 / 9, 1 / 9)


def test_no_rows_are_one_slice() -> None:
    work = compile_plan(Plan(), GRIDS["ep 4"])
    nothing = np.zeros((4, EXPERTS), dtype=np.int64)
    slices = cut(holders_of(work, EXPERTS), nothing, None, 1)
    assert (slices.num_slices, slices.share_again, slices.copies(0).sum()) == (1, 0.0, 0)


def limits_of_ranks(load: CallLoad, replicated: Replications, budget: int) -> np.ndarray:
    """Return the rows that each rank may compute in addition to replicated weights, (world,)."""
    rows = np.zeros(len(load.copies), dtype=np.int64)
    for replica in replica_loads(load, Rates()):
        helped = within(replica, replicated).helped(load.num_experts, load.grid.ep)
        rows[replica.origins] = limits(replica, helped, budget)[:, None]
    return rows


def test_what_is_over_a_budget_goes_where_there_is_room() -> None:
    load = CallLoad(GRIDS["ep 4"], np.array([[40, 5, 0, 0]] * 4), 4, units=1, dim=8)
    given = Replications(*np.array([[3], [0], [3], [10]]))
    replicated = within_budget(load, given, 60)
    assert (computed(load, replicated) <= limits_of_ranks(load, replicated, 60)).all()
    assert dense(load, replicated).sum((0, 1))[3] >= 10, (
        "what the policy replicated stays replicated"
    )
    assert within_budget(load, given, 40) is None, "there are 180 rows for 4 places"
    twice = within_budget(load, given, 40, slices=2)
    assert twice is not None
    assert (computed(load, twice) <= 2 * limits_of_ranks(load, twice, 40)).all()
    assert computed(load, twice).max() > 40


def test_replicated_weights_take_room() -> None:
    """Helpers hold weights and gradients while gradients are computed; all hold messages, and homes
    more, in transfers."""
    load = CallLoad(Grid(world=4, ep=4), np.array([[40, 5, 0, 0]] * 4), 4, units=6, dim=30)
    assert rows_for_weights(load) == 5  # 540 numbers, where a row has 90 + 18
    assert limits_of_ranks(load, NOTHING, 100).tolist() == [100] * 4
    table = np.zeros((4, 4, 4), dtype=np.int64)
    table[:, 0, 3] = table[1, 0, 2] = 1
    replicated = Replications.of(table)
    assert limits_of_ranks(load, replicated, 100).tolist() == [100, 100, 90, 90], (
        "at home behind the peak of rows"
    )
    assert limits_of_ranks(load, replicated, 40).tolist() == [30, 40, 30, 30], (
        "(40 - 5 * (2 + 2)) * 3 / 2 at home"
    )
    relayed = replace(load, grid=GRIDS["ep 4"])
    assert limits_of_ranks(relayed, replicated, 40).tolist() == [37, 40, 30, 30], (
        "one message leaves home"
    )
    table[0, 0, 1] = 1
    replicated = Replications.of(table)
    assert limits_of_ranks(load, replicated, 20).tolist()[1:] == [10] * 3
    assert limits_of_ranks(load, replicated, 20)[0] < 0, "no room for the messages"


@pytest.mark.parametrize("slices", [1, 2])
def test_few_experts_are_replicated_to_stay_within_a_budget(slices: int) -> None:
    """Of one hot expert among small ones on an overloaded rank, only the hot one moves."""
    copies = np.zeros((4, 32), dtype=np.int64)
    copies[:, 8:] = 1
    copies[:, :8] = 2
    copies[:, 3] = 60
    load = CallLoad(GRIDS["ep 4"], copies, 32, units=1, dim=8)
    replicated = within_budget(load, NOTHING, 120 // slices, slices)
    assert replicated is not None
    assert set(replicated.expert.tolist()) == {3}


def test_slices_take_longer_than_a_whole_call_and_replication_less_than_slices() -> None:
    load = CallLoad(Grid(world=4, ep=4), np.array([[4000, 50, 0, 0]] * 4), 4, units=64, dim=64)
    costs = Rates(tflops=1e-3)
    whole = seconds(load, costs, NOTHING, 1, 0.0)
    in_slices = seconds(load, costs, NOTHING, 4, 0.75)
    assert 1.15 * whole < in_slices < 1.5 * whole
    tables = fitting_tables(load, NOTHING, 6000, 3)
    assert seconds(load, costs, tables[0], 1, 0.0) < 0.5 * whole
    assert len(tables) == 2
    assert computed(load, tables[1]).max() < computed(load, tables[0]).max(), (
        "where the budget allows more, a more even table"
    )


def test_a_helper_holds_weights_of_a_few_experts_only() -> None:
    """All experts of the hot rank are small; without a limit, one helper would need the weights of
    most of them."""
    experts = 4 * 64
    copies = np.zeros((4, experts), dtype=np.int64)
    copies[:, :64] = 1
    (replica,) = replica_loads(CallLoad(GRIDS["ep 4"], copies, experts, units=8, dim=8), Rates())
    replicated = overflow(replica, 64)
    assert replicated.helped(experts, 4).sum(0).tolist() == [
        0,
        MOST_HELPED,
        MOST_HELPED,
        MOST_HELPED,
    ]


def test_budgets_below_one_token_are_refused() -> None:
    for budget in (0, -4):
        with pytest.raises(
            InputError, match=rf"plan\.memory_budget={budget}: choose bytes per rank, at least 1"
        ) as caught:
            Plan(memory_budget=budget)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        InputError, match=r"plan\.memory_budget=8 clashes with plan\.all_to_all=deepep"
    ):
        compile_plan(Plan(memory_budget=8, all_to_all="deepep"), GRIDS["ep 4"])


def test_plans_that_cut_or_replicate_differently_are_told_apart() -> None:
    """The plans have the same programs, but run calls differently."""
    plans = [Plan(), Plan(memory_budget=8), Plan(replication="spill"), Plan(replication="shadow")]
    digests = {compile_plan(replace(plan), GRIDS["ep 4"]).digest for plan in plans}
    assert len(digests) == 4
