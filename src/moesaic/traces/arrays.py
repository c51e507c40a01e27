"""Reads NumPy's `.npy` and `.npz` files: each array's header first, so that no more is read or
inflated than it may hold."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from moesaic.files import open_file

DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    MemoryError,
    TokenError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
"""The exceptions of numpy for files that are damaged."""
MOST_BYTES = 1 << 26
"""An array of at most this size is read whatever its compression."""
MOST_INFLATED = 200
"""Larger arrays are at most this many times as large as their compressed bytes. Recorded counts
reach about 20; deflate reaches 1,032 for a file made of zeros."""


def read_array(path: Path) -> np.ndarray:
    """Read an `.npy` file.

    Raises:
        OSError: the file cannot be read, or is not a file.
        ValueError: it is damaged, ends before its array does, or holds pickled objects.
    """
    with open_file(path) as file:
        return array_of(file, os.fstat(file.fileno()).st_size)


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read some arrays of an `.npz` file.

    Raises:
        OSError: the file cannot be read, or is not a file.
        KeyError: an array is missing.
        one of DAMAGED: the file is damaged, or an array is larger than its compressed bytes can
            plausibly be.
    """
    with open_file(path) as file:
        if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
            raise KeyError("it is one array, not an archive of named ones")
        file.seek(0)
        return _members(file, names)


def _members(file: BinaryIO, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return some arrays of an open `.npz` file."""
    with zipfile.ZipFile(file) as archive:
        arrays = {}
        for name in names:
            member = archive.getinfo(f"{name}.npy")
            most_bytes = max(MOST_BYTES, MOST_INFLATED * member.compress_size)
            with archive.open(member) as stream:
                arrays[name] = array_of(stream, min(most_bytes, member.file_size))
        return arrays


def array_of(file: IO[bytes], most_bytes: int) -> np.ndarray:
    """Read an array of at most that many bytes from an open `.npy` file; raises as `read_array`."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format is not read")
    read_header: Any = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects")
    size = math.prod(shape) * dtype.itemsize
    if size > most_bytes:
        raise ValueError(f"its header says {size:,} bytes, and at most {most_bytes:,} can be there")
    data = file.read(size)
    if len(data) < size:
        raise EOFError(f"it ends after {len(data):,} of {size:,} bytes")
    # a bytearray, since an array over bytes cannot be written to
    flat = np.frombuffer(bytearray(data), dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C")
