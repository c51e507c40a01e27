"""Describes the tensors of a transformers model without their elements: names, shapes, and which of
them hold experts.

A format's rules place *parts*: tensors, or the half of a tensor that holds one of two projections.
Their names are transformers', such as `model.layers.3.mlp.experts.gate`.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers

from moesaic.errors import InputError, broken_package
from moesaic.weights.layout import Readable, Region, StoredBlock, first_names, full_region

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
MOST_LAYERS = 10_000
"""Largest number of layers: Python creates each of them."""


@dataclass(frozen=True)
class Part:
    """One matrix or vector within a tensor of the model, such as the gate projections of all
    experts of a layer.

    The rules of formats refer to parts by name.
    """

    name: str
    tensor: str
    index: tuple[range, ...]
    """The part's region of the tensor."""
    transposed: bool = False
    """Whether the tensor stores matrices as (in, out) instead of (out, in)."""
    stacked: bool = False
    """Whether the first dimension counts experts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, with matrices as (..., out, in), as in `nn.Linear`."""
        sizes = [len(dim) for dim in self.index]
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else tuple(sizes)

    @property
    def rows(self) -> int:
        """The dimension of the outputs in `shape`: 1 if experts are stacked, else 0."""
        return 1 if self.stacked else 0

    def block(self, stored: str, at: Region, rows: range | None = None) -> StoredBlock:
        """Return the block that stores this part at region `at` of tensor `stored`; with `rows`,
        only those output rows."""
        index = list(self.index)
        if rows is not None:
            # in the tensor, the outputs of transposed matrices come after the inputs
            dim = self.rows + 1 if self.transposed else self.rows
            index[dim] = index[dim][rows.start : rows.stop]
        return StoredBlock(stored, at, self.tensor, index=tuple(index), transposed=self.transposed)


class Architecture:
    """The tensors that a transformers configuration implies. The model is created on the meta
    device and takes no memory.

    Args:
        config: configuration of a causal language model.

    Raises:
        InputError: transformers has no such model, or its language model is only a part of it.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
        if not 0 < layers <= MOST_LAYERS:
            raise InputError(
                f"{config.model_type}: num_hidden_layers={layers}: must be from 1 to {MOST_LAYERS}"
            )
        try:
            with torch.device("meta"):
                self.model = transformers.AutoModelForCausalLM.from_config(config)
        except Exception as error:  # sizes that do not fit each other may raise anything
            if broken := broken_package(error):
                raise InputError(broken) from error
            reason = " ".join(str(error).split())
            raise InputError(
                f"{config.model_type}: transformers creates no causal language model of this "
                f"configuration ({reason:.80}): only language models without other parts, such as "
                "vision, are converted"
            ) from error
        if type(self.model.config) is not type(config):
            raise InputError(
                f"{config.model_type} has other parts than its language model, such as vision, "
                "which would be lost: only language models are converted"
            )
        self.tied: dict[str, str] = self.model.all_tied_weights_keys
        """Name of a tied weight -> the name whose tensor it shares, under which alone it is
        stored."""
        self.shapes = {
            name: tuple(tensor.shape)
            for name, tensor in self.model.state_dict().items()
            if name not in self.tied
        }
        """Shapes of the tensors, by name, without those that are tied."""
        empty = [name for name, shape in self.shapes.items() if 0 in shape]
        if empty:
            raise InputError(
                f"{config.model_type}: the configuration's sizes make {first_names(empty)} empty"
            )
        self.experts = {
            name: module
            for name, module in self.model.named_modules()
            if hasattr(module, "is_transposed") and hasattr(module, "has_gate")
        }
        """The modules that hold stacked experts, by name."""

    def untied(self) -> Architecture:
        """Return the same architecture with `tie_word_embeddings` false.

        Raises:
            InputError: the model ties its weights whatever the configuration says.
        """
        config = copy.deepcopy(self.config)
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        model = Architecture(config)
        if model.tied:
            raise InputError(
                f"{config.model_type} always ties {', '.join(model.tied)}, and the checkpoint "
                "holds others"
            )
        return model

    def experts_of(self, tensor: str) -> str | None:
        """Return the name of the experts module that a tensor belongs to; None if it belongs to
        none."""
        prefix, _, _ = tensor.rpartition(".")
        return prefix if prefix in self.experts else None

    def whole(self, tensor: str) -> Part:
        """Return a whole tensor as a part."""
        experts = self.experts_of(tensor)
        is_transposed = False
        if experts is not None and not tensor.endswith("bias"):
            is_transposed = self.experts[experts].is_transposed
        return Part(
            name=tensor,
            tensor=tensor,
            index=full_region(self.shapes[tensor]),
            transposed=is_transposed,
            stacked=experts is not None,
        )

    def parts(self, tensor: str) -> list[Part]:
        """Return the parts of a tensor: gate and up if it holds both projections of experts, else
        the whole tensor."""
        experts = self.experts_of(tensor)
        if experts is None:
            return [self.whole(tensor)]
        whole = self.whole(tensor)
        _, _, last = tensor.rpartition(".")
        suffix = "_bias" if tensor.endswith("_bias") else ""
        projection = last.removesuffix("_bias").removesuffix("_proj")
        if projection != "gate_up":
            return [replace(whole, name=f"{experts}.{projection}{suffix}")]

        # (experts, 2 hidden, dim), or transposed, or the bias, (experts, 2 hidden): gate and up
        # projection are the two halves of the outputs, or every second one.
        output_dim = whole.rows + 1 if whole.transposed else whole.rows
        outputs = whole.index[output_dim]
        half = len(outputs) // 2
        if self.experts[experts].is_concatenated:
            outputs_of = {"gate": outputs[:half], "up": outputs[half : 2 * half]}
        else:
            outputs_of = {"gate": outputs[0::2], "up": outputs[1::2]}
        parts = []
        for name, own in outputs_of.items():
            index = (*whole.index[:output_dim], own, *whole.index[output_dim + 1 :])
            parts.append(replace(whole, name=f"{experts}.{name}{suffix}", index=index))
        return parts


class AbstractFormat(ABC):
    """A checkpoint format: its files, its names, and where it stores each element of a model."""

    title: str
    """Name of the format in messages."""

    @abstractmethod
    def recognises(self, folder: Path) -> bool:
        """Return whether a folder looks like a checkpoint of this format."""

    @abstractmethod
    def read(self, folder: Path) -> tuple[Mapping[str, Readable], list[str]]:
        """Return a checkpoint's tensors by name, and the names of its entries that are not
        tensors."""

    @abstractmethod
    def write(self, folder: Path, tensors: Mapping[str, Readable]) -> None:
        """Write tensors under their names."""

    @abstractmethod
    def blocks(self, model: Architecture, names: Collection[str]) -> Iterator[StoredBlock]:
        """Yield blocks that say where the format stores each element of a model.

        Args:
            names: the names in the checkpoint that is read, for formats with several layouts; empty
                to write one.
        """

    def converted(self, stored: str, tensor: Readable, *, to_model: bool) -> Readable:
        """Convert a tensor's values from the model's to the format's or, with `to_model`, the
        reverse. Few tensors change."""
        return tensor

    def stored_name(self, stored: str, state: str | None) -> str | None:
        """Return the name in the checkpoint of a tensor or, with `state`, of its optimizer state;
        None if it is not stored."""
        return stored if state is None else None


Place: TypeAlias = Callable[[Part, Any], Iterator[tuple[str, range, range]]]
"""(part, the model's configuration) -> for each range of rows: (suffix of the stored name, rows of
the part, stored rows)."""
Rules: TypeAlias = "Mapping[str, str | tuple[str, Place]]"
"""Name of a part within its layer -> the format's name for it. If the part is only some rows of
that tensor, also its place."""


def half(number: int) -> Place:
    """Return a place that puts a part into the upper (0) or lower (1) half of a tensor's rows."""

    def place(part: Part, config: Any) -> Iterator[tuple[str, range, range]]:
        """Yield all rows of the part at their place in the joint tensor."""
        rows = part.shape[part.rows]
        yield "", range(rows), range(number * rows, (number + 1) * rows)

    return place


def by_rules(
    model: Architecture,
    outside: Mapping[str, str],
    rules: Callable[[int], Rules],
    layer_prefix: str,
    *,
    stacked: bool = False,
) -> Iterator[StoredBlock]:
    """Yield the blocks that follow from rules. Tensors without a rule get no block.

    Args:
        outside: the model's names of tensors outside the layers -> the format's names.
        rules: returns the rules of a layer, given its number.
        layer_prefix: prefix of a layer's names; `{}` stands for the layer's number.
        stacked: whether the format stacks all layers in one tensor; `layer_prefix` then has no
            number.
    """
    for tensor in model.shapes:
        if tensor in outside:
            yield model.whole(tensor).block(outside[tensor], full_region(model.shapes[tensor]))
        match = LAYER.fullmatch(tensor)
        if match is None:
            continue
        layer = int(match[1])
        layer_rules = rules(layer)
        prefix = layer_prefix if stacked else layer_prefix.format(layer)
        leading = (layer,) if stacked else ()  # the index of a stacked tensor's first dimension
        # a rule names the tensor, or each of its parts
        parts = [model.whole(tensor)] if match[2] in layer_rules else model.parts(tensor)
        for part in parts:
            name_in_layer = part.name.split(".", 3)[3]  # without model.layers.N
            rule = layer_rules.get(name_in_layer)
            if rule is None:
                continue
            if isinstance(rule, str):
                yield part.block(prefix + rule, (*leading, *full_region(part.shape)))
                continue
            name, place = rule
            for suffix, rows, stored_rows in place(part, model.config):
                at = list(full_region(part.shape))
                at[part.rows] = stored_rows
                yield part.block(prefix + name + suffix, (*leading, *at), rows)
