"""A place where nothing can be written is refused before the work whose result goes there, by every
command that takes one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moesaic.cli.main import COMMANDS, main
from moesaic.files import require_writable
from runs import tiny, write_config

COMMAND_LINES = {
    "train": "train --config given.json --out {}/run",
    "demo": "demo --out {}/run",
    "finetune": "finetune model data.txt --out {}/run",
    "convert": "convert model {}/hub --to hf",
    "tokenize": "tokenize data.txt --out {}/tokens.bin",
    "report": "report no-run --out {}/page.html",
    "profile": "profile --out {}/cluster.toml",
    "plan --write": "plan --model demo --cluster 25gbe --write {}/plan.toml",
    "plan --page": "plan --model demo --cluster 25gbe --page {}/plan.html",
    "trace counts": "trace counts no-trace --out {}/counts.csv",
    "trace convert": "trace convert no-trace --from vllm --out {}/trace.npz",
}
"""What would fail later, for lack of a model, a run or a trace, is not reached."""
WRITE_NOTHING = {"sample", "why-hung", "check", "certify"}
QUICK = {"show"}
"""Writes after less than a second of work."""


def test_every_command_that_writes_is_here() -> None:
    named = {line.split()[0] for line in COMMAND_LINES.values()}
    assert named == set(COMMANDS) - WRITE_NOTHING - QUICK


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no file system that takes no file")
@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_place_that_takes_no_file_is_refused_first(name, tmp_path, capsys, monkeypatch):
    """Not even root can write in /proc."""
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("text\n" * 50)
    write_config(tiny(tmp_path), tmp_path / "given.json")
    assert main(COMMAND_LINES[name].format("/proc").split()) == 2
    shown, said = capsys.readouterr()
    assert "/proc/" in said
    assert "cannot be written (" in said
    assert "choose another" in said
    assert len(said.splitlines()) == 1
    assert "reading" not in shown


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in ("file", "new", "a/b/new"):
        require_writable(tmp_path / path, "--out", makes_parents=True)
    require_writable(None, "--out")
    require_writable("/dev/null", "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"
    shutil.rmtree(tmp_path)
    with pytest.raises(ValueError, match=r"--out .*: cannot be written \(No such file"):
        require_writable(tmp_path / "new", "--out")
