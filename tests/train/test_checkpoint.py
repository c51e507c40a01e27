"""Checkpoints are complete or absent, checked on loading, and kept in the configured number."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from helpers import kinds_of_files, refused, thinned
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT
from moesaic.shapes import BlockConfig
from moesaic.train import checkpoint as checkpoint_module
from moesaic.train import distributed_checkpoint
from moesaic.train.checkpoint import (
    FORMAT,
    SUMS,
    architecture,
    list_checkpoints,
    load_checkpoint,
    load_into,
    optimizer_tensors,
    save_checkpoint,
)
from moesaic.train.config import OptimizerConfig, TrainConfig
from moesaic.train.optimizer import make_optimizer
from moesaic.train.ranks import Ranks
from moesaic.train.run_folder import LOCK
from record_checkpoint import write_run
from runs import assert_same, losses, run_quietly, seal, snapshot, tiny

SHAPE = ModelConfig(
    dim=16,
    num_layers=1,
    num_heads=2,
    seq_len=8,
    moe=MoEConfig(num_experts=4, hidden=8, router="sigmoid"),
)
VOCABULARY = 32
TENSORS = "shards/shard-00001-model-00001-of-00001.safetensors"
"""The file of a checkpoint's tensors, if one process wrote them."""
Trained = tuple[nn.Module, torch.optim.Optimizer]


def gpt(seed: int = 0) -> Trained:
    """Return a language model after one step."""
    torch.manual_seed(seed)
    model = GPT(SHAPE, VOCABULARY)
    optimizer = make_optimizer(model, OptimizerConfig(), torch.device("cpu"))
    tokens = torch.arange(16).view(2, 8)
    model(tokens, tokens).loss.backward()
    optimizer.step()
    return model, optimizer


def matrix(seed: int = 0) -> Trained:
    """Return a single matrix after one step; its checkpoints take a fifth of the time."""
    torch.manual_seed(seed)
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(
    folder: Path,
    step: int,
    keep_last: int = 9,
    *,
    of: Trained | None = None,
    background: bool = False,
) -> None:
    model, optimizer = of or matrix()
    saving = save_checkpoint(
        folder,
        step=step,
        model=model,
        model_config=SHAPE,
        vocab_size=VOCABULARY,
        optimizer=optimizer,
        extra={"seen": step},
        keep_last=keep_last,
        background=background,
    )
    kept = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():  # what trains on changes the weights meanwhile
        for parameter in model.parameters():
            parameter += background
    try:
        saving.finish()
    finally:
        model.load_state_dict(kept)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GPT, torch.optim.Optimizer]:
    """Return a folder with the checkpoints of steps 1 and 2 of different models; and the first one
    with its optimizer."""
    folder = tmp_path_factory.mktemp("written")
    first = gpt(1)
    save(folder, 1, of=first)
    save(folder, 2, of=gpt())
    return folder, *first  # type: ignore[return-value]


@pytest.fixture
def two(written, tmp_path: Path) -> Path:
    """Return a copy of that folder, which a test may change."""
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def one(two: Path) -> Path:
    """Return a copy without the second checkpoint."""
    shutil.rmtree(two / "step-00000002")
    return two


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_with_its_optimizer_under_the_names_of_the_parameters(written, one):
    _, model, optimizer = written
    loaded = load_checkpoint(one, pytest.fail)
    assert (loaded.step, loaded.vocab_size, loaded.model_config, loaded.extra) == (
        1,
        VOCABULARY,
        SHAPE,
        {"seen": 1},
    )
    assert_same(loaded.model, model.state_dict())
    tensors = optimizer_tensors(model, optimizer)
    assert_same(loaded.optimizer, tensors)
    experts = model.blocks[0].ffn.experts
    at = "blocks.0.ffn.experts."
    assert {name: each.shape for name, each in loaded.model.items() if at in name} == {
        f"{at}{name}": getattr(experts, name).shape for name in ("w13", "w2")
    }
    assert {name for name in tensors if at in name} == {
        f"{at}{name}.{key}" for name in ("w13", "w2") for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert "blocks.0.ffn.router.bias" in loaded.model
    fresh, other = gpt(2)
    load_into(loaded, fresh, other, SHAPE, VOCABULARY)
    assert_same(fresh.state_dict(), model.state_dict())
    assert_same(optimizer_tensors(fresh, other), tensors)


def test_only_the_newest_are_kept_and_those_of_a_course_given_up_push_out_none(tmp_path):
    for step in (1, 2, 10, 3000):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["step-00000010", "step-00003000"]
    (tmp_path / "step-00003000" / "state.json").write_text("{")
    save(tmp_path, 20, keep_last=1)
    assert names(tmp_path) == ["step-00000020"]
    assert load_checkpoint(tmp_path, pytest.fail).step == 20


class Killed(BaseException):
    """Stands for SIGKILL: no handler catches it."""


@pytest.fixture(scope="module")
def killing() -> Callable[[int | None], Iterator[list[str]]]:
    """Return a context manager that kills the code at its n-th file system event."""
    watched = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
    state: dict[str, list] = {"seen": [], "last": [], "on": []}

    def hook(event: str, arguments: tuple) -> None:
        if state["on"] and event in watched:
            state["seen"].append(f"{event} {arguments[0]}")
            # nothing happens after a kill
            if state["last"][0] and len(state["seen"]) >= state["last"][0]:
                raise Killed

    sys.addaudithook(hook)

    @contextmanager
    def killed_at(number: int | None) -> Iterator[list[str]]:
        state["seen"] = []
        state["last"] = [number]
        state["on"] = [True]
        try:
            yield state["seen"]
        except (Killed, InputError):
            # torch.distributed.checkpoint wraps even what no handler catches
            if number is None:
                raise
        finally:
            state["on"] = []

    return killed_at


@pytest.mark.parametrize(
    ("keep_last", "again", "background"),
    thinned(itertools.product((1, 2), (True, False), (False, True)), every=7),
)
def test_a_kill_at_any_instant_of_a_save_leaves_a_whole_checkpoint(
    tmp_path, killing, keep_last, again, background
):
    known = [matrix(seed) for seed in range(3)]
    step = 4 if again else 5

    def put(folder: Path, step: int, seed: int) -> None:
        save(folder, step, keep_last, of=known[seed], background=background)

    before = tmp_path / "before"
    put(before, 4, 0)
    shutil.copytree(before, tmp_path / "whole")
    with killing(None) as events:
        put(tmp_path / "whole", step, 1)
    assert len(events) > 8
    for number, event in enumerate(events, start=1):
        folder = tmp_path / f"killed at {number}"
        shutil.copytree(before, folder)
        with killing(number):
            put(folder, step, 1)
        loaded = load_checkpoint(folder, pytest.fail)
        assert loaded.step in (4, step)
        assert any(torch.equal(loaded.model["weight"], known[seed][0].weight) for seed in (0, 1)), (
            event
        )
        # the run goes on, saves its step, is killed again at the same place, and recovers
        for last in (False, True):
            with killing(None if last else number):
                put(folder, 5, 2)
            assert load_checkpoint(folder, pytest.fail).step in (4, 5)
        assert names(folder)[-1] == "step-00000005"
        assert not [name for name in names(folder) if name.startswith(".")]
        assert len(names(folder)) <= keep_last


@pytest.mark.parametrize("background", [False, True])
def test_what_does_not_read_back_as_it_was_written_is_no_checkpoint(
    tmp_path, monkeypatch, background
):
    save(tmp_path, 1)
    plain = distributed_checkpoint.read_into

    def spoiled(folder, targets):
        read = plain(folder, targets)
        read["model.weight"] += 1  # as a disk does that lies
        return read

    monkeypatch.setattr(distributed_checkpoint, "read_into", spoiled)
    with pytest.raises(
        InputError,
        match="does not read back from the disk as it was written: check the folder; earl",
    ):
        save(tmp_path, 2, background=background)
    assert names(tmp_path) == ["step-00000001"]


def test_a_damaged_checkpoint_that_was_to_be_replaced_does_not_cost_the_one_before_it(written, one):
    (one / "step-00000001").rename(one / ".replaced-00000001-0")
    shutil.copytree(one / ".replaced-00000001-0", one / "step-00000001")
    flip(one / "step-00000001" / TENSORS)
    said: list[str] = []
    assert_same(load_checkpoint(one, said.append).model, written[1].state_dict())
    assert "taking .replaced-00000001-0 instead" in said[0]
    save(one, 1, keep_last=1)
    assert names(one) == ["step-00000001"]


def test_what_lies_beside_and_in_a_checkpoint_is_left_there_and_leftovers_of_a_killed_process_are_cleaned(  # noqa: E501
    two,
):
    (two / "step-00000001" / "notes.txt").write_text("mine")
    (two / "step-by-step").mkdir()
    (two / "step-by-step" / "model.distcp").write_text("mine")
    shutil.copytree(two / "step-00000002", two / ".writing-00000005")
    assert [path.name for path in list_checkpoints(two)] == ["step-00000001", "step-00000002"]
    assert load_checkpoint(two, pytest.fail).step == 2
    save(two, 3, keep_last=1)
    assert sorted(snapshot(two))[0] == "step-00000001/notes.txt"
    assert (two / "step-by-step" / "model.distcp").read_text() == "mine"
    assert names(two) == ["step-00000001", "step-00000003", "step-by-step"]
    assert load_checkpoint(two, pytest.fail).step == 3


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def rewrite(folder: Path, change: Callable[[dict], object]) -> None:
    """Change a checkpoint's description on purpose, its checksum too."""
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)


def nest(folder: Path) -> None:
    (folder / "state.json").write_text("[" * 100_000)
    seal(folder)


def drop_sum(folder: Path) -> None:
    (folder / SUMS).write_text(re.sub(".*safetensors\n", "", (folder / SUMS).read_text()))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda at: flip(at / TENSORS), f"{TENSORS} does not match its checksum"),
    "flipped list": (
        lambda at: flip(at / "shards" / "index.json"),
        "shards/index.json does not match",
    ),
    "truncated": (
        lambda at: os.truncate(at / TENSORS, 100),
        f"{TENSORS} does not match its checksum",
    ),
    "missing tensors": (lambda at: (at / TENSORS).unlink(), f"{Path(TENSORS).name} is missing"),
    "missing state": (lambda at: (at / "state.json").unlink(), "state.json is missing"),
    "flipped state": (lambda at: flip(at / "state.json"), "state.json does not match its checksum"),
    "empty state": (lambda at: rewrite(at, dict.clear), "KeyError: 'format'"),
    "state that is too deep": (nest, "RecursionError"),
    "state without a vocabulary": (
        lambda at: rewrite(at, lambda state: state.update(vocab_size=[])),
        "vocabulary of []",
    ),
    "state of another step": (
        lambda at: rewrite(at, lambda state: state.update(step=9)),
        "is of step 9",
    ),
    "missing checksums": (lambda at: (at / SUMS).unlink(), "SHA256SUMS is missing"),
    "empty checksums": (lambda at: (at / SUMS).write_text(""), "state.json has no checksum"),
    "no checksum of one": (drop_sum, f"{TENSORS} has no checksum"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_said_so(written, two, damage):
    harm, reason = DAMAGES[damage]
    harm(two / "step-00000002")
    said: list[str] = []
    loaded = load_checkpoint(two, said.append)
    assert loaded.step == 1
    assert_same(loaded.model, written[1].state_dict())
    (line,) = said
    assert [
        part
        for part in ("step-00000002", reason, "taking step-00000001 instead")
        if part not in line
    ] == []


def test_all_damaged_or_none_there_is_one_error_that_says_what_to_do(two):
    for step in (1, 2):
        flip(two / f"step-{step:08d}" / TENSORS)
    for part in (
        str(two),
        "every checkpoint",
        "step-00000001",
        "step-00000002",
        "--existing replace",
    ):
        assert part in refused(load_checkpoint, two, pytest.fail)
    assert "no checkpoint there" in refused(load_checkpoint, two / "nowhere", pytest.fail)


def test_another_format_is_refused_even_where_an_older_checkpoint_is_whole(two):
    rewrite(two / "step-00000002", lambda state: state.update(format=FORMAT + 1))
    with pytest.raises(
        InputError,
        match=f"has format {FORMAT + 1}, this Moesaic reads 4 and {FORMAT}: use the version",
    ):
        load_checkpoint(two, pytest.fail)


def test_another_architecture_is_named_with_both_values(two):
    other = replace(
        SHAPE, dim=32, checkpoint_activations=True, moe=replace(SHAPE.moe, num_experts=8)
    )
    caught = refused(
        lambda: load_into(load_checkpoint(two, pytest.fail), GPT(other, 64), None, other, 64)
    )
    for part in (
        "step 2",
        "model.dim (32 and 16)",
        "model.moe.num_experts (8 and 4)",
        "vocabulary (64 and 32)",
    ):
        assert part in caught
    assert "checkpoint_activations" not in caught
    assert "num_layers" not in caught


KNOBS = {
    "load_balance": 0.5,
    "load_balance_level": "sequence",
    "z_loss": 0.1,
    "importance": 0.1,
    "capacity": "fixed",
    "capacity_factor": 2.0,
    "capacity_order": "score",
    "capacity_scope": "rank",
    "router": "sigmoid",
    "router_options": {"bias_rate": 0.1},
}


def test_what_steers_training_is_no_other_architecture(written, one):
    moe = replace(SHAPE.moe, **KNOBS)
    other = replace(SHAPE, seq_len=32, dense_hidden=99, checkpoint_activations=True, moe=moe)
    twin = GPT(other, VOCABULARY)
    load_into(load_checkpoint(one, pytest.fail), twin, None, other, VOCABULARY)
    assert_same(twin.state_dict(), written[1].state_dict())


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
    "moe_every": (SHAPE, {"moe_every": 2}, {}),
    "moe.router": (SHAPE, {}, {"router": "gshard"}),
    "moe.experts": (SHAPE, {}, {"experts": "gelu"}),
    "moe.router_options.num_groups": (
        GROUPED,
        {},
        {"router": "group_limited", "router_options": {"num_groups": 2}},
    ),
    "moe.router_options.top_groups": (
        GROUPED,
        {},
        {"router": "group_limited", "router_options": {"top_groups": 1}},
    ),
    "dense_hidden": (DENSE, {"ffn": "dense", "dense_hidden": 48}, {}),
    "block.kv_heads": (SHAPE, {"block": BlockConfig(kv_heads=1)}, {}),
    "block.qk_norm": (SHAPE, {"block": BlockConfig(qk_norm=True)}, {}),
}


@pytest.mark.parametrize("field", OTHER_SHAPES)
def test_every_field_of_the_architecture_counts(field):
    shape, outer, inner = OTHER_SHAPES[field]
    other = replace(shape, **outer, moe=replace(shape.moe, **inner))
    here = architecture(shape)
    there = architecture(other)
    assert [name for name in here if name in there and here[name] != there[name]] == [
        f"model.{field}"
    ]


def test_a_dense_model_is_compared_by_its_width():
    same = replace(
        DENSE,
        dense_hidden=DENSE.active_hidden,
        moe=replace(DENSE.moe, num_experts=2, router="softmax"),
    )
    assert architecture(same) == architecture(DENSE)


def break_tensors(folder: Path) -> None:
    path = folder / TENSORS
    path.write_bytes(b"\2\0\0\0\0\0\0\0[]" + path.read_bytes()[10:])
    seal(folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("more", r".*model\.more.*use the version"),
        ("moments", r".*norm\.weight\.exp_avg"),
        ("damaged tensors", ""),
    ],
)
def test_what_does_not_fit_the_model_is_refused_in_one_line(one, name, reason):
    model, optimizer = gpt()
    if name == "more":
        model.register_buffer("more", torch.zeros(1))
    elif name == "moments":
        optimizer.state[model.norm.weight]["exp_avg"] = torch.zeros(2)
        save(one, 1, of=(model, optimizer))
        model, optimizer = gpt()
    else:
        break_tensors(one / "step-00000001")
    with pytest.raises(InputError, match=f"step 1 does not fit the model {reason}") as caught:
        load_into(load_checkpoint(one, pytest.fail), model, optimizer, SHAPE, VOCABULARY)
    assert "\n" not in str(caught.value)


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done: list[str] = []
    opened: dict[int, str] = {}
    plain_open = os.open
    plain_replace = os.replace

    def opening(path, *options, **more):
        descriptor = plain_open(path, *options, **more)
        opened[descriptor] = Path(path).name
        return descriptor

    def renaming(source, target):
        done.append(f"rename to {Path(target).name}")
        plain_replace(source, target)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "replace", renaming)
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(opened.get(descriptor, "")))
    save(tmp_path / "checkpoints", 1)
    named = done.index("rename to step-00000001")
    assert {
        "index.json",
        Path(TENSORS).name,
        "state.json",
        SUMS,
        "shards",
        ".writing-00000001",
    } <= {*done[:named]}
    assert done[named + 1 :] == ["checkpoints"]


def test_a_full_disk_leaves_earlier_checkpoints_and_metrics(tmp_path, monkeypatch):
    config = tiny(tmp_path, steps=3, save={"every": 1})
    plain = checkpoint_module.write_shards
    before: dict[str, bytes] = {}

    def fill(folder, **options):
        if folder.name == ".writing-00000002":
            before.update(snapshot(tmp_path / "run"))
            (folder / TENSORS).parent.mkdir()
            (folder / TENSORS).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(folder, **options)

    monkeypatch.setattr(checkpoint_module, "write_shards", fill)
    with pytest.raises(
        InputError,
        match=r"step-00000002 could not be written, the disk is full.*checkpoints are intact",
    ):
        run_quietly(config)
    after = snapshot(tmp_path / "run")
    assert after == {
        name: data for name, data in before.items() if ".writing-" not in name and name != LOCK
    }
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000001"]
    assert after["metrics.jsonl"].count(b"\n") == 2
    monkeypatch.setattr(checkpoint_module, "write_shards", plain)
    result, _ = run_quietly(replace(config, existing="resume"))
    assert result.step == 3


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.ENOSPC, "the disk is full: free space"), (errno.EFBIG, "File too large: check the")],
)
def test_what_a_rank_could_not_write_is_told_with_its_number_and_cause(tmp_path, code, reason):
    failed = CheckpointException("write", {3: _wrap_exception(OSError(code, os.strerror(code)))})
    refusing = checkpoint_module._reporting_write_errors(
        tmp_path / "step-00000001", tmp_path / ".writing-00000001", Ranks()
    )
    told = f"step-00000001 could not be written, by rank 3: .*{reason}"
    with pytest.raises(InputError, match=told) as caught, refusing:
        raise failed
    assert "\n" not in str(caught.value)


def test_an_unwritable_folder_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(InputError, match=r"could not be written, .*: check the folder"):
        save(tmp_path / "checkpoints", 1)


def test_sums_of_other_files_than_a_checkpoints_are_not_taken(two):
    """`SHA256SUMS` of a stranger could name a device that has no end."""
    sums = two / "step-00000002" / SUMS
    before = sums.read_text()
    for name in ("/dev/zero", "../../secret", "shards/../../secret", "notes.txt"):
        sums.write_text(f"{before}{'0' * 64}  {name}\n")
        said: list[str] = []
        assert load_checkpoint(two, said.append).step == 1
        assert f"{SUMS} lists {name!r}, which no checkpoint has" in said[0]


def test_two_checkpoints_that_were_renamed_into_each_other_are_told_so(two):
    (two / "step-00000001").rename(two / "aside")
    (two / "step-00000002").rename(two / "step-00000001")
    (two / "aside").rename(two / "step-00000002")
    assert "is of step 1: rename the folder as it was" in refused(load_checkpoint, two, pytest.fail)


def test_nothing_of_a_linked_checkpoint_is_deleted(tmp_path):
    outside = tmp_path / "outside"
    folder = tmp_path / "checkpoints"
    save(outside, 1)
    before = snapshot(outside)
    folder.mkdir()
    (folder / "step-00000001").symlink_to(outside / "step-00000001")
    save(folder, 2)
    assert snapshot(outside) == before
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000002"]
    (tmp_path / "linked").symlink_to(outside)
    assert "linked': is a symbolic link" in refused(save, tmp_path / "linked", 3)
    assert snapshot(outside) == before


@pytest.mark.parametrize("name", ["step-00000003", ".writing-00000003"])
def test_a_link_where_a_checkpoint_is_to_come_is_an_error(name, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / name).symlink_to(tmp_path / "outside")
    refused(save, tmp_path / "checkpoints", 3)
    assert list((tmp_path / "outside").iterdir()) == []


EARLIER = Path(__file__).parent / "checkpoint_of_format_4"
"""Step 2 of a run of four on two ranks, as `record_checkpoint.py` recorded it, and the losses of
the run."""


def test_a_checkpoint_of_the_earlier_format_is_read_resumed_and_followed_by_new_ones(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = override(
        TrainConfig(), json.loads(write_run(tmp_path, existing="resume").read_text()), source="it"
    )
    shutil.copytree(EARLIER / "step-00000002", tmp_path / "run" / "checkpoints" / "step-00000002")
    shutil.copy(EARLIER / "step-00000002" / "config.json", tmp_path / "run")
    before = load_checkpoint(tmp_path / "run" / "checkpoints", pytest.fail)
    assert (before.step, before.model["embedding.weight"].shape) == (2, (before.vocab_size, 8))
    result, _ = run_quietly(config)
    assert result.step == 4
    expected = [loss for _, loss in json.loads((EARLIER / "losses.json").read_text())]
    assert [loss for _, loss in losses(tmp_path / "run")] == pytest.approx(expected[2:], abs=1e-4)
    kinds = {
        path.name: set(kinds_of_files(path).values())
        for path in (tmp_path / "run" / "checkpoints").iterdir()
    }
    assert kinds["step-00000004"] == {"text", "safetensors"}
    assert (
        load_checkpoint(tmp_path / "run" / "checkpoints", pytest.fail).model.keys()
        == before.model.keys()
    )


@pytest.mark.parametrize("name", ["shards/.metadata", "shards/__1_0.distcp"])
def test_a_damaged_checkpoint_of_the_earlier_format_is_passed_over_and_deleted_whole(
    tmp_path, name
):
    save(tmp_path, 1)
    shutil.copytree(EARLIER / "step-00000002", tmp_path / "step-00000002")
    flip(tmp_path / "step-00000002" / name)
    said: list[str] = []
    assert load_checkpoint(tmp_path, said.append).step == 1
    assert f"{name} does not match its checksum" in said[0]
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["step-00000003"]
