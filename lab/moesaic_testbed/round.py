"""One run of all ranks of a bed, as its supervisor sees it: start them, watch them, end them."""

from __future__ import annotations

import os
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from moesaic_testbed import rank as ranks
from moesaic_testbed.messages import Answer, Line
from moesaic_testbed.wiring import Wiring, WiringError


@dataclass
class Process:
    """A rank, as the supervisor sees it."""

    rank: int
    pid: int
    handle: int
    """Readable when the process has ended."""
    line: Connection | None = None
    """To a rank that runs a function."""
    status: int | None = None
    """Of `waitpid`, once it has ended."""


class AbstractRound(ABC):
    """Starts ranks and watches them.

    Args:
        wiring: the bed's network.
        parent: who may hang up or interrupt meanwhile.
        port: where ranks find each other.
        output: files that are the ranks' standard output and error.
    """

    def __init__(self, wiring: Wiring, parent: Line, port: int, output: Sequence[int]) -> None:
        self.wiring, self.bed, self.parent, self.port, self.output = wiring, wiring.bed, parent, port, output
        self.processes: list[Process] = []
        self._changes = sorted(self.bed.changes, key=lambda change: change.at_seconds)
        self._started: float | None = None
        self._changed: set[int] = set()

    @abstractmethod
    def start_rank(self, rank: int) -> Process:
        """Start one rank."""

    @abstractmethod
    def watch(self) -> Answer:
        """Follow the ranks until all have ended or failed."""

    def run(self) -> Answer:
        """Start all ranks, follow them, end what is left of them, and set changed links back."""
        try:
            self._start_store()
            self.processes += [self.start_rank(rank) for rank in range(self.bed.world)]
            return self.watch()
        finally:
            _end_everything()
            for process in self.processes:
                os.close(process.handle)
                if process.line is not None:
                    process.line.close()
            for node in self._changed:
                self.wiring.change(node, None)

    def start_clock(self) -> None:
        """Begin to count the seconds after which links change."""
        self._started = time.monotonic()

    def await_any(self, things: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """Wait until one of some connections or files is readable, changing links meanwhile.

        Args:
            things: what to wait for.
            seconds: how long; None for ever.

        Returns:
            those that are readable; none of them after `seconds`.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            due = self._change_links()
            limits = [at - time.monotonic() for at in (end, due) if at is not None]
            found = wait(things, None if not limits else max(min(limits), 0.0))
            if found or (end is not None and time.monotonic() >= end):
                return found

    def fork(self, child: Callable[[], None]) -> tuple[int, int]:
        """Start a process; returns its number and a handle on it."""
        pid = os.fork()
        if pid == 0:
            try:
                child()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        return pid, os.pidfd_open(pid)

    def _start_store(self) -> None:
        ready, tell = os.pipe()

        def serve() -> None:
            ranks.start(self.wiring.net(0), {}, "/", self.output)
            ranks.serve_store(self.port, tell)

        _, handle = self.fork(serve)
        os.close(tell)
        said = os.read(ready, 1)
        os.close(ready)
        os.close(handle)
        if not said:
            raise WiringError("the store that ranks find each other by did not start")

    def _change_links(self) -> float | None:
        """Change the links that are due; returns when the next ones are, on the monotonic clock."""
        while self._changes and self._started is not None:
            at = self._started + self._changes[0].at_seconds
            if at > time.monotonic():
                return at
            change = self._changes.pop(0)
            self._changed.add(change.node)
            self.wiring.change(change.node, change.rate)
        return None


def _end_everything() -> None:
    """Kill all other processes of the bed, whatever ranks left behind among them, and wait for them."""
    assert os.getpid() == 1, "outside a process namespace of its own this would kill everything that it may"
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
