"""What people ask of a plan: speed and utilization by hand, what to change first, what skew
costs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from moesaic.planner.answer import (
    SPEED_RATIOS,
    SkewedStep,
    changes,
    operations_per_token,
    speed_of,
    under_skew,
)
from moesaic.planner.candidates import Pins
from moesaic.planner.cluster import Tflops
from moesaic.planner.job import Job
from moesaic.planner.search import LOSSLESS, Result, Settings, search
from moesaic.shapes import ModelShape, MoEShape
from planner.clusters import DEVICE, flat

JOB = Job(
    batch_size=16,
    accumulation=2,
    model=ModelShape(
        dim=512,
        num_layers=2,
        num_heads=8,
        seq_len=256,
        moe=MoEShape(num_experts=8, top_k=2, hidden=1024),
    ),
)
SLOW_PORTS = flat(2, 4, intra=800, inter=2, device=DEVICE)


SPREAD = Pins(tp=1, ep=8, etp=1)
FEW = replace(
    LOSSLESS, chunks=(1, 4), orders=("fifo",), fuse=(False,), all_to_alls=("linear", "multicast")
)


@cache
def found(pins: Pins = SPREAD, cluster=SLOW_PORTS) -> Result:
    return search(JOB, cluster, Settings(pins=pins, space=FEW))


def test_speed_is_tokens_over_seconds_and_utilization_what_a_model_needs_of_the_peak() -> None:
    best = found().best
    speed = speed_of(JOB, best, SLOW_PORTS, devices=8, sequences=32)
    low, middle, high = (share * 32 * 256 / best.seconds / 8 for share in SPEED_RATIOS)
    assert speed.tokens_per_second == pytest.approx(middle)
    assert speed.interval == pytest.approx((low, high))
    assert low < middle < high
    active = 2 * (4 * 512**2 + 512 * 8 + 2 * 3 * 512 * 1024) + 256 * 512
    assert operations_per_token(JOB, SLOW_PORTS) == 6 * active + 3 * 2 * (2 * 2 * 256 * 512 / 2)
    assert speed.utilization == pytest.approx(
        speed.tokens_per_second * operations_per_token(JOB, SLOW_PORTS) / 100e12
    )
    assert speed.price(3.6) == pytest.approx(1e12 / speed.tokens_per_second * 1e-3)
    doubled = replace(SLOW_PORTS, device=replace(DEVICE, peak_tflops=200.0))
    halved = speed_of(JOB, best, doubled, devices=8, sequences=32)
    assert halved.utilization == pytest.approx(speed.utilization / 2)


def test_what_to_change_first_is_what_limits() -> None:
    slow_net = changes(JOB, SLOW_PORTS, found())
    assert slow_net[0].what == "links between nodes twice as fast (port)"
    assert 1.5 < slow_net[0].speedup <= 2.0
    assert [each.speedup for each in slow_net] == sorted(
        (each.speedup for each in slow_net), reverse=True
    )
    weak = flat(1, 8, intra=80000, device=replace(DEVICE, tflops=Tflops(fp32=0.5)))
    first = changes(JOB, weak, found(cluster=weak))[0]
    assert first.what == "products twice as fast"
    assert first.speedup > 1.8


def test_more_memory_is_among_the_changes_where_it_would_help() -> None:
    """As much as keeps activations, or as the fastest plan needs that does not fit."""
    again = replace(JOB, model=replace(JOB.model, checkpoint_activations=True))
    tight = replace(SLOW_PORTS, device=replace(DEVICE, memory_gib=0.5))
    settings = Settings(pins=SPREAD, space=FEW, reserve_gib=0.1)
    result = search(again, tight, settings)
    kept = search(JOB, SLOW_PORTS, settings)
    (more,) = (
        each
        for each in changes(again, tight, result, reserve_gib=0.1)
        if each.what.startswith("devices of ")
    )
    assert more.what == "devices of 1 GiB (nothing recomputed)"
    assert more.speedup == pytest.approx(result.best.seconds / kept.best.seconds, rel=0.05)
    assert more.speedup > 1.1
    plenty = replace(tight, device=replace(DEVICE, memory_gib=80))
    assert not any(
        "devices of" in each.what
        for each in changes(again, plenty, search(again, plenty, settings))
    )


def test_the_fastest_plan_that_does_not_fit_is_kept() -> None:
    settings = Settings(reserve_gib=0, space=FEW, pins=Pins(tp=1, etp=1), keep=50)
    free = search(JOB, SLOW_PORTS, settings)
    assert free.too_large is None
    size = free.best.memory.total
    assert min(each.memory.total for each in free.ranking) < size, (
        "the best plan is not the smallest"
    )
    tight = replace(SLOW_PORTS, device=replace(DEVICE, memory_gib=1.05 * (size - 1) / 2**30))
    found = search(JOB, tight, settings)
    assert found.too_large.seconds < found.best.seconds
    assert found.too_large.memory.total >= size > found.best.memory.total


def test_skew_costs_where_experts_are_spread_and_nothing_where_every_rank_has_them_all() -> None:
    weak = flat(1, 8, intra=80000, device=replace(DEVICE, tflops=Tflops(fp32=0.5)))
    spread = found(cluster=weak).best
    skewed = under_skew(JOB, weak, spread, 1.0)
    # Experts are most of a step, and one rank computes twice as much of them.
    moe = sum(seconds for part, seconds in spread.estimate.parts.items() if part.startswith("moe"))
    assert skewed.longer == pytest.approx(1 + moe / spread.seconds, rel=0.1)
    assert skewed.memory.activations > spread.memory.activations
    even = under_skew(JOB, weak, spread, 0.0)
    assert (even.longer, even.memory.total) == pytest.approx((1.0, spread.memory.total))
    whole = found(Pins(tp=1, ep=1, etp=1), weak).best
    assert under_skew(JOB, weak, whole, 1.0) == SkewedStep(longer=1.0, memory=whole.memory)
    assert under_skew(JOB, weak, spread, 8.0) is None, "no rank of eight gets nine times the mean"


def test_skew_over_more_than_64_ranks_is_predicted() -> None:
    """The busiest of 128 ranks takes at most twice as long in MoE layers, of which computing is
    most."""
    slow = flat(16, 8, intra=80000, inter=80000, device=replace(DEVICE, tflops=Tflops(fp32=0.01)))
    many = replace(
        JOB, batch_size=128, model=replace(JOB.model, moe=replace(JOB.model.moe, num_experts=128))
    )
    settings = Settings(pins=Pins(tp=1, ep=128, etp=1), space=replace(FEW, chunks=(1,)))
    best = search(many, slow, settings).best
    skewed = under_skew(many, slow, best, 1.0)
    moe = sum(seconds for part, seconds in best.estimate.parts.items() if part.startswith("moe"))
    assert 1 + moe / best.seconds / 2 < skewed.longer < 1 + moe / best.seconds
    assert under_skew(many, slow, best, 0.0).longer == pytest.approx(1.0, rel=1e-3)


def test_a_ranking_by_other_seconds_changes_neither_what_helps_nor_what_skew_costs() -> None:
    """Under recorded counts, or by a profile, steps take longer than the description of the cluster
    says."""
    result = found()
    slower = replace(
        result.best, estimate=replace(result.best.estimate, seconds=3 * result.best.seconds)
    )
    changed = replace(result, ranking=(slower,), by_ep={})
    assert changes(JOB, SLOW_PORTS, changed) == changes(JOB, SLOW_PORTS, replace(result, by_ep={}))
    assert under_skew(JOB, SLOW_PORTS, slower, 1.0) == under_skew(JOB, SLOW_PORTS, result.best, 1.0)
