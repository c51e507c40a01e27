"""Writes a fine-tuned model with its adapters merged, weight by weight, in the files that `from_pretrained` reads.

Adapters were trained over the numbers that NF4 stands for, so they are merged into these: the merged model computes what the
adapted one does, to the rounding of its dtype. Ranks send their experts to the first rank, which holds one weight of a layer
and one file at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from moesaic.files import write
from moesaic.finetune.checks import read_config
from moesaic.transformers.lora import added, is_four_bit, local_part
from moesaic.transformers.nf4 import dequantized
from moesaic.weights.files import INDEX, SHARD_BYTES, filling
from moesaic.weights.model import Architecture


@torch.no_grad()
def write_merged(model: Any, source: str, folder: Path, dtype: torch.dtype, tokenizer: Any) -> None:
    """Write the merged model into a new folder; all ranks call it together.

    Args:
        model: of PEFT, after `adopt_adapters`.
        source: the model that was fine-tuned, whose configuration the merged one gets.
        folder: must not exist, or be empty.
    """
    config = read_config(source)
    config.dtype = dtype
    architecture = Architecture(config)
    weights = _weights(model, architecture, dtype)
    if dist.is_initialized() and dist.get_rank():
        for _ in weights:
            pass
        return
    with filling(folder):
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        file_of: dict[str, str] = {}
        shard: dict[str, Tensor] = {}
        total = 0
        for name, tensor in weights:
            total += tensor.nbytes
            stored = revert_weight_conversion(architecture.model, {name: tensor.cpu()})
            shard |= {key: part.clone() for key, part in stored.items()}
            if sum(each.nbytes for each in shard.values()) > SHARD_BYTES:
                _write(folder, shard, file_of)
        _write(folder, shard, file_of)
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        write(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _write(folder: Path, shard: dict[str, Tensor], file_of: dict[str, str]) -> None:
    """Write a file of tensors, note their names, and forget them."""
    name = f"model-{len(set(file_of.values())) + 1:05}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    file_of |= dict.fromkeys(shard, name)
    shard.clear()


def _weights(
    model: Any, architecture: Architecture, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield each stored weight of the model under its plain name; on other ranks than the first, the value may be a part."""
    wrappers = {
        (id(each.get_base_layer()), getattr(each, "parameter_name", "weight")): each
        for each in model.modules()
        if hasattr(each, "lora_A")
    }
    for path, module in model.get_base_model().named_modules():
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            plain = f"{path}.{name}".replace(".base_layer", "")
            if plain in architecture.shapes:
                yield plain, _merged(module, name, tensor, wrappers.get((id(module), name)), dtype)


def _merged(
    module: nn.Module, name: str, tensor: Tensor, wrapper: Any, dtype: torch.dtype
) -> Tensor:
    """Return a weight with what its adapter adds, if it has one; whole on the first rank."""
    if wrapper is None:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if not hasattr(wrapper, "parameter_name"):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return (whole.float() + wrapper.get_delta_weight("default").float()).to(dtype)
    part = dequantized(module, name) if is_four_bit(module) else local_part(tensor).float()
    part = (part + added(wrapper, module, "default").float()).to(dtype).contiguous()
    return _gathered(part) if isinstance(tensor, DTensor) else part


def _gathered(part: Tensor) -> Tensor:
    """Return the parts of all ranks on the first rank, on the CPU; elsewhere the part."""
    own = part.cpu()
    parts = (
        [torch.empty_like(own) for _ in range(dist.get_world_size())]
        if dist.get_rank() == 0
        else None
    )
    dist.gather(own, parts)
    return own if parts is None else torch.cat(parts)
