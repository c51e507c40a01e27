"""The formats that use transformers' names: the Hugging Face hub's files, and Moesaic's own sharded
checkpoints.

On the hub, each expert has its own matrices; in memory, transformers stacks all experts of a layer
in one tensor. The mapping comes from transformers' conversion tables, which are applied in reverse
to tensors on the meta device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from moesaic.errors import InputError
from moesaic.storage.shards import INDEX as SHARD_INDEX
from moesaic.train.distributed_checkpoint import SHARDS
from moesaic.weights.layout import Readable, Region, StoredBlock, full_region
from moesaic.weights.model_tensors import AbstractFormat, Architecture
from moesaic.weights.quantized import dequantized
from moesaic.weights.tensor_files import (
    INDEX,
    read_safetensors,
    read_shards,
    write_safetensors,
    write_shards,
)

ADAPTER = "adapter_config.json"
"""PEFT's file, on account of which transformers adds an adapter to the weights as it loads them."""


class UnmappedError(InputError):
    """Raised for a model whose tensors transformers makes from the hub's in a way that is no
    rearrangement of elements."""


class Hub(AbstractFormat):
    """Safetensors with the hub's names, which `from_pretrained` and inference engines read. Has no
    optimizer states."""

    title = "Hugging Face safetensors"

    def recognises(self, folder: Path) -> bool:
        return (folder / INDEX).exists() or any(folder.glob("[!.]*.safetensors"))

    def read(self, folder: Path) -> tuple[Mapping[str, Readable], list[str]]:
        """Read a folder of safetensors, and refuse one with an adapter beside the weights."""
        if (folder / ADAPTER).exists():
            raise InputError(
                f"{folder / ADAPTER}: an adapter lies beside the weights: merge it with PEFT's "
                "merge_and_unload, save the model and convert the result, or take the adapter "
                "away"
            )
        return dequantized(read_safetensors(folder), folder)

    def write(self, folder: Path, tensors: Mapping[str, Readable]) -> None:
        write_safetensors(folder, tensors)

    def blocks(self, model: Architecture, names: Collection[str]) -> Iterator[StoredBlock]:
        """Yield where each tensor of transformers lies in the checkpoint, by the conversions of its
        model type."""
        # as transformers itself does for a model that it has not loaded, whose prefix is unknown
        tables = [
            table
            for table in get_model_conversion_mapping(model.model, add_legacy=False)
            if not isinstance(table, PrefixChange)
        ]
        # where `revert_weight_conversion` finds them: otherwise each call looks them up again
        model.model._weight_conversions = tables
        converters = [
            (table.reverse_transform(), table)
            for table in tables
            if isinstance(table, WeightConverter)
        ]
        prefix = f"{model.model.base_model_prefix}."
        for tensor, shape in model.shapes.items():
            operations = _operations(converters, tensor)
            hub_tensors = revert_weight_conversion(
                model.model, {tensor: torch.empty(shape, device="meta")}
            )
            in_files = [_present(name, names, prefix) for name in hub_tensors]
            in_memory = _present(tensor, names, prefix)
            whole = full_region(shape)
            if in_memory in names and not set(in_files) <= set(names):
                # As transformers saves it under its present names, or bitsandbytes' `Experts4bit`.
                yield StoredBlock(in_memory, at=whole, tensor=tensor, index=whole)
            elif not operations:  # only renamed
                (name,) = in_files
                yield StoredBlock(name, at=whole, tensor=tensor, index=whole)
            # a matrix of each kind for each expert
            elif operations <= {"MergeModulelist", "Concatenate"} and len(in_files) % shape[0] == 0:
                yield from _unstacked(tensor, shape, in_files)
            else:
                raise UnmappedError(
                    f"the hub's names for {tensor} result from {', '.join(sorted(operations))}: "
                    "not supported"
                )


def _present(name: str, names: Collection[str], prefix: str) -> str:
    """Return the name of a tensor in files that hold these names: without the prefix of the model
    below the output if they were saved from that model alone."""
    bare = name.removeprefix(prefix)
    return bare if bare in names and name not in names else name


def _operations(converters: Collection[tuple[Any, WeightConverter]], tensor: str) -> set[str]:
    """Return the names of transformers' operations that make a tensor from the hub's.

    Args:
        converters: (its reverse, the converter) of each.
        tensor: the tensor's name in the model.
    """
    operations = set()
    for reverse, converter in converters:
        _, matched_pattern = reverse.rename_source_key(tensor)
        if matched_pattern is not None:
            operations |= {type(operation).__name__ for operation in converter.operations}
    return operations


def _unstacked(tensor: str, shape: tuple[int, ...], names: list[str]) -> Iterator[StoredBlock]:
    """Yield the blocks of a stacked tensor whose experts have separate matrices on the hub.

    Args:
        tensor: name of the stacked tensor.
        shape: its shape, experts first.
        names: the hub's names: all experts' matrices of one kind (gate, up or down), then those of
            the next kind, whose rows follow in the stacked tensor.
    """
    num_experts = shape[0]
    num_kinds = len(names) // num_experts
    rows = shape[1] // num_kinds
    for number, name in enumerate(names):
        kind, expert = divmod(number, num_experts)
        assert f".{expert}." in name, name
        of_kind = range(kind * rows, (kind + 1) * rows)
        index: Region = (expert, of_kind, *full_region(shape[2:]))
        yield StoredBlock(name, at=full_region((rows, *shape[2:])), tensor=tensor, index=index)


class Moesaic(AbstractFormat):
    """Moesaic's own sharded checkpoint of a transformers model: the model's names in memory, and
    optimizer states.

    A model that uses `moesaic.transformers` can load it on any mesh; each rank reads its own part.
    """

    title = "Moesaic's sharded checkpoint"

    def recognises(self, folder: Path) -> bool:
        return any((folder / SHARDS / name).exists() for name in (SHARD_INDEX, ".metadata"))

    def read(self, folder: Path) -> tuple[Mapping[str, Readable], list[str]]:
        return read_shards(folder / SHARDS)

    def write(self, folder: Path, tensors: Mapping[str, Readable]) -> None:
        write_shards(folder / SHARDS, tensors)

    def stored_name(self, stored: str, state: str | None) -> str | None:
        return f"model.{stored}" if state is None else f"optimizer.{stored}.{state}"

    def blocks(self, model: Architecture, names: Collection[str]) -> Iterator[StoredBlock]:
        """Yield each tensor of transformers as it is in memory."""
        for tensor, shape in model.shapes.items():
            yield StoredBlock(
                tensor, at=full_region(shape), tensor=tensor, index=full_region(shape)
            )
