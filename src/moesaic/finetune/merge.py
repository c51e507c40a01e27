"""Writes a fine-tuned model with its adapters merged, weight by weight, in the files that
`from_pretrained` reads.

Adapters were trained over the numbers that NF4 stands for, so they are merged into these: the
merged model computes what the adapted one does, to the rounding of its dtype. Ranks send their
experts to the first rank, which holds one weight of a layer and one file at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from moesaic.errors import InputError
from moesaic.files import write
from moesaic.finetune.adapters import on_first
from moesaic.train.ranks import Ranks
from moesaic.transformers.lora import added, groups_name, is_four_bit, local_part, scales_name
from moesaic.transformers.nf4 import dequantized
from moesaic.weights.checkpoint import open_checkpoint
from moesaic.weights.hub import UnmappedError
from moesaic.weights.layout import first_names
from moesaic.weights.load import require_all
from moesaic.weights.logits import compare_merged, compares_logits, fixed_text
from moesaic.weights.model_tensors import Architecture
from moesaic.weights.quantized import LOADED
from moesaic.weights.source import read_config, save_tokenizer
from moesaic.weights.tensor_files import INDEX, SHARD_BYTES, filling


@torch.no_grad()
def write_merged(
    model: Any,
    source: str | Path,
    folder: Path,
    dtype: torch.dtype,
    tokenizer: Any,
    *,
    compares: bool | None = None,
    ranks: Ranks | None = None,
    logits_of: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Write the merged model into a new folder, and compare it with the adapted one; all ranks call
    it together.

    Args:
        model: of PEFT, after `adopt_adapters`; it computes logits.
        source: folder of the model that was fine-tuned, whose configuration the merged one gets;
            untied if the loaded one is.
        folder: must not exist, or be empty.
        compares: whether to compare logits; None to do so for models of at most 2 GiB.
        ranks: the ranks; None for those of the world, without stages.
        logits_of: computes the logits of tokens, (1, tokens), which the first rank gets; None for
            those that `model` returns.

    Raises:
        InputError: a tensor of the model has no place in the output, or the merged model computes
            something else. Nothing of the output stays.
    """
    ranks = ranks or Ranks.of_world()
    base = model.get_base_model()
    architecture = _architecture(base, Path(source), dtype, ranks)
    own = _own_places(base, architecture, ranks)
    num_bytes = sum(math.prod(shape) for shape in architecture.shapes.values()) * dtype.itemsize
    adapted = _logits(model, logits_of) if compares_logits(num_bytes, compares) else None
    group = None if ranks.mesh is None else ranks.mesh.process_group
    # Computed, and sent to the first rank, as they are iterated: so all ranks exhaust it.
    weights = on_first(_weights(model, own, dtype, group), ranks)
    if not ranks.is_first:
        for _ in weights:
            pass
        return
    with filling(folder):
        try:
            _write_files(model, architecture, weights, folder, tokenizer)
        except Exception:
            for _ in weights:  # the other ranks send what is left
                pass
            raise
        _require_same(folder, architecture, adapted, dtype)


def _architecture(base: Any, source: Path, dtype: torch.dtype, ranks: Ranks) -> Architecture:
    """Return what the output holds: the source's model, untied if a weight differs from the one
    that it is tied to."""
    config = read_config(source, methods=LOADED)
    config.dtype = dtype
    architecture = Architecture(config)
    are_equal = True
    for name, twin in architecture.tied.items():
        one = _parameter(base, name)
        other = _parameter(base, twin)
        if one is None or other is None or one is other:
            continue  # each stage compares what it has
        are_equal = are_equal and torch.equal(_whole(one), _whole(other))
    return architecture if all(ranks.gathered(are_equal)) else architecture.untied()


def _parameter(base: nn.Module, name: str) -> Tensor | None:
    """Return a parameter by the name that it has without adapters; None if another stage has it."""
    path, _, last = name.rpartition(".")
    module: Any = base.get_submodule(path)
    while hasattr(module, "base_layer"):  # adapters wrap the module, maybe one around another
        module = module.base_layer
    found: Tensor | None = getattr(module, last, None)
    return found


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor that ranks share as a whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own_places(base: nn.Module, architecture: Architecture, ranks: Ranks) -> set[str]:
    """Return the tensors of the output that this rank's stage fills.

    Raises:
        InputError: a tensor of the model has no place in the output, or no stage fills one.
    """
    places = architecture.shapes.keys()
    names_of_ranks = ranks.gathered([stored.plain_name for stored in _tensors(base)])
    names = {name for of_rank in names_of_ranks for name in of_rank}
    # Scales of weights in NF4 go into the weights.
    of_scales = {scales_name(name) for name in names} | {groups_name(name) for name in names}
    lost = names - places - architecture.tied.keys() - of_scales
    if lost:
        raise InputError(
            f"--merge: the merged model has no place for {first_names(lost)}: the adapters "
            "are saved"
        )
    empty = places - names
    if empty:
        raise InputError(
            f"--merge: the model has no {first_names(empty)} to merge: the adapters are saved"
        )
    # A tied embedding is in two stages: the earlier one fills it.
    first_of_stage = ranks.stage * (ranks.world // ranks.pp)
    earlier = {name for of_rank in names_of_ranks[:first_of_stage] for name in of_rank}
    return (set(names_of_ranks[ranks.rank]) & places) - earlier


class _StoredTensor(NamedTuple):
    """A tensor of a model that a checkpoint holds."""

    plain_name: str
    """Its name in the model without adapters."""
    module: nn.Module
    name: str
    """Its name within the module."""
    tensor: Tensor


def _tensors(base: nn.Module) -> Iterator[_StoredTensor]:
    """Yield the tensors of a model that a checkpoint holds, without those of adapters."""
    for path, module in base.named_modules():
        if "lora_" in path:
            continue
        tensors = dict(module.named_parameters(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[name] = buffer
        for name, tensor in tensors.items():
            # what PEFT's wrappers wrap is their `base_layer`
            plain_name = f"{path}.{name}".replace(".base_layer", "")
            yield _StoredTensor(plain_name, module, name, tensor)


def _logits(model: Any, logits_of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return a model's logits of the fixed text, (1, tokens, vocabulary), float32, on the CPU. All
    ranks call it together.

    Args:
        logits_of: computes logits of token ids by all stages of a pipeline, for the first rank
            alone; None for a model without stages, whose own forward pass gives them to all ranks.
    """
    device = next(model.parameters()).device
    token_ids = fixed_text(model.config.get_text_config().vocab_size).to(device)
    was_training = model.training
    try:
        model.eval()  # without dropout
        if logits_of is not None:
            logits = logits_of(token_ids)
        else:
            logits = model(input_ids=token_ids, use_cache=False).logits
        return logits.float().cpu()
    finally:
        model.train(was_training)


def _write_files(
    model: Any,
    architecture: Architecture,
    weights: Iterator[tuple[str, Tensor]],
    folder: Path,
    tokenizer: Any,
) -> None:
    """Write all files of the merged model."""
    architecture.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    file_of: dict[str, str] = {}  # name of a tensor -> its file
    of_file: dict[str, Tensor] = {}  # what the next file will hold
    total_bytes = 0
    for name, tensor in weights:
        total_bytes += tensor.nbytes
        hub_tensors = revert_weight_conversion(architecture.model, {name: tensor.cpu()})
        for hub_name, part in hub_tensors.items():
            of_file[hub_name] = part.clone()  # safetensors refuses views of one memory
        if sum(each.nbytes for each in of_file.values()) > SHARD_BYTES:
            _write(folder, of_file, file_of)
    if of_file:
        _write(folder, of_file, file_of)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    write(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _require_same(
    folder: Path, architecture: Architecture, adapted: Tensor | None, dtype: torch.dtype
) -> None:
    """Read the merged model again, and compare its tensors' names and shapes, and its logits if
    there are `adapted` ones.

    Raises:
        InputError: something is lost, or differs by more than rounding.
    """
    try:
        left = open_checkpoint(folder, "hf", architecture).left_behind
        if left:
            raise InputError(f"--merge: {first_names(left)} of the merged model would not be read")
    except UnmappedError:  # then transformers itself says what it finds
        pass
    if adapted is None:
        return
    merged, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    require_all(merged, found, folder)
    if architecture.experts:
        merged.set_experts_implementation("eager")
    compare_merged(adapted, _logits(merged), dtype, "--merge")


def _write(folder: Path, of_file: dict[str, Tensor], file_of: dict[str, str]) -> None:
    """Write a file of tensors, note in `file_of` which file has them, and forget them."""
    number = len(set(file_of.values())) + 1
    file = f"model-{number:05}.safetensors"
    save_file(of_file, folder / file, metadata={"format": "pt"})
    for name in of_file:
        file_of[name] = file
    of_file.clear()


def _weights(
    model: Any, own: set[str], dtype: torch.dtype, group: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the model whose plain names are in `own`, by these names, with what
    adapters add; on other ranks than the first of the group, the value may be a part."""
    # PEFT's wrappers, by the module and the parameter that they adapt
    wrappers = {}
    for part in model.modules():
        if hasattr(part, "lora_A"):
            parameter_name = getattr(part, "parameter_name", "weight")
            wrappers[id(part.get_base_layer()), parameter_name] = part
    for stored in _tensors(model.get_base_model()):
        if stored.plain_name in own:
            wrapper = wrappers.get((id(stored.module), stored.name))
            merged = _merged(stored.module, stored.name, stored.tensor, wrapper, dtype, group)
            yield stored.plain_name, merged


def _merged(
    module: nn.Module,
    name: str,
    tensor: Tensor,
    wrapper: Any,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return a weight with what its adapter adds; whole on the group's first rank.

    Args:
        module: the module that has the weight.
        name: the weight's name within it.
        tensor: this rank's part of the weight, or its codes in NF4.
        wrapper: PEFT's wrapper with the adapter; None for a weight without one.
        dtype: that of the result, in which the sum in float32 is rounded.
        group: the ranks that share experts.
    """
    if wrapper is None:  # nothing was trained here
        return _whole(tensor)
    if not _is_of_experts(wrapper):  # of a linear layer: every rank has the whole adapter
        return (_whole(tensor).float() + wrapper.get_delta_weight("default").float()).to(dtype)
    # Of experts: each rank adds to its own part, maybe in NF4; the first rank gathers the parts.
    part = dequantized(module, name) if is_four_bit(module) else local_part(tensor).float()
    part = (part + added(wrapper, module, "default").float()).to(dtype).contiguous()
    return _gathered(part, group) if isinstance(tensor, DTensor) else part


def _is_of_experts(wrapper: Any) -> bool:
    """Return whether PEFT's wrapper adapts a parameter of stacked experts (`ParamWrapper`), not a
    linear layer."""
    return hasattr(wrapper, "parameter_name")


def _gathered(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the parts of all ranks of a group, joined along the first dimension, on its first
    rank; on others their own part. All are on the CPU."""
    own = part.cpu()
    parts: list[Tensor] | None = None
    if dist.get_rank(group) == 0:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.gather(own, parts, group=group, group_dst=0)
    return own if parts is None else torch.cat(parts)
