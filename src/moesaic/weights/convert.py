"""Converts a checkpoint into another format, writes a receipt with hashes, and verifies an output against its receipt."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from moesaic import __version__
from moesaic.errors import InputError
from moesaic.weights.checkpoint import FORMATS, Checkpoint, format_of, open_checkpoint
from moesaic.weights.files import require_room
from moesaic.weights.layout import Computed, Layout, Readable, first_names, full_region, identity
from moesaic.weights.model import AbstractFormat, Architecture, read_config
from moesaic.weights.upcycle import Upcycling, upcycled

RECEIPT = "receipt.json"
"""The file into which a conversion writes its receipt, in the output folder."""
LOGITS_BYTES = 2**31
"""By default, the logits of models of at most this many bytes are compared."""
TOKENS = 16
"""Length of the text on which logits are compared: token i is 7 i + 1, modulo the vocabulary size."""


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: str,
    source_format: str | None = None,
    config: str | Path | None = None,
    upcycle: Upcycling | None = None,
    logits: bool | None = None,
) -> dict[str, Any]:
    """Convert a checkpoint into another format, bit by bit, then read source and output again to compare them.

    Memory use is a few buffers of 16 MiB and at most the matrices of one expert, never a whole tensor of all experts.

    Args:
        source: the folder of the checkpoint, which is not changed.
        out: the folder to write; must not exist or be empty.
        to: hf, moesaic, torchtitan or megatron.
        source_format: the source's format, one of the same names; None to detect it.
        config: the model's transformers config.json, or the folder of one; needed if the source folder has none.
        upcycle: turns the feed-forward layers of a dense model into experts; None keeps the model's architecture.
        logits: whether to run both models and compare their logits; None to do so for models of at most 2 GiB.

    Returns:
        the receipt, which is also written to `out / "receipt.json"`; docs/convert.md describes it.

    Raises:
        InputError: the checkpoint is incomplete, mixed with another or of another model, or `to` cannot store the model.
    """
    folder, target = Path(source), Path(out)
    for name in (to, source_format or to):
        if name not in FORMATS:
            raise InputError(f"{name} is not a format: choose one of {', '.join(FORMATS)}")
    require_room(target)
    came_from = source_format or format_of(folder)
    model = Architecture(read_config(folder, None if config is None else Path(config)))
    before = open_checkpoint(folder, came_from, model)
    if upcycle is not None:
        before = upcycled(before, upcycle)
    layout = Layout(FORMATS[to].blocks(before.model, ()), before.model.shapes, FORMATS[to].title)
    tensors, unplaced = _named(before, layout, FORMATS[to])
    size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    target.mkdir(parents=True, exist_ok=True)
    before.model.config.save_pretrained(target)
    FORMATS[to].write(target, tensors)
    if to == "hf" or came_from == "hf":
        _copy_others(folder, target)
    after = open_checkpoint(target, to, before.model)
    receipt = _receipt(before, after) | {
        "tensors": len(tensors), "bytes": size,
        "source": {"folder": folder.name, "format": came_from}, "target": {"format": to},
        "left_behind": sorted(before.left_behind + unplaced), "upcycled": None if upcycle is None else vars(upcycle),
    }  # fmt: skip
    compares_logits = size <= LOGITS_BYTES if logits is None else logits
    receipt["logits"] = (
        _compared(folder, before, after, target, upcycle is None, (came_from, to)) if compares_logits else None
    )
    (target / RECEIPT).write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
    return receipt


def _named(before: Checkpoint, layout: Layout, format: AbstractFormat) -> tuple[dict[str, Readable], list[str]]:
    """Return the tensors to write by their names in a format, and the optimizer states that the format cannot store."""
    named: dict[str, Readable] = {}
    unplaced = []
    for state in before.tensors:
        for name, tensor in before.into(layout, state).items():
            place = format.stored_name(name, state)
            if place is None:
                unplaced.append(f"{state} of {name}")
            else:
                named[place] = format.converted(name, tensor, to_model=False) if state is None else tensor
    return named, unplaced


def _copy_others(folder: Path, target: Path) -> None:
    """Copy the files that accompany the weights: tokenizer, chat template, generation settings."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt", ".model", ".jinja") and not path.name.endswith(
            (".index.json", RECEIPT, "config.json")
        ):
            shutil.copyfile(path, target / path.name)


def _receipt(before: Checkpoint, after: Checkpoint) -> dict[str, Any]:
    """Hash source and output, compare them, and return the entries of the receipt that follow.

    Raises:
        InputError: they differ, because of a bug in this program or a fault of the disk.
    """
    digests, digests_after = before.digests(), after.digests()
    shared = {state: tables for state, tables in digests.items() if state in digests_after}
    for state, tables in shared.items():
        differing = [name for name in tables if tables[name] != digests_after[state].get(name)]
        if differing:
            raise InputError(
                f"{first_names(differing)} of {state} differ from the source: do not use the output, convert again"
            )
    return {
        "moesaic": __version__,
        "model": after.model.config.model_type,
        "moments": {
            state: {"in the source": len(tables), "placed": len(shared.get(state, ()))}
            for state, tables in digests.items()
            if state != "weights"
        },
        "sha256": shared,
    }


def _compared(
    folder: Path, before: Checkpoint, after: Checkpoint, target: Path, same: bool, names: tuple[str, str]
) -> dict[str, Any]:
    """Run both models on the fixed text and return the largest difference between their logits."""
    is_quantized = any(isinstance(tensor, Computed) for tensor in before.tensors[None].values())  # needs a GPU to load
    old = _logits(folder if same and names[0] == "hf" and not is_quantized else None, before)
    new = _logits(target if names[1] == "hf" else None, after)
    return {"tokens": TOKENS, "largest_difference": float((old.double() - new.double()).abs().max())}


@torch.no_grad()
def _logits(hub: Path | None, checkpoint: Checkpoint) -> Tensor:
    """Return the logits of a checkpoint.

    Args:
        hub: a folder from which transformers itself loads the model; None to fill in the tensors of `checkpoint`.
        checkpoint: the checkpoint.
    """
    if hub is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(hub, dtype="auto")
    else:
        tensors = checkpoint.into(identity(checkpoint.model.shapes))
        values = {name: torch.from_numpy(t.read(full_region(t.shape))).view(t.dtype) for name, t in tensors.items()}
        model = transformers.AutoModelForCausalLM.from_config(checkpoint.model.config)
        model.load_state_dict(values, strict=False, assign=True)
        model.tie_weights()
    if checkpoint.model.experts:
        model.set_experts_implementation("eager")  # the default implementation does not support float64
    tokens = (7 * torch.arange(TOKENS) + 1) % checkpoint.model.config.vocab_size
    logits: Tensor = model.eval()(input_ids=tokens[None]).logits
    return logits


def verify(out: str | Path) -> dict[str, Any]:
    """Read the output of a conversion and compare it with its receipt.

    Args:
        out: the folder that `convert` wrote.

    Returns:
        "tensors" and "experts" (how many were compared) and "states" (the names of those compared).

    Raises:
        InputError: there is no receipt, or an element differs. The message names the tensor or the expert.
    """
    folder = Path(out)
    if not (folder / RECEIPT).exists():
        raise InputError(f"{folder / RECEIPT} is missing: no conversion finished here, convert again")
    format, digests = _read_receipt(folder / RECEIPT)
    checkpoint = open_checkpoint(folder, format, Architecture(read_config(folder, None)))
    actual = checkpoint.digests()
    experts = 0
    for state, expected in digests.items():
        for name, digest in expected.items():
            actual_digest = actual.get(state, {}).get(name)
            if actual_digest == digest:
                experts += len(digest) if isinstance(digest, list) else 0
                continue
            prefix = ""
            if isinstance(digest, list) and isinstance(actual_digest, list):
                differing = (i for i, pair in enumerate(zip(digest, actual_digest)) if pair[0] != pair[1])
                prefix = f"expert {next(differing, min(len(digest), len(actual_digest)))} of "
            raise InputError(
                f"{folder}: {prefix}{name} ({state}) is not what the receipt says: convert or fetch it again"
            )
    return {"tensors": sum(len(each) for each in actual.values()), "experts": experts, "states": list(digests)}


def _read_receipt(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return (the format that the conversion wrote, its digests by state and tensor) from a receipt."""
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
        format, digests = receipt["target"]["format"], receipt["sha256"]
        if format in FORMATS and all(isinstance(each, dict) for each in digests.values()):
            return format, digests
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path}: is not a receipt of a conversion, or is damaged: convert again")
