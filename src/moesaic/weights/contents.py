"""Tells checkpoints apart by what they hold, not by their names."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

from moesaic.errors import InputError
from moesaic.files import open_file
from moesaic.weights.checkpoint import FORMATS, format_of
from moesaic.weights.source import CONFIG, read_settings
from moesaic.weights.tensor_files import Stored, read_safetensors

WHOLE_BYTES = 2**30
"""Checkpoints of at most this many bytes are hashed whole."""
SAMPLE_BYTES = 4096
"""Size of the blocks of other checkpoints that are hashed: the first, the middle and the last one
of each tensor."""
AT_ONCE = 2**24


def contents_of(folder: Path) -> str:
    """Return a hash of a checkpoint's configuration, and of the names, dtypes, shapes and elements
    of its tensors.

    Elements of checkpoints above 1 GiB are sampled, in each tensor. The hash does not depend on how
    tensors are spread over files of safetensors.

    Raises:
        InputError: the checkpoint or its configuration cannot be read.
    """
    format_name = format_of(folder)
    stored = (
        read_safetensors(folder) if format_name == "hf" else FORMATS[format_name].read(folder)[0]
    )
    try:
        config = json.dumps(read_settings(folder / CONFIG), sort_keys=True)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{folder / CONFIG}: cannot be read ({error}): fetch it again") from error
    digest = hashlib.sha256(config.encode())
    tensors = {
        name: tensor for name, tensor in sorted(stored.items()) if isinstance(tensor, Stored)
    }
    samples = (
        sum(size for tensor in tensors.values() for _, _, size in _spans(tensor)) > WHOLE_BYTES
    )
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for path, start, size in _spans(tensor):
            for begin, length in _sampled(size) if samples else [(0, size)]:
                for block in _blocks(path, start + begin, length):
                    digest.update(block)
    return digest.hexdigest()


def _spans(tensor: Stored) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, first byte, number of bytes) of each part of a tensor."""
    for part in tensor.parts:
        size = (
            math.prod(part.sizes) * tensor.dtype.itemsize if part.archive is None else part.archive
        )
        yield part.path, part.start, size


def _sampled(size: int) -> list[tuple[int, int]]:
    """Return (first byte, number of bytes) of the sampled blocks of a part."""
    if size <= 3 * SAMPLE_BYTES:
        return [(0, size)]
    return [(begin, SAMPLE_BYTES) for begin in (0, (size - SAMPLE_BYTES) // 2, size - SAMPLE_BYTES)]


def _blocks(path: Path, begin: int, length: int) -> Iterator[bytes]:
    """Yield bytes of a file, a buffer at a time."""
    with open_file(path) as file:
        file.seek(begin)
        for start in range(0, length, AT_ONCE):
            yield file.read(min(AT_ONCE, length - start))
