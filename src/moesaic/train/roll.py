"""The roll of a run's ranks: which process each one is, whether it still counts, and what became of it.

Every rank signs in the store that all of them reach. A process of the same machine is looked up there; of one elsewhere only
its counting tells.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from moesaic.errors import TrainingError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
SignalHandler = Callable[[int, FrameType | None], Any] | int | None
"""What `signal.signal` takes and returns."""
ANSWER_SECONDS = 10.0
"""How long the store may take for an answer."""
OF_CONNECTIONS = ("gloo", "NCCL", "connection closed by rank")
"""Words of errors that come of a connection between ranks."""


class Roll:
    """The ranks of a run, seen from one of them.

    Args:
        store: that all of them reach.
        rank: this one.
        world: how many there are.
        pause: seconds between two signs of life of a rank.
    """

    def __init__(self, store: Store, rank: int, world: int, pause: float = 1.0) -> None:
        self.store, self.rank, self.world, self._pause = store, rank, world, pause

    def sign(self) -> None:
        """Write down which process this rank is."""
        self.store.set(f"roll/process/{self.rank}", own_name())

    def count(self, beats: int) -> None:
        """Give a sign of life."""
        self.store.set(f"roll/beats/{self.rank}", str(beats))

    def fate(self, rank: int) -> str:
        """Return what is known of a rank that does not answer."""
        process = self._process(rank)
        if not process:
            return "has not started"
        if self._host(rank) == socket.gethostname():
            return _fate_here(int(process.split()[1]))
        return f"does not answer ({process}): it died, or its node is cut off"

    def dead(self) -> dict[int, str]:
        """Return ranks whose process is gone, with what is known of it.

        Raises:
            RuntimeError: if nobody can be asked, as the store is gone or cut off.
        """
        others = [rank for rank in range(self.world) if rank != self.rank]
        before = {rank: self._beats(rank) for rank in others}
        for _ in range(30):  # the system takes a moment to end a process whose connections are closed already
            dead = {rank: fate for rank in others if (fate := self.fate(rank)).startswith("died")}
            if dead:
                return dead
            time.sleep(0.1)
        elsewhere = [rank for rank in others if before[rank] and self._host(rank) != socket.gethostname()]
        if elsewhere:  # of whom only the counting tells
            time.sleep(2 * self._pause)
        return {rank: self.fate(rank) for rank in elsewhere if self._beats(rank) == before[rank]}

    def _process(self, rank: int) -> str:
        key = f"roll/process/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _beats(self, rank: int) -> str:
        key = f"roll/beats/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _host(self, rank: int) -> str:
        return self._process(rank).partition(" on ")[2]


@contextmanager
def telling(roll: Roll | None, when: str) -> Iterator[None]:
    """A stretch in which an error that comes of the death of other ranks, or of a connection to them, says so in one line.

    From the error on a process of several ignores SIGTERM: it ends anyway, and says why before.

    Args:
        roll: of the run; None for one process.
        when: what happens in the stretch.

    Raises:
        TrainingError: if it ends by an error, and other ranks are dead or a connection to them broke.
    """
    try:
        yield
    except TrainingError:
        raise
    except RuntimeError as error:
        if roll is not None:
            with suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would come before the words
        try:
            dead = {} if roll is None else roll.dead()
        except RuntimeError:
            raise error from None
        if not dead:
            if roll is None or not any(word in str(error) for word in OF_CONNECTIONS):
                raise
            raise TrainingError(
                f"rank {roll.rank} lost a connection to other ranks, whose processes live "
                f"({' '.join(str(error).split()):.200}), {when}: look at the links between their nodes"
            ) from error
        raise TrainingError(f"{_named(dead)}, {when}") from error


def heed_sigterm(roll: Roll, when: Callable[[], str]) -> SignalHandler:
    """Have SIGTERM end this process by saying which ranks are dead, as torchrun sends it once one of them is.

    It may come before this process has missed them. Where nobody is dead it has its usual effect.

    Args:
        roll: of the run.
        when: tells what happens at that time.

    Returns:
        what SIGTERM did before; None where signals cannot be handled, outside the main thread.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        dead: dict[int, str] = {}
        with suppress(ConnectionError):
            dead = answered(roll.dead, ANSWER_SECONDS)
        if dead:
            raise TrainingError(f"{_named(dead)}, {when()}")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with suppress(ValueError):
        return signal.signal(signal.SIGTERM, end)
    return None


def answered(ask: Callable[[], T], seconds: float) -> T:
    """Return what a question to the store is answered by.

    The store's own timeouts bound how long it waits for a key, not how long a cut link keeps its answer back.

    Args:
        ask: asks it.
        seconds: how long to wait; the question goes on in a thread of its own.

    Raises:
        ConnectionError: if there is no answer, or the store is gone.
    """
    found: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            found.append(ask())

    thread = threading.Thread(target=run, name="moesaic-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise ConnectionError("the store that the ranks share does not answer")
    return found[0]


def own_name() -> str:
    """Return the number and host of this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _named(dead: dict[int, str]) -> str:
    """Return one line on ranks and what became of them."""
    return ", ".join(f"rank {rank} {fate}" for rank, fate in dead.items())


def _fate_here(number: int) -> str:
    """Return what a process of this machine does."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        with suppress(ProcessLookupError):
            os.kill(number, 0)
            return f"does not answer (process {number})"
        return f"died (process {number})"
    state, code = fields[0], int(fields[-1])
    if state in "ZX":
        by = f" by {signal.Signals(code & 0x7F).name}" if code & 0x7F else ""
        return f"died{by} (process {number})"
    if state in "Tt":
        return f"is stopped (process {number}: SIGSTOP, or a debugger)"
    return f"does not answer (process {number})"
