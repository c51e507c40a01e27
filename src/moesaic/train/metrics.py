"""Where the numbers of a run go: `metrics.jsonl` (one object a line) and, if wanted, trackers: TensorBoard, Weights & Biases.

Each line has `kind` ("train" or "eval") and `step`. The report and the benchmarks read nothing else.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.errors import InputError
from moesaic.train.config import TENSORBOARD

METRICS = "metrics.jsonl"
"""The file, in a run folder."""
WANDB_ID = "wandb_id.txt"
"""The file with the id of a run at Weights & Biases, in its folder."""


class Metrics:
    """Appends lines to a run's metrics.

    Args:
        start_step: lines of later steps are cut off first, so that a resumed run has each step once.
        trackers: who is told the numbers besides, as `TrainConfig.trackers` names them.
        say: is given a line where a line of the file is damaged; the others are kept.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        start_step: int,
        trackers: Sequence[str] = (),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path = run_folder / METRICS
        kept = _kept_lines(self.path, start_step, say) if start_step else []
        self._written = {(line["kind"], line["step"]) for line in kept}
        text = "".join(json.dumps(line) + "\n" for line in kept)
        aside = self.path.with_suffix(".writing")
        try:
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, self.path)
            self._file = self.path.open("ab", buffering=0)  # what a full disk refused is not tried again when it closes
            self._opened = os.stat(self.path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise _unwritable(self.path, error) from error
        self._trackers = [
            weights_and_biases(run_folder, start_step, project) if project else tensorboard(run_folder, start_step)
            for project in (tracker.partition(":")[2] for tracker in trackers)
        ]

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append a line; trackers are told its numbers, those in lists of per-layer dicts too.

        Raises:
            InputError: if the disk is full, or the file cannot be written.
        """
        try:
            if not os.path.samestat(os.stat(self.path), self._opened):
                raise FileNotFoundError(errno.ENOENT, "another file took its place")
            left = (json.dumps({"kind": kind, "step": step, **values}) + "\n").encode()
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._written.add((kind, step))
        for tracker in self._trackers:
            tracker.tell({f"{kind}/{name}": value for name, value in _scalars(values)}, step)

    def flush(self) -> None:
        """Have all lines so far on the disk.

        Raises:
            InputError: if the disk is full.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def has(self, kind: str, step: int) -> bool:
        """Whether a line of `kind` for `step` stands there already."""
        return (kind, step) in self._written

    def close(self) -> None:
        """Flush and close all files."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


@dataclass(frozen=True)
class Tracker:
    """Whoever else hears of a run's numbers."""

    tell: Callable[[dict[str, float], int], object]
    """Takes the numbers of a step, by name."""
    close: Callable[[], object]
    """Writes what is still to be written."""


def tensorboard(folder: Path, start_step: int) -> Tracker:
    """Return what writes event files into a run folder; of earlier ones what comes after `start_step` is left out.

    Raises:
        InputError: if the package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "trackers: tensorboard needs the package tensorboard: pip install tensorboard, or --trackers without it"
        ) from error
    writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=start_step + 1 if start_step else None)

    def tell(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return Tracker(tell, writer.close)


def weights_and_biases(folder: Path, start_step: int, project: str) -> Tracker:
    """Return what tells a project of Weights & Biases; a run that is resumed goes on under its id, which stands in its folder.

    Raises:
        InputError: if the package is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise InputError(
            f"trackers: wandb:{project} needs the package wandb: pip install wandb, or --trackers tensorboard"
        ) from error
    kept = folder / WANDB_ID
    known = kept.read_text(encoding="utf-8", errors="replace").strip() if start_step and kept.exists() else None
    run = wandb.init(project=project, name=folder.name, dir=str(folder), id=known, resume="allow")
    kept.write_text(f"{run.id}\n", encoding="utf-8")
    return Tracker(lambda numbers, step: run.log(numbers, step=step), run.finish)


class NoMetrics:
    """What ranks other than the first write: nothing."""

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Drop a line."""

    def flush(self) -> None:
        """Flush nothing."""

    def has(self, kind: str, step: int) -> bool:
        """Whether nothing need be written."""
        return True

    def close(self) -> None:
        """Close nothing."""


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics, in order; a last line that was cut short is left out.

    Raises:
        InputError: if the run has no metrics, or a line before the last is damaged.
    """
    path = run_folder / METRICS
    parsed, damages = _parsed(_read(path))
    if damages:
        raise InputError(f"{path}: {damages[0]}: remove it")
    return parsed


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no metrics there: name the folder of a run") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): check the folder") from error


def _parsed(data: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the lines of metrics, and what is wrong with others; a last one that was cut short is neither."""
    parsed, damages, lines = [], [], data.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                damages.append(f"line {number} is damaged ({error})")
            continue
        if isinstance(found, dict) and type(found.get("step")) is int and isinstance(found.get("kind"), str):
            parsed.append(found)
        else:
            damages.append(f"line {number} is not one of a run's metrics")
    return parsed, damages


def _kept_lines(path: Path, start_step: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the lines up to a step that can be read, and say it where others cannot."""
    data = _read(path) if path.exists() else b""
    parsed, damages = _parsed(data)
    if damages:
        say(f"{path}: {damages[0]}: what can be read of it is kept")
    return [line for line in parsed if line["step"] <= start_step]


def _unwritable(path: Path, error: OSError) -> InputError:
    reason = "the disk is full: free space" if error.errno == errno.ENOSPC else f"{error.strerror}: check the folder"
    return InputError(f"metrics {path} could not be written, {reason}; resume from the last checkpoint then")


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            found.append((prefix + name, float(value)))
        elif isinstance(value, dict):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for index, item in enumerate(value):
                found += _scalars(item, f"{prefix}{name}/layer{index}/")
    return found
