"""Tests of the arbiter: its choices, and that they are never worse by its own model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import REPLICATED, programs_of
from moesaic.balance.replication.tables import spills, spread
from moesaic.balance.selector import arbiter as arbiter_module
from moesaic.balance.selector.arbiter import EVERY, SMALL, Arbiter, Arbitration, ScaledTable
from moesaic.balance.selector.options import Recipe, option_plans, steps_of
from moesaic.errors import InputError
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING
from replication_loads import computed, dense

GRID = Grid(world=4, ep=4, ranks_per_node=2)
SHARDED = Grid(world=8, ep=4, etp=2, ranks_per_node=4)
SLOW = Rates(tflops=5, intra_gbps=20, inter_gbps=2)


def made(grid: Grid = GRID, machine: Rates = SLOW, **options: object) -> Arbitration:
    settings = Arbiter(costs=machine, **options)  # type: ignore[arg-type]
    programs = programs_of(compile_plan(Plan(replication="arbiter"), grid), settings)
    return settings.start({name: each.plan for name, each in programs.items()})


def skewed(
    skew: float, grid: Grid = GRID, *, tokens: int = 4096, seed: int = 0, units: int = 1024
) -> CallLoad:
    """Return a random load in which the i-th expert's share is proportional to 1 / i^skew; an even
    load for skew 0."""
    experts = 4 * grid.ep
    copies = np.full((grid.world, experts), tokens // experts)
    if skew:
        shares = 1 / np.arange(1, experts + 1) ** skew
        copies = np.random.default_rng(seed).multinomial(
            tokens, shares / shares.sum(), size=grid.world
        )
    return CallLoad(grid, copies, experts, units // grid.etp, 512)


def test_an_even_load_is_left_alone_and_nothing_else_is_weighed():
    verdict = made().choose(skewed(0))
    assert (verdict.option, verdict.program, verdict.replicated) == ("alone", "alone", None)
    assert list(verdict.seconds) == ["alone"]


def test_what_it_chooses_is_the_least_and_its_table_does_what_it_says():
    chosen = set()
    for seed in range(24):
        rng = np.random.default_rng(seed)
        grid = (GRID, SHARDED)[seed % 2]
        machine = Rates(
            tflops=float(rng.choice([0.5, 5, 50])), inter_gbps=float(rng.choice([1, 10, 100]))
        )
        load = skewed(
            float(rng.choice([0.3, 1, 2])), grid, seed=seed, units=int(rng.choice([64, 1024]))
        )
        verdict = made(grid, machine, margin=0.0).choose(load)
        alone, ran = verdict.moved()
        assert verdict.seconds[verdict.option] == min(verdict.seconds.values())
        assert computed(load, verdict.replicated).sum() == load.copies.sum()
        if "r=" not in verdict.option:
            assert list(ran.rows) == computed(load, verdict.replicated).tolist()
        assert list(alone.rows) == np.bincount(load.home, load.copies.sum(0), grid.ep).tolist()
        chosen.add(verdict.option.removeprefix("steps+"))
    assert {"shadow", "spill", "r=0"} <= chosen


def test_a_table_goes_with_a_program_that_replicates_and_with_no_other():
    for seed in range(8):
        arbiter = made(SHARDED)
        for load in (skewed(1.5, SHARDED, seed=seed), skewed(1.4, SHARDED, seed=seed + 1)):
            verdict = arbiter.choose(load)
            assert (verdict.replicated is not None) == (REPLICATED in verdict.program)


def test_a_table_with_nothing_left_to_replicate_runs_the_same_steps_without_replication():
    arbiter = made(margin=0.0)
    first = arbiter.choose(skewed(1.5))
    assert first.replicated is not None
    # nothing is worth replication
    arbiter._last = replace(arbiter._last, recipe=Recipe(shadows=True, least=(1.0,)))
    for program, other in (("steps+replicated", "steps"), ("replicated", "alone")):
        arbiter._last = replace(arbiter._last, program=program)
        second = arbiter.choose(skewed(1.5))
        assert (second.program, second.option, second.replicated) == (other, other, None)


def test_all_ranks_decide_alike_whatever_came_before():
    loads = [
        skewed(skew, SHARDED, seed=seed) for seed, skew in enumerate([0, 1, 1, 0, 2, 0.4, 2, 2])
    ]
    one = made(SHARDED)
    other = made(SHARDED)
    for load in loads:
        a = one.choose(load)
        b = other.choose(load)
        assert a.option == b.option
        assert (dense(load, a.replicated or NOTHING) == dense(load, b.replicated or NOTHING)).all()


def test_all_options_are_compared_after_so_many_calls(monkeypatch):
    arbiter = made()
    compared = []
    weigh = arbiter.weigher.all
    monkeypatch.setattr(
        arbiter.weigher, "all", lambda replicas: compared.append(arbiter._calls) or weigh(replicas)
    )
    for _ in range(2 * EVERY + 1):
        arbiter.choose(skewed(1.5))
    assert compared == [1, EVERY + 1, 2 * EVERY + 1]


def test_it_comes_back_to_leaving_alone_soon_after_the_load_is_even():
    arbiter = made()
    assert arbiter.choose(skewed(1.5)).option != "alone"
    options = [arbiter.choose(skewed(0)).option for _ in range(6 * EVERY)]
    assert options[-1] == "alone"


@pytest.mark.parametrize("small", [0, SMALL], ids=["scaled", "anew"])
def test_one_call_in_four_that_is_even_does_not_decide_for_the_others(small: int, monkeypatch):
    monkeypatch.setattr(arbiter_module, "SMALL", small)
    arbiter = made()
    loads = [skewed(skew, seed=seed) for seed, skew in enumerate((1.5, 1.4, 1.5, 0))]
    weigher = arbiter.weigher
    taken = 0.0
    least = 0.0
    for number in range(40 * len(loads)):
        load = loads[number % len(loads)]
        replicas, verdict = weigher.replica_loads(load), arbiter.choose(load)
        table = verdict.replicated or NOTHING
        assert (dense(load, table).sum(2) <= load.copies).all()
        works = weigher.works(verdict.program, replicas, (table,))
        taken += weigher._option(verdict.program, Recipe(), (table,), works).seconds
        least += min(option.seconds for option in weigher.all(replicas))
    assert taken < 1.2 * least


@pytest.mark.parametrize("small", [0, SMALL], ids=["scaled", "anew"])
def test_between_comparisons_the_table_still_follows_the_counts(small: int, monkeypatch):
    monkeypatch.setattr(arbiter_module, "SMALL", small)
    arbiter = made()
    for seed in range(5):
        load = skewed(1.5, seed=seed)
        verdict = arbiter.choose(load)
        alone, ran = verdict.moved()
        assert verdict.replicated is not None
        assert (dense(load, verdict.replicated).sum(2) <= load.copies).all()
        assert max(ran.rows) == computed(load, verdict.replicated).max() < 0.7 * max(alone.rows)


def test_a_table_that_is_scaled_keeps_its_shares_until_the_load_has_changed_too_much():
    load = skewed(1.5)
    (replica,) = made().weigher.replica_loads(load)
    table = ScaledTable(replica, spread([replica], [spills(replica, NOTHING, 1.0)]))
    same = table.fitted(load)
    assert same is not None
    assert (
        dense(load, same) == dense(load, spread([replica], [spills(replica, NOTHING, 1.0)]))
    ).all()
    twice = table.fitted(CallLoad(GRID, 2 * load.copies, load.num_experts, load.units, load.dim))
    assert twice is not None
    assert (dense(load, twice) == 2 * dense(load, same)).all()
    turned = CallLoad(GRID, load.copies[:, ::-1].copy(), load.num_experts, load.units, load.dim)
    assert table.fitted(turned) is None


def test_what_replicated_experts_cost_the_host_changes_the_choice():
    load = skewed(1.5)
    free, dear = (Arbiter(costs=replace(SLOW, expert_us=each)).decide(load) for each in (0.0, 1e6))
    assert free.any()
    assert not dear.any()


def test_steps_that_cost_the_host_are_not_taken():
    plans = Arbiter().option_plans(Plan(replication="arbiter"), GRID)
    for part_us, expected in ((0.0, True), (1e6, False)):
        arbiter = Arbiter(costs=replace(SLOW, part_us=part_us)).start(plans)
        assert ("steps" in arbiter.choose(skewed(0.5)).option) == expected


def test_as_a_lender_it_gives_the_cheapest_table():
    load = skewed(1.5)
    replicated = Arbiter(costs=SLOW).decide(load)
    assert replicated.shape == (4, 16, 4)
    assert (
        np.bincount(load.home, load.copies.sum(0), 4).max()
        > 1.5
        * (
            replicated.sum((0, 1))
            + np.bincount(load.home, (load.copies - replicated.sum(2)).sum(0), 4)
        ).max()
    )
    assert not Arbiter().decide(skewed(0)).any()


def test_the_options_of_a_plan():
    plan = Plan(replication="arbiter", chunks=2)
    plans = option_plans(plan, SHARDED)
    assert list(plans) == ["alone", "replicated", "r=0", "r=1", "steps", "steps+replicated"]
    assert [each.chunks for each in plans.values()] == [2] * 6
    assert [each.replicates for each in plans.values()] == [False, True, False, False, False, True]
    assert list(option_plans(replace(plan, peer_groups=4), GRID)) == ["alone", "replicated", "r=0"]
    assert (
        steps_of(GRID),
        steps_of(Grid(world=4, ep=4)),
        steps_of(Grid(world=4, ep=2, etp=2)),
    ) == (2, 4, 2)


def test_programs_are_those_of_the_options_and_compiled_once():
    compiled = compile_plan(Plan(replication="arbiter"), GRID)
    programs = programs_of(compiled, Arbiter())
    assert programs["alone"].digest == compile_plan(Plan(), GRID).digest
    assert programs["replicated"] is compiled
    assert programs["steps"] is programs_of(compiled, Arbiter())["steps"]
    assert compiled.forward == compile_plan(Plan(replication="spill"), GRID).forward


def test_options_that_clash_are_left_out_and_clashes_with_replication_refused():
    ted = compile_plan(
        Plan(replication="arbiter", schedule="ted"), Grid(world=4, tp=2, ep=2, etp=2)
    )
    assert not any(name.startswith("r=") for name in programs_of(ted, Arbiter()))
    with pytest.raises(InputError, match=r"replication clashes with plan\.all_to_all=multicast"):
        compile_plan(Plan(replication="arbiter", all_to_all="multicast"), GRID)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"margin": 1.0}, r"arbiter\.margin=1\.0: choose a share of at least 0 and below 1"),
        ({"at_most": 0}, r"arbiter\.at_most=0: must be at least 1"),
    ],
)
def test_bad_settings_are_refused(options: dict, line: str):
    with pytest.raises(InputError, match=line):
        Arbiter(**options)
