"""A budget of rows at each rank's experts: the same numbers, never more rows, bounded memory whatever the skew."""

from __future__ import annotations

import copy
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from alive import AliveBytes, Unwatched
from meshes import DIM, EXPERTS, every_rank, make_layer, on_mesh, tokens_of
from torch import Tensor, nn

from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.experts import ModuleExperts
from moesaic.experts.stacked import GatedExperts
from moesaic.layer import MoE
from moesaic.plan import Plan
from moesaic.program.grid import Grid
from moesaic.routing.capacity import Capacity
from moesaic.runtime.balance.budget import BudgetUse, TokenBudget
from moesaic.runtime.routing_cache import checkpoint
from moesaic.testing.cases import Case, draw_case
from moesaic.testing.equivalence import failures, run_case
from moesaic_lab.recorder import Recorder


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What budgets did, over all calls of a test."""
    found: Counter[str] = Counter()
    hold = TokenBudget.hold

    def counted(self: TokenBudget, *call: Any) -> Any:
        self.take()
        result = hold(self, *call)
        found.update(vars(self.use))
        return result

    monkeypatch.setattr(TokenBudget, "hold", counted)
    return found


def with_budget(seed: int) -> Case:
    rng = random.Random(seed)
    case = draw_case(seed)
    may_replicate = case.plan.all_to_all != "multicast" and case.plan.gather_weights is None
    replication = rng.choice(["none", "spill", "least_loaded", "shadow"]) if may_replicate else "none"
    budget = rng.choice([1, 2, 3, 5, 8, 12])
    return replace(case, plan=replace(case.plan, token_budget=budget, replication=replication))  # type: ignore[arg-type]


@pytest.mark.random
def test_random_plans_compute_the_same_under_any_budget(held: Counter[str]) -> None:
    wrong = {}
    for seed in range(1000, 1080):
        case = with_budget(seed)
        with suppress(InputError):  # what clashes with a budget, or with replication
            wrong[seed] = failures(case, run_case(case))
    assert len(wrong) > 50
    assert {seed: errors for seed, errors in wrong.items() if errors} == {}
    assert held["sliced_calls"] > 50


class Watching(GatedExperts):
    """Experts that write down how many rows each run of theirs gets; runs for gradients count as well."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[int] = []

    def run(self, sharded: Any, common: Any, tokens: Tensor, *rest: Any) -> Any:
        self.seen.append(len(tokens))
        return super().run(sharded, common, tokens, *rest)


HASHED = MoE(DIM, 2 * DIM, 8, 1, router="hash").router.table[:, 0].tolist()  # type: ignore[index, union-attr]
ID_OF = [HASHED.index(expert) for expert in range(8)]
"""A token id that the hash router sends to each expert."""


def ids(shares: list[int]) -> Tensor:
    """Ids of tokens of which so many go to each expert."""
    return torch.tensor([ID_OF[expert] for expert, count in enumerate(shares) for _ in range(count)])


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
EIGHT = Grid(world=8, ep=8, ranks_per_node=4)
TOKENS, WIDTH = 256, 32
GRADIENTS = 3 * WIDTH * 2 * WIDTH * 4
"""Bytes of the gradients of the one expert that a rank has."""
SCRATCH = TOKENS * (3 * 2 * WIDTH + 2 * WIDTH) * 4
"""Bytes that the expert works in, of as many rows as the budget allows."""


def peak_bytes(plan: Plan, shares: list[int], grid: Grid = EIGHT) -> tuple[int, BudgetUse]:
    """Return the most bytes that a rank has alive in a forward and backward pass, and what its budget did."""
    torch.manual_seed(0)
    whole = MoE(WIDTH, 2 * WIDTH, 8, 1, router="hash", losses=())

    def rank(transport: AbstractTransport) -> tuple[int, BudgetUse]:
        layer = copy.deepcopy(whole)
        layer.parallelize(Mesh(grid, Unwatched(transport)), plan)
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        with AliveBytes() as alive:
            layer(x, token_ids=ids(shares)).sin().sum().backward()
        assert layer.on_mesh is not None
        calls = layer.on_mesh.calls
        return alive.peak, calls.budget.take() if plan.token_budget is not None else BudgetUse()  # type: ignore[attr-defined]

    found = run_ranks(grid.world, rank)
    assert all(use == found[0][1] for _, use in found), "all ranks count the same"
    return max(peak for peak, _ in found), found[0][1]


@pytest.mark.parametrize("plan", PLANS)
def test_memory_under_skew_is_that_of_balance(plan: str) -> None:
    """The budget is what a rank has under balance. MaxVio per rank 4: the hottest of 8 ranks has 5 times the mean."""
    balanced, _ = peak_bytes(PLANS[plan], [TOKENS // 8] * 8)
    limited = replace(PLANS[plan], token_budget=TOKENS)
    if plan == "s1":
        assert peak_bytes(limited, [TOKENS // 8] * 8) == (balanced, BudgetUse(calls=1)), "a budget that is not needed"
    maxvio_4 = [160, 14, 14, 14, 14, 14, 13, 13]
    for shares in (maxvio_4, [TOKENS, *[0] * 7])[: 2 if plan in ("s1", "spill") else 1]:
        bounded, use = peak_bytes(limited, shares)
        assert use.slices > 1 or use.rows_spilled > 0
        # Slices are summed in a copy per step. One may have all its rows from one of two peer groups.
        extra = 2 * GRADIENTS + SCRATCH // 2 if plan == "peers" else GRADIENTS
        assert bounded <= 1.2 * balanced + extra
    if plan in ("s1", "hier2d"):
        assert peak_bytes(PLANS[plan], maxvio_4)[0] > 2 * balanced, "without a budget it grows with the skew"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "grid", [Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2), Grid(world=4, ep=4, tp=2)], ids=str
)
def test_no_run_of_the_experts_sees_more_rows_than_the_budget(grid: Grid, plan: str) -> None:
    torch.manual_seed(0)
    whole = MoE(DIM, 8, 8, 2, experts=Watching, losses=()).double()  # type: ignore[arg-type]

    def rank(transport: AbstractTransport, x: Tensor) -> list[int]:
        layer = copy.deepcopy(whole)
        try:
            layer.parallelize(Mesh(grid, transport), replace(PLANS[plan], token_budget=5))
        except InputError:
            return []
        layer(x).sin().sum().backward()
        return layer.experts.seen  # type: ignore[return-value]

    seen = every_rank(grid, rank)
    assert max(map(max, filter(None, seen)), default=0) <= 5  # type: ignore[arg-type]
    if plan in ("s1", "s2", "s3", "baseline"):
        assert sum(map(len, seen)) > 8  # type: ignore[arg-type]


def test_what_was_done_is_counted() -> None:
    """4 ranks send all their 6 tokens to expert 0 of rank 0: 24 rows, of which 18 are over a budget of 6."""
    grid = Grid(world=4, ep=4)
    whole = MoE(DIM, 8, 8, 1, router="hash", losses=()).double()

    def rank(transport: AbstractTransport, x: Tensor) -> list[BudgetUse]:
        layer = on_mesh(whole, grid, transport, Plan(token_budget=6))
        layer(x, token_ids=ids([6]))
        assert layer.on_mesh is not None
        found = [layer.on_mesh.calls.budget.take()]
        layer(x[:5], token_ids=ids([1, 0, 1, 0, 1, 0, 1, 1]))
        return [*found, layer.on_mesh.calls.budget.take(), layer.on_mesh.calls.budget.take()]

    skewed = BudgetUse(calls=1, rows_over=18, sliced_calls=1, slices=4)
    twice = BudgetUse(calls=1, rows_over=2, sliced_calls=1, slices=2)  # rank 3 has experts 6 and 7: 8 rows
    assert every_rank(grid, rank) == [[skewed, twice, BudgetUse()]] * 4


class Everything(AbstractReplicationPolicy):
    """Replicates all copies that it can, or none."""

    def __init__(self, much: bool) -> None:
        self.much = much

    def decide(self, load: CallLoad) -> np.ndarray:
        replicated = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
        if self.much:
            replicated[:, :, 0] = load.copies * (load.home != 0)
        return replicated


@pytest.mark.parametrize("ranks_per_node", [2, 4])
@pytest.mark.parametrize("schedule", ["s1", "s2"])
def test_what_is_over_the_budget_is_spilled_before_anything_is_cut(schedule: str, ranks_per_node: int) -> None:
    """All 240 copies want rank 0, whose budget is 150; weights and messages count as 3 rows each."""
    grid = Grid(world=4, ep=4, ranks_per_node=ranks_per_node)
    whole = MoE(DIM, 8, 4, 1, router="hash", losses=()).double()
    first = whole.router.table[:, 0].tolist().index(0)  # type: ignore[index, union-attr]

    def rank(transport: AbstractTransport) -> tuple[BudgetUse, Tensor, Tensor]:
        x = tokens_of(transport.rank, 60).requires_grad_()
        layer = copy.deepcopy(whole)
        plan = Plan(schedule=schedule, replication="spill", token_budget=150)  # type: ignore[arg-type]
        layer.parallelize(Mesh(grid, transport), plan, Everything(much=False))
        y = layer(x, token_ids=torch.full((60,), first))
        y.sin().sum().backward()
        assert layer.on_mesh is not None
        assert x.grad is not None
        return layer.on_mesh.calls.budget.take(), y.detach(), x.grad

    for number, (use, y, dx) in enumerate(run_ranks(4, rank)):
        assert (use.calls, use.rows_over, use.sliced_calls) == (1, 90, 0)
        assert 90 < use.rows_spilled < 180
        x = tokens_of(number, 60).requires_grad_()
        expected = whole(x, token_ids=torch.full((60,), first))
        expected.sin().sum().backward()
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(dx, x.grad)


@pytest.mark.parametrize("schedule", ["s1", "s2"])
def test_where_nothing_is_replicated_a_call_is_that_of_the_plan_without_replication(schedule: str) -> None:
    grid = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)
    whole = make_layer("biases")

    def sent(transport: AbstractTransport, x: Tensor, replication: str, much: bool) -> tuple[list[Any], Tensor]:
        recorder = Recorder(transport)
        layer, policy = copy.deepcopy(whole), None if replication == "none" else Everything(much)
        plan = Plan(schedule=schedule, replication=replication, chunks=2)  # type: ignore[arg-type]
        layer.parallelize(Mesh(grid, recorder), plan, policy)
        before = len(recorder.ranges)
        y = layer(x)
        y.sin().sum().backward()
        return [(each.length, each.messages) for each in recorder.ranges[before:]], y.detach()

    def rank(transport: AbstractTransport, x: Tensor) -> list[Any]:
        return [sent(transport, x, *how) for how in (("none", False), ("shadow", False), ("shadow", True))]

    for (plain, y), (empty, y_empty), (replicated, y_replicated) in every_rank(grid, rank):  # type: ignore[misc]
        assert empty == plain, "the same tasks, and the same messages of as many bytes between the same ranks"
        assert torch.equal(y_empty, y)
        assert replicated != plain
        torch.testing.assert_close(y_replicated, y)


def test_backward_again_accumulation_and_checkpointing() -> None:
    grid = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)
    whole = make_layer()

    def rank(transport: AbstractTransport, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        found = []
        for plan in (Plan(schedule="s2"), Plan(schedule="s2", token_budget=3)):
            layer = on_mesh(whole, grid, transport, plan)
            x.grad = None
            y = layer(x).sin().sum()
            y.backward(retain_graph=True)
            y.backward()
            checkpoint(layer, x).cos().sum().backward()
            assert x.grad is not None
            found.append((x.grad, layer.experts.w1.grad))
        return found  # type: ignore[return-value]

    for (dx, dw), (dx_sliced, dw_sliced) in every_rank(grid, rank):  # type: ignore[misc]
        torch.testing.assert_close(dx_sliced, dx)
        torch.testing.assert_close(dw_sliced, dw)


def test_slices_draw_the_same_random_numbers_again() -> None:
    """The layer is linear in x but for a dropout, so that x times its gradient sums to y, with the same masks only."""

    def dropping(dim: int, hidden: int, count: int) -> ModuleExperts:
        return ModuleExperts(lambda: nn.Sequential(nn.Linear(dim, dim, bias=False), nn.Dropout(0.5)), dim, count)

    torch.manual_seed(0)
    whole = MoE(DIM, 4, 8, 2, router="hash", experts=dropping, losses=()).double()
    x = tokens_of(0, 30).requires_grad_()
    y = on_mesh(whole, Grid(world=1), NoTransport(), Plan(token_budget=7))(x, token_ids=torch.arange(30))
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close((x * x.grad).sum(), y.sum())
    assert (y == 0).any()


@pytest.mark.parametrize("kind", ["swiglu", "biases", "modules"])
def test_one_process_runs_in_slices_too(kind: str) -> None:
    whole = make_layer(kind)
    x, again = tokens_of(0, 20).requires_grad_(), tokens_of(0, 20).requires_grad_()
    sliced = on_mesh(whole, Grid(world=1), NoTransport(), Plan(token_budget=7))
    y = sliced(x)
    y.sin().sum().backward()
    expected = whole(again)
    expected.sin().sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, again.grad)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(sliced.get_parameter(name).grad, parameter.grad)
    assert sliced.on_mesh is not None
    assert sliced.on_mesh.calls.budget.take() == BudgetUse(calls=1, rows_over=33, sliced_calls=1, slices=6)


def test_half_precision_gradients_are_summed_in_float32() -> None:
    """Of 400 equal slices: a sum in bfloat16 would stand still at 256 times a slice's own."""
    torch.manual_seed(0)
    whole = MoE(DIM, 8, EXPERTS, 1, router="hash", losses=()).bfloat16()
    x = torch.ones(400, DIM).bfloat16()
    found = []
    for plan in (Plan(), Plan(token_budget=1)):
        layer = on_mesh(whole, Grid(world=1), NoTransport(), plan)
        layer(x, token_ids=torch.zeros(400, dtype=torch.int64)).sum().backward()
        found.append(layer.experts.w2.grad.float())  # type: ignore[union-attr, operator]
    assert (found[0] - found[1]).abs().max() <= 0.02 * found[0].abs().max()


def test_a_padded_capacity_clashes_with_a_budget() -> None:
    layer = on_mesh(make_layer(), Grid(world=1), NoTransport(), Plan(token_budget=4))
    with pytest.raises(InputError, match=r"padded capacity clashes with token_budget=4.*leave token_budget unset"):
        layer(tokens_of(0), capacity=Capacity.fixed(1.0, scope="rank", padded=True))
