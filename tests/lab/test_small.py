"""Splits of a frozen model over small cards: what a step spends, what the planner is asked, and
what is claimed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.program.plan import Plan
from moesaic_lab.measure import Timing
from moesaic_lab.small import FrozenModule, SmallCell, SmallPlace, Virtual, claims, read_config
from moesaic_lab.virtual import Accelerator

PLACE = SmallPlace(name="one", nodes=4, ranks_per_node=1, tokens_per_rank=128, gflops=1e6)


def test_cells_stand_for_cards_whose_wire_or_computing_binds() -> None:
    places = read_config().cells
    assert {place.computes for place in places} == {0, 1}
    for place in places:
        assert place.layers % place.world == 0
        layer = place.job.step_model(place.planned_on, place.world).layer
        assert (layer.tokens, layer.frozen_bytes, layer.adapters) == (
            place.tokens_per_rank,
            2.0,
            True,
        )


def test_the_planner_sees_the_operations_that_a_step_spends() -> None:
    step = PLACE.job.step_model(PLACE.planned_on, PLACE.world)
    assert 2 * step.attention * PLACE.tokens_per_rank == pytest.approx(PLACE.flops)
    experts = 2 * step.layer.copies * step.layer.matrices * step.layer.dim * step.layer.hidden
    assert experts == pytest.approx(PLACE.flops)


def test_a_layer_runs_twice_forward_and_its_backward_pass_has_no_weights_gradients() -> None:
    virtual = Virtual(PLACE)
    module = FrozenModule(replace(PLACE, num_experts=4 * PLACE.num_experts), virtual.accelerator)
    chosen = torch.arange(PLACE.top_k).repeat(PLACE.tokens_per_rank, 1)
    weights = torch.full(chosen.shape, 1 / PLACE.top_k)

    def layer(x: Tensor) -> Tensor:
        return module(x, chosen, weights)

    virtual.train(layer, lambda: virtual.multiply(PLACE.flops), PLACE.tokens_per_rank)
    passes = 3 * PLACE.layers
    assert virtual.accelerator.charged == pytest.approx(
        passes * 2 * PLACE.flops / (1e9 * PLACE.gflops)
    )


def test_experts_of_other_ranks_cost_an_all_reduce_no_products() -> None:
    accelerator = Accelerator(flops_per_second=1.0, sleep=lambda _: None)
    module = FrozenModule(PLACE, accelerator)
    elsewhere = torch.full((3, PLACE.top_k), module.num_experts)
    module(torch.zeros(3, PLACE.dim), elsewhere, torch.zeros(elsewhere.shape))
    assert accelerator.charged == 0


def cell(picked: str, computes: int, **seconds: float) -> SmallCell:
    timings = {name.replace("_", "-"): Timing.of([each] * 3) for name, each in seconds.items()}
    return SmallCell(
        place=replace(PLACE, computes=computes), plan=Plan(), picked=picked, timings=timings
    )


def test_claims_are_the_worst_ratios_and_the_worst_regret() -> None:
    wire = cell("layers", 0, ours=2.0, all_to_all=4.0, all_reduce=2.5, layers=1.0)
    computing = cell("layers", 1, ours=1.0, all_to_all=2.0, all_reduce=3.0, layers=1.6)
    found = {claim.name: claim.value for claim in claims([wire, computing])}
    assert found["small.over_transformers_ep"] == pytest.approx(2.0 / 2.5)
    assert found["small.over_layer_split"] == pytest.approx(1 / 1.6)
    assert found["small.pick_regret"] == pytest.approx(0.6)
    assert claims([wire])[1].value is None
