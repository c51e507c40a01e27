"""The run folder: which folders are a run's, which process writes into one now, and how an earlier
run's files are deleted.

Only files that a run wrote are ever deleted. A non-empty folder counts as a run's if its
`config.json` is a run's. That file is the first one that a run writes, atomically, and the last one
deleted. Each checkpoint holds a checksummed copy of it.

A process claims a folder by a lock on a file in it (flock), into which it writes who it is, the
owner. Leftovers are half-written files of a process that was killed.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from moesaic.configfile import read_table
from moesaic.errors import InputError, TrainingError
from moesaic.files import WRITING, entries, kind_of, leftovers, open_to_append, read_text, write
from moesaic.traces.trace import FOLDER, PATTERN
from moesaic.train.checkpoint import (
    CONFIG,
    TOKENIZER,
    find_copy,
    list_checkpoints,
    remove_checkpoint,
)
from moesaic.train.metrics import METRICS

try:
    import fcntl
except ImportError:  # Windows, where run folders are not locked
    fcntl = None  # type: ignore[assignment]

CHECKPOINTS = "checkpoints"
HANG = "hang.json"
LOCK = ".lock"
"""Further entries of a run folder, besides its configuration, tokenizer, metrics, events and
traces."""
FLIGHT = "flight-recorder-{library}-rank{rank}.json"
"""PyTorch's flight recording of the last collectives of a rank that hung, one file each for Gloo
and NCCL."""
OWN_FILES = (TOKENIZER, HANG, METRICS)
"""Files that a run writes after its configuration."""
MARKS = ("out", "existing", "steps", "batch_size", "seed", "model", "data", "optimizer")
"""Fields that every version has written into `config.json`; no other program's file of that name
has all of them."""


class RunFolder:
    """A run folder that belongs to this process alone from `claim` to `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None
        """The open and locked lock file; None before `claim` and after `release`."""

    def is_a_run(self, *, resuming: bool = False) -> bool:
        """Return whether a run wrote the folder; False if it is missing or empty.

        Args:
            resuming: accept a lost `config.json` if a checkpoint has a copy.

        Raises:
            InputError: if the folder holds anything else.
        """
        try:
            # what a start that was killed early may leave
            early = {LOCK, *(path.name for path in leftovers(self.path / CONFIG))}
            names = sorted(entry.name for entry in self.path.iterdir() if entry.name not in early)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unwritable(self.path, error) from error
        if not names:
            return False
        if is_marked(self.path / CONFIG):
            return True
        copy = find_copy(self.path / CHECKPOINTS, CONFIG)
        if resuming and copy is not None and is_marked(copy):
            return True
        raise self._not_a_run(names, copy)

    def _not_a_run(self, names: list[str], copy: Path | None) -> InputError:
        """Return the error for a folder whose `config.json` is not a run's.

        Args:
            names: what the folder holds, sorted.
            copy: the newest copy of `config.json` in its checkpoints, if any.
        """
        steps = [path.name for path in list_checkpoints(self.path / CHECKPOINTS)]
        state = "is damaged" if CONFIG in names else "is missing"
        if not steps:
            listing = ", ".join(names[:4])
            if len(names) > 4:
                listing += f" and {len(names) - 4} more"
            return InputError(
                f"out={self.path}: holds {listing}, which does not look like a run (its {CONFIG} "
                f"{state}): choose another --out, or an empty folder; nothing was changed"
            )
        if copy is not None:
            remedy = f"--existing resume takes the copy in {copy.parent.name}"
        else:
            remedy = (
                "put that file back (a run with the same settings and another --out writes one), "
                "then --existing resume"
            )
        return InputError(
            f"out={self.path}: holds checkpoints (the newest {steps[-1]}), but its {CONFIG} "
            f"{state}: {remedy}; or choose another --out; nothing was changed"
        )

    def claim(self) -> None:
        """Lock an existing folder against other processes, and delete files that a killed owner has
        not finished.

        Raises:
            InputError: if another process has locked it, or it is not writable.
        """
        try:
            self._lock = _locked(self.path / LOCK)
            for name in (CONFIG, *OWN_FILES):
                for path in leftovers(self.path / name):
                    path.unlink()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def make(self) -> None:
        """Create and claim the folder, unless it is claimed already.

        Raises:
            InputError: if it cannot be created, or another run began in it meanwhile.
        """
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self.claim()
        if self.is_a_run():
            raise InputError(
                f"out={self.path}: another run has begun there meanwhile: choose another --out"
            )

    def clear(self) -> None:
        """Delete an earlier run's files except `config.json`, and those of its folders that are
        then empty."""
        checkpoints = self.path / CHECKPOINTS
        events = self.path / "tensorboard"
        traces = self.path / FOLDER
        for path in (*list_checkpoints(checkpoints), *entries(checkpoints, f"{WRITING}*")):
            remove_checkpoint(path)

        files = [*entries(events, "events.out.tfevents.*"), *entries(traces, PATTERN)]
        files += entries(self.path, FLIGHT.format(library="*", rank="*"), typed=True)
        for name in OWN_FILES:
            files += [self.path / name, *leftovers(self.path / name)]
        for path in files:
            if kind_of(path) != "a folder":
                path.unlink(missing_ok=True)
        for path in (checkpoints, events, traces):
            with suppress(OSError):  # it is missing, or holds other files
                path.rmdir()

    def write(self, name: str, data: str | bytes) -> None:
        """Write a file of the folder atomically: at every instant it holds all of the old data or
        all of the new."""
        write(self.path / name, data)

    def require(self) -> None:
        """Check that the folder is still the one that was claimed.

        Raises:
            TrainingError: if the folder was removed or replaced.
        """
        if self._lock is None:
            return
        if not _has_name(self._lock, self.path / LOCK) or not (self.path / CONFIG).exists():
            raise TrainingError(
                f"the run folder {self.path} was removed or replaced while the run was going on: "
                "nothing more is written into it; start the run again, and leave its folder alone"
            )

    def release(self) -> None:
        """Release the lock, if any."""
        if self._lock is None:
            return
        with suppress(OSError):
            # if the folder was moved away, the file of this name may be another process's
            if _has_name(self._lock, self.path / LOCK):
                (self.path / LOCK).unlink()
        self._lock.close()
        self._lock = None


def unwritable(path: Path, error: OSError) -> InputError:
    """Return the InputError for a run folder that cannot be written."""
    return InputError(f"out={path}: cannot be written ({error.strerror}): choose another --out")


def read_config(path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Read a configuration. If a run's is lost or does not parse, read the newest copy in its
    checkpoints.

    Raises:
        InputError: if there is neither.
    """
    try:
        return read_table(path)
    except InputError as error:
        copy = find_copy(path.parent / CHECKPOINTS, CONFIG) if path.name == CONFIG else None
        if copy is None:
            raise
        say(f"{error}: taking its copy in {copy.parent.name}")
        return read_table(copy)


def is_marked(path: Path) -> bool:
    """Return whether a file is a configuration that a run of any version wrote."""
    try:
        table = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return (
        isinstance(table, dict)
        and all(name in table for name in MARKS)
        and isinstance(table["model"], dict)
    )


def _locked(path: Path) -> IO[bytes]:
    """Return the lock file, open, locked, and with its owner written into it.

    The system releases the lock when the process ends in any way. On a file system without locks,
    the owner in the file decides: the lock is stale if the owner was a process of this host that is
    gone. Otherwise a person must decide.
    """
    while True:
        file = open_to_append(path, "a+b")
        has_lock = _lock(file)  # None if the file system has no locks
        if not has_lock:
            _refuse_other_owner(file, path, knows_locks=has_lock is not None)
        # the previous owner may have deleted it, and another process recreated it
        if _has_name(file, path):
            break
        file.close()
    file.truncate(0)
    started = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    owner = {"process": os.getpid(), "host": socket.gethostname(), "started": started}
    file.write(json.dumps(owner).encode())
    return file


def _refuse_other_owner(file: IO[bytes], path: Path, *, knows_locks: bool) -> None:
    """Raise InputError, and close the file, if another process owns a lock file that this one did
    not get.

    Args:
        file: the open lock file.
        path: its path.
        knows_locks: whether the file system has locks, so that somebody holds this one.
    """
    file.seek(0)
    # an owner has fewer than 500 bytes
    owner = _read_owner(file.read(500).decode(errors="replace"))
    if not knows_locks and (owner is None or _is_gone(owner)):  # left by a process that ended
        return
    file.close()
    who = "another process"
    if owner is not None:
        who = "process {process} on {host}, started {started},".format(**owner)
    hint = ""
    if not knows_locks:
        hint = f" (if it has ended, delete {path}: this file system knows no locks)"
    raise InputError(
        f"out={path.parent}: {who} trains into it: wait for it or end it, or "
        f"choose another --out{hint}"
    )


def _has_name(file: IO[bytes], path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _read_owner(text: str) -> dict[str, Any] | None:
    """Return who wrote a lock file; None if its text is incomplete, as of an owner that was killed
    while writing."""
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(owner, dict) or owner.keys() != {"process", "host", "started"}:
        return None
    process = owner["process"]
    # `os.kill` would take 0 or less for a group of processes, and no larger number
    is_process_id = isinstance(process, int) and 0 < process < 2**31
    return owner if is_process_id else None


def _is_gone(owner: dict[str, Any]) -> bool:
    """Return whether a lock's owner was a process of this host that has ended."""
    if owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(owner["process"], 0)  # sends nothing
    except ProcessLookupError:
        return True
    except OSError:  # it runs as another user
        return False
    return False


def _lock(file: IO[bytes]) -> bool | None:
    """Lock a file for this process. Return whether that succeeded; None if the file system has no
    locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # what systems say where there are no locks
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
        return None
    return True
