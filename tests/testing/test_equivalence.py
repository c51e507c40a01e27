"""Random cases on loopback: every plan on every mesh computes what the dense reference computes."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
import torch

from moesaic.balance.run.calls import BalancedCalls
from moesaic.errors import InputError
from moesaic.policies import REPLICATION
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.program.order import ORDERS
from moesaic.routing.routers import ROUTERS
from moesaic.testing import cases, runner
from moesaic.testing.cases import Case, draw_case
from moesaic.testing.equivalence import failures, run_case
from moesaic.testing.reference import ratio, relative
from moesaic.testing.runner import Evidence, gather_evidence

from .features import features

FIRST = 24
LEAST = 2
"""Smallest number of cases that must have each feature."""
REQUIRED = [
    *(f"schedule={name}" for name in SCHEDULES),
    *(f"all_to_all={name}" for name in (*ALL_TO_ALLS, "multicast")),
    *(f"order={name}" for name in ORDERS),
    *(f"router={name}" for name in ROUTERS),
    *(f"codec={name}" for name in ("bf16", "fp16", "int8", "fp8", "zfp")),
    *(f"gather_weights={r}" for r in (0, 1, 2)),
    *(f"chunks={n}" for n in (1, 2, 3)),
    "peer_groups=2",
    "peer_groups=4",
    *(f"world={n}" for n in (1, 2, 4, 8)),
    "tp=4",
    "etp=4",
    "ep=8",
    "innermost=ep",
    "several nodes",
    "fuse",
    "overlap_gather",
    "precision=float32",
    "precision=autocast",
    "experts=modules",
    "experts=gelu",
    "shared",
    "apply_weight=before",
    "loss=load_balance",
    "loss=load_balance_sequence",
    "loss=load_balance_global_batch",
    "loss=z_loss",
    "loss=importance",
    "padding",
    "recompute",
    "evaluate",
    "accumulation",
    "group without tokens",
    "uneven groups",
    "coded, exact",
    "capacity per rank",
    "padded capacity",
    "admission by score",
    "memory budget",
    *(f"replication={name}" for name in (*REPLICATION, "shadow at random", "arbiter at random")),
    "placement=random",
    "placement=solved",
    "experts_move=True",
]
"""The features that the drawn cases must have."""


@pytest.fixture(scope="module")
def replicating() -> list[Case]:
    """Return the first 24 cases that replicate experts on at most four ranks."""
    drawn = (draw_case(seed, world=world) for seed in itertools.count() for world in (2, 4))
    return list(
        itertools.islice(
            (case for case in drawn if case.plan.replication != "none" and case.grid.ep > 1), 24
        )
    )


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    """Run every drawn case that has a feature of which there are too few so far, until there are
    enough of all."""
    found = Counter[str]()
    seeds = []
    for seed in range(FIRST, 4000):
        present = set(features(draw_case(seed))) & set(REQUIRED)
        if any(found[name] < LEAST for name in present):
            found.update(present)
            seeds.append(seed)
        if all(found[name] >= LEAST for name in REQUIRED):
            break
    return gather_evidence(seeds)


def test_the_first_cases_pass():
    """Run the cases that `make test` includes."""
    first = gather_evidence(range(FIRST))
    assert [str(failure) for failure in first.failures] == []
    assert [checked.case.seed for checked in first.loopback] == list(range(FIRST))


@pytest.mark.random
def test_cases_with_every_feature_pass(evidence):
    assert [str(failure) for failure in evidence.failures] == []
    found = Counter(feature for checked in evidence.loopback for feature in features(checked.case))
    assert {name: found[name] for name in REQUIRED if found[name] < LEAST} == {}
    quantities = {
        "output",
        "input gradient",
        "router gradient",
        "expert gradient",
        "shared gradient",
        "auxiliary loss",
    }
    assert quantities | {"counts", "router state", "evaluation", "tensor group agrees"} == set(
        evidence.worst
    )
    assert max(evidence.worst.values()) < 1e-12


def test_illegal_plans_are_drawn_too_and_refused(monkeypatch):
    refused = []
    plain = cases.compile_plan

    def compile_plan(*arguments):
        try:
            return plain(*arguments)
        except InputError:
            refused.append(arguments)
            raise

    monkeypatch.setattr(cases, "compile_plan", compile_plan)
    for seed in range(30):
        draw_case(seed)
    assert refused


def test_a_case_is_the_same_again():
    assert [draw_case(seed) for seed in range(30)] == [draw_case(seed) for seed in range(30)]
    assert draw_case(3) != draw_case(4)
    assert run_case(draw_case(7)) == run_case(draw_case(7))


def test_a_case_prints_as_what_makes_it():
    case = draw_case(5)
    for name in ("seed=5", "Grid(", "Plan(", "lengths="):
        assert name in repr(case)


def test_not_a_number_fails():
    case = dataclasses.replace(draw_case(0), precision="float64")
    assert failures(case, {"output": float("nan"), "counts": 0.0}).keys() == {"output"}
    assert relative(torch.tensor([float("nan")]), torch.zeros(1)) == float("inf")
    assert relative(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert relative(None, torch.full((2,), 3.0)) == 3.0
    assert relative(torch.full((2,), 3.0), torch.full((2,), 4.0)) == 0.25


def test_what_a_case_raises_is_reported_with_the_case(monkeypatch):
    def broken(case):
        raise RuntimeError("no such rank\nsecond line")

    monkeypatch.setattr(runner, "ran_case", broken)
    (checked,) = runner.run_part([3])
    assert (checked.reason, checked.errors) == ("RuntimeError: no such rank", {})
    assert "seed 3" in str(checked)


def test_a_ratio_explains_every_value():
    one, other = torch.randn(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert ratio(0.5 * one, one) == pytest.approx(0.5)
    assert ratio(0 * one, one) == 0.0
    for unlike in (other, one.flip(0), one[:5], one * float("nan")):
        assert ratio(unlike, one) is None
    assert ratio(one, 0 * one) is None


@pytest.mark.parametrize(
    ("replication", "least"),
    [("published", 1), ("shadow", 1), ("arbiter", 1), ("spill", 2), ("eplb", 2)],
)
def test_policies_replicate_where_they_decide(replication, least, replicating, monkeypatch):
    """Cases whose policy leaves all copies at home would test nothing."""
    replicated = []
    plain = BalancedCalls.choose

    def chosen(self, record, call):
        choice = plain(self, record, call)
        replicated.append(0 if choice.replicated is None else choice.replicated.total)
        return choice

    monkeypatch.setattr(BalancedCalls, "choose", chosen)
    for number, case in enumerate(replicating, 1):
        plan = dataclasses.replace(case.plan, replication=replication)
        decided = dataclasses.replace(case, plan=plan, by_policy=True, placement="none")
        assert failures(decided, run_case(decided)) == {}
        if number >= 2 and sum(copies > 0 for copies in replicated) >= least:
            return
    pytest.fail(f"no copy was replicated by {replication}")
