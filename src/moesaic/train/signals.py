"""The signals that end a run: which they are, what is printed when one comes outside of a step, a
terminal that is gone.

Imports no torch, since a signal may come while torch is imported.
"""

from __future__ import annotations

import os
import signal
import stat
from contextlib import suppress
from types import FrameType
from typing import Any

ENDS = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that ask a run to save and end, besides SIGINT. A terminal or an ssh session that
closes sends SIGHUP."""


class Again:
    """The handler of a signal that has come once, and asked a run to save and end; a second one has
    the effect that it had before."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._before)
        os.kill(os.getpid(), number)


def is_ignored(kind: signal.Signals) -> bool:
    """Return whether this process was started to ignore a hang-up, as by nohup."""
    return kind.name == "SIGHUP" and signal.getsignal(kind) is signal.SIG_IGN


def say_ends(command: str) -> None:
    """Print a line, which `command` begins, before one of `ENDS` ends this process while no step
    runs; in a step other handlers take these signals, and the run saves instead."""

    def end(number: int, frame: FrameType | None) -> None:
        end_by(number, command)

    for kind in ENDS:
        if signal.getsignal(kind) is signal.SIG_DFL:
            with suppress(ValueError):  # outside the main thread, signals cannot be handled
                signal.signal(kind, end)


def end_by(number: int, command: str, *, says: bool = True) -> None:
    """End this process by a signal as if nothing handled it, after a line if `says`."""
    if says:
        line = (
            f"{command}: ended by {signal.Signals(number).name} without saving: checkpoints that "
            "were saved stay\n"
        )
        with suppress(OSError):  # the terminal may be gone
            os.write(2, line.encode())
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def leave_terminal() -> None:
    """Let what is printed from now on go nowhere if it went to a terminal that is gone."""
    for stream in (1, 2):  # standard output and standard error
        with suppress(OSError):
            # a terminal is a character device, and no terminal any more once it has hung up
            is_device = stat.S_ISCHR(os.fstat(stream).st_mode)
            if is_device and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
