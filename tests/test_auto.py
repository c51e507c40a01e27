"""`plan="auto"`: all ranks switch the layers to the plan with the fastest steps, and results do not
change.

Times are made up: each test advances a clock by a given time for the running plan.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import DIM, HIDDEN, make_layer, tokens_of
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from helpers import refused
from moesaic import Capacity, Mesh, MoE, Plan, auto, average_gradients, in_flight
from moesaic.auto import AutoPlan
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.parallel import parallelize_model
from moesaic.program.grid import Grid
from moesaic.runtime.routing_cache import checkpoint
from worlds import on_ranks

GRID = Grid(world=2, ep=2, ranks_per_node=1)
OTHERS = [Plan(chunks=2), Plan(schedule="s2"), Plan(schedule="s3")]
"""The candidates besides the first plan, fewer than by default: races are short, and only real
processes search for them."""
LIMIT = 52
"""Number of steps: two to warm up, 20 of a race of four plans, 20 in which
the winner and the first plan take turns, and a few to notice a change."""
Seconds = Callable[[int, int, int], float]
"""Returns the seconds of a step, given the step's number, the plan's number and the rank."""


@pytest.fixture(autouse=True, scope="module")
def _few_plans() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "assumed_plans", lambda job, grid, first, **_: [first, *OTHERS])
        yield


class Run:
    """Two layers on a mesh with a manual clock."""

    def __init__(self, mesh: Mesh, seconds: Seconds, *, recompute: bool = False) -> None:
        self.mesh = mesh
        self.seconds = seconds
        self.recompute = recompute
        self.time = 0.0
        self.model = nn.Sequential(
            make_layer(seed=0), nn.Linear(DIM, DIM).double(), make_layer(seed=1)
        )
        torch.manual_seed(0)
        self.alone = nn.Parameter(torch.zeros(1))
        parallelize_model(self.model, mesh, "auto", broadcast=True)
        self.auto = AutoPlan.of(mesh)
        self.auto.clock = lambda: self.time
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.ran: list[int | None] = []
        self.losses: list[Tensor] = []

    def step(self, micro: int = 1) -> None:
        """Run a step of several micro-batches; other optimizers step in between."""
        for number in range(micro):
            x = tokens_of(
                self.mesh.grid.coordinate(self.mesh.rank, "dp"), seed=10 * len(self.ran) + number
            )
            y = checkpoint(self.model, x.requires_grad_()) if self.recompute else self.model(x)
            loss = y.square().mean()
            loss.backward()
            self.losses.append(loss.detach())
            self.alone.grad = torch.ones(1)
            torch.optim.SGD([self.alone], lr=0.1).step()
        average_gradients(self.model, self.mesh)
        plans = {layer.on_mesh.compiled.plan for layer in (self.model[0], self.model[2])}
        assert len(plans) == 1, "all layers run under one plan"
        table = self.auto.table
        running = None if table is None else table.running
        if table is not None and running is not None:
            assert table.plans[running] == plans.pop()
        self.time += self.seconds(len(self.ran), running or 0, self.mesh.rank)
        self.ran.append(running)
        self.optimizer.step()
        self.optimizer.zero_grad()


def race(mesh: Mesh, seconds: Seconds, steps: int, **options: Any) -> dict[str, Any]:
    run = Run(mesh, seconds, **options)
    for number in range(steps):
        run.step(micro=1 + number % 16 // 15)
    return {
        "ran": run.ran,
        "losses": torch.stack(run.losses),
        "said": run.auto.said,
        "plans": run.auto.table.plans,
    }


def slowest_last(_: int, plan: int, rank: int) -> float:
    """The last candidate is fastest by the slowest rank's times; by other ranks' times another one
    would be."""
    return 2.0 - 0.1 * plan if rank == 1 else 0.2 + 0.1 * plan


Races = Callable[[Grid, bool], tuple[list[dict[str, Any]], list[str]]]


@pytest.fixture(scope="module")
def raced() -> Races:
    """Race on a mesh, with or without recomputation, once for all tests; return each rank's final
    state and the log."""

    @functools.cache
    def on(grid: Grid, recompute: bool) -> tuple[list[dict[str, Any]], list[str]]:
        logged: list[str] = []
        handler = logging.Handler(logging.WARNING)
        logger = logging.getLogger("moesaic")
        handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        try:
            steps = LIMIT + 10
            found = run_ranks(
                grid.world,
                lambda each: race(Mesh(grid, each), slowest_last, steps, recompute=recompute),
            )
        finally:
            logger.removeHandler(handler)
        return found, logged

    return on


GRIDS = [GRID, pytest.param(Grid(world=4, tp=2, ep=2, etp=2), marks=pytest.mark.random)]


@pytest.mark.parametrize("grid", GRIDS, ids=["ep", "tp and etp"])
def test_layers_end_on_the_plan_that_is_fastest_for_the_slowest_rank_and_the_first_says_one_line(
    grid, raced
):
    found, (line,) = raced(grid, False)
    assert line.startswith("plan auto: ")
    assert "\n" not in line
    plans = found[0]["plans"]
    assert list(plans) == [Plan(), *OTHERS]
    for of_rank in found:
        assert of_rank["ran"] == found[0]["ran"], "ranks switch at the same steps"
        assert of_rank["plans"] == plans
        assert set(of_rank["ran"][LIMIT:]) == {len(plans) - 1}
        assert len(of_rank["said"]) == 1
        assert "the fastest of 4 plans, s1, linear takes 2000.0 ms" in of_rank["said"][0]


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.random)])
def test_a_run_that_finds_its_plan_computes_what_one_with_a_plan_does(recompute, raced):
    def plain(transport: AbstractTransport) -> Tensor:
        run = Run(Mesh(GRID, transport), slowest_last, recompute=recompute)
        for layer in (run.model[0], run.model[2]):
            layer.use_plan(Plan())
        for number in range(LIMIT):
            run.step(micro=1 + number % 16 // 15)
        assert set(run.ran) == {None}, "a plan that the user chooses stays"
        return torch.stack(run.losses)

    for one, other in zip(run_ranks(2, plain), raced(GRID, recompute)[0], strict=True):
        torch.testing.assert_close(one, other["losses"][: len(one)], rtol=1e-9, atol=1e-12)


def link_that_changes(step: int, plan: int, rank: int) -> float:
    draw = random.Random(1000 * step + rank)
    seconds = 1.0 + 0.1 * plan if step < 45 else 3.0 - 0.1 * plan
    return seconds * draw.uniform(0.98, 1.02)


def on_gloo() -> dict[str, Any]:
    logging.getLogger("moesaic").setLevel(logging.ERROR)
    auto.PLANS = len(OTHERS)
    found = race(Mesh.create(ep=2, ranks_per_node=1), link_that_changes, 45 + LIMIT + 6)
    found["alone"] = dist.get_rank()
    return found


def test_real_processes_agree_and_find_another_plan_when_the_link_changes():
    found = on_ranks(2, on_gloo)
    last = len(found[0]["plans"]) - 1
    for of_rank in found:
        assert of_rank["ran"] == found[0]["ran"]
        assert set(of_rank["ran"][30:45]) == {0}
        assert set(of_rank["ran"][45 + LIMIT :]) == {last}
        assert len(of_rank["said"]) == 2
        assert "step times have changed; the fastest of" in of_rank["said"][1]


def test_evaluation_alone_changes_nothing():
    def rank(transport: AbstractTransport) -> bool:
        run = Run(Mesh(GRID, transport), slowest_last)
        with torch.no_grad():
            for _ in range(auto.WARM_UP + 2):
                run.model(tokens_of(transport.rank))
        return run.auto.table is None

    assert run_ranks(2, rank) == [True] * 2


def test_a_loop_without_an_optimizer_is_told_once_that_nothing_is_timed(monkeypatch):
    monkeypatch.setattr("moesaic.auto.PATIENCE", 3)

    def told(transport: AbstractTransport, steps_after: int) -> list[tuple[int, str]]:
        run = Run(Mesh(GRID, transport), slowest_last)
        lines: list[tuple[int, str]] = []
        run.auto.say = lambda line: lines.append((number, line))
        for number in range(8):
            run.model(
                tokens_of(run.mesh.grid.coordinate(run.mesh.rank, "dp"), seed=number)
            ).square().mean().backward()
            if number == steps_after:
                average_gradients(run.model, run.mesh)
                run.optimizer.step()
        return lines

    first, *others = run_ranks(2, lambda each: told(each, 9))
    assert [number for number, _ in first] == [2], "in the third pass, and never again"
    assert "3 backward passes and no step of a torch optimizer" in first[0][1]
    assert others == [[]]
    assert run_ranks(2, lambda each: told(each, 1)) == [[], []]


def test_a_copy_keeps_its_plan_and_a_layer_that_joins_starts_anew():
    def rank(transport: AbstractTransport) -> None:
        mesh = Mesh(GRID, transport)
        run = Run(mesh, slowest_last)
        for _ in range(auto.WARM_UP + 2):
            run.step()
        assert run.auto.table is not None
        again = copy.deepcopy(run.model)
        assert again[0].on_mesh.auto is None
        x = tokens_of(transport.rank)
        torch.testing.assert_close(again(x), run.model(x))
        late = make_layer(seed=2)
        late.parallelize(mesh, "auto", broadcast=True)
        assert run.auto.table is None

    run_ranks(2, rank)


def test_what_nobody_uses_any_more_is_let_go():
    gc.collect()
    before = len(_global_optimizer_pre_hooks)

    def rank(transport: AbstractTransport) -> None:
        Run(Mesh(GRID, transport), slowest_last).step()

    run_ranks(2, rank)
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before


@pytest.mark.parametrize(
    ("capacity", "grid"),
    [
        (Capacity.fixed(2.0, scope="rank", padded=True), GRID),
        (Capacity.fixed(1.0, scope="rank"), Grid(world=4, tp=2, ep=4)),
    ],
)
def test_capacities_under_which_plans_differ_are_refused(capacity, grid):
    def rank(transport: AbstractTransport) -> str:
        return refused(
            lambda: make_layer(capacity=capacity).parallelize(Mesh(grid, transport), "auto")
        )

    (line,) = set(run_ranks(grid.world, rank))
    assert line.startswith('plan="auto" clashes with capacity=Capacity(')
    assert "\n" not in line


@pytest.mark.parametrize("plan", ["s1", {"chunks": 2}])
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(InputError, match=r"plan=.* is unknown: write Plan\(\.\.\.\), or \"auto\""):
        MoE(DIM, HIDDEN, 4).parallelize(Mesh(Grid(world=1), NoTransport()), plan)


def test_ranks_that_differ_in_auto_all_say_so():
    def rank(transport: AbstractTransport) -> str:
        return refused(
            lambda: make_layer().parallelize(
                Mesh(GRID, transport), "auto" if transport.rank else None
            )
        )

    (line,) = set(run_ranks(2, rank))
    assert line.startswith("whether plan is auto differs: False on rank 0, True on rank 1")


def test_one_process_has_nothing_to_choose():
    layer = make_layer()
    expected = layer(tokens_of(0))
    layer.parallelize(Mesh(Grid(world=1), NoTransport()), "auto")
    assert layer.on_mesh.auto is None
    torch.testing.assert_close(layer(tokens_of(0)), expected)


@pytest.fixture
def _two_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one micro-batch at a time and with two, a race of four."""
    monkeypatch.setattr(auto, "assumed_plans", lambda job, grid, first, **_: [first, OTHERS[0]])


class Flights:
    """A layer on a mesh whose micro-batches run in flight, with a manual clock: what a step takes
    depends on the step's number, on how many micro-batches ran at a time, and on the rank."""

    def __init__(self, mesh: Mesh, seconds: Seconds, plan: Any = "auto", **options: Any) -> None:
        self.mesh = mesh
        self.seconds = seconds
        self.options = options
        self.time = 0.0
        torch.manual_seed(0)
        self.model = nn.Sequential(make_layer(seed=0), nn.Linear(DIM, DIM).double())
        parallelize_model(self.model, mesh, plan, broadcast=True)
        self.auto = AutoPlan.of(mesh)
        self.auto.clock = lambda: self.time
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.at_once: list[int] = []
        """For each step, the most micro-batches that ran at a time."""
        self.losses: list[Tensor] = []

    def loss_of(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        return loss

    def step(self, num_batches: int = 2, *, flies: bool = True) -> None:
        seeds = range(10 * len(self.at_once), 10 * len(self.at_once) + num_batches)
        place = self.mesh.grid.coordinate(self.mesh.rank, "dp")
        batches = [tokens_of(place, seed=seed) for seed in seeds]
        found = []
        if flies:
            for losses in in_flight(self.loss_of, batches, **self.options):
                (torch.stack(losses).sum() / num_batches).backward()
                found.append(losses)
        else:
            for batch in batches:
                loss = self.loss_of(batch)
                (loss / num_batches).backward()
                found.append([loss])
        self.losses += [loss.detach() for losses in found for loss in losses]
        average_gradients(self.model, self.mesh)
        at_once = max(map(len, found))
        self.time += self.seconds(len(self.at_once), at_once, self.mesh.rank)
        self.at_once.append(at_once)
        self.optimizer.step()
        self.optimizer.zero_grad()


def fly(
    seconds: Seconds,
    steps: int = LIMIT + 10,
    plan: Any = "auto",
    *,
    num_batches: int = 2,
    **options: Any,
) -> list[Flights]:
    """Return each rank's layers after some steps in flight; all ranks ran as many at a time."""

    def rank(transport: AbstractTransport) -> Flights:
        flights = Flights(Mesh(GRID, transport), seconds, plan, **options)
        for _ in range(steps):
            flights.step(num_batches)
        return flights

    of_ranks = run_ranks(2, rank)
    assert of_ranks[0].at_once == of_ranks[1].at_once
    return of_ranks


def two_are_slower(_: int, at_once: int, rank: int) -> float:
    """On the slower rank; on the other one, two are faster."""
    return 1.0 + 0.1 * at_once if rank else 0.5 - 0.1 * at_once


def two_are_faster(_: int, at_once: int, rank: int) -> float:
    return 1.5 - 0.1 * at_once if rank else 0.5 + 0.1 * at_once


@pytest.mark.usefixtures("_two_plans")
@pytest.mark.parametrize(("seconds", "chosen"), [(two_are_slower, 1), (two_are_faster, 2)])
def test_as_many_micro_batches_run_at_a_time_as_are_fastest_on_the_slowest_rank(
    seconds: Seconds, chosen: int
) -> None:
    for flights in fly(seconds):
        assert flights.at_once[: auto.WARM_UP] == [2] * auto.WARM_UP, "their memory shows at once"
        assert set(flights.at_once[LIMIT:]) == {chosen}
        (line,) = flights.auto.said
        assert f", {auto.AT_ONCE[chosen]}, " in line
        assert "the fastest of 4 ways, s1, linear, one micro-batch at a time takes" in line
        table = flights.auto.table
        assert table is not None
        assert set(table.plans) == {Plan(), OTHERS[0]}, "each plan ran with one and with two"


@pytest.mark.usefixtures("_two_plans")
def test_one_runs_at_a_time_again_when_two_become_slower() -> None:
    change = LIMIT + 5

    def seconds(step: int, at_once: int, _: int) -> float:
        return 1.0 + 0.2 * (at_once if step >= change else -at_once)

    for flights in fly(seconds, change + LIMIT + 10):
        assert set(flights.at_once[LIMIT:change]) == {2}
        assert set(flights.at_once[change + LIMIT :]) == {1}


@pytest.mark.usefixtures("_two_plans")
def test_steps_that_try_one_and_two_compute_what_a_plain_loop_does() -> None:
    def plain(transport: AbstractTransport) -> Tensor:
        flights = Flights(Mesh(GRID, transport), two_are_slower, Plan())
        for _ in range(25):
            flights.step(num_batches=3, flies=False)
        return torch.stack(flights.losses)

    flown = fly(two_are_slower, 25, num_batches=3)
    for expected, flights in zip(run_ranks(2, plain), flown, strict=True):
        assert set(flights.at_once) == {1, 2}
        torch.testing.assert_close(torch.stack(flights.losses), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("_two_plans")
@pytest.mark.parametrize(
    ("plan", "options", "at_once"),
    [
        ("auto", {"at_once": 2}, 2),
        ("auto", {"at_once": 1}, 1),
        (Plan(), {}, 2),
        (Plan(), {"at_once": 1}, 1),
    ],
)
def test_what_the_user_chooses_stays(plan: Any, options: dict[str, int], at_once: int) -> None:
    for flights in fly(two_are_slower, auto.WARM_UP + 4, plan, **options):
        assert set(flights.at_once) == {at_once}
        table = flights.auto.table
        assert table is None or len(table.plans) == 2


@pytest.mark.usefixtures("_two_plans")
def test_a_loop_that_begins_to_fly_times_anew() -> None:
    def rank(transport: AbstractTransport) -> tuple[int, int]:
        flights = Flights(Mesh(GRID, transport), two_are_slower)
        tables = []
        for flies in (False, True):
            for _ in range(auto.WARM_UP + 2):
                flights.step(flies=flies)
            assert flights.auto.table is not None
            tables.append(len(flights.auto.table.plans))
        return tables[0], tables[1]

    assert run_ranks(2, rank) == [(2, 4)] * 2


@pytest.mark.usefixtures("_two_plans")
def test_layers_that_join_in_flight_run_two_until_they_are_timed() -> None:
    def rank(transport: AbstractTransport) -> list[int]:
        flights = Flights(Mesh(GRID, transport), two_are_slower)
        for _ in range(auto.WARM_UP + 1):
            flights.step()
        make_layer(seed=2).parallelize(flights.mesh, "auto", broadcast=True)
        flights.step()
        return flights.at_once

    for at_once in run_ranks(2, rank):
        assert at_once == [2, 2, 1, 2]


@pytest.mark.usefixtures("_two_plans")
def test_behind_a_layer_with_a_plan_of_its_own_two_run_and_plans_alone_are_timed() -> None:
    """Two run already when the layer with plan "auto" is called."""

    def rank(transport: AbstractTransport) -> tuple[set[int], int]:
        mesh = Mesh(GRID, transport)
        flights = Flights(mesh, two_are_slower)
        first = make_layer(seed=1)
        first.parallelize(mesh, Plan(), broadcast=True)
        flights.model.insert(0, first)
        for _ in range(auto.WARM_UP + 4):
            flights.step()
        assert flights.auto.table is not None
        return set(flights.at_once), len(flights.auto.table.plans)

    assert run_ranks(2, rank) == [({2}, 2)] * 2
