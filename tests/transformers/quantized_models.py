"""Tiny checkpoints in the hub's quantizations, written without our readers, and the same models in
the numbers they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lora_ranks import FAMILIES, by_nf4
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moesaic.kernels import nf4

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors that stand for a weight, and its numbers, float32."""
WEIGHT = re.compile(r"\.experts\..*_proj(\.weight)?$")
"""Names of weights of experts."""


def fp8(name: str, weight: Tensor) -> Stored | None:
    if weight.dim() != 2 or "_proj" not in name:
        return None
    rows, columns = weight.shape
    values = weight.mul(50).to(torch.float8_e4m3fn)
    scales = 0.003 + torch.rand(-(-rows // 16), -(-columns // 24)) / 50
    spread = scales.repeat_interleave(16, 0)[:rows].repeat_interleave(24, 1)[:, :columns]
    return {name: values, f"{name}_scale_inv": scales}, (values.float() * spread).bfloat16().float()


def mxfp4(name: str, weight: Tensor) -> Stored | None:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    experts, columns, rows = weight.shape
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 125, (experts, rows, columns // 32), dtype=torch.uint8)
    numbers = convert_moe_packed_tensors(blocks, scales)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, numbers.float()


def linear(name: str, weight: Tensor, *, nested: bool) -> Stored | None:
    """As bitsandbytes' `Linear4bit` is saved; blocks of narrow matrices have several rows."""
    if weight.dim() != 2 or "_proj" not in name:
        return None
    codes, scales = nf4.quantize(weight.reshape(-1, 64))
    sizes: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    found = {
        name: codes.view(-1, 1),
        f"{name}.absmax": scales.flatten(),
        f"{name}.quant_map": torch.tensor(nf4.VALUES),
    }
    if nested:
        short, groups = nf4.compress(scales)
        sizes |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": groups[0].item(),
        }
        found |= {f"{name}.absmax": short.flatten(), f"{name}.nested_absmax": groups[1:].clone()}
        found[f"{name}.nested_quant_map"] = nf4.scale_values(torch.device("cpu")).clone()
        scales = nf4.expand(short.unsqueeze(0), groups.unsqueeze(0))[0]
    text = json.dumps(sizes).encode()
    found[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return found, nf4.dequantize(codes, scales, torch.float32).view(weight.shape)


def stacked(name: str, weight: Tensor) -> Stored | None:
    """As bitsandbytes' `Experts4bit` is saved."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    codes, scales = nf4.quantize(weight)
    absmax = name.removesuffix("_proj") + "_absmax"
    return {name: codes.flatten(1), absmax: scales.flatten(1)}, nf4.dequantize(
        codes, scales, torch.float32
    )


KINDS: dict[str, tuple[str, Callable[[str, Tensor], Stored | None], dict[str, Any]]] = {
    "fp8": ("qwen3", fp8, {"quant_method": "fp8", "weight_block_size": [16, 24]}),
    "mxfp4": ("gpt_oss", mxfp4, {"quant_method": "mxfp4"}),
    "nf4": (
        "qwen3",
        lambda *weight: linear(*weight, nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "nf4-double": (
        "qwen3",
        lambda *weight: linear(*weight, nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "experts4bit": ("qwen3", stacked, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}
"""A quantization: a model of `FAMILIES`, what is stored for a weight (None: itself), and
`quantization_config`."""


def write(folder: Path, kind: str, model: Any, files: int = 2) -> dict[str, Tensor]:
    """Write a model as folder/KIND with random experts. Return the numbers that the tensors mean,
    by their names on the hub."""
    _, change, table = KINDS[kind]
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "experts" in name:
                weight.normal_(std=0.1)
                # if bitsandbytes quantizes scales, some of these blocks get scales below zero
                weight[:, :3] *= 1e-3
                weight[:, 3] *= torch.linspace(1, 4, len(weight)).view(
                    -1, *[1] * (weight.dim() - 2)
                )
    tensors = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    named = tensors if kind == "experts4bit" else revert_weight_conversion(model, tensors)
    stored = {}
    plain = {}
    for name, weight in named.items():
        found, plain[name] = change(name, weight) or ({name: weight}, weight)
        stored |= found
    save(model, folder / kind, stored, files, quantization_config=table)
    return plain


def write_all(folder: Path) -> None:
    """Write a tiny model of each kind, its numbers as folder/KIND-plain, and those that NF4 makes
    of these as KIND-rounded."""
    for kind, (family, _, _) in KINDS.items():
        model = FAMILIES[family]()
        plain = write(folder, kind, model)
        save(model, folder / f"{kind}-plain", plain, 1)
        rounded = {
            name: by_nf4(weight, is_transposed=family == "gpt_oss")
            if WEIGHT.search(name)
            else weight
            for name, weight in plain.items()
        }
        save(model, folder / f"{kind}-rounded", rounded, 1)


def save(model: Any, folder: Path, tensors: dict[str, Tensor], files: int, **entries: Any) -> None:
    """Write tensors in several files, and a model's configuration with further entries."""
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    names = list(tensors)
    file_of = {}
    for number in range(files):
        own = names[number * len(names) // files : (number + 1) * len(names) // files]
        file_of |= dict.fromkeys(own, f"model-{number}.safetensors")
        save_file(
            {name: tensors[name].contiguous() for name in own},
            folder / f"model-{number}.safetensors",
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": file_of})
    )
