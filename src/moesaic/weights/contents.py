"""Tells checkpoints apart by what they hold, not by their names."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from moesaic.errors import InputError
from moesaic.files import open_file
from moesaic.weights.checkpoint import FORMATS, format_of
from moesaic.weights.layout import Readable
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
    stored: Mapping[str, Readable]
    if format_name == "hf":
        stored = read_safetensors(folder)  # the elements as stored, which are not dequantized
    else:
        stored, _ = FORMATS[format_name].read(folder)
    try:
        config = json.dumps(read_settings(folder / CONFIG), sort_keys=True)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{folder / CONFIG}: cannot be read ({error}): fetch it again") from error
    digest = hashlib.sha256(config.encode())
    # all of them, since none is computed here
    tensors = {
        name: tensor for name, tensor in sorted(stored.items()) if isinstance(tensor, Stored)
    }
    num_bytes = sum(size for tensor in tensors.values() for _, _, size in _spans(tensor))
    is_sampled = num_bytes > WHOLE_BYTES

    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for path, start, size in _spans(tensor):
            blocks = _sampled(size) if is_sampled else [(0, size)]
            for begin, length in blocks:
                for buffer in _buffers(path, start + begin, length):
                    digest.update(buffer)
    return digest.hexdigest()


def _spans(tensor: Stored) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, first byte, number of bytes) of each part of a tensor."""
    for part in tensor.parts:
        size = part.archive  # a part in an archive is hashed as the archive
        if size is None:
            size = math.prod(part.sizes) * tensor.dtype.itemsize
        yield part.path, part.start, size


def _sampled(size: int) -> list[tuple[int, int]]:
    """Return (first byte, number of bytes) of the sampled blocks of a part of `size` bytes."""
    if size <= 3 * SAMPLE_BYTES:
        return [(0, size)]
    last = size - SAMPLE_BYTES
    return [(begin, SAMPLE_BYTES) for begin in (0, last // 2, last)]


def _buffers(path: Path, begin: int, length: int) -> Iterator[bytes]:
    """Yield `length` bytes of a file from byte `begin` on, at most `AT_ONCE` at a time."""
    with open_file(path) as file:
        file.seek(begin)
        for start in range(0, length, AT_ONCE):
            yield file.read(min(AT_ONCE, length - start))
