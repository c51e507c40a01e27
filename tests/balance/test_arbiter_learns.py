"""Tests of the arbiter on machines that differ from the model: it finds the fastest option and stays with it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad, ReplicationCosts
from moesaic.balance.selector.arbiter import UNANSWERED, Arbiter, Arbitration, CallDecision
from moesaic.errors import InputError
from moesaic.planner.cluster import Machine
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

GRID = Grid(world=4, ep=4, ranks_per_node=2)
PLAN = Plan(replication="arbiter")
COSTS = ReplicationCosts(machine=Machine(tflops=2, intra_gbps=20, inter_gbps=4))
Clock = Callable[[str, int], float]
"""A function from an option's name and a call's number to the ratio of real to modelled seconds."""


def made(**options: object) -> Arbitration:
    settings = Arbiter(costs=COSTS, **options)  # type: ignore[arg-type]
    return settings.start(PLAN, [each.plan for each in compile_plan(PLAN, GRID).options])


def skewed(seed: int, skew: float = 1.0, tokens: int = 4096) -> CallLoad:
    shares = 1 / np.arange(1, 17) ** skew
    copies = np.random.default_rng(seed).multinomial(tokens, shares / shares.sum(), size=GRID.world)
    return CallLoad(GRID, copies, 16, 256, 512)


def trained(arbiter: Arbitration, clock: Clock, calls: int, first: int = 1, **how: object) -> list[CallDecision]:
    """Return the decisions of a series of calls; the time of each is known before the next one."""
    decisions: list[CallDecision] = []
    call_seconds: Mapping[int, float] = {}
    for call in range(first, first + calls):
        load = skewed(call % 5, **how)  # type: ignore[arg-type]
        pick = arbiter.pick(load)
        arbiter.hear(call_seconds)
        decisions.append(arbiter.weigh(pick, call=call))
        alone = arbiter.weigher.alone(pick.replicas)
        option = arbiter.weigher.priced(pick.choice, pick.replicated, pick.replicas, alone)
        call_seconds = {call: option.seconds * clock(pick.choice.name, call)}
    return decisions


def settled(decisions: list[CallDecision]) -> list[str]:
    return [each.option for each in decisions if not each.is_trial]


def model_says() -> str:
    return trained(made(), lambda name, call: 1.0, 1)[0].option


@pytest.mark.parametrize("off", [2.0, 30.0])
def test_a_model_that_is_off_by_a_factor_everywhere_changes_nothing(off: float) -> None:
    plain, other = (settled(trained(made(), lambda name, call, by=by: by, 40)) for by in (1.0, off))  # type: ignore[misc]
    assert plain == other


@pytest.mark.parametrize("wrong", [1.3, 2.0])
def test_an_option_that_takes_longer_than_the_model_says_is_left_for_the_truly_best(wrong: float) -> None:
    """The option that is best by the model is slower than modelled, so the first choice is wrong."""
    first = model_says()
    arbiter = made()
    decisions = trained(arbiter, lambda name, call: wrong if name == first else 1.0, 80)
    assert decisions[0].option == first
    late = set(settled(decisions[50:]))
    assert first not in late
    seconds = decisions[-1].seconds
    honest = {name: each.seconds for name, each in options_of(arbiter).items()}
    best = min(each * (wrong if name == first else 1.0) for name, each in honest.items())
    assert all(honest[name] <= 1.1 * best for name in late), (late, honest, seconds)


def options_of(arbiter: Arbitration) -> dict:
    replicas = arbiter.weigher.replica_loads(skewed(0))
    return {each.name: each for each in arbiter.weigher.all(replicas, arbiter.weigher.alone(replicas), anew=True)}


def test_leaving_alone_is_found_where_everything_else_is_dear() -> None:
    decisions = trained(made(), lambda name, call: 1.0 if name == "alone" else 4.0, 80)
    assert set(settled(decisions[60:])) == {"alone"}


def test_an_option_that_is_faster_than_modelled_is_found() -> None:
    names = sorted(options_of(made()), key=lambda name: options_of(made())[name].seconds)
    hidden = next(name for name in names if name not in (model_says(), "alone"))
    decisions = trained(made(), lambda name, call: 0.75 if name == hidden else 1.0, 120)
    assert settled(decisions)[-1] == hidden


@pytest.mark.parametrize("seed", range(3))
def test_noisy_times_do_not_make_it_flap(seed: int) -> None:
    """Calls vary by 7 %, and one in fifty takes five times as long; still, equally good options do not alternate."""
    rng = random.Random(seed)

    def clock(name: str, call: int) -> float:
        return math.exp(rng.gauss(0, 0.07)) * (5 if rng.random() < 0.02 else 1)

    names = settled(trained(made(), clock, 300))[100:]
    assert sum(a != b for a, b in itertools.pairwise(names)) <= 15


def test_trials_are_few_and_become_fewer() -> None:
    decisions = trained(made(), lambda name, call: 1.0, 400)
    trials = [each.is_trial for each in decisions]
    assert 4 < sum(trials[:100]) <= 40
    assert sum(trials[200:]) <= 12
    assert not any(a and b and c for a, b, c in zip(trials, trials[1:], trials[2:])), (
        "at least every third call is no trial"
    )


def test_nothing_is_tried_where_times_are_not_known() -> None:
    arbiter = made()
    decisions = [arbiter.weigh(arbiter.pick(skewed(0)), call=None) for _ in range(1, 40)]
    assert not any(each.is_trial for each in decisions)
    assert len({each.option for each in decisions}) == 1
    assert not arbiter._pending


def test_calls_that_nobody_tells_of_are_forgotten() -> None:
    arbiter = made()
    for call in range(1, 200):
        arbiter.weigh(arbiter.pick(skewed(0)), call=call)
    assert len(arbiter._pending) <= UNANSWERED


def test_all_ranks_decide_alike_from_the_same_numbers() -> None:
    rng = random.Random(1)
    noise = [math.exp(rng.gauss(0, 0.1)) for _ in range(130)]
    one, other = (trained(made(), lambda name, call: noise[call], 120) for _ in range(2))
    for a, b in zip(one, other):
        assert (a.option, a.is_trial) == (b.option, b.is_trial)
        assert (a.replicated is None and b.replicated is None) or (a.replicated == b.replicated).all()  # type: ignore[union-attr]


def test_a_call_runs_what_was_decided_with_a_table_of_its_own_counts() -> None:
    arbiter = made(learn=True, optimism=0.0)
    trained(arbiter, lambda name, call: 1.0, 5)
    for seed in range(20, 26):
        load = skewed(seed)
        pick = arbiter.pick(load)
        assert pick.choice == (arbiter._trial or arbiter.last)
        assert pick.table is not None
        assert (pick.table.sum(2) <= load.copies).all()
        assert pick.table.sum() > 0


def test_a_skew_that_comes_later_is_weighed_during_its_first_call() -> None:
    arbiter = made()
    trained(arbiter, lambda name, call: 1.0, 30, skew=0.0)
    before = arbiter.last.name
    decisions = trained(arbiter, lambda name, call: 1.0, 30, first=100, skew=2.0)
    assert max(decisions[-1].rows[1]) < 0.8 * max(decisions[-1].rows[0])
    assert decisions[0].option == before


def test_the_verdict_counts_what_ran() -> None:
    arbiter = made()
    verdict = trained(arbiter, lambda name, call: 1.0, 30)[-1]
    assert sum(verdict.rows[0]) == sum(verdict.rows[1]) == 4 * 4096
    assert verdict.copies_replicated > 0
    assert verdict.weight_bytes > 0
    assert verdict.token_bytes[1] < verdict.token_bytes[0]
    assert verdict.weighing_seconds > 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"optimism": 1.0}, r"arbiter\.optimism=1\.0: choose a share of at least 0 and below 1"),
        ({"trial_every": 0}, r"arbiter\.trial_every=0: must be at least 1"),
    ],
)
def test_bad_settings_are_refused(options: dict, line: str) -> None:
    with pytest.raises(InputError, match=line):
        Arbiter(**options)


def test_settings_that_ranks_must_share_are_in_their_text() -> None:
    one = Arbiter(costs=COSTS).settings_text()
    assert (
        one == Arbiter(costs=ReplicationCosts(machine=Machine(tflops=2, intra_gbps=20, inter_gbps=4))).settings_text()
    )
    others = [
        Arbiter(costs=COSTS, margin=0.06), Arbiter(costs=ReplicationCosts()), Arbiter(costs=COSTS, factors={"spill": 1.1}),
        Arbiter(costs=COSTS, learn=False), Arbiter(costs=COSTS, trial_every=3),
    ]  # fmt: skip
    assert len({one, *(each.settings_text() for each in others)}) == 6
