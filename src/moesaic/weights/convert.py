"""Converts a checkpoint into another format, writes a receipt with hashes, and verifies an output
against its receipt."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moesaic import __version__
from moesaic.errors import InputError
from moesaic.files import read_text, write
from moesaic.weights.card import CARD, card
from moesaic.weights.checkpoint import FORMATS, Checkpoint, format_of, open_checkpoint
from moesaic.weights.layout import Layout, Readable, first_names
from moesaic.weights.logits import Side, compare_logits, compares_logits, require_alike
from moesaic.weights.model_tensors import AbstractFormat, Architecture
from moesaic.weights.source import RECEIPT, companions, read_config, write_companions
from moesaic.weights.tensor_files import filling, require_room
from moesaic.weights.upcycle import Upcycling, upcycled


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
    """Convert a checkpoint into another format, bit by bit, then read source and output again to
    compare them.

    If anything fails, nothing of the output stays. Memory use is a few buffers of 16 MiB and at
    most the matrices of one expert, never a whole tensor of all experts.

    Args:
        source: the folder of the checkpoint, which is not changed.
        out: the folder to write; must not exist or be empty.
        to: hf, moesaic, torchtitan or megatron.
        source_format: the source's format, one of the same names; None to detect it.
        config: the model's transformers config.json, or the folder of one; needed if the source
            folder has none.
        upcycle: turns the feed-forward layers of a dense model into experts; None keeps the model's
            architecture.
        logits: whether to run both models and compare their logits; None to do so for models of at
            most 2 GiB.

    Returns:
        the receipt, which is also written to `out / "receipt.json"`; docs/convert.md describes it.

    Raises:
        InputError: the checkpoint is incomplete, mixed or of another model, `to` cannot store it,
            or the output differs.
    """
    folder = Path(source)
    target = Path(out)
    _check_formats(to, source_format or to)
    require_room(target)
    old = _opened(folder, source_format or format_of(folder), config)
    before = old.checkpoint if upcycle is None else upcycled(old.checkpoint, upcycle)
    tensors, unplaced = _named(before, FORMATS[to])
    size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    # tokenizer and the like, which only lie beside weights in the hub's format
    others = companions(folder) if "hf" in (to, old.format) else {}
    with filling(target):
        after = _written(target, to, before, tensors, others)
        new = Side(after, target, to, after.model.config)
        receipt = _receipt(before, after) | {
            "tensors": len(tensors),
            "bytes": size,
            "source": {"folder": folder.name, "format": old.format},
            "target": {"format": to},
            "left_behind": sorted(before.left_behind + unplaced),
            "upcycled": None if upcycle is None else vars(upcycle),
            "logits": compare_logits(old, new) if compares_logits(size, logits) else None,
        }
        _write_words(target, receipt, others.get(CARD, b"").decode(errors="replace"))
    return receipt


def _opened(folder: Path, format: str, config: str | Path | None) -> Side:
    """Return the checkpoint in a folder, with the configuration given or found there."""
    table = read_config(folder, None if config is None else Path(config))
    checkpoint = open_checkpoint(folder, format, Architecture(table))
    return Side(checkpoint, folder, format, config=table)


def _check_formats(*names: str) -> None:
    """Raise InputError for a name that no format has."""
    for name in names:
        if name not in FORMATS:
            raise InputError(f"{name} is not a format: choose one of {', '.join(FORMATS)}")


def _written(
    target: Path,
    to: str,
    before: Checkpoint,
    tensors: dict[str, Readable],
    others: Mapping[str, bytes],
) -> Checkpoint:
    """Write a checkpoint in a format, with the other files of its folder, and open it again.

    Args:
        to: the format.
        before: the checkpoint, for its configuration.
        tensors: what is written, by its names in the format's files.
        others: contents of files that accompany the weights, by name; the model card comes later.
    """
    before.model.config.save_pretrained(target)
    write_companions({name: data for name, data in others.items() if name != CARD}, target)
    FORMATS[to].write(target, tensors)
    return open_checkpoint(target, to, Architecture(read_config(target)))


def _write_words(target: Path, receipt: dict[str, Any], card_before: str) -> None:
    """Write a receipt, and for the hub a model card."""
    if receipt["target"]["format"] == "hf":
        write(target / CARD, card(receipt["model"], receipt, card_before))
    # last, since a folder with a receipt holds a conversion that is finished
    write(target / RECEIPT, json.dumps(receipt, indent=1) + "\n")


def _named(before: Checkpoint, format: AbstractFormat) -> tuple[dict[str, Readable], list[str]]:
    """Return the tensors to write by their names in a format's files, and the optimizer states that
    the format cannot store."""
    blocks = format.blocks(before.model, names=())  # () to write
    layout = Layout(blocks, before.model.shapes, format.title)
    named: dict[str, Readable] = {}
    unplaced = []
    for state in before.tensors:
        for name, tensor in before.into(layout, state).items():
            in_file = format.stored_name(name, state)
            if in_file is None:
                unplaced.append(f"{state} of {name}")
            elif state is None:
                named[in_file] = format.converted(name, tensor, to_model=False)
            else:
                named[in_file] = tensor
    return named, unplaced


def _receipt(before: Checkpoint, after: Checkpoint) -> dict[str, Any]:
    """Hash source and output, compare them, and return the entries of the receipt that come of it.

    Raises:
        InputError: they differ, because of a bug in this program or a fault of the disk.
    """
    # by state, then by name; what a format has no place for is in the source alone
    digests = before.digests()
    digests_after = after.digests()
    shared = {state: of_state for state, of_state in digests.items() if state in digests_after}
    for state, of_state in shared.items():
        of_state_after = digests_after[state]
        differing = [name for name in of_state if of_state[name] != of_state_after.get(name)]
        if differing:
            raise InputError(
                f"{first_names(differing)} of {state} differ from the source: do not use the "
                "output, convert again"
            )
    moments = {
        state: {"in the source": len(of_state), "placed": len(shared.get(state, ()))}
        for state, of_state in digests.items()
        if state != "weights"
    }
    return {
        "moesaic": __version__,
        "model": after.model.config.model_type,
        "moments": moments,
        "sha256": shared,
    }


def verify(out: str | Path) -> dict[str, Any]:
    """Read the output of a conversion and compare it with its receipt.

    Args:
        out: the folder that `convert` wrote.

    Returns:
        "tensors" and "experts" (how many were compared) and "states" (the names of those compared).

    Raises:
        InputError: there is no receipt, an element differs, or the receipt says that a weight was
            left behind. The message names the tensor or the expert.
    """
    folder = Path(out)
    if not (folder / RECEIPT).exists():
        raise InputError(
            f"{folder / RECEIPT} is missing: no conversion finished here, convert again (that of a "
            "run of moesaic train compares logits at once, and leaves no receipt)"
        )
    receipt = _read_receipt(folder / RECEIPT)
    model = Architecture(read_config(folder))
    # a tied weight that equals its twin is listed with more words than its name
    lost = receipt.left_behind & model.tied.keys()
    if lost:
        raise InputError(
            f"{folder}: the conversion left {first_names(lost)} behind, a weight of the "
            "model: convert again"
        )
    require_alike(receipt.logits, str(folder))

    actual = open_checkpoint(folder, receipt.format, model).digests()
    num_experts = 0
    for state in {**receipt.digests, **actual}:
        expected = receipt.digests.get(state, {})
        found = actual.get(state, {})
        for name in {**expected, **found}:
            digest = expected.get(name)
            if found.get(name) != digest:
                raise InputError(
                    f"{folder}: {_first_differing(name, digest, found.get(name))} ({state}) is not "
                    "what the receipt says: convert or fetch it again"
                )
            if isinstance(digest, list):  # of the experts of a layer, one for each
                num_experts += len(digest)
    return {
        "tensors": sum(len(each) for each in actual.values()),
        "experts": num_experts,
        "states": list(receipt.digests),
    }


def _first_differing(name: str, digest: Any, other: Any) -> str:
    """Return a name for a message, with the first expert whose hashes differ if there are hashes of
    experts on both sides."""
    if not isinstance(digest, list) or not isinstance(other, list):
        return name
    expert = 0
    while expert < min(len(digest), len(other)) and digest[expert] == other[expert]:
        expert += 1
    return f"expert {expert} of {name}"


class _Receipt(NamedTuple):
    """What the receipt of a conversion says."""

    format: str
    """The format that was written."""
    digests: dict[str, dict[str, Any]]
    """SHA-256 by state and tensor; of stacked experts, one for each expert."""
    left_behind: set[str]
    """Names of entries of the source that were not converted."""
    logits: dict[str, float]
    """How far the logits of source and output differ."""


def _read_receipt(path: Path) -> _Receipt:
    """Return what a receipt says; raise InputError if it is none."""
    try:
        receipt = json.loads(read_text(path))
        format = receipt["target"]["format"]
        digests = receipt["sha256"]
        left_behind = set(receipt["left_behind"])
        compared = receipt["logits"] or {"largest_difference": 0}  # none if they were not compared
        logits = {name: float(value) for name, value in compared.items()}
        are_tables = all(isinstance(of_state, dict) for of_state in digests.values())
        if format in FORMATS and are_tables and "largest_difference" in logits:
            return _Receipt(format, digests, left_behind, logits)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path}: is not a receipt of a conversion, or is damaged: convert again")
