"""CI runs where users run: in a new clone called moesaic, which gets an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (
    "lint test test-random places:\n\t@test ! -e .venv/old && mkdir -p .venv && echo $@ in "
    "$(CURDIR)\n"
)


def repository(folder: Path, makefile: str) -> Path:
    """Make a repository with our script and a Makefile; return the script."""
    script = folder / ".ci" / "run"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", script)
    shutil.copy(ROOT / ".gitignore", folder)
    (folder / "Makefile").write_text(makefile, encoding="utf-8")
    who = {
        f"GIT_{role}_{what}": "someone"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    for words in ("init --quiet", "add .", "commit --quiet --message all"):
        subprocess.run(["git", *words.split()], cwd=folder, env=os.environ | who, check=True)
    return script


def test_ci_runs_in_a_new_clone_called_moesaic(tmp_path: Path) -> None:
    outer = tmp_path / "anywhere"
    script = repository(outer, MAKEFILE)
    inner = outer / "build" / "ci" / "moesaic"
    for _ in range(2):
        done = subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        said = [line for line in done.stdout.splitlines() if " in " in line]
        assert said == [
            f"{target} in {inner}" for target in ("lint", "test", "test-random", "places")
        ]
        (inner / ".venv" / "old").touch()
    left = subprocess.run(["git", "status", "--short"], cwd=outer, capture_output=True, text=True)
    assert left.stdout == ""


def test_a_failure_ends_ci(tmp_path: Path) -> None:
    script = repository(tmp_path, "lint test-random places:\n\ntest:\n\tfalse\n")
    assert subprocess.run(["bash", script], capture_output=True).returncode == 2
