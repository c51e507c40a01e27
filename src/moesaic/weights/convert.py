"""Converts a checkpoint into another format, writes a receipt with hashes, and verifies an output against its receipt."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from moesaic import __version__
from moesaic.errors import InputError
from moesaic.files import MOST_TEXT, read_bytes, read_text, write
from moesaic.weights.card import CARD, card
from moesaic.weights.checkpoint import FORMATS, Checkpoint, format_of, open_checkpoint
from moesaic.weights.files import filling, require_room
from moesaic.weights.layout import Layout, Readable, first_names
from moesaic.weights.logits import Side, compare_logits, compares_logits, require_alike
from moesaic.weights.model import AbstractFormat, Architecture, read_config
from moesaic.weights.upcycle import Upcycling, upcycled

RECEIPT = "receipt.json"
"""The file into which a conversion writes its receipt, in the output folder."""


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

    If anything fails, nothing of the output stays. Memory use is a few buffers of 16 MiB and at most the matrices of one
    expert, never a whole tensor of all experts.

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
        InputError: the checkpoint is incomplete, mixed or of another model, `to` cannot store it, or the output differs.
    """
    folder, target = Path(source), Path(out)
    for name in (to, source_format or to):
        if name not in FORMATS:
            raise InputError(f"{name} is not a format: choose one of {', '.join(FORMATS)}")
    require_room(target)
    came_from = source_format or format_of(folder)
    source_config = read_config(folder, None if config is None else Path(config))
    opened = open_checkpoint(folder, came_from, Architecture(source_config))
    before = opened if upcycle is None else upcycled(opened, upcycle)
    layout = Layout(FORMATS[to].blocks(before.model, ()), before.model.shapes, FORMATS[to].title)
    tensors, unplaced = _named(before, layout, FORMATS[to])
    size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    others = _others(folder) if to == "hf" or came_from == "hf" else {}
    with filling(target):
        before.model.config.save_pretrained(target)
        for name in others.keys() - {CARD}:
            write(target / name, others[name])
        FORMATS[to].write(target, tensors)
        after = open_checkpoint(target, to, Architecture(read_config(target, None)))
        receipt = _receipt(before, after) | {
            "tensors": len(tensors), "bytes": size,
            "source": {"folder": folder.name, "format": came_from}, "target": {"format": to},
            "left_behind": sorted(before.left_behind + unplaced), "upcycled": None if upcycle is None else vars(upcycle),
            "logits": None,
        }  # fmt: skip
        if compares_logits(size, logits):
            old = Side(opened, folder, came_from, source_config)
            receipt["logits"] = compare_logits(old, Side(after, target, to, after.model.config))
        _write_words(target, receipt, others.get(CARD, b"").decode(errors="replace"))
    return receipt


def _write_words(target: Path, receipt: dict[str, Any], card_before: str) -> None:
    """Write a receipt, and for the hub a model card."""
    if receipt["target"]["format"] == "hf":
        write(target / CARD, card(receipt["model"], receipt, card_before))
    write(target / RECEIPT, json.dumps(receipt, indent=1) + "\n")


def _named(
    before: Checkpoint, layout: Layout, format: AbstractFormat
) -> tuple[dict[str, Readable], list[str]]:
    """Return the tensors to write by their names in a format, and the optimizer states that the format cannot store."""
    named: dict[str, Readable] = {}
    unplaced = []
    for state in before.tensors:
        for name, tensor in before.into(layout, state).items():
            place = format.stored_name(name, state)
            if place is None:
                unplaced.append(f"{state} of {name}")
            else:
                named[place] = (
                    format.converted(name, tensor, to_model=False) if state is None else tensor
                )
    return named, unplaced


def _others(folder: Path) -> dict[str, bytes]:
    """Return the files that accompany the weights, by name: tokenizer, chat template, generation settings, model card.

    Links count only within the folder, or within the cache of a hub that holds it: others may lead to files of the reader that
    the sender of the folder wants to see in the output.
    """
    others = {}
    for path in sorted(folder.iterdir()):
        is_ours = (
            path.name in ("config.json", RECEIPT)
            or path.name.endswith(".index.json")
            or "quant" in path.name
        )
        if (
            path.suffix not in (".json", ".txt", ".model", ".jinja") and path.name != CARD
        ) or is_ours:
            continue
        # The hub's cache keeps a model's files in models--NAME/blobs, and in models--NAME/snapshots/COMMIT links to them.
        home, cache = folder.resolve(), folder.resolve().parent.parent
        homes = [home, cache / "blobs"] if cache.name.startswith("models--") else [home]
        if not any(path.resolve().is_relative_to(each) for each in homes):
            raise InputError(
                f"{str(path)!r}: is a link to a file outside the checkpoint: take it away, or put that file in its place"
            )
        try:
            others[path.name] = read_bytes(path, at_most=MOST_TEXT)
        except OSError as error:
            raise InputError(
                f"{str(path)!r}: cannot be read ({error.strerror}): take it away"
            ) from error
    return others


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


def verify(out: str | Path) -> dict[str, Any]:
    """Read the output of a conversion and compare it with its receipt.

    Args:
        out: the folder that `convert` wrote.

    Returns:
        "tensors" and "experts" (how many were compared) and "states" (the names of those compared).

    Raises:
        InputError: there is no receipt, an element differs, or the receipt says that a weight was left behind. The message
            names the tensor or the expert.
    """
    folder = Path(out)
    if not (folder / RECEIPT).exists():
        raise InputError(
            f"{folder / RECEIPT} is missing: no conversion finished here, convert again"
        )
    format, digests, left_behind, logits = _read_receipt(folder / RECEIPT)
    model = Architecture(read_config(folder, None))
    if lost := left_behind & model.tied.keys():
        raise InputError(
            f"{folder}: the conversion left {first_names(lost)} behind, a weight of the model: convert again"
        )
    require_alike(logits, str(folder))
    checkpoint = open_checkpoint(folder, format, model)
    actual = checkpoint.digests()
    experts = 0
    for state in {**digests, **actual}:
        expected, found = digests.get(state, {}), actual.get(state, {})
        for name in {**expected, **found}:
            digest, actual_digest = expected.get(name), found.get(name)
            if actual_digest == digest:
                experts += len(digest) if isinstance(digest, list) else 0
                continue
            prefix = ""
            if isinstance(digest, list) and isinstance(actual_digest, list):
                differing = (
                    i for i, pair in enumerate(zip(digest, actual_digest)) if pair[0] != pair[1]
                )
                prefix = f"expert {next(differing, min(len(digest), len(actual_digest)))} of "
            raise InputError(
                f"{folder}: {prefix}{name} ({state}) is not what the receipt says: convert or fetch it again"
            )
    return {
        "tensors": sum(len(each) for each in actual.values()),
        "experts": experts,
        "states": list(digests),
    }


def _read_receipt(path: Path) -> tuple[str, dict[str, dict[str, Any]], set[str], dict[str, float]]:
    """Return (the format written, digests by state and tensor, entries left behind, the logits' difference) of a receipt."""
    try:
        receipt = json.loads(read_text(path))
        format, digests, left_behind = (
            receipt["target"]["format"],
            receipt["sha256"],
            set(receipt["left_behind"]),
        )
        logits = {
            name: float(value)
            for name, value in (receipt["logits"] or {"largest_difference": 0}).items()
        }
        if (
            format in FORMATS
            and all(isinstance(each, dict) for each in digests.values())
            and "largest_difference" in logits
        ):
            return format, digests, left_behind, logits
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path}: is not a receipt of a conversion, or is damaged: convert again")
