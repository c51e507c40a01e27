"""The run folder: whether a run wrote it, who writes into it now, and how an earlier run's files leave it.

Only what a run writes is ever deleted. A folder that holds anything belongs to a run if its `config.json` is a run's: that file
is the first that a run writes, at once and whole, and the last that goes.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from moesaic.errors import InputError, TrainingError
from moesaic.traces.trace import FOLDER, PATTERN
from moesaic.train.checkpoint import list_checkpoints, remove_checkpoint
from moesaic.train.metrics import METRICS, WANDB_ID

try:
    import fcntl
except ImportError:  # Windows, where runs are not kept apart
    fcntl = None  # type: ignore[assignment]

CONFIG, TOKENIZER, PLAN_TABLE, HANG, LOCK = "config.json", "tokenizer.json", "plan-table.json", "hang.json", ".lock"
"""Files of a run folder, besides its metrics, checkpoints, events and traces."""
FLIGHT = "flight-recorder-rank{rank}.json"
"""What PyTorch recorded of the collectives of a rank that was given up."""
MARKS = ("out", "existing", "steps", "batch_size", "seed", "model", "data", "optimizer")
"""Fields that every version has written into `config.json`; no other program's file of that name has them."""


class RunFolder:
    """A run folder that this process has to itself, from `claim` to `release`.

    Args:
        path: where it lies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def is_a_run(self) -> bool:
        """Whether a run wrote the folder; False where it is missing or empty.

        Raises:
            InputError: if it holds anything else.
        """
        try:
            names = sorted(each.name for each in self.path.iterdir() if each.name not in _NOTHING)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise InputError(f"out={self.path}: cannot be written ({error.strerror}): choose another --out") from error
        if not names:
            return False
        if _is_marked(self.path / CONFIG):
            return True
        found = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        steps = [path.name for path in list_checkpoints(self.path / "checkpoints")]
        state = "is damaged" if CONFIG in names else "is missing"
        if not steps:
            raise InputError(
                f"out={self.path}: holds {found}, which no run wrote as far as can be told (its {CONFIG} {state}): choose "
                "another --out, or an empty folder; nothing was changed"
            )
        raise InputError(
            f"out={self.path}: holds checkpoints (the newest {steps[-1]}), but its {CONFIG} {state}: put that file back (a "
            "run with the same settings and another --out writes one), then --existing resume; or choose another --out; "
            "nothing was changed"
        )

    def claim(self) -> None:
        """Keep other processes out of the folder, which exists.

        Raises:
            InputError: if another process is in it, or it cannot be written.
        """
        try:
            self._lock = _locked(self.path / LOCK)
        except OSError as error:
            raise InputError(f"out={self.path}: cannot be written ({error.strerror}): choose another --out") from error

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
            raise InputError(f"out={self.path}: cannot be written ({error.strerror}): choose another --out") from error
        self.claim()
        if self.is_a_run():
            raise InputError(f"out={self.path}: another run has begun there meanwhile: choose another --out")

    def clear(self) -> None:
        """Delete what an earlier run wrote, but for its `config.json`; the folders of it only where nothing else is left."""
        checkpoints, events, traces = (self.path / name for name in ("checkpoints", "tensorboard", FOLDER))
        for path in (*list_checkpoints(checkpoints), *checkpoints.glob(".writing-*")):
            remove_checkpoint(path)
        own = [*events.glob("events.out.tfevents.*"), *traces.glob(PATTERN), *self.path.glob(FLIGHT.format(rank="*"))]
        for name in (TOKENIZER, PLAN_TABLE, HANG, METRICS, WANDB_ID):
            own += [self.path / name, (self.path / name).with_suffix(".writing")]
        for path in own:
            path.unlink(missing_ok=True)
        for path in (checkpoints, events, traces):
            with suppress(OSError):
                path.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder, which at every instant holds all of the old text or all of the new."""
        aside = self.path / _WRITING
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path / name)

    def require(self) -> None:
        """Make sure that the folder is still the one that was claimed.

        Raises:
            TrainingError: if it was removed, or another took its place.
        """
        if self._lock is None:
            return
        try:
            is_same = os.path.samestat(os.stat(self.path / LOCK), os.fstat(self._lock.fileno()))
        except OSError:
            is_same = False
        if not is_same or not (self.path / CONFIG).exists():
            raise TrainingError(
                f"the run folder {self.path} was removed or replaced while the run was going on: nothing more is written "
                "into it; start the run again, and leave its folder alone"
            )

    def release(self) -> None:
        """Let others in; does nothing where nobody was kept out."""
        if self._lock is None:
            return
        with suppress(OSError):
            if os.path.samestat(os.stat(self.path / LOCK), os.fstat(self._lock.fileno())):
                (self.path / LOCK).unlink()
        self._lock.close()
        self._lock = None


_WRITING = "config.writing"
_NOTHING = (LOCK, _WRITING)
"""Names that a run leaves which was killed before it wrote anything."""


def _is_marked(path: Path) -> bool:
    """Whether a file is a configuration as a run writes it, of whatever version."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(table, dict) and all(name in table for name in MARKS) and isinstance(table["model"], dict)


def _locked(path: Path) -> IO[str]:
    """Return a file that is locked and still has its name, with the owner's name in it.

    The system lets go of it when the process ends, however it ends.
    """
    while True:
        file = path.open("a+", encoding="utf-8")
        if not _lock(file):
            file.seek(0)
            owner = file.read(200).strip() or "another process"
            file.close()
            raise InputError(
                f"out={path.parent}: {owner} trains into it: wait for it or end it, or choose another --out"
            )
        with suppress(OSError):  # whoever had it may have deleted it, and a third one made it anew, while we waited
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                break
        file.close()
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _lock(file: IO[str]) -> bool:
    """Lock a file for this process; return whether nobody else has it. Where the file system knows no locks, nobody has."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
    return True
