"""What the parent and the supervisor of a bed say to each other, over a Unix socket."""

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
    """What `multiprocessing` needs to find the functions of the parent's main script again; None where they are elsewhere."""
    path: Sequence[str]
    """The parent's `sys.path`."""
    cwd: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class RunInside(RunFunction):
    """Call a function once, in the bed's own process, with its wiring before the arguments."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Run a command on every rank."""

    words: Sequence[str]
    environment: Mapping[str, str]
    cwd: str


@dataclass(frozen=True, kw_only=True)
class Interrupt:
    """Send the ranks of the running command a signal; those that are left some seconds later are killed."""

    signal: int


@dataclass(frozen=True, kw_only=True)
class Count:
    """Say what the links have carried."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What one end of a link has sent since the bed was made."""

    bytes: int
    """With headers."""
    packets: int
    """As queued: up to 16 KiB each."""
    dropped: int
    """Packets that the queue had no room for."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What became of a rank, or of the bed where no rank is named."""

    reason: str
    """In one line."""
    rank: int | None = None
    at_seconds: float = 0.0
    """When, on the monotonic clock."""
    died: bool = False
    """Whether it ended without a word, which makes its peers fail too."""
    traceback: str = ""
    error: bytes = b""
    """The exception, pickled, where it can be."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a request."""

    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Line:
    """One end of the conversation."""

    socket: socket.socket
    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "connection", Connection(os.dup(self.socket.fileno())))

    def fileno(self) -> int:
        """Return what to wait on."""
        return self.connection.fileno()

    def say(self, message: object, files: Sequence[int] = ()) -> None:
        """Send a message, and open files with it."""
        self.connection.send_bytes(pickle.dumps((message, len(files))))
        if files:
            socket.send_fds(self.socket, [b"f"], list(files))

    def hear(self) -> tuple[Any, list[int]]:
        """Wait for a message; returns it and the files that came with it.

        Raises:
            EOFError: if the other end is gone.
        """
        message, count = pickle.loads(self.connection.recv_bytes())
        files: list[int] = []
        if count:
            _, files, _, _ = socket.recv_fds(self.socket, 1, count)
        return message, files

    def close(self) -> None:
        """Hang up."""
        self.connection.close()
        self.socket.close()


def output_files() -> list[int]:
    """Return this process's standard output and error, flushed, to be sent along."""
    sys.stdout.flush()
    sys.stderr.flush()
    return [1, 2]
