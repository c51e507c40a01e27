"""Opens a checkpoint: checks its tensors against the model of its configuration, and collects
optimizer states."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import InputError
from moesaic.weights.hub import Hub, Moesaic
from moesaic.weights.layout import (
    GatheredTensor,
    Layout,
    Readable,
    first_names,
    full_region,
    identity,
    pieces,
)
from moesaic.weights.megatron import Megatron
from moesaic.weights.model_tensors import MOST_LAYERS, AbstractFormat, Architecture
from moesaic.weights.torchtitan import Torchtitan

FORMATS: dict[str, AbstractFormat] = {
    "hf": Hub(),
    "moesaic": Moesaic(),
    "torchtitan": Torchtitan(),
    "megatron": Megatron(),
}
"""Formats, by the names that `moesaic convert` accepts. A new format needs an entry here and a file
of rules."""
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "fp32_param")
"""Optimizer states that have the shape of their parameter."""
COUNTER = "step"
"""The optimizer state that is one number per parameter."""
MORE_TOKENS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "n_mtp_layers",
)
"""Names in configurations for the number of layers for multi-token prediction, which come after the
last layer."""
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
    """Entries of the checkpoint that are not part of the model as transformers loads it."""

    def into(self, layout: Layout, state: str | None = None) -> dict[str, Readable]:
        """Return the weights, or one optimizer state, in another layout. Each tensor is gathered
        when it is read.

        Raises:
            InputError: of the tensors that become one, only some have the state, or their counters
                differ.
        """
        sources = self.tensors[state]
        gathered = dict[str, Readable]()
        for name in layout.by_stored:
            tensor = GatheredTensor(name, layout, source=self.layout, tensors=sources)
            present = [source_name for source_name in tensor.source_names if source_name in sources]
            if not present:
                continue
            counts = (
                {sources[source_name].read(()).tobytes() for source_name in present}
                if state == COUNTER
                else ()
            )
            if len(present) < len(tensor.source_names) or len(counts) > 1:
                raise InputError(
                    f"{state} is not the same for all of {first_names(tensor.source_names)}, "
                    "which become one tensor"
                )
            gathered[name] = sources[present[0]] if state == COUNTER else tensor
        return gathered

    def digests(self) -> dict[str, dict[str, Any]]:
        """Return SHA-256 hashes of all elements in the model's own order, which do not depend on
        the format.

        Returns:
            by optimizer state ("weights" for the weights), then by name: a tensor's hash or, for an
            experts module, a list with the hash of each expert.
        """
        layout = identity(self.model.shapes)
        return {
            state or "weights": self._digests(self.into(layout, state)) for state in self.tensors
        }

    def _digests(self, tensors: Mapping[str, Readable]) -> dict[str, Any]:
        """Return a hash of each tensor, and for tensors of experts a list of a hash for each
        expert."""
        digests: dict[str, Any] = {}
        for name in sorted(tensors):
            tensor = tensors[name]
            experts = self.model.experts_of(name)
            if experts is None or not tensor.shape:
                digests[name] = _updated(
                    hashlib.sha256(), tensor, full_region(tensor.shape)
                ).hexdigest()
                continue
            hashes = digests.setdefault(experts, [hashlib.sha256() for _ in range(tensor.shape[0])])
            for expert, running in enumerate(hashes):
                _updated(
                    running, tensor, (range(expert, expert + 1), *full_region(tensor.shape[1:]))
                )
        return {
            name: [running.hexdigest() for running in entry] if isinstance(entry, list) else entry
            for name, entry in digests.items()
        }


def _updated(running: Any, tensor: Readable, region: tuple[range, ...]) -> Any:
    """Add a tensor's dtype and its elements in a region to a hash, buffer by buffer, and return the
    hash."""
    running.update(str(tensor.dtype).encode())
    for piece in pieces(tuple(len(dim) for dim in region), tensor.dtype.itemsize):
        absolute = tuple(
            range(whole.start + dim.start, whole.start + dim.stop)
            for whole, dim in zip(region, piece)
        )
        running.update(tensor.read(absolute).data)
    return running


MOST_MISSING = 100
SMALL = 10**7
"""A checkpoint whose model has more elements than so many times its own, and so many more, is not
of this model. Of others missing tensors are named."""


def format_of(folder: Path) -> str:
    """Return the name of the format of the checkpoint in a folder.

    Raises:
        InputError: the folder does not exist, or holds no checkpoint of a known format.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no folder there: name the folder that holds the checkpoint")
    names = [name for name, format in FORMATS.items() if format.recognises(folder)]
    if not names:
        raise InputError(
            f"{folder}: no checkpoint of {', '.join(FORMATS)} there: name the folder that "
            "holds its files"
        )
    return names[0]


def open_checkpoint(folder: Path, format_name: str, model: Architecture) -> Checkpoint:
    """Open the checkpoint in a folder and check that it holds exactly a model's tensors.

    Like transformers, it does not tie weights of which the checkpoint holds different values: the
    returned checkpoint's model is then the untied one.

    Args:
        format_name: the format, a key of `FORMATS`.
        model: the model that the checkpoint must hold.

    Raises:
        InputError: tensors are missing, unknown or of another shape. The message names them.
    """
    format = FORMATS[format_name]
    stored, others = format.read(folder)
    _check_size(folder, model, stored)
    model, stored, copies = _without_copies(format, model, stored)
    others += copies
    layout = Layout(format.blocks(model, stored), model.shapes, format.title)
    weights = {str(format.stored_name(name, None)): name for name in layout.shapes}
    missing = weights.keys() - stored.keys()
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} tensors of the model are missing: {first_names(missing)}"
        )
    tensors = {name: stored[stored_name] for stored_name, name in weights.items()}
    checkpoint = Checkpoint(model, layout, {None: tensors}, left_behind=others)
    for stored_name, name in weights.items():
        dtype = tensors[name].dtype
        if not dtype.is_floating_point and not _holds_integers(model, layout, name):
            raise InputError(
                f"{folder}: {stored_name} holds {str(dtype).removeprefix('torch.')}, and no scales "
                "of a known form: convert the checkpoint that it was quantized from"
            )
        _check_shape(checkpoint, name, f"{folder}: {stored_name}")
    extra = stored.keys() - weights.keys()
    extra -= _states(checkpoint, format, stored)
    unexpected = model.model._keys_to_ignore_on_load_unexpected or ()
    ignored = [
        re.compile(pattern)
        for pattern in (*unexpected, r"rotary_emb\.inv_freq$", *_of_more_tokens(model.config))
    ]
    ignorable = {name for name in extra if any(pattern.search(name) for pattern in ignored)}
    if extra - ignorable:
        raise InputError(
            f"{folder}: {len(extra - ignorable)} tensors are unknown to the model: "
            f"{first_names(extra - ignorable)}"
        )
    checkpoint.left_behind += sorted(ignorable)
    checkpoint.tensors[None] = {
        name: format.converted(name, t, to_model=True) for name, t in tensors.items()
    }
    return checkpoint


def _holds_integers(model: Architecture, layout: Layout, name: str) -> bool:
    """Return whether what a tensor of a layout holds are integers in the model, as a hash router's
    table is."""
    states = model.model.state_dict()
    parts = layout.by_stored.cuts(name, full_region(layout.shapes[name]))
    return not any(states[block.tensor].is_floating_point() for _, block in parts)


def _of_more_tokens(config: Any) -> list[str]:
    """Return patterns of the names of layers for multi-token prediction that a configuration says
    are there.

    transformers has none of them, and its own patterns name them by the number of layers of the
    published models.
    """
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    more = max(_count(text, name) for name in MORE_TOKENS)
    if not more:
        return []
    numbers = "|".join(str(layers + number) for number in range(more))
    return [rf"^model\.layers\.({numbers})\.", r"^(model\.)?(mtp|nextn)(_\w+)?\."]


def _count(config: Any, name: str) -> int:
    """Return a number of layers that a configuration gives; 0 if it gives none, or no number that
    can be one."""
    found = getattr(config, name, None)
    return found if type(found) is int and 0 < found <= MOST_LAYERS else 0


def _without_copies(
    format: AbstractFormat, model: Architecture, stored: Mapping[str, Readable]
) -> tuple[Architecture, Mapping[str, Readable], list[str]]:
    """Find the tied weights that a checkpoint nevertheless holds, and compare each with the tensor
    that it is tied to.

    Returns:
        the model, untied if the two differ; the tensors that it has, by their stored names; and the
        copies that are left out.
    """
    if not model.tied:
        return model, stored, []
    untied = model.untied()
    blocks = format.blocks(untied, stored)
    places = {block.tensor: str(format.stored_name(block.stored, None)) for block in blocks}
    pairs = {places[name]: places[twin] for name, twin in model.tied.items()}
    tensors = dict(stored)
    # as transformers does, whichever of the two is there stands for both
    for name, twin in pairs.items():
        tensors |= {
            n: stored[other]
            for n, other in ((name, twin), (twin, name))
            if n not in stored and other in stored
        }
    if all(
        name not in tensors or _equal(tensors[name], tensors[twin]) for name, twin in pairs.items()
    ):
        copies = [
            f"{n}: equal to {twin}, to which it is tied"
            for n, twin in pairs.items()
            if {n, twin} <= stored.keys()
        ]
        return (
            model,
            {name: tensor for name, tensor in tensors.items() if name not in pairs},
            copies,
        )
    return untied, tensors, []


def _equal(one: Readable, other: Readable) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    return one is other or (
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and all(
            np.array_equal(one.read(region), other.read(region))
            for region in pieces(one.shape, one.dtype.itemsize)
        )
    )


def _check_size(folder: Path, model: Architecture, stored: Mapping[str, Readable]) -> None:
    """Raise InputError if a model has far more elements than a checkpoint holds: a million experts
    would have more names than memory holds."""
    wanted = sum(map(math.prod, model.shapes.values()))
    held = sum(math.prod(tensor.shape) for tensor in stored.values())
    if wanted > MOST_MISSING * held + SMALL:
        raise InputError(
            f"{folder}: the configuration makes {wanted:,} parameters, and the files hold "
            f"{held:,}: use the model's own configuration, or fetch all files"
        )


def _check_shape(checkpoint: Checkpoint, name: str, place: str) -> None:
    """Raise InputError if a stored tensor has another shape than expected. Rows that pad the
    vocabulary are left behind."""
    shape = checkpoint.tensors[None][name].shape
    expected = checkpoint.layout.shapes[name]
    if shape == expected:
        return
    if name not in PADDED or shape[1:] != expected[1:] or shape[0] < expected[0]:
        raise InputError(
            f"{place} is {list(shape)}, and the configuration makes it {list(expected)}: use "
            "the model's own configuration"
        )
    checkpoint.left_behind.append(
        f"{name}: rows {expected[0]} to {shape[0] - 1}, which pad the vocabulary"
    )


def _states(
    checkpoint: Checkpoint, format: AbstractFormat, stored: Mapping[str, Readable]
) -> set[str]:
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
                checkpoint.left_behind.append(
                    f"{place}: is {list(stored[place].shape)}, its parameter {list(shape)}"
                )
    return stored_names
