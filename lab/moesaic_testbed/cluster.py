"""The user's interface to emulated clusters: `cluster`, `Cluster` and `Launcher`.

A bed is one emulated cluster: its description (`Bed`) and the processes that emulate it. This
process starts a launcher, which forks the processes of each bed; requests and answers go over a
socket per bed (`messages.py`).
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any, TypeVar

from moesaic.errors import InputError
from moesaic_testbed.bed import Bed
from moesaic_testbed.kernel import explain
from moesaic_testbed.messages import (
    Answer,
    Carried,
    Channel,
    Command,
    Count,
    Failure,
    Interrupt,
    RunFunction,
    RunInside,
    output_files,
)

T = TypeVar("T")


class RankError(RuntimeError):
    """A rank failed. The message has its number, the reason and its traceback; `__cause__` is its
    exception if it pickles."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class Launcher:
    """A process with torch imported, from which beds are forked. Several clusters can share one
    launcher.

    It is a context manager: leaving the block ends the process and all its beds.

    Args:
        with_torch: import torch, which beds need to run functions. False starts at once, but its
            beds run only commands.
    """

    def __init__(self, with_torch: bool = True) -> None:
        ours, theirs = socket.socketpair()
        words = [
            sys.executable,
            "-m",
            "moesaic_testbed.launcher",
            str(theirs.fileno()),
            str(os.getpid()),
            "torch" if with_torch else "plain",
        ]
        self._process = subprocess.Popen(
            words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._channel = Channel(ours)

    def open(self, bed: Bed) -> Cluster:
        """Start a bed and return its cluster.

        Raises:
            InputError: if this machine cannot emulate it; one line says why.
        """
        ours, theirs = socket.socketpair()
        # the bed's last process holds the writing end: reading ends when all are gone
        gone, hold = os.pipe()
        try:
            self._channel.send(bed, [theirs.fileno(), hold, *output_files()])
        finally:
            theirs.close()
            os.close(hold)
        opened = Cluster(bed, Channel(ours), gone)
        try:
            opened._await()
        except (EOFError, RankError) as error:
            opened.close()
            raise InputError(explain(str(error) or "its process ended")) from None
        except BaseException:
            opened.close()
            raise
        return opened

    def close(self) -> None:
        """End the process and all its beds."""
        self._channel.close()
        self._process.wait()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Cluster:
    """A running bed. Create it with `cluster`, or in a test with the fixture of that name."""

    def __init__(self, bed: Bed, channel: Channel, gone: int) -> None:
        self.bed = bed
        """The description of the emulated cluster."""
        self._channel: Channel | None = channel
        self._gone = gone

    def run(self, function: Callable[..., T], *args: Any, threads: int = 1) -> list[T]:
        """Call a function on every rank, with `torch.distributed` (Gloo) initialised. Each rank is
        a process of its node.

        All ranks start the function together, after they have connected.

        Args:
            function: a function at the top level of an importable module. A test module works too,
                and the main script if it has the usual `if __name__ == "__main__":`.
            args: the function's arguments; they must pickle.
            threads: number of torch threads per rank.

        Returns:
            the result of each rank, by rank. Results must pickle; tensors do.

        Raises:
            InputError: for a function or arguments that do not pickle.
            RankError: if a rank raises or dies; the other ranks are ended first. The bed can be
                used again.
        """
        if threads < 1:
            raise InputError(f"threads={threads}: must be at least 1")
        results = self._ask(_request(RunFunction, function, args, threads))
        return [pickle.loads(result) for result in results]

    def run_inside(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function once, in the bed's own process. Use it for functions that start and
        disturb ranks themselves.

        The function may fork; its children live until the bed is closed.

        Args:
            function: a function at the top level of an importable module; its first argument is the
                bed's `Wiring`.
            args: the further arguments; they must pickle.

        Returns:
            the function's result.

        Raises:
            InputError: for a function or arguments that do not pickle.
            RankError: if the function raises.
        """
        (result,) = self._ask(_request(RunInside, function, args, 1))
        returned: T = pickle.loads(result)
        return returned

    def command(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> list[int]:
        """Run a command on every rank, with the environment that torchrun sets. The command's
        output is shown unchanged.

        When one rank fails, the others get SIGTERM after 5 seconds and are killed after 5 more.
        Ctrl-C is passed on to the ranks, which then have 15 seconds to save.

        Args:
            words: the command and its arguments.
            env: environment variables, in addition to those of this process.
            cwd: the working directory; None for the current one.

        Returns:
            exit codes by rank; minus the signal's number for a rank that was killed.
        """
        if not words:
            raise InputError("no command to run: name one")
        request = Command(
            words=list(words), environment=dict(env or {}), cwd=os.fspath(cwd or os.getcwd())
        )
        codes: list[int] = self._ask(request, interrupt=True)
        return codes

    def traffic(self) -> dict[str, Carried]:
        """Return how much each end of each link has sent since the bed was started.

        Returns:
            the traffic by end: "node0 up" from node 0 to the switch, "node0 down" from the switch
            to node 0, "node0 inside" between the ranks of node 0.
        """
        carried: dict[str, Carried] = self._ask(Count())
        return carried

    def close(self) -> None:
        """End all processes of the bed and wait until they are gone."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        os.read(self._gone, 1)  # nobody writes: it ends with the bed's last process
        os.close(self._gone)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, request: object, interrupt: bool = False) -> Any:
        """Send a request to the bed and return its answer; with `interrupt`, pass Ctrl-C on to the
        ranks."""
        if self._channel is None:
            raise RuntimeError("this cluster is closed: make a new one")
        try:
            self._channel.send(request, output_files())
            try:
                return self._await()
            except KeyboardInterrupt:
                if interrupt:
                    self._channel.send(Interrupt(signal=signal.SIGINT))
                    self._await()
                raise
        except RankError:
            raise
        except EOFError:
            self.close()
            raise RuntimeError("the bed ended: its process was killed") from None
        except BaseException:
            self.close()
            raise

    def _await(self) -> Any:
        """Wait for an answer and return its value.

        Raises:
            RankError: if the answer reports a failure.
        """
        assert self._channel is not None
        answer, _ = self._channel.receive()
        assert isinstance(answer, Answer)
        if answer.failure is not None:
            raise _error(answer.failure) from _cause(answer.failure)
        return answer.value


@contextmanager
def cluster(
    nodes: int = 2, ranks_per_node: int = 2, *, bed: Bed | None = None, **options: Any
) -> Iterator[Cluster]:
    """Emulate a cluster on this machine while the block runs.

    Args:
        nodes: number of nodes.
        ranks_per_node: processes per node.
        bed: the whole description; replaces all other arguments.
        options: the other fields of `Bed`.

    Raises:
        InputError: for an invalid bed, or if this machine cannot emulate clusters (`refusal` says
            why).
    """
    described = bed or Bed(nodes=nodes, ranks_per_node=ranks_per_node, **options)
    with Launcher() as launcher, launcher.open(described) as opened:
        yield opened


def refusal() -> str | None:
    """Return why this machine cannot emulate clusters, and what would help, in one line; None if it
    can.

    This is tested by creating the network of two nodes, without torch.
    """
    if not sys.platform.startswith("linux"):
        return f"no emulated cluster on this machine: it needs Linux, this is {sys.platform}"
    try:
        with Launcher(with_torch=False) as launcher:
            launcher.open(Bed(nodes=2, ranks_per_node=1)).close()
    except InputError as error:
        return str(error)
    return None


def _request(
    kind: type[RunFunction], function: Callable[..., Any], args: tuple[Any, ...], threads: int
) -> RunFunction:
    """Return the request to run a function, which must pickle."""
    try:
        call = pickle.dumps((function, args))
    except Exception as error:
        raise InputError(
            f"{function!r} cannot be sent to ranks ({error}): define it at the top level of a "
            "module, and pass arguments that pickle"
        ) from error
    main = _main_script() if b"__main__" in call else None
    return kind(call=call, main=main, path=list(sys.path), cwd=os.getcwd(), threads=threads)


def _main_script() -> dict[str, Any]:
    """Return the data with which a new process can import this process's main script."""
    return {
        name: value
        for name, value in spawn.get_preparation_data("testbed").items()
        if name != "authkey"
    }


def _error(failure: Failure) -> RankError:
    """Return the error for a failure."""
    who = ""
    if failure.rank is not None:
        # without a traceback, the reason says how the rank ended, as in "was killed by SIGKILL"
        who = f"rank {failure.rank} failed: " if failure.traceback else f"rank {failure.rank} "
    paragraphs = [f"{who}{failure.reason}"]
    if failure.traceback:
        paragraphs.append(failure.traceback.rstrip())
    return RankError("\n\n".join(paragraphs), failure.rank)


def _cause(failure: Failure) -> BaseException | None:
    """Return the exception of a failure, if it can be read here."""
    if not failure.error:
        return None
    try:
        error = pickle.loads(failure.error)
    except Exception:  # its class cannot be imported here; the message has its traceback
        return None
    return error if isinstance(error, BaseException) else None
