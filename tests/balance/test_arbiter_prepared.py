"""Tests of decisions that were prepared during the previous call: legal tables for the call's counts, equal on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad, ReplicationCosts
from moesaic.balance.replication.policy import BarePlan
from moesaic.balance.replication.tables import spread
from moesaic.balance.selector import prepared
from moesaic.balance.selector.arbiter import RIVAL, RIVALS, Arbiter
from moesaic.balance.selector.options import CallChoice, Recipe, Weigher
from moesaic.balance.selector.prepared import Prepared
from moesaic.planner.cluster import Machine
from moesaic.program.grid import Grid

GRIDS = [Grid(world=8, ep=8, ranks_per_node=4), Grid(world=8, ep=4, ranks_per_node=4), Grid(world=8, tp=2, ep=4, etp=2)]
RECIPES = [
    Recipe(shadows=True, least=(0.01, 0.01)), Recipe(shadows=True, whole=True, least=(0.1, 0.1)), Recipe(limit=1.1),
    Recipe(limit=1.25, near_first=True), Recipe(redundant=1),
]  # fmt: skip
COSTS = ReplicationCosts(machine=Machine(tflops=0.01))


def load(grid: Grid, seed: int, tokens: int = 500) -> CallLoad:
    rng = np.random.default_rng(seed)
    return CallLoad(grid, rng.multinomial(tokens, rng.dirichlet(np.full(16, 0.3)), size=grid.world), 16, 32, 32)


def weigher(grid: Grid) -> Weigher:
    plan = BarePlan(replication="spill")
    return Weigher(plan, [BarePlan(), plan], COSTS, at_most=8, part_us=0, factors={})


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every call use the prepared table: none counts as small, and no load as changed."""
    monkeypatch.setattr(prepared, "SMALL", 0)
    monkeypatch.setattr(prepared, "WORSE", np.inf)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.policy)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_table_keeps_its_shares_of_other_counts_and_is_that_of_the_recipe_under_the_same(grid, recipe):
    weighs, choice = weigher(grid), CallChoice(recipe.policy, 1, recipe)
    before, home = load(grid, 1), load(grid, 1).home
    replicas = weighs.replica_loads(before)
    tables = weighs.tables(recipe, replicas)
    assert tables is not None
    made, exact = Prepared(weighs, choice, True, replicas), spread(replicas, tables)
    again = Prepared(weighs, choice, True, replicas)
    assert made.digest == again.digest != Prepared(weighs, choice, False, replicas).digest
    same = made.fit(before)
    assert (same.table == exact).all()
    assert [sum(map(int, each.amount)) for each in same.replicated] == [sum(map(int, each.amount)) for each in tables]
    for seed, tokens in ((2, 500), (3, 90), (4, 4000)):
        now = load(grid, seed, tokens)
        pick = made.fit(now)
        assert pick.is_trial
        assert pick.table is not None
        assert (pick.table.sum(2) <= now.copies).all(), "more copies are replicated than there are"
        assert (pick.table >= 0).all()
        assert (pick.table[:, np.arange(16), home] == 0).all(), "the home is no helper"
        share = exact / np.maximum(before.copies, 1)[:, :, None]
        assert np.abs(pick.table - share * now.copies[:, :, None]).max() <= 1
        assert (again.fit(now).table == pick.table).all()
        assert sum(int(each.amount.sum()) for each in pick.replicated) == pick.table.sum()
    assert (same.table == exact).all(), "a call that runs keeps its table"


@pytest.mark.usefixtures("large")
def test_nothing_left_to_replicate_is_leaving_alone():
    weighs = weigher(GRIDS[0])
    made = Prepared(weighs, CallChoice("spill", 1, RECIPES[2]), False, weighs.replica_loads(load(GRIDS[0], 1)))
    empty = CallLoad(GRIDS[0], np.zeros((8, 16), dtype=np.int64), 16, 32, 32)
    assert made.fit(empty).table is None
    assert made.fit(empty).choice.name == "alone"


def test_shadows_of_a_small_call_are_found_among_its_own_counts():
    weighs, recipe = weigher(GRIDS[0]), RECIPES[0]
    made = Prepared(weighs, CallChoice("spill", 1, recipe), False, weighs.replica_loads(load(GRIDS[0], 1)))
    now = load(GRIDS[0], 2)
    found = weighs.replica_loads(now)
    tables = weighs.tables(recipe, found)
    assert tables is not None
    assert (made.fit(now).table == spread(found, tables)).all()


def test_a_load_that_moved_makes_its_table_from_its_own_counts(monkeypatch):
    monkeypatch.setattr(prepared, "SMALL", 0)
    grid, recipe = GRIDS[0], RECIPES[2]
    weighs = weigher(grid)

    def hot(place: int) -> CallLoad:
        copies = np.full((8, 16), 10)
        copies[:, 2 * place] = 100
        return CallLoad(grid, copies, 16, 32, 32)

    made = Prepared(weighs, CallChoice("spill", 1, recipe), False, weighs.replica_loads(hot(0)))
    for place in (0, 5):
        table = made.fit(hot(place)).table
        assert table is not None
        assert set(np.flatnonzero(table.sum((0, 2)))) == {2 * place}
        loads = (
            hot(place).copies.sum(0).reshape(8, 2).sum(1) + table.sum((0, 1)) - table.sum((0, 2)).reshape(8, 2).sum(1)
        )
        assert loads.max() <= 1.11 * loads.mean()


def test_a_load_that_moved_is_weighed_once_more_by_its_own_counts(monkeypatch):
    monkeypatch.setattr(prepared, "SMALL", 0)
    grid = GRIDS[0]
    weighs = weigher(grid)
    choices = [CallChoice(recipe.policy, 1, recipe) for recipe in (Recipe(limit=1.0), Recipe(redundant=1))]

    def hot(place: int) -> CallLoad:
        copies = np.full((8, 16), 10)
        copies[:, 2 * place] = 100
        return CallLoad(grid, copies, 16, 32, 32)

    before, now = weighs.replica_loads(hot(0)), weighs.replica_loads(hot(5))
    own = {each: weighs.priced(each, weighs.tables(each.recipe, now), now).seconds for each in choices}
    for factor in (0.1, 10.0):
        factors = {choices[0]: 1.0, choices[1]: factor}
        made = Prepared(weighs, choices[0], False, before, factors)
        assert made.digest != Prepared(weighs, choices[0], False, before).digest
        assert made.fit(hot(0)).choice == choices[0], "a load that stays runs what was decided"
        pick = made.fit(hot(5))
        assert pick.choice == min(choices, key=lambda each: own[each] * factors[each])
        assert (pick.table == spread(now, weighs.tables(pick.choice.recipe, now))).all()


def test_a_small_call_is_weighed_once_and_no_more():
    weighs, found = weigher(GRIDS[0]), weigher(GRIDS[0]).replica_loads(load(GRIDS[0], 1))
    choices = [CallChoice(recipe.policy, 1, recipe) for recipe in (Recipe(limit=1.0), Recipe(redundant=1))]
    assert Prepared(weighs, choices[0], False, found, dict.fromkeys(choices, 1.0)).choices == (choices[0],)


def test_what_is_weighed_once_more_seemed_about_as_good_and_runs_otherwise(monkeypatch):
    monkeypatch.setattr(prepared, "SMALL", 0)
    grid = GRIDS[0]
    plan = BarePlan(replication="arbiter")
    arbiter = Arbiter(costs=COSTS, learn=False).start(plan, list(Arbiter().option_plans(plan, grid)))
    pick = arbiter.pick(load(grid, 1))
    verdict = arbiter.weigh(pick, call=None)
    assert arbiter.prepared is not None
    chosen, *rivals = arbiter.prepared.choices
    assert chosen == arbiter.last
    assert 0 < len(rivals) <= RIVALS
    offers = {option.name: option for option, _ in arbiter.offers(load(grid, 1))}
    assert all(verdict.seconds[each.name] <= (1 + RIVAL) * verdict.seconds[chosen.name] for each in rivals)
    assert len({offers[each.name].content for each in (chosen, *rivals)}) == 1 + len(rivals)
