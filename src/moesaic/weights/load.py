"""Loads a checkpoint that is quantized, or not in the hub's format, into a model of transformers.

transformers' loader gets tensors that are read, and dequantized, as it slices them: each rank reads
its own part. Of experts that become NF4 it gets one at a time, so besides the model's own memory
there is a tensor of another kind, or an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.transformers.nf4 import FourBitExpertsConfig, four_bit_weights
from moesaic.weights.checkpoint import format_of, open_checkpoint
from moesaic.weights.hub import UnmappedError
from moesaic.weights.layout import Readable, first_names, full_region, identity, pieces
from moesaic.weights.model_tensors import Architecture
from moesaic.weights.quantized import LOADED, dequantized
from moesaic.weights.source import OF_HUB, read_config, read_generation, source_folder
from moesaic.weights.tensor_files import read_safetensors


def load_model(
    source: str | Path, *, class_of: Callable[[Any], Any] = lambda kind: kind, **options: Any
) -> Any:
    """Return what `from_pretrained` does: a causal language model of transformers with the weights
    of a checkpoint.

    The checkpoint may have any format that `convert` reads, and may be quantized: fp8, mxfp4, or
    bitsandbytes' NF4. With `quantization_config=FourBitExpertsConfig()` experts become NF4, and
    keep the bits if they are in NF4 already; all else is dequantized. What its files choose of code
    is left out, as in `convert`.

    Args:
        source: folder of the checkpoint, or its name on the hub.
        class_of: returns the class whose `from_pretrained` is called, from the model's own.
        options: those of `from_pretrained`, such as `dtype`, `device_map`, `distributed_config`,
            `experts_implementation`, `revision` and `token`. A `dtype` of "auto" is the
            checkpoint's.

    Raises:
        InputError: the checkpoint is incomplete, or is of a model, a format or a quantization that
            is not supported.
    """
    of_hub = {name: options.pop(name) for name in OF_HUB if name in options}
    folder = source_folder(source, **of_hub)
    # state: name -> the tensor, from which transformers' loader takes slices. As stored: its loader
    # renames and converts them. Otherwise names and tensors are those of the model already.
    architecture, state, is_named_as_stored = _state(folder)
    into_four_bits = isinstance(options.get("quantization_config"), FourBitExpertsConfig)
    # the quantizer then gets one expert at a time; what the loader converts, it reads as a whole
    if into_four_bits and not is_named_as_stored:
        for path, module in architecture.experts.items():
            for weight in four_bit_weights(module):
                name = f"{path}.{weight}"
                state[name] = OneByOne(state[name], own=range(module.num_experts))

    # `torch_dtype` is the option's earlier name
    dtype = options["dtype"] if "dtype" in options else options.pop("torch_dtype", "auto")
    if dtype in ("auto", None):
        dtype = architecture.config.dtype or torch.bfloat16
    options["dtype"] = dtype
    generation = read_generation(folder)
    if generation is not None:
        options.setdefault("generation_config", generation)
    returns_info = options.pop("output_loading_info", False)

    model, info = class_of(type(architecture.model)).from_pretrained(
        None, config=architecture.config, state_dict=state, output_loading_info=True, **options
    )
    if is_named_as_stored:  # else `open_checkpoint` has compared the tensors with the model
        require_all(model, info, folder)
    model.name_or_path = str(source)
    if "_weight_conversions" in vars(model) and not is_named_as_stored:
        del model._weight_conversions  # none was used, and saving needs those of the family
    return (model, info) if returns_info else model


def _state(folder: Path) -> tuple[Architecture, dict[str, Any], bool]:
    """Return what a checkpoint holds, as transformers' loader slices it: by the model's names, or
    as they are stored.

    The latter is for families whose tensors transformers computes from the hub's in a way of its
    own.

    Returns:
        the model, untied if the checkpoint holds two values of a tied weight; the tensors; whether
        names are those stored.
    """
    architecture = Architecture(read_config(folder, methods=LOADED))
    try:
        checkpoint = open_checkpoint(folder, format_of(folder), architecture)
    except UnmappedError:
        stored, _ = dequantized(read_safetensors(folder), folder)
        return architecture, {name: Sliced(tensor) for name, tensor in stored.items()}, True
    tensors = checkpoint.into(identity(checkpoint.model.shapes))
    return checkpoint.model, {name: Sliced(tensor) for name, tensor in tensors.items()}, False


def require_all(model: Any, found: dict[str, Any], folder: Path) -> None:
    """Raise InputError if transformers found tensors missing, of another shape, or unknown to the
    model.

    Args:
        found: the loading information that `from_pretrained` returns.
    """
    for kind, words in (
        ("missing_keys", "missing"),
        ("mismatched_keys", "of another shape"),
        ("unexpected_keys", "unknown"),
    ):
        names = set()
        for entry in found.get(kind) or ():  # a name, or (name, shape, other shape)
            names.add(entry if isinstance(entry, str) else str(entry[0]))
        if names:
            raise InputError(
                f"{folder}: {len(names)} tensors of {type(model).__name__} are {words}: "
                f"{first_names(names)}"
            )


@dataclass(frozen=True)
class Sliced:
    """A tensor as transformers' loader slices it: only the slice is read."""

    tensor: Readable

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self.tensor.shape)

    def __getitem__(self, at: Any) -> Tensor:
        """Return the elements of a tuple of slices, or all of them for `...`."""
        region = full_region(self.tensor.shape)
        if at is not Ellipsis:
            region = tuple(dim[part] for dim, part in zip(region, at))
        out = torch.empty([len(dim) for dim in region], dtype=self.tensor.dtype)
        # Piece by piece, so that besides `out` there is only a buffer.
        for piece in pieces(tuple(out.shape), out.itemsize):
            in_out = tuple(slice(part.start, part.stop) for part in piece)
            in_tensor = tuple(dim[part] for dim, part in zip(region, in_out))
            values = torch.from_numpy(self.tensor.read(in_tensor))
            out[in_out] = values.view(out.dtype)
        return out


@dataclass(frozen=True)
class OneByOne:
    """A weight of experts as transformers' loader slices it: `FourBitExpertsQuantizer` reads one
    expert after the other."""

    weight: Sliced
    own: range
    """The experts that are read."""
    device: Any = "cpu"

    def get_shape(self) -> list[int]:
        """Return the shape of the whole weight."""
        return self.weight.get_shape()

    def __getitem__(self, at: Any) -> OneByOne:
        """Return the weight with the experts that the first slice of a tuple selects, of which the
        other slices are whole; all experts for `...`."""
        return self if at is Ellipsis else replace(self, own=self.own[at[0]])

    def to(self, device: Any = None, **_: Any) -> OneByOne:
        """Return the weight with the device on which its experts will be."""
        return replace(self, device=device)

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the matrices of the experts, (out, in) or transposed, each read as it is asked
        for."""
        rest = [slice(None)] * (len(self.get_shape()) - 1)
        for expert in self.own:
            one = self.weight[(slice(expert, expert + 1), *rest)]
            yield one[0].to(self.device)
