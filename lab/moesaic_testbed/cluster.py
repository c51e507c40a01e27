"""An emulated cluster from the side of whoever uses it."""

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
    Command,
    Count,
    Failure,
    Interrupt,
    Line,
    RunFunction,
    RunInside,
    output_files,
)

T = TypeVar("T")


class RankError(RuntimeError):
    """A rank failed: its number, what happened, its traceback. `__cause__` is its exception where that can be sent."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class Launcher:
    """A process that beds are forked from; it has torch imported. Several clusters can share one.

    Used as a context manager: it ends on leaving, and its beds with it.

    Args:
        with_torch: whether its beds are to run functions; False for commands only, which starts at once.
    """

    def __init__(self, with_torch: bool = True) -> None:
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-m", "moesaic_testbed.launcher", str(theirs.fileno()), str(os.getpid())]
        words.append("torch" if with_torch else "plain")
        self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._line = Line(ours)

    def open(self, bed: Bed) -> Cluster:
        """Make a bed.

        Raises:
            InputError: where this machine cannot; one line says why.
        """
        ours, theirs = socket.socketpair()
        gone, hold = os.pipe()
        try:
            self._line.say(bed, [theirs.fileno(), hold, *output_files()])
        finally:
            theirs.close()
            os.close(hold)
        made = Cluster(bed, Line(ours), gone)
        try:
            made._await()
        except (EOFError, RankError) as error:
            made.close()
            raise InputError(explain(str(error) or "its process ended")) from None
        except BaseException:
            made.close()
            raise
        return made

    def close(self) -> None:
        """End the process and its beds."""
        self._line.close()
        self._process.wait()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Cluster:
    """A running bed. Make it with `cluster`, or in a test with the fixture of that name."""

    def __init__(self, bed: Bed, line: Line, gone: int) -> None:
        self.bed = bed
        """What it emulates."""
        self._line: Line | None = line
        self._gone = gone

    def run(self, function: Callable[..., T], *args: Any, threads: int = 1) -> list[T]:
        """Call a function on every rank, each a process in its node, with `torch.distributed` (Gloo) initialised.

        All ranks start the function together, after they have connected.

        Args:
            function: defined at the top level of a module that can be imported (a test module too, or the main script with
                the usual `if __name__ == "__main__":`).
            args: its arguments; anything that pickles.
            threads: of torch, per rank.

        Returns:
            what each rank returned, by rank; anything that pickles, tensors too.

        Raises:
            InputError: for a function or arguments that do not pickle.
            RankError: if a rank raises or dies; the others are ended first. The bed can be used again.
        """
        if threads < 1:
            raise InputError(f"threads={threads}: must be at least 1")
        return [pickle.loads(result) for result in self._ask(_request(RunFunction, function, args, threads))]

    def run_inside(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function once, in the bed's own process: for what starts and disturbs ranks by itself.

        It may fork; what it leaves behind lives until the bed is closed.

        Args:
            function: of a module; its first argument is the bed's `Wiring`.
            args: the others; anything that pickles.

        Returns:
            what it returned.

        Raises:
            InputError: for a function or arguments that do not pickle.
            RankError: if it raises.
        """
        (result,) = self._ask(_request(RunInside, function, args, 1))
        returned: T = pickle.loads(result)
        return returned

    def command(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | os.PathLike[str] | None = None
    ) -> list[int]:
        """Run a command on every rank, with the environment that torchrun gives; its output passes through.

        When one rank fails, the others have 5 seconds to notice and 5 more after SIGTERM. Ctrl-C reaches the ranks, which then
        have 15 seconds to save.

        Args:
            words: the command.
            env: variables on top of this process's.
            cwd: where to run; None is here.

        Returns:
            exit codes by rank; a rank that was killed has minus its signal.
        """
        if not words:
            raise InputError("no command to run: name one")
        request = Command(words=list(words), environment=dict(env or {}), cwd=os.fspath(cwd or os.getcwd()))
        codes: list[int] = self._ask(request, interrupt=True)
        return codes

    def traffic(self) -> dict[str, Carried]:
        """Return what each end of each link has sent since the bed was made.

        Returns:
            by end: "node0 up" is what node 0 sent to its switch, "node0 down" what the switch sent to it, "node0 inside" what
            its ranks sent each other; with two levels of switches, "leaf0 up" and "leaf0 down" are of the uplinks.
        """
        carried: dict[str, Carried] = self._ask(Count())
        return carried

    def close(self) -> None:
        """End everything in the bed and wait until it is gone."""
        if self._line is None:
            return
        self._line.close()
        self._line = None
        os.read(self._gone, 1)  # nobody writes: it ends with the bed's last process
        os.close(self._gone)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, request: object, interrupt: bool = False) -> Any:
        if self._line is None:
            raise RuntimeError("this cluster is closed: make a new one")
        try:
            self._line.say(request, output_files())
            try:
                return self._await()
            except KeyboardInterrupt:
                if interrupt:
                    self._line.say(Interrupt(signal=signal.SIGINT))
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
        """Wait for an answer; returns its value.

        Raises:
            RankError: if it tells of a failure.
        """
        assert self._line is not None
        answer, _ = self._line.hear()
        assert isinstance(answer, Answer)
        if answer.failure is not None:
            raise _error(answer.failure) from _cause(answer.failure)
        return answer.value


@contextmanager
def cluster(nodes: int = 2, ranks_per_node: int = 2, *, bed: Bed | None = None, **options: Any) -> Iterator[Cluster]:
    """Emulate a cluster on this machine while the block runs.

    Args:
        nodes: of the cluster.
        ranks_per_node: processes of each node.
        bed: all of it at once, in place of the others.
        options: the other fields of `Bed`.

    Raises:
        InputError: for a bed that makes no sense, or where this machine cannot make one (`refusal` says why).
    """
    wanted = bed or Bed(nodes=nodes, ranks_per_node=ranks_per_node, **options)
    with Launcher() as launcher, launcher.open(wanted) as made:
        yield made


def refusal() -> str | None:
    """Try it: make the network of a bed of two nodes, without torch.

    Returns:
        None if that works, else one line: what is missing and what would help.
    """
    if not sys.platform.startswith("linux"):
        return f"no emulated cluster on this machine: it needs Linux, this is {sys.platform}"
    try:
        with Launcher(with_torch=False) as launcher:
            launcher.open(Bed(nodes=2, ranks_per_node=1)).close()
    except InputError as error:
        return str(error)
    return None


def _request(kind: type[RunFunction], function: Callable[..., Any], args: tuple[Any, ...], threads: int) -> RunFunction:
    try:
        call = pickle.dumps((function, args))
    except Exception as error:
        raise InputError(
            f"{function!r} cannot be sent to ranks ({error}): define it at the top level of a module, and pass "
            "arguments that pickle"
        ) from error
    main = _main_script() if b"__main__" in call else None
    return kind(call=call, main=main, path=list(sys.path), cwd=os.getcwd(), threads=threads)


def _main_script() -> dict[str, Any]:
    """Return what a new process needs to import this process's main script."""
    return {name: value for name, value in spawn.get_preparation_data("testbed").items() if name != "authkey"}


def _error(failure: Failure) -> RankError:
    who = "" if failure.rank is None else f"rank {failure.rank} "
    lines = [f"{who}{'failed: ' if failure.traceback and who else ''}{failure.reason}"]
    if failure.traceback:
        lines.append(failure.traceback.rstrip())
    return RankError("\n\n".join(lines), failure.rank)


def _cause(failure: Failure) -> BaseException | None:
    if not failure.error:
        return None
    try:
        error = pickle.loads(failure.error)
    except Exception:  # its class cannot be found here; the text says it all
        return None
    return error if isinstance(error, BaseException) else None
