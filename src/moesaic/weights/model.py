"""The tensors of a transformers model, without their elements: names, shapes, and which of them hold experts."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers

from moesaic.errors import InputError
from moesaic.weights.layout import Readable, Region, StoredBlock, every
from moesaic.weights.quantized import METHODS

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Part:
    """A rectangle of a tensor that has a meaning of its own, as the rules of formats name it."""

    name: str
    tensor: str
    index: tuple[range, ...]
    transposed: bool = False
    """Whether the tensor has its last two dimensions the other way round."""
    stacked: bool = False
    """Whether its first dimension is that of experts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., out, in) for a matrix, as `nn.Linear` has it."""
        sizes = [len(dim) for dim in self.index]
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else tuple(sizes)

    @property
    def rows(self) -> int:
        """The dimension of the outputs: the first one, the second one in a stack of experts."""
        return 1 if self.stacked else 0

    def block(self, stored: str, at: Region, rows: range | None = None) -> StoredBlock:
        """Return the block that puts this part, or some of its rows, somewhere."""
        index = list(self.index)
        if rows is not None:
            dim = self.rows + 1 if self.transposed else self.rows
            index[dim] = index[dim][rows.start : rows.stop]
        return StoredBlock(stored, at, self.tensor, tuple(index), self.transposed)


class Architecture:
    """What a configuration of transformers says about a checkpoint; nothing of the model's size is held.

    Args:
        config: of a causal language model.

    Raises:
        InputError: if transformers has no such model.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        try:
            with torch.device("meta"):
                self.model = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            raise InputError(f"{config.model_type} is no language model of transformers: {error}") from error
        tied = set(self.model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
        self.tied = tied
        """Names that share another's tensor, and are stored with it."""
        self.shapes = {n: tuple(t.shape) for n, t in self.model.state_dict().items() if n not in tied}
        self.experts = {
            n: m for n, m in self.model.named_modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")
        }
        """The modules that hold stacked experts, by name."""

    def experts_of(self, tensor: str) -> str | None:
        """Return the name of the experts that a tensor belongs to."""
        prefix, _, _ = tensor.rpartition(".")
        return prefix if prefix in self.experts else None

    def whole(self, tensor: str) -> Part:
        """Return a whole tensor as a part."""
        experts = self.experts_of(tensor)
        turned = experts is not None and self.experts[experts].is_transposed and not tensor.endswith("bias")
        return Part(tensor, tensor, every(self.shapes[tensor]), turned, experts is not None)

    def parts(self, tensor: str) -> list[Part]:
        """Return the matrices that a tensor of experts holds side by side; the whole tensor if it holds one."""
        experts = self.experts_of(tensor)
        if experts is None:
            return [self.whole(tensor)]
        module, kind = self.experts[experts], "_bias" if tensor.endswith("_bias") else ""
        whole, stem = self.whole(tensor), tensor.rpartition(".")[2].removesuffix("_bias")
        if stem != "gate_up_proj":
            return [replace(whole, name=f"{experts}.{stem.removesuffix('_proj')}{kind}")]
        found = []
        for number, name in enumerate(("gate", "up")):
            index = list(whole.index)
            dim = len(index) - 1 if whole.transposed or kind else 1
            both = index[dim]
            half = len(both) // 2
            index[dim] = both[number * half : (number + 1) * half] if module.is_concatenated else both[number::2]
            found.append(replace(whole, name=f"{experts}.{name}{kind}", index=tuple(index)))
        return found


def read_config(folder: Path, named: Path | None) -> Any:
    """Return the configuration of a checkpoint: the one that is named, or the one beside its files.

    Raises:
        InputError: if there is none, or it is of a model that is quantized in another way than `METHODS`.
    """
    place = named or folder
    path = place / "config.json" if place.is_dir() else place
    if not path.exists():
        raise InputError(f"{path}: no configuration there: name the model's config.json of transformers with --config")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        quantized = table.pop("quantization_config", None)  # what is read is not quantized any more
        config = transformers.AutoConfig.for_model(**table)
    except Exception as error:  # its own checks raise whatever they like
        said = " ".join(str(error).split())
        raise InputError(
            f"{path}: is no configuration that transformers {transformers.__version__} knows ({said:.80}): update "
            "transformers, or name the model's config.json with --config"
        ) from error
    method = (quantized or {}).get("quant_method")
    if quantized and method not in METHODS:
        raise InputError(
            f"{path}: the weights are quantized ({method}): load them with dequantize=True, save them, convert those"
        )
    return config


class AbstractFormat(ABC):
    """A way to keep a model in files."""

    title: str
    """What it is called in a sentence."""

    @abstractmethod
    def finds(self, folder: Path) -> bool:
        """Return whether a folder looks like a checkpoint of this format."""

    @abstractmethod
    def read(self, folder: Path) -> tuple[Mapping[str, Readable], list[str]]:
        """Return a checkpoint's tensors by name, and the names of what is no tensor."""

    @abstractmethod
    def write(self, folder: Path, tensors: Mapping[str, Readable]) -> None:
        """Write tensors under their names."""

    @abstractmethod
    def blocks(self, model: Architecture, names: Collection[str]) -> Iterator[StoredBlock]:
        """Yield where each element of a model is.

        Args:
            model: to place.
            names: those of the checkpoint that is read, where a format has several ways; empty to write.
        """

    def kept(self, stored: str, tensor: Readable, *, back: bool) -> Readable:
        """Return a tensor as the format keeps it or, `back`, as the model has it; nearly all are kept as they are."""
        return tensor

    def called(self, stored: str, state: str | None) -> str | None:
        """Return the name of a tensor, or of the state that an optimizer keeps of it; None if that has no place."""
        return stored if state is None else None


Place: TypeAlias = Callable[[Part, Any], Iterator[tuple[str, range, range]]]
"""From a part and the model's configuration: endings of names, rows of the part, and rows of the tensors that they are."""
Rules: TypeAlias = "Mapping[str, str | tuple[str, Place]]"
"""A part of a layer to what the format calls its tensor inside the layer, and its place there; without one it is whole."""


def half(number: int) -> Place:
    """Put a part into the upper (0) or lower (1) half of a tensor."""

    def place(part: Part, config: Any) -> Iterator[tuple[str, range, range]]:
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
    """Yield the blocks that rules give; what no rule names has none.

    Args:
        model: to place.
        outside: names of the tensors outside the layers, the model's to the format's.
        rules: from a layer to what is in it: parts of the model to where they are.
        layer_prefix: in front of a layer's names; `{}` stands for its number.
        stacked: whether all layers are in one tensor, under a prefix without the number.
    """
    for tensor in model.shapes:
        if tensor in outside:
            yield model.whole(tensor).block(outside[tensor], every(model.shapes[tensor]))
        found = LAYER.fullmatch(tensor)
        if found is None:
            continue
        layer, key = int(found[1]), found[2]
        known = rules(layer)
        parts = [model.whole(tensor)] if key in known else model.parts(tensor)
        for part in parts:
            rule = known.get(part.name.split(".", 3)[3])
            if rule is None:
                continue
            name, place = (rule, None) if isinstance(rule, str) else rule
            stored = (layer_prefix if stacked else layer_prefix.format(layer)) + name
            lead = (layer,) if stacked else ()
            if place is None:
                yield part.block(stored, (*lead, *every(part.shape)))
                continue
            for ending, rows, at in place(part, model.config):
                spread = list(every(part.shape))
                spread[part.rows] = at
                yield part.block(stored + ending, (*lead, *spread), rows)
