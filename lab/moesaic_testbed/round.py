"""One run of all ranks of a bed: the supervisor starts, watches and ends them. Ranks run a command
or a function.

The parent is the user's process, which sent the request. Ranks find each other by a store, a
process of its own. A pidfd is a file descriptor that is readable once its process has ended, so one
`wait` can watch processes, connections and the parent.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from moesaic_testbed import rank as ranks
from moesaic_testbed.messages import Answer, Channel, Command, Failure, Interrupt
from moesaic_testbed.wiring import Wiring, WiringError

GRACE_SECONDS = 5.0
"""When a rank has failed: the time until the other ranks get SIGTERM, and from then until they are
killed."""
SAVE_SECONDS = 15.0
"""Time that ranks have to save after an interrupt."""
SETTLE_SECONDS = 1.0
"""Time to wait after a failure for others that may be its cause: a killed process makes its peers
fail too."""


@dataclass
class Process:
    """The process of a rank, as its supervisor tracks it."""

    rank: int
    pid: int
    handle: int
    """File descriptor (pidfd) that is readable once the process has ended."""
    line: Connection | None = None
    """Connection to a rank that runs a function; None for a command."""
    status: int | None = None
    """Status from `waitpid`, once the process has ended."""


class AbstractRound(ABC):
    """Starts ranks and watches them.

    Args:
        wiring: the bed's network.
        parent: the socket to the user's process, which may close it or interrupt the run.
        port: port of the store through which ranks find each other.
        output: file descriptors of the ranks' standard output and error.
    """

    def __init__(self, wiring: Wiring, parent: Channel, port: int, output: Sequence[int]) -> None:
        self.wiring = wiring
        self.bed = wiring.bed
        self.parent = parent
        self.port = port
        self.output = output
        self.processes: list[Process] = []
        self._changes = sorted(self.bed.changes, key=lambda change: change.at_seconds)
        self._started: float | None = None
        self._changed: set[int] = set()

    @abstractmethod
    def start_rank(self, rank: int) -> Process:
        """Start one rank."""

    @abstractmethod
    def watch(self) -> Answer:
        """Wait until all ranks have ended or failed, and return the answer."""

    def run(self) -> Answer:
        """Start all ranks, watch them, kill all that are left, and reset changed links."""
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
        """Start the clock by which links change."""
        self._started = time.monotonic()

    def await_any(self, sources: Sequence[Any], seconds: float | None = None) -> list[Any]:
        """Wait until a connection or file is readable. Changes of links that become due are made
        meanwhile.

        Args:
            sources: connections and file descriptors to wait for.
            seconds: the longest time to wait; None for no limit.

        Returns:
            the readable ones; empty after `seconds`.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            next_change = self._change_links()
            times = [at for at in (end, next_change) if at is not None]
            timeout = max(min(times) - time.monotonic(), 0.0) if times else None
            readable = wait(sources, timeout)
            has_ended = end is not None and time.monotonic() >= end
            if readable or has_ended:
                return readable

    def fork(self, child: Callable[[], None]) -> tuple[int, int]:
        """Fork a process that runs `child`, and return its number and its pidfd."""
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
        """Start the process of the store, and wait until it writes a byte into a pipe; if it dies
        instead, the pipe ends."""
        ready, tell = os.pipe()

        def serve() -> None:
            ranks.start(self.wiring.net(0), {}, "/", self.output)
            ranks.serve_store(self.port, tell)

        _, handle = self.fork(serve)
        os.close(tell)
        signal_byte = os.read(ready, 1)
        os.close(ready)
        os.close(handle)
        if not signal_byte:
            raise WiringError("the store that ranks find each other by did not start")

    def _change_links(self) -> float | None:
        """Make all changes of links that are due; return when the next one is due, on the monotonic
        clock, or None."""
        while self._changes and self._started is not None:
            due = self._started + self._changes[0].at_seconds
            if due > time.monotonic():
                return due
            change = self._changes.pop(0)
            self._changed.add(change.node)
            self.wiring.change(change.node, change.rate)
        return None


def _end_everything() -> None:
    """Kill all other processes of the bed, those included that ranks left behind, and wait for
    their end."""
    assert os.getpid() == 1, (
        "outside a process namespace of its own this would kill everything that it may"
    )
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


class CommandRound(AbstractRound):
    """Runs a command on every rank."""

    def __init__(
        self, wiring: Wiring, parent: Channel, port: int, output: Sequence[int], request: Command
    ) -> None:
        super().__init__(wiring, parent, port, output)
        self._request = request

    def start_rank(self, rank: int) -> Process:
        def child() -> None:
            environment = ranks.launcher_variables(self.bed, rank, self.port)
            environment.update(self._request.environment)
            net = self.wiring.net(self.bed.node_of(rank))
            ranks.start(net, environment, self._request.cwd, self.output)
            ranks.execute(self._request.words)

        pid, handle = self.fork(child)
        return Process(rank, pid, handle)

    def watch(self) -> Answer:
        """Wait for all ranks. If one fails, or the parent interrupts, end the others step by
        step."""
        self.start_clock()
        signals: list[tuple[float, int]] = []  # to send: (monotonic time, signal), the next first
        while True:
            running = {
                process.handle: process for process in self.processes if process.status is None
            }
            if not running:
                break
            seconds = None
            if signals:
                due, number = signals[0]
                seconds = due - time.monotonic()
                if seconds <= 0:
                    signals.pop(0)
                    self._signal(number)
                    continue
            for source in self.await_any([*running, self.parent], seconds):
                now = time.monotonic()
                if source is self.parent:
                    message, _ = self.parent.receive()
                    assert isinstance(message, Interrupt)
                    self._signal(message.signal)
                    signals = [(now + SAVE_SECONDS, signal.SIGKILL)]
                elif self._ended(running[source]) and not signals:
                    signals = [
                        (now + GRACE_SECONDS, signal.SIGTERM),
                        (now + 2 * GRACE_SECONDS, signal.SIGKILL),
                    ]
        codes = [os.waitstatus_to_exitcode(process.status or 0) for process in self.processes]
        return Answer(value=codes)

    def _ended(self, process: Process) -> bool:
        """Record the exit status of a process that has ended; return whether it failed."""
        _, process.status = os.waitpid(process.pid, 0)
        return process.status != 0

    def _signal(self, number: int) -> None:
        """Send a signal to the processes that have not ended."""
        for process in self.processes:
            if process.status is None:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # the process has not made its group yet
                    os.kill(process.pid, number)


class FunctionRound(AbstractRound):
    """Calls a function on every rank."""

    def __init__(
        self,
        wiring: Wiring,
        parent: Channel,
        port: int,
        output: Sequence[int],
        threads: int,
        function: Any,
        arguments: tuple[Any, ...],
    ) -> None:
        super().__init__(wiring, parent, port, output)
        self._threads = threads
        self._function = function
        self._arguments = arguments
        self._results: dict[int, bytes] = {}
        self._failures: list[Failure] = []

    def start_rank(self, rank: int) -> Process:
        ours, theirs = Pipe()

        def child() -> None:
            ours.close()
            environment = ranks.launcher_variables(self.bed, rank, self.port, self._threads)
            net = self.wiring.net(self.bed.node_of(rank))
            ranks.start(net, environment, os.getcwd(), self.output)
            ranks.call(rank, theirs, self._function, self._arguments, self._threads)

        pid, handle = self.fork(child)
        theirs.close()
        return Process(rank, pid, handle, ours)

    def watch(self) -> Answer:
        """Start the function when all ranks are ready, and collect their results."""
        num_ready = 0
        world = self.bed.world
        while len(self._results) < world and not self._failures:
            num_ready += self._collect(None)
            if num_ready == world:
                num_ready = 0
                self.start_clock()
                self._tell_all()
        if not self._failures:
            self._tell_all()
            return Answer(value=[self._results[rank] for rank in range(world)])
        end = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < end and len(self._failures) + len(self._results) < world:
            self._collect(max(end - time.monotonic(), 0.0))
        # the likely cause: the first process that died, else the first failure
        causes = [failure for failure in self._failures if failure.died] or self._failures
        return Answer(failure=min(causes, key=lambda failure: failure.at_seconds))

    def _collect(self, seconds: float | None) -> int:
        """Receive reports of ranks and notice which have ended; return how many became ready. Wait
        for at most `seconds`, None for no limit."""
        failed = {failure.rank for failure in self._failures}
        by_source: dict[Any, Process] = {}
        for process in self.processes:
            if process.rank not in failed and process.rank not in self._results:
                by_source[process.line] = process
                by_source[process.handle] = process
        num_ready = 0
        for source in self.await_any([*by_source, self.parent], seconds):
            if source is self.parent:
                raise EOFError("the parent hung up")
            process = by_source[source]
            message = _report_of(process)
            if message is None and source == process.handle:
                message = _failure_of_dead(process)
            if isinstance(message, ranks.Ready):
                num_ready += 1
            elif isinstance(message, ranks.Done):
                self._results[process.rank] = message.result
            elif message is not None and process.rank not in failed:
                failed.add(process.rank)  # both of its sources may be readable
                self._failures.append(message)
        return num_ready

    def _tell_all(self) -> None:
        """Tell all ranks to begin."""
        for process in self.processes:
            assert process.line is not None
            try:
                process.line.send(None)
            except BrokenPipeError:  # the rank has just died: its pidfd shows that
                continue


def _report_of(process: Process) -> Any:
    """Return a rank's report if one has arrived, else None."""
    assert process.line is not None
    try:
        return process.line.recv() if process.line.poll() else None
    except (EOFError, ConnectionResetError):
        return None


def _failure_of_dead(process: Process) -> Failure:
    """Describe how a rank ended that had not reported."""
    if process.status is None:
        _, process.status = os.waitpid(process.pid, 0)
    code = os.waitstatus_to_exitcode(process.status)
    how = f"left with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    return Failure(
        rank=process.rank,
        reason=f"{how} before it returned",
        at_seconds=time.monotonic(),
        died=True,
    )
