"""The laboratory's commands are found by their entry points and have help; `moesaic reproduce` needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cli.main import LABORATORY, main

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split('.')[0] in ('torch', 'safetensors', 'tensorboard', 'plotly', 'triton'):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
from moesaic.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", LABORATORY)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    captured = capsys.readouterr()
    assert f"moesaic {command}" in captured.out
    assert captured.err == ""


def test_figures_of_papers_need_no_torch(lab_metadata: Path, tmp_path: Path) -> None:
    paths = [str(lab_metadata), str(ROOT / "src"), str(ROOT / "lab")]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "reproduce", "netmoe", "--json", "-"], cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["claims"]
