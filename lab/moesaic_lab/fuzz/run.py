"""The worker that hands inputs to readers and commands, inside limits of memory and time, and writes down what escapes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from moesaic.cli import arguments, main
from moesaic.errors import InputError, TrainingError
from moesaic_lab.fuzz.mutate import ODD_WORDS, anything, mutated
from moesaic_lab.fuzz.readers import READERS, Reader

MOST_SECONDS = 10
"""Of processor time for one input."""
MOST_BYTES = 2 << 30
"""Of memory on top of what the worker holds before."""
AT_ONCE = 100
"""Inputs of one target that follow each other."""
MOST_OF_A_COMMAND = 1 / 200
"""Share of all inputs that a command gets at most; its words take longer to read than most files."""
STOPS_AFTER_PARSING = ("train", "check", "demo", "profile")
"""Commands whose work takes long: their words are read, checked, and no more. So are all of other packages."""


class _SlowError(BaseException):
    """An input took too much processor time."""


class _ParsedError(BaseException):
    """The words were read, which is all that is wanted."""


@dataclass
class Target:
    """Something that takes inputs."""

    name: str
    draws: st.SearchStrategy[Any]
    """Half of them are valid ones, changed."""
    takes: Callable[[Any], None]
    inputs: int = 0
    seconds: float = 0.0
    refused: int = 0
    """By a documented error."""
    crashes: dict[str, str] = field(default_factory=dict)
    """Where it was raised, to what was raised and an input that does it."""

    def row(self) -> dict[str, Any]:
        """Return what was found, as plain data."""
        names = ("name", "inputs", "refused", "seconds", "crashes")
        return {name: getattr(self, name) for name in names}


def work(line: Connection, folder: Path, inputs: int, number: int, only: Sequence[str]) -> None:
    """Take inputs until there were enough, and tell of it; the life of a worker process."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    sys.stdout = sys.stderr = io.StringIO()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    held = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    )
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _stop)
    targets = [
        target for target in (*_readers(folder), *_commands()) if not only or target.name.startswith(tuple(only))
    ]
    rounds = 0
    while sum(target.inputs for target in targets) < inputs:
        for target in targets:
            # Where an input takes long, fewer are taken: each target gets its share of the time, and some inputs at least.
            share = sum(each.seconds for each in targets) / len(targets)
            enough = target.name.startswith("command") and target.inputs > MOST_OF_A_COMMAND * inputs
            if rounds == 0 or (target.seconds <= share and not enough):
                line.send((target.name, target.inputs))
                _round(target, AT_ONCE if rounds else AT_ONCE // 5, number * 1_000_003 + rounds)
        rounds += 1
    line.send([target.row() for target in targets])


def _stop(number: int, frame: Any) -> None:
    raise _SlowError


def _round(target: Target, count: int, number: int) -> None:
    started = time.monotonic()

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.draws)
    def each(value: Any) -> None:
        target.inputs += 1
        try:
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            target.takes(value)
            signal.setitimer(signal.ITIMER_PROF, 0)
        except (InputError, TrainingError):
            target.refused += 1
        except _ParsedError:
            pass
        except BaseException as error:  # whatever else escapes is what is looked for
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "moesaic/" in frame.filename]
            at = frames[-1] if frames else None
            place = f"{type(error).__name__} at {at.filename.rpartition('src/')[2]}:{at.lineno}" if at else repr(error)
            target.crashes.setdefault(place, f"{error!r:.200} on {value!r:.300}")

    each()
    target.seconds += time.monotonic() - started


def _readers(folder: Path) -> Iterator[Target]:
    for name, reader in READERS.items():
        data = (folder / reader.base / reader.file).read_bytes()
        draws = st.one_of(mutated(reader.kind, data), anything(reader.kind))
        yield Target(f"read {name}", draws, _reading(folder, reader, data))


def _reading(folder: Path, reader: Reader, data: bytes) -> Callable[[Any], None]:
    place = folder / reader.base

    def read(changed: bytes) -> None:
        (place / reader.file).write_bytes(changed)
        try:
            if reader.seal is not None:
                reader.seal(place)
            reader.read(place)
        finally:
            (place / reader.file).write_bytes(data)

    return read


def _commands() -> Iterator[Target]:
    """Yield every command of the registry, ours and those of other packages that are installed."""
    offered = {entry.name for entry in entry_points(group=main.GROUP)}
    for name in (*main.COMMANDS, *sorted(offered)):
        yield Target(f"command {name}", _command_lines(name), _running(name, name in main.COMMANDS))


def _command_lines(name: str) -> st.SearchStrategy[list[str]]:
    """Return command lines made of the words and flags that the command's own help tells."""
    first = _told([name])
    known: dict[tuple[str, ...], tuple[list[str], list[str]]] = {(): first} | {
        (word,): _told([name, word]) for word in first[0] if not word.startswith("-")
    }
    known = {prefix: found for prefix, found in known.items() if found[1] or prefix == ()}
    value = st.one_of(
        st.sampled_from(ODD_WORDS), st.sampled_from(_FILES), st.integers(-3, 70).map(str), st.text(max_size=5)
    )

    def lines(prefix: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
        words, flags = known[prefix]
        flag = st.sampled_from(flags or ["--x"])
        piece = st.one_of(
            st.tuples(flag, st.one_of(value, st.sampled_from(words or ["x"]))).map(list),
            st.tuples(flag, value).map("=".join).map(lambda word: [word]),
            flag.map(lambda word: [word]), value.map(lambda word: [word]),
        )  # fmt: skip
        return st.lists(piece, max_size=4).map(lambda pieces: [*prefix, *(word for each in pieces for word in each)])

    drawn = st.sampled_from(list(known)).flatmap(lines)
    documented = _documented(name)
    if documented:
        edit = st.tuples(st.integers(0, 20), st.sampled_from(["set", "drop", "none"]), value)
        extra = st.lists(st.sampled_from(known[()][1] or ["--x"]), max_size=1)
        changed = st.tuples(st.sampled_from(documented), edit, extra, value).map(_changed)
        drawn = st.one_of(drawn, changed)
    return drawn.map(lambda words: [_inside(word.replace("\0", "")) for word in words])


def _documented(name: str) -> list[list[str]]:
    """Return the command lines of the documentation that use a command, where there is one beside this code."""
    found = []
    for page in sorted((Path(__file__).parents[3] / "docs").glob("*.md")):
        for line in re.findall(
            rf"^(?:.*`)?moesaic {name} ([^`|&>\n]+)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            with contextlib.suppress(ValueError):
                found.append(shlex.split(line.rstrip("\\ "), comments=True))
    return found


def _changed(drawn: tuple[list[str], tuple[int, str, str], list[str], str]) -> list[str]:
    words, (at, act, value), extra, other = drawn
    found = list(words)
    if act != "none" and found:
        at %= len(found)
        flag, equals, _ = found[at].partition("=")
        found[at : at + 1] = [] if act == "drop" else [flag + equals + value] if equals else [value]
    return found + (found and [*extra, other] if extra else [])


_FILES = (
    "run", "one", "hub", "shards", "one/plan.json", "one/trace.npz", "one/config.json", "one/profile.json", "one/cluster.toml",
    "hub/config.json", "one/counts.npy", "out.json", "out.npz", "out.html", "out.svg", "text",
)  # fmt: skip


def _inside(word: str) -> str:
    """Return a word that names nothing outside of the worker's folder."""
    flag, equals, value = word.rpartition("=")
    return flag + equals + value.replace("..", "__").lstrip("/~")


def _told(words: list[str]) -> tuple[list[str], list[str]]:
    """Return words and flags that a command's help tells."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(BaseException),
    ):
        main.main([*words, "--help"])
    text = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())
    flags = sorted(set(re.findall(r"--[a-z][\w.-]*", text)))
    listed = re.findall(r"^ {2,}([a-z][\w-]+) {2,}\S", text, re.MULTILINE)
    choices = [word for found in re.findall(r"\{([\w,.-]+)\}", text) for word in found.split(",")]
    return sorted({*listed, *choices}), flags


def _running(name: str, is_ours: bool) -> Callable[[Any], None]:
    stops = not is_ours or name in STOPS_AFTER_PARSING
    plain = arguments.parse

    def parse(*args: Any, **options: Any) -> Any:
        found = plain(*args, **options)
        if stops:
            raise _ParsedError
        return found

    def take(words: list[str]) -> None:
        said = io.StringIO()
        before = [
            (module, module.parse) for module in list(sys.modules.values()) if getattr(module, "parse", None) is plain
        ]
        try:
            for module, _ in before:
                module.parse = parse  # type: ignore[attr-defined]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                code = main.main([name, *words])
        finally:
            for module, own in before:
                module.parse = own  # type: ignore[attr-defined]
            for path in Path().glob("out*"):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        lines = said.getvalue().strip().splitlines()
        if code == 2:
            if len(lines) != 1:
                raise AssertionError(f"a refusal of {len(lines)} lines: {lines[:3]}")
            raise InputError("refused")
        if code not in (0, 1):
            raise AssertionError(f"exit code {code}")

    return take
