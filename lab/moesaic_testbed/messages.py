"""The messages between the user's process and the supervisor of a bed, over a Unix socket."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunFunction:
    """Call a function on every rank."""

    call: bytes
    """The function and its arguments, pickled."""
    main: Mapping[str, Any] | None
    """Data with which `multiprocessing` imports the parent's main script again; None if the call
    does not use the script."""
    path: Sequence[str]
    """The parent's `sys.path`."""
    cwd: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class RunInside(RunFunction):
    """Call a function once, in the bed's own process, with the bed's `Wiring` as first argument."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Run a command on every rank."""

    words: Sequence[str]
    environment: Mapping[str, str]
    cwd: str


@dataclass(frozen=True, kw_only=True)
class Interrupt:
    """Send a signal to the ranks of the running command; ranks that still run `SAVE_SECONDS` later
    are killed."""

    signal: int


@dataclass(frozen=True, kw_only=True)
class Count:
    """Return the traffic of all links."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """The traffic that one end of a link has sent since the bed was started."""

    bytes: int
    """Bytes with headers."""
    packets: int
    """Packets as queued, of up to 16 KiB each."""
    dropped: int
    """Packets that were dropped because the queue was full."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a rank, or of the bed itself if `rank` is None."""

    reason: str
    """The reason in one line."""
    rank: int | None = None
    at_seconds: float = 0.0
    """Time of the failure on the monotonic clock."""
    died: bool = False
    """Whether the process ended without a report, which makes its peers fail too."""
    traceback: str = ""
    error: bytes = b""
    """The pickled exception; empty if it does not pickle."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a request: a value or a failure."""

    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Channel:
    """One end of the socket between the user's process and the supervisor."""

    socket: socket.socket
    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "connection", Connection(os.dup(self.socket.fileno())))

    def fileno(self) -> int:
        """Return the file descriptor to wait on for messages."""
        return self.connection.fileno()

    def send(self, message: object, files: Sequence[int] = ()) -> None:
        """Send a message together with open files."""
        self.connection.send_bytes(pickle.dumps((message, len(files))))
        if files:
            socket.send_fds(self.socket, [b"f"], list(files))

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message and return it with the descriptors of files that were sent along.

        Raises:
            EOFError: if the other end is closed.
        """
        message, count = pickle.loads(self.connection.recv_bytes())
        files: list[int] = []
        if count:
            _, files, _, _ = socket.recv_fds(self.socket, 1, count)
        return message, files

    def close(self) -> None:
        """Close this end."""
        self.connection.close()
        self.socket.close()


def output_files() -> list[int]:
    """Flush standard output and error and return their file descriptors, to be sent with a
    message."""
    sys.stdout.flush()
    sys.stderr.flush()
    return [1, 2]
