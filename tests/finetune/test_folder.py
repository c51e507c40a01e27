"""What a resumed fine-tuning run takes, refuses and writes: damaged checkpoints, other inputs,
links, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

from finetuned import FLAGS, RESULT, digest, finetune, write_model, write_text
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from forked import Forked
from helpers import thinned
from moesaic.finetune import trainer
from moesaic.finetune.folder import CHECKPOINTS
from moesaic.finetune.states import read_states, write_states
from moesaic.resuming import COMPLETE, seal
from moesaic.train.run_folder import RunFolder

IMPORTS = ("transformers", "moesaic.finetune.recipe")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, a text, and a finished run on it."""
    path = tmp_path_factory.mktemp("finetune")
    write_model(path / "model")
    write_text(path / "text.txt")
    assert finetune(path, path / "run") == 0
    return path


@pytest.fixture
def run(place: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(place / "run", tmp_path / "run"))


def flip(path: Path) -> None:
    """Flip a bit in the second half of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def zero(path: Path) -> None:
    """Zero 64 bytes in the second half of a file."""
    data = bytearray(path.read_bytes())
    at = len(data) * 3 // 4
    data[at : at + 64] = bytes(len(data[at : at + 64]))
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    (RESULT, flip),
    (RESULT, cut),
    ("states-*", zero),
    ("states-*", Path.unlink),
    ("trainer_state.json", cut),
    (COMPLETE, lambda path: path.write_text("{}\n")),
    (COMPLETE, Path.unlink),
    ("finetune.json", flip),
]


@pytest.mark.parametrize(("name", "change"), thinned(DAMAGES, every=4))
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(place, run, capsys, name, change):
    (path,) = (run / "checkpoint-4").glob(name)
    change(path)
    assert finetune(place, run, "--resume") == 0
    said = capsys.readouterr().err
    assert "a checkpoint is damaged (checkpoint-4: " in said
    assert path.name in said
    assert "taking checkpoint-2 instead" in said
    assert digest(run / RESULT) == digest(place / "run" / RESULT)


def of_step(states: dict[str, Any], value: Any) -> None:
    states["optimizer"]["state"][0]["exp_avg"] = value


STRANGE: list[Callable[[dict[str, Any]], object]] = [
    lambda states: of_step(states, torch.zeros(3)),
    lambda states: states["optimizer"]["state"][0].pop("exp_avg"),
    lambda states: states["optimizer"]["state"].popitem(),
    lambda states: states["optimizer"]["state"].update({99: states["optimizer"]["state"][0]}),
    lambda states: states["optimizer"]["param_groups"][0].update(lr="x"),
    lambda states: states["optimizer"]["param_groups"].pop(),
    lambda states: states["optimizer"].update(state=3),
    lambda states: states["schedule"].update(last_epoch="x"),
    lambda states: states["schedule"].clear(),
    lambda states: states["random"].clear(),
    lambda states: states.update(random=[torch.zeros(3)]),
]


@pytest.mark.parametrize("change", thinned(STRANGE, every=5))
def test_states_that_are_none_of_the_run_s_are_refused_in_one_line(place, run, capsys, change):
    shutil.rmtree(run / "checkpoint-4")
    checkpoint = run / "checkpoint-2"
    (path,) = checkpoint.glob("states-*")
    states = read_states(path)
    change(states)
    write_states(path, states)
    resealed(checkpoint)
    assert finetune(place, run, "--resume") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith(f"moesaic finetune: {checkpoint}: its states are none of this run (")


def test_a_checkpoint_of_another_run_is_not_taken(place, run, tmp_path, capsys):
    assert finetune(place, tmp_path / "other", "--seed", "5") == 0
    shutil.rmtree(run / "checkpoint-4")
    shutil.copytree(tmp_path / "other/checkpoint-4", run / "checkpoint-4")
    assert finetune(place, run, "--resume") == 0
    said = capsys.readouterr().err
    assert "checkpoint-4: it is of another run: finetune.json has seed=5" in said
    assert digest(run / RESULT) == digest(place / "run" / RESULT)


def resealed(checkpoint: Path) -> None:
    """Write the checksums of a checkpoint anew."""
    files = [path for path in checkpoint.iterdir() if path.name != COMPLETE]
    seal(checkpoint, {path.name: digest(path) for path in files})


@pytest.mark.parametrize(
    ("name", "value"),
    thinned(
        [
            ("log_history", 5),
            ("train_batch_size", "x"),
            ("total_flos", None),
            ("num_input_tokens_seen", []),
            ("best_model_checkpoint", [1]),
        ],
        every=5,
    ),
)
def test_a_trainer_s_state_of_other_types_is_damaged(place, run, capsys, name, value):
    path = run / "checkpoint-4" / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    resealed(path.parent)
    assert finetune(place, run, "--resume") == 0
    said = capsys.readouterr().err
    assert f"(checkpoint-4: trainer_state.json has {name}={value!r}): taking checkpoint-2" in said
    assert digest(run / RESULT) == digest(place / "run" / RESULT)


def test_how_often_the_trainer_s_state_shows_steps_does_not_count(place, run):
    path = run / "checkpoint-2" / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"logging_steps": 0}))
    resealed(path.parent)
    shutil.rmtree(run / "checkpoint-4")
    assert finetune(place, run, "--resume") == 0
    assert digest(run / RESULT) == digest(place / "run" / RESULT)


@pytest.mark.parametrize("form", thinned(["files", "list"], every=2))
def test_a_tokenizer_with_several_chat_templates_is_read_and_saved(place, tmp_path, form):
    model = Path(shutil.copytree(place / "model", tmp_path / "model"))
    plain = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    with_tools = plain + "{{ tools[0]['name'] }}"
    if form == "files":
        (model / "additional_chat_templates").mkdir()
        (model / "chat_template.jinja").write_text(plain)
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    else:
        path = model / "tokenizer_config.json"
        both = [
            {"name": "default", "template": plain},
            {"name": "tool_use", "template": with_tools},
        ]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": both}))
    row = {"messages": [{"role": "user", "content": "w5 w6"}], "tools": [{"name": "w9"}]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    assert finetune(tmp_path, tmp_path / "run", "--merge", text="chats.jsonl") == 0
    for folder in (tmp_path / "run", tmp_path / "run" / "merged"):
        assert not [path for path in folder.iterdir() if path.name.startswith(".writing-")]
        saved = AutoTokenizer.from_pretrained(folder).chat_template
        assert saved == {"default": plain, "tool_use": with_tools}


def test_if_all_are_damaged_nothing_is_trained(place, run, capsys):
    for number in (2, 4):
        flip(run / f"checkpoint-{number}" / RESULT)
    before = {path: digest(path) for path in run.rglob("*") if path.is_file()}
    assert finetune(place, run, "--resume") == 2
    assert "every checkpoint there is damaged (checkpoint-4: " in capsys.readouterr().err
    assert {path: digest(path) for path in run.rglob("*") if path.is_file()} == before


def test_a_folder_of_another_name_is_no_checkpoint_and_stays(place, run):
    (run / "checkpoint-best").mkdir()
    (run / "checkpoint-best" / COMPLETE).write_text("{}")
    assert finetune(place, run, "--resume") == 0
    assert (run / "checkpoint-best" / COMPLETE).read_text() == "{}"


def test_a_lost_description_of_the_run_is_taken_from_a_checkpoint(place, run):
    (run / "finetune.json").write_text("{")
    assert finetune(place, run, "--resume") == 0
    assert json.loads((run / "finetune.json").read_text()) == json.loads(
        (place / "run/finetune.json").read_text()
    )


def test_only_what_saving_wrote_is_deleted(place, run):
    for number in (2, 4):
        (run / f"checkpoint-{number}" / "mine.txt").write_text("mine")
    flip(run / "checkpoint-4" / RESULT)
    assert finetune(place, run, "--resume", "--save-every", "1") == 0
    kept = {
        path.name: sorted(each.name for each in path.iterdir()) for path in CHECKPOINTS.listed(run)
    }
    assert kept["checkpoint-2"] == kept[".replaced-checkpoint-4-0"] == ["mine.txt"]
    assert {"checkpoint-3", "checkpoint-4"} < kept.keys()


def test_a_checkpoint_of_another_program_is_not_deleted(place, run):
    for name in ("checkpoint-1", "checkpoint-500", "checkpoint-4-1"):
        shutil.copytree(run / "checkpoint-2", run / name)
        (run / name / COMPLETE).unlink()
    flip(run / "checkpoint-4" / RESULT)
    before = {path: digest(path) for path in run.rglob("checkpoint-*[10]/*")}
    assert len(before) == 18
    assert finetune(place, run, "--resume", "--save-every", "1") == 0
    assert {path: digest(path) for path in run.rglob("checkpoint-*[10]/*")} == before


def test_other_inputs_under_the_same_name_are_refused(place, run, tmp_path, capsys):
    shutil.copytree(place / "model", tmp_path / "model")
    write_text(tmp_path / "text.txt", seed=2)
    assert finetune(tmp_path, run, "--resume") == 2
    assert "text.txt holds other tokens than that of the run in" in capsys.readouterr().err
    write_text(tmp_path / "text.txt")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, file, {"format": "pt"})
    assert finetune(tmp_path, run, "--resume") == 2
    assert "model holds another model than that of the run in" in capsys.readouterr().err
    last = max(tensors)
    tensors[last].view(torch.int32).view(-1)[-1] ^= 1
    save_file(tensors, file, {"format": "pt"})
    assert finetune(tmp_path, run, "--resume") == 2
    capsys.readouterr()
    shutil.copy(place / "model/model.safetensors", file)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert finetune(tmp_path, run, "--resume") == 2
    assert "holds another model" in capsys.readouterr().err


def test_the_same_inputs_under_other_names_go_on(place, run, tmp_path):
    shutil.copytree(place / "model", tmp_path / "moved")
    shutil.copy(place / "text.txt", tmp_path / "other.txt")
    assert finetune(tmp_path, run, "--resume", model="moved", text="other.txt") == 0


LINKED = (
    RESULT,
    "adapter_config.json",
    "README.md",
    "tokenizer.json",
    "tokenizer_config.json",
    "finetune.json",
    ".lock",
    "merged",
    "checkpoint-4",
    "checkpoint-6",
    "checkpoint-8",
    "new.txt",
)


@pytest.mark.parametrize("name", LINKED)
def test_nothing_is_written_through_a_link(place, run, tmp_path, capsys, name):
    outside = tmp_path / "outside"
    if name.startswith(("checkpoint", "merged")):
        shutil.copytree(place / "run/checkpoint-2", outside)
    else:
        outside.write_text("mine")
    before = {path: digest(path) for path in (outside, *outside.rglob("*")) if path.is_file()}
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    assert finetune(place, run, "--resume", "--steps", "4", "--save-every", "2") == 2
    assert f"{name}': is a symbolic link" in capsys.readouterr().err
    assert {
        path: digest(path) for path in (outside, *outside.rglob("*")) if path.is_file()
    } == before


@pytest.mark.parametrize(
    "name",
    thinned(
        ["adapter_config.json", "checkpoint-2/README.md", "checkpoint-4/adapter_config.json"],
        every=3,
    ),
)
def test_what_a_hard_link_or_a_link_within_a_checkpoint_shows_is_not_changed(
    place, run, tmp_path, name
):
    outside = tmp_path / "outside"
    shutil.copy(run / name, outside)
    before = digest(outside)
    (run / name).unlink()
    (os.link if "/" not in name else os.symlink)(outside, run / name)
    flip(run / "checkpoint-4" / RESULT)
    assert finetune(place, run, "--resume", "--save-every", "1") == 0
    assert digest(outside) == before


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_before_anything_is_trained(place, run, capsys, make):
    (run / "adapter_config.json").unlink()
    make(run / "adapter_config.json")
    assert finetune(place, run, "--resume") == 2
    assert "adapter_config.json': is a" in capsys.readouterr().err


def test_a_run_that_another_process_goes_on_with_is_refused(place, run, capsys):

    other = RunFolder(run)
    other.claim()
    try:
        assert finetune(place, run, "--resume") == 2
        assert "trains into it" in capsys.readouterr().err
    finally:
        other.release()


def test_what_a_killed_process_was_writing_is_deleted(place, run, tmp_path):
    unfinished = run / ".writing-0123abcd-checkpoint"
    shutil.copytree(run / "checkpoint-2", unfinished)
    (unfinished / "mine.txt").write_text("mine")
    shutil.copytree(run / "checkpoint-2", run / ".writing-0123abce-merged")
    (run / ".writing-0123abcf-finetune.json").write_text("{")
    mine = run / ".writing-notes"
    mine.write_text("mine")
    assert finetune(place, run, "--resume") == 0
    assert {path.name for path in run.glob(".writing-*")} == {unfinished.name, mine.name}
    assert [path.name for path in unfinished.iterdir()] == ["mine.txt"]


@pytest.fixture(scope="module")
def long_run(place: Path) -> str:
    """The hash of the adapters of a run of 8 steps."""
    assert finetune(place, place / "long", "--steps", "8") == 0
    return digest(place / "long" / RESULT)


@pytest.mark.parametrize("kind", thinned([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], every=3))
def test_a_signal_saves_says_how_to_go_on_and_loses_nothing(
    place, long_run, tmp_path, capfd, monkeypatch, request, kind
):
    before = signal.signal(
        kind, signal.default_int_handler if kind == signal.SIGINT else signal.SIG_DFL
    )
    request.addfinalizer(lambda: signal.signal(kind, before))  # under nohup SIGHUP is ignored
    show = trainer.Show.on_log

    def interrupted(self: Any, args: Any, state: Any, *others: Any, **named: Any) -> None:
        show(self, args, state, *others, **named)
        if state.global_step == 3:
            os.kill(os.getpid(), kind)

    out = tmp_path / "run"
    with monkeypatch.context() as during:
        during.setattr(trainer.Show, "on_log", interrupted)
        assert finetune(place, out, "--steps", "8", "--save-every", "100") == 0
    said, errors = capfd.readouterr()
    (line,) = [each for each in said.splitlines() if "stopped by" in each]
    (checkpoint,) = CHECKPOINTS.listed(out)
    step = CHECKPOINTS.step_of(checkpoint)
    assert step < 8
    assert line == (
        f"stopped by {kind.name} after step {step}, saved; go on with the same command and --resume"
    )
    assert "done:" not in said
    assert "Traceback" not in errors
    assert not (out / RESULT).exists()
    assert finetune(place, out, "--steps", "8", "--resume") == 0
    assert digest(out / RESULT) == long_run


@pytest.mark.random
@pytest.mark.parametrize(
    ("kind", "stages"), [(signal.SIGTERM, "1"), (signal.SIGINT, "1"), (signal.SIGTERM, "2")]
)
def test_a_signal_to_the_command_reaches_its_ranks(place, tmp_path, kind, stages):
    words = [str(place / "model"), str(place / "text.txt"), "--out", str(tmp_path / "run"), *FLAGS]
    words += ["--ranks", "2", "--pp", stages, "--steps", "400", "--save-every", "500"]
    command = Forked(["-m", "moesaic", "finetune", *words], {}, IMPORTS)
    until = time.monotonic() + 400
    while "step 2, loss" not in command.said()[0]:
        assert command.poll() is None, command.said()
        assert time.monotonic() < until
        time.sleep(0.05)
    command.send_signal(kind)
    said, errors = command.communicate(timeout=400)
    assert command.returncode == 0, errors
    assert f"stopped by {kind.name} after step" in said
    assert "Traceback" not in errors
    assert len(CHECKPOINTS.listed(tmp_path / "run")) == 1
