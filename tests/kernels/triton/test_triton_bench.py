"""The GPU benchmark end to end on tiny layers, with clocks and memory counters replaced, to find errors without a GPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moesaic.errors import InputError
from moesaic.kernels.triton.rows.tiles import default_tile
from moesaic_lab.gpu import layers as gpu_layers
from moesaic_lab.gpu import run as gpu_device
from moesaic_lab.gpu import timing as gpu_timing
from moesaic_lab.gpu import tune as gpu_tune
from moesaic_lab.gpu.layers import Inputs, errors, grouped_mm, ours, sonic
from moesaic_lab.gpu.run import GpuOptions, measure
from moesaic_lab.gpu.shapes import LARGEST, LAYERS, GpuLayer, claims

TINY = GpuLayer(tokens=24, dim=40, hidden=24, num_experts=3, top_k=2)


@pytest.fixture
def no_gpu(monkeypatch, device):
    """Run the benchmark without a GPU: with the host's clock, no memory counter and one small layer."""

    def in_turn(methods: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 0) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(2):
            for name, run in methods.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        return seconds

    random = Inputs.random
    monkeypatch.setattr(Inputs, "random", staticmethod(lambda layer, _, dtype: random(layer, device, dtype)))
    monkeypatch.setattr(gpu_device, "_require", lambda options: None)
    monkeypatch.setattr(gpu_device, "_chosen", lambda options: [TINY])
    monkeypatch.setattr(gpu_device, "SMALL", TINY)
    monkeypatch.setattr(gpu_device, "in_turn", in_turn)
    monkeypatch.setattr(gpu_device, "dense_tflops", lambda *_: 100.0)
    monkeypatch.setattr(gpu_tune, "seconds_of", lambda run: in_turn({"it": run}, 1)["it"][0])
    memory = gpu_timing.GpuMemory(kept=1.0, forward_peak=2.0, backward_peak=3.0)
    monkeypatch.setattr(gpu_device, "memory_of", lambda *_: memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.random
def test_measure_from_checks_to_claims_and_once_more_from_its_files(no_gpu, tmp_path):
    options = GpuOptions(folder=tmp_path, stages=("check", "measure"), repeats=2)
    report = measure(options)
    row = next(row for row in report.rows if row["name"] == TINY.name)
    assert "error" not in row
    assert set(row["errors"]) == {"y", "x", "weight", "w13", "w2"}
    assert row["ours"]["forward_tflops"] > 0
    assert row.get("grouped_mm_absent") is None
    assert row["grouped_mm"]["over_ours"] > 0
    assert "liger" in row["liger_absent"]
    assert set(row["steps"]) == {
        "up",
        "down",
        "down_grad",
        "rows_grad",
        "weight_grad",
        "weight_grad_down",
        "sum",
        "sort",
    }
    values = {claim.name.rsplit(".", 1)[1]: claim for claim in report.claims}
    assert values["forward_tflops"].value == row["ours"]["forward_tflops"]
    assert values["activation_gib"].value == 1.0
    assert values["over_liger"].value is None
    assert "liger-kernel could not be run" in values["over_liger"].reason
    report.write(str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["claims"][0]["name"].startswith("gpu.T24_H40")
    assert measure(options).rows == report.rows  # nothing is timed again: the same figures


def test_versions_include_the_distribution_liger_kernel(no_gpu, tmp_path):
    assert "liger_kernel" in measure(GpuOptions(folder=tmp_path, stages=())).packages


def test_logits_of_nan_are_checked(no_gpu, device, monkeypatch):
    gpu_device._check_odd_logits(device)
    monkeypatch.setattr(torch.Tensor, "softmax", lambda self, _: torch.ones_like(self))
    with pytest.raises(AssertionError, match="are not those of the tokens"):
        gpu_device._check_odd_logits(device)


def test_tune_writes_every_tile_and_stops_at_the_deadline(no_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr("moesaic_lab.gpu.search.candidates", lambda shape, device: iter([default_tile(shape, device)]))
    measure(GpuOptions(folder=tmp_path, stages=("tune",)))
    (tiles,) = json.loads((tmp_path / "tiles.json").read_text()).values()
    assert len(tiles) == 6
    measure(GpuOptions(folder=tmp_path / "late", stages=("tune", "measure"), seconds=-1.0))
    assert not (tmp_path / "late" / "tiles.json").exists()


def test_a_layer_that_fails_is_a_row_with_its_reason(no_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tune, "breakdown", lambda *_: 1 / 0)
    report = measure(GpuOptions(folder=tmp_path, stages=("measure",), repeats=2))
    assert {row["name"]: row.get("error") for row in report.rows}[TINY.name] == "ZeroDivisionError: division by zero"
    assert {claim.value for claim in report.claims} == {None}
    assert all("ZeroDivisionError" in claim.reason for claim in report.claims)


def test_wrong_results_are_found(device):
    inputs = Inputs.random(TINY, device, torch.float32)
    implementation = ours(inputs, None)
    y = implementation.forward()
    results = [y.detach(), *torch.autograd.grad(y, implementation.leaves, inputs.dy)]
    assert max(errors(inputs, results[0], tuple(results[1:])).values()) < 1e-4
    for number, name in enumerate(("y", "x", "w13", "w2", "weight")):
        spoilt = [*results[:number], results[number] * 1.1, *results[number + 1 :]]
        report = errors(inputs, spoilt[0], tuple(spoilt[1:]))
        assert {key for key, error in report.items() if error > gpu_layers.TOLERANCE} == {name}


def test_grouped_mm_computes_the_same_layer(device):
    inputs = Inputs.random(TINY, device, torch.float32)
    implementation = grouped_mm(inputs)
    y = implementation.forward()
    assert max(errors(inputs, y.detach(), torch.autograd.grad(y, implementation.leaves, inputs.dy)).values()) < 1e-4


def imitated_sonic(x, scores, token, expert, gate_up, bias, down, other_bias, num_experts, stream, activation):
    """Compute what sonicmoe.functional.moe_general_routing_inputs documents: gate and up rows interleaved, experts last."""
    assert (bias, other_bias, activation) == (None, None, "swiglu")
    assert [each.stride()[1] for each in (gate_up, down)] == [1, 1]
    assert gate_up.shape == (2 * down.shape[1], down.shape[0], num_experts)
    y = torch.zeros_like(x)
    for e in range(num_experts):
        rows = (expert == e).nonzero().squeeze(1)
        read = x[token[rows].long()]
        hidden = torch.nn.functional.silu(read @ gate_up[0::2, :, e].T) * (read @ gate_up[1::2, :, e].T)
        y = y.index_add(0, token[rows], scores[rows, None] * (hidden @ down[:, :, e].T))
    return y, None


@pytest.fixture
def sonic_moe(monkeypatch):
    """Install a fake package sonicmoe with a slow implementation."""
    functional, enums = ModuleType("sonicmoe.functional"), ModuleType("sonicmoe.enums")
    functional.moe_general_routing_inputs = imitated_sonic
    enums.ActivationType = SimpleNamespace(SWIGLU="swiglu")
    modules = {"sonicmoe": ModuleType("sonicmoe"), "sonicmoe.functional": functional, "sonicmoe.enums": enums}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_sonic_moe_computes_the_same_layer(sonic_moe, device):
    inputs = Inputs.random(TINY, device, torch.float32)
    implementation = sonic(inputs)
    y = implementation.forward()
    d_x, d_weight, _, d_w2 = torch.autograd.grad(y, implementation.leaves, inputs.dy)
    assert max(errors(inputs, y.detach(), (d_x, None, d_w2, d_weight)).values()) < 1e-4


def test_sonic_moe_is_timed_beside_ours(no_gpu, sonic_moe, device, tmp_path, monkeypatch):
    random = Inputs.random  # as replaced by no_gpu
    monkeypatch.setattr(Inputs, "random", staticmethod(lambda layer, at, _: random(layer, at, torch.float32)))
    report = measure(GpuOptions(folder=tmp_path, stages=("sonic",), repeats=2))
    row = next(row for row in report.rows if row["name"] == f"sonic.{TINY.name}")
    assert row["forward_tflops"] > 0
    assert {claim.name: claim.value for claim in report.claims}[f"gpu.{TINY.name}.over_sonic"] == row["over_ours"]


def test_claims_of_layers_that_were_not_measured_say_so():
    report = claims(list(LAYERS), {})
    assert len(report) == 7 * 12 + 2
    assert all(claim.value is None and claim.reason for claim in report)
    targets = {claim.name: claim.target for claim in report}
    assert targets["gpu.T40960_H768_I256_E128_K8.forward_tflops"] == 337
    assert targets[f"gpu.{LARGEST.name}.backward_tflops"] == 586
    assert targets["gpu.T24576_H1536_I512_E64_K4.activation_gib"] == pytest.approx(0.66)


def test_without_a_gpu_one_line_says_so(tmp_path: Path, interpreted):
    if interpreted:
        with pytest.raises(InputError, match="needs a CUDA device"):
            measure(GpuOptions(folder=tmp_path))
