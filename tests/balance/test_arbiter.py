"""Tests of the arbiter: its choices, that they are never worse by its own model, and that they do not flap."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad, ReplicationCosts
from moesaic.balance.selector.arbiter import Arbiter, Arbitration, CallDecision
from moesaic.balance.selector.options import CallChoice, Recipe, name_of, option_plans, steps_of
from moesaic.errors import InputError
from moesaic.planner.cluster import Machine
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

GRID = Grid(world=4, ep=4, ranks_per_node=2)
SHARDED = Grid(world=8, ep=4, etp=2, ranks_per_node=4)
SLOW = Machine(tflops=5, intra_gbps=20, inter_gbps=2)


def made(grid: Grid = GRID, machine: Machine = SLOW, **options: object) -> Arbitration:
    plan = Plan(replication="arbiter")
    settings = Arbiter(costs=ReplicationCosts(machine=machine), **options)  # type: ignore[arg-type]
    return settings.start(plan, [each.plan for each in compile_plan(plan, grid).options])


def skewed(skew: float, grid: Grid = GRID, *, tokens: int = 4096, seed: int = 0, units: int = 1024) -> CallLoad:
    """Return a random load in which the i-th expert's share is proportional to 1 / i^skew; an even load for skew 0."""
    experts = 4 * grid.ep
    copies = np.full((grid.world, experts), tokens // experts)
    if skew:
        shares = 1 / np.arange(1, experts + 1) ** skew
        copies = np.random.default_rng(seed).multinomial(tokens, shares / shares.sum(), size=grid.world)
    return CallLoad(grid, copies, experts, units // grid.etp, 512)


def computed(verdict: CallDecision, load: CallLoad) -> np.ndarray:
    """Return the copies that each place of ep computes."""
    replicated = (
        np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
        if verdict.replicated is None
        else verdict.replicated
    )
    rows = np.bincount(load.home, (load.copies - replicated.sum(2)).sum(0), load.grid.ep)
    return rows + replicated.sum((0, 1))


def test_an_even_load_is_left_alone_and_nothing_else_is_weighed():
    verdict = made().choose(skewed(0))
    assert (verdict.option, verdict.program, verdict.replicated, list(verdict.seconds)) == ("alone", 0, None, ["alone"])


def test_what_it_chooses_is_the_least_and_its_table_does_what_it_says():
    chosen = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        grid = (GRID, SHARDED)[seed % 2]
        machine = Machine(tflops=float(rng.choice([0.5, 5, 50])), inter_gbps=float(rng.choice([1, 10, 100])))
        load = skewed(float(rng.choice([0.3, 1, 2])), grid, seed=seed, units=int(rng.choice([64, 1024])))
        verdict = made(grid, machine, margin=0.0).choose(load)
        assert verdict.seconds[verdict.option] == min(verdict.seconds.values())
        assert computed(verdict, load).sum() == load.copies.sum()
        if "r=" not in verdict.option:
            assert list(verdict.rows[1]) == computed(verdict, load).tolist()
        assert list(verdict.rows[0]) == np.bincount(load.home, load.copies.sum(0), grid.ep).tolist()
        chosen.add(verdict.option.removeprefix("steps+"))
    assert {"shadow", "spill", "r=0", "r=1"} <= chosen


def test_a_table_goes_with_a_program_that_replicates_and_with_no_other():
    for seed in range(30):
        arbiter = made(SHARDED)
        verdict = arbiter.choose(skewed(1.5, SHARDED, seed=seed))
        assert (verdict.replicated is not None) == (arbiter.plans[verdict.program].replication != "none")


def test_all_ranks_decide_alike_whatever_came_before():
    loads = [skewed(skew, SHARDED, seed=seed) for seed, skew in enumerate([0, 1, 1, 0, 2, 0.4, 2, 2])]
    one, other = made(SHARDED), made(SHARDED)
    for load in loads:
        a, b = one.choose(load), other.choose(load)
        assert a.option == b.option
        assert (a.replicated is None and b.replicated is None) or (a.replicated == b.replicated).all()  # type: ignore[union-attr]


def test_it_comes_back_to_leaving_alone_as_soon_as_the_load_is_even():
    arbiter = made()
    options = [arbiter.choose(skewed(skew)).option for skew in (0, 1.5, 1.5, 0, 0)]
    assert options[0] == options[3] == options[4] == "alone"
    assert options[1] != "alone"
    assert options[2] != "alone"


def test_options_that_are_about_as_good_do_not_take_turns():
    """The loads change slightly from call to call; without a margin the option changes with them."""

    def switches(**options: float) -> int:
        arbiter = made(machine=Machine(tflops=1, inter_gbps=10), **options)
        options_chosen = [arbiter.choose(skewed(0.5, seed=seed, tokens=512)).option for seed in range(30)]
        return sum(a != b for a, b in itertools.pairwise(options_chosen))

    assert switches(margin=0.0, memory=0.0, weigh_every=1) > 8
    assert switches(weigh_every=1) == switches() == 0


def settled(arbiter: Arbitration, seconds: dict[str, float], last: str = "") -> str:
    """Return the option that the arbiter settles on, given the modelled seconds of each and the last option."""
    arbiter.last = dataclasses.replace(arbiter.last, name=last or arbiter.last.name)
    arbiter._choices |= {name: CallChoice(name, 1, Recipe(shadows=True)) for name in seconds}
    arbiter._settle(seconds, 0.0, among=seconds)
    return arbiter.last.name


def test_an_option_that_is_left_must_be_worse_by_the_margin():
    arbiter = made(margin=0.2, memory=0.0)
    assert settled(arbiter, {"alone": 1.0, "spill": 0.5, "shadow": 0.45}, "spill") == "spill"
    assert settled(arbiter, {"alone": 1.0, "spill": 0.5, "shadow": 0.39}, "spill") == "shadow"
    assert settled(arbiter, {"alone": 1.0, "spill": 1.01, "shadow": 0.9}, "spill") == "alone"
    assert settled(arbiter, {"alone": 1.0, "shadow": 0.9}, "spill") == "alone", "too little is gained to begin"


def test_earlier_calls_count_as_much_as_they_are_told_to():
    arbiter = made(margin=0.0, memory=0.5)
    assert settled(arbiter, {"alone": 1.0, "spill": 0.6, "shadow": 0.9}) == "spill"
    assert settled(arbiter, {"alone": 1.0, "spill": 0.8, "shadow": 0.6}) == "spill", "0.7 and 0.75"
    assert settled(arbiter, {"alone": 1.0, "spill": 0.8, "shadow": 0.6}) == "shadow", "0.75 and 0.675"


def test_all_options_are_weighed_anew_when_the_load_changes_or_after_so_many_calls():
    arbiter = made(weigh_every=3)
    weighed = [len(arbiter.choose(skewed(1.5, seed=seed)).seconds) for seed in range(5)]
    assert weighed[0] == weighed[3] > 5
    assert weighed[1] == weighed[2] == weighed[4] == 2
    assert len(arbiter.choose(skewed(2.5)).seconds) > 5


def test_between_weighings_the_table_still_follows_the_counts():
    arbiter = made(weigh_every=100)
    for seed in range(5):
        load = skewed(1.5, seed=seed)
        verdict = arbiter.choose(load)
        assert verdict.replicated is not None
        assert (verdict.replicated.sum(2) <= load.copies).all()
        assert max(verdict.rows[1]) == computed(verdict, load).max() < 0.7 * max(verdict.rows[0])


def test_factors_change_the_choice():
    load = skewed(1.5)
    assert made().choose(load).option == "steps+shadow"
    dear = {f"{steps}{policy}": 9.0 for steps in ("", "steps+") for policy in ("shadow", "whole shadow", "redundant")}
    assert made(factors=dear).choose(load).option == "steps+spill"


def test_as_a_lender_it_gives_the_cheapest_table():
    load = skewed(1.5)
    replicated = Arbiter(costs=ReplicationCosts(machine=SLOW)).decide(load)
    assert replicated.shape == (4, 16, 4)
    assert (
        np.bincount(load.home, load.copies.sum(0), 4).max()
        > 1.5 * (replicated.sum((0, 1)) + np.bincount(load.home, (load.copies - replicated.sum(2)).sum(0), 4)).max()
    )
    assert not Arbiter().decide(skewed(0)).any()


def test_the_options_of_a_plan():
    plan = Plan(replication="arbiter", chunks=2)
    names = [name_of(each, plan, "spill" if each.replication != "none" else "") for each in option_plans(plan, SHARDED)]
    assert names == ["alone", "spill", "r=0", "r=1", "steps", "steps+spill"]
    assert [each.chunks for each in option_plans(plan, SHARDED)] == [2] * 6
    stepped = dataclasses.replace(plan, peer_groups=4)
    assert [name_of(each, stepped) for each in option_plans(stepped, GRID)] == ["alone", "lend", "r=0"]
    assert (steps_of(GRID), steps_of(Grid(world=4, ep=4)), steps_of(Grid(world=4, ep=2, etp=2))) == (2, 4, 2)


def test_a_compiled_arbiter_holds_the_very_programs_of_its_options():
    compiled = compile_plan(Plan(replication="arbiter"), GRID)
    alone, replicates = compiled.options[:2]
    assert alone.digest == compile_plan(Plan(), GRID).digest
    assert replicates.digest == compile_plan(Plan(replication="spill"), GRID).digest
    assert compiled.unreplicated is alone
    assert (compiled.forward, compiled.backward) == (replicates.forward, replicates.backward)
    assert compiled.digest not in {each.digest for each in compiled.options}
    assert compile_plan(Plan(), GRID).options == ()


def test_options_that_clash_are_left_out_and_clashes_with_replication_refused():
    ted = compile_plan(Plan(replication="arbiter", schedule="ted"), Grid(world=4, tp=2, ep=2, etp=2))
    assert [each.plan.gather_weights for each in ted.options[:3]] == [None, None, None]
    with pytest.raises(InputError, match=r"replication clashes with plan\.all_to_all=multicast"):
        compile_plan(Plan(replication="arbiter", all_to_all="multicast"), GRID)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"margin": 1.0}, r"arbiter\.margin=1\.0: choose a share of at least 0 and below 1"),
        ({"memory": -0.1}, r"arbiter\.memory=-0\.1: choose a share of at least 0 and below 1"),
        ({"at_most": 0}, r"arbiter\.at_most=0: must be at least 1"),
        ({"weigh_every": 0}, r"arbiter\.weigh_every=0: must be at least 1"),
    ],
)
def test_bad_settings_are_refused(options: dict, line: str):
    with pytest.raises(InputError, match=line):
        Arbiter(**options)
