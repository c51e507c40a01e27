"""`moesaic fuzz`: every place that reads a file is reached, inputs are what they should be, and some of them are tried."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, given, settings

import moesaic
from moesaic_lab.fuzz.benchmark import BENCHMARK
from moesaic_lab.fuzz.mutate import mutated
from moesaic_lab.fuzz.readers import READERS, make_bases

SOURCE = Path(moesaic.__file__).parent
READS = ("read_text", "read_bytes", "json.loads", "safe_open", "load_file", "memmap", "fromfile")
"""Names of calls that take in what a file holds."""
ELSEWHERE = {
    ("comm/agree.py", "check_same"): "reads what ranks sent each other",
    ("runtime/auto_plan.py", "_first_says"): "reads what ranks sent each other",
    ("train/distributed_checkpoint.py", "restore"): "tests/train/test_on_two_ranks.py",
    ("train/distributed_checkpoint.py", "_listed_whole"): "tests/train/test_on_two_ranks.py",
    ("train/shard_metadata.py", "read_metadata"): "hands the file to read_list",
    ("train/watch.py", "_give_up"): "reads what ranks wrote into their store",
    ("train/roll.py", "_fate_here"): "reads /proc",
    ("cost/profile.py", "_processor"): "reads /proc",
    ("train/auto_plan.py", "_read"): "tests/train/test_auto_plan.py",
    ("weights/quantized.py", "_block_size"): "tests/weights/test_quantized.py",
    ("weights/convert.py", "_read_receipt"): "tests/weights/test_convert.py",
    ("traces/formats/megatron.py", "_record"): "tests/traces/test_trace_formats.py",
    ("traces/formats/routed_experts.py", "_request"): "tests/traces/test_trace_formats.py",
    ("traces/formats/smartmoe.py", "_table"): "tests/traces/test_trace_formats.py",
    ("train/checkpoint.py", "_write_whole"): "compares what it has just written",
    ("train/watch.py", "_moved_bytes"): "reads /proc",
    ("weights/megatron.py", "_inside"): "reads one word that is compared",
}
"""What reads something else than a person's file, or is tried elsewhere."""


def reading_functions() -> set[tuple[str, str]]:
    """Return file and name of every function of the library that reads what a file holds."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {ast.unparse(call) for call in calls}
                if any(name == word or name.endswith(f".{word}") for name in names for word in READS):
                    found.add((path.relative_to(SOURCE).as_posix(), function.name))
    return found


def test_every_place_that_reads_a_file_is_reached_from_a_reader(tmp_path: Path) -> None:
    make_bases(tmp_path)
    reached: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            reached.add((os.path.relpath(frame.f_code.co_filename, SOURCE), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        for reader in READERS.values():
            reader.read(tmp_path / reader.base)
    finally:
        sys.setprofile(None)
    missing = reading_functions() - reached - set(ELSEWHERE)
    assert not missing, f"no reader of moesaic_lab.fuzz.readers reaches {sorted(missing)}"
    assert set(ELSEWHERE) <= reading_functions()


def test_changed_tables_are_tables_still() -> None:
    @settings(max_examples=200, database=None, suppress_health_check=list(HealthCheck))
    @given(mutated("json", b'{"a": {"b": [1, 2]}, "c": "d"}'))
    def each(data: bytes) -> None:
        json.loads(data)

    each()


def test_odd_files_are_refused_in_words(tmp_path: Path) -> None:
    target = tmp_path / "fuzz.json"
    assert (
        BENCHMARK.run(["--inputs", "400", "--only", "read", "--seed", "7", "--json", str(target)]) == 1
    )  # too few inputs
    rows = json.loads(target.read_text())["rows"]
    assert {row["name"].removeprefix("read ") for row in rows} == set(READERS)
    assert [(row["name"], row["crashes"]) for row in rows if row["crashes"]] == []
