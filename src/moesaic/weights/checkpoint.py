"""Opens a checkpoint: checks its tensors against the model of its configuration, and collects optimizer states."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.errors import InputError
from moesaic.weights.hub import Hub, Moesaic
from moesaic.weights.layout import GatheredTensor, Layout, Readable, first_names, full_region, identity, pieces
from moesaic.weights.megatron import Megatron
from moesaic.weights.model import AbstractFormat, Architecture
from moesaic.weights.torchtitan import Torchtitan

FORMATS: dict[str, AbstractFormat] = {
    "hf": Hub(),
    "moesaic": Moesaic(),
    "torchtitan": Torchtitan(),
    "megatron": Megatron(),
}
"""Formats, by the names that `moesaic convert` accepts. A new format needs an entry here and a file of rules."""
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "fp32_param")
"""Optimizer states that have the shape of their parameter."""
COUNTER = "step"
"""The optimizer state that is one number per parameter."""
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors that Megatron pads with rows for unused token ids."""


@dataclass
class Checkpoint:
    """The tensors of a model in one format's layout."""

    model: Architecture
    layout: Layout
    tensors: dict[str | None, dict[str, Readable]]
    """By optimizer state (None for the weights themselves), then by the layout's stored names."""
    left_behind: list[str] = field(default_factory=list)
    """Entries of the checkpoint that are not part of the model."""

    def into(self, layout: Layout, state: str | None = None) -> dict[str, Readable]:
        """Return the weights, or one optimizer state, in another layout. Each tensor is gathered when it is read.

        Raises:
            InputError: of the tensors that become one, only some have the state, or their counters differ.
        """
        sources, gathered = self.tensors[state], dict[str, Readable]()
        for name in layout.by_stored:
            tensor = GatheredTensor(name, layout, self.layout, sources)
            present = [source_name for source_name in tensor.source_names if source_name in sources]
            if not present:
                continue
            counts = {sources[source_name].read(()).tobytes() for source_name in present} if state == COUNTER else ()
            if len(present) < len(tensor.source_names) or len(counts) > 1:
                raise InputError(
                    f"{state} is not the same for all of {first_names(tensor.source_names)}, which become one tensor"
                )
            gathered[name] = sources[present[0]] if state == COUNTER else tensor
        return gathered

    def digests(self) -> dict[str, dict[str, Any]]:
        """Return SHA-256 hashes of all elements in the model's own order, which do not depend on the format.

        Returns:
            by optimizer state ("weights" for the weights), then by name: a tensor's hash or, for an experts module, a list with
            the hash of each expert.
        """
        layout = identity(self.model.shapes)
        return {state or "weights": self._digests(self.into(layout, state)) for state in self.tensors}

    def _digests(self, tensors: Mapping[str, Readable]) -> dict[str, Any]:
        digests: dict[str, Any] = {}
        for name in sorted(tensors):
            tensor, experts = tensors[name], self.model.experts_of(name)
            if experts is None or not tensor.shape:
                digests[name] = _updated(hashlib.sha256(), tensor, full_region(tensor.shape)).hexdigest()
                continue
            hashes = digests.setdefault(experts, [hashlib.sha256() for _ in range(tensor.shape[0])])
            for expert, running in enumerate(hashes):
                _updated(running, tensor, (range(expert, expert + 1), *full_region(tensor.shape[1:])))
        return {
            name: [running.hexdigest() for running in entry] if isinstance(entry, list) else entry
            for name, entry in digests.items()
        }


def _updated(running: Any, tensor: Readable, region: tuple[range, ...]) -> Any:
    """Add a tensor's dtype and its elements in a region to a hash, buffer by buffer, and return the hash."""
    running.update(str(tensor.dtype).encode())
    for piece in pieces(tuple(len(dim) for dim in region), tensor.dtype.itemsize):
        absolute = tuple(range(whole.start + dim.start, whole.start + dim.stop) for whole, dim in zip(region, piece))
        running.update(tensor.read(absolute).data)
    return running


def format_of(folder: Path) -> str:
    """Return the name of the format of the checkpoint in a folder.

    Raises:
        InputError: the folder does not exist, or holds no checkpoint of a known format.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no folder there: name the folder that holds the checkpoint")
    names = [name for name, format in FORMATS.items() if format.recognises(folder)]
    if not names:
        raise InputError(f"{folder}: no checkpoint of {', '.join(FORMATS)} there: name the folder that holds its files")
    return names[0]


def open_checkpoint(folder: Path, format_name: str, model: Architecture) -> Checkpoint:
    """Open the checkpoint in a folder and check that it holds exactly a model's tensors.

    Args:
        folder: the checkpoint's folder.
        format_name: the format, a key of `FORMATS`.
        model: the model that the checkpoint must hold.

    Raises:
        InputError: tensors are missing, unknown or of another shape. The message names them.
    """
    format = FORMATS[format_name]
    stored, others = format.read(folder)
    layout = Layout(format.blocks(model, stored), model.shapes, format.title)
    weights = {str(format.stored_name(name, None)): name for name in layout.shapes}
    missing = weights.keys() - stored.keys()
    if missing:
        raise InputError(f"{folder}: {len(missing)} tensors of the model are missing: {first_names(missing)}")
    tensors = {name: stored[stored_name] for stored_name, name in weights.items()}
    checkpoint = Checkpoint(model, layout, {None: tensors}, left_behind=others)
    for stored_name, name in weights.items():
        _check_shape(checkpoint, name, f"{folder}: {stored_name}")
    extra = stored.keys() - weights.keys()
    extra -= _states(checkpoint, format, stored)
    unexpected = model.model._keys_to_ignore_on_load_unexpected or ()
    ignored = [re.compile(pattern) for pattern in (*unexpected, r"rotary_emb\.inv_freq$")]
    ignorable = {name for name in extra if name in model.tied or any(pattern.search(name) for pattern in ignored)}
    if extra - ignorable:
        raise InputError(
            f"{folder}: {len(extra - ignorable)} tensors are unknown to the model: {first_names(extra - ignorable)}"
        )
    checkpoint.left_behind += sorted(ignorable)
    checkpoint.tensors[None] = {name: format.converted(name, t, to_model=True) for name, t in tensors.items()}
    return checkpoint


def _check_shape(checkpoint: Checkpoint, name: str, place: str) -> None:
    """Raise InputError if a stored tensor has another shape than expected. Rows that pad the vocabulary are left behind."""
    shape, expected = checkpoint.tensors[None][name].shape, checkpoint.layout.shapes[name]
    if shape == expected:
        return
    if name not in PADDED or shape[1:] != expected[1:] or shape[0] < expected[0]:
        raise InputError(
            f"{place} is {list(shape)}, and the configuration makes it {list(expected)}: use the model's own configuration"
        )
    checkpoint.left_behind.append(f"{name}: rows {expected[0]} to {shape[0] - 1}, which pad the vocabulary")


def _states(checkpoint: Checkpoint, format: AbstractFormat, stored: Mapping[str, Readable]) -> set[str]:
    """Add the optimizer states that are stored to the checkpoint, and return their stored names."""
    stored_names = set()
    for name, shape in checkpoint.layout.shapes.items():
        for state in (*STATES, COUNTER):
            place = format.stored_name(name, state)
            if place is None or place not in stored:
                continue
            stored_names.add(place)
            if stored[place].shape == (() if state == COUNTER else shape) or name in PADDED:
                checkpoint.tensors.setdefault(state, {})[name] = stored[place]
            else:
                checkpoint.left_behind.append(f"{place}: is {list(stored[place].shape)}, its parameter {list(shape)}")
    return stored_names
