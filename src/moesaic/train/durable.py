"""Files that must be on the disk before a name promises them, and their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, written to the disk; Windows knows no flushing of folders."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
