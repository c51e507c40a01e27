"""Let the n-th write of a command fail, and look at what it leaves behind.

A command that writes something to go on from is tried with every n, other commands with their
first, middle and last write. A write is any system call that makes, fills, flushes or renames a
file, or prints; see `moesaic_lab.system_calls`. It fails once because the disk is full or broken,
or from there on; a stream also because its reader has gone. Afterwards nothing may be half-written
or lost, nothing may lie outside the names that the command was given, and the same command must
then do what it does undisturbed.
"""

from __future__ import annotations

import errno
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moesaic.cli import main
from moesaic.cli.output import LASTING
from moesaic.testing.runner import renew_thread_pool
from moesaic_lab.fuzz.examples import GOES_ON, Example, hashes, named_examples
from moesaic_lab.fuzz.places import PRELOAD, Place
from moesaic_lab.system_calls import STREAMS, Watched, Write, watched

MOST_SECONDS = 120.0
"""A command has no end if it takes more processor time, or takes none and waits for so long."""
READER_GONE = 141
"""The exit code of a command whose reader has gone."""
UNFINISHED = (".writing-", ".tmp", ".incomplete")
"""Parts of the names of files that are being written."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A way in which a write fails."""

    name: str
    number: int
    """The number of the error."""
    stays: bool
    """Whether all later writes to the same stream, or to any file, fail too."""


OF_FILES = (
    Failure(name="no space", number=errno.ENOSPC, stays=False),
    Failure(name="broken disk", number=errno.EIO, stays=False),
    Failure(name="no space from there on", number=errno.ENOSPC, stays=True),
)
OF_STREAMS = (
    Failure(name="reader gone", number=errno.EPIPE, stays=True),
    Failure(name="no space", number=errno.ENOSPC, stays=False),
    Failure(name="broken disk", number=errno.EIO, stays=False),
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended, and what it wrote."""

    watched: Watched
    out: str
    """What it printed on standard output."""
    err: str
    """What it printed on standard error."""

    @property
    def code(self) -> int | None:
        """Its exit code; None if it had no end."""
        return self.watched.code


class Failing:
    """Decides that the n-th write fails.

    Args:
        number: n; 0 lets every write take place.
    """

    def __init__(self, number: int, failure: Failure) -> None:
        self._number = number
        self._failure = failure
        self.write: Write | None = None
        """The write that failed, once it has."""

    def __call__(self, write: Write) -> int:
        """Return the error of a write, or 0."""
        if write.number == self._number:
            self.write = write
            return self._failure.number
        if self.write is None or not self._failure.stays:
            return 0
        if self.write.path in STREAMS:
            fails_too = write.path == self.write.path
        else:
            fails_too = write.path not in STREAMS  # a full disk is full for all files
        return self._failure.number if fails_too else 0


def rows(
    bases: Path, told: Callable[[str], object], names: Sequence[str], **how: int
) -> list[dict[str, Any]]:
    """Return the rows of some commands, from a new process that imports what they need once; see
    `row`."""
    found: list[dict[str, Any]] = in_new_process(partial(_rows, bases, names, how), told)
    return found


def _rows(
    bases: Path, names: Sequence[str], how: Mapping[str, int], told: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Return the rows of some commands."""
    return [row(bases, name, told, **how) for name in names]


def in_new_process(
    function: Callable[[Callable[[str], object]], Any], told: Callable[[str], object]
) -> Any:
    """Return what a function returns in a new process of a single thread, which has imported what
    commands need.

    Args:
        function: gets a function that tells what is tried.
        told: called with what it tells.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(theirs, function))
    process.start()
    theirs.close()
    try:
        while True:
            is_result, message = ours.recv()
            if isinstance(message, Exception):
                raise message
            if is_result:
                return message
            told(message)
    finally:
        process.kill()
        process.join()


def _send_result(line: Connection, function: Callable[[Callable[[str], object]], Any]) -> None:
    """Send what a function tells, and then what it returns, or the error that prevents it."""
    for module in PRELOAD:
        importlib.import_module(module)
    sys.modules["torch"].set_num_threads(1)

    def tell(text: str) -> None:
        """Send what is tried."""
        line.send((False, text))

    try:
        line.send((True, function(tell)))
    except Exception as error:
        line.send((True, error))
    signal.pause()  # the parent kills this process


def row(
    bases: Path, name: str, told: Callable[[str], object], *, every: int = 1, first: int = 0
) -> dict[str, Any]:
    """Run a command once for each write and each way in which it fails.

    Must be called in a process of a single thread that has imported what the command needs.

    Args:
        bases: a folder that `readers.make_bases` has filled.
        name: a key of `named_examples`.
        told: called with what is tried, before it is.
        every: try only one of so many failures, from the number `first` on.

    Returns:
        a row as of `kinds.row`, with the number of the command's "writes".
    """
    started = time.monotonic()
    example = named_examples()[name]
    place = Place(bases, example)
    undisturbed = run(place.made(), example.words, Failing(0, OF_FILES[0]))
    assert undisturbed.code == 0, f"{name}: {undisturbed.out} {undisturbed.err}"
    writes = undisturbed.watched.writes
    expected = example.wrote(place.folder)
    whole = hashes(place.folder, example.out)
    crashes: dict[str, str] = {}
    strange = outside(place, writes)
    if strange:
        crashes["undisturbed"] = f"wrote outside: {strange}"

    tries = list(_tries(example, writes))[first::every]
    for number, failure in tries:
        about = f"write {number} of {len(writes)}, {failure.name}"
        told(f"writes of {name}: {about}")
        failing = Failing(number, failure)
        before = hashes(place.made(), example.out)
        ended = run(place.folder, example.words, failing)
        problem = problem_of(place, ended, failing.write, (before, whole, expected))
        if problem:
            crashes[f"{about} ({place.shown(failing.write)})"] = problem
    place.remove()
    return {
        "name": f"writes of {name}",
        "inputs": len(tries),
        "edited": 0,
        "refused": 0,
        "writes": len(writes),
        "seconds": round(time.monotonic() - started, 1),
        "crashes": crashes,
    }


def _tries(example: Example, writes: Sequence[Write]) -> Iterator[tuple[int, Failure]]:
    """Yield the number of each write that fails, and how."""
    chosen: Sequence[Write] = writes
    if writes and example.command not in GOES_ON:
        last = len(writes) - 1
        first_middle_last = sorted({0, last // 2, last})
        chosen = [writes[place] for place in first_middle_last]
    for write in chosen:
        failures = OF_STREAMS if write.path in STREAMS else OF_FILES
        for failure in failures:
            yield write.number, failure


def problem_of(
    place: Place,
    ended: Ended,
    failed: Write | None,
    known: tuple[Mapping[str, str], Mapping[str, str], object],
) -> str:
    """Return what is wrong with how a disturbed command ended, or with what it left; "" if nothing
    is.

    Args:
        known: the hashes of the files before, those after an undisturbed command, and what that
            wrote.
    """
    example = place.example
    before, whole, expected = known
    problem = _ending(example, ended, failed)
    if problem:
        return problem
    strange = outside(place, ended.watched.writes)
    if strange:
        return f"wrote outside: {strange}"
    faults = [*example.faults(place.folder), *_halves(place, before, whole)]
    if faults:
        return f"code {ended.code}: {faults[0]}"
    if ended.code == 0:
        return "" if example.wrote(place.folder) == expected else "code 0, and other results"
    again = run(place.folder, example.words_again(place.folder), Failing(0, OF_FILES[0]))
    if again.code != 0:
        return f"does not go on: {again.err[-300:]}"
    if example.wrote(place.folder) != expected:
        return "goes on to other results"
    return ""


def _ending(example: Example, ended: Ended, failed: Write | None) -> str:
    """Return what is wrong with a command's exit code and its lines, or ""; `failed` is the write
    that failed, if one did."""
    if ended.code is None:
        return "had no end"
    output = ended.out + ended.err
    if "Traceback (most recent call last)" in output or "Exception ignored" in output:
        return f"code {ended.code}: {output[-1500:]}"

    lost_stream = failed.path if failed is not None and failed.path in STREAMS else ""
    if lost_stream and example.command in LASTING:  # which go on without their output
        return "" if ended.code == 0 else f"code {ended.code} for a lost stream: {output[-300:]}"
    codes = (0, 1, 2, READER_GONE) if lost_stream else (0, 1, 2)
    if ended.code not in codes:
        return f"code {ended.code}: {output[-300:]}"

    is_refusal = ended.code in (1, 2)
    refusals = [
        line for line in ended.err.splitlines() if line.startswith(f"moesaic {example.command}: ")
    ]
    # with standard error lost, the line is lost too
    if is_refusal and len(refusals) != 1 and lost_stream != STREAMS[2]:
        return f"code {ended.code} with {len(refusals)} lines: {ended.err[-500:]}"
    return ""


def _halves(place: Place, before: Mapping[str, str], whole: Mapping[str, str]) -> Iterator[str]:
    """Yield each file of a command's output that is neither as before nor whole.

    Args:
        before: the hashes of the files before the command, by name.
        whole: those after an undisturbed one.
    """
    for name, value in hashes(place.folder, place.example.out).items():
        if any(part in name for part in UNFINISHED) and name not in before:
            yield f"{name} is left over"
        elif place.example.may_differ(name):
            continue
        elif value not in (before.get(name), whole.get(name)):
            yield f"{name} is half-written"
    for path in place.folder.glob(".writing-*"):
        yield f"{path.name} is left over"


def outside(place: Place, writes: Sequence[Write]) -> str:
    """Return the first path that a command wrote without having been given it; "" for none."""
    for write in writes:
        if write.path not in STREAMS and not place.is_given(write.path):
            return place.shown(write)
    return ""


def run(
    folder: Path,
    words: Sequence[str],
    decide: Callable[[Write], int],
    command: Callable[[Sequence[str]], int] | None = None,
) -> Ended:
    """Run a command in a process that is forked from this one, in a folder, and decide on its
    writes.

    Args:
        command: gets the words and returns the exit code; None for the command line itself.
    """
    with (
        (folder.parent / "stdout").open("w+b") as out,
        (folder.parent / "stderr").open("w+b") as err,
    ):
        streams = (out.fileno(), err.fileno())
        child = partial(_command, command or main.main, words, folder, streams)
        found = watched(child, decide, MOST_SECONDS)
        out.seek(0)
        err.seek(0)
        return Ended(
            watched=found,
            out=out.read().decode("utf-8", "replace"),
            err=err.read().decode("utf-8", "replace"),
        )


def _command(
    command: Callable[[Sequence[str]], int],
    words: Sequence[str],
    folder: Path,
    streams: Sequence[int],
) -> int:
    """Run a command in this process; return its exit code, as an interpreter would end with it.

    Args:
        streams: file descriptors for standard output and standard error.
    """
    gc.freeze()  # collections then skip what is shared with the parent
    renew_thread_pool()
    out, err = streams
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(folder)
    sys.dont_write_bytecode = True  # of modules that the command imports late
    tempfile.tempdir = None
    os.environ |= {"TMPDIR": str(folder.parent / "tmp"), "HOME": str(folder.parent / "home")}
    # what a new interpreter has
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        code = command(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 3  # with which no command ends on its own
    try:
        sys.stdout.flush()
    except OSError:  # what the interpreter says at its end
        sys.stderr.write("Exception ignored in: standard output\n")
        code = 120
    sys.stderr.flush()
    return code
