"""Give every file reader and every command line of Moesaic malformed and unexpected inputs.

Two of three inputs that hypothesis draws are edited valid ones: files with edits behind intact
headers, lengths and checksums, or edited command lines from the documentation. The others are
damaged files, random bytes and random words. A reader may refuse an input with InputError or
TrainingError, a command with one line and exit code 2. Everything else is a crash. More than 10 s
of processor time or 2 GiB of memory for one input also count as a crash. Commands that train or
measure are stopped once their arguments have been parsed and checked.

A target is a reader or a command under test. Inputs are processed in a worker process, in batches,
since an input may kill it; `told` shows progress.

moesaic fuzz --json benchmarks/results/fuzz.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any, Literal

from moesaic.errors import InputError, TrainingError
from moesaic_lab.benchmark import (
    Benchmark,
    KeptOptions,
    Shown,
    Told,
    keeping,
    kept,
    notes_of,
    words_of,
)
from moesaic_lab.claims import Claim
from moesaic_lab.system_calls import require_watching

LEAST_INPUTS = 100_000
BATCH = 10_000
WORKER = "moesaic_lab.fuzz.run"


@dataclass(frozen=True, kw_only=True)
class FuzzOptions(KeptOptions):
    """How much to try. The defaults take about half an hour."""

    inputs: int = LEAST_INPUTS
    """Number of inputs, over all readers and commands."""
    engine: Literal["hypothesis", "kinds", "writes"] = "hypothesis"
    """How inputs are chosen: at random (hypothesis); every name that a command uses as every kind
    of file (kinds); every write of a command fails (writes). The last two have their own number of
    --inputs."""
    seed: int = 0
    """Seed of the inputs."""
    only: str | None = None
    """Test only targets whose names start with one of these, separated by commas, as in "read
    trace,command show"."""


def measure(options: FuzzOptions, cases: object, told: Told) -> list[dict[str, Any]]:
    """Run the targets on `options.inputs` inputs and return a row per target, with its crashes."""
    if options.engine != "hypothesis":
        return _of_examples(options, told)
    if options.inputs < 1:
        raise InputError(f"--inputs {options.inputs}: must be at least 1")
    sizes = [min(BATCH, options.inputs - begin) for begin in range(0, options.inputs, BATCH)]
    batch_rows = []
    with keeping(options.keep) as folder, _workers(words_of(options.only), told) as run_batch:
        for number, size in enumerate(sizes, options.seed):
            file = folder / f"{options.engine}-{number}.json"
            batch_rows += kept(file, partial(run_batch, size, number))
    return _rows(batch_rows)


def _of_examples(options: FuzzOptions, told: Told) -> list[dict[str, Any]]:
    """Return a row per command line of the examples, tried with every name of every kind, or with
    every failing write."""
    from moesaic_lab.fuzz import kinds, writes
    from moesaic_lab.fuzz.examples import named_examples
    from moesaic_lab.fuzz.readers import make_bases

    only = tuple(words_of(options.only)) or ("",)  # every name begins with ""
    engine = options.engine
    if engine == "writes":
        require_watching()
    names = [name for name in named_examples() if f"{engine} of {name}".startswith(only)]
    with (
        keeping(options.keep) as folder,
        tempfile.TemporaryDirectory(prefix="moesaic-fuzz-") as scratch,
    ):
        told("folders of valid files")
        bases = Path(scratch, "bases")
        process = get_context("spawn").Process(target=make_bases, args=(bases,))
        process.start()
        process.join()
        if process.exitcode:
            raise TrainingError(
                f"the folders of valid files could not be made (code {process.exitcode})"
            )

        def tried(name: str) -> dict[str, Any]:
            """Return the row of a command line."""
            if engine == "kinds":
                return kinds.row(bases, name, told)
            (row,) = writes.rows(bases, told, [name])
            return row

        return [kept(folder / f"{engine} of {name}.json", partial(tried, name)) for name in names]


@contextmanager
def _workers(
    only: Sequence[str], told: Told
) -> Iterator[Callable[[int, int], list[dict[str, Any]]]]:
    """Yield a function (inputs, number) that runs a batch in a worker process and returns a row per
    target.

    The number is the seed of the batch. The worker is started when it is first needed, and again
    after it has died.
    """
    with ExitStack() as stack:
        line: Any = None
        process: subprocess.Popen[bytes] | None = None

        def run_batch(inputs: int, number: int) -> list[dict[str, Any]]:
            """Let the worker run a batch, and return its rows."""
            nonlocal line, process
            if process is None or process.poll() is not None:
                line, process = stack.enter_context(_worker(only))
            with suppress(ConnectionError):  # receiving below detects a worker that has died
                line.send((inputs, number))
            return _received_rows(line, process, lambda what: told(f"batch {number}: {what}"))

        yield run_batch


@contextmanager
def _worker(only: Sequence[str]) -> Iterator[tuple[Any, subprocess.Popen[bytes]]]:
    """Start a worker process, and yield the connection to it with the process."""
    ours, theirs = Pipe()
    with tempfile.TemporaryDirectory(prefix="moesaic-fuzz-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(theirs.fileno()), json.dumps([folder, only])],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            yield ours, process
        finally:
            process.kill()
            process.wait()


def _received_rows(line: Any, process: subprocess.Popen[bytes], told: Told) -> list[dict[str, Any]]:
    """Receive a worker's progress and return its rows; if the worker fails, return a row with that
    crash.

    A message is a text (the worker's traceback), a list (its rows, at the end) or a tuple (the
    target that it is at, and how many inputs that has had).
    """
    target = "its start"
    while True:
        try:
            message = line.recv()
        except (EOFError, ConnectionError):
            message = ""  # it died
        if isinstance(message, list):
            rows: list[dict[str, Any]] = message
            return rows
        if isinstance(message, tuple):
            target, num_inputs = message
            told(f"{target}, after {num_inputs:,} inputs of it")
            continue
        line.close()
        crash = f"the worker ended with {process.wait()}"
        failed = {
            "name": target,
            "inputs": 1,
            "edited": 0,
            "refused": 0,
            "seconds": 0.0,
            "crashes": {crash: f"in inputs of {target} {message}"},
        }
        return [failed]


def _rows(batch_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rows of several batches into one row per target."""
    rows: dict[str, dict[str, Any]] = {}
    for batch_row in batch_rows:
        name = batch_row["name"]
        if name not in rows:
            empty = {"inputs": 0, "edited": 0, "refused": 0, "seconds": 0.0, "crashes": {}}
            rows[name] = batch_row | empty
        row = rows[name]
        for key in ("inputs", "edited", "refused"):
            row[key] += batch_row[key]
        row["seconds"] = round(row["seconds"] + batch_row["seconds"], 1)
        row["crashes"] |= batch_row["crashes"]
    return list(rows.values())


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return claims on the numbers of inputs, edited inputs, crashes and targets, or on what went
    wrong by kinds of files or failing writes."""
    for engine in ("kinds", "writes"):
        of_engine = [row for row in rows if row["name"].startswith(f"{engine} of ")]
        if of_engine:
            tried = sum(row["inputs"] for row in of_engine)
            wrong = sum(len(row["crashes"]) for row in of_engine)
            return [
                Claim(name=f"fuzz.{engine}_tried", value=tried, unit="1", op=">="),
                Claim(name=f"fuzz.{engine}", value=wrong, unit="1", target=0, op="<="),
            ]
    inputs = sum(row["inputs"] for row in rows)
    edited = sum(row["edited"] for row in rows)
    crashes = sum(len(row["crashes"]) for row in rows)
    return [
        Claim(name="fuzz.inputs", value=inputs, target=LEAST_INPUTS, op=">="),
        Claim(name="fuzz.past_headers", value=edited, op=">="),
        Claim(name="fuzz.crashes", value=crashes, target=0),
        Claim(name="fuzz.targets", value=len(rows), op=">="),
    ]


def tables(rows: list[dict[str, Any]]) -> list[Any]:
    """Return a table with a line per target, and one with a line per crash."""
    escaped = [
        {"target": row["name"], "where": where, "what": what}
        for row in rows
        for where, what in row["crashes"].items()
    ]
    plain = [{key: value for key, value in row.items() if key != "crashes"} for row in rows]
    return Shown(title="Inputs").of(plain) + Shown(title="What escaped").of(escaped)


BENCHMARK = Benchmark(
    name="fuzz",
    description=(
        "Give file readers and command lines malformed inputs. Exit code 1 if anything but a "
        "documented error occurs."
    ),
    options=FuzzOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    columns=tables,
    is_proof=True,
    is_command=True,
    packages=("torch", "numpy", "hypothesis"),
)
