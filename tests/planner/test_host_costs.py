"""Costs of a cluster's host, which `moesaic profile` measures: they count in layers, in the search
and in plan tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from moesaic.cli.plan import run
from moesaic.configfile import as_toml
from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import ClusterSpec, CodecRate, Device, Host, Link, Tflops
from moesaic.planner.predicted_plans import Predictor
from moesaic.planner.presets import PRESETS
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

GRID = Grid(world=4, ep=4, ranks_per_node=2)
LAYER = Workload(tokens=64, num_experts=8, top_k=2, dim=16, hidden=32, matrices=2, dtype="fp32")
FREE = ClusterSpec(
    nodes=2,
    devices_per_node=2,
    device=Device(tflops=Tflops(fp32=1e9), memory_gib=8, memory_gigabytes_per_second=1e9),
    links=(
        Link(name="inside", devices=2, gbps=(1e9,), carries="inside", shared=True),
        Link(name="outside", devices=2, gbps=(1e9,), carries="outside"),
    ),
    host=Host(runs_compute=True),
)
"""Where nothing takes time."""
SLOW = replace(
    FREE,
    device=replace(FREE.device, tflops=Tflops(fp32=0.02), memory_gigabytes_per_second=3),
    links=tuple(replace(link, gbps=(0.3,)) for link in FREE.links),
    host=Host(runs_compute=True, layer_us=3200, task_us=200, message_us=60, messages="eager"),
)


def forward_seconds(host: Host, plan: Plan, *, apart: bool = False) -> float:
    made = compile_plan(plan, GRID)
    sizes = sizes_of(made.forward, LAYER, made.grid) if apart else None
    return (
        Simulator(replace(FREE, host=host)).run(made.forward, LAYER, made.grid, sizes=sizes).seconds
    )


@pytest.mark.parametrize("messages", ["together", "eager"])
@pytest.mark.parametrize("apart", [False, True])
def test_tasks_and_messages_take_the_issuing_thread(
    apart: bool, messages: Literal["together", "eager"]
) -> None:
    """A linear dispatch and combine: a message to and from each of three peers; routing weights
    travel with their rows."""
    tasks = len(compile_plan(Plan(), GRID).forward.tasks)
    posts = 2 * 2 * 3
    for host, microseconds in (
        (Host(runs_compute=True, task_us=100), 100 * tasks),
        (Host(runs_compute=True, message_us=100), 100 * posts),
        (Host(runs_compute=True, layer_us=100), 0),
    ):
        seconds = forward_seconds(replace(host, messages=messages), Plan(), apart=apart)
        assert seconds == pytest.approx(microseconds * 1e-6, rel=1e-3, abs=1e-6)


def test_a_layer_is_its_two_programs_and_what_is_around_them() -> None:
    made = compile_plan(Plan(chunks=2), GRID)
    simulator = Simulator(SLOW)
    passes = [
        simulator.run(each, LAYER, made.grid).seconds for each in (made.forward, made.backward)
    ]
    assert simulator.layer_seconds(made.forward, made.backward, LAYER, made.grid) == pytest.approx(
        3.2e-3 + sum(passes)
    )


@pytest.mark.parametrize("codec", ["int8", "zfp"])
def test_codecs_take_what_was_measured_of_them(codec: str) -> None:
    """Rows are coded and decoded twice on their way, out and back."""
    rates = {"int8": 4.0, "zfp": 0.2}
    named = tuple(CodecRate(name=name, gigabytes_per_second=rate) for name, rate in rates.items())
    made = compile_plan(Plan(codec=codec), GRID)
    coded = Simulator(replace(FREE, device=replace(FREE.device, codecs=named))).run(
        made.forward, LAYER, made.grid
    )
    row_bytes = LAYER.tokens * LAYER.top_k * LAYER.dim * 4
    assert coded.seconds == pytest.approx(2 * 2 * row_bytes / (rates[codec] * 1e9), rel=1e-3)


def test_the_command_plans_by_the_file_of_a_measured_cluster(tmp_path, capsys):
    path = tmp_path / "cluster.toml"
    path.write_text(as_toml(SLOW))
    told = [
        "--model",
        "gpt-tiny",
        "--batch-size",
        "8",
        "--cluster",
        str(path),
        "--reserve-gib",
        "0.1",
    ]
    told += ["--tp", "1", "--ep", "4", "--schedules", "s1"]
    told += [
        "--all-to-alls",
        "linear",
        "hier2d",
        "--chunks",
        "1",
        "2",
        "--orders",
        "optsche",
        "--json",
    ]
    assert run(told) == 0
    shown = json.loads(capsys.readouterr().out)["ranking"][0]
    assert shown["parts"]["routing"] == pytest.approx(2 * 3.2e-3), "two layers"
    assert run([*told, "--nodes", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 8


def test_a_plan_table_starts_with_the_times_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(as_toml(SLOW))
    config = {
        "batch_size": 8,
        "model": {
            "dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            "seq_len": 64,
            "moe": {"num_experts": 4, "hidden": 32},
        },
    }
    predictor = Predictor.of(config, GRID, Plan(chunks=2), cluster=str(path), plans=3)
    assert predictor.plans[0] == Plan(chunks=2)
    job = replace(PRESETS["gpt-tiny"], batch_size=8)
    simulator = Simulator(SLOW)
    around = StepCostModel(job.step_model(SLOW, GRID.dp), GRID, simulator)
    even = []
    for plan in predictor.plans:
        made = compile_plan(plan, GRID)
        even.append(
            around.estimate(
                *simulator.passes(made.forward, made.backward, around.model.layer, made.grid)
            ).seconds
        )
    load = 8 * 64 * 2 / 4
    assert predictor(load) == pytest.approx(even, rel=0.02), (
        "rank by rank, even routing takes what one for all does"
    )
    assert predictor(3 * load)[0] > even[0], "a hot expert costs time"
