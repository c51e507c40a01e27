"""Run folders: files that no run wrote are never lost, and two runs never share a folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_train import has_lines, start, wait_for
from helpers import refused
from moesaic.cli.main import main
from moesaic.configfile import override
from moesaic.errors import InputError, TrainingError
from moesaic.train import run_folder
from moesaic.train.checkpoint import list_checkpoints
from moesaic.train.config import TrainConfig
from moesaic.train.loop import Trainer
from moesaic.train.metrics import Metrics
from moesaic.train.run_folder import RunFolder
from moesaic.train.state import open_run
from runs import losses, run_quietly, seal, snapshot, tiny, write_config, write_tokenizer

ALL = ["refuse", "resume", "replace"]


def foreign(folder: Path) -> None:
    """Write what another project keeps, under names that a run uses too."""
    for name in (
        "checkpoints/mine/model.pt",
        "tensorboard/x",
        "tokenizer.json",
        "metrics.jsonl",
        "routing/steps-1.npz",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")


NOT_OURS = {
    "files of another project": (
        foreign,
        "holds checkpoints, metrics.jsonl, routing, tensorboard and 1 more",
    ),
    "another program's config.json": (
        lambda folder: (folder / "config.json").write_text(
            '{"architectures": ["GPT2LMHeadModel"], "model": {}}'
        ),
        "holds config.json, which does not look like a run (its config.json is damaged)",
    ),
    "an empty config.json": (
        lambda folder: (folder / "config.json").touch(),
        "its config.json is damaged",
    ),
    "a config.json that is a list": (
        lambda folder: (folder / "config.json").write_text("[1]"),
        "is damaged",
    ),
    "a note": (lambda folder: (folder / "notes.txt").write_text("mine"), "holds notes.txt"),
    "a hidden file": (lambda folder: (folder / ".git").write_text("mine"), "holds .git"),
}


@pytest.mark.parametrize("existing", ALL)
@pytest.mark.parametrize("what", NOT_OURS)
def test_a_folder_that_no_run_wrote_is_refused_and_kept(tmp_path, what, existing):
    arrange, reason = NOT_OURS[what]
    config = tiny(tmp_path, existing=existing)
    (tmp_path / "run").mkdir()
    arrange(tmp_path / "run")
    before = snapshot(tmp_path)
    caught = refused(run_quietly, config)
    assert reason in caught
    assert "choose another --out" in caught
    assert snapshot(tmp_path) == before


HARMS = [Path.unlink, lambda path: path.write_text("{"), lambda path: path.write_text("")]


def without_copies(run: Path) -> None:
    """Take the copies of the configuration out of the checkpoints."""
    for path in list_checkpoints(run / "checkpoints"):
        (path / "config.json").unlink()
        seal(path)


@pytest.mark.parametrize(
    ("existing", "has_copies"),
    [("refuse", True), ("replace", True), *((each, False) for each in ALL)],
)
@pytest.mark.parametrize("harm", HARMS)
def test_a_run_whose_configuration_is_lost_is_refused_and_kept(ran, existing, has_copies, harm):
    if not has_copies:
        without_copies(ran / "run")
    harm(ran / "run" / "config.json")
    before = snapshot(ran)
    lost = r"holds checkpoints \(the newest step-00000002\), but its config.json is"
    advice = (
        "--existing resume takes the copy in step-00000002" if has_copies else "put that file back"
    )
    with pytest.raises(InputError, match=f"{lost}.*{advice}"):
        open_run(tiny(ran, existing=existing), pytest.fail)
    assert snapshot(ran) == before


@pytest.mark.parametrize("harm", HARMS)
def test_a_lost_configuration_is_taken_from_the_newest_whole_checkpoint(ran, capsys, harm):
    own = ran / "run" / "config.json"
    config = tiny(ran)
    write_config(replace(config, existing="resume"), own)
    for path in list_checkpoints(ran / "run" / "checkpoints"):
        shutil.copy(own, path)
        seal(path)
    (path / "config.json").write_text("{}")  # damaged too: its checksum tells
    harm(own)
    assert main(["train", "--config", str(own), "--existing", "resume", "--steps", "3"]) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert f"config {own}: " in said.err
    assert "taking its copy in step-00000001" in said.err
    assert "step-00000002: config.json does not match its checksum" in said.out
    assert f"{own}: was lost or damaged, and is written anew" in said.out
    assert json.loads(own.read_text())["steps"] == 3
    assert [step for step, _ in losses(ran / "run")] == [1, 2, 3]


def test_settings_changed_in_a_configuration_by_damage_are_said(ran):
    own = ran / "run" / "config.json"
    own.write_text(own.read_text().replace('"lr": 0.01', '"lr": 0.03'))
    config = override(
        TrainConfig(), json.loads(own.read_text()) | {"out": str(ran / "run")}, source="kept"
    )
    said: list[str] = []
    open_run(config, said.append).claim.release()
    assert "resumed with other settings, optimizer.lr (0.03 and 0.01) (now and before)" in said[0]


DAMAGES = {
    "a line": (lambda data: data.replace(b'"kind"', b"kind", 1), "line 1 is damaged"),
    "the end": (lambda data: data[: len(data) // 2], ""),
    "all": (lambda data: b"", ""),
    "nothing, and more steps": (
        lambda data: data + data.splitlines(keepends=True)[0].replace(b"1", b"9"),
        "",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_metrics_are_said_and_what_can_be_read_is_kept(ran, what):
    own = ran / "run" / "metrics.jsonl"
    damage, reason = DAMAGES[what]
    own.write_bytes(damage(own.read_bytes()))
    _, said = run_quietly(tiny(ran, steps=3, existing="resume"))
    assert (f"{own}: {reason}" in said) == bool(reason)
    assert ("what can be read of it is kept" in said) == bool(reason)
    assert [step for step, _ in losses(ran / "run")][-1:] == [3]
    found: list[str] = []
    Metrics(ran / "run", 3, say=found.append).close()
    assert found == []


def reaped() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("host", "process", "refusal"),
    [
        (socket.gethostname(), reaped, ""),
        (socket.gethostname(), os.getppid, "started 2026-01-01 00:00:00 UTC, trains into it"),
        ("elsewhere", lambda: 7, "process 7 on elsewhere"),
    ],
    ids=["killed", "alive", "of another host"],
)
def test_where_there_are_no_locks_the_owner_decides_whether_one_is_stale(
    tmp_path, monkeypatch, host, process, refusal
):
    monkeypatch.setattr(run_folder, "fcntl", None)
    owner = {"process": process(), "host": host, "started": "2026-01-01 00:00:00 UTC"}
    (tmp_path / ".lock").write_text(json.dumps(owner))
    folder = RunFolder(tmp_path)
    if refusal:
        caught = refused(folder.claim)
        assert re.search(refusal, caught)
        assert f"delete {tmp_path / '.lock'}: this file system knows no locks" in caught
        return
    folder.claim()
    assert json.loads((tmp_path / ".lock").read_text())["process"] == os.getpid()
    with pytest.raises(InputError, match=f"process {os.getpid()} on"):
        RunFolder(tmp_path).claim()
    folder.release()
    assert not (tmp_path / ".lock").exists()


def test_replacing_deletes_what_the_run_wrote_and_nothing_else(tmp_path):
    data = {"tokenizer": write_tokenizer(tmp_path / "given.json")}
    run_quietly(
        tiny(
            tmp_path,
            steps=2,
            save={"every": 1},
            tensorboard=True,
            record_routing="counts",
            data=data,
        )
    )
    run = tmp_path / "run"
    written = snapshot(run)
    mine = [
        "notes.txt",
        "checkpoints/mine/model.pt",
        "checkpoints/step-00000001/notes.txt",
        "checkpoints/step-best/model.pt",
        "tensorboard/x",
        "routing/notes.txt",
        "tokenizer.txt",
    ]
    for name in mine:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    run_quietly(tiny(tmp_path, steps=3, existing="replace"))
    left = snapshot(run)
    assert {name for name, data in left.items() if data == b"mine"} == set(mine)
    assert {name for name in left if name in written} == {"config.json", "metrics.jsonl"}
    assert run_quietly(tiny(tmp_path, steps=4, existing="resume"))[0].step == 4


def test_what_a_killed_start_leaves_is_no_obstacle(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("process 1 on elsewhere")
    (tmp_path / "run" / ".writing-0a1b2c3d-config.json").write_text("{")
    assert run_quietly(tiny(tmp_path, steps=1))[0].step == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.json",
        "metrics.jsonl",
    ]


@pytest.mark.parametrize("dies_at", ["write", "fsync", "replace"])
def test_the_configuration_is_whole_at_every_instant(ran, monkeypatch, dies_at):
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    kept = (ran / "run" / "config.json").read_bytes()
    with monkeypatch.context() as patch:
        if dies_at == "write":
            patch.setattr("moesaic.train.state.as_json", die)
        else:
            patch.setattr(os, dies_at, die)
        with pytest.raises(Killed):
            open_run(tiny(ran, steps=3, existing="resume"), pytest.fail)
    assert (ran / "run" / "config.json").read_bytes() == kept
    open_run(tiny(ran, steps=3, existing="resume"), pytest.fail).claim.release()


@pytest.mark.parametrize("existing", ALL)
def test_two_runs_never_share_a_folder(tmp_path, existing):
    first = open_run(tiny(tmp_path, steps=1), pytest.fail)
    before = snapshot(tmp_path)
    caught = refused(lambda: open_run(tiny(tmp_path, steps=1, existing=existing), pytest.fail))
    if existing != "refuse":
        assert f"process {os.getpid()} on" in caught
        assert "trains into it: wait for it or end it, or choose another --out" in caught
    assert snapshot(tmp_path) == before
    first.claim.release()
    assert not (tmp_path / "run" / ".lock").exists()
    said: list[str] = []
    open_run(tiny(tmp_path, steps=1, existing="resume"), said.append).claim.release()
    assert said == [f"no intact checkpoint in {tmp_path / 'run'}: starts at step 0"]


def test_a_run_that_fails_lets_go_of_its_folder(ran):
    with pytest.raises(InputError) as caught:
        open_run(tiny(ran, existing="resume", model={"dim": 32}), pytest.fail)
    assert caught.value.__traceback__ is not None
    assert not (ran / "run" / ".lock").exists()


def test_a_killed_run_lets_go_of_its_folder(tmp_path):
    process = start(tiny(tmp_path, steps=1_000_000, save={"every": 1}), tmp_path)
    wait_for(lambda: has_lines(tmp_path / "run", 3), process)
    config = tiny(tmp_path, steps=1, existing="resume")
    with pytest.raises(InputError, match=f"process {process.pid} on"):
        open_run(config, pytest.fail)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=300)
    open_run(config, lambda line: None).claim.release()


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, act: object) -> None:
    """Do something to the folder of a run after one of its steps."""
    plain = Trainer._step

    def stepping(self: Trainer) -> dict:
        values = plain(self)
        if self.state.step == step:
            act(self.state.folder)
        return values

    monkeypatch.setattr(Trainer, "_step", stepping)


def replaced(folder: Path) -> None:
    """Put another run's folder in the place of one."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text("another's")
    (folder / "metrics.jsonl").write_text("another's")


@pytest.mark.parametrize(
    "log_every", [1, 100], ids=["before a line of metrics", "before a checkpoint"]
)
@pytest.mark.parametrize("act", [shutil.rmtree, replaced], ids=["removed", "replaced"])
def test_a_run_whose_folder_goes_ends_with_an_error(ran, monkeypatch, act, log_every):
    after_step(monkeypatch, 3, act)
    with pytest.raises((TrainingError, InputError), match="run") as caught:
        run_quietly(tiny(ran, steps=5, save={"every": 4}, log_every=log_every, existing="resume"))
    assert "\n" not in str(caught.value)
    left = snapshot(ran / "run")
    assert set(left) <= {"config.json", "metrics.jsonl"}
    assert set(left.values()) <= {b"another's"}


def test_an_unlockable_folder_is_an_error(tmp_path):
    (tmp_path / ".lock").mkdir()
    assert ".lock': is a folder: nothing is written" in refused(lambda: RunFolder(tmp_path).claim())


def test_a_configuration_of_another_version_is_a_runs(ran):
    own = ran / "run" / "config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"field_of_the_future": 1}))
    open_run(tiny(ran, existing="resume"), pytest.fail).claim.release()


def test_a_lock_that_names_nobody_is_read_as_nobodys() -> None:
    named = '{"process": PROCESS, "host": "a", "started": "x"}'
    for text in (
        "",
        "{",
        "[1]",
        "{}",
        "[" * 100_000,
        *(named.replace("PROCESS", what) for what in ('"1"', "-1", "1e99")),
    ):
        assert run_folder._read_owner(text) is None, text[:20]
