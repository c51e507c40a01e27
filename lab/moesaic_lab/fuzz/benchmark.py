"""Every reader and every command line of Moesaic on inputs that nobody meant for them.

Hypothesis draws half of the inputs by changing valid files in ways that pass the checks of headers, lengths and checksums, the
other half from nowhere. A reader may refuse an input by InputError or TrainingError, a command by one line and exit code 2; all
else is a crash, and so are more than 10 s of processor time and 2 GiB of memory for one input. Commands that train or measure
are stopped after their words were read and checked.

moesaic fuzz --json benchmarks/results/fuzz.json
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.errors import InputError
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, notes_of, once, same, words_of
from moesaic_lab.claims import Claim
from moesaic_lab.tables import Column

LEAST_INPUTS = 100_000


@dataclass(frozen=True, kw_only=True)
class FuzzOptions(BenchmarkOptions):
    """How much to try; the defaults take about twenty minutes."""

    inputs: int = LEAST_INPUTS
    """How many, over all readers and commands."""
    seed: int = 0
    """Of what is drawn."""
    workers: int = 1
    """Processes."""
    only: str | None = None
    """Only targets whose names start so, separated by commas, as in "read trace,command show"."""


def measure(options: FuzzOptions, cases: object, told: Told) -> list[dict[str, Any]]:
    """Hand out inputs; returns a row per target, and one per place from which something escaped."""
    if options.inputs < 1 or options.workers < 1:
        raise InputError("--inputs and --workers: must be at least 1")
    from moesaic_lab.fuzz.readers import make_bases

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="moesaic-fuzz-") as made:
        started = []
        for number in range(options.workers):
            folder = Path(made) / str(number)
            make_bases(folder)
            ours, theirs = context.Pipe()
            share = -(-options.inputs // options.workers)
            process = context.Process(
                target=_work, args=(theirs, folder, share, options.seed + number, words_of(options.only))
            )
            process.start()
            theirs.close()
            started.append((ours, process))
        found = [_heard(ours, process, told) for ours, process in started]
    return _rows([target for targets in found for target in targets])


def _work(line: Any, folder: Path, inputs: int, number: int, only: Sequence[str]) -> None:
    from moesaic_lab.fuzz.run import work

    try:
        work(line, folder, inputs, number, only)
    except BaseException:
        line.send(traceback.format_exc())


def _heard(line: Any, process: Any, told: Told) -> list[Any]:
    """Listen to a worker; returns its targets."""
    last = "its start"
    while True:
        try:
            said = line.recv()
        except EOFError:
            said = ""
        if isinstance(said, str):  # it failed, or died without a word
            process.join()
            crashes = {f"the worker ended with {process.exitcode}": f"in inputs of {last} {said}"}
            return [{"name": last, "inputs": 1, "refused": 0, "seconds": 0.0, "crashes": crashes}]
        if isinstance(said, list):
            process.join()
            return said
        last = said[0]
        told(f"{said[0]}, after {said[1]:,} inputs of it")


def _rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up what several workers found."""
    rows: dict[str, dict[str, Any]] = {}
    for each in found:
        row = rows.setdefault(
            each["name"], {"name": each["name"], "inputs": 0, "refused": 0, "seconds": 0.0, "crashes": {}}
        )
        row |= {key: row[key] + each[key] for key in ("inputs", "refused")}
        row["seconds"] = round(row["seconds"] + each["seconds"], 1)
        row["crashes"] |= each["crashes"]
    return list(rows.values())


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return how many inputs were taken, and what escaped."""
    inputs, crashes = sum(row["inputs"] for row in rows), sum(len(row["crashes"]) for row in rows)
    return [
        Claim(name="fuzz.inputs", value=inputs, unit="1", target=LEAST_INPUTS, op=">="),
        Claim(name="fuzz.crashes", value=crashes, unit="1", target=0, op="<="),
        Claim(name="fuzz.targets", value=len(rows), unit="1", target=None, op=">="),
    ]


def tables(rows: list[dict[str, Any]]) -> list[Any]:
    """Return a line per target, and one per crash."""
    escaped = [
        {"target": row["name"], "where": where, "what": what} for row in rows for where, what in row["crashes"].items()
    ]
    plain = [{key: value for key, value in row.items() if key != "crashes"} for row in rows]
    columns = [Column(key=key, title=key, is_text=True) for key in ("target", "where", "what")]
    return Shown(title="Inputs").of(plain) + Shown(title="What escaped", columns=columns).of(escaped)


BENCHMARK = Benchmark(
    name="fuzz", description="Hand every reader and every command line inputs that nobody meant for them. Exit code 1 if anything "
    "but a documented error escapes.",
    options=FuzzOptions, notes=notes_of(__doc__), cases=once, measure=measure, rows=same, claims=claims, columns=tables,
    is_proof=True, packages=("torch", "numpy", "hypothesis"),
)  # fmt: skip
