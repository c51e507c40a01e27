"""The run folder: which folders are a run's, which process writes into one now, and how an earlier run's files are
deleted.

Only files that a run wrote are ever deleted. A non-empty folder counts as a run's if its `config.json` is a run's. That
file is the first one that a run writes, atomically, and the last one deleted. Each checkpoint holds a checksummed copy
of it, and the length and checksum of every file that a run writes once or appends to: metrics, events and traces.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from moesaic.configfile import read_table
from moesaic.errors import InputError, TrainingError
from moesaic.traces.trace import FOLDER, PATTERN
from moesaic.train.checkpoint import CONFIG, TOKENIZER, find_copy, list_checkpoints, remove_checkpoint
from moesaic.train.distributed_checkpoint import checksum
from moesaic.train.metrics import METRICS, WANDB_ID

try:
    import fcntl
except ImportError:  # Windows, where run folders are not locked
    fcntl = None  # type: ignore[assignment]

CHECKPOINTS, HANG, LOCK = "checkpoints", "hang.json", ".lock"
"""Further entries of a run folder, besides its configuration, tokenizer, metrics, events and traces."""
FLIGHT = "flight-recorder-{library}-rank{rank}.json"
"""PyTorch's flight recording of the last collectives of a rank that hung, one file each for Gloo and NCCL."""
HANG_SUMS = "hang.sha256"
"""Checksums of `HANG` and of the flight recordings, in the format of the command sha256sum."""
LASTING = (METRICS, WANDB_ID, "tensorboard/events.out.tfevents.*", f"{FOLDER}/{PATTERN}")
"""Files that a run writes once or only appends to."""
MARKS = ("out", "existing", "steps", "batch_size", "seed", "model", "data", "optimizer")
"""Fields that every version has written into `config.json`; no other program's file of that name has all of them."""


class RunFolder:
    """A run folder that belongs to this process alone from `claim` to `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._digests: dict[str, tuple[int, Any]] = {}

    def is_a_run(self, *, resuming: bool = False) -> bool:
        """Return whether a run wrote the folder; False if it is missing or empty.

        Args:
            resuming: accept a lost `config.json` if a checkpoint has a copy.

        Raises:
            InputError: if the folder holds anything else.
        """
        try:
            names = sorted(entry.name for entry in self.path.iterdir() if entry.name not in _EARLY_NAMES)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unwritable(self.path, error) from error
        if not names:
            return False
        copy = find_copy(self.path / CHECKPOINTS, CONFIG)
        if is_marked(self.path / CONFIG) or (resuming and copy is not None and is_marked(copy)):
            return True
        listing = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        steps = [path.name for path in list_checkpoints(self.path / CHECKPOINTS)]
        state = "is damaged" if CONFIG in names else "is missing"
        if not steps:
            raise InputError(
                f"out={self.path}: holds {listing}, which does not look like a run (its {CONFIG} {state}): choose "
                "another --out, or an empty folder; nothing was changed"
            )
        remedy = (
            "put that file back (a run with the same settings and another --out writes one), then --existing resume"
            if copy is None else f"--existing resume takes the copy in {copy.parent.name}"
        )  # fmt: skip
        raise InputError(
            f"out={self.path}: holds checkpoints (the newest {steps[-1]}), but its {CONFIG} {state}: {remedy}; or choose "
            "another --out; nothing was changed"
        )

    def claim(self) -> None:
        """Lock an existing folder against other processes.

        Raises:
            InputError: if another process has locked it, or it is not writable.
        """
        try:
            self._lock = _locked(self.path / LOCK)
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
            raise InputError(f"out={self.path}: another run has begun there meanwhile: choose another --out")

    def clear(self) -> None:
        """Delete an earlier run's files except `config.json`, and those of its folders that are then empty."""
        checkpoints, events, traces = (self.path / name for name in (CHECKPOINTS, "tensorboard", FOLDER))
        for path in (*list_checkpoints(checkpoints), *checkpoints.glob(".writing-*")):
            remove_checkpoint(path)
        files = [*events.glob("events.out.tfevents.*"), *traces.glob(PATTERN), *self._flights()]
        for name in (TOKENIZER, HANG, HANG_SUMS, METRICS, WANDB_ID):
            files += [self.path / name, (self.path / name).with_suffix(_WRITING)]
        for path in files:
            path.unlink(missing_ok=True)
        for path in (checkpoints, events, traces):
            with suppress(OSError):
                path.rmdir()

    def write(self, name: str, data: str | bytes) -> None:
        """Write a file of the folder atomically: at every instant it holds all of the old data or all of the new."""
        temporary = (self.path / name).with_suffix(_WRITING)
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)

    def write_hang(self, data: bytes) -> None:
        """Write `HANG`, after the checksums of `HANG` and of the flight recordings."""
        sums = {path.name: checksum(path) for path in self._flights()}
        sums[HANG] = hashlib.sha256(data).hexdigest()
        self.write(HANG_SUMS, "".join(f"{value}  {name}\n" for name, value in sorted(sums.items())))
        self.write(HANG, data)

    def seal(self) -> dict[str, dict[str, Any]]:
        """Return the size in bytes and the SHA-256 of each `LASTING` file, for the next checkpoint.

        Bytes that were read in an earlier call are not read again.

        Raises:
            InputError: if a file cannot be read.
        """
        seals = {}
        for path in self._lasting():
            name = path.relative_to(self.path).as_posix()
            size, digest = self._digests.get(name, (0, hashlib.sha256()))
            try:
                with path.open("rb") as file:
                    file.seek(size)
                    while block := file.read(1 << 20):
                        digest.update(block)
                        size += len(block)
            except OSError as error:
                raise InputError(f"{path}: cannot be read ({error.strerror}): check the folder") from error
            self._digests[name] = size, digest
            seals[name] = {"bytes": size, "sha256": digest.hexdigest()}
        return seals

    def altered(self, sealed: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return one message for each file that changed or vanished since it was sealed."""
        paths = {path.relative_to(self.path).as_posix(): path for path in self._lasting()}
        problems = []
        for name, seal in sealed.items():
            try:
                if checksum(paths[name], seal["bytes"]) != seal["sha256"]:
                    problems.append(f"{paths[name]}: is not as it was: what can be read of it is kept")
            except (KeyError, OSError):
                problems.append(f"{str(self.path / name)!r:.300}: is gone, or cannot be read")
        return problems

    def _flights(self) -> list[Path]:
        return list(self.path.glob(FLIGHT.format(library="*", rank="*")))

    def _lasting(self) -> list[Path]:
        return [path for pattern in LASTING for path in sorted(self.path.glob(pattern)) if path.is_file()]

    def require(self) -> None:
        """Check that the folder is still the one that was claimed.

        Raises:
            TrainingError: if the folder was removed or replaced.
        """
        if self._lock is None:
            return
        if not _has_name(self._lock, self.path / LOCK) or not (self.path / CONFIG).exists():
            raise TrainingError(
                f"the run folder {self.path} was removed or replaced while the run was going on: nothing more is written "
                "into it; start the run again, and leave its folder alone"
            )

    def release(self) -> None:
        """Release the lock, if any."""
        if self._lock is None:
            return
        with suppress(OSError):
            if _has_name(self._lock, self.path / LOCK):
                (self.path / LOCK).unlink()
        self._lock.close()
        self._lock = None


def unwritable(path: Path, error: OSError) -> InputError:
    """Return the InputError for a run folder that cannot be written."""
    return InputError(f"out={path}: cannot be written ({error.strerror}): choose another --out")


_WRITING = ".writing"
_EARLY_NAMES = (LOCK, f"config{_WRITING}")
"""Names that a run leaves behind if it is killed before it writes anything else."""


def read_config(path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Read a configuration. If a run's is lost or does not parse, read the newest copy in its checkpoints.

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
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(table, dict) and all(name in table for name in MARKS) and isinstance(table["model"], dict)


def _locked(path: Path) -> IO[str]:
    """Return the lock file, open, locked, and with its owner written into it.

    The system releases the lock when the process ends in any way. On a file system without locks, the owner in the file
    decides. If the owner was a process of this host that is gone, the lock is stale. If it was a process of another
    host, a person must decide.
    """
    while True:
        file = path.open("a+", encoding="utf-8")
        is_ours = _lock(file)
        if not is_ours:
            file.seek(0)
            owner = _read_owner(file.read(500))
            if is_ours is False or (owner and not _is_stale(owner)):
                file.close()
                who = "process {process} on {host}, started {started},".format(**owner) if owner else "another process"
                hint = "" if is_ours is False else f" (if it has ended, delete {path}: this file system knows no locks)"
                raise InputError(
                    f"out={path.parent}: {who} trains into it: wait for it or end it, or choose another --out{hint}"
                )
        if _has_name(file, path):  # the previous owner may have deleted it, and another process recreated it
            break
        file.close()
    file.truncate(0)
    started = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    owner = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "started": started,
        "ticks": _start_ticks(os.getpid()),
    }
    file.write(json.dumps(owner))
    file.flush()
    return file


def _has_name(file: IO[str], path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _read_owner(text: str) -> dict[str, Any] | None:
    """Return who wrote a lock file; None if its text is incomplete, for example because its owner was killed while
    writing."""
    with suppress(ValueError, RecursionError):
        owner = json.loads(text)
        if isinstance(owner, dict) and owner.keys() == {"process", "host", "started", "ticks"}:
            return owner if isinstance(owner["process"], int) and 0 < owner["process"] < 2**31 else None
    return None


def _is_stale(owner: dict[str, Any]) -> bool:
    """Return whether a lock's owner was a process of this host that has ended, even if its process id is in use again."""
    if owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return _start_ticks(owner["process"]) != owner["ticks"]


def _start_ticks(process: int) -> int | None:
    """Return when a process of this host started, in clock ticks since boot; None if the system does not say."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _lock(file: IO[str]) -> bool | None:
    """Lock a file for this process. Return whether that succeeded; None if the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
        return None
    return True
