"""The laboratory's commands are found by their entry points and have help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.cli.main import LABORATORY, main
from moesaic_lab.claims import describe_machine


@pytest.mark.parametrize("command", LABORATORY)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    captured = capsys.readouterr()
    assert f"moesaic {command}" in captured.out
    assert captured.err == ""


def test_help_says_how_long_the_committed_run_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moesaic_lab.benchmark.RESULTS", tmp_path)
    assert main(["bench", "schedules", "--help"]) == 0
    assert "committed run" not in capsys.readouterr().out
    machine = {**describe_machine(), "cpu": "AMD EPYC", "cores": 2}
    (tmp_path / "schedules.json").write_text(json.dumps({"seconds": 1490, "machine": machine}))
    assert main(["bench", "schedules", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "The last committed run took 25 min on two cores of an AMD EPYC." in words
