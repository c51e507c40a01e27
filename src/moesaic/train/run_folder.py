"""The run folder: whether a run wrote it, who writes into it now, and how an earlier run's files leave it.

Only what a run writes is ever deleted. A folder that holds anything belongs to a run if its `config.json` is a run's: that file
is the first that a run writes, at once and whole, and the last that goes. Each checkpoint has a copy of it under its checksums,
and the length and checksum of every file that stays or grows: metrics, events, traces.
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
except ImportError:  # Windows, where runs are not kept apart
    fcntl = None  # type: ignore[assignment]

CHECKPOINTS, HANG, LOCK = "checkpoints", "hang.json", ".lock"
"""What a run folder holds besides its configuration, tokenizer, metrics, events and traces."""
FLIGHT = "flight-recorder-{library}-rank{rank}.json"
"""What PyTorch recorded of the last collectives of a rank that was given up, over Gloo and over NCCL."""
HANG_SUMS = "hang.sha256"
"""Checksums of `HANG` and of the flight recorders' files, as the command sha256sum writes and checks them."""
LASTING = (METRICS, WANDB_ID, "tensorboard/events.out.tfevents.*", f"{FOLDER}/{PATTERN}")
"""Files that a run writes once, or to which it only adds."""
MARKS = ("out", "existing", "steps", "batch_size", "seed", "model", "data", "optimizer")
"""Fields that every version has written into `config.json`; no other program's file of that name has them."""


class RunFolder:
    """A run folder that this process has to itself, from `claim` to `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._digests: dict[str, tuple[int, Any]] = {}

    def is_a_run(self, *, resuming: bool = False) -> bool:
        """Whether a run wrote the folder; False where it is missing or empty.

        Args:
            resuming: its configuration may be lost, if a checkpoint has a copy.

        Raises:
            InputError: if it holds anything else.
        """
        try:
            names = sorted(each.name for each in self.path.iterdir() if each.name not in _NOTHING)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unwritable(self.path, error) from error
        if not names:
            return False
        copy = find_copy(self.path / CHECKPOINTS, CONFIG)
        if is_marked(self.path / CONFIG) or (resuming and copy is not None and is_marked(copy)):
            return True
        found = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        steps = [path.name for path in list_checkpoints(self.path / CHECKPOINTS)]
        state = "is damaged" if CONFIG in names else "is missing"
        if not steps:
            raise InputError(
                f"out={self.path}: holds {found}, which no run wrote as far as can be told (its {CONFIG} {state}): choose "
                "another --out, or an empty folder; nothing was changed"
            )
        back = (
            "put that file back (a run with the same settings and another --out writes one), then --existing resume"
            if copy is None else f"--existing resume takes the copy in {copy.parent.name}"
        )  # fmt: skip
        raise InputError(
            f"out={self.path}: holds checkpoints (the newest {steps[-1]}), but its {CONFIG} {state}: {back}; or choose another "
            "--out; nothing was changed"
        )

    def claim(self) -> None:
        """Keep other processes out of the folder, which exists.

        Raises:
            InputError: if another process is in it, or it cannot be written.
        """
        try:
            self._lock = _locked(self.path / LOCK)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def make(self) -> None:
        """Make the folder and claim it, unless it is claimed already.

        Raises:
            InputError: if it cannot be made, or somebody wrote into it meanwhile.
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
        """Delete what an earlier run wrote, but for its `config.json`; the folders of it only where nothing else is left."""
        checkpoints, events, traces = (self.path / name for name in (CHECKPOINTS, "tensorboard", FOLDER))
        for path in (*list_checkpoints(checkpoints), *checkpoints.glob(".writing-*")):
            remove_checkpoint(path)
        own = [*events.glob("events.out.tfevents.*"), *traces.glob(PATTERN), *self._flights()]
        for name in (TOKENIZER, HANG, HANG_SUMS, METRICS, WANDB_ID):
            own += [self.path / name, (self.path / name).with_suffix(_WRITING)]
        for path in own:
            path.unlink(missing_ok=True)
        for path in (checkpoints, events, traces):
            with suppress(OSError):
                path.rmdir()

    def write(self, name: str, data: str | bytes) -> None:
        """Write a file of the folder, which at every instant holds all of the old data or all of the new."""
        aside = (self.path / name).with_suffix(_WRITING)
        with aside.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path / name)

    def write_hang(self, data: bytes) -> None:
        """Write `HANG`, and before it the checksums of it and of what the flight recorders left."""
        sums = {path.name: checksum(path) for path in self._flights()}
        sums[HANG] = hashlib.sha256(data).hexdigest()
        self.write(HANG_SUMS, "".join(f"{value}  {name}\n" for name, value in sorted(sums.items())))
        self.write(HANG, data)

    def seal(self) -> dict[str, dict[str, Any]]:
        """Return how many bytes each file of `LASTING` has, and their SHA-256, for the checkpoint that is written next.

        What was read once is not read again.

        Raises:
            InputError: if a file cannot be read.
        """
        found = {}
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
            found[name] = {"bytes": size, "sha256": digest.hexdigest()}
        return found

    def altered(self, sealed: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return in words which files are not as they were when they were sealed."""
        there = {path.relative_to(self.path).as_posix(): path for path in self._lasting()}
        found = []
        for name, seal in sealed.items():
            try:
                if checksum(there[name], seal["bytes"]) != seal["sha256"]:
                    found.append(f"{there[name]}: is not as it was: what can be read of it is kept")
            except (KeyError, OSError):
                found.append(f"{str(self.path / name)!r:.300}: is gone, or cannot be read")
        return found

    def _flights(self) -> list[Path]:
        return list(self.path.glob(FLIGHT.format(library="*", rank="*")))

    def _lasting(self) -> list[Path]:
        return [path for pattern in LASTING for path in sorted(self.path.glob(pattern)) if path.is_file()]

    def require(self) -> None:
        """Make sure that the folder is still the one that was claimed.

        Raises:
            TrainingError: if it was removed, or another took its place.
        """
        if self._lock is None:
            return
        if not _has_name(self._lock, self.path / LOCK) or not (self.path / CONFIG).exists():
            raise TrainingError(
                f"the run folder {self.path} was removed or replaced while the run was going on: nothing more is written "
                "into it; start the run again, and leave its folder alone"
            )

    def release(self) -> None:
        """Let others in; does nothing where nobody was kept out."""
        if self._lock is None:
            return
        with suppress(OSError):
            if _has_name(self._lock, self.path / LOCK):
                (self.path / LOCK).unlink()
        self._lock.close()
        self._lock = None


def unwritable(path: Path, error: OSError) -> InputError:
    """Return the refusal of a run folder that the system does not let us write."""
    return InputError(f"out={path}: cannot be written ({error.strerror}): choose another --out")


_WRITING = ".writing"
_NOTHING = (LOCK, f"config{_WRITING}")
"""Names that a run leaves which was killed before it wrote anything."""


def read_config(path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Read a configuration; of a run's that is lost or does not parse, the copy in its newest checkpoint that has one.

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
    """Whether a file is a configuration as a run writes it, of whatever version."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(table, dict) and all(name in table for name in MARKS) and isinstance(table["model"], dict)


def _locked(path: Path) -> IO[str]:
    """Return a file that is locked and still has its name, with its owner in it.

    The system lets go of it when the process ends, however it ends. Where the file system knows no locks, the owner decides: a
    process of this host that is gone has left the lock behind, and so may one of another host have, which people must say.
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
        if _has_name(file, path):  # whoever had it may have deleted it, and a third one made it anew, while we waited
            break
        file.close()
    file.truncate(0)
    started = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    owner = {"process": os.getpid(), "host": socket.gethostname(), "started": started, "ticks": _ticks(os.getpid())}
    file.write(json.dumps(owner))
    file.flush()
    return file


def _has_name(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one that a path names."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _read_owner(text: str) -> dict[str, Any] | None:
    """Return who wrote a lock; None where that cannot be read, as where its owner was killed before it said so."""
    with suppress(ValueError, RecursionError):
        owner = json.loads(text)
        if isinstance(owner, dict) and owner.keys() == {"process", "host", "started", "ticks"}:
            return owner if isinstance(owner["process"], int) and 0 < owner["process"] < 2**31 else None
    return None


def _is_stale(owner: dict[str, Any]) -> bool:
    """Whether the owner of a lock was a process of this host that has ended, or whose number another one has now."""
    if owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return _ticks(owner["process"]) != owner["ticks"]


def _ticks(process: int) -> int | None:
    """Return when a process of this host began, in ticks since the host did; None where the system does not tell."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _lock(file: IO[str]) -> bool | None:
    """Lock a file for this process; return whether nobody else has it, None where the file system knows no locks."""
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
