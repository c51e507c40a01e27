"""The text of a run that names none: source code that a pinned package ships, the same bytes for
everybody.

So two people who train the same preset can compare their losses. torch requires the package, it is
pure Python with one wheel for all systems, and `constraints.txt` pins it.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

from moesaic.errors import InputError

PACKAGE = "sympy"
VERSION = "1.14.0"
"""The package whose source is the text, and the release."""
LEFT_OUT = frozenset({"tests", "benchmarks", "_antlr", "__pycache__"})
"""Folders whose files are no text of a person, or repeat each other: tests, tables of numbers,
generated parsers."""
SHA256 = "e9b71c7cc7f0abe51c6c05a2841267d52c33e5aea1f95f3c4767d4bc4125191e"
"""SHA-256 of the files in order, each as its path below the package, a zero byte, its bytes and a
zero byte."""


def example_text() -> tuple[list[Path], Path]:
    """Return the files of the text, sorted by their path, and their common folder.

    Raises:
        InputError: if the package is missing or its files are not those of the release.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise _other_text(f"{PACKAGE} is not installed")
    root = Path(spec.submodule_search_locations[0])
    files = _source_files(root)
    if digest(files, root) != SHA256:
        raise _other_text(f"the files in {root} are others")
    return files, root


def digest(files: list[Path], root: Path) -> str:
    """Return the SHA-256 of files, as hexadecimal digits, as `SHA256` has it."""
    sha256 = hashlib.sha256()
    for path in files:
        name = path.relative_to(root).as_posix()
        sha256.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sha256.hexdigest()


def _source_files(root: Path) -> list[Path]:
    """Return the source files below a folder in an order that is the same on every system."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT]  # not walked into
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _other_text(found: str) -> InputError:
    """Return the error for a text that is missing or another."""
    return InputError(
        f"data.path is empty: the text is then the source of {PACKAGE} {VERSION}, and {found}: "
        f"pip install --force-reinstall --no-deps {PACKAGE}=={VERSION}, or name text with data.path"
    )
