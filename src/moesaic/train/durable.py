"""Files that must be on the disk before a name promises them, their checksums, and whether they read back as they were."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, written to the disk, so that who reads a file next reads it from there.

    Windows knows no flushing of folders, and other systems than Linux may keep what they wrote in memory.
    """
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def checksum(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first `size` bytes; of all that it has where these are fewer."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20 if size is None else min(size, 1 << 20)):
            digest.update(block)
            size = None if size is None else size - len(block)
    return digest.hexdigest()


def require_read_back(written: Mapping[str, Tensor], read: Mapping[str, Tensor], share: float = 0.0) -> None:
    """Make sure that tensors came back from the disk as they went there.

    Args:
        written: by name, on whatever device.
        read: the same names.
        share: of a tensor's largest number by which its numbers may differ; 0 compares bits.

    Raises:
        OSError: if one did not.
    """
    for name, before in written.items():
        one, other = before.detach().cpu(), read[name].detach().cpu()
        apart = (one.double() - other.double()).abs().max() if share and one.numel() else 0.0
        is_same = apart <= share * one.double().abs().max() if share and one.numel() else _bits(one).equal(_bits(other))
        if not is_same:
            raise OSError(errno.EIO, f"{name} does not read back from the disk as it was written")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
