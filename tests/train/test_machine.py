"""Device and precision: which values are chosen, and which are refused."""

from __future__ import annotations

import pytest
import torch

from moesaic.errors import InputError
from moesaic.train import machine
from moesaic.train.machine import BFLOAT16_PAYS_FROM, pick_device, pick_precision

CPU = torch.device("cpu")
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
    with pytest.raises(InputError) as caught:
        pick_device(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("gain", "expected"), [(BFLOAT16_PAYS_FROM, torch.bfloat16), (1.4, torch.float32), (0.1, torch.float32)]
)
def test_auto_takes_bfloat16_on_a_cpu_where_it_pays(monkeypatch, gain, expected):
    rates = {torch.bfloat16: gain, torch.float32: 1.0}
    monkeypatch.setattr(machine, "matmul_flops_per_second", lambda device, dtype: rates[dtype])
    assert pick_precision("auto", CPU) == expected


def test_a_named_precision_is_taken_without_measuring(monkeypatch):
    monkeypatch.setattr(machine, "matmul_flops_per_second", pytest.fail)
    assert pick_precision("float32", CPU) == torch.float32
    assert pick_precision("bfloat16", CPU) == torch.bfloat16


@pytest.mark.parametrize("supported", [True, False])
def test_auto_asks_the_driver_on_a_gpu(monkeypatch, supported):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    expected = torch.bfloat16 if supported else torch.float32
    assert pick_precision("auto", torch.device("cuda")) == expected


def test_measuring_counts_operations_and_leaves_the_generator_alone(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks) / 4)
    before = torch.get_rng_state()
    assert measured(CPU, torch.float32) == 2 * 1024**3 * 4
    assert torch.equal(torch.get_rng_state(), before)
