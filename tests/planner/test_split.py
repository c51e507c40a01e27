"""Pipeline stages and what ranks hold: what a step under them costs, and the search over them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic.models.gpt import GPT
from moesaic.models.parts import cut_model
from moesaic.planner.candidates import Pins, SearchSpace, layouts
from moesaic.planner.cluster import ClusterSpec, Host
from moesaic.planner.job import DataShape, Job
from moesaic.planner.loads import memory_under_counts, memory_under_skew
from moesaic.planner.plan_files import FoundFor, read_planned, read_step, write_planned
from moesaic.planner.search import Result, Settings, search
from moesaic.planner.simulator import Simulator
from moesaic.planner.split import JobSplit, SplitCostModel, holdings, near_splits, split_choices
from moesaic.planner.step import StepCostModel
from moesaic.planner.step_memory import step_memory
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import Workload, skewed_counts
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.shapes import ModelShape, MoEShape
from moesaic.train.presets import demo
from planner.clusters import DEVICE, flat

JOB = Job(
    batch_size=16,
    accumulation=8,
    model=ModelShape(
        dim=256,
        num_layers=6,
        num_heads=4,
        seq_len=128,
        moe_every=2,
        moe=MoEShape(num_experts=8, hidden=512, shared_hidden=64),
    ),
    data=DataShape(vocab_size=1000),
)
SLOW = replace(
    flat(2, 2, intra=8, inter=0.15, intra_us=50, inter_us=300, device=DEVICE),
    host=Host(runs_compute=True, task_us=30.0, message_us=60.0),
)
"""Two boxes with a slow link between them."""
PLAIN = SearchSpace(
    schedules=("s1",), gather_weights=(), chunks=(1,), all_to_alls=("linear",), orders=("fifo",)
)
FAST = flat(2, 4, intra=400, inter=40, intra_us=2, inter_us=5, device=DEVICE)


def simulated(
    model: SplitCostModel | StepCostModel,
) -> tuple[Compiled, tuple[Simulated, Simulated]]:
    compiled = compile_plan(Plan(), model.grid)
    passes = model.simulator.passes(
        compiled.forward, compiled.backward, model.model.layer, compiled.grid
    )
    return compiled, passes


def grid_of(world: int, **sizes: int) -> Grid:
    return Grid(world=world, ranks_per_node=min(world, 4), **sizes)


def test_without_stages_and_held_copies_a_step_costs_what_it_always_did() -> None:
    grid = grid_of(8, ep=4)
    simulator = Simulator(FAST)
    whole = SplitCostModel(JOB, grid, JobSplit(), simulator)
    alone = StepCostModel(JOB.step_model(FAST, grid.dp), grid, simulator)
    compiled, passes = simulated(alone)
    assert whole.estimate(*passes) == alone.estimate(*passes)
    assert whole.memory(compiled) == step_memory(alone, compiled)
    assert whole.floor() == alone.floor()


def test_held_copies_move_once_a_step_and_need_memory() -> None:
    grid = grid_of(8, ep=2)
    simulator = Simulator(FAST)
    moving = {}
    held = {}
    for hold in ("parameters", "gradients", "nothing"):
        model = SplitCostModel(JOB, grid, JobSplit(hold=hold), simulator)
        moving[hold] = model.moving_seconds
        held[hold] = model.least_bytes
    # gathers and reductions: 1 and 1; 2 x 8 and 1; 2 x 8 and 8
    times = {hold: seconds / moving["parameters"] for hold, seconds in moving.items()}
    assert times == pytest.approx({"parameters": 1.0, "gradients": 8.5, "nothing": 12.0})
    assert held["parameters"] > held["gradients"] > held["nothing"]
    whole = SplitCostModel(JOB, grid, JobSplit(), simulator).ranks[0].whole_parameters
    assert held["parameters"] - held["nothing"] < 2 * 4 * whole


def test_replicas_hold_what_ranks_of_a_node_share() -> None:
    grid = grid_of(8, ep=2)
    simulator = Simulator(FAST)
    all_ranks, node, nobody = (
        SplitCostModel(JOB, grid, JobSplit(shard=shard), simulator).ranks[0]
        for shard in ("all", "node", "none")
    )
    assert all_ranks.num_shards == (8, 4)
    assert node.num_shards == (4, 2)
    assert nobody.num_shards == (1, 1)
    assert node.held_parameters == pytest.approx(2 * all_ranks.held_parameters)
    assert nobody.held_parameters == pytest.approx(nobody.whole_parameters)


def test_experts_over_all_ranks_of_a_node_have_no_shards_there() -> None:
    model = SplitCostModel(JOB, grid_of(8, ep=4), JobSplit(shard="node"), Simulator(FAST))
    assert model.ranks[0].num_shards == (4, 1)


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_blocks_are_cut_where_the_trainer_cuts_them(count: int) -> None:
    config = demo()
    model = replace(config.model, num_layers=8)
    job = Job(batch_size=4, accumulation=8, model=model, data=DataShape(vocab_size=256))
    whole = GPT(model, vocab_size=256)
    expected = [len(blocks) for blocks in cut_model(whole, count)]
    costs = SplitCostModel(job, grid_of(1), JobSplit(pp=count), Simulator(FAST))
    assert [rank.model.num_layers for rank in costs.ranks] == expected


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_no_plan_is_faster_than_its_floor(pp: int, parts: int) -> None:
    job = replace(JOB, model=replace(JOB.model, num_layers=8))
    for grid in layouts(job, FAST, pp=pp):
        for split in holdings(grid, JobSplit(pp=pp, parts=parts)):
            model = SplitCostModel(job, grid, split, Simulator(FAST))
            compiled, passes = simulated(model)
            estimate = model.estimate(*passes)
            assert model.floor() <= estimate.seconds
            assert sum(estimate.parts.values()) == pytest.approx(estimate.seconds)
            memory = model.memory(compiled)
            assert model.least_bytes <= memory.total


def test_the_first_stage_keeps_a_micro_batch_for_each_stage_ahead() -> None:
    model = SplitCostModel(JOB, grid_of(2), JobSplit(pp=4), Simulator(FAST))
    assert [rank.alive for rank in model.ranks] == [4.0, 3.0, 2.0, 1.0]
    few = replace(JOB, accumulation=2)
    model = SplitCostModel(few, grid_of(2), JobSplit(pp=4), Simulator(FAST))
    assert [rank.alive for rank in model.ranks] == [2.0] * 4


def test_cut_micro_batches_keep_the_sequences_of_a_step() -> None:
    cut = JobSplit(pp=2, finer=4).of(JOB)
    assert (cut.batch_size, cut.accumulation) == (4, 32)
    assert not JobSplit(pp=2, finer=3).fits(JOB)


def test_stages_that_do_not_fit_are_not_tried() -> None:
    assert [each.pp for each in split_choices(JOB, FAST, 16)] == [1, 2, 4]
    with pytest.raises(InputError, match="pp 5 does not divide 8 devices"):
        split_choices(JOB, FAST, 16, 5)
    assert {each.parts for each in near_splits(JobSplit(pp=2), JOB)} == {1, 2}


def best_on(cluster: ClusterSpec, **settings: int) -> Result:
    return search(JOB, cluster, Settings(keep=50, refine=2, most_stages=16, **settings))


def test_on_a_slow_link_stages_win() -> None:
    result = best_on(SLOW)
    assert result.best.split.pp > 1
    without = best_on(SLOW, pp=1)
    assert without.best.split.pp == 1
    assert result.best.seconds < 0.7 * without.best.seconds
    assert {each.split.pp for each in result.ranking} > {result.best.split.pp}


@pytest.mark.parametrize("cluster", [SLOW, FAST])
def test_the_bound_of_any_layout_is_not_above_that_of_one(cluster: ClusterSpec) -> None:
    """Nor of one whose split was tried last, after the layouts were compared."""
    result = best_on(cluster)
    assert any(each.split.finer > 1 or each.split.parts > 1 for each in result.ranking)
    assert result.bound_seconds <= min(each.bound_seconds for each in result.ranking)


@pytest.mark.random
def test_without_stages_copies_are_held_where_memory_allows() -> None:
    before = search(JOB, SLOW, Settings(keep=1, refine=2)).best
    after = best_on(SLOW, pp=1).best
    assert after.seconds < before.seconds
    assert after.split != JobSplit()


@pytest.mark.random
def test_what_is_found_fits_the_memory() -> None:
    found = best_on(SLOW).best
    tight = replace(
        SLOW, device=replace(SLOW.device, memory_gib=1.0 + 1.2 * found.memory.total / 2**30)
    )
    again = best_on(tight).best
    assert again.memory.total <= 1.2 * found.memory.total


FOR = FoundFor(
    model="demo",
    cluster="slow",
    nodes=2,
    devices_per_node=2,
    layer=Workload(tokens=64, num_experts=8, top_k=2, dim=16, hidden=32),
)


@pytest.mark.random
@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_split_comes_back_from_a_plan_file(ending: str, tmp_path: Path) -> None:
    split = JobSplit(pp=2, parts=2, shard="node", hold="gradients", finer=4)
    found = replace(best_on(SLOW).best, split=split)
    path = tmp_path / f"plan.{ending}"
    write_planned(found, path, FOR)
    mesh, _ = read_planned(path)
    assert mesh["pp"] == 2
    assert mesh["parts_per_stage"] == 2
    assert (mesh["shard"], mesh["hold"]) == ("node", "gradients")
    assert read_step(path) == (4, 1, False)


def test_a_hop_between_nodes_takes_longer_than_one_inside() -> None:
    model = SplitCostModel(JOB, Grid(world=1, ranks_per_node=1), JobSplit(pp=4), Simulator(SLOW))
    inside, between, also_inside = (model._hop_seconds(part) for part in range(3))
    assert inside == also_inside
    assert between > 20 * inside
    assert math.isclose(model._hop_seconds(3), 0.0)


@pytest.mark.parametrize("load", ["skew", "counts"])
def test_under_a_load_what_is_held_gives_way_before_the_plan(load: str) -> None:
    """Held copies that fit under even routing alone are given up, and the layout stays."""
    pins = Pins(tp=1, ep=2, etp=1)
    how = Settings(space=PLAIN, pins=pins, keep=1, refine=1, most_stages=1)
    even = search(JOB, FAST, how).best
    layer = JOB.step_model(FAST, even.grid.dp).layer
    counts = skewed_counts(even.grid.dp, layer, ep=2, max_vio=1.0)
    given = {"counts": [counts]} if load == "counts" else {}
    skewed = replace(how, max_vio=1.0 if load == "skew" else 0.0)
    loaded = search(JOB, FAST, skewed, **given).best
    assert loaded.split == even.split, "there is memory for both"
    compiled = compile_plan(even.plan, even.grid)
    simulator = Simulator(FAST)
    needs = []
    for split in (even.split, JobSplit()):
        memory_of = SplitCostModel(JOB, even.grid, split, simulator).memory
        of_plan = (memory_of, simulator, compiled, layer)
        under = (
            memory_under_counts(*of_plan, [counts])
            if load == "counts"
            else memory_under_skew(*of_plan, 1.0)
        )
        needs.append(under.total)
    enough = max(needs[1], even.memory.total)
    assert enough < needs[0]
    tight = 1.0 + 1.05 * (enough + needs[0]) / 2 / 2**30
    device = replace(FAST.device, memory_gib=tight)
    found = search(JOB, replace(FAST, device=device), skewed, **given).best
    assert found.grid == even.grid
    assert found.split != even.split


@pytest.mark.parametrize("sizes", [{"ep": 4, "etp": 2}, {"tp": 2, "ep": 2, "etp": 2}])
def test_which_axis_is_innermost_changes_no_cost(sizes: dict[str, int]) -> None:
    """The search computes what follows from the sizes of a layout for one order of the axes."""
    grid = grid_of(8, **sizes)
    turned = replace(grid, innermost="ep")
    for split in holdings(grid, JobSplit()):
        first = SplitCostModel(JOB, grid, split, Simulator(FAST))
        other = SplitCostModel(JOB, turned, split, Simulator(FAST))
        assert first.on(turned).grid == turned
        for each in (first.on(turned), other, other.held(split)):
            assert each.least_bytes == first.least_bytes
            assert each.moving_seconds == first.moving_seconds
            assert each.bound_seconds == first.bound_seconds
            assert each.floor() == first.floor()


def test_a_cost_model_held_in_another_way_equals_one_made_so() -> None:
    grid = grid_of(8, ep=4)
    whole = SplitCostModel(JOB, grid, JobSplit(pp=2), Simulator(FAST))
    for split in holdings(grid, JobSplit(pp=2)):
        made = SplitCostModel(JOB, grid, split, Simulator(FAST))
        held = whole.held(split)
        assert held.split == split
        assert held.model == made.model
        assert held.least_bytes == made.least_bytes
        assert held.moving_seconds == made.moving_seconds
