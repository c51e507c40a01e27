"""Checkpoints: whole or absent, checked on loading, kept as many as asked."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT
from moesaic.train import checkpoint as checkpoint_module
from moesaic.train.checkpoint import (
    FORMAT,
    architecture,
    list_checkpoints,
    load_checkpoint,
    load_into,
    load_optimizer,
    optimizer_tensors,
    save_checkpoint,
)
from moesaic.train.config import OptimizerConfig
from moesaic.train.state import make_optimizer
from runs import assert_same, run_quietly, snapshot, tiny

SHAPE = ModelConfig(
    dim=16, num_layers=1, num_heads=2, seq_len=8, moe=MoEConfig(num_experts=4, hidden=8, router="sigmoid")
)
VOCABULARY = 32


def make(seed: int = 0) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = GPT(SHAPE, VOCABULARY)
    optimizer = make_optimizer(model, OptimizerConfig(), torch.device("cpu"))
    tokens = torch.arange(16).view(2, 8)
    loss = model(tokens, tokens).loss
    assert loss is not None
    loss.backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int, keep_last: int = 9, seed: int = 0) -> GPT:
    model, optimizer = make(seed)
    save_checkpoint(
        folder, step=step, model=model, model_config=SHAPE, vocab_size=VOCABULARY, optimizer=optimizer,
        extra={"seen": step}, keep_last=keep_last,
    )  # fmt: skip
    return model


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    model = save(tmp_path, 7)
    loaded = load_checkpoint(tmp_path, pytest.fail)
    assert (loaded.step, loaded.vocab_size, loaded.model_config, loaded.extra) == (7, VOCABULARY, SHAPE, {"seen": 7})
    assert_same(loaded.model, model.state_dict())
    assert "blocks.0.ffn.router.bias" in loaded.model
    other = GPT(SHAPE, VOCABULARY)
    load_into(other, loaded, SHAPE, VOCABULARY)
    assert_same(other.state_dict(), model.state_dict())


def test_the_optimizer_comes_back_as_it_was():
    model, optimizer = make()
    tensors = optimizer_tensors(model, optimizer)
    assert {name.rsplit(".", 1)[1] for name in tensors} == {"step", "exp_avg", "exp_avg_sq"}
    fresh, other = make(seed=1)
    load_optimizer(fresh, other, tensors)
    assert_same(optimizer_tensors(fresh, other), tensors)


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 3000):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["step-00000010", "step-00003000"]


def test_later_checkpoints_of_a_course_given_up_do_not_push_out_a_new_one(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 8)
    (tmp_path / "step-00000008" / "state.json").write_text("{")
    save(tmp_path, 6, keep_last=1)
    assert names(tmp_path) == ["step-00000006"]
    assert load_checkpoint(tmp_path, pytest.fail).step == 6


def test_leftovers_of_a_killed_process_are_ignored_and_cleaned(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".writing-00000005")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert load_checkpoint(tmp_path, pytest.fail).step == 1
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped byte": (
        lambda folder: flip(folder / "model.safetensors"),
        "model.safetensors does not match its checksum",
    ),
    "flipped optimizer": (
        lambda folder: flip(folder / "optimizer.safetensors"),
        "optimizer.safetensors does not match",
    ),
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100]),
        "model.safetensors does not match its checksum",
    ),
    "missing tensors": (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "missing state": (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
    "truncated state": (lambda folder: (folder / "state.json").write_text('{"format": 1,'), "JSONDecodeError"),
    "empty state": (lambda folder: (folder / "state.json").write_text("{}"), "KeyError: 'format'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_said_so(tmp_path, damage):
    expected = save(tmp_path, 1, seed=1)
    save(tmp_path, 2)
    harm, reason = DAMAGES[damage]
    harm(tmp_path / "step-00000002")
    said: list[str] = []
    loaded = load_checkpoint(tmp_path, said.append)
    assert loaded.step == 1
    assert_same(loaded.model, expected.state_dict())
    assert len(said) == 1
    assert "step-00000002" in said[0]
    assert reason in said[0]
    assert "taking step-00000001 instead" in said[0]


def test_all_damaged_is_one_error_that_says_what_to_do(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
        flip(tmp_path / f"step-{step:08d}" / "model.safetensors")
    with pytest.raises(InputError) as caught:
        load_checkpoint(tmp_path, pytest.fail)
    for part in (str(tmp_path), "every checkpoint", "step-00000001", "step-00000002", "--existing replace"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"no checkpoint there"):
        load_checkpoint(tmp_path, pytest.fail)


def test_a_newer_format_is_refused_even_where_an_older_checkpoint_is_whole(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "step-00000002" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    with pytest.raises(InputError, match=f"has format {FORMAT + 1}, this Moesaic reads up to {FORMAT}: upgrade"):
        load_checkpoint(tmp_path, pytest.fail)


def test_another_architecture_is_named_with_both_values(tmp_path):
    save(tmp_path, 3)
    loaded = load_checkpoint(tmp_path, pytest.fail)
    other = replace(SHAPE, dim=32, checkpoint_activations=True, moe=replace(SHAPE.moe, num_experts=8))
    with pytest.raises(InputError) as caught:
        load_into(GPT(other, 64), loaded, other, 64)
    for part in ("step 3", "model.dim (32 and 16)", "model.moe.num_experts (8 and 4)", "vocabulary (64 and 32)"):
        assert part in str(caught.value)
    assert "checkpoint_activations" not in str(caught.value)
    assert "num_layers" not in str(caught.value)


def test_recomputing_activations_is_no_other_architecture(tmp_path):
    model = save(tmp_path, 3)
    other = replace(SHAPE, checkpoint_activations=True)
    twin = GPT(other, VOCABULARY)
    load_into(twin, load_checkpoint(tmp_path, pytest.fail), other, VOCABULARY)
    assert_same(twin.state_dict(), model.state_dict())


KNOBS = {
    "balance_loss": 0.5, "balance_level": "sequence", "z_loss": 0.1, "importance_loss": 0.1, "bias_rate": 0.1,
    "capacity": "fixed", "capacity_factor": 2.0, "admit_by": "score", "num_groups": 2, "top_groups": 1,
}  # fmt: skip


def test_what_steers_training_is_no_other_architecture(tmp_path):
    model = save(tmp_path, 3)
    other = replace(SHAPE, seq_len=32, dense_hidden=99, moe=replace(SHAPE.moe, **KNOBS))
    twin = GPT(other, VOCABULARY)
    load_into(twin, load_checkpoint(tmp_path, pytest.fail), other, VOCABULARY)
    assert_same(twin.state_dict(), model.state_dict())


GROUPED = replace(SHAPE, moe=replace(SHAPE.moe, router="group_limited"))
DENSE = replace(SHAPE, ffn="dense")
OTHER_SHAPES = {
    "ffn": (SHAPE, {"ffn": "dense"}, {}),
    "dim": (SHAPE, {"dim": 32}, {}),
    "num_layers": (SHAPE, {"num_layers": 2}, {}),
    "num_heads": (SHAPE, {"num_heads": 4}, {}),
    "moe.num_experts": (SHAPE, {}, {"num_experts": 8}),
    "moe.top_k": (SHAPE, {}, {"top_k": 1}),
    "moe.hidden": (SHAPE, {}, {"hidden": 16}),
    "moe.shared_hidden": (SHAPE, {}, {"shared_hidden": 8}),
    "moe.every": (SHAPE, {}, {"every": 2}),
    "moe.router": (SHAPE, {}, {"router": "softmax"}),
    "moe.experts": (SHAPE, {}, {"experts": "gelu"}),
    "moe.num_groups": (GROUPED, {}, {"num_groups": 2}),
    "moe.top_groups": (GROUPED, {}, {"top_groups": 1}),
    "dense_hidden": (DENSE, {"dense_hidden": 48}, {}),
}


@pytest.mark.parametrize("field", OTHER_SHAPES)
def test_every_field_of_the_architecture_counts(field):
    shape, outer, inner = OTHER_SHAPES[field]
    other = replace(shape, **outer, moe=replace(shape.moe, **inner))
    one, two = architecture(shape), architecture(other)
    assert [name for name in one if name in two and one[name] != two[name]] == [f"model.{field}"]


def test_a_dense_model_is_compared_by_its_width():
    same = replace(DENSE, dense_hidden=DENSE.active_hidden, moe=replace(DENSE.moe, num_experts=2, router="softmax"))
    assert architecture(same) == architecture(DENSE)


def test_parameters_of_another_version_are_refused_in_one_line(tmp_path):
    save(tmp_path, 3)
    loaded = load_checkpoint(tmp_path, pytest.fail)
    del loaded.model["norm.weight"]
    with pytest.raises(InputError, match=r"step 3 does not fit the model .*norm\.weight.*use the version") as caught:
        load_into(GPT(SHAPE, VOCABULARY), loaded, SHAPE, VOCABULARY)
    assert "\n" not in str(caught.value)


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done: list[str] = []
    opened: dict[int, str] = {}
    plain_open, plain_replace = os.open, os.replace

    def opening(path, *options, **more):
        descriptor = plain_open(path, *options, **more)
        opened[descriptor] = Path(path).name
        return descriptor

    def renaming(source, target):
        done.append(f"rename to {Path(target).name}")
        plain_replace(source, target)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "replace", renaming)
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(opened[descriptor]))
    save(tmp_path / "checkpoints", 1)
    assert done == [
        "model.safetensors", "optimizer.safetensors", "state.json", ".writing-00000001", "rename to step-00000001",
        "checkpoints",
    ]  # fmt: skip


@pytest.mark.parametrize("fails_at", ["model.safetensors", "optimizer.safetensors"])
def test_a_full_disk_leaves_earlier_checkpoints_and_metrics(tmp_path, monkeypatch, fails_at):
    config = tiny(tmp_path, steps=3, save_every=1)
    plain = checkpoint_module.save_file
    before: dict[str, bytes] = {}

    def fill(tensors, path):
        if path.parent.name == ".writing-00000002" and path.name == fails_at:
            before.update(snapshot(tmp_path / "run"))
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(checkpoint_module, "save_file", fill)
    with pytest.raises(InputError) as caught:
        run_quietly(config)
    assert "step-00000002 could not be written, the disk is full" in str(caught.value)
    assert "earlier checkpoints are intact" in str(caught.value)
    after = snapshot(tmp_path / "run")
    assert after == {name: data for name, data in before.items() if ".writing-" not in name}
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000001"]
    assert after["metrics.jsonl"].count(b"\n") == 2
    monkeypatch.setattr(checkpoint_module, "save_file", plain)
    result, _ = run_quietly(replace(config, existing="resume"))
    assert result.step == 3


def test_an_unwritable_folder_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(InputError, match=r"could not be written, .*: check the folder"):
        save(tmp_path / "checkpoints", 1)
