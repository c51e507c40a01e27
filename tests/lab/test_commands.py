"""The laboratory's commands are found by their entry points and have help."""

from __future__ import annotations

import pytest

from moesaic.cli.main import LABORATORY, main


@pytest.mark.parametrize("command", LABORATORY)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    captured = capsys.readouterr()
    assert f"moesaic {command}" in captured.out
    assert captured.err == ""
