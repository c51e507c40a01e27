"""Quantized weights of the hub convert to the values that transformers computes on loading, for any
region of a tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers import refused

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from checkpoints import build, edit_json, save, tensors_of
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import moesaic
from moesaic.errors import InputError
from moesaic.weights import fp8 as fp8_weights
from moesaic.weights import layout, quantized

FILE = "model.safetensors"
FP8 = torch.float8_e4m3fn


def quantize(
    folder: Path, family: str, method: dict[str, object], change
) -> dict[str, torch.Tensor]:
    """Save a tiny model in which `change` replaces tensors by quantized ones, and return the values
    that these represent."""
    sizes = {"hidden_size": 64, "intermediate_size": 32} if family == "GptOss" else {}
    build(family, **sizes).save_pretrained(folder)
    tensors = load_file(folder / FILE)
    expected = {}
    for name in list(tensors):
        replaced = change(name, tensors[name])
        if replaced is not None:
            del tensors[name]
            tensors |= replaced[0]
            expected[name] = replaced[1]
    save_file(tensors, folder / FILE, {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=method)
    assert expected
    return expected


def to_fp8(name: str, tensor: torch.Tensor):
    if ".experts." not in name:
        return None
    rows, columns = tensor.shape
    values = tensor.float().mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 16), -(-columns // 10)) / 50
    spread = scales.repeat_interleave(16, 0)[:rows].repeat_interleave(10, 1)[:, :columns]
    return {name: values, f"{name}_scale_inv": scales}, (values.float() * spread).bfloat16()


def to_mxfp4(name: str, tensor: torch.Tensor):
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    experts, columns, rows = tensor.shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, rows, columns // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(
        blocks, scales
    )


@pytest.mark.parametrize(
    ("family", "method", "change"),
    [
        ("DeepseekV3", {"quant_method": "fp8", "weight_block_size": [16, 10]}, to_fp8),
        ("GptOss", {"quant_method": "mxfp4"}, to_mxfp4),
    ],
)
def test_quantized_weights_become_their_values(tmp_path, monkeypatch, family, method, change):
    monkeypatch.setattr(layout, "BUFFER", 1000)  # pieces that cut through blocks
    torch.manual_seed(0)
    meant = quantize(tmp_path / "hub", family, method, change)
    receipt = moesaic.convert(tmp_path / "hub", tmp_path / "plain", to="hf")
    tensors = tensors_of(tmp_path / "plain")
    for name, tensor in meant.items():
        assert torch.equal(tensors[name], tensor), name
    assert not [name for name in tensors if name.endswith(("_scale_inv", "_blocks", "_scales"))]
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert receipt["logits"]["largest_difference"] == 0


def test_fp8_without_its_scales_is_refused(tmp_path):
    def without(name, tensor):
        made = to_fp8(name, tensor)
        return made and ({name: made[0][name]}, made[1])

    quantize(
        tmp_path / "hub",
        "DeepseekV3",
        {"quant_method": "fp8", "weight_block_size": [16, 10]},
        without,
    )
    with pytest.raises(
        InputError,
        match=r"is fp8 without scales of .*: correct quantization_config\.weight_block_size",
    ):
        moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def fp8(scale_dtype, element, rows, columns):
    """Return a change like `to_fp8`, with scales of a dtype for blocks of any size, and values by a
    loop over blocks."""

    def change(name, tensor):
        if ".experts." not in name:
            return None
        values = tensor.float().mul(50).to(element)
        grid = (-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
        scales = (0.003 + torch.rand(grid) / 50).to(scale_dtype)
        expected = torch.empty(tensor.shape, dtype=torch.bfloat16)
        for i in range(grid[0]):
            for j in range(grid[1]):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                expected[block] = (
                    (values[block].double() * scales[i, j].double()).float().bfloat16()
                )
        return {name: values, f"{name}_scale_inv": scales}, expected

    return change


@pytest.mark.parametrize(
    ("dtype", "element", "blocks"),
    [
        (torch.float32, FP8, (8, 8)),
        (torch.bfloat16, FP8, (16, 10)),
        (torch.float16, FP8, (7, 33)),
        (torch.float8_e8m0fnu, torch.float8_e5m2, (128, 128)),
        (torch.float8_e8m0fnu, FP8, (8, 8)),
    ],
)
def test_scales_of_any_dtype_give_products_that_are_rounded_once(
    tmp_path, monkeypatch, dtype, element, blocks
):
    monkeypatch.setattr(layout, "BUFFER", 1000)
    torch.manual_seed(0)
    method = {"quant_method": "fp8", "weight_block_size": list(blocks)}
    expected = quantize(tmp_path / "hub", "DeepseekV3", method, fp8(dtype, element, *blocks))
    by_transformers = blocks == (8, 8)
    receipt = moesaic.convert(tmp_path / "hub", tmp_path / "plain", to="hf", logits=by_transformers)
    tensors = tensors_of(tmp_path / "plain")
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    assert not by_transformers or receipt["logits"]["largest_difference"] == 0


@pytest.mark.parametrize(
    ("family", "change"), [("DeepseekV3", fp8(torch.bfloat16, FP8, 8, 8)), ("GptOss", to_mxfp4)]
)
def test_values_other_than_those_of_transformers_are_an_error(
    tmp_path, monkeypatch, family, change
):
    method = (
        {"quant_method": "fp8", "weight_block_size": [8, 8]}
        if family == "DeepseekV3"
        else {"quant_method": "mxfp4"}
    )
    right = fp8_weights._product
    quantize(tmp_path / "hub", family, method, change)
    monkeypatch.setattr(quantized, "FP4", quantized.FP4 * 2)
    monkeypatch.setattr(fp8_weights, "_product", lambda *given: right(*given) * 2)
    with pytest.raises(
        InputError,
        match=r"transformers loads model\.layers\.\d\.mlp\.experts\..* with other values",
    ):
        moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


def test_scales_that_belong_to_nothing_quantized_are_not_dropped(tmp_path):
    def beside(name, tensor):
        if ".experts." not in name:
            return None
        return {name: tensor, f"{name}_scale_inv": torch.ones(1, 1)}, tensor

    quantize(
        tmp_path / "hub",
        "DeepseekV3",
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        beside,
    )
    with pytest.raises(
        InputError, match=r"12 tensors are unknown to the model: .*down_proj\.weight_scale_inv"
    ):
        moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf")


@pytest.mark.parametrize("part", ["_scales", "_blocks"])
def test_mxfp4_of_two_shapes_is_refused(tmp_path, part):
    quantize(tmp_path / "hub", "GptOss", {"quant_method": "mxfp4"}, to_mxfp4)
    tensors = load_file(tmp_path / "hub" / FILE)
    name = f"model.layers.0.mlp.experts.down_proj{part}"
    save_file(tensors | {name: torch.cat([tensors[name]] * 2, 2)}, tmp_path / "hub" / FILE)
    with pytest.raises(InputError, match="are not mxfp4 of one shape: fetch them again"):
        moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf")


def test_other_quantizations_get_advice_that_works(tmp_path):
    path = save("Mixtral", tmp_path / "hub") / "config.json"
    for method in ("gptq", "awq", "bitsandbytes", "modelopt", "compressed-tensors", None):
        edit_json(path, quantization_config={"quant_method": method, "bits": 4})
        line = (
            f"the weights are quantized ({method}), and only fp8 and mxfp4 are read: convert the "
            "checkpoint that they"
        )
        assert (
            refused(moesaic.convert, tmp_path / "hub", tmp_path / "out", to="hf")
            == f"{path}: {line} were quantized from"
        )


def test_an_empty_quantization_is_none(tmp_path):
    edit_json(save("Mixtral", tmp_path / "hub") / "config.json", quantization_config={})
    receipt = moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf")
    assert receipt["logits"]["largest_difference"] == 0
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_size_of_blocks_that_cannot_be_is_refused(tmp_path):
    quantize(
        tmp_path / "hub",
        "DeepseekV3",
        {"quant_method": "fp8", "weight_block_size": [16, 10]},
        to_fp8,
    )
    for size in ([16], [16, 0], "16", {"rows": 16}):
        method = {"quant_method": "fp8", "weight_block_size": size}
        edit_json(tmp_path / "hub" / "config.json", quantization_config=method)
        with pytest.raises(
            InputError, match=r"quantization_config.weight_block_size is not two numbers above 0"
        ):
            moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf")
