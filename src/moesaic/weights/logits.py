"""Runs a model before and after its conversion and compares the logits. transformers loads the
hub's files itself.

It says what no hash of our own reading can say: that transformers finds in the source what the
output holds.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from moesaic.errors import InputError
from moesaic.weights.checkpoint import Checkpoint
from moesaic.weights.fp8 import sizes_of_blocks
from moesaic.weights.layout import Computed, Readable, first_names, full_region, identity
from moesaic.weights.quantized import quantization

TOKENS = 16
"""Length of the text on which logits are compared: token i is 7 i + 1, modulo the vocabulary
size."""
LOGITS_BYTES = 2**31
"""By default, the logits of models of at most this many bytes are compared."""
TOLERANCE = 1e-4
"""The largest difference that is rounding, as a share of the largest logit: that of float32 over a
deep model."""
MERGED_TOLERANCE = 1e-3
SHORT_TOLERANCE = 0.05
"""The same for adapters that are merged, in float32, whose products other kernels may compute, and
in 16 bits."""


@dataclass(frozen=True)
class Side:
    """A checkpoint and the folder that it lies in."""

    checkpoint: Checkpoint
    folder: Path
    format: str
    config: Any
    """The configuration as the folder has it; that of `checkpoint` may be untied."""


def compare_logits(old: Side, new: Side) -> dict[str, Any]:
    """Run both models on the fixed text in float32, or in float64 if they are stored so.

    Returns:
        "tokens" (how many were compared), "largest_difference" (in absolute value, between the two
        models), "largest" (the old model's largest finite logit, in absolute value), and
        "not_finite", the number of logits that are equally infinite, or not numbers, on both sides.

    Raises:
        InputError: they differ by more than rounding, or transformers loads another value than was
            converted.
    """
    return compare(_logits(old), _logits(new), new.folder)


def compares_logits(size_bytes: int, wanted: bool | None) -> bool:
    """Whether to compare the logits of a model; `wanted` is None if its size decides."""
    return size_bytes <= LOGITS_BYTES if wanted is None else wanted


def fixed_text(vocab_size: int) -> Tensor:
    """Return the token ids on which logits are compared, of shape (1, `TOKENS`)."""
    return ((7 * torch.arange(TOKENS) + 1) % vocab_size)[None]


def compare(old: Tensor, new: Tensor, out: Path) -> dict[str, Any]:
    """Compare logits of one shape, as `compare_logits` says; `out` names the output in messages."""
    old = old.double()
    new = new.double()
    # Infinite on both sides, with the same sign, or not a number on both sides.
    are_equally_bad = ~old.isfinite() & ((old == new) | (old.isnan() & new.isnan()))
    differences = (old - new)[~are_equally_bad]
    found = {
        "tokens": TOKENS,
        "largest_difference": _largest(differences),
        "largest": _largest(old[old.isfinite()]),
        "not_finite": int(are_equally_bad.sum()),
    }
    require_alike(found, str(out))
    return found


def _largest(values: Tensor) -> float:
    """Return the largest absolute value; 0 if there are none."""
    return float(values.abs().max()) if values.numel() else 0.0


def compare_merged(adapted: Tensor, merged: Tensor, dtype: torch.dtype, out: str) -> None:
    """Compare logits of a model with adapters and of the model into which these are merged, (1,
    tokens, vocabulary).

    In 16 bits, rounding may send a token to another expert. So the tokens' largest differences are
    then compared by their median, with the tolerance of these bits.

    Raises:
        InputError: they differ by more than rounding.
    """
    adapted = adapted.double().cpu().flatten(0, 1)
    merged = merged.double().cpu().flatten(0, 1)
    difference_of_token = (adapted - merged).abs().amax(1)
    if dtype.itemsize >= 4:
        difference = float(difference_of_token.max())
        tolerance = MERGED_TOLERANCE
    else:
        difference = float(difference_of_token.median())
        tolerance = SHORT_TOLERANCE
    most = float(adapted.abs().max())
    if not difference <= tolerance * most:  # so that a NaN is refused too
        raise InputError(
            f"{out}: the logits of the merged model differ from those of the adapted one by "
            f"{difference:.3g}, of {most:.3g} at most: nothing merged is kept; the adapters are "
            "saved, use them with the model that they were trained on"
        )


def require_alike(found: dict[str, Any], where: str) -> None:
    """Raise InputError if logits that were compared differ by more than rounding."""
    largest = found["largest_difference"]
    most = found.get("largest", 1.0)  # missing, with a difference of 0, if nothing was compared
    if not largest <= TOLERANCE * most:  # so that a NaN is refused too
        raise InputError(
            f"{where}: its logits differ from those of the source by {largest:.3g}, of {most:.3g} "
            "at most: this program reads the source in another way than transformers does, do "
            "not use the output"
        )


@torch.no_grad()
def _logits(side: Side) -> Tensor:
    """Return a model's logits of a fixed text."""
    try:
        model = _loaded(side)
        if side.checkpoint.model.experts:
            # the default implementation does not support float64
            model.set_experts_implementation("eager")
        tokens = fixed_text(model.config.get_text_config().vocab_size)
        logits: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    except InputError:
        raise
    except Exception as error:  # a model may raise anything
        reason = " ".join(str(error).split())
        raise InputError(
            f"{side.folder}: transformers cannot load or run the model to compare logits "
            f"({reason:.200}): --logits no converts without"
        ) from error
    return logits


def _loaded(side: Side) -> Any:
    """Return the model as transformers loads it from the hub's files; else filled with the tensors
    of the checkpoint. It computes in float32, or in float64 if a tensor is stored so.

    Raises:
        InputError: transformers loads a tensor with other values than this program.
    """
    model = side.checkpoint.model
    tensors = side.checkpoint.into(identity(model.shapes))
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    dtype = torch.float64 if is_double else torch.float32
    if side.format != "hf" or not _can_load(side):
        values = {name: _values(tensor) for name, tensor in tensors.items()}
        return type(model.model).from_pretrained(
            None, config=model.config, state_dict=values, dtype=dtype
        )

    config = copy.deepcopy(side.config)
    quantized = quantization(side.folder / "config.json")
    if quantized:
        config.quantization_config = quantized | {"dequantize": True}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        side.folder,
        config=config,
        dtype=torch.bfloat16 if quantized else dtype,  # as quantized weights are read by us
        local_files_only=True,
    ).to(dtype)

    theirs = loaded.state_dict()
    others = [name for name, tensor in tensors.items() if not _same(_values(tensor), theirs[name])]
    if others:
        raise InputError(
            f"{side.folder}: transformers loads {first_names(others)} with other values than "
            "this program"
        )
    return loaded


def _can_load(side: Side) -> bool:
    """Whether transformers reads the weights right by itself, without a package of the
    quantization's.

    It takes the blocks of an fp8 matrix for equal ones, the last too, and knows blocks of matrices
    alone.
    """
    table = quantization(side.folder / "config.json")
    if not table or table.get("quant_method") == "mxfp4":
        return True
    block = sizes_of_blocks(table)
    if block is None:
        return False  # scales of another form than blocks, or another quantization
    for name, tensor in side.checkpoint.tensors[None].items():  # the weights, by stored name
        if not isinstance(tensor, Computed):  # what is computed on reading was quantized
            continue
        shape = side.checkpoint.layout.shapes[name]
        if len(shape) != 2 or any(size % of_block for size, of_block in zip(shape, block)):
            return False
    return True


def _values(tensor: Readable) -> Tensor:
    """Return all elements of a tensor."""
    return torch.from_numpy(tensor.read(full_region(tensor.shape))).view(tensor.dtype)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are equal in the dtype of the second; what is not a number equals what is
    not."""
    ours = ours.to(theirs.dtype)
    if ours.shape != theirs.shape:
        return False
    are_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return bool(are_same.all())
