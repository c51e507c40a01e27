"""A run of a bed that calls a function on every rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

from moesaic_testbed import rank as ranks
from moesaic_testbed.messages import Answer, Failure, Line, RunFunction
from moesaic_testbed.round import AbstractRound, Process
from moesaic_testbed.wiring import Wiring

SETTLE_SECONDS = 1.0
"""How long a failure waits for others that may be its cause: a process that was killed makes its peers fail too."""


class FunctionRound(AbstractRound):
    """Calls a function on every rank."""

    def __init__(
        self,
        wiring: Wiring,
        parent: Line,
        port: int,
        output: Sequence[int],
        request: RunFunction,
        function: Any,
        arguments: tuple[Any, ...],
    ) -> None:
        super().__init__(wiring, parent, port, output)
        self._request, self._function, self._arguments = request, function, arguments
        self._results: dict[int, bytes] = {}
        self._failures: list[Failure] = []

    def start_rank(self, rank: int) -> Process:
        ours, theirs = Pipe()
        threads = self._request.threads

        def child() -> None:
            ours.close()
            environment = ranks.launcher_variables(self.bed, rank, self.port, threads)
            ranks.start(self.wiring.net(self.bed.node_of(rank)), environment, self._request.cwd, self.output)
            ranks.call(rank, theirs, self._function, self._arguments, threads)

        pid, handle = self.fork(child)
        theirs.close()
        return Process(rank, pid, handle, ours)

    def watch(self) -> Answer:
        """Let ranks go when all are ready, and collect what they return."""
        num_ready, world = 0, self.bed.world
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
        return Answer(failure=min(self._failures, key=lambda failure: (not failure.died, failure.at_seconds)))

    def _collect(self, seconds: float | None) -> int:
        """Hear what ranks say and which of them ended; returns how many became ready."""
        told = {failure.rank for failure in self._failures} | set(self._results)
        left = [process for process in self.processes if process.rank not in told]
        by_thing = {thing: process for process in left for thing in (process.line, process.handle)}
        num_ready = 0
        for thing in self.await_any([*by_thing, self.parent], seconds):
            if thing is self.parent:
                raise EOFError("the parent hung up")
            process = by_thing[thing]
            message = _heard(process) or (_death(process) if thing == process.handle else None)
            if isinstance(message, ranks.Ready):
                num_ready += 1
            elif isinstance(message, ranks.Done):
                self._results[process.rank] = message.result
            elif message is not None and process.rank not in {failure.rank for failure in self._failures}:
                self._failures.append(message)
        return num_ready

    def _tell_all(self) -> None:
        for process in self.processes:
            assert process.line is not None
            try:
                process.line.send(None)
            except BrokenPipeError:  # it died just now: its handle says so
                continue


def _heard(process: Process) -> Any:
    """Return what a rank said, if it said something."""
    assert process.line is not None
    try:
        return process.line.recv() if process.line.poll() else None
    except (EOFError, ConnectionResetError):
        return None


def _death(process: Process) -> Failure:
    """Say how a rank ended that had not reported."""
    if process.status is None:
        _, process.status = os.waitpid(process.pid, 0)
    code = os.waitstatus_to_exitcode(process.status)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    return Failure(rank=process.rank, reason=f"{how} before it returned", at_seconds=time.monotonic(), died=True)
