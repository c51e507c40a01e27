"""A run of a bed in which every rank is a command."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from moesaic_testbed import rank as ranks
from moesaic_testbed.messages import Answer, Command, Interrupt, Line
from moesaic_testbed.round import AbstractRound, Process
from moesaic_testbed.wiring import Wiring

GRACE_SECONDS = 5.0
"""How long the others have after a rank has failed, and again after they were told to end."""
SAVE_SECONDS = 15.0
"""How long ranks have to save after an interrupt."""


class CommandRound(AbstractRound):
    """Runs a command on every rank."""

    def __init__(self, wiring: Wiring, parent: Line, port: int, output: Sequence[int], request: Command) -> None:
        super().__init__(wiring, parent, port, output)
        self._request = request

    def start_rank(self, rank: int) -> Process:
        def child() -> None:
            environment = ranks.launcher_variables(self.bed, rank, self.port) | dict(self._request.environment)
            ranks.start(self.wiring.net(self.bed.node_of(rank)), environment, self._request.cwd, self.output)
            ranks.execute(self._request.words)

        pid, handle = self.fork(child)
        return Process(rank, pid, handle)

    def watch(self) -> Answer:
        """Wait for all; when one fails, or the parent interrupts, the others are ended step by step."""
        self.start_clock()
        steps: list[tuple[float, int]] = []
        while left := {process.handle: process for process in self.processes if process.status is None}:
            seconds = steps[0][0] - time.monotonic() if steps else None
            if seconds is not None and seconds <= 0:
                self._signal(steps.pop(0)[1])
                continue
            for thing in self.await_any([*left, self.parent], seconds):
                now = time.monotonic()
                if thing is self.parent:
                    message, _ = self.parent.hear()
                    assert isinstance(message, Interrupt)
                    self._signal(message.signal)
                    steps = [(now + SAVE_SECONDS, signal.SIGKILL)]
                elif self._ended(left[thing]) and not steps:
                    steps = [(now + GRACE_SECONDS, signal.SIGTERM), (now + 2 * GRACE_SECONDS, signal.SIGKILL)]
        return Answer(value=[os.waitstatus_to_exitcode(process.status or 0) for process in self.processes])

    def _ended(self, process: Process) -> bool:
        """Take note of how a process ended; returns whether it failed."""
        _, process.status = os.waitpid(process.pid, 0)
        return process.status != 0

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.status is None:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # it has not come to make its group
                    os.kill(process.pid, number)
