"""`moesaic fuzz`: every place that reads a file is reached, inputs are what they should be, and
some of them are tried."""

from __future__ import annotations

import ast
import gzip
import io
import json
import multiprocessing
import os
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import moesaic
from helpers import from_file
from moesaic.errors import InputError
from moesaic_lab.fuzz import benchmark, run
from moesaic_lab.fuzz.benchmark import FuzzOptions
from moesaic_lab.fuzz.mutate import drawn_from
from moesaic_lab.fuzz.readers import READERS
from moesaic_lab.fuzz.run import Target

SOURCE = Path(moesaic.__file__).parent
READS = (
    "read_text",
    "read_bytes",
    "json.load",
    "json.loads",
    "tomllib.loads",
    "safe_open",
    "load_file",
    "memmap",
    "fromfile",
    "np.load",
    "loadtxt",
    "torch.load",
    "csv.DictReader",
    "gzip.open",
    "ZipFile",
    "Unpickler",
    "open_file",
    "open_stream",
    "from_str",
    "parquet.read_table",
)
"""Names of calls that take in what a file holds; `open` without a mode for writing does too."""
LAST_WORDS = {"open", *(word.rpartition(".")[2] for word in READS)}
ELSEWHERE = {
    ("comm/collectives.py", "check_same"): "reads what ranks sent each other",
    ("auto.py", "_from_first_rank"): "reads what ranks sent each other",
    ("train/shard_metadata.py", "read_metadata"): "hands the file to read_list",
    ("train/watch.py", "_give_up"): "reads what ranks wrote into their store",
    ("train/launch.py", "_state_of_process"): "reads /proc",
    (
        "train/run_folder.py",
        "_read_owner",
    ): "is handed text, by tests/train/test_run_folder.py of every kind",
    ("train/state.py", "_write_tokenizer"): "compares what it is about to write",
    ("measure/here.py", "_processor"): "reads /proc",
    ("measure/together.py", "started_machine"): "reads /proc",
    ("kernels/triton/rows/measured.py", "_tiles"): "reads a file of the package",
    (
        "kernels/products.py",
        "_is_zen_5",
    ): "reads /proc, and is handed texts by tests/kernels/test_products.py",
    ("train/watch.py", "_moved_bytes"): "reads /proc",
    ("comm/process_groups.py", "_other_threads_run"): "reads /proc",
    ("weights/run.py", "write_tokenizer"): "reads the text of a tokenizer that is loaded",
    ("finetune/recipe.py", "_loaded"): "reads what the same ranks saved, after its checksum",
    ("train/example_text.py", "digest"): "reads the source of a pinned package",
    (
        "transformers/resume.py",
        "_load_optimizer_and_scheduler",
    ): "reads what an earlier version saved, as tensors only",
    ("testing/runner.py", "on_ranks"): "reads what its processes wrote",
}
"""What reads something else than a person's file, or is tried elsewhere."""


def takes_in(call: ast.Call) -> bool:
    """Return whether a call takes in what a file holds."""
    if getattr(call.func, "attr", getattr(call.func, "id", "")) not in LAST_WORDS:
        return False
    name = ast.unparse(call.func)
    if name not in ("os.open", "Trace.open") and (name == "open" or name.endswith(".open")):
        modes = [
            each.value
            for each in call.args
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        return not any(letter in mode for mode in modes for letter in "wax")
    return any(name == word or name.endswith(f".{word}") for word in READS)


def reading_functions() -> set[tuple[str, str]]:
    """Return file and name of every function of the library that reads what a file holds."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(takes_in(call) for call in calls):
                    found.add((path.relative_to(SOURCE).as_posix(), function.name))
    return found


def test_every_place_that_reads_a_file_is_reached_from_a_reader(fuzz_bases: Path) -> None:
    called: dict[int, CodeType] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        """Note a call; without a return value, its lines are not traced."""
        called[id(frame.f_code)] = frame.f_code

    sys.settrace(note)
    try:
        for reader in READERS.values():
            reader.read(fuzz_bases / reader.base)
    finally:
        sys.settrace(None)
    codes = [code for code in called.values() if code.co_filename.startswith(str(SOURCE))]
    reached = {(os.path.relpath(code.co_filename, SOURCE), code.co_name) for code in codes}
    reading = reading_functions()
    missing = reading - reached - set(ELSEWHERE)
    assert not missing, f"no reader of moesaic_lab.fuzz.readers reaches {sorted(missing)}"
    assert set(ELSEWHERE) <= reading


def drawn(name: str, data: bytes, count: int = 100) -> list[tuple[bool, bytes]]:
    found = []

    @seed(1)
    @settings(max_examples=count, database=None, suppress_health_check=list(HealthCheck))
    @given(drawn_from(name, data))
    def each(value: tuple[bool, bytes]) -> None:
        found.append(value)

    each()
    return found


def test_more_than_half_of_all_inputs_are_edited_files() -> None:
    found = drawn("a.json", b'{"a": {"b": [1, 2]}, "c": "d"}')
    assert sum(edited for edited, _ in found) > len(found) / 2
    for edited, data in found:
        if edited:
            json.loads(data)


def test_edited_archives_and_arrays_are_whole() -> None:
    array = io.BytesIO()
    packed = io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3))
    np.savez(packed, header=np.array('{"a": 1}'), table=np.arange(4))
    text = gzip.compress(b"0,1\n0,2\n")
    for edited, data in drawn("a.npy", array.getvalue()):
        assert not edited or np.load(io.BytesIO(data)).dtype.kind != "O"
    for edited, data in drawn("a.npz", packed.getvalue()):
        if edited:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                assert archive.testzip() is None
    different = {gzip.decompress(data) for edited, data in drawn("a.csv.gz", text) if edited}
    assert len(different) > 20


def test_odd_files_are_refused_in_words(fuzz_bases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker as `moesaic fuzz` starts it, but forked from this process, which has made the files
    already."""
    monkeypatch.setattr(run, "make_bases", lambda folder: None)
    ours, theirs = multiprocessing.Pipe()
    words = [str(theirs.fileno()), json.dumps([str(fuzz_bases), ["read"]])]
    forked = multiprocessing.get_context("fork").Process(target=run.start, args=(words,))
    forked.start()
    theirs.close()
    ours.send((100, 7))
    rows = benchmark._received_rows(ours, SimpleNamespace(wait=forked.join), lambda told: None)  # type: ignore[arg-type]
    forked.kill()
    forked.join()
    assert {row["name"].removeprefix("read ") for row in rows} == set(READERS)
    assert [(row["name"], row["crashes"]) for row in rows if row["crashes"]] == []


def test_an_error_that_escapes_is_told_with_its_input(tmp_path: Path) -> None:
    target = Target("read it", st.just((True, b"x")), lambda data: data.index("y"))
    target.drawn(1, 0)()
    assert (target.inputs, target.edited, target.refused) == (1, 1, 0)
    assert list(target.crashes.values()) == [
        """TypeError("argument should be integer or bytes-like object, not 'str'") on b'x'"""
    ]


def test_a_crash_is_named_by_the_line_of_the_library_wherever_the_environment_lies() -> None:
    numpys = from_file(
        "/clones/moesaic/.venv/lib/python3.11/site-packages/numpy/io.py",
        "lambda data: data.index(b'y')",
    )
    for number, place in enumerate(("errors.py", "traces/trace.py")):
        reader = from_file(
            str(SOURCE / place), "\n" * number + "lambda function, data: function(data)"
        )
        target = Target("read it", st.just((True, b"x")), partial(reader, numpys))
        target.drawn(1, 0)()
        assert list(target.crashes) == [f"ValueError at moesaic/{place}:{1 + number}"]


def test_a_refusal_of_two_lines_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(words: list[str]) -> int:
        sys.stderr.write(f"moesaic show: no such thing\n{words[1]}")
        return 2

    monkeypatch.setattr(run.main, "main", refuse)
    with pytest.raises(InputError, match="refused"):
        run._running("show", True)([""])
    with pytest.raises(AssertionError, match="a refusal of 2 lines"):
        run._running("show", True)(["another\n"])


def test_a_worker_that_dies_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "WORKER", "moesaic_lab.fuzz.nowhere")
    (row,) = benchmark.measure(FuzzOptions(inputs=1), None, lambda what: None)
    assert list(row["crashes"]) == ["the worker ended with 1"]


def test_a_slow_reader_goes_on_beside_a_command_that_has_had_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drawn(target: run.Target, count: int, number: int) -> Callable[[], None]:
        def take() -> None:
            target.inputs += count
            target.seconds += target.name.startswith("read")

        return take

    monkeypatch.setattr(run.Target, "drawn", drawn)
    targets = [
        run.Target("read slow", st.none(), repr),
        run.Target("command quick", st.none(), repr),
    ]
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        run._batch(theirs, targets, 100, 0)
    assert sum(target.inputs for target in targets) >= 100
