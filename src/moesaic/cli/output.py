"""What a command prints, when nobody can read it any more: a long command goes on without it,
others end with one line.

A reader that ends (`moesaic train | head`), an ssh session that drops its pipe, or a log on a full
disk must not cost the steps since the last checkpoint. A terminal that is gone is in
`train/signals.py`, since it sends a signal.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from moesaic.errors import InputError

NUMBERS = "; metrics.jsonl in the folder of the run has the numbers"
LASTING = {"train": NUMBERS, "demo": NUMBERS, "finetune": "", "tokenize": "", "convert": ""}
"""Commands that go on when their output cannot be written, since they write a folder, and where
else the output is."""


WIDEST = 160
"""Most columns of a line that a command prints."""


def folded(line: str) -> str:
    """Return a line of at most `WIDEST` columns; what is left follows on indented lines. One that
    is a command can still be pasted into a shell: its lines end in a backslash."""
    indent = line[: len(line) - len(line.lstrip())] + "    "
    is_command = line.lstrip().startswith(("moesaic ", "torchrun "))
    end = " \\" if is_command else ""
    lines = textwrap.wrap(
        line,
        WIDEST - len(end),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{end}\n".join(lines)


class LastingStream(io.TextIOBase):
    """A text stream that fails once at most: after the first failure, what follows goes nowhere.

    Args:
        stream: where the text goes.
        other: the stream on which one line says that this one failed; None says nothing.
        line: that line, with the reason in place of `{}`.
        ends: raise at the first failure: BrokenPipeError if the reader has gone, else InputError
            with the line.
    """

    def __init__(
        self, stream: TextIO, other: TextIO | None, line: str, *, ends: bool = False
    ) -> None:
        self._stream = stream
        self._other = other
        self._line = line
        self._ends = ends
        self.is_lost = False

    def write(self, text: str) -> int:
        """Write text, and what waits in the buffer if a line ends."""
        if not self.is_lost:
            try:
                self._stream.write(text)
                if "\n" in text:
                    self._stream.flush()
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        """Write texts one after the other."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what waits in the buffer."""
        if not self.is_lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Send what follows nowhere, what waits in the buffer included, and say so on the other
        stream."""
        self.is_lost = True
        # a stream that a test or a notebook put in place has no number
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._ends and isinstance(error, BrokenPipeError):
            raise error
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        if self._ends:
            raise InputError(self._line.format(reason)) from error
        if self._other is not None:
            with suppress(OSError, ValueError):
                self._other.write(self._line.format(reason) + "\n")
                self._other.flush()

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapped stream has: its encoding, number, buffer."""
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Return whether the text goes to a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the number of the wrapped stream's file."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The wrapped stream's encoding."""
        return self._stream.encoding


@contextmanager
def guarded_output(command: str, *, asks_for_help: bool = False) -> Iterator[None]:
    """Let a command of `LASTING` go on when its output cannot be written, and end any other in one
    line; all go on when their errors cannot be written.

    Args:
        asks_for_help: whether it prints its help alone.

    Raises:
        InputError: within the block: the output cannot be written.
        BrokenPipeError: within the block: its reader has gone.
    """
    ends = asks_for_help or command not in LASTING  # else it goes on
    given = sys.stdout, sys.stderr  # None if the process was started without one

    where_else = LASTING.get(command, "")
    # `LastingStream` puts the reason in place of {}
    goes_on = f"({{}}): it goes on without{where_else}"
    with open(os.devnull, "w") as nowhere:
        out, err = (stream or nowhere for stream in given)
        line = f"moesaic {command}: standard output cannot be written {goes_on}"
        if ends:
            line = "standard output cannot be written ({}): free space, or send it elsewhere"
        sys.stdout = LastingStream(out, err, line, ends=ends)
        line = f"moesaic {command}: standard error cannot be written {goes_on}"
        # standard output of a command that ends is its answer alone: such a line stays out of it
        sys.stderr = LastingStream(err, None if ends else out, line)

        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, LastingStream):
                    with suppress(InputError, BrokenPipeError):
                        stream.flush()
            sys.stdout, sys.stderr = given
