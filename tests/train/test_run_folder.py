"""Run folders: nothing that no run wrote is ever lost, and two runs never share one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_train import has_lines, start, wait_for
from moesaic.cli.main import main
from moesaic.errors import InputError, TrainingError
from moesaic.train.loop import Trainer
from moesaic.train.run_folder import RunFolder
from moesaic.train.state import open_run
from runs import lines, losses, run_quietly, snapshot, tiny, write_config

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
    "files of another project": (foreign, "holds checkpoints, metrics.jsonl, routing, tensorboard and 1 more"),
    "another program's config.json": (
        lambda folder: (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model": {}}'),
        "holds config.json, which no run wrote as far as can be told (its config.json is damaged)",
    ),
    "an empty config.json": (lambda folder: (folder / "config.json").touch(), "its config.json is damaged"),
    "a config.json that is a list": (lambda folder: (folder / "config.json").write_text("[1]"), "is damaged"),
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
    with pytest.raises(InputError) as caught:
        run_quietly(config)
    assert reason in str(caught.value)
    assert "choose another --out" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("existing", ALL)
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_text("{"), lambda path: path.write_text("")])
def test_a_run_whose_configuration_is_lost_is_refused_and_kept(tmp_path, existing, harm):
    run_quietly(tiny(tmp_path, steps=2, save_every=1))
    config = (tmp_path / "run" / "config.json").read_bytes()
    harm(tmp_path / "run" / "config.json")
    before = snapshot(tmp_path)
    with pytest.raises(
        InputError, match=r"holds checkpoints \(the newest step-00000002\), but its config.json is"
    ) as caught:
        run_quietly(tiny(tmp_path, steps=2, existing=existing))
    assert "put that file back" in str(caught.value)
    assert snapshot(tmp_path) == before
    (tmp_path / "run" / "config.json").write_bytes(config)
    assert run_quietly(tiny(tmp_path, steps=3, existing="resume"))[0].step == 3
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3]


def test_replacing_deletes_what_the_run_wrote_and_nothing_else(tmp_path):
    run_quietly(tiny(tmp_path, steps=2, save_every=1, tensorboard=True, record_routing="counts"))
    run = tmp_path / "run"
    written = snapshot(run)
    mine = [
        "notes.txt", "checkpoints/mine/model.pt", "checkpoints/step-00000001/notes.txt", "checkpoints/step-best/model.pt",
        "tensorboard/x", "routing/notes.txt", "tokenizer.txt",
    ]  # fmt: skip
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
    (tmp_path / "run" / "config.writing").write_text("{")
    assert run_quietly(tiny(tmp_path, steps=1))[0].step == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints", "config.json", "metrics.jsonl"]


@pytest.mark.parametrize("dies_at", ["write", "fsync", "replace"])
def test_the_configuration_is_whole_at_every_instant(tmp_path, monkeypatch, dies_at):
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    run_quietly(tiny(tmp_path, steps=1))
    kept = (tmp_path / "run" / "config.json").read_bytes()
    with monkeypatch.context() as patch:
        if dies_at == "write":
            patch.setattr("moesaic.train.state.as_json", die)
        else:
            patch.setattr(os, dies_at, die)
        with pytest.raises(Killed):
            open_run(tiny(tmp_path, steps=2, existing="resume"), pytest.fail)
    assert (tmp_path / "run" / "config.json").read_bytes() == kept
    assert run_quietly(tiny(tmp_path, steps=2, existing="resume"))[0].step == 2


@pytest.mark.parametrize("existing", ALL)
def test_two_runs_never_share_a_folder(tmp_path, existing):
    first = open_run(tiny(tmp_path, steps=1), pytest.fail)
    before = snapshot(tmp_path)
    with pytest.raises(InputError) as caught:
        open_run(tiny(tmp_path, steps=1, existing=existing), pytest.fail)
    if existing != "refuse":
        assert f"process {os.getpid()} on" in str(caught.value)
        assert "trains into it: wait for it or end it, or choose another --out" in str(caught.value)
    assert snapshot(tmp_path) == before
    first.claim.release()
    assert not (tmp_path / "run" / ".lock").exists()
    open_run(tiny(tmp_path, steps=1, existing="resume"), pytest.fail).claim.release()


def test_a_run_that_fails_lets_go_of_its_folder(tmp_path, monkeypatch):
    run_quietly(tiny(tmp_path, steps=1))
    with pytest.raises(InputError) as caught:
        open_run(tiny(tmp_path, existing="resume", model={"dim": 32}), pytest.fail)
    assert caught.value.__traceback__ is not None
    assert not (tmp_path / "run" / ".lock").exists()
    run_quietly(tiny(tmp_path, steps=2, existing="resume"))


def test_a_killed_run_lets_go_of_its_folder(tmp_path):
    process = start(tiny(tmp_path, steps=1_000_000, save_every=1), tmp_path)
    wait_for(lambda: has_lines(tmp_path / "run", 3), process)
    config = tiny(tmp_path, steps=1, existing="resume")
    with pytest.raises(InputError, match=f"process {process.pid} on"):
        open_run(config, pytest.fail)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
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


@pytest.mark.parametrize("log_every", [1, 100], ids=["before a line of metrics", "before a checkpoint"])
@pytest.mark.parametrize("act", [shutil.rmtree, replaced], ids=["removed", "replaced"])
def test_a_run_whose_folder_goes_ends_with_an_error(tmp_path, monkeypatch, act, log_every):
    after_step(monkeypatch, 3, act)
    config = tiny(tmp_path, steps=6, save_every=2, log_every=log_every)
    with pytest.raises((TrainingError, InputError)) as caught:
        run_quietly(config)
    assert "run" in str(caught.value)
    assert "\n" not in str(caught.value)
    left = snapshot(tmp_path / "run")
    assert set(left) <= {"config.json", "metrics.jsonl"}
    assert set(left.values()) <= {b"another's"}


def test_a_removed_folder_is_an_exit_code_other_than_0(tmp_path, monkeypatch, capsys):
    after_step(monkeypatch, 3, shutil.rmtree)
    file = write_config(tiny(tmp_path, steps=6, save_every=2, log_every=100), tmp_path / "given.json")
    assert main(["train", "--config", str(file)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "was removed or replaced while the run was going on" in err


def test_a_folder_without_locks_is_used_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("moesaic.train.run_folder.fcntl", None)
    assert run_quietly(tiny(tmp_path, steps=1))[0].step == 1
    assert len(lines(tmp_path / "run", "train")) == 1


def test_an_unlockable_folder_is_an_error(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(InputError, match=r"cannot be written .*: choose another --out"):
        RunFolder(tmp_path).claim()


def test_every_version_has_written_the_marks(tmp_path):
    run_quietly(tiny(tmp_path, steps=1))
    table = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(table | {"field_of_the_future": 1}))
    assert run_quietly(replace(tiny(tmp_path, steps=2), existing="resume"))[0].step == 2
