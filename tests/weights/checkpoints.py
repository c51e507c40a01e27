"""Tiny checkpoints of the model families on which conversions are tested, and readers that do not
use our code."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moesaic.train.distributed_checkpoint import SHARDS
from moesaic_lab.families import shrunk

FAMILIES = (
    "Mixtral",
    "Qwen2Moe",
    "Qwen3Moe",
    "Qwen3Next",
    "Olmoe",
    "DeepseekV3",
    "Glm4Moe",
    "GptOss",
    "GraniteMoe",
)
WITHOUT = {("Qwen3Next", "torchtitan")}
"""(family, format) for families that a format cannot store."""


def build(family: str, **changes: Any) -> Any:
    """Return a tiny model in bfloat16 with all parameters random, so that no two are equal."""
    config = shrunk(getattr(transformers, f"{family}Config"))
    for name, value in {"num_hidden_layers": 2, **changes}.items():
        setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[-config.num_hidden_layers :])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # Megatron stores this norm's weight minus one, which is exact between 1/2 and 2.
            tensor.copy_(
                torch.randn(tensor.shape) * 0.1
                + (1 if name.endswith("linear_attn.norm.weight") else 0)
            )
    return model


@cache
def _saved(family: str, max_shard_size: str) -> tempfile.TemporaryDirectory[str]:
    kept = tempfile.TemporaryDirectory()
    build(family).save_pretrained(kept.name, max_shard_size=max_shard_size)
    return kept


def save(family: str, folder: Path, *, max_shard_size: str = "5GB") -> Path:
    """Write a tiny model into a folder, as transformers saves it; return the folder."""
    return shutil.copytree(_saved(family, max_shard_size).name, folder)


def edit_json(path: Path, **changes: Any) -> None:
    """Change some entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, read with the safetensors library or, for sharded ones, with
    torch's own reader."""
    if files := sorted(folder.glob("*.safetensors")):
        return {name: tensor for path in files for name, tensor in load_file(path).items()}
    if files := sorted((folder / SHARDS).glob("*.safetensors")):
        reader: FileSystemReader = HuggingFaceStorageReader(str(folder / SHARDS))
    else:
        (listed,) = folder.rglob(".metadata")
        reader = FileSystemReader(listed.parent)
    entries = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(found, storage_reader=reader, no_dist=True)
    return found


def assert_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert equal names, shapes, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].shape, actual[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(
            actual[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name
