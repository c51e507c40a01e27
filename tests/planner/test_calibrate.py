"""Calibration to wall times corrects costs that processor time got wrong, and changes nothing without evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.planner.profile import ClusterProfile, HostCosts, LinkCosts
from moesaic.planner.profile_fit import TimedLayer, calibrate
from moesaic.planner.profile_simulate import profiled_simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

GRID = Grid(world=2, ep=2, ranks_per_node=2)
RIGHT = ClusterProfile(
    ranks_per_node=2,
    inside=LinkCosts(latency_seconds=2e-4, credit_seconds=5e-4, one_sender=2e7, all_senders=2e7),
    host=HostCosts(layer=2e-3, task=4e-5, wait=2e-4, message=1e-4, byte=4e-10, transport_byte=6e-10, sharing=1.5),
)
WRONG = replace(
    RIGHT,
    host=replace(RIGHT.host, layer=1e-3, wait=1e-4, transport_byte=3e-9),
)


def seconds(profile: ClusterProfile, layer: TimedLayer) -> float:
    simulator = profiled_simulator(profile, virtual_flops=layer.virtual_flops)
    return simulator.layer_seconds(layer.forward, layer.backward, layer.workload, layer.grid)


def layers(profile: ClusterProfile, tokens: tuple[int, ...]) -> list[TimedLayer]:
    """Return layers with the times that a profile predicts."""
    timed_layers = []
    for count in tokens:
        for chunks in (1, 2, 4):
            compiled = compile_plan(Plan(chunks=chunks), GRID)
            workload = Workload(tokens=count, num_experts=4, top_k=2, dim=64, hidden=64, dtype="fp32")
            layer = TimedLayer(
                forward=compiled.forward, backward=compiled.backward, grid=compiled.grid, workload=workload, seconds=1.0,
                virtual_flops=1e30,
            )  # fmt: skip
            timed_layers.append(replace(layer, seconds=seconds(profile, layer)))
    return timed_layers


def test_held_out_layers_are_predicted_from_the_others() -> None:
    timed = layers(RIGHT, (32, 128, 512, 2048))
    calibrated, error = calibrate(WRONG, timed)
    before = [abs(seconds(WRONG, layer) / layer.seconds - 1) for layer in timed[3::4]]
    after = [abs(seconds(calibrated, layer) / layer.seconds - 1) for layer in timed[3::4]]
    assert max(after) < 0.5 * max(before)
    assert error == pytest.approx(sorted(after)[1])
    # Only costs that wall times determine are changed.
    assert replace(calibrated, host=WRONG.host) == WRONG
    assert calibrated.host.sharing == WRONG.host.sharing


def test_a_correct_profile_or_one_with_too_few_layers_is_unchanged() -> None:
    timed = layers(RIGHT, (32, 128, 512, 2048))
    assert calibrate(RIGHT, timed) == (RIGHT, 0.0)
    few, error = calibrate(WRONG, timed[:4])
    assert few == WRONG
    assert error == pytest.approx(abs(seconds(WRONG, timed[3]) / timed[3].seconds - 1))
