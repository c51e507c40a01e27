"""Whether all ranks of a run see one and the same folder, asked before anything is computed: else
the first checkpoint would fail, and all work up to it would be lost."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from moesaic.comm.collectives import ranks_in_words
from moesaic.errors import InputError
from moesaic.files import WRITING, write
from moesaic.train.ranks import Ranks

PATIENCE = 10.0
"""Seconds in which a file must be seen on all machines: network file systems remember for a while
what a folder held."""


def require_shared(folder: Path, ranks: Ranks) -> None:
    """Check that all ranks see the same run folder; all of them call it together.

    The first rank writes a file of a random name into the folder, or into the nearest one above it
    that exists, and removes it once all have looked.

    Args:
        folder: of `--out`, which need not exist.
        ranks: the ranks of the run.

    Raises:
        InputError: on all ranks, with those that do not see it; or the file cannot be written.
    """
    if ranks.world == 1:
        return
    target = Path(os.path.realpath(folder))
    name = ranks.from_first(f"{WRITING}{secrets.token_hex(8)}-shared")
    levels = 0  # how far above the run folder the file lies
    file: Path | None = None
    try:
        with ranks.together():
            if ranks.is_first:
                levels = _missing_levels(target)
                file = _above(target, levels) / name
                _write(file, folder)
        seen = _is_seen(_above(target, ranks.from_first(levels)) / name)
        hosts, has_seen = ranks.of_hosts(seen)
    finally:
        if file is not None:
            with suppress(OSError):
                file.unlink()
    blind = [rank for rank, sees in enumerate(has_seen) if not sees]
    if blind:
        verb = "does" if len(blind) == 1 else "do"
        raise InputError(
            f"--out {folder}: {ranks_in_words(blind, hosts)} {verb} not see what "
            f"{ranks_in_words([0], hosts)} writes there: --out must lie in a file system that all "
            "machines share"
        )


def _missing_levels(folder: Path) -> int:
    """Return how far above a folder the nearest one is that exists."""
    levels = 0
    while not os.path.lexists(_above(folder, levels)):
        levels += 1
    return levels


def _above(folder: Path, levels: int) -> Path:
    """Return the folder that many levels above another; the topmost one if there are fewer."""
    for _ in range(levels):
        folder = folder.parent
    return folder


def _write(file: Path, folder: Path) -> None:
    """Write an empty file; InputError, which names the run folder, if that fails."""
    try:
        write(file, "")
    except OSError as error:
        raise InputError(
            f"--out {folder}: cannot be written ({error.strerror}): choose another --out"
        ) from error


def _is_seen(file: Path) -> bool:
    """Return whether a file is there, or is within `PATIENCE`."""
    until = time.monotonic() + PATIENCE
    while not os.path.lexists(file):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
        with suppress(OSError):  # opening a folder asks the server of a network file system anew
            os.scandir(file.parent).close()
    return True
