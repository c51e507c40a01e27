"""Measurements: the calibration layers, and profiles of made-up times. One test really measures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moesaic.errors import InputError
from moesaic.measure import compute as profile_compute
from moesaic.measure import host as profile_shapes
from moesaic.measure import profile as profiling
from moesaic.measure.host import CalibrationStep, calibrations
from moesaic.measure.links import MESSAGE_SIZES, TimedMovements, partners
from moesaic.measure.profile import MeasuredMachine, layer_errors, measure, profile_of, read_measured, write_measured
from moesaic.planner import profile_fit
from moesaic.planner.profile import ClusterProfile, HostCosts, LinkCosts, MachineInfo, Products
from moesaic.planner.profile_simulate import FEATURES, costs_vector, profiled_simulator
from moesaic.program.task import Op

TRUE = HostCosts(
    layer=2e-3, task=1e-4, wait=1.5e-4, message=2e-5, transfer=8e-5, byte=2e-10, weight_byte=1e-10, transport_byte=2e-9,
    sharing=2.0,
)  # fmt: skip
REST = ClusterProfile(products=Products(rows=(1.0, 64.0), fp32=(1e9, 2e10)))


def moved(rate: float, messages: int = 1, latency: float = 4e-4) -> TimedMovements:
    sent = tuple(float(size * messages) for size in MESSAGE_SIZES)
    return TimedMovements(sent, tuple((max(latency, size / rate),) * 3 for size in sent), messages)


@pytest.fixture(autouse=True, scope="module")
def _fewer_layers() -> Iterator[None]:
    """Two shapes of layers say what three do here, and a few steps of the search for costs what twenty do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_shapes, "SHAPES", profile_shapes.SHAPES[::2])
        patch.setattr(profile_fit, "MOST_STEPS", 3)
        yield


@cache
def measured() -> MeasuredMachine:
    layers = list(calibrations(4, 2))
    machine = MeasuredMachine(
        ranks_per_node=2,
        world=4,
        steps=[],
        sharing=(2.0, 2.1, 1.9),
        links={
            "inside": moved(25e6),
            "inside, one": moved(50e6),
            "outside": moved(12.5e6, messages=2),
            "outside, one": moved(25e6),
        },
        rest=REST,
    )
    simulator = profiled_simulator(
        replace(
            REST, nodes=2, ranks_per_node=2, inside=LinkCosts(one_sender=50e6, all_senders=25e6),
            outside=LinkCosts(one_sender=25e6, all_senders=12.5e6),
        )
    )  # fmt: skip
    costs, late = costs_vector(TRUE), 4e-4 - TRUE.task - TRUE.message - TRUE.transfer
    true = replace(
        REST, nodes=2, ranks_per_node=2, host=TRUE,
        inside=LinkCosts(one_sender=50e6, all_senders=25e6, latency_seconds=late),
        outside=LinkCosts(one_sender=25e6, all_senders=12.5e6, latency_seconds=late),
    )  # fmt: skip
    timed = profiled_simulator(true, virtual_flops=profiling.NO_TIME)
    steps = []
    for calibration in layers:
        compiled = calibration.compiled
        wall = timed.layer_seconds(compiled.forward, compiled.backward, calibration.workload, compiled.grid)
        processor = float(profiling._features(simulator, calibration) @ costs)
        steps.append((calibration, CalibrationStep((processor,) * 3, (wall,) * 3)))
    return replace(machine, steps=steps)


@cache
def found_profile() -> ClusterProfile:
    return profile_of(measured())


def test_calibrations_have_every_kind_of_task_and_differ() -> None:
    layers = list(calibrations(4, 2))
    kinds = {
        task.op
        for calibration in layers
        for task in (*calibration.compiled.forward.tasks, *calibration.compiled.backward.tasks)
    }
    assert {Op.MOVE, Op.HOP, Op.PACK, Op.UNPACK, Op.EXPERT, Op.EXPERT_GRAD, Op.TAKE, Op.JOIN, Op.PERMUTE} <= kinds
    assert len(layers) >= 2 * len(FEATURES)
    assert len({(calibration.compiled.digest, calibration.workload) for calibration in layers}) == len(layers)
    assert {calibration.mesh.tp for calibration in layers} == {1, 2}


@pytest.mark.parametrize("world", [2, 8])
def test_every_chunk_of_a_calibration_has_rows_for_every_expert(world: int) -> None:
    """The simulator counts a message without rows, which is never sent: four chunks would seem to cost nothing."""
    for calibration in calibrations(world, 2):
        origins = calibration.mesh.tp if calibration.compiled.routes_slices else 1
        rows = calibration.tokens * calibration.workload.top_k // (calibration.workload.num_experts * origins)
        assert rows >= calibration.compiled.plan.chunks, calibration.name


def test_one_rank_and_odd_worlds_can_be_calibrated_too() -> None:
    assert {calibration.mesh.world for calibration in calibrations(1, 1)} == {1}
    assert {calibration.mesh.ep for calibration in calibrations(3, 3)} == {3}


def test_a_profile_says_what_was_measured() -> None:
    profile = found_profile()
    assert costs_vector(profile.host)[:5] == pytest.approx(costs_vector(TRUE)[:5], rel=0.02)
    assert (profile.nodes, profile.ranks_per_node, profile.host.sharing) == (2, 2, 2.0)
    assert profile.inside.one_sender == pytest.approx(50e6)
    assert profile.outside.all_senders == pytest.approx(12.5e6)
    assert profile.outside.latency_seconds == pytest.approx(4e-4 - TRUE.task - TRUE.message - TRUE.transfer, rel=0.05)
    assert profile.products == REST.products
    assert profile.machine == MachineInfo.here()
    assert profile.errors.host_worst < 0.02
    assert profile.errors.links_worst < 0.01


def test_saved_times_give_the_same_profile(tmp_path: Path) -> None:
    machine = measured()
    write_measured(machine, tmp_path / "times.json")
    assert read_measured(tmp_path / "times.json") == machine
    table = json.loads((tmp_path / "times.json").read_text())
    (tmp_path / "other.json").write_text(
        json.dumps(table | {"steps": {"another layer": {"processor": [], "wall": []}}})
    )
    with pytest.raises(InputError, match="other calibration layers"):
        read_measured(tmp_path / "other.json")
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(InputError, match="contains no measured times"):
        read_measured(tmp_path / "none.json")


def test_whole_layers_are_checked_against_their_wall_times() -> None:
    machine = replace(measured(), steps=measured().steps[::4])
    errors = layer_errors(found_profile(), machine)
    assert len(errors) == len(machine.steps)
    slower = replace(
        machine,
        steps=[
            (calibration, CalibrationStep(step.processor, (2 * step.wall[0],) * 3))
            for calibration, step in machine.steps
        ],
    )
    assert np.array(layer_errors(found_profile(), slower)) + 1 == pytest.approx((np.array(errors) + 1) / 2)


def test_noise_is_refused() -> None:
    machine = measured()
    draw = np.random.default_rng(0)
    steps = [
        (calibration, CalibrationStep(tuple(draw.uniform(1e-3, 3e-2, 5)), step.wall))
        for calibration, step in machine.steps
    ]
    with pytest.raises(InputError, match="--repeats"):
        profile_of(replace(machine, steps=steps))
    links = machine.links | {"outside": TimedMovements(machine.links["outside"].num_bytes, ((1e-3,) * 3,) * 5, 2)}
    with pytest.raises(InputError, match="all senders outside nodes"):
        profile_of(replace(machine, links=links))


def test_partners_are_those_of_the_node_or_all_others() -> None:
    assert partners(2, 6, 2, inside=True) == (3,)
    assert partners(2, 6, 2, inside=False) == (0, 1, 4, 5)
    assert partners(0, 1, 1, inside=True) == ()


def test_one_rank_without_a_launcher_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_shapes, "SHAPES", ((8, 8, 1),))
    monkeypatch.setattr(profile_compute, "ROWS", (1, 4))
    monkeypatch.setattr(profile_compute, "COPIED_ROWS", 64)
    shares: list[float] = []
    machine = measure(1, 3, ("fp32", "bf16"), lambda what, share: shares.append(share))
    assert shares == sorted(shares)
    assert machine.links == {}
    assert len(machine.rest.products.fp32) == len(machine.rest.products.bf16) == 2
    assert min(*machine.rest.products.fp32, machine.rest.copy_bytes_per_second, machine.rest.codecs["int8"]) > 0
    assert all(
        len(step.processor) == len(step.wall) == 3 * profiling.REPEATS_OF_LAYERS and min(step.wall) > 0
        for _, step in machine.steps
    )
    assert min(machine.sharing) >= 1
