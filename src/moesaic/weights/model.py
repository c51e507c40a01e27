"""The tensors of a transformers model, without their elements: names, shapes, and which of them hold experts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from moesaic.errors import InputError
from moesaic.weights.layout import Region, StoredBlock, every
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
