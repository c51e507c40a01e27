"""`moesaic train`: sources of settings, and the state that signals and kills leave behind."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import pytest

from forked import Forked
from helpers import refused
from moesaic.cli import train as command
from moesaic.cli.main import main
from moesaic.cli.train import USUAL
from moesaic.errors import InputError
from moesaic.train import loop
from moesaic.train.checkpoint import list_checkpoints
from moesaic.train.config import TrainConfig
from moesaic.train.loop import TrainResult
from moesaic.train.presets import PRESETS
from moesaic.train.presets import preset as make_preset
from runs import assert_same, losses, parameters, run_quietly, tiny, write_config


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Collect configurations instead of training them."""
    found: list[TrainConfig] = []

    def note(config: TrainConfig, **_: object) -> TrainResult:
        found.append(config)
        return TrainResult(Path(config.out), config.steps, 1.0, 1.0, False)

    monkeypatch.setattr(loop, "train", note)
    return found


def docs_of(kind: type, prefix: str = "--") -> dict[str, str]:
    """Return a dict from flag to field docstring, including nested dataclasses."""
    trees = [
        ast.parse(inspect.getsource(each)).body[0] for each in kind.__mro__ if is_dataclass(each)
    ]
    texts = {
        field.target.id: text.value.value
        for tree in trees
        for field, text in zip(tree.body, tree.body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    hints = get_type_hints(kind)
    found = {}
    for field in fields(kind):
        flag = prefix + field.name.replace("_", "-")
        if is_dataclass(hints[field.name]):
            found |= docs_of(hints[field.name], f"{flag}.")
        else:
            found[flag] = texts[field.name]
    return found


def plain(text: str) -> str:
    """Return text without frames, colours and spaces, since wrapping changes them."""
    return re.sub(r"[\s─-╿]|\x1b\[[0-9;]*m", "", text)


def test_the_help_is_short_and_lists_what_most_people_set(capsys):
    assert main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    docs = docs_of(TrainConfig)
    assert len(lines) < 150
    assert set(re.findall(r"^\W (--[a-z][\w.-]+)", "\n".join(lines), re.MULTILINE)) == set(USUAL)
    assert set(USUAL) < set(docs)
    assert any("--help-all lists every flag" in line for line in lines)


def test_the_long_help_holds_every_fields_text(capsys):
    assert main(["train", "--help-all"]) == 0
    out = plain(capsys.readouterr().out)
    docs = docs_of(TrainConfig)
    assert len(docs) > 40
    assert [flag for flag in docs if flag not in out] == []
    assert [flag for flag, text in docs.items() if plain(text) not in out] == []
    assert [name for name in PRESETS if name not in out] == []


def test_every_flag_that_a_message_names_exists():
    known = {*docs_of(TrainConfig), "--config", "--help", "--plan"}
    # torchrun, moesaic show and plan, pip
    of_others = {
        "--max-restarts",
        "--nnodes",
        "--nproc-per-node",
        "--write",
        "--no-deps",
        "--force-reinstall",
    }
    named = {
        (path.name, flag.rstrip("."))
        for path in Path(loop.__file__).parent.glob("*.py")
        for flag in re.findall(r"--[a-z][a-z._-]+", path.read_text(encoding="utf-8"))
    }
    assert {(file, flag) for file, flag in named if flag not in known | of_others} == set()


def test_help_shows_the_presets_values(capsys):
    assert main(["train", "--preset", "gpt-tiny", "--help"]) == 0
    assert "(default:runs/gpt-tiny)" in plain(capsys.readouterr().out)


def test_a_preset_then_a_file_then_flags(tmp_path, taken):
    file = tmp_path / "a.toml"
    file.write_text(
        'steps = 7\nbatch_size = 3\n[model.moe]\nrouter = "sigmoid"\n[optimizer]\nlr = 1\n'
    )
    assert main(["train", "--preset", "gpt-tiny"]) == 0
    assert main(["train", "--preset=gpt-tiny", f"--config={file}"]) == 0
    assert (
        main(
            [
                "train",
                "--steps",
                "9",
                "--preset",
                "gpt-tiny",
                "--config",
                str(file),
                "--model.moe.top-k=1",
            ]
        )
        == 0
    )
    preset, filed, flagged = taken
    assert preset == make_preset("gpt-tiny")
    expected = make_preset("gpt-tiny")
    moe = replace(expected.model.moe, router="sigmoid")
    expected = replace(
        expected,
        steps=7,
        batch_size=3,
        model=replace(expected.model, moe=moe),
        optimizer=replace(expected.optimizer, lr=1.0),
    )
    assert filed == expected
    assert flagged == replace(
        expected, steps=9, model=replace(expected.model, moe=replace(moe, top_k=1))
    )


def test_without_anything_the_defaults_hold(taken):
    assert main(["train"]) == 0
    assert taken == [TrainConfig()]


def test_several_paths_and_none(taken):
    assert main(["train", "--data.path", "a.txt", "b", "--threads", "2", "--no-tensorboard"]) == 0
    assert (
        main(
            [
                "train",
                "--device",
                "cpu",
                "--mesh.pp",
                "2",
                "--mesh.parts-per-stage",
                "2",
                "--accumulation",
                "2",
            ]
        )
        == 0
    )
    assert taken[0].data.path == ("a.txt", "b")
    assert (taken[0].threads, taken[0].tensorboard) == (2, False)
    assert (taken[1].threads, taken[1].mesh.pp, taken[1].mesh.parts_per_stage) == (None, 2, 2)


def test_the_configuration_of_a_run_takes_it_up_again(tmp_path, capsys):
    config = tiny(tmp_path, steps=2)
    assert main(["train", "--config", str(write_config(config, tmp_path / "a.json"))]) == 0
    assert f"done: {tmp_path / 'run'}, step 2" in capsys.readouterr().out
    kept = tmp_path / "run" / "config.json"
    assert main(["train", "--config", str(kept), "--steps", "3"]) == 0
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3]
    assert main(["train", "--config", str(kept), "--out", str(tmp_path / "other")]) == 0
    saved = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("run", "other")]
    assert saved[0] | {"out": saved[1]["out"]} == saved[1]
    assert saved[0]["steps"] == 3


def test_a_misspelt_preset_is_recognised():
    with pytest.raises(InputError, match=r"^unknown argument --prset, did you mean --preset\?"):
        command._configured(["--prset", "demo"], PRESETS, "moesaic train")


def test_what_is_no_decoder_is_the_laboratorys(tmp_path, capsys):
    assert main(["train", "--preset", "bert-tiny"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "moesaic train: preset bert-tiny is of kind encoder: train it with moesaic bench "
        "paper-train bert-tiny\n"
    )
    config = tiny(tmp_path, model={"block": {"kind": "encoder_decoder"}})
    assert (
        "model.block.kind=encoder_decoder: is no decoder: train it with moesaic bench"
        in refused(loop.train, config)
    )
    assert not (tmp_path / "run").exists()


def start(config: TrainConfig, folder: Path) -> Forked:
    """Start `moesaic train` in a process of its own."""
    file = write_config(config, folder / "given.json")
    return Forked(["-m", "moesaic", "train", "--config", str(file)], {})


def wait_for(reached: Callable[[], bool], process: Forked) -> None:
    """Wait until `reached`, as long as the process lives, at most five minutes."""
    deadline = time.monotonic() + 300
    while not reached():
        assert process.poll() is None, process.said()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_lines(folder: Path, count: int) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= count


@pytest.mark.parametrize(
    "kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda kind: kind.name
)
def test_a_signal_saves_says_how_to_go_on_and_exits_0(tmp_path, kind):
    config = tiny(
        tmp_path,
        steps=1_000_000,
        model={"moe": {"router": "noisy"}},
        optimizer={"warmup_steps": 1000000},
    )
    run = tmp_path / "run"
    process = start(config, tmp_path)
    wait_for(lambda: has_lines(run, 3), process)
    process.send_signal(kind)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    step = losses(run)[-1][0]
    assert step >= 3
    assert (
        f"stopped by {kind.name} after step {step}, saved; go on with moesaic train --config" in out
    )
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [f"step-{step:08d}"]
    words = re.search(r"go on with moesaic (.*)", out)
    assert words
    assert main([*shlex.split(words.group(1)), "--steps", str(step + 2)]) == 0
    whole = replace(config, steps=step + 2, out=str(tmp_path / "whole"))
    run_quietly(whole)
    assert [number for number, _ in losses(run)] == list(range(1, step + 3))
    assert losses(run) == losses(tmp_path / "whole")
    assert_same(parameters(run), parameters(tmp_path / "whole"))


@pytest.mark.parametrize("rank", ["0", "1", None])
def test_the_first_line_comes_before_torch_is_imported(monkeypatch, capsys, rank):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setitem(sys.modules, "moesaic.train.launch", None)  # the import fails
    with pytest.raises(ImportError):
        command.run(["--preset", "demo"])
    assert capsys.readouterr().out == ("" if rank == "1" else "moesaic train: loading PyTorch\n")
