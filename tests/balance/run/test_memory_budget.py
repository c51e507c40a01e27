"""A memory budget per rank: the same results, never more bytes, whatever the skew.

Tests that count rows also have a budget in rows (`budget_by_rows`)."""

from __future__ import annotations

import copy
import functools
import random
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from meshes import DIM, EXPERTS, compiled, every_rank, make_layer, on_mesh, tokens_of
from torch import Tensor, nn

from helpers import refused, thinned
from moesaic.balance import replication_policy
from moesaic.balance.budget import BudgetUse, MemoryBudget
from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import AbstractReplicationPolicy, programs_of
from moesaic.balance.run.calls import calls_by
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.experts import ModuleExperts
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.routing.capacity import Capacity
from moesaic.runtime.call_counts import CountedCall
from moesaic.runtime.routing_cache import checkpoint
from moesaic.testing.cases import Case, draw_case
from moesaic.testing.equivalence import budget_by_rows, failures, run_case
from moesaic_lab.balance.tracked_memory import Alive, Unwatched
from moesaic_lab.recorder import Recorder


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The sum of what budgets did, over all calls of a test."""
    found: Counter[str] = Counter()
    hold = MemoryBudget.hold

    def counted(self: MemoryBudget, *call: Any) -> Any:
        self.take()
        result = hold(self, *call)
        found.update(vars(self.use))
        return result

    monkeypatch.setattr(MemoryBudget, "hold", counted)
    return found


def with_budget(seed: int) -> Case:
    rng = random.Random(seed)
    case = draw_case(seed)
    may_replicate = case.plan.all_to_all != "multicast" and case.plan.gather_weights is None
    replication = rng.choice(["none", "spill", "eplb", "shadow"]) if may_replicate else "none"
    budget = rng.choice([1, 2, 3, 5, 8, 12])
    return replace(case, plan=replace(case.plan, memory_budget=budget, replication=replication))  # type: ignore[arg-type]


@pytest.mark.random
def test_random_plans_compute_the_same_under_any_budget(held: Counter[str]) -> None:
    wrong = {}
    for seed in range(1000, 1010):
        case = with_budget(seed)
        with suppress(InputError):  # what clashes with a budget, or with replication
            wrong[seed] = failures(case, run_case(case))
    assert len(wrong) > 6
    assert {seed: errors for seed, errors in wrong.items() if errors} == {}
    assert held["sliced_calls"] > 6


HASHED = MoE(DIM, 2 * DIM, 8, 1, router="hash").router.table[:, 0].tolist()  # type: ignore[index, union-attr]
ID_OF = [HASHED.index(expert) for expert in range(8)]
"""For each expert, a token id that the hash router sends to it."""


def ids(shares: list[int]) -> Tensor:
    """Return token ids of which the given numbers go to each expert."""
    return torch.tensor(
        [ID_OF[expert] for expert, count in enumerate(shares) for _ in range(count)]
    )


PLANS = {
    "s1": Plan(),
    "s2": Plan(schedule="s2"),
    "s3": Plan(schedule="s3", chunks=2),
    "ted": Plan(schedule="ted"),
    "baseline": Plan(schedule="baseline"),
    "multicast": Plan(all_to_all="multicast"),
    "hier2d": Plan(all_to_all="hier2d", order="early"),
    "peers": Plan(peer_groups=2),
    "spill": Plan(replication="spill"),
    "shadow": Plan(schedule="s2", replication="shadow", chunks=2),
}
FOUR = Grid(world=4, ep=4, ranks_per_node=2)
SKEWED = [200, 8, 8, 8, 8, 8, 8, 8]
"""Tokens of a rank for each expert; those of the first rank are 3.25 times the mean."""
TOKENS = 256
WIDTH = 32
ROUTED = 16 * TOKENS * WIDTH
"""Bytes that router, routing and the gradient of the input may take, which budgets do not count."""


def peak_bytes(plan: Plan, shares: list[int]) -> tuple[int, BudgetUse]:
    """Return the largest number of live bytes of a rank in a forward and backward pass, and what
    its budget did."""
    return _peak_bytes(plan, tuple(shares))


@functools.cache
def _peak_bytes(plan: Plan, shares: tuple[int, ...]) -> tuple[int, BudgetUse]:
    torch.manual_seed(0)
    whole = MoE(WIDTH, 2 * WIDTH, 8, 1, router="hash", losses=())

    def rank(transport: AbstractTransport) -> tuple[int, BudgetUse]:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(FOUR, Unwatched(transport)), compiled(plan, FOUR))
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        with Alive() as alive:
            layer(x, token_ids=ids(list(shares))).sin().sum().backward()
        calls = layer.on_mesh.calls
        return (
            alive.peak_bytes,
            calls.budget.take() if plan.memory_budget is not None else BudgetUse(),
        )  # type: ignore[attr-defined]

    found = run_ranks(FOUR.world, rank)
    assert all(use == found[0][1] for _, use in found), "all ranks count the same"
    return max(peak for peak, _ in found), found[0][1]


@pytest.mark.parametrize("plan", thinned(PLANS, every=3))
def test_no_rank_holds_more_bytes_than_the_budget_whatever_the_routing(plan: str) -> None:
    """The budget is 1.5 times a rank's bytes under balance. First the hottest of 4 ranks has 3.25
    times the mean, then all tokens go to one expert."""
    balanced, _ = peak_bytes(PLANS[plan], [TOKENS // 8] * 8)
    budget = balanced * 3 // 2
    limited = replace(PLANS[plan], memory_budget=budget)
    if plan == "s1":
        assert peak_bytes(limited, [TOKENS // 8] * 8) == (balanced, BudgetUse(calls=1)), (
            "a budget that is not needed"
        )
    for shares in (SKEWED, [TOKENS, *[0] * 7]):
        bounded, use = peak_bytes(limited, shares)
        assert (
            use.slices > 1 or use.rows_spilled > 0 or plan in ("spill", "shadow")
        )  # which keep within it by themselves
        assert bounded <= budget + ROUTED
        if plan in ("s1", "hier2d"):
            assert peak_bytes(PLANS[plan], shares)[0] > 1.3 * budget, (
                "without a budget it grows with the skew"
            )


def test_slices_that_fit_beside_each_other_are_not_run_again() -> None:
    """If there is room for much of what the call keeps, the experts of the busiest rank run only
    once for most rows."""
    whole, _ = peak_bytes(Plan(), [TOKENS, *[0] * 7])
    seen = {}
    for share in (0.35, 0.85):
        bounded, use = peak_bytes(Plan(memory_budget=int(share * whole)), [TOKENS, *[0] * 7])
        assert bounded <= share * whole + ROUTED
        seen[share] = use
    assert seen[0.85].kept_slices == seen[0.85].slices == 2, (
        "everything is kept, and nothing runs twice"
    )
    assert 1 <= seen[0.35].kept_slices < seen[0.35].slices


def test_what_a_call_holds_is_told_before_it_runs() -> None:
    """The predicted bytes of a plan's programs equal the live bytes while they run, under balance
    and under skew."""
    skewed = [160, 14, 14, 14, 14, 14, 13, 13]
    for name in ("s1", "s3", "baseline", "multicast", "hier2d", "spill"):
        plan = PLANS[name]
        for shares in ([TOKENS // 8] * 8, skewed) if name == "s1" else (skewed,):
            told = told_bytes(plan, shares)
            found, _ = peak_bytes(plan, shares)
            # Rows that one all-to-all brings stay where they arrive. A CPU gathers x and dy by
            # blocks, here one block.
            block = 2 * FOUR.world * sum(shares[:2]) * WIDTH * 4 if name == "s1" else 0
            assert 0.8 * told - ROUTED <= found <= told + ROUTED + block, name


def told_bytes(plan: Plan, shares: list[int]) -> float:
    """Return the predicted bytes of a call on the rank that holds most."""
    whole = MoE(WIDTH, 2 * WIDTH, 8, 1, router="hash", losses=())
    work = compiled(plan, FOUR)
    copies = np.tile(shares, (FOUR.world, 1))
    replicated = None
    if work.replicates:
        load = CallLoad(FOUR, copies, 8, 2 * WIDTH, WIDTH)
        policy = replication_policy(plan.replication)
        programs = programs_of(work, policy)
        decision = policy.start({name: each.plan for name, each in programs.items()}).choose(load)
        work = programs[decision.program]
        replicated = decision.replicated
    own = tuple(weight[:2] for weight in whole.experts.weights()[0])
    call = CountedCall(
        copies, copies.sum(1), 2 * WIDTH, lambda: whole.experts.sizes(own, torch.float32)
    )
    return float(MemoryBudget(work, 8).peak(work, replicated, call).max())


def test_a_budget_that_nothing_fits_is_refused_in_one_line_that_tells_one_that_fits() -> None:
    whole = MoE(DIM, 8, 8, 2, losses=()).double()
    x = tokens_of(0, 12)

    def run(budget: int) -> BudgetUse:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(Grid(world=1), NoTransport()), Plan(memory_budget=budget))
        layer(x)
        return layer.on_mesh.calls.budget.take()  # type: ignore[attr-defined, no-any-return]

    found = refused(run, 1000)
    assert re.search(
        r"plan\.memory_budget=1000: a call of 12 tokens on a rank holds \d+ bytes", found
    )
    enough = int(re.findall(r"holds (\d+) bytes", found)[0])
    assert run(enough).slices == 24
    refused(run, enough - 1)


def test_what_was_done_is_counted() -> None:
    """4 ranks send all their 6 tokens to expert 0 of rank 0: 24 rows, 18 more than the budget of 6
    rows."""
    grid = Grid(world=4, ep=4)
    whole = MoE(DIM, 8, 8, 1, router="hash", losses=()).double()

    def rank(transport: AbstractTransport, x: Tensor) -> list[BudgetUse]:
        layer = on_mesh(whole, grid, transport, Plan(memory_budget=6))
        layer(x, token_ids=ids([6]))
        found = [layer.on_mesh.calls.budget.take()]
        layer(x[:5], token_ids=ids([1, 0, 1, 0, 1, 0, 1, 1]))
        return [*found, layer.on_mesh.calls.budget.take(), layer.on_mesh.calls.budget.take()]

    of_ranks = every_rank(grid, rank)
    skewed, twice, nothing = of_ranks[0]  # type: ignore[misc]
    assert of_ranks == [[skewed, twice, nothing]] * 4
    assert (skewed.calls, skewed.sliced_calls, nothing) == (1, 1, BudgetUse())
    assert 4 <= skewed.slices <= 8
    assert 1 <= skewed.kept_slices < skewed.slices
    assert skewed.bytes_over > 10 * twice.bytes_over


class Everything(AbstractReplicationPolicy):
    """Replicates all copies that it can, or none."""

    def __init__(self, much: bool) -> None:
        self.much = much

    def decide(self, load: CallLoad) -> np.ndarray:
        replicated = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
        if self.much:
            replicated[:, :, 0] = load.copies * (load.home != 0)
        return replicated


@pytest.mark.parametrize(("schedule", "ranks_per_node"), [("s1", 2), ("s2", 4)])
def test_what_is_over_the_budget_is_spilled_before_anything_is_cut(
    schedule: str, ranks_per_node: int
) -> None:
    """All 240 copies go to rank 0, which has a budget of 150."""
    grid = Grid(world=4, ep=4, ranks_per_node=ranks_per_node)
    whole = MoE(DIM, 8, 4, 1, router="hash", losses=()).double()
    first = whole.router.table[:, 0].tolist().index(0)  # type: ignore[index, union-attr]

    def rank(transport: AbstractTransport) -> tuple[BudgetUse, Tensor, Tensor]:
        x = tokens_of(transport.rank, 60).requires_grad_()
        layer = copy.deepcopy(whole)
        plan = Plan(schedule=schedule, replication="spill", memory_budget=150)  # type: ignore[arg-type]
        layer.parallelize(Mesh(grid, transport), plan, calls=calls_by(Everything(much=False)))
        budget_by_rows(layer)
        y = layer(x, token_ids=torch.full((60,), first))
        y.sin().sum().backward()
        assert x.grad is not None
        return layer.on_mesh.calls.budget.take(), y.detach(), x.grad

    for number, (use, y, dx) in enumerate(run_ranks(4, rank)):
        assert (use.calls, use.sliced_calls) == (1, 0)
        assert use.bytes_over > 0
        assert 30 < use.rows_spilled <= 180
        x = tokens_of(number, 60).requires_grad_()
        expected = whole(x, token_ids=torch.full((60,), first))
        expected.sin().sum().backward()
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(dx, x.grad)


def test_where_nothing_is_replicated_a_call_is_that_of_the_plan_without_replication() -> None:
    grid = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)
    whole = make_layer("biases")

    def sent(
        transport: AbstractTransport, x: Tensor, replication: str, much: bool
    ) -> tuple[list[Any], Tensor]:
        recorder = Recorder(transport)
        layer = copy.deepcopy(whole)
        policy = None if replication == "none" else Everything(much)
        plan = Plan(schedule="s2", replication=replication, chunks=2)
        layer.parallelize(
            Mesh(grid, recorder), plan, calls=None if policy is None else calls_by(policy)
        )
        before = len(recorder.ranges)
        y = layer(x)
        y.sin().sum().backward()
        return [(each.length, each.messages) for each in recorder.ranges[before:]], y.detach()

    def rank(transport: AbstractTransport, x: Tensor) -> list[Any]:
        return [
            sent(transport, x, *how)
            for how in (("none", False), ("shadow", False), ("shadow", True))
        ]

    for (plain, y), (empty, y_empty), (replicated, y_replicated) in every_rank(grid, rank):  # type: ignore[misc]
        assert empty == plain, (
            "the same tasks, and the same messages of as many bytes between the same ranks"
        )
        assert torch.equal(y_empty, y)
        assert replicated != plain
        torch.testing.assert_close(y_replicated, y)


def test_backward_again_accumulation_and_checkpointing() -> None:
    grid = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)
    whole = make_layer()

    def rank(transport: AbstractTransport, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        found = []
        for plan in (Plan(schedule="s2"), Plan(schedule="s2", memory_budget=3)):
            layer = on_mesh(whole, grid, transport, plan)
            x.grad = None
            y = layer(x).sin().sum()
            y.backward(retain_graph=True)
            y.backward()
            checkpoint(layer, x).cos().sum().backward()
            assert x.grad is not None
            found.append((x.grad, layer.experts.w13.grad))
        return found  # type: ignore[return-value]

    for (dx, dw), (dx_sliced, dw_sliced) in every_rank(grid, rank):  # type: ignore[misc]
        torch.testing.assert_close(dx_sliced, dx)
        torch.testing.assert_close(dw_sliced, dw)


def test_slices_draw_the_same_random_numbers_again() -> None:
    """The layer is linear in x except for a dropout, so x times its gradient sums to y only if the
    masks are the same."""

    def dropping(dim: int, hidden: int, count: int) -> ModuleExperts:
        return ModuleExperts(
            lambda: nn.Sequential(nn.Linear(dim, dim, bias=False), nn.Dropout(0.5)), dim, count
        )

    torch.manual_seed(0)
    whole = MoE(DIM, 4, 8, 2, router="hash", experts=dropping, losses=()).double()
    x = tokens_of(0, 30).requires_grad_()
    y = on_mesh(whole, Grid(world=1), NoTransport(), Plan(memory_budget=7))(
        x, token_ids=torch.arange(30)
    )
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close((x * x.grad).sum(), y.sum())
    assert (y == 0).any()


def test_half_precision_gradients_are_summed_in_float32() -> None:
    """Of 300 equal slices: a sum in bfloat16 would stop growing at 256 times the value of a
    slice."""
    torch.manual_seed(0)
    whole = MoE(DIM, 8, EXPERTS, 1, router="hash", losses=()).bfloat16()
    x = torch.ones(300, DIM).bfloat16()
    found = []
    for plan in (Plan(), Plan(memory_budget=1)):
        layer = on_mesh(whole, Grid(world=1), NoTransport(), plan)
        layer(x, token_ids=torch.zeros(300, dtype=torch.int64)).sum().backward()
        found.append(layer.experts.w2.grad.float())  # type: ignore[union-attr, operator]
    assert (found[0] - found[1]).abs().max() <= 0.02 * found[0].abs().max()


def test_a_padded_capacity_clashes_with_a_budget() -> None:
    layer = on_mesh(make_layer(), Grid(world=1), NoTransport(), Plan(memory_budget=4))
    with pytest.raises(
        InputError, match=r"padded capacity clashes with memory_budget=4.*leave memory_budget unset"
    ):
        layer(tokens_of(0), capacity=Capacity.fixed(1.0, scope="rank", padded=True))
