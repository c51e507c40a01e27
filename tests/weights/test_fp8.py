"""fp8 weights with every form of scales that checkpoints of the hub have, against products in
float64; others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from checkpoints import build, edit_json, tensors_of
from safetensors.torch import load_file, save_file
from torch import Tensor

import moesaic
from helpers import refused
from moesaic.weights import layout
from moesaic.weights.load import load_model

FILE = "model.safetensors"
FP8 = torch.float8_e4m3fn
Change = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From a weight (rows, columns) to scales, and these spread over the weight."""


def one(shape: tuple[int, ...]) -> Change:
    def change(weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.rand(()) + 0.5
        return scale.reshape(shape), scale.expand(weight.shape)

    return change


def channels(*, flat: bool, dtype: torch.dtype = torch.float32) -> Change:
    def change(weight: Tensor) -> tuple[Tensor, Tensor]:
        scales = (torch.rand(weight.shape[0], 1) + 0.5).to(dtype)
        return scales.flatten() if flat else scales, scales.expand(weight.shape)

    return change


def grid(
    rows: int, columns: int, *, ones: bool = False, dtype: torch.dtype = torch.float32
) -> Change:
    def change(weight: Tensor) -> tuple[Tensor, Tensor]:
        height, width = weight.shape
        powers = torch.randint(
            120, 130, (-(-height // rows), -(-width // columns)), dtype=torch.uint8
        )
        scales = (
            torch.exp2(powers.float() - 127)
            if dtype == torch.uint8
            else torch.rand(powers.shape) + 0.5
        )
        spread = scales.repeat_interleave(rows, 0)[:height].repeat_interleave(columns, 1)[:, :width]
        stored = powers if dtype == torch.uint8 else scales
        return stored[:, None, :, None] if ones else stored, spread

    return change


def groups(**weights: Any) -> dict[str, Any]:
    settings = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True} | weights
    table = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return table | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": settings}}}


FORMS: dict[str, tuple[dict[str, Any], str, Change, dict[str, Tensor]]] = {
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 10]},
        "weight_scale_inv",
        grid(16, 10),
        {},
    ),
    "one, Ministral": (
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        "weight_scale_inv",
        one(()),
        {"activation_scale": torch.ones(())},
    ),
    "one, AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        "weight_scale",
        one((1,)),
        {"input_scale": torch.ones(1)},
    ),
    "FBGEMM": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "weight_scale",
        channels(flat=False),
        {"input_scale_ub": torch.tensor([1200.0])},
    ),
    "compressed channels": (
        groups(),
        "weight_scale",
        channels(flat=False, dtype=torch.bfloat16),
        {},
    ),
    "compressed one": (
        groups(strategy="tensor"),
        "weight_scale",
        one((1,)),
        {"input_scale": torch.ones(1), "weight_zero_point": torch.zeros(1, dtype=torch.int8)},
    ),
    "compressed blocks": (
        groups(strategy="block", block_structure=[16, 10]),
        "weight_scale",
        grid(16, 10),
        {},
    ),
    "compressed groups": (groups(strategy="group", group_size=8), "weight_scale", grid(1, 8), {}),
    "Model Optimizer": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "weight_scale",
        one(()),
        {"input_scale": torch.ones(())},
    ),
    "Model Optimizer channels": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "weight_scale",
        channels(flat=True),
        {},
    ),
    "Model Optimizer blocks": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        "weight_scale",
        grid(128, 128, ones=True),
        {},
    ),
    "MXFP8": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        "weight_scale",
        grid(1, 32, dtype=torch.uint8),
        {},
    ),
    "Quark": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
        "weight_scale",
        one(()),
        {"input_scale": torch.ones(()), "output_scale": torch.ones(())},
    ),
    "DeepSeek's own": (
        {"quant_method": "fp8", "weight_block_size": [16, 10]},
        "scale",
        grid(16, 10),
        {},
    ),
}


def write(
    folder: Path, table: dict[str, Any], suffix: str, change: Change, others: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Write a tiny Qwen3-MoE whose projections are in fp8; return the values of all its tensors."""
    torch.manual_seed(0)
    build("Qwen3Moe", num_hidden_layers=1, hidden_size=64).save_pretrained(folder)
    tensors = load_file(folder / FILE)
    expected = dict(tensors)
    for name in [each for each in tensors if each.endswith("_proj.weight")]:
        values = (tensors[name].float() * 50).to(FP8)
        scales, spread = change(values)
        prefix = name.removesuffix("weight")
        tensors |= {name: values, prefix + suffix: scales.contiguous()}
        tensors |= {prefix + other: value.clone() for other, value in others.items()}
        expected[name] = (values.double() * spread.double()).float().bfloat16()
    save_file(tensors, folder / FILE, {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=table)
    return expected


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_scales_is_read(tmp_path, monkeypatch, form):
    monkeypatch.setattr(layout, "BUFFER", 1000)  # pieces that cut through blocks
    table, suffix, change, others = FORMS[form]
    expected = write(tmp_path / "hub", table, suffix, change, others)
    receipt = moesaic.convert(tmp_path / "hub", tmp_path / "plain", to="hf")
    found = tensors_of(tmp_path / "plain")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    projections = sum(name.endswith("_proj.weight") for name in expected)
    assert len(receipt["left_behind"]) == projections * len(others)
    assert receipt["logits"]["largest_difference"] == 0
    loaded = load_model(tmp_path / "hub").state_dict()
    assert torch.equal(
        loaded["model.layers.0.self_attn.q_proj.weight"],
        expected["model.layers.0.self_attn.q_proj.weight"],
    )


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 1, 1), (4, 48), (4, 48, 1), (4, 1, 64)])
def test_scales_of_stacked_experts_are_read(tmp_path, shape):
    build("Qwen3Moe", num_hidden_layers=1, hidden_size=64).save_pretrained(
        tmp_path / "hub", save_original_format=False
    )
    tensors = load_file(tmp_path / "hub" / FILE)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert tensors[name].shape == (4, 48, 64)
    values = (tensors[name].float() * 50).to(FP8)
    scales = torch.rand(shape) + 0.5
    save_file(
        tensors | {name: values, f"{name}_scale": scales}, tmp_path / "hub" / FILE, {"format": "pt"}
    )
    edit_json(tmp_path / "hub" / "config.json", quantization_config={"quant_method": "fbgemm_fp8"})
    spread = scales.double().reshape(*shape, *(1,) * (3 - len(shape)))
    loaded = load_model(tmp_path / "hub").state_dict()[name]
    assert torch.equal(loaded, (values.double() * spread).float().bfloat16())


def test_the_model_optimizers_own_file_says_how_it_quantized(tmp_path):
    table, suffix, change, others = FORMS["Model Optimizer"]
    expected = write(tmp_path / "hub", table, suffix, change, others)
    config = json.loads((tmp_path / "hub/config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "hub/config.json").write_text(json.dumps(config))
    settings = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
    }
    (tmp_path / "hub/hf_quant_config.json").write_text(json.dumps(settings))
    moesaic.convert(tmp_path / "hub", tmp_path / "plain", to="hf")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensors_of(tmp_path / "plain")[name], expected[name])
    settings["quantization"] = {"quant_algo": "NVFP4"}
    (tmp_path / "hub/hf_quant_config.json").write_text(json.dumps(settings))
    assert "the weights are quantized (modelopt, NVFP4)" in refused(
        moesaic.convert, tmp_path / "hub", tmp_path / "o", to="hf"
    )


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            groups(num_bits=4, type="int"),
            "the weights are quantized (compressed-tensors, int of 4 bits)",
        ),
        (groups(num_bits=8, type="int"), "(compressed-tensors, int of 8 bits)"),
        (
            groups() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "(compressed-tensors, sparse, sparse-24-bitmask)",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "(modelopt, NVFP4)"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}},
            "(quark, fp4)",
        ),
        ({"quant_method": "torchao"}, "(torchao)"),
    ],
)
def test_other_forms_are_refused_for_what_they_are(tmp_path, table, line):
    _, suffix, change, others = FORMS["blocks"]
    write(tmp_path / "hub", table, suffix, change, others)
    assert line in refused(moesaic.convert, tmp_path / "hub", tmp_path / "out", to="hf")


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ({"weight_scale": torch.ones(7, 1)}, "and its scales are [7, 1]"),
        ({}, "it has no scales"),
        (
            {"weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)},
            "it has scales of two names",
        ),
        ({"weight_scale": torch.ones(1, dtype=torch.int32)}, "its scales are int32"),
        (
            {"weight_scale": torch.ones(1), "weight_zero_point": torch.ones(1, dtype=torch.int8)},
            "is not zero",
        ),
        (
            {"weight_scale": torch.ones(1), "weight_packed": torch.ones(1)},
            "the weights are packed in four bits",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused_for_what_they_are(tmp_path, names, line):
    _, _, change, _ = FORMS["compressed one"]
    write(tmp_path / "hub", groups(), "weight_scale", change, {})
    prefix = "model.layers.0.self_attn.q_proj."
    tensors = load_file(tmp_path / "hub" / FILE)
    del tensors[f"{prefix}weight_scale"]
    save_file(
        tensors | {prefix + name: value for name, value in names.items()},
        tmp_path / "hub" / FILE,
        {"format": "pt"},
    )
    assert line in refused(moesaic.convert, tmp_path / "hub", tmp_path / "out", to="hf")


def test_scales_of_a_vector_that_do_not_fit_are_refused(tmp_path):
    _, _, change, _ = FORMS["compressed one"]
    write(tmp_path / "hub", groups(), "weight_scale", change, {})
    vector = "model.layers.0.input_layernorm.weight"
    tensors = load_file(tmp_path / "hub" / FILE)
    tensors[vector] = tensors[vector].to(torch.float8_e4m3fn)
    tensors[f"{vector}_scale"] = torch.ones(1, 2, 1)
    save_file(tensors, tmp_path / "hub" / FILE, {"format": "pt"})
    told = refused(moesaic.convert, tmp_path / "hub", tmp_path / "out", to="hf")
    assert f"{vector}" in told
    assert "and its scales are [1, 2, 1]" in told
