"""The progress display of training, and the clock of training time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moesaic.errors import in_one_line


class TrainingProgress:
    """A progress bar for a run of `steps` steps, of which `done` are done, as a context manager."""

    def __init__(
        self, steps: int, done: int, *, console: Console | None = None, label: str = "training"
    ) -> None:
        self.console = console or Console()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task(label, total=steps, completed=done, status="")
        self._label = label

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def advance(self, step: int, status: str | None = None) -> None:
        """Show that `step` steps are done, with a short status. Without a terminal, print each
        status as a line."""
        if status is not None and not self.console.is_terminal:
            self.say(f"{self._label}: step {step}, {status}")
        if status is None:  # the one that the bar shows stays
            self._progress.update(self._task, completed=step)
        else:
            self._progress.update(self._task, completed=step, status=status)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(in_one_line(line), highlight=False, markup=False, soft_wrap=True)


def status(values: dict[str, Any]) -> str:
    """Return the progress bar's text for a line of metrics. MFU is model FLOPs utilization; MaxVio,
    by how much the busiest expert exceeds the even load, is the mean over the MoE layers."""
    parts = [f"loss {values['loss']:.3f}", f"{values['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.1%}")
    violations = [layer["max_violation"] for layer in values["layers"]]
    if violations:
        parts.append(f"MaxVio {sum(violations) / len(violations):.2f}")
    return "  ".join(parts)


class Clock:
    """Counts the seconds and tokens of training.

    Args:
        seconds: seconds of training by earlier processes of the run.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        """Seconds of training so far, those of earlier processes included."""
        self._earlier = seconds
        self._tokens = 0  # of this process
        # where the current interval began
        self._marked_seconds = seconds
        self._marked_tokens = 0

    @contextmanager
    def training(self, tokens: int = 0) -> Iterator[None]:
        """Count the block's time, and `tokens`, as training."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self._tokens += tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of this process; 0 before its first step."""
        return _rate(self._tokens, self.seconds - self._earlier)

    def interval(self) -> float:
        """Return the tokens per second since the previous call."""
        speed = _rate(self._tokens - self._marked_tokens, self.seconds - self._marked_seconds)
        self._marked_tokens = self._tokens
        self._marked_seconds = self.seconds
        return speed


def _rate(tokens: int, seconds: float) -> float:
    return tokens / max(seconds, 1e-9)
