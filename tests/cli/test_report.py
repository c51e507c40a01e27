"""`moesaic report`: what it prints, and one line with exit code 2 for what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moesaic.cli.main import main
from report.folders import dense_run, sparse_run


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line that a refused command prints."""
    assert main(["report", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_the_path_of_the_page_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    moe = sparse_run(tmp_path / "moe")
    dense = dense_run(tmp_path / "dense")
    assert main(["report", str(moe), str(dense)]) == 0
    assert capsys.readouterr().out == f"{moe / 'report.html'}\n"
    assert "moe vs dense" in (moe / "report.html").read_text(encoding="utf-8")
    assert not (dense / "report.html").exists()


def test_out_names_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    out = tmp_path / "pages" / "one.html"
    assert main(["report", str(dense_run(tmp_path / "dense")), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.is_file()
    assert not (tmp_path / "dense" / "report.html").exists()


def test_the_timeline_is_named_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    dense = dense_run(tmp_path / "dense")
    timeline = tmp_path / "timeline.json"
    assert main(["report", str(dense), "--perfetto", str(timeline)]) == 0
    assert capsys.readouterr().out == f"{dense / 'report.html'}\n{timeline}\n"


def test_json_prints_the_numbers_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    moe = sparse_run(tmp_path / "moe")
    dense = dense_run(tmp_path / "dense")
    assert main(["report", "--json", str(moe), str(dense)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["page"] == str(moe / "report.html")
    assert Path(printed["page"]).is_file()
    assert [run["name"] for run in printed["runs"]] == ["moe", "dense"]
    assert [run["last_val_nats_per_byte"] for run in printed["runs"]] == [2.75, 2.875]
    assert printed["runs"][0]["max_violation_per_layer"] == [0.5, 0.9]


def test_refusals_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moe = sparse_run(tmp_path / "moe")
    missing = str(tmp_path / "missing")
    assert (
        refusal(capsys)
        == "moesaic report: name at least one run folder: moesaic report runs/demo/moe"
    )
    assert refusal(capsys, missing) == (
        f"moesaic report: {missing}: no such folder: name the folder that moesaic train wrote"
    )
    assert "unknown argument --jsn, did you mean --json?" in refusal(capsys, str(moe), "--jsn")
    assert "give a file name" in refusal(capsys, str(moe), "--out", "")
    pytest.importorskip("plotly")
    assert "--out" in refusal(capsys, str(moe), "--out")
    assert "is a folder: name a file" in refusal(capsys, str(moe), "--out", str(tmp_path))


def test_a_missing_plotly_is_one_line(tmp_path, capsys, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "plotly" or name.startswith("moesaic.report."):
            monkeypatch.delitem(sys.modules, name)
    for name in ("plotly", "plotly.graph_objects", "plotly.io", "plotly.offline", "plotly.colors"):
        monkeypatch.setitem(sys.modules, name, None)
    line = refusal(capsys, str(sparse_run(tmp_path / "moe")))
    assert line.startswith("moesaic report: needs the package plotly")
    assert line.endswith('pip install ".[report]"')
