"""`moesaic show`: programs and bytes on the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moesaic.cli.main import main
from moesaic.program.text import from_text


def test_it_prints_a_program_that_parses_back_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--schedule", "s3", "--chunks", "2"]) == 0
    text, table = capsys.readouterr().out.split("\n\n", 1)
    assert from_text(text).name == "s3, 2 chunks"
    assert "across nodes" in table


def test_json_counts_the_bytes_across_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--world 8 --tp 1 --ep 2 --etp 4 --tokens 64 --dim 10 --num-experts 8 --top-k 1 --element-bytes 2 --json"
    totals = {}
    for schedule in ("s2", "s3"):
        assert main(["show", "--schedule", schedule, *flags.split()]) == 0
        rows = {row["task"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        totals[schedule] = rows["h" if schedule == "s2" else "arrived"]["across_bytes"]
    assert totals["s3"] == 8 * 64 // 2 * 10 * 2
    assert totals["s2"] == 4 * totals["s3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--schedule ted --tp 1", "choose equal ones with etp innermost, or s3"),
        ("--world 6 --ranks-per-node 4", "--ranks-per-node 4 does not divide --world 6"),
        ("--world 6 --ranks-per-node 3 --tp 4", "mesh.tp=4 does not divide the 6 ranks"),
        ("--chunks 0", "plan.chunks=0"),
        ("--tokens 0", "--tokens 0: must be at least 1"),
        ("--num-experts 3", "num_experts=3 does not split over mesh.ep=2"),
    ],
)
def test_bad_input_is_one_line(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *flags.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error


def test_it_needs_no_torch() -> None:
    code = "import sys; from moesaic.cli.main import main; main(['show', '--json']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
