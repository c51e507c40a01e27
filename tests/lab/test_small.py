"""Splits of a frozen model over small cards: what a step spends and sends, what the planner is
asked, and what is claimed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moesaic.program.plan import Plan
from moesaic_lab.measure import Timing
from moesaic_lab.performance_page import line
from moesaic_lab.small import (
    IN_FLIGHT,
    LAYERS,
    OF_OURS,
    ONE_BY_ONE,
    OTHERS,
    OURS,
    PIPELINE,
    TWO_STAGES,
    Block,
    FrozenModule,
    Layers,
    SmallCell,
    SmallPlace,
    Split,
    claims,
    methods_of,
    planned_splits,
    predicted_seconds,
    read_config,
)
from moesaic_lab.virtual import Accelerator
from worlds import on_ranks

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
    accelerator = Accelerator(flops_per_second=1.0, sleep=lambda _: None)
    module = FrozenModule(replace(PLACE, num_experts=4 * PLACE.num_experts), accelerator)
    chosen = torch.arange(PLACE.top_k).repeat(PLACE.tokens_per_rank, 1)
    weights = torch.full(chosen.shape, 1 / PLACE.top_k)

    def experts(x: Tensor) -> Tensor:
        return module(x, chosen, weights)

    block = Block(lambda _: accelerator.multiply(PLACE.flops), experts)
    y = Layers([block] * PLACE.layers)(torch.zeros(PLACE.tokens_per_rank, PLACE.dim))
    assert accelerator.charged == pytest.approx(2 * PLACE.layers * PLACE.flops)
    y.backward(torch.ones_like(y))
    assert accelerator.charged == pytest.approx(3 * 2 * PLACE.layers * PLACE.flops)


def test_experts_of_other_ranks_cost_an_all_reduce_no_products() -> None:
    accelerator = Accelerator(flops_per_second=1.0, sleep=lambda _: None)
    module = FrozenModule(PLACE, accelerator)
    elsewhere = torch.full((3, PLACE.top_k), module.num_experts)
    module(torch.zeros(3, PLACE.dim), elsewhere, torch.zeros(elsewhere.shape))
    assert accelerator.charged == 0


def test_every_split_of_finetune_is_planned() -> None:
    steps = planned_splits(PLACE)
    assert tuple(steps) == (OURS, TWO_STAGES, LAYERS)
    assert [step.grid.world for step in steps.values()] == [4, 2, 1]
    predicted = predicted_seconds(PLACE, steps)
    flying = {name + IN_FLIGHT for name in (OURS, TWO_STAGES)}  # what exchanges rows
    assert {*predicted} == {*steps, *flying}
    assert predicted[OURS] <= steps[OURS].seconds


NAMES = {
    "ours": OURS,
    "flying": OURS + IN_FLIGHT,
    "stages": TWO_STAGES,
    "layers": LAYERS,
    "pipeline": PIPELINE,
    "one_by_one": ONE_BY_ONE,
    "all_to_all": "all-to-all",
    "all_reduce": "all-reduce",
}


def cell(picked: str, name: str, computes: int, **seconds: float) -> SmallCell:
    timings = {NAMES[key]: Timing.of([each] * 3) for key, each in seconds.items()}
    return SmallCell(
        place=replace(PLACE, name=name, computes=computes),
        plan=Plan(),
        picked=picked,
        timings=timings,
    )


WIRE = cell(
    LAYERS,
    "25gbe",
    0,
    ours=2.0,
    layers=1.0,
    stages=1.5,
    pipeline=1.05,
    one_by_one=2.5,
    all_to_all=4.0,
    all_reduce=3.0,
)
COMPUTING = cell(
    OURS,
    "p2p",
    1,
    ours=1.0,
    flying=0.8,
    layers=1.6,
    pipeline=1.6,
    one_by_one=4.0,
    all_to_all=2.0,
    all_reduce=3.0,
)


def test_claims_are_the_worst_ratios_and_the_worst_regret() -> None:
    found = {claim.name.split(".")[1]: claim for claim in claims([WIRE, COMPUTING])}
    worst = {
        "over_transformers_ep": (1.0 / 2.0, "p2p"),
        "over_transformers_ep_25gbe": (1.0 / 3.0, "25gbe"),
        "over_layer_split": (1 / 1.6, "p2p"),
        "over_1f1b": (1 / 1.05, "25gbe"),
        "over_one_by_one": (0.4, "25gbe"),
        "pick_regret": (0.25, "p2p"),
    }
    assert {name: (claim.value, claim.case) for name, claim in found.items()} == {
        name: (pytest.approx(value), case) for name, (value, case) in worst.items()
    }
    assert all(claim.interval == (claim.value, claim.value) for claim in found.values())
    assert [claim.name for claim in claims([WIRE]) if claim.value is None] == [
        "small.over_layer_split"
    ]


@pytest.mark.parametrize(
    ("seconds", "pairs", "value"),
    [(1.02, 30, 1.0), (0.98, 30, 1.0), (1.02, 29, 1.02), (1.04, 30, 1.04)],
)
def test_what_takes_as_long_as_1f1b_counts_as_equal(
    seconds: float, pairs: int, value: float
) -> None:
    near = {LAYERS: (seconds,) * pairs, PIPELINE: (1.0,) * pairs}
    claim = next(each for each in claims([replace(WIRE, near=near)]) if "1f1b" in each.name)
    assert claim.value == pytest.approx(value)
    assert claim.interval == (pytest.approx(seconds), pytest.approx(seconds))
    assert replace(WIRE, near=near).row["over_1f1b"] == pytest.approx(seconds)


def test_a_row_has_the_times_of_all_methods_and_names_the_fastest_of_ours() -> None:
    row = COMPUTING.row
    assert (row["picked"], row["fastest"]) == (OURS, OURS + IN_FLIGHT)
    assert row["ours, in flight_ms"] == pytest.approx(800)
    assert row["over_one_by_one_95"] == [pytest.approx(0.25)] * 2


FEW = replace(PLACE, tokens_per_rank=64, dim=32, hidden=16, micro_batches=2)
SPLITS = {
    OURS: Split(stages=1, plan=Plan(all_to_all="multicast", chunks=2)),
    TWO_STAGES: Split(stages=2, plan=Plan(order="fifo")),
    LAYERS: Split(stages=4, plan=Plan(order="fifo")),
}


def spent(place: SmallPlace, splits: Mapping[str, Split]) -> dict[str, float]:
    """Return the operations that this rank's products take in a method's second step; in the first
    one torch's schedules look what passes between stages."""
    accelerator = Accelerator(flops_per_second=1.0, sleep=lambda _: None)
    found = {}
    for name, step in methods_of(place, splits, accelerator, seed=0).items():
        step()
        before = accelerator.charged
        step()
        found[name] = accelerator.charged - before
    return found


@pytest.mark.random
def test_all_methods_train_equally_many_tokens() -> None:
    of_ranks = on_ranks(4, spent, FEW, SPLITS)
    assert tuple(of_ranks[0]) == (*OF_OURS, *OTHERS)
    passes = 3 * 2 * FEW.layers * FEW.sequences
    for name in of_ranks[0]:
        total = sum(of_rank[name] for of_rank in of_ranks)
        assert total == pytest.approx(passes * FEW.flops), name


def test_the_page_of_fine_tuning_gives_the_range_of_each_ratio() -> None:
    root = Path(__file__).parents[2]
    found = json.loads((root / "benchmarks" / "results" / "small.json").read_text("utf-8"))
    text = " ".join((root / "docs" / "finetune.md").read_text("utf-8").split())
    assert all(row["regret"] == 0 for row in found["rows"])
    assert "what is picked was the fastest of ours in all six cells: " in text
    for name, whose in (
        ("one_by_one", "the time of one batch after another over the layers (`device_map`)"),
        ("1f1b", "torch's 1F1B"),
        ("transformers", "transformers' expert parallelism"),
    ):
        ratios = [row[f"over_{name}"] for row in found["rows"]]
        assert len(ratios) == 6
        assert f"{min(ratios):.2f} to {max(ratios):.2f} of {whose}" in text


def test_the_worst_cell_is_named_in_the_results_and_on_the_page() -> None:
    claim = next(each for each in claims([WIRE, COMPUTING]) if "regret" in each.name)
    assert claim.as_dict()["case"] == "p2p"
    assert line([claim.as_dict()]) == ["`small.pick_regret`", "0.25 (p2p)", "<= 0.03", "**no**"]
