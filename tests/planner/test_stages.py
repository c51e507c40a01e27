"""The best layout as Megatron shards: the least of all that fit, recomputed only where it must be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from moesaic.errors import InputError
from moesaic.planner.candidates import Pins
from moesaic.planner.cluster import read_cluster
from moesaic.planner.hub import read_shape
from moesaic.planner.memory import GIB, usable_bytes
from moesaic.planner.model import DataShape, Job
from moesaic.planner.others import OthersLayout, predict
from moesaic.planner.search import PlannedStep, Settings, search
from moesaic.planner.stages import best_in_stages
from planner.hub_configs import QWEN3_30B

H100 = read_cluster("dgx-h100", nodes=2)
SHAPE = read_shape({**QWEN3_30B, "num_hidden_layers": 8}, "config.json", seq_len=4096)
JOB = Job(batch_size=16, accumulation=4, model=SHAPE, data=DataShape(vocab_size=SHAPE.vocab))


@pytest.fixture(scope="module")
def best() -> PlannedStep:
    return search(JOB, H100, Settings(pins=Pins(tp=1, etp=1, ep=8), keep=1)).best


def as_there(best: PlannedStep) -> dict[str, Any]:
    return {"tp": best.grid.tp, "crossing": best.plan.crossing}


def every(best: PlannedStep) -> dict[OthersLayout, PlannedStep]:
    """Predict every combination that is tried, those that cannot be left out."""
    found = {}
    for pp, ep, (schedule, runs) in itertools.product(
        (1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (("1f1b", 1), ("1f1b", 2), ("zb-v", 1), ("dualpipev", 1))
    ):
        layout = OthersLayout(
            pp=pp, ep=ep, schedule=schedule, virtual_pp=runs, global_batch=64, all_to_all=best.plan.all_to_all
        )
        if pp > 1 or (schedule, runs) == ("1f1b", 1):
            try:
                found[layout] = predict(JOB, H100, layout)
            except InputError:
                continue
    return found


def test_no_layout_that_fits_makes_a_shorter_step(best: PlannedStep) -> None:
    told = best_in_stages(JOB, H100, **as_there(best))
    assert told is not None
    layout, step = told
    of = every(best)
    assert step.seconds == predict(JOB, H100, layout).seconds
    least = min(of, key=lambda each: of[each].seconds)
    assert (layout, step.seconds) == (least, of[least].seconds)


def test_blocks_are_recomputed_where_nothing_else_fits(best: PlannedStep) -> None:
    of_two = [
        OthersLayout(pp=2, ep=ep, global_batch=64, all_to_all=best.plan.all_to_all, recompute=recompute)
        for ep in (1, 2, 4, 8) for recompute in ((), ("block",))
    ]  # fmt: skip
    sizes = {layout: predict(JOB, H100, layout).memory.total for layout in of_two}
    kept, again = (
        min(sizes[each] for each in of_two if bool(each.recompute) == is_again) for is_again in (False, True)
    )
    assert again < kept
    for size, recompute in ((kept, ()), ((kept + again) / 2, ("block",))):
        reserve = H100.device.memory_gib - 1.0501 * size / GIB
        told = best_in_stages(JOB, H100, **as_there(best), stages=2, reserve_gib=reserve)
        assert told is not None
        assert (told[0].pp, told[0].recompute) == (2, recompute)
        assert told[1].memory.total <= usable_bytes(H100, reserve)
    assert (
        best_in_stages(JOB, H100, **as_there(best), stages=2, reserve_gib=H100.device.memory_gib - again / GIB) is None
    )


def test_long_sequences_may_be_shared(best: PlannedStep) -> None:
    shape = replace(SHAPE, seq_len=65536)
    long = replace(JOB, model=shape, batch_size=16)
    tight = best_in_stages(long, H100, **as_there(best), reserve_gib=40)
    assert tight is not None
    assert tight[0].cp > 1
