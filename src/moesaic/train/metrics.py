"""Logging of a run's numbers: to `metrics.jsonl` (one object per line), and optionally to
TensorBoard.

Each line has `kind` ("train", "eval", ...) and `step`. The report and the benchmarks read no other
file.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.errors import InputError
from moesaic.files import folder_below, open_to_append, read_bytes, write

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
"""File name of the metrics, in a run folder."""
MOST_BYTES = 1 << 30
"""The most bytes of metrics that are read: some three million lines."""


class Metrics:
    """Appends lines to a run's metrics file.

    Args:
        start_step: lines of later steps are removed first, so that a resumed run has each step
            once.
        tensorboard: also write TensorBoard event files.
        say: called with a message if a line of the file is damaged. The other lines are kept.
    """

    def __init__(
        self,
        run_folder: Path,
        start_step: int,
        *,
        tensorboard: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path = run_folder / METRICS
        lines = _lines_up_to(self.path, start_step, say) if start_step else []
        self._written = {(line["kind"], line["step"]) for line in lines}
        """Kind and step of each line in the file."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            write(self.path, text)
            # Unbuffered, since closing must not retry a write that a full disk refused.
            self._file = open_to_append(self.path)
            self._opened = os.stat(self.path)  # to notice another file in its place
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._events = event_files(run_folder, start_step) if tensorboard else None

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append a line, unless there is one of this kind and step. The event files get its numbers
        too, including numbers in lists of per-layer dicts.

        Raises:
            InputError: if the disk is full, or the file cannot be written.
        """
        if (kind, step) in self._written:
            return
        line = json.dumps({"kind": kind, "step": step, **values}) + "\n"
        remaining = line.encode()
        try:
            if not os.path.samestat(os.stat(self.path), self._opened):
                raise FileNotFoundError(errno.ENOENT, "another file took its place")
            while remaining:  # an unbuffered write may write less
                num_written = self._file.write(remaining)
                remaining = remaining[num_written:]
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._written.add((kind, step))
        if self._events is not None:
            for name, value in _scalars(values):
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def flush(self) -> None:
        """Flush all lines so far to disk.

        Raises:
            InputError: if the disk is full.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Flush and close all files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def event_files(folder: Path, start_step: int) -> SummaryWriter:
    """Return a writer of event files in a run folder. Earlier events after `start_step` are purged.

    Raises:
        InputError: if the package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "tensorboard=true needs the package tensorboard: pip install tensorboard, or "
            "tensorboard=false"
        ) from error
    purge_step = start_step + 1 if start_step else None
    return SummaryWriter(str(folder_below(folder / "tensorboard")), purge_step=purge_step)


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics, in order. A truncated last line is left out.

    Raises:
        InputError: if the run has no metrics, or a line before the last is damaged.
    """
    path = run_folder / METRICS
    parsed, damages = _parsed(path)
    if damages:
        raise InputError(f"{path}: {damages[0]}: remove it")
    return parsed


def _parsed(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the parsed lines of metrics, and a description of each damaged line. A truncated last
    line is in neither."""
    try:
        lines = read_bytes(path, at_most=MOST_BYTES).splitlines()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no metrics there: name the folder of a run") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): check the folder") from error
    parsed = []
    damages = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                damages.append(f"line {number} is damaged ({error})")
            continue
        is_of_run = isinstance(values, dict) and type(values.get("step")) is int
        if is_of_run and isinstance(values.get("kind"), str):
            parsed.append(values)
        else:
            damages.append(f"line {number} is not one of a run's metrics")
    return parsed, damages


def _lines_up_to(path: Path, start_step: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the readable lines up to a step. Report damaged ones."""
    parsed, damages = _parsed(path) if path.exists() else ([], [])
    if damages:
        say(f"{path}: {damages[0]}: what can be read of it is kept")
    return [line for line in parsed if line["step"] <= start_step]


def _unwritable(path: Path, error: OSError) -> InputError:
    """Return the error that metrics could not be written."""
    reason = f"{error.strerror}: check the folder"
    if error.errno == errno.ENOSPC:
        reason = "the disk is full: free space"
    return InputError(
        f"metrics {path} could not be written, {reason}; resume from the last checkpoint then"
    )


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Return the numbers of a nested table with the paths to them, such as `layers/layer0/load`."""
    scalars: list[tuple[str, float]] = []
    for name, value in values.items():
        path = prefix + name
        if isinstance(value, bool):  # which is an int too
            continue
        if isinstance(value, int | float):
            scalars.append((path, float(value)))
        elif isinstance(value, dict):
            scalars += _scalars(value, f"{path}/")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for index, values_of_layer in enumerate(value):
                scalars += _scalars(values_of_layer, f"{path}/layer{index}/")
    return scalars
