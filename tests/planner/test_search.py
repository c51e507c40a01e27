"""The search: layouts that fit, floors that hold, memory that counts, the best plan near the best
of all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from moesaic.errors import InputError
from moesaic.planner.candidates import Pins, SearchSpace, layouts
from moesaic.planner.job import DataShape, Job
from moesaic.planner.loads import memory_under_skew
from moesaic.planner.rank_memory import GIB, Memory
from moesaic.planner.search import (
    LOSSLESS,
    LOSSY,
    Result,
    Settings,
    TooLargeError,
    neighbours,
    search,
)
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.planner.step_memory import step_memory
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.shapes import ModelShape, MoEShape
from planner.clusters import DEVICE, flat, tree

JOB = Job(
    batch_size=16,
    model=ModelShape(
        dim=256,
        num_layers=4,
        num_heads=4,
        seq_len=256,
        moe_every=2,
        moe=MoEShape(num_experts=8, hidden=512, shared_hidden=64),
    ),
    data=DataShape(vocab_size=1000),
)
CLUSTER = flat(2, 4, intra=400, inter=40, intra_us=2, inter_us=5, device=DEVICE)
SMALL = SearchSpace(
    schedules=("s1", "s2"),
    gather_weights=(),
    chunks=(1, 2),
    overlap_gather=(False,),
    all_to_alls=("linear", "hier2d", "multicast"),
)


def found(job: Job = JOB, cluster=CLUSTER, **settings: object) -> Result:
    return search(job, cluster, Settings(**{"space": SMALL, "keep": 1000, "refine": 2, **settings}))  # type: ignore[arg-type]


def test_layouts_are_the_meshes_that_divide_everything() -> None:
    grids = layouts(JOB, CLUSTER)
    assert len(grids) == len(set(grids))
    sizes = {(grid.tp, grid.ep, grid.etp, grid.innermost) for grid in grids}
    expected = {
        (tp, ep, etp, inner)
        for tp in (1, 2, 4)
        for ep in (1, 2, 4, 8)
        for etp in (1, 2, 4, 8)
        for inner in (("etp", "ep") if ep > 1 and etp > 1 else ("etp",))
        if ep * etp <= 8
    }
    assert sizes == expected
    assert all(grid.ranks_per_node == 4 for grid in grids)
    fewer = {(grid.tp, grid.ep) for grid in layouts(replace(JOB, batch_size=4), CLUSTER)}
    assert {tp for tp, _ in fewer} == {2, 4}, "eight groups want eight sequences"
    odd = replace(JOB, model=replace(JOB.model, ffn="moe", moe=MoEShape(num_experts=6, hidden=512)))
    assert {grid.ep for grid in layouts(odd, CLUSTER)} == {1, 2}


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (Pins(ep=16), "no layout of 8 ranks: ep 16 does not divide them"),
        (Pins(tp=8), r"tp 8, .*: mesh.tp=8 does not divide model.num_heads=4"),
    ],
)
def test_an_empty_space_of_layouts_is_one_line(pins: Pins, words: str) -> None:
    with pytest.raises(InputError, match=words):
        layouts(JOB, CLUSTER, pins)
    with pytest.raises(
        InputError,
        match=r"the data-parallel groups, 2 does not divide batch_size=3|8 does not divide batch",
    ):
        layouts(replace(JOB, batch_size=3), CLUSTER, Pins(tp=4))


@pytest.mark.parametrize(
    "cluster", [CLUSTER, tree(4, 2), tree(2, 4, leaf=False)], ids=lambda spec: spec.name
)
def test_no_plan_goes_below_the_floor_of_its_layout(cluster) -> None:
    simulator = Simulator(cluster)
    tried = 0
    for grid in layouts(JOB, cluster):
        around = StepCostModel(JOB.step_model(cluster, grid.dp), grid, simulator)
        for plan in (
            Plan(),
            Plan(schedule="s2"),
            Plan(chunks=2),
            Plan(gather_weights=0),
            Plan(all_to_all="multicast"),
        ):
            try:
                compiled = compile_plan(plan, grid)
            except InputError:
                continue
            programs = (compiled.forward, compiled.backward)
            there, back = (
                simulator.run(each, around.model.layer, compiled.grid) for each in programs
            )
            estimate = around.estimate(there, back)
            assert estimate.seconds >= around.floor() * (1 - 1e-9), (grid, plan)
            assert estimate.seconds >= around.compute_bound * (1 - 1e-9), (grid, plan)
            assert sum(estimate.parts.values()) == pytest.approx(estimate.seconds)
            assert around.floor(compression=8.0) <= around.floor()
            tried += 1
    assert tried > 60


@pytest.mark.parametrize("hidden", [128, 512])
def test_a_plan_that_moves_weights_does_not_go_below_the_floor(hidden: int) -> None:
    """Weights cross a link once in a pass, where tokens go and results come back."""
    cluster = flat(8, 1, intra=400, inter=0.4, intra_us=2, inter_us=5, device=DEVICE)
    moe = replace(JOB.model.moe, hidden=hidden)
    job = replace(JOB, batch_size=128, model=replace(JOB.model, moe=moe))
    grid = Grid(world=8, ep=8, ranks_per_node=1)
    # parameters outside the experts move once in so many micro-batches
    model = replace(job.step_model(cluster, grid.dp), micro_batches=64, held="parameters")
    around = StepCostModel(model, grid, Simulator(cluster))
    compiled = compile_plan(Plan(gather_weights=0), grid)
    passes = around.simulator.passes(compiled.forward, compiled.backward, model.layer, grid)
    seconds = around.estimate(*passes).seconds
    assert around.floor() <= seconds <= 2 * around.floor()
    assert around.link_bound <= seconds


def test_the_best_is_near_the_best_of_all_combinations() -> None:
    pins = Pins(innermost="etp", tp=2, etp=2)
    for cluster in (CLUSTER, tree(2, 4, leaf=False)):
        quick = found(cluster=cluster, pins=pins)
        full = found(cluster=cluster, pins=pins, exhaustive=True, refine=1000)
        assert quick.best.seconds <= 1.01 * full.best.seconds
        # it tries one order of plans without chunks
        assert full.best.seconds <= 1.001 * quick.best.seconds
        assert quick.num_simulated < full.num_simulated


@pytest.mark.parametrize(("ep", "etp", "top_k"), [(2, 4, 2), (4, 2, 4)])
def test_choices_that_go_only_together_are_found(ep: int, etp: int, top_k: int) -> None:
    """Multicast is best with S1 and S2 and does not go with S3, so no single choice leads from
    there to S3, the best."""
    moe = MoEShape(num_experts=8, hidden=1024, top_k=top_k)
    job = replace(JOB, model=replace(JOB.model, moe_every=1, moe=moe))
    cluster = flat(2, 4, intra=1000, inter=200, intra_us=2, inter_us=5, device=DEVICE)
    space = replace(
        SMALL, schedules=("s1", "s2", "s3"), chunks=(1, 4), all_to_alls=("linear", "multicast")
    )
    how = {"space": space, "cluster": cluster, "pins": Pins(tp=1, ep=ep, etp=etp, innermost="etp")}
    quick = found(job, **how)
    full = found(job, exhaustive=True, **how)
    assert quick.best.plan.schedule == "s3"
    assert quick.best.seconds == full.best.seconds


def test_leaving_layouts_out_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = found(refine=1, pins=Pins(tp=1))
    monkeypatch.setattr(StepCostModel, "floor", lambda *_, **__: 0.0)
    slow = found(refine=1, pins=Pins(tp=1))
    assert (slow.num_left_out, quick.num_left_out > 0) == (0, True)
    assert quick.best.seconds == slow.best.seconds


def test_a_ranking_is_in_order_and_says_each_time_once() -> None:
    result = found()
    seconds = [each.seconds for each in result.ranking]
    assert seconds == sorted(seconds)
    keys = [(each.grid, f"{each.seconds:.6g}") for each in result.ranking]
    assert len(keys) == len(set(keys))
    assert all(each.seconds >= each.bound_seconds * (1 - 1e-9) for each in result.ranking)
    assert result.bound_seconds <= min(each.bound_seconds for each in result.ranking)


def test_memory_decides_and_the_refusal_says_by_how_much() -> None:
    everything = found(refine=1)
    needs = sorted(each.memory.total for each in everything.ranking)
    limit = needs[len(needs) // 4]
    some = found(cluster=with_memory(limit / GIB + 1), refine=1)
    assert some.ranking
    assert all(each.memory.total <= limit * (1 + 1e-9) for each in some.ranking)
    with pytest.raises(TooLargeError) as refusal:
        found(cluster=with_memory(1.01))
    assert refusal.value.grid.world == 8
    text = str(refusal.value)
    assert "the model fits no layout of 8 ranks: the smallest, tp" in text
    assert "more than a device of flat has (1.01)" in text
    assert "\n" not in text
    over = float(text.split(" in reserve: ")[1].split(" more")[0])
    needed = float(text.split(", needs ")[1].split(" GiB")[0])
    # one is rounded up to a tenth, the other to the nearest
    assert over == pytest.approx(needed + 1 - 1.01, abs=0.16)


def with_memory(gib: float):
    return replace(CLUSTER, device=replace(DEVICE, memory_gib=gib))


def test_whole_experts_win_where_links_are_slow_and_tokens_many() -> None:
    few = replace(JOB, model=replace(JOB.model, ffn="moe", moe=MoEShape(num_experts=2, hidden=32)))
    many = replace(few, batch_size=512)
    slow = flat(2, 4, intra=40, inter=1, device=DEVICE)
    result = found(many, slow)
    assert result.best.grid.ep == 1
    assert result.by_ep[1].best == result.best
    large = replace(
        JOB,
        model=replace(JOB.model, ffn="moe", moe=MoEShape(num_experts=8, hidden=4096)),
        batch_size=8,
    )
    result = found(large, slow)
    assert result.best.grid.ep > 1
    one = result.by_ep[1].best
    assert one.seconds > result.best.seconds
    assert one.seconds >= result.by_ep[1].floor_seconds


def test_lossy_codecs_are_found_only_where_they_are_listed() -> None:
    pins = Pins(tp=1, ep=8)
    slow = flat(2, 4, inter=1, device=DEVICE)
    lossless = found(
        space=replace(LOSSLESS, chunks=(1, 2), orders=("fifo",)), cluster=slow, pins=pins
    )
    assert all(each.plan.is_lossless for each in lossless.ranking)
    lossy = found(
        space=replace(SMALL, all_to_alls=("linear",), codecs=LOSSY, backward_codecs=LOSSY),
        cluster=slow,
        pins=pins,
    )
    assert "none" not in (lossy.best.plan.codec, lossy.best.plan.backward_codec)
    assert lossy.best.seconds < 0.95 * lossless.best.seconds


def test_a_space_that_fits_no_layout_is_one_line() -> None:
    space = replace(SMALL, schedules=("ted",))
    with pytest.raises(
        InputError, match=r"no plan of the search space fits any layout; the last one: .*ted"
    ):
        found(space=space, pins=Pins(tp=2, ep=8, etp=1))


def test_counts_rank_anew() -> None:
    # Multicast sends a token once to the node of an expert that all want.
    space = replace(SMALL, all_to_alls=("linear",))
    how = Settings(space=space, keep=3, refine=1, pins=Pins(tp=1, etp=1))
    even = search(JOB, CLUSTER, how)
    counts = np.zeros((8, 8), dtype=np.int64)
    counts[:, 0] = 9
    counts[:, 1:] = 1
    skewed = search(JOB, CLUSTER, how, counts=[counts])
    assert skewed.best.seconds > even.best.seconds
    both = search(JOB, CLUSTER, how, counts=[counts, np.ones((8, 8), dtype=np.int64)])
    assert even.best.seconds < both.best.seconds < skewed.best.seconds
    with pytest.raises(InputError, match=r"counts of shape \(8, 3\) .* do not fit 8 experts"):
        search(JOB, CLUSTER, how, counts=[np.ones((8, 3), dtype=np.int64)])


EP_8 = Pins(tp=1, ep=8, etp=1)
KEPT = 256 * 2 + 2 * 512 * 2 + 4
USED = (5 * 512 + 4 * 256) * 2 + 44
"""Bytes of a row that a layer of `JOB` keeps (input, gate and up rows, routing weight), and of its
largest buffers: backward, five of the experts' inner width, four of a token's, and its numbers."""


def of_even_rank(grid: Grid) -> tuple[StepCostModel, Memory]:
    cost_model = StepCostModel(JOB.step_model(CLUSTER, grid.dp), grid, Simulator(CLUSTER))
    compiled = compile_plan(Plan(), grid)
    return cost_model, step_memory(cost_model, compiled)


@pytest.mark.parametrize("ep", [8, 4, 2])
def test_memory_grows_with_skew_from_that_of_even_counts(ep: int) -> None:
    grid = Grid(world=8, ep=ep, ranks_per_node=4)
    cost_model, even = of_even_rank(grid)
    layer = cost_model.model.layer
    compiled = compile_plan(Plan(), grid)
    found = [
        memory_under_skew(
            partial(step_memory, cost_model), cost_model.simulator, compiled, layer, max_vio
        )
        for max_vio in (0.0, 0.25, 0.5, 1.0, 3.0)
    ]
    assert found[0] == even
    totals = [each.total for each in found]
    assert totals == sorted(totals)
    assert found[3].activations == even.activations + 2 * 1024 * KEPT, (
        "two layers, twice the mean of 1,024 rows"
    )
    # rows of several experts of a rank are gathered, and their gradients placed
    assert found[3].buffers == even.buffers + 1024 * (USED + 3 * 256 * 2 * (ep < 8))
    assert found[4].total == found[3].total if ep == 2 else found[4].total > found[3].total, (
        "2 ranks allow at most 1"
    )


def of_calls_by_hand() -> list[np.ndarray]:
    """Return the counts of two calls on eight ranks with an expert each: the busiest get 3,712 and
    1,472 rows of 8,192."""
    first = np.full((8, 8), 80)
    second = np.full((8, 8), 120)
    first[:, 0] = 464
    second[:, 3] = 184
    return [first, second]


def test_the_memory_under_a_trace_is_that_of_its_busiest_ranks_by_hand() -> None:
    _, even = of_even_rank(Grid(world=8, ep=8, ranks_per_node=4))
    one = Settings(
        space=SearchSpace(chunks=(1,), all_to_alls=("linear",)), keep=1, refine=1, pins=EP_8
    )
    planned = search(JOB, CLUSTER, one, counts=of_calls_by_hand()).best
    assert planned.memory.activations == even.activations + 2 * ((3712 + 1472) / 2 - 1024) * KEPT, (
        "a mean over layers"
    )
    assert planned.memory.buffers == even.buffers + (3712 - 1024) * USED, "one layer at a time"
    assert (planned.memory.weights, planned.memory.optimizer) == (even.weights, even.optimizer)


def test_plans_that_fit_only_even_loads_are_not_offered() -> None:
    how = Settings(space=SMALL, keep=1, refine=1, pins=EP_8)
    even = search(JOB, CLUSTER, how).best
    loaded = search(JOB, CLUSTER, how, counts=of_calls_by_hand()).best
    assert loaded.memory.total > 1.05 * even.memory.total
    tight = with_memory(1 + 1.05 * 1.01 * even.memory.total / GIB)
    assert search(JOB, tight, how).best.memory.total <= 1.01 * even.memory.total
    for more in ({"counts": of_calls_by_hand()}, {"settings": replace(how, max_vio=1.0)}):
        with pytest.raises(
            TooLargeError,
            match="fits no layout of 8 ranks under the given loads: the smallest, tp 1, ep 8",
        ):
            search(JOB, tight, **{"settings": how, **more})  # type: ignore[arg-type]
    enough = with_memory(1 + 1.05 * 1.01 * loaded.memory.total / GIB)
    assert (
        search(JOB, enough, how, counts=of_calls_by_hand()).best.memory.total
        <= 1.01 * loaded.memory.total
    )


def test_what_does_not_fit_and_what_was_not_searched_are_told_apart() -> None:
    assert 1 not in found(pins=EP_8).by_ep
    whole = found(pins=Pins(tp=1, etp=1))
    sizes = {
        ep: results.best.memory.total
        for ep, results in whole.by_ep.items()
        if results.best is not None
    }
    assert not any(results.is_too_large for results in whole.by_ep.values())
    small = min(sizes, key=lambda ep: sizes[ep])
    large = max(sizes, key=lambda ep: sizes[ep])
    least = min(each.memory.total for each in whole.ranking if each.grid.ep == large)
    tight = found(cluster=with_memory(1 + 1.05 * 0.99 * least / GIB), pins=Pins(tp=1, etp=1)).by_ep
    assert tight[large].is_too_large
    assert not tight[small].is_too_large


def test_neighbours_differ_in_one_choice() -> None:
    grid = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)
    plan = Plan(schedule="s2")
    near = list(neighbours(plan, LOSSLESS, grid))
    assert len(near) == len(set(near))
    for other in near:
        assert sum(getattr(plan, name) != getattr(other, name) for name in vars(plan)) == 1
    assert {other.gather_weights for other in near} == {None, 0, 1}
    assert {other.chunks for other in near} == {1, 2, 4, 8}
    pairs = list(neighbours(plan, LOSSLESS, grid, 2))
    assert len(pairs) == len(set(pairs))
    for other in pairs:
        assert sum(getattr(plan, name) != getattr(other, name) for name in vars(plan)) == 2
    assert Plan(schedule="s3", all_to_all="hier2d") in pairs


def test_sizes_of_ep_that_are_searched_to_the_end_agree_with_ep_pinned() -> None:
    settings = Settings(space=SMALL, give_up=1.5, refine=4, finished_eps=2)
    settings = replace(settings, pins=Pins(tp=1))
    result = search(JOB, CLUSTER, settings)
    done = [ep for ep, results in result.by_ep.items() if results.is_searched]
    assert result.best.grid.ep in done
    assert len(done) == min(3, len(result.by_ep))
    for ep in done:
        found = result.by_ep[ep].best
        pinned = search(JOB, CLUSTER, replace(settings, pins=Pins(tp=1, ep=ep))).best
        assert found.seconds == pytest.approx(pinned.seconds, rel=0.02)
