"""Run readers and commands on inputs, under limits of memory and time, and record unexpected
exceptions.

`python -m moesaic_lab.fuzz.run` is a worker process. An edited input is a valid one with some
edits, as in `mutate`; a strategy is hypothesis's word for what draws inputs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import moesaic
from moesaic.cli import arguments, main
from moesaic.errors import InputError, TrainingError
from moesaic_lab.claims import ROOT
from moesaic_lab.fuzz.mutate import ODD_WORDS, drawn_from, either
from moesaic_lab.fuzz.readers import READERS, Reader, make_bases

SOURCE = Path(moesaic.__file__).parents[1]
"""The folder that the package of the library lies in."""
MOST_SECONDS = 10
"""Limit of processor time for one input."""
MOST_BYTES = 2 << 30
"""Limit of memory on top of what the worker has at its start."""
FIRST = 3
AT_ONCE = 100
"""Inputs in a target's first round, and the most in a later one, which has as many as the target
processes in a second."""
MOST_OF_A_COMMAND = 1 / 200
"""Largest share of all inputs that one command gets: command lines take longer than most files."""
STOPS_AFTER_PARSING = ("train", "check", "demo", "profile")
"""Slow commands that are stopped once their arguments are parsed and checked. Commands of other
packages are stopped there too. `plan` also reads its files and is stopped before its search."""


class _SlowError(BaseException):
    """Raised when an input takes too much processor time."""


class _ParsedError(BaseException):
    """Raised to stop a command once its arguments are parsed."""


@dataclass
class Target:
    """A reader or command under test, and the results so far."""

    name: str
    draws: st.SearchStrategy[tuple[bool, Any]]
    """Draws pairs: whether the input is an edited valid one, and the input."""
    takes: Callable[[Any], object]
    """Processes an input."""
    inputs: int = 0
    """Number of inputs so far."""
    seconds: float = 0.0
    """Processor time so far."""
    edited: int = 0
    """Number of edited valid inputs, which pass the checks of headers, lengths and checksums."""
    refused: int = 0
    """Number of inputs refused with a documented error."""
    crashes: dict[str, str] = field(default_factory=dict)
    """By the exception and the place that raised it: its message and an input that causes it."""

    def row(self) -> dict[str, Any]:
        """Return the results as plain data."""
        return {
            name: getattr(self, name)
            for name in ("name", "inputs", "edited", "refused", "seconds", "crashes")
        }

    def take(self, value: Any, is_edited: bool) -> None:
        """Process an input and record an unexpected exception as a crash."""
        self.inputs += 1
        if is_edited:
            self.edited += 1
        try:
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            self.takes(value)
        except (InputError, TrainingError):
            self.refused += 1
        except _ParsedError:
            pass
        except BaseException as error:  # any other exception is a crash
            self.crashes.setdefault(_place_of(error), f"{error!r:.200} on {value!r:.300}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def drawn(self, count: int, number: int) -> Callable[[], None]:
        """Return a hypothesis test that processes `count` inputs, drawn with the seed `number`."""

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.draws)
        def each(drawn: tuple[bool, Any]) -> None:
            """Process an input that hypothesis has drawn."""
            is_edited, value = drawn
            self.take(value, is_edited)

        return each


def _place_of(error: BaseException) -> str:
    """Return the kind of an error, and the last line of the library that it passed; the error
    itself if it passed none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(SOURCE / "moesaic")
    ]
    if not frames:
        return repr(error)
    last = frames[-1]
    return f"{type(error).__name__} at {os.path.relpath(last.filename, SOURCE)}:{last.lineno}"


def start(words: Sequence[str]) -> None:
    """Work in this process; send a traceback to the parent if that fails.

    Args:
        words: the file descriptor of the connection to the parent, and the other arguments of
            `work` as JSON.
    """
    line = Connection(int(words[0]))
    folder, only = json.loads(words[1])
    try:
        work(line, Path(folder), only)
    except BaseException:
        line.send(traceback.format_exc())


def work(line: Connection, folder: Path, only: Sequence[str]) -> None:
    """Process batches of inputs until the parent closes the connection.

    Args:
        line: the connection to the parent. It delivers, per batch, the number of inputs over all
            targets and a seed. It gets (target's name, inputs so far) repeatedly as progress, and
            the rows of all targets at the end of a batch.
        folder: the working directory.
        only: prefixes of the names of targets; () for all targets.
    """
    warnings.simplefilter("ignore")
    make_bases(folder)
    os.chdir(folder)
    # open until the process ends; a real file, as some code calls fileno
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used_bytes = 0
    if sys.platform == "linux":
        num_pages, *_ = Path("/proc/self/statm").read_text().split()
        used_bytes = int(num_pages) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MOST_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _stop)
    targets = [*_readers(folder, only), *_commands(only)]
    # takes many seconds
    Target("what hypothesis does once", st.tuples(st.just(False), st.text()), repr).drawn(1, 0)()
    with contextlib.suppress(EOFError):
        while True:
            inputs, number = line.recv()
            fresh = [replace(each, crashes={}) for each in targets]
            _batch(line, fresh, inputs, number)
            line.send([target.row() for target in fresh])


def _batch(line: Connection, targets: list[Target], inputs: int, number: int) -> None:
    """Run the targets on `inputs` inputs in total, round by round.

    Targets get about equal processor time, so slow ones get fewer inputs, but each gets at least
    `FIRST`.

    Args:
        line: gets the target that is at work, and how many inputs it has had.
        number: seed of the batch.
    """
    first_seed = number * 1_000_003  # far more than the rounds of a batch: no seed comes twice
    for target in targets:
        _run_round(line, target, FIRST, first_seed)

    has_readers = any(target.name.startswith("read") for target in targets)
    rounds = 1
    while (missing := inputs - sum(target.inputs for target in targets)) > 0:
        # without readers, which take any number of inputs, commands must take all of them
        left = [each for each in targets if not (has_readers and _has_enough(each, inputs))]
        mean_seconds = sum(each.seconds for each in left) / len(left)
        share = -(-missing // len(left))
        for target in left:
            if target.seconds <= mean_seconds:
                per_second = int(target.inputs / max(target.seconds, 0.01)) + 1
                count = min(AT_ONCE, per_second, share)
                _run_round(line, target, count, first_seed + rounds)
        rounds += 1


def _run_round(line: Connection, target: Target, count: int, seed_of_round: int) -> None:
    """Run a target on `count` inputs, and add the processor time."""
    line.send((target.name, target.inputs))
    started = _processor_seconds()
    target.drawn(count, seed_of_round)()
    target.seconds += _processor_seconds() - started


def _processor_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _has_enough(target: Target, inputs: int) -> bool:
    """Return whether a target is a command that has used up its share of all inputs."""
    return target.name.startswith("command") and target.inputs > MOST_OF_A_COMMAND * inputs


def _stop(number: int, frame: Any) -> None:
    """Stop an input that takes too long."""
    raise _SlowError


def _is_asked(name: str, only: Sequence[str]) -> bool:
    """Return whether `only` selects a target."""
    return not only or name.startswith(tuple(only))


def _readers(folder: Path, only: Sequence[str]) -> Iterator[Target]:
    """Yield a target per reader of files that `only` selects."""
    for name, reader in READERS.items():
        if not _is_asked(f"read {name}", only):
            continue
        path = reader.path(folder)
        data = path.read_bytes()
        reading = _reading(reader, folder / reader.base, path)
        yield Target(f"read {name}", drawn_from(path.name, data), reading)


def _reading(reader: Reader, base: Path, path: Path) -> Callable[[Any], None]:
    """Return a function that puts other bytes into the file at `path`, below the folder `base`,
    reads it and restores it."""
    data = path.read_bytes()

    def read(changed: bytes) -> None:
        """Read a changed file."""
        path.write_bytes(changed)
        try:
            if reader.seal is not None:
                reader.seal(base)
            reader.read(base)
        finally:
            path.write_bytes(data)

    return read


def _commands(only: Sequence[str]) -> Iterator[Target]:
    """Yield a target per command that `only` selects, those of other installed packages included.

    Possible arguments are read from the commands' help, which takes a second for all commands
    together.
    """
    of_other_packages = sorted({entry.name for entry in entry_points(group=main.GROUP)})
    for name in (*main.COMMANDS, *of_other_packages):
        if _is_asked(f"command {name}", only):
            running = _running(name, is_ours=name in main.COMMANDS)
            yield Target(f"command {name}", _command_lines(name), running)


def _command_lines(name: str) -> st.SearchStrategy[tuple[bool, list[str]]]:
    """Return a strategy for edited command lines from the documentation, and for ones of words and
    flags from the help."""
    help_of_command = _help_of([name])
    known: dict[tuple[str, ...], _Help] = {(): help_of_command}  # by what precedes the words
    for word in help_of_command.listed:
        help_of_word = _help_of([name, word])
        if help_of_word.flags:
            known[(word,)] = help_of_word
    value = st.one_of(
        st.sampled_from(ODD_WORDS),
        st.sampled_from(_FILES),
        st.integers(-3, 70).map(str),
        st.text(max_size=5),
    )

    def lines(prefix: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
        """Return a strategy for command lines that begin with a prefix."""
        return _lines_of(prefix, known[prefix], value)

    drawn = st.sampled_from(list(known)).flatmap(lines).map(_harmless)
    documented = _documented(name)
    if not documented:
        return drawn.map(lambda words: (False, words))
    edit = st.tuples(st.integers(0, 20), st.sampled_from(["set", "drop", "none"]), value)
    extra = st.lists(st.sampled_from(help_of_command.flags or ["--x"]), max_size=1)
    changed = st.tuples(st.sampled_from(documented), edit, extra, value).map(_changed)
    return either(changed.map(_harmless), drawn)


def _lines_of(
    prefix: Sequence[str], command_help: _Help, value: st.SearchStrategy[str]
) -> st.SearchStrategy[list[str]]:
    """Return a strategy for command lines of a prefix and up to four flags or values.

    Args:
        command_help: what the help of the prefix tells.
        value: a strategy for values of flags.
    """
    flag = st.sampled_from(command_help.flags or ["--x"])
    # "--flag value", "--flag=value", "--flag" or "value", each as a list of words
    piece = st.one_of(
        st.tuples(flag, st.one_of(value, st.sampled_from(command_help.words or ["x"]))).map(list),
        st.tuples(flag, value).map("=".join).map(lambda word: [word]),
        flag.map(lambda word: [word]),
        value.map(lambda word: [word]),
    )
    return st.lists(piece, max_size=4).map(
        lambda pieces: [*prefix, *(word for words in pieces for word in words)]
    )


def _documented(name: str) -> list[list[str]]:
    """Return the documentation's command lines that use a command; [] if docs/ is missing, as in an
    installed package."""
    # at the beginning of a line, or after a backtick within one; up to what ends a command
    pattern = re.compile(rf"^(?:.*`)?moesaic {name} ([^`|&>\n]+)", re.MULTILINE)
    command_lines = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for line in pattern.findall(page.read_text(encoding="utf-8")):
            with contextlib.suppress(ValueError):  # of quotes that are not closed in it
                command_lines.append(shlex.split(line.rstrip("\\ "), comments=True))
    return command_lines


def _changed(drawn: tuple[list[str], tuple[int, str, str], list[str], str]) -> list[str]:
    """Return a command line after an edit.

    Args:
        drawn: the command line; (which word, the edit, a value); a flag to add, or none; its value.
    """
    words, (at, act, value), extra, value_of_extra = drawn
    changed = list(words)
    if act != "none" and changed:
        at %= len(changed)
        flag, equals, _ = changed[at].partition("=")
        if act == "drop":
            del changed[at]
        else:
            changed[at] = flag + equals + value if equals else value
    if extra and changed:
        changed += [*extra, value_of_extra]
    return changed


_FILES = (
    "run",
    "one",
    "hub",
    "shards",
    "one/plan.json",
    "one/trace.npz",
    "one/config.json",
    "one/cluster.toml",
    "hub/config.json",
    "one/counts.npy",
    "out.json",
    "out.npz",
    "out.html",
    "out.svg",
    "text",
)


def _harmless(words: list[str]) -> list[str]:
    """Return the words without parts of paths that lead out of the worker's folder."""
    harmless = []
    for word in words:
        flag, equals, value = word.replace("\0", "").rpartition("=")
        harmless.append(flag + equals + value.replace("..", "__").lstrip("/~"))
    return harmless


class _Help(NamedTuple):
    """What a command's help tells."""

    words: list[str]
    """Its subcommands, and the values that its flags may have."""
    flags: list[str]
    listed: list[str]
    """Words at the beginning of lines, as of subcommands."""


def _help_of(words: list[str]) -> _Help:
    """Return what the help of a command, or of a subcommand, tells."""
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(BaseException),
    ):
        main.main([*words, "--help"])
    text = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())  # without colours
    flags = sorted(set(re.findall(r"--[a-z][\w.-]*", text)))
    listed = re.findall(r"^ {2,}([a-z][\w-]+) {2,}\S", text, re.MULTILINE)
    choices = set()
    for in_braces in re.findall(r"\{([\w,.-]+)\}", text):
        choices |= set(in_braces.split(","))
    return _Help(sorted({*listed, *choices}), flags, listed)


def _running(name: str, is_ours: bool) -> Callable[[Any], None]:
    """Return a function that runs a command line in this process.

    Args:
        is_ours: whether the command is the library's own, not another package's.
    """
    stops = not is_ours or name in STOPS_AFTER_PARSING
    plain = arguments.parse
    # modules that have imported the function by its name
    with_parse = [
        module
        for module in list(sys.modules.values())
        if getattr(module, "__dict__", {}).get("parse") is plain
    ]

    def parse(*args: Any, **options: Any) -> Any:
        """Parse the arguments, and stop slow commands."""
        parsed = plain(*args, **options)
        if stops:
            raise _ParsedError
        return parsed

    def take(words: list[str]) -> None:
        """Run a command line; InputError if it was refused in one line, AssertionError if in
        others."""
        errors = io.StringIO()
        try:
            for module in with_parse:
                module.parse = parse  # type: ignore[attr-defined]
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(errors),
                mock.patch("moesaic.cli.plan_search.search", side_effect=_ParsedError),
                mock.patch("moesaic_lab.device.steps.run", side_effect=_ParsedError),
            ):
                code = main.main([name, *words])
        finally:
            for module in with_parse:
                module.parse = plain  # type: ignore[attr-defined]
            for path in Path().glob("out*"):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
        lines = errors.getvalue().strip().splitlines()
        if code == 2:
            if len(lines) != 1:
                raise AssertionError(f"a refusal of {len(lines)} lines: {lines[:3]}")
            raise InputError("refused")
        if code not in (0, 1):
            raise AssertionError(f"exit code {code}")

    return take


if __name__ == "__main__":
    start(sys.argv[1:])
