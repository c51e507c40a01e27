"""Tests of replication policies: their tables, that these are legal, and that they never cost more
by the policy's model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers import refused, seed_ranges
from moesaic.balance import replication_policy
from moesaic.balance.replication.cost import CallLoad, replica_loads
from moesaic.balance.replication.eplb import EPLB
from moesaic.balance.replication.policy import AbstractReplicationPolicy, Replicated
from moesaic.balance.replication.published import Published
from moesaic.balance.replication.shadow import Shadow
from moesaic.balance.replication.spill import Spill
from moesaic.balance.replication.tables import seconds_under
from moesaic.errors import InputError
from moesaic.policies import REPLICATION
from moesaic.program.grid import Grid
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications
from replication_loads import by_place, check_table, draw, flat

FAST_WEIGHTS = Rates(tflops=0.01, inter_gbps=1000, intra_gbps=1000)
"""Costs with which moving weights is almost free compared with products."""
DEAR_WEIGHTS = Rates(tflops=1000, inter_gbps=0.1, intra_gbps=0.1)


@pytest.mark.parametrize(
    "costs", [FAST_WEIGHTS, DEAR_WEIGHTS, Rates()], ids=["fast", "dear", "middling"]
)
@pytest.mark.parametrize("name", REPLICATION)
@pytest.mark.parametrize("seeds", seed_ranges(24, 4))
def test_what_is_replicated_is_there_and_never_at_home(name: str, costs: Rates, seeds: range):
    for seed in seeds:
        check_table(replication_policy(name, costs), draw(seed))


@pytest.mark.parametrize("name", sorted({*REPLICATION} - {"arbiter"}))
def test_a_policy_is_a_file_of_its_name(name: str):
    assert type(replication_policy(name)).__module__ == f"moesaic.balance.replication.{name}"


@pytest.mark.parametrize(
    ("kind", "costs"), [(Shadow, FAST_WEIGHTS), (Shadow, DEAR_WEIGHTS), (Spill, Rates())]
)
def test_replication_never_costs_more_than_none_by_the_model(kind: type, costs: Rates):
    helped = 0
    for seed in range(30):
        load = draw(seed)
        for replica, replicated in zip(
            replica_loads(load, costs), by_place(load, kind(costs).decide(load))
        ):
            before = seconds_under(replica, NOTHING)
            after = seconds_under(replica, Replications.of(replicated))
            assert after <= before * (1 + 1e-12)
            helped += after < before * 0.99
    assert helped > 5 or costs is DEAR_WEIGHTS


@pytest.mark.parametrize(
    ("decided", "words"),
    [
        (None, "decided NoneType: return integers of shape"),
        (np.zeros((2, 2, 2)), r"decided float64 \(2, 2, 2\): return integers"),
        (
            np.zeros((2, 2), dtype=np.int64),
            r"decided int64 \(2, 2\): return integers of shape \(2, 2, 2\)",
        ),
        (
            np.array([[[0, -1], [0, 0]], [[0, 0], [0, 0]]]),
            "replicates less than a copy, or to load.home: leave it out",
        ),
        (
            np.array([[[1, 0], [0, 0]], [[0, 0], [0, 0]]]),
            "replicates less than a copy, or to load.home: leave it out",
        ),
    ],
)
def test_a_call_refuses_a_table_that_is_none(decided: np.ndarray | None, words: str):
    class Fixed(AbstractReplicationPolicy):
        def decide(self, load: CallLoad) -> np.ndarray:
            return decided  # type: ignore[return-value]

    load = CallLoad(
        Grid(world=2, ep=2, ranks_per_node=1), np.array([[6, 2], [4, 8]]), 2, units=3, dim=5
    )
    with pytest.raises(InputError, match=f"replication policy Fixed .*{words}"):
        Fixed().start({}).choose(load)


def test_the_cost_by_hand():
    load = CallLoad(
        Grid(world=2, ep=2, ranks_per_node=1), np.array([[6, 2], [4, 8]]), 2, units=3, dim=5
    )
    costs = Rates(tflops=1e-12, inter_gbps=8e-9, element_bytes=2, matrices=3)
    (replica,) = replica_loads(load, costs)
    flops = 2 * 3 * 5 * 3 * 3
    assert seconds_under(replica, NOTHING) == pytest.approx(10 * flops + 4 * 5 * 2 * 4)
    shadowed = Replications(*np.array([[1], [0], [1], [4]]))
    assert seconds_under(replica, shadowed) == pytest.approx(
        14 * flops + 4 * 5 * 2 * 2 + 2 * 3 * 5 * 3 * 2
    )


def test_the_hottest_expert_is_shadowed_where_weights_cost_nothing():
    """Row and column sums differ, so that summing counts over the wrong axis would find no hot
    expert."""
    copies = np.array([[1, 50, 2, 3], [2, 60, 3, 4], [4, 70, 5, 6], [8, 80, 9, 10]])
    load = CallLoad(Grid(world=4, ep=4), copies, 4, units=8, dim=8)
    for policy in (Shadow(FAST_WEIGHTS), Shadow(FAST_WEIGHTS, whole=True), Published(FAST_WEIGHTS)):
        replicated = policy.decide(load)
        assert [int(replicated[origin, 1, origin]) for origin in (0, 2, 3)] == [50, 70, 80]
    without = replace(load, copies=np.where(copies == 80, 0, copies))
    found = Published(FAST_WEIGHTS).start({}).choose(without).replicated
    assert set(found.helper.tolist()) == {0, 2}, "place 3 has no copies, and fetches no weights"  # type: ignore[union-attr]


def test_two_equally_hot_experts_block_the_published_rule_and_not_ours():
    copies = np.array([[40, 40, 0, 0], [40, 40, 0, 0], [40, 40, 0, 0], [40, 40, 0, 0]])
    tied = CallLoad(Grid(world=4, ep=4), copies, 4, units=8, dim=8)
    assert Shadow(FAST_WEIGHTS, whole=True).decide(tied).sum() == 240
    assert Published(FAST_WEIGHTS).decide(tied).sum() == 0


def algorithm_1(
    copies: np.ndarray, dim: int, alpha: float, flops: float, bytes_per_second: float
) -> set[int]:
    """Run FasterMoE's Algorithm 1 with equations 7 and 8 as printed, but in bytes: 1 expert per
    worker, 2 bytes an element."""
    experts = len(copies)
    width = 2 / bytes_per_second
    computed = copies.sum(0).astype(float)
    shadowed = set()
    best = max(12 * b * alpha * dim**2 / flops + 4 * b * dim * width for b in computed)
    for expert in sorted(range(experts), key=lambda e: (-copies[:, e].sum(), e)):
        trial = computed + copies[:, expert]
        trial[expert] -= copies[:, expert].sum()
        r = len(shadowed) + 1
        seconds = 12 * max(trial) * alpha * dim**2 / flops + 2 * r * 2 * alpha * dim**2 * width
        if seconds >= best:
            break
        computed = trial
        best = seconds
        shadowed.add(expert)
    return shadowed


def test_the_published_rule_charges_the_weights_that_equation_8_charges():
    """If weights are not free, they travel once forward and once back: 2 r * 2 alpha H^2 / W."""
    random = np.random.default_rng(0)
    dim = 64
    alpha = 2.0
    numbers_shadowed = []
    costs = Rates(tflops=1e-2, inter_gbps=1.0, intra_gbps=1.0, matrices=2)
    for _ in range(60):
        copies = random.multinomial(
            int(random.integers(200, 2000)), random.dirichlet(np.full(8, 0.5)), size=8
        )
        load = CallLoad(Grid(world=8, ep=8), copies, 8, units=int(alpha * dim), dim=dim)
        right = algorithm_1(copies, dim, alpha, 1e10, 1e9 / 8)
        assert set(np.flatnonzero(Published(costs).decide(load).sum((0, 2)))) == right
        numbers_shadowed.append(len(right))
    assert len(set(numbers_shadowed)) > 2  # none, some, and more


def test_a_place_is_replicated_no_more_experts_than_it_has_room_for():
    load = CallLoad(Grid(world=4, ep=4), np.full((4, 16), 9), 16, units=2, dim=2)
    costs = Rates(tflops=1000, inter_gbps=1e-3, intra_gbps=1e-3, element_bytes=1, matrices=1)
    for at_most in (1, 3):
        replicated = Shadow(costs, at_most=at_most).decide(load)
        assert (replicated.sum(0) > 0).sum(0).max() <= at_most


def test_bad_costs_are_refused():
    assert "rates.matrices=0: must be at least 1" in refused(Rates, matrices=0)
    with pytest.raises(
        InputError,
        match=r"plan\.replication='lplb' is unknown: choose one of none, shadow, published",
    ):
        replication_policy("lplb")


def test_given_lendings_are_cut_to_what_there_is():
    load = CallLoad(Grid(world=2, ep=2), np.array([[3, 1], [2, 0]]), 2, units=1, dim=1)
    replicated = Replicated(np.full((2, 2, 2), 2)).decide(load)
    assert replicated.tolist() == [[[2, 1], [1, 0]], [[2, 0], [0, 0]]]


def test_eplb_shares_the_hottest_experts_equally_with_the_least_loaded_places():
    load = flat([800, 80, 80, 80, 400, 80, 80, 80], ep=4)
    table = EPLB().decide(load)
    # Loads per replica with four redundant experts: 800 -> 400 -> 266 -> 200 for expert 0, which
    # all places hold, and 400 -> 200 for expert 4, which two places hold.
    assert table.sum(0).tolist()[0] == [0, 200, 200, 200]
    assert table.sum(0)[4].sum() == 200
    assert (table.sum((0, 2)) > 0).tolist() == [
        True,
        False,
        False,
        False,
        True,
        False,
        False,
        False,
    ]
