"""Planning on a profiled machine: plans are ranked by the prediction that `moesaic bench model` holds against measurements."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moesaic.cli.plan import run
from moesaic.errors import InputError
from moesaic.planner.candidates import Pins, SearchSpace
from moesaic.planner.model import Job
from moesaic.planner.predict import Predictor
from moesaic.planner.presets import PRESETS
from moesaic.planner.profile import ClusterProfile, HostCosts, LinkCosts, Products
from moesaic.planner.profile_simulate import profiled_simulator
from moesaic.planner.search import LOSSLESS, PlannedStep, Result, Settings, search
from moesaic.planner.simulate import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

JOB = replace(PRESETS["gpt-tiny"], batch_size=16, accumulation=2)
PROFILE = ClusterProfile(
    nodes=2, ranks_per_node=2, memory_gib=8.0,
    inside=LinkCosts(one_sender=50e6, all_senders=25e6, latency_seconds=2e-5, credit_seconds=3e-4),
    outside=LinkCosts(one_sender=25e6, all_senders=12.5e6, latency_seconds=6e-5, credit_seconds=8e-4),
    host=HostCosts(
        layer=1.6e-3, task=1e-4, wait=1.5e-3, message=3e-5, byte=3e-10, weight_byte=2e-10, transport_byte=2e-9, sharing=2.0
    ),
    products=Products(rows=(1.0, 16.0, 256.0), fp32=(2e9, 2e10, 6e10)),
)  # fmt: skip
"""Of a machine whose host is slow to wake up, which its `ClusterSpec` cannot say."""
QUICK = replace(
    PROFILE, host=HostCosts(sharing=1.0), outside=replace(PROFILE.outside, credit_seconds=10.0, latency_seconds=0.0),
    inside=replace(PROFILE.inside, credit_seconds=10.0, latency_seconds=0.0),
)  # fmt: skip
"""Its host costs nothing, and its links let through at once whatever fits the time for which they were idle."""
SPACE = SearchSpace(
    schedules=("s1",), gather_weights=(), chunks=(1, 2, 4), overlap_gather=(False,), all_to_alls=("linear", "hier2d"),
    orders=("optsche", "fifo"),
)  # fmt: skip
SETTINGS = Settings(space=SPACE, pins=Pins(tp=1, ep=4), keep=50, exhaustive=True, reserve_gib=0.1)
GRID = Grid(world=4, ep=4, ranks_per_node=2)


def measured_seconds(found: PlannedStep, job: Job = JOB, profile: ClusterProfile = PROFILE) -> float:
    """Return a layer's time as `moesaic bench model` predicts it."""
    made = compile_plan(found.plan, found.grid)
    layer = job.step_model(profile.to_cluster(), found.grid.dp).layer
    return profiled_simulator(profile).layer_seconds(made.forward, made.backward, layer, made.grid)


@pytest.fixture(scope="module")
def by_profile() -> Result:
    return search(JOB, PROFILE.to_cluster(), SETTINGS, simulator=profiled_simulator(PROFILE))


def test_a_ranking_is_by_the_times_that_the_benchmark_of_the_model_predicts(by_profile: Result) -> None:
    layers = JOB.accumulation * JOB.model.num_layers
    for found in by_profile.ranking[:6]:
        parts = found.estimate.parts
        moe = parts["routing"] + parts["moe forward"] + parts["moe backward"]
        assert moe == pytest.approx(layers * measured_seconds(found), rel=1e-6)
        assert found.seconds == pytest.approx(sum(parts.values()))
    each = [measured_seconds(found) for found in by_profile.ranking]
    assert each == sorted(each)


def test_the_described_cluster_would_choose_another_plan(by_profile: Result) -> None:
    described = search(JOB, PROFILE.to_cluster(), SETTINGS)
    assert described.best.plan != by_profile.best.plan
    assert measured_seconds(described.best) > 1.02 * measured_seconds(by_profile.best)
    assert "routing" not in described.best.estimate.parts


def test_nothing_is_busy_for_longer_than_a_step_and_no_floor_lies_above_one(by_profile: Result) -> None:
    simulator = profiled_simulator(PROFILE)
    around = StepCostModel(JOB.step_model(simulator.cluster, GRID.dp), GRID, simulator)
    for found in by_profile.ranking:
        assert 0.1 < max(found.estimate.limits.values()) / found.seconds <= 1.0
        assert around.floor() <= found.seconds


def test_free_first_kilobytes_do_not_let_the_search_leave_the_best_layout_out() -> None:
    """A floor stays below the steps of its layout, and the best layout is found without pins."""
    simulator, job = profiled_simulator(QUICK), replace(JOB, batch_size=256)
    settings = Settings(space=SearchSpace(schedules=("s1",), chunks=(1,), all_to_alls=("linear",)), reserve_gib=0.1)
    free = search(job, simulator.cluster, settings, simulator=simulator)
    for ep in (2, 4):
        best = search(job, simulator.cluster, replace(settings, pins=Pins(tp=1, ep=ep)), simulator=simulator).best
        assert free.best.seconds <= best.seconds
        assert (
            StepCostModel(job.step_model(simulator.cluster, best.grid.dp), best.grid, simulator).floor() <= best.seconds
        )


def test_the_command_plans_by_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    common = f"--model gpt-tiny --batch-size 8 --profile {path} --reserve-gib 0.1 --tp 1 --ep 4"
    told = f"{common} --schedules s1 --all-to-alls linear hier2d --chunks 1 2 --orders optsche".split()
    assert run([*told, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["ranking"][0]
    job = replace(PRESETS["gpt-tiny"], batch_size=8)
    space = replace(LOSSLESS, schedules=("s1",), all_to_alls=("linear", "hier2d"), chunks=(1, 2), orders=("optsche",))
    settings = Settings(space=space, pins=Pins(tp=1, ep=4), reserve_gib=0.1)
    best = search(job, PROFILE.to_cluster(), settings, simulator=profiled_simulator(PROFILE)).best
    assert shown["plan"] == asdict(best.plan)
    assert shown["seconds"] == pytest.approx(best.seconds)
    assert shown["parts"]["routing"] == pytest.approx(2 * 1.6e-3), (
        "two layers, two ranks to a core, half of it before a pass back"
    )
    assert run([*told, "--nodes", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 8


def test_more_nodes_than_a_profile_of_one_node_knows_are_refused() -> None:
    one = replace(PROFILE, nodes=1, outside=LinkCosts())
    with pytest.raises(InputError, match=r"nodes=2: the profile was measured on one node"):
        profiled_simulator(one, nodes=2)


def test_a_plan_table_starts_with_the_times_of_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    config = {"batch_size": 8, "model": {"dim": 32, "num_layers": 2, "num_heads": 2, "seq_len": 64,
                                         "moe": {"num_experts": 4, "hidden": 32}}}  # fmt: skip
    predictor = Predictor.of(config, GRID, Plan(chunks=2), cluster=str(path), plans=3)
    assert predictor.plans[0] == Plan(chunks=2)
    job = replace(PRESETS["gpt-tiny"], batch_size=8)
    simulator = profiled_simulator(PROFILE)
    around = StepCostModel(job.step_model(simulator.cluster, GRID.dp), GRID, simulator)
    even = []
    for plan in predictor.plans:
        made = compile_plan(plan, GRID)
        there, back = simulator.passes(made.forward, made.backward, around.model.layer, made.grid)
        even.append(around.estimate(there, back).seconds)
    load = 8 * 64 * 2 / 4
    assert predictor(load) == pytest.approx(even, rel=0.02), (
        "rank by rank, even routing takes what one rank for all does"
    )
    assert predictor(3 * load)[0] > even[0], "a hot expert costs time"
    described = Predictor(job, simulator.cluster, GRID, predictor.plans)
    assert described(load) != pytest.approx(even, rel=0.05)


@pytest.mark.parametrize("codec", ["int8", "zfp"])
def test_codecs_take_what_was_measured_of_them(codec: str) -> None:
    """Rows are coded and decoded twice on their way, out and back; a rate is of both together."""
    fast = LinkCosts(one_sender=1e15, all_senders=1e15)
    rates = {"int8": 2e9, "zfp": 1e8}
    free = replace(PROFILE, inside=fast, outside=fast, host=HostCosts(sharing=2.0), codecs=rates)
    layer = Workload(tokens=64, num_experts=8, top_k=2, dim=16, hidden=32, matrices=2, dtype="fp32")
    made = compile_plan(Plan(codec=codec), GRID)
    coded = profiled_simulator(free).run(made.forward, layer, made.grid).seconds
    slow = replace(free, codecs={"int8": 1e9, "zfp": 0.5e8})
    slower = profiled_simulator(slow).run(made.forward, layer, made.grid).seconds
    row_bytes = layer.tokens * layer.top_k * layer.dim * 4
    assert slower - coded == pytest.approx(2 * 2.0 * row_bytes / rates[codec], rel=1e-6)
    none = compile_plan(Plan(), GRID)
    plain = profiled_simulator(free).run(none.forward, layer, none.grid).seconds
    assert coded - plain == pytest.approx(slower - coded, rel=1e-3), "nothing else costs the host"


def test_a_simulator_of_a_profile_is_one_of_its_cluster() -> None:
    made = compile_plan(Plan(chunks=2), GRID)
    layer = Workload(tokens=64, num_experts=8, top_k=2, dim=16, hidden=32, matrices=2, dtype="fp32")
    measured, described = profiled_simulator(PROFILE), Simulator(PROFILE.to_cluster())
    ours, plain = (each.run(made.forward, layer, made.grid) for each in (measured, described))
    assert [span.task for span in ours.timeline.spans] == [span.task for span in plain.timeline.spans]
    assert max(span.end for span in ours.timeline.spans) == pytest.approx(ours.seconds)
    kinds = {name.rstrip(" 01") for name in ours.link_seconds}
    assert kinds == plain.link_seconds.keys(), "each node's own links where ranks are apart"
    quick = profiled_simulator(QUICK).run(made.forward, layer, made.grid)
    assert quick.limit <= quick.seconds < plain.seconds
