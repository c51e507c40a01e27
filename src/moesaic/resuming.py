"""How a run goes on: which of its checkpoints is complete and undamaged, and which files it may
replace and delete.

`train`, `finetune` and `moesaic.transformers.Resumable` share this. A checkpoint is written into a
folder with another name, which gets its final name once it is complete. A list in it holds the
SHA-256 of every other file. Going on takes the newest checkpoint that matches its list, and names
those that do not. Only files that saving writes, in folders that are really there, are deleted.
Imports no torch.

*Sums* are SHA-256 by a file's path below the checkpoint's folder, and a checkpoint is *sealed* by
`complete.json`, which holds them. A *leftover* is a file that a killed process did not finish.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from moesaic.errors import InputError
from moesaic.files import MOST_TEXT, entries, kind_of, leftovers, open_file, read_text, write

T = TypeVar("T")
COMPLETE = "complete.json"
"""The file that is written into a checkpoint last, with the checksums of all others."""


class DamagedError(Exception):
    """Raised for a damaged or incomplete checkpoint."""


def checksum(path: Path, *, at_most: int | None = None) -> str:
    """Return the SHA-256 of a file.

    Args:
        at_most: the most bytes that such a file may have; None for any number.

    Raises:
        OSError: it cannot be read, is not a file, or is larger.
    """
    digest = hashlib.sha256()
    with open_file(path, at_most=at_most) as file:
        while block := file.read(1 << 20):  # a mebibyte
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """What the checkpoints of one kind of run are called, and what they hold."""

    name: re.Pattern[str]
    """The names of checkpoints, earlier ones of a step included that a newer one replaced; a group
    is the step."""
    final: str
    """How names begin of checkpoints that no newer one of their step replaced."""
    replaced: str
    """The name of one that was, with `{step}` and `{number}`."""
    files: tuple[str, ...]
    """Patterns of the files that saving writes, below the checkpoint's folder. No other file in it
    is ever deleted."""
    texts: tuple[str, ...]
    """Names of the files that a killed process may have left unfinished beside their place."""
    sealed: bool = False
    """Whether only files are deleted that the checkpoint's `COMPLETE` lists: others may use the
    same names of files."""

    def listed(self, folder: Path, *, typed: bool = False) -> list[Path]:
        """Return the checkpoints of a run, oldest first; an earlier one of a step comes before the
        newer one of that step.

        Args:
            folder: the folder that holds them.
            typed: whether the user typed its path, which may then be a link.

        Raises:
            InputError: the folder is a link.
        """
        checkpoints = [
            path
            for path in entries(folder, typed=typed)
            if self.name.fullmatch(path.name) and path.is_dir()
        ]

        def age(path: Path) -> tuple[int, bool, str]:
            """Return the sort key: False, that of replaced ones, sorts before True."""
            is_final = path.name.startswith(self.final)
            return self.step_of(path), is_final, path.name

        return sorted(checkpoints, key=age)

    def step_of(self, path: Path) -> int:
        """Return the step in a checkpoint's name."""
        match = self.name.fullmatch(path.name)
        assert match is not None
        # the group that matched, since the name of a replaced one may have the step in another
        return int(match[match.lastindex or 1])

    def is_own(self, name: str) -> bool:
        """Return whether saving writes a file of this name, given below a checkpoint's folder."""
        # a star of fnmatch matches separators too
        return any(
            fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")
            for pattern in self.files
        )

    def own_files(self, path: Path) -> list[Path]:
        """Return the files in a checkpoint's folder that have names of those that saving writes;
        none through a link."""
        candidates = list(entries(path, typed=True))
        for name in self._subfolders:
            if kind_of(path / name) == "a folder":
                candidates += entries(path / name)
        return [
            file
            for file in candidates
            if file.is_file() and self.is_own(file.relative_to(path).as_posix())
        ]

    def delete(self, path: Path) -> None:
        """Delete the files of a checkpoint, unless it is a link. Delete its folder too unless it
        holds other files."""
        if kind_of(path) != "a folder":
            return
        own = self.own_files(path)
        if self.sealed:
            try:
                listed = {COMPLETE, *sealed_sums(path)}
            except DamagedError:  # which files are its own is unknown
                return
            own = [file for file in own if file.relative_to(path).as_posix() in listed]
        unfinished = []
        for name in self.texts:
            unfinished += leftovers(path / name)
        for file in (*own, *unfinished):
            with suppress(OSError):
                file.unlink()
        subfolders = [path / name for name in self._subfolders]
        for folder in (*subfolders, path):
            with suppress(OSError):  # a folder with other files, or a link
                folder.rmdir()

    def put(self, unfinished: Path, target: Path, keep_last: int, *, typed: bool = False) -> None:
        """Give a complete checkpoint its final name, then delete old ones, and later ones, which an
        abandoned course wrote.

        Args:
            unfinished: the folder in which it was written.
            target: its final path; a checkpoint that is there is renamed until the new one is.
            keep_last: number of checkpoints to keep.
            typed: whether the user typed the path of the folder.
        """
        folder = target.parent
        step = self.step_of(target)
        if os.path.lexists(target):
            os.replace(target, self._free_name(folder, step))
        os.replace(unfinished, target)
        flush(folder)

        checkpoints = self.listed(folder, typed=typed)
        # those of the course that goes on: no later ones, and none that a newer one replaced
        valid = [
            path
            for path in checkpoints
            if self.step_of(path) <= step and path.name.startswith(self.final)
        ]
        kept = valid[-keep_last:]
        for path in checkpoints:
            if path not in kept:
                self.delete(path)

    def _free_name(self, folder: Path, step: int) -> Path:
        """Return the first path of a replaced checkpoint of a step that is not taken."""
        number = 0
        while os.path.lexists(folder / self.replaced.format(step=step, number=number)):
            number += 1
        return folder / self.replaced.format(step=step, number=number)

    def require_sums(self, path: Path, sums: Mapping[str, str], but: str) -> None:
        """Compare a checkpoint's files with their checksums.

        Args:
            sums: the checksums by path below the checkpoint's folder.
            but: the file that holds them.

        Raises:
            DamagedError: a file differs from its checksum or has none.
            FileNotFoundError: a file is missing.
        """
        for name, expected in sums.items():
            at_most = MOST_TEXT if name in self.texts else None
            if checksum(path / name, at_most=at_most) != expected:
                raise DamagedError(f"{name} does not match its checksum")
        for file in self.own_files(path):
            name = file.relative_to(path).as_posix()
            if name not in (but, *sums):
                raise DamagedError(f"{name} has no checksum")

    def newest(
        self,
        folder: Path,
        read: Callable[[Path], T],
        warn: Callable[[str], None],
        remedy: str,
        **how: Any,
    ) -> T:
        """Return what `read` makes of the newest undamaged checkpoint.

        Args:
            folder: the folder that holds the checkpoints.
            read: reads one, or raises `DamagedError`.
            warn: called with one line for each damaged checkpoint that is skipped.
            remedy: what the user can do if all are damaged.
            how: passed to `listed`.

        Raises:
            InputError: there is no checkpoint, or all are damaged.
        """
        found = self.listed(folder, **how)
        if not found:
            raise InputError(
                f"{folder}: no checkpoint there: train first, or name another run folder"
            )

        damages: list[str] = []
        for path in reversed(found):
            try:
                value = read(path)
            except DamagedError as damage:
                damages.append(f"{path.name}: {damage}")
                continue
            for line in damages:
                warn(f"{folder}: a checkpoint is damaged ({line}): taking {path.name} instead")
            return value
        raise InputError(
            f"{folder}: every checkpoint there is damaged ({'; '.join(damages)}): {remedy}"
        )

    @property
    def _subfolders(self) -> list[str]:
        """Names of the folders in a checkpoint's folder that saving makes."""
        return sorted({name.rpartition("/")[0] for name in self.files if "/" in name})


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk. The next reader then reads from disk, not
    from the page cache.

    Windows cannot flush folders. Systems other than Linux may keep written data cached in memory.
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


def seal(folder: Path, sums: Mapping[str, str]) -> None:
    """Mark a checkpoint as complete: write `COMPLETE` with the checksums of its files, by path
    below the folder."""
    table = {"sha256": dict(sorted(sums.items()))}
    write(folder / COMPLETE, json.dumps(table, indent=1) + "\n")


def sealed_sums(folder: Path, needed: Collection[str] = ()) -> dict[str, str]:
    """Return the checksums in a checkpoint's `COMPLETE`, by path below the folder.

    Args:
        needed: names of files that must be among them.

    Raises:
        DamagedError: the file is missing, damaged, or does not list these.
    """
    try:
        sums = json.loads(read_text(folder / COMPLETE))["sha256"]
        for name, each in sums.items():
            path = Path(name)
            is_inside = path.parts and not path.is_absolute() and ".." not in path.parts
            # no file can have a name with a zero or half of a surrogate pair
            if not is_inside or not name.isprintable() or not isinstance(each, str):
                raise ValueError("it lists what is no checksum of a file of the checkpoint")
    except FileNotFoundError:
        raise DamagedError(f"{COMPLETE} is missing, so saving was not finished") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{COMPLETE} is damaged") from error
    missing = sorted(set(needed) - sums.keys())
    if missing:
        raise DamagedError(f"{COMPLETE} does not list {missing[0]}")
    return dict(sums)


def require_sealed(folder: Path) -> None:
    """Compare all files of a sealed checkpoint with their checksums.

    Raises:
        DamagedError: a file is missing or differs, or the checkpoint is not complete.
    """
    for name, expected in sealed_sums(folder).items():
        try:
            found = checksum(folder / name)
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error.strerror})") from error
        if found != expected:
            raise DamagedError(f"{name} does not match its checksum")
