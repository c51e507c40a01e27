"""The GPU benchmark end to end on tiny layers, with clocks and memory counters replaced, to find
errors without a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moesaic.kernels.triton.rows.tiles import default_tile
from moesaic_lab.device import layers as gpu_layers
from moesaic_lab.device import on_gpu, timing
from moesaic_lab.device.layers import Inputs, errors, grouped_mm, layer_of, ours, sonic
from moesaic_lab.device.shapes import LARGEST, LAYERS, GpuLayer, claims
from moesaic_lab.device.steps import PRODUCTS

TINY = GpuLayer(tokens=6, dim=32, hidden=16, num_experts=2, top_k=1)


@pytest.fixture
def one_layer(monkeypatch, device):
    """Measure one small layer, on the tests' device, each of its parts once."""

    def once(methods, repeats, warmup=0):
        return {name: [timing._seconds(method)] * 2 for name, method in methods.items()}

    for module in (on_gpu, timing):
        monkeypatch.setattr(module, "in_turn", once)
    random = Inputs.random
    monkeypatch.setattr(
        Inputs, "random", staticmethod(lambda layer, _, dtype: random(layer, device, dtype))
    )
    monkeypatch.setattr(on_gpu, "chosen", lambda names, dry: [TINY])


def rows_of(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "rows.json").read_text())["rows"]


@pytest.mark.random
def test_measure_from_checks_to_claims_and_once_more_from_its_files(
    one_layer, tmp_path, monkeypatch
):
    assert on_gpu.measure(tmp_path, dry=True) == 0
    rows = rows_of(tmp_path)
    row = rows[TINY.name]
    assert set(row["errors"]) == {"y", "x", "weight", "w13", "w2"}
    assert row["ours"]["forward_tflops"] > 0
    assert row.get("grouped_mm_absent") is None
    assert row["grouped_mm"]["over_ours"] > 0
    assert "liger" in row["liger_absent"]
    assert set(row["steps"]) == {*PRODUCTS, "sum", "sort"}
    values = {claim.name.rsplit(".", 1)[1]: claim for claim in claims([TINY], rows)}
    assert values["forward_tflops"].value == row["ours"]["forward_tflops"]
    assert values["activation_gib"].value == row["ours"]["memory_gib"]["kept"]
    assert values["over_liger"].value is None
    assert "liger-kernel could not be run" in values["over_liger"].reason
    monkeypatch.setattr(on_gpu, "_row", lambda *_: 1 / 0)
    assert on_gpu.measure(tmp_path, dry=True) == 0, "nothing is measured again"
    assert rows_of(tmp_path) == rows


def test_tune_writes_every_tile_and_stops_at_the_deadline(one_layer, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "moesaic_lab.device.search.candidates",
        lambda shape, device: iter([default_tile(shape, device)]),
    )
    for product in PRODUCTS:
        on_gpu.tune(tmp_path, TINY.name, product, "60", dry=True)
    (tiles,) = json.loads((tmp_path / "tiles.json").read_text()).values()
    assert len(tiles) == 6
    on_gpu.tune(tmp_path / "late", TINY.name, "up", "-1", dry=True)
    assert not (tmp_path / "late" / "tiles.json").exists()


def test_a_layer_that_fails_is_a_row_with_its_reason(one_layer, tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "errors", lambda *_: 1 / 0)
    assert on_gpu.measure(tmp_path, dry=True) == 1
    rows = rows_of(tmp_path)
    assert rows[TINY.name]["error"] == "ZeroDivisionError: division by zero"
    found = claims([TINY], rows)
    assert {claim.value for claim in found} == {None}
    assert all("ZeroDivisionError" in claim.reason for claim in found if "sonic" not in claim.name)


@pytest.mark.parametrize("layer", [TINY, replace(TINY, is_clamped=True)], ids=["swiglu", "gpt_oss"])
def test_wrong_results_are_found(device, layer):
    inputs = Inputs.random(layer, device, torch.float32)
    implementation = ours(inputs, None)
    y = implementation.forward()
    results = [y.detach(), *torch.autograd.grad(y, implementation.leaves, inputs.dy)]
    assert max(errors(inputs, results[0], tuple(results[1:])).values()) < 1e-4
    for number, name in enumerate(("y", *gpu_layers.LEAVES)[: len(results)]):
        spoilt = [*results[:number], results[number] * 1.1, *results[number + 1 :]]
        report = errors(inputs, spoilt[0], tuple(spoilt[1:]))
        assert {key for key, error in report.items() if error > gpu_layers.TOLERANCE} == {name}


@pytest.mark.parametrize("layer", [TINY, replace(TINY, is_clamped=True)], ids=["swiglu", "gpt_oss"])
def test_grouped_mm_computes_the_same_layer(device, layer):
    inputs = Inputs.random(layer, device, torch.float32)
    implementation = grouped_mm(inputs)
    y = implementation.forward()
    assert (
        max(
            errors(
                inputs, y.detach(), torch.autograd.grad(y, implementation.leaves, inputs.dy)
            ).values()
        )
        < 1e-4
    )


def imitated_sonic(
    x, scores, token, expert, gate_up, bias, down, other_bias, num_experts, stream, activation
):
    """Compute what sonicmoe.functional.moe_general_routing_inputs documents: gate and up rows
    interleaved, experts last."""
    assert (bias, other_bias, activation) == (None, None, "swiglu")
    assert [each.stride()[1] for each in (gate_up, down)] == [1, 1]
    assert gate_up.shape == (2 * down.shape[1], down.shape[0], num_experts)
    y = torch.zeros_like(x)
    for e in range(num_experts):
        rows = (expert == e).nonzero().squeeze(1)
        read = x[token[rows].long()]
        hidden = torch.nn.functional.silu(read @ gate_up[0::2, :, e].T) * (
            read @ gate_up[1::2, :, e].T
        )
        y = y.index_add(0, token[rows], scores[rows, None] * (hidden @ down[:, :, e].T))
    return y, None


@pytest.fixture
def sonic_moe(monkeypatch):
    """Install fake packages sonicmoe, with a slow implementation, and quack."""
    functional = ModuleType("sonicmoe.functional")
    enums = ModuleType("sonicmoe.enums")
    functional.moe_general_routing_inputs = imitated_sonic
    enums.ActivationType = SimpleNamespace(SWIGLU="swiglu")
    products = ModuleType("quack.gemm_interface")
    for name in ("gemm", "gemm_gated", "gemm_dgated"):
        setattr(products, name, lambda *, tuned=True: tuned)
    modules = {
        "sonicmoe": ModuleType("sonicmoe"),
        "sonicmoe.functional": functional,
        "sonicmoe.enums": enums,
        "quack": ModuleType("quack"),
        "quack.gemm_interface": products,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return products


def test_sonic_moe_computes_the_same_layer(sonic_moe, device):
    inputs = Inputs.random(TINY, device, torch.float32)
    implementation = sonic(inputs)
    y = implementation.forward()
    d_x, d_weight, _, d_w2 = torch.autograd.grad(y, implementation.leaves, inputs.dy)
    assert max(errors(inputs, y.detach(), (d_x, None, d_w2, d_weight)).values()) < 1e-4


def test_sonic_moe_is_timed_beside_ours_without_a_search_of_its_own(
    one_layer, sonic_moe, tmp_path, monkeypatch
):
    random = Inputs.random  # as replaced by one_layer
    monkeypatch.setattr(
        Inputs, "random", staticmethod(lambda layer, at, _: random(layer, at, torch.float32))
    )
    assert on_gpu.measure_sonic(tmp_path, dry=True) == 0
    rows = rows_of(tmp_path)
    row = rows[f"sonic.{TINY.name}"]
    assert row["forward_tflops"] > 0
    assert {claim.name: claim.value for claim in claims([TINY], rows | {TINY.name: {}})}[
        f"gpu.{TINY.name}.over_sonic"
    ] == row["over_ours"]
    assert not sonic_moe.gemm()
    assert not sonic_moe.gemm_dgated()


def test_claims_of_layers_that_were_not_measured_say_so():
    report = claims(list(LAYERS), {})
    assert len(report) == 7 * 16 + 2
    assert all(claim.value is None and claim.reason for claim in report)
    targets = {claim.name: claim.target for claim in report}
    assert targets["gpu.T40960_H768_I256_E128_K8.forward_tflops"] == 337
    assert targets[f"gpu.{LARGEST.name}.backward_tflops"] == 586
    assert targets["gpu.T8192_H7168_I2048_E256_K8.forward_tflops"] is None
    assert targets["gpu.T24576_H1536_I512_E64_K4.activation_gib"] == pytest.approx(0.66)


def test_a_peer_without_clamps_says_so_and_the_whole_layer_runs(device):
    inputs = Inputs.random(replace(TINY, top_k=2, is_clamped=True), device, torch.float32)
    with pytest.raises(ValueError, match="SonicMoE has no clamped SwiGLU with biases"):
        sonic(inputs)
    assert layer_of(inputs).forward().shape == inputs.x.shape
