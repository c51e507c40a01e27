"""Load statistics against hand-computed figures."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import make_layer
from moesaic import Capacity
from moesaic.runtime.telemetry import LoadMeter, LoadStatistics


def test_balance_has_no_violation_and_full_entropy() -> None:
    load = LoadStatistics.of([5, 5, 5, 5])
    assert (load.max_violation, load.variation, load.dead_experts, load.needed_capacity_factor) == (
        0,
        0,
        0,
        1,
    )
    assert load.entropy == pytest.approx(1.0)


def test_collapse_has_no_entropy() -> None:
    load = LoadStatistics.of([8, 0, 0, 0], dropped=3)
    assert load.max_violation == 3
    assert load.variation == pytest.approx(math.sqrt(3))
    assert load.dead_experts == 3
    assert load.entropy == 0
    assert load.needed_capacity_factor == 4
    assert load.dropped == 3


def test_an_uneven_load_by_hand() -> None:
    load = LoadStatistics.of([6, 2, 0, 4])
    assert load.max_violation == 1
    assert load.variation == pytest.approx(math.sqrt((9 + 1 + 9 + 1) / 4) / 3)
    shares = [1 / 2, 1 / 6, 1 / 3]
    assert load.entropy == pytest.approx(-sum(s * math.log(s) for s in shares) / math.log(4))


def test_no_copies_and_one_expert_are_defined() -> None:
    empty = LoadStatistics.of([0, 0])
    assert (
        empty.max_violation,
        empty.entropy,
        empty.dead_experts,
        empty.needed_capacity_factor,
    ) == (0, 0, 2, 0)
    assert LoadStatistics.of([7]).entropy == 1
    assert empty.as_dict()["tokens_per_expert"] == [0, 0]


def test_the_needed_factor_is_the_smallest_that_drops_nothing() -> None:
    layer = make_layer("softmax").eval()
    x = torch.randn(16, 8)
    requested = layer(x, return_routing=True)[1].requested
    needed = LoadStatistics.of(requested.tolist()).needed_capacity_factor
    assert int(layer(x, capacity=Capacity.fixed(needed), return_routing=True)[1].dropped) == 0
    assert int(layer(x, capacity=Capacity.fixed(needed * 0.8), return_routing=True)[1].dropped) > 0


def test_the_meter_sums_micro_batches_per_layer_and_starts_anew() -> None:
    layers = [make_layer(capacity=Capacity.fixed(0.5)), make_layer()]
    batches = [
        [layer(torch.randn(8, 8), return_routing=True)[1] for layer in layers] for _ in range(3)
    ]
    meter = LoadMeter()
    for routings in batches:
        meter.add(routings)
    first, second = meter.take()
    assert first.tokens_per_expert == sum(batch[0].requested for batch in batches).tolist()
    assert second.tokens_per_expert == sum(batch[1].requested for batch in batches).tolist()
    assert first.dropped == sum(int(batch[0].dropped) for batch in batches) > 0
    assert second.dropped == 0
    assert meter.take() == []


def test_the_meter_leaves_routings_alone() -> None:
    routing = make_layer()(torch.randn(8, 8), return_routing=True)[1]
    before = routing.requested.clone()
    meter = LoadMeter()
    meter.add([routing])
    meter.add([routing])
    assert torch.equal(routing.requested, before)


def test_the_meter_counts_copies_whose_weight_is_not_finite() -> None:
    layer = make_layer("softmax")
    x = torch.randn(8, 8)
    x[3] = math.nan
    meter = LoadMeter()
    for _ in range(2):
        meter.add([layer(x, return_routing=True)[1]])
    (load,) = meter.take()
    assert load.nonfinite == load.as_dict()["nonfinite"] == 4
    meter.add([layer(torch.randn(8, 8), return_routing=True)[1]])
    assert meter.take()[0].nonfinite == 0
