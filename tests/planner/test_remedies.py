"""What would make a model fit: changes that do say so, and a search under them finds a layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from helpers import thinned
from moesaic.planner.answer import in_words, remedies
from moesaic.planner.candidates import Pins, candidates, layouts
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.hub import read_shape
from moesaic.planner.job import DataShape, Job
from moesaic.planner.rank_memory import FRAGMENTED, GIB, usable_bytes
from moesaic.planner.search import LOSSLESS, Settings, TooLargeError, search, smallest_layout
from moesaic.planner.simulator import Simulator
from moesaic.planner.split import JobSplit, SplitCostModel
from moesaic.planner.step import StepCostModel
from moesaic.planner.step_memory import least_bytes_of_plans, step_memory
from moesaic.program.grid import Grid
from planner.hub_configs import QWEN3_30B

SHAPE = read_shape({**QWEN3_30B, "num_hidden_layers": 6}, "config.json", seq_len=8192)
SPACE = replace(
    LOSSLESS,
    all_to_alls=("linear",),
    chunks=(1,),
    orders=("fifo",),
    overlap_gather=(False,),
    gather_weights=(0,),
)
FEW = Settings(space=SPACE, pins=Pins(tp=1, etp=1), keep=1, refine=1, give_up=1.0)
MEMORY = 22.0
"""GiB of a device."""


def job(world: int) -> Job:
    return Job(
        batch_size=world, accumulation=4, model=SHAPE, data=DataShape(vocab_size=SHAPE.vocab)
    )


def on(memory_gib: float, nodes: int = 1) -> ClusterSpec:
    cluster = read_cluster("dgx-h100", nodes=nodes)
    return replace(cluster, device=replace(cluster.device, memory_gib=memory_gib))


def test_a_change_that_is_said_to_fit_does() -> None:
    cluster = on(MEMORY)
    with pytest.raises(TooLargeError):
        search(job(8), cluster, FEW)

    def larger(count: int) -> tuple[Job, ClusterSpec]:
        return job(count), on(MEMORY, count // 8)

    found = remedies(job(8), cluster, FEW, larger)
    by_name = {each.what: each for each in found}
    assert [each.fits for each in found] == sorted((each.fits for each in found), reverse=True)
    more = next(each for name, each in by_name.items() if "devices, blocks recomputed" in name)
    world = int(more.what.split()[0])
    assert more.fits
    again = replace(job(world), model=replace(SHAPE, checkpoint_activations=True))
    best = search(again, on(MEMORY, world // 8), FEW).best
    assert best.memory.total <= usable_bytes(on(MEMORY), 1.0)
    assert best.memory.total >= more.num_bytes * 0.999, "what is told is the least"
    if world > 16:
        half = replace(job(world // 2), model=again.model)
        with pytest.raises(TooLargeError):
            search(half, on(MEMORY, world // 16), FEW)
    gib = next(each for name, each in by_name.items() if name.startswith("devices of "))
    enough = float(gib.what.split()[2])
    assert search(
        replace(job(8), model=again.model), on(enough), FEW
    ).best.memory.total <= usable_bytes(on(enough), 1.0)


class CountingSimulator(Simulator):
    """Counts the plans that are simulated."""

    simulated = 0

    def passes(self, *arguments: Any, **options: Any) -> Any:
        self.simulated += 1
        return super().passes(*arguments, **options)


def test_no_plan_is_simulated_if_a_bound_shows_that_none_fits() -> None:
    simulator = CountingSimulator(on(MEMORY))
    with pytest.raises(TooLargeError):
        search(job(8), simulator.cluster, FEW, simulator=simulator)
    assert simulator.simulated == 0


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    ("tp", "ep", "etp"), thinned([(2, 4, 2), (1, 8, 1), (8, 2, 4), (1, 1, 1)], every=4)
)
def test_no_plan_needs_less_than_the_bound_on_its_layout(
    tp: int, ep: int, etp: int, recomputes: bool
) -> None:
    """And the bound is near: it is what rules layouts out before any plan is compiled."""
    shaped = replace(job(8), model=replace(SHAPE, checkpoint_activations=recomputes))
    cluster = on(MEMORY)
    grid = Grid(world=8, tp=tp, ep=ep, etp=etp, ranks_per_node=8)
    cost_model = StepCostModel(shaped.step_model(cluster, grid.dp), grid, Simulator(cluster))
    space = replace(
        LOSSLESS,
        all_to_alls=("linear", "multicast"),
        chunks=(1, 2),
        orders=("fifo",),
        codecs=("none", "int8"),
    )
    needs = [step_memory(cost_model, plan).total for plan in candidates(grid, space)]
    bound = least_bytes_of_plans(cost_model)
    assert bound <= min(needs) < 1.25 * bound


def test_what_the_smallest_layout_needs_is_what_the_advice_says() -> None:
    """On devices that no lower bound fits, and on those that bounds fit and plans do not."""
    recomputed = replace(job(8), model=replace(SHAPE, checkpoint_activations=True))
    needed = smallest_layout(
        [
            SplitCostModel(recomputed, grid, JobSplit(), Simulator(on(MEMORY)))
            for grid in layouts(recomputed, on(MEMORY), FEW.pins)
        ]
    )[1]
    enough = needed * FRAGMENTED / GIB + FEW.reserve_gib
    for memory_gib in (MEMORY, enough - 0.01):
        with pytest.raises(TooLargeError) as refusal:
            search(recomputed, on(memory_gib), FEW)
        said = str(refusal.value)
        assert (
            "ranks, even with blocks recomputed: the smallest, tp 1, ep 8, etp 1, needs "
            f"{needed / GIB:.1f} GiB,"
        ) in said
        over = math.ceil(10 * (enough - memory_gib)) / 10
        assert f" in reserve: {over:.1f} more than" in said
        assert refusal.value.job == recomputed
        advice = in_words(remedies(refusal.value.job, on(memory_gib), FEW))
        assert (
            f"devices of {math.ceil(enough)} GiB, blocks recomputed ({needed / GIB:.1f} GiB)"
            in advice
        )
    assert search(recomputed, on(enough + 0.01), FEW).best.memory.total == pytest.approx(needed)


def test_changes_are_told_with_what_a_rank_then_needs() -> None:
    found = remedies(job(8), on(MEMORY), FEW)
    words = in_words(found)
    assert words.startswith("what fits: ")
    assert "; not enough alone: " in words
    for each in found:
        assert f"{each.what} ({each.num_bytes / GIB:.1f}" in words


def test_pins_that_are_in_the_way_are_named() -> None:
    assert any(each.what == "sizes of axes left free" for each in remedies(job(8), on(MEMORY), FEW))
    free = replace(FEW, pins=Pins())
    assert not any(
        each.what == "sizes of axes left free" for each in remedies(job(8), on(MEMORY), free)
    )


def test_remedies_keep_to_a_given_number_of_stages() -> None:
    """What fits without stages is no advice on two of them, but for leaving them out."""
    recomputed = replace(job(8), model=replace(SHAPE, checkpoint_activations=True))
    staged = replace(FEW, most_stages=8, pp=2)
    with pytest.raises(TooLargeError) as refusal:
        search(recomputed, on(MEMORY), staged)
    found = {each.what: each for each in remedies(recomputed, on(MEMORY), staged)}
    assert "no stages (without --pp)" in found
    (device,) = (each for each in found.values() if each.what.startswith("devices of"))
    assert device.num_bytes == pytest.approx(refusal.value.num_bytes)


def test_devices_that_fit_are_those_of_the_smallest_layout_of_any_number_of_stages() -> None:
    recomputed = replace(job(8), model=replace(SHAPE, checkpoint_activations=True))
    staged = replace(FEW, most_stages=2)
    with pytest.raises(TooLargeError) as refusal:
        search(recomputed, on(12.0), staged)
    (device,) = (
        each for each in remedies(recomputed, on(12.0), staged) if each.what.startswith("devices")
    )
    assert device.num_bytes == pytest.approx(refusal.value.num_bytes)
    enough = refusal.value.num_bytes * FRAGMENTED / GIB + staged.reserve_gib
    assert device.what.startswith(f"devices of {math.ceil(enough)} GiB")
    assert search(recomputed, on(math.ceil(enough)), staged).best.memory.total > 0
