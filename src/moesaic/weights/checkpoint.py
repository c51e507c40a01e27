"""Opens a checkpoint: checks its tensors against the model of its configuration, and collects
optimizer states.

Names come in three kinds. The model's are those of transformers' tensors in memory. A layout's, or
stored names, are those of a format for weights, which the optimizer states of a weight share. What
a file holds is `format.stored_name(name, state)`, which adds prefixes, and the state.
"""

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
        """Return the weights (`state` None), or one optimizer state, in another layout, by its
        stored names. Each tensor is gathered when it is read.

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
                continue  # this tensor has no such state
            is_same_for_all = len(present) == len(tensor.source_names)
            if state == COUNTER:
                # A counter is one number per parameter: nothing to gather, but all must agree.
                counts = {sources[source_name].read(()).tobytes() for source_name in present}
                is_same_for_all = is_same_for_all and len(counts) == 1
            if not is_same_for_all:
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
        """Return a hash of each tensor, and for each experts module a list with a hash of each
        expert, over all the module's tensors in the order of their names."""
        hashers: dict[str, Any] = {}  # by name, a hash or a list of hashes that are added to
        for name in sorted(tensors):
            tensor = tensors[name]
            module_name = self.model.experts_of(name)  # None if it is of no experts module
            if module_name is None or not tensor.shape:  # a counter has no dimension of experts
                hashers[name] = hashlib.sha256()
                _add_region(hashers[name], tensor, full_region(tensor.shape))
                continue
            if module_name not in hashers:
                hashers[module_name] = [hashlib.sha256() for _ in range(tensor.shape[0])]
            for expert, hasher in enumerate(hashers[module_name]):
                of_expert = (range(expert, expert + 1), *full_region(tensor.shape[1:]))
                _add_region(hasher, tensor, of_expert)

        digests: dict[str, Any] = {}
        for name, entry in hashers.items():
            if isinstance(entry, list):
                digests[name] = [hasher.hexdigest() for hasher in entry]
            else:
                digests[name] = entry.hexdigest()
        return digests


def _add_region(hasher: Any, tensor: Readable, region: tuple[range, ...]) -> None:
    """Add a tensor's dtype and its elements in a region to a hash, buffer by buffer."""
    hasher.update(str(tensor.dtype).encode())
    for piece in pieces(tuple(len(dim) for dim in region), tensor.dtype.itemsize):
        # a piece counts from the start of the region
        in_tensor = tuple(
            range(of_region.start + dim.start, of_region.start + dim.stop)
            for of_region, dim in zip(region, piece)
        )
        hasher.update(tensor.read(in_tensor).data)


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
    stored, left_behind = format.read(folder)
    _check_size(folder, model, stored)
    model, stored, copies = _without_copies(format, model, stored)
    left_behind += copies
    layout = Layout(format.blocks(model, stored), model.shapes, format.title)

    # name in the files -> stored name
    name_of = {str(format.stored_name(name, None)): name for name in layout.shapes}
    missing = name_of.keys() - stored.keys()
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} tensors of the model are missing: {first_names(missing)}"
        )
    weights = {name: stored[in_file] for in_file, name in name_of.items()}
    checkpoint = Checkpoint(model, layout, {None: weights}, left_behind=left_behind)
    for in_file, name in name_of.items():
        dtype = weights[name].dtype
        if not dtype.is_floating_point and not _holds_integers(model, layout, name):
            raise InputError(
                f"{folder}: {in_file} holds {str(dtype).removeprefix('torch.')}, and no scales "
                "of a known form: convert the checkpoint that it was quantized from"
            )
        _check_shape(checkpoint, name, f"{folder}: {in_file}")

    names_of_states = _add_states(checkpoint, format, stored)
    extra = stored.keys() - name_of.keys() - names_of_states
    ignorable = _ignorable(model, extra)
    unknown = extra - ignorable
    if unknown:
        raise InputError(
            f"{folder}: {len(unknown)} tensors are unknown to the model: {first_names(unknown)}"
        )
    checkpoint.left_behind += sorted(ignorable)
    checkpoint.tensors[None] = {
        name: format.converted(name, tensor, to_model=True) for name, tensor in weights.items()
    }
    return checkpoint


def _ignorable(model: Architecture, names: set[str]) -> set[str]:
    """Return those of names unknown to a model that transformers ignores when it loads it."""
    patterns = [
        *(model.model._keys_to_ignore_on_load_unexpected or ()),
        r"rotary_emb\.inv_freq$",
        *_ignored_of_more_tokens(model.config),
    ]
    compiled = [re.compile(pattern) for pattern in patterns]
    return {name for name in names if any(pattern.search(name) for pattern in compiled)}


def _holds_integers(model: Architecture, layout: Layout, name: str) -> bool:
    """Return whether what a tensor of a layout holds are integers in the model, as a hash router's
    table is."""
    in_memory = model.model.state_dict()
    parts = layout.by_stored.cuts(name, full_region(layout.shapes[name]))
    return not any(in_memory[part.tensor].is_floating_point() for _, part in parts)


def _ignored_of_more_tokens(config: Any) -> list[str]:
    """Return patterns of tensors to ignore: those of layers for multi-token prediction that a
    configuration says are there.

    transformers has no such layers. Its own list of ignored names
    (`_keys_to_ignore_on_load_unexpected`) has the numbers that they have in the published models.
    """
    text_config = config.get_text_config()
    num_layers = getattr(text_config, "num_hidden_layers", 0)
    num_more = max(_count(text_config, name) for name in MORE_TOKENS)
    if not num_more:
        return []
    # they are layers after the last one, or modules of their own
    numbers = "|".join(str(num_layers + number) for number in range(num_more))
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
        the model, untied if the two differ; the tensors that it has, by their names in the files;
        and the copies that are left out, in words.
    """
    if not model.tied:
        return model, stored, []
    untied = model.untied()
    blocks = format.blocks(untied, stored)
    # the model's name of a tensor -> its name in the files
    in_file = {block.tensor: str(format.stored_name(block.stored, None)) for block in blocks}
    # by their names in the files: a tied weight -> the tensor that it is tied to
    twins = {in_file[name]: in_file[twin] for name, twin in model.tied.items()}

    tensors = dict(stored)
    # as transformers does, whichever of the two is there stands for both
    for name, twin in twins.items():
        if name not in stored and twin in stored:
            tensors[name] = stored[twin]
        elif twin not in stored and name in stored:
            tensors[twin] = stored[name]

    for name, twin in twins.items():
        if name in tensors and not _equal(tensors[name], tensors[twin]):
            return untied, tensors, []
    copies = [
        f"{name}: equal to {twin}, to which it is tied"
        for name, twin in twins.items()
        if {name, twin} <= stored.keys()
    ]
    without_copies = {name: tensor for name, tensor in tensors.items() if name not in twins}
    return model, without_copies, copies


def _equal(one: Readable, other: Readable) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if one is other:
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    regions = pieces(one.shape, one.dtype.itemsize)
    return all(np.array_equal(one.read(region), other.read(region)) for region in regions)


def _check_size(folder: Path, model: Architecture, stored: Mapping[str, Readable]) -> None:
    """Raise InputError if a model has far more elements than a checkpoint holds: a million experts
    would have more names than memory holds."""
    of_model = sum(math.prod(shape) for shape in model.shapes.values())
    in_files = sum(math.prod(tensor.shape) for tensor in stored.values())
    if of_model > MOST_MISSING * in_files + SMALL:
        raise InputError(
            f"{folder}: the configuration makes {of_model:,} parameters, and the files hold "
            f"{in_files:,}: use the model's own configuration, or fetch all files"
        )


def _check_shape(checkpoint: Checkpoint, name: str, place: str) -> None:
    """Raise InputError if a weight has another shape than its layout says. Rows that pad the
    vocabulary are left behind; `place` says in messages where the weight is stored."""
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


def _add_states(
    checkpoint: Checkpoint, format: AbstractFormat, stored: Mapping[str, Readable]
) -> set[str]:
    """Add the optimizer states that are stored to the checkpoint, and return their names in the
    files. States of another shape than their parameter's are left behind."""
    names_in_file = set()
    for name, shape in checkpoint.layout.shapes.items():
        for state in (*STATES, COUNTER):
            in_file = format.stored_name(name, state)
            if in_file is None or in_file not in stored:
                continue
            names_in_file.add(in_file)
            tensor = stored[in_file]
            expected = () if state == COUNTER else shape
            # the rows that pad a tensor are never read
            if tensor.shape == expected or name in PADDED:
                checkpoint.tensors.setdefault(state, {})[name] = tensor
            else:
                checkpoint.left_behind.append(
                    f"{in_file}: is {list(tensor.shape)}, its parameter {list(shape)}"
                )
    return names_in_file
