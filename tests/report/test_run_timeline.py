"""The timeline of a run in the form that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path

from moesaic.cli.main import main
from report.folders import write_run

TIMES = {"seconds": [2.0, 2.0], "compute": [0.5, 1.25], "waited": [[0.0, 1.0], [0.25, 0.0]]}


def line(step: int, seconds: float, **more: object) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss": 2.0, "seconds": seconds, "layers": []} | more


def test_each_rank_has_a_row_with_its_computing_and_waiting(tmp_path: Path, capsys) -> None:
    lines = [line(2, 2.0, ranks=TIMES), line(3, 3.5), {"kind": "eval", "step": 3, "seconds": 3.5}]
    run = write_run(tmp_path / "run", lines)
    assert main(["report", str(run), "--perfetto", str(tmp_path / "timeline.json")]) == 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert events[0] == {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "run"}}
    found = [(each["tid"], each["name"], each["ts"], each["dur"]) for each in events[1:]]
    assert found == [
        (0, "steps 1 to 2", 0.0, 2e6),
        (0, "compute", 0.0, 0.5e6),
        (0, "wait for rank 1", 0.5e6, 1e6),
        (1, "steps 1 to 2", 0.0, 2e6),
        (1, "compute", 0.0, 1.25e6),
        (1, "wait for rank 0", 1.25e6, 0.25e6),
        (0, "steps 3 to 3", 2e6, 1.5e6),
    ]
    assert {each["ph"] for each in events[1:]} == {"X"}
    assert events[1]["args"] == {"loss": 2.0}


def test_a_timeline_that_cannot_be_written_is_refused(tmp_path: Path, capsys) -> None:
    run = write_run(tmp_path / "run", [line(1, 1.0)])
    assert main(["report", str(run), "--perfetto", str(tmp_path / "no" / "t.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not (run / "report.html").exists()
