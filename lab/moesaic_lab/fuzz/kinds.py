"""Change the kind of each file that a command opens: links, pipes, sockets, devices, folders and
very large files.

Each command runs once on a folder as its owner made it, while an audit hook notes the names that it
opens, lists, makes or removes below that folder. Then, for every such name and every kind, the
command runs on a copy of the folder in which that name is of that kind. It may do its work or
refuse in one line. It may not change a file outside the folder, run on without end, or show a
traceback.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from moesaic.cli import main
from moesaic.testing.runner import renew_thread_pool
from moesaic_lab.fuzz.examples import named_examples
from moesaic_lab.fuzz.places import PRELOAD, copied

MOST_SECONDS = 60.0
"""A command has no end if it takes more processor time, or takes none and waits for so long."""
MOST_BYTES = 2 << 30
"""Limit of memory on top of what the process has at its start."""
HUGE_BYTES = 3 << 30
"""Size of a file with nothing in it, which takes no room on disk and does not fit into memory."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None
    """Its exit code; None if it was stopped because it had no end."""
    output: str
    """What it printed, on both streams."""
    names: tuple[str, ...] = ()
    """The names below its folder that it opened, listed, made or removed."""


def _link(place: Path, outside: Path) -> None:
    """Make a link to a file outside the folder."""
    place.symlink_to(outside / "file")


def _link_to_folder(place: Path, outside: Path) -> None:
    """Make a link to a folder outside the folder."""
    place.symlink_to(outside / "folder")


def _hard_link(place: Path, outside: Path) -> None:
    """Make a second name of a file outside the folder."""
    place.hardlink_to(outside / "file")


def _socket(place: Path, outside: Path) -> None:
    """Make a socket."""
    with socket.socket(socket.AF_UNIX) as listening:
        short = outside.parent / "s"  # the name of a socket has at most 107 bytes
        listening.bind(str(short))
        short.rename(place)


def _huge(place: Path, outside: Path) -> None:
    """Make a sparse file that is larger than memory."""
    with place.open("wb") as file:
        file.truncate(HUGE_BYTES)


KINDS: Mapping[str, Callable[[Path, Path], None]] = {
    "link to a file": _link,
    "link to a folder": _link_to_folder,
    "dangling link": lambda place, outside: place.symlink_to(outside / "nothing"),
    "link to /dev/zero": lambda place, outside: place.symlink_to("/dev/zero"),
    "pipe": lambda place, outside: os.mkfifo(place),
    "socket": _socket,
    "folder": lambda place, outside: place.mkdir(),
    "hard link": _hard_link,
    "huge": _huge,
}
"""By name: makes something of that kind at a place, given a folder outside."""


def row(
    bases: Path, command: str, told: Callable[[str], object], *, every: int = 1
) -> dict[str, Any]:
    """Run a command once with every name of every kind.

    Args:
        bases: a folder that `readers.make_bases` has filled.
        command: a key of `examples.named_examples`.
        told: called with what is tried, before it is.
        every: try only one of so many pairs of a name and a kind, of a slow command one of nine
            times as many.

    Returns:
        its "name", the numbers of "inputs", of "edited" ones (none) and of "names", the "seconds",
        and by name and kind what went wrong ("crashes").
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="moesaic-kinds-") as made:
        scratch = Path(made, "one")
        names = names_of(bases, command, scratch)
        tries = [(name, kind) for name in names for kind in KINDS]
        if named_examples()[command].is_slow:
            every *= len(KINDS)
        tries = tries[::every]
        crashes = {}
        for name, kind in tries:
            told(f"kinds of {command}: {name} as {kind}")
            problem = tried(bases, command, name, kind, scratch)
            if problem:
                crashes[f"{name} as {kind}"] = problem
    seconds = round(time.monotonic() - started, 1)
    counts = {"inputs": len(tries), "edited": 0, "refused": 0, "names": len(names)}
    return {"name": f"kinds of {command}", **counts, "seconds": seconds, "crashes": crashes}


def names_of(bases: Path, command: str, scratch: Path) -> tuple[str, ...]:
    """Return the names that a command uses below its folder when nothing is wrong with it.

    Raises:
        AssertionError: the command fails on a folder with which nothing is wrong.
    """
    example = named_examples()[command]
    folder = _copied(bases, example.folders, scratch)
    ended = _run(example.words, folder)
    assert ended.code == 0, f"{command}: {ended.output}"
    shutil.rmtree(scratch)
    return ended.names


def tried(bases: Path, command: str, name: str, kind: str, scratch: Path) -> str:
    """Run a command in a folder in which a name is of another kind; return what is wrong with how
    it ended, or ""."""
    example = named_examples()[command]
    folder = _copied(bases, example.folders, scratch)
    outside = scratch / "outside"
    place = folder / name
    _make_outside(outside, place)

    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(place):
        place.rename(scratch / "before")
    KINDS[kind](place, outside)

    before = _contents(outside)
    ended = _run(example.words, folder)
    after = before if is_typed(name, example.words) else _contents(outside)
    problem = _problem(ended, before, after)
    shutil.rmtree(scratch)
    return problem


def is_typed(name: str, words: Sequence[str]) -> bool:
    """Return whether a name is a path, or a folder on a path, that the user typed: that may be a
    link, and is then written through."""
    return any(word == name or word.startswith(f"{name}/") for word in words)


def _make_outside(outside: Path, place: Path) -> None:
    """Make a file and a folder outside that look like what is at a place, so that they are not
    refused for their contents."""
    (outside / "folder").mkdir(parents=True)
    (outside / "folder" / "mine").write_text("mine")
    (outside / "file").write_text("mine")
    if place.is_file():
        shutil.copyfile(place, outside / "file")
    elif place.is_dir():
        shutil.copytree(place, outside / "folder", dirs_exist_ok=True)


def _problem(ended: Ended, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return what a command should not have done, or ""; `before` and `after` are the contents
    outside its folder."""
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    if changed:
        return f"wrote outside: {', '.join(changed)}"
    if ended.code is None:
        return "had no end"
    if "Traceback (most recent call last)" in ended.output or ended.code not in (0, 1, 2):
        return f"code {ended.code}: {ended.output[-300:]}"
    return ""


def _contents(folder: Path) -> dict[str, str]:
    """Return the names below a folder with the hashes of their contents; "folder" for folders."""
    contents = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        contents[name] = "folder"
        if path.is_file():
            contents[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return contents


def _copied(bases: Path, names: Sequence[str], scratch: Path) -> Path:
    """Copy some of the files and folders of `bases` to a new folder below `scratch`, and return
    it."""
    folder = scratch / "gift"
    folder.mkdir(parents=True)
    for name in names:
        copied(bases / name, folder / name)
    return folder


def _run(words: Sequence[str], folder: Path) -> Ended:
    """Run a command in a new process, in a folder."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    output = folder.parent / "output"
    output.touch()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=_command, args=(theirs, words, folder, output))
    process.start()
    theirs.close()
    names: tuple[str, ...] = ()
    assert process.pid is not None
    has_ended = _comes(ours, process.pid)
    if has_ended:
        with contextlib.suppress(EOFError):
            names = ours.recv()
        has_ended = _comes(process.sentinel, process.pid)
    process.kill()
    process.join()
    return Ended(
        process.exitcode if has_ended else None, output.read_text("utf-8", "replace"), names
    )


def _comes(what: Any, process: int) -> bool:
    """Wait for something of a process; return whether it comes before the process has used
    `MOST_SECONDS` of processor time, or has used none for so long: however busy the machine is.

    Args:
        what: a connection, or a sentinel of `multiprocessing`.
        process: its id.
    """
    used_seconds = 0.0
    since = time.monotonic()
    while not wait([what], min(1.0, MOST_SECONDS)):
        with contextlib.suppress(OSError):
            used_before = used_seconds
            used_seconds = _processor_seconds(process)
            if used_seconds > used_before:
                since = time.monotonic()
        if used_seconds > MOST_SECONDS or time.monotonic() - since > MOST_SECONDS:
            return False
    return True


def _processor_seconds(process: int) -> float:
    """Return the processor time that a process has used; OSError if there is none."""
    # "PID (NAME) STATE PARENT ...": the name may hold parentheses, and of what follows it the
    # fields 11 and 12 are the ticks in the program and in the system
    _, _, after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    user_ticks, system_ticks = after_name.split()[11:13]
    return (int(user_ticks) + int(system_ticks)) / os.sysconf("SC_CLK_TCK")


def _command(line: Any, words: Sequence[str], folder: Path, output: Path) -> None:
    """Run a command in this process, with its streams in a file; send the names that it used, and
    leave with its code."""
    log = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.chdir(folder)
    renew_thread_pool()
    num_pages, *_ = Path("/proc/self/statm").read_text().split()
    used_bytes = int(num_pages) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MOST_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, resource.RLIM_INFINITY))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    names: dict[str, None] = {}  # a set that keeps the order

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        """Note the names that an audit event is about."""
        for name in _names(event, arguments, folder):
            names[name] = None

    sys.addaudithook(note)
    try:
        code = main.main(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 3  # with which no command ends on its own
    sys.stdout.flush()
    sys.stderr.flush()
    line.send(tuple(names))
    os._exit(code)


EVENTS = (
    "open",
    "os.listdir",
    "os.scandir",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.truncate",
)
"""Python's audit events whose first argument is a path; that of os.rename has a second one."""


def _names(event: str, arguments: tuple[Any, ...], folder: Path) -> Iterator[str]:
    """Yield the names below a folder that an audit event is about."""
    if event not in EVENTS:
        return
    num_paths = 2 if event == "os.rename" else 1
    for argument in arguments[:num_paths]:
        if isinstance(argument, (str, bytes, os.PathLike)):  # not a file descriptor
            name = os.path.relpath(os.path.join(folder, os.fsdecode(argument)), folder)
            is_below = name != "." and not name.startswith(("..", "/"))
            if is_below and not _is_new(name):
                yield name


def _is_new(name: str) -> bool:
    """Return whether a name is drawn anew in every run, so that nobody can put anything there
    beforehand: that of a file being written, but not of a checkpoint, which ends with its step."""
    _, _, drawn = name.rpartition("/.writing-")
    return "/.writing-" in f"/{name}" and not drawn.isdigit()
