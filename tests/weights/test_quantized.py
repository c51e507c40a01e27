"""Quantized weights of the hub convert to the values that transformers computes on loading, for any region of a tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='pip install "moesaic[transformers]"')

from checkpoints import build, tensors_of
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import moesaic
from moesaic.errors import InputError
from moesaic.weights import layout

FILE = "model.safetensors"


def quantize(folder: Path, family: str, method: dict[str, object], change) -> dict[str, torch.Tensor]:
    """Save a tiny model in which `change` replaces tensors by quantized ones, and return the values that these represent."""
    sizes = {"hidden_size": 64, "intermediate_size": 32} if family == "GptOss" else {}
    build(family, **sizes).save_pretrained(folder)
    tensors, expected = load_file(folder / FILE), {}
    for name in list(tensors):
        replaced = change(name, tensors[name])
        if replaced is not None:
            del tensors[name]
            tensors |= replaced[0]
            expected[name] = replaced[1]
    save_file(tensors, folder / FILE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    assert expected
    return expected


def to_fp8(name: str, tensor: torch.Tensor):
    if ".experts." not in name:
        return None
    rows, columns = tensor.shape
    values, scales = tensor.float().mul(50).to(torch.float8_e4m3fn), torch.rand(-(-rows // 16), -(-columns // 10)) / 50
    spread = scales.repeat_interleave(16, 0)[:rows].repeat_interleave(10, 1)[:, :columns]
    return {name: values, f"{name}_scale_inv": scales}, (values.float() * spread).bfloat16()


def to_mxfp4(name: str, tensor: torch.Tensor):
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    experts, columns, rows = tensor.shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, rows, columns // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


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

    quantize(tmp_path / "hub", "DeepseekV3", {"quant_method": "fp8", "weight_block_size": [16, 10]}, without)
    with pytest.raises(InputError, match=r"is fp8 without scales of .*: load the model with transformers"):
        moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf")


@pytest.mark.parametrize("size", [[16], [16, 0], "16", {"rows": 16}])
def test_a_size_of_blocks_that_cannot_be_is_refused(tmp_path, size):
    quantize(tmp_path / "hub", "DeepseekV3", {"quant_method": "fp8", "weight_block_size": [16, 10]}, to_fp8)
    path = tmp_path / "hub" / "config.json"
    table = json.loads(path.read_text())
    table["quantization_config"]["weight_block_size"] = size
    path.write_text(json.dumps(table))
    with pytest.raises(
        InputError, match=r"config.json: quantization_config.weight_block_size is not two numbers above 0"
    ):
        moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf")
