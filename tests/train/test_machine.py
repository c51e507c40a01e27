"""Device and precision: which values are chosen, and which are refused."""

from __future__ import annotations

import pytest
import torch

from helpers import refused
from moesaic.train import machine
from moesaic.train.machine import BFLOAT16_PAYS_FROM, pick_device, pick_precision
from moesaic.train.presets import demo, demo_dense

CPU = torch.device("cpu")
SHAPE = (64, 16, 8)
measured = machine.matmul_flops_per_second
"""As it is before a fixture replaces it."""


def test_devices_are_picked_by_name(monkeypatch):
    assert pick_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "device='gpu' is unknown: write auto, cpu or cuda"),
        ("", "device='' is unknown"),
        ("meta", "device='meta' is not supported: write auto, cpu or cuda"),
        ("cuda:7", "device='cuda:7': this machine has 1 CUDA devices: write cpu or auto"),
    ],
)
def test_other_devices_are_refused(monkeypatch, name, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert message in refused(pick_device, name)


def test_precision_is_the_named_one_or_what_pays_on_a_cpu_and_what_the_driver_says_on_a_gpu(
    monkeypatch,
):
    rates: dict[torch.dtype, float] = {}
    monkeypatch.setattr(
        machine, "matmul_flops_per_second", lambda device, dtype, shape: rates[dtype]
    )
    for name in ("float32", "bfloat16"):
        assert pick_precision(name, CPU, SHAPE) == getattr(torch, name), "without measuring"
    for gain, expected in ((BFLOAT16_PAYS_FROM, torch.bfloat16), (1.4, torch.float32)):
        rates |= {torch.bfloat16: gain, torch.float32: 1.0}
        assert pick_precision("auto", CPU, SHAPE) == expected
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported: supported)
        assert pick_precision("auto", torch.device("cuda"), SHAPE) == expected


def test_measuring_counts_operations_and_leaves_the_generator_alone(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks) / 4)
    before = torch.get_rng_state()
    assert measured(CPU, torch.float32) == 2 * 1024**3 * 4
    assert measured(CPU, torch.float32, SHAPE) == 2 * 64 * 16 * 8 * 4
    assert torch.equal(torch.get_rng_state(), before)


def test_precision_is_measured_with_the_rows_of_an_expert_or_a_dense_layer():
    assert [each.matmul_shape for each in (demo(), demo_dense())] == [
        (8 * 256 * 2 // 64, 128, 64),
        (8 * 256, 128, 128),
    ]
