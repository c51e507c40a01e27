"""Opening a run: what is built and restored, and that nothing is touched before everything is
validated."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import refused
from moesaic.configfile import override, read_table
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT
from moesaic.train.config import OptimizerConfig, TrainConfig
from moesaic.train.optimizer import make_optimizer
from moesaic.train.state import open_run, seed_everything
from runs import (
    assert_same,
    parameters,
    run_quietly,
    seal,
    snapshot,
    tiny,
    write_text,
    write_tokenizer,
)

NEWEST = Path("run", "checkpoints", "step-00000002")
"""The newest checkpoint of the run of the fixture `ran`."""


@pytest.mark.parametrize("router", ["softmax", "noisy", "sigmoid", "cosine", "group_limited"])
def test_weight_decay_is_on_matrices_but_routers_and_constants_are_the_configurations(router):
    shape = ModelConfig(
        moe_every=2,
        dim=16,
        num_layers=2,
        num_heads=2,
        moe=MoEConfig(num_experts=4, hidden=8, router=router),
    )
    model = GPT(shape, 32)
    config = OptimizerConfig(weight_decay=0.25, lr=0.5, betas=(0.7, 0.8))
    optimizer = make_optimizer(model, config, torch.device("cpu"))
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {
        (0.5, (0.7, 0.8))
    }
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        spared = ".router." in name or "norm" in name or name.endswith("bias")
        assert decay[id(parameter)] == (0.0 if spared else 0.25), name
        assert spared or parameter.dim() >= 2
    assert any(".router." in name for name, _ in model.named_parameters())


def test_experts_and_routers_have_learning_rates_of_their_own(tmp_path):
    rates = {"expert_lr_scale": 0.0, "router_lr_scale": 0.5}
    config = tiny(
        tmp_path, steps=1, optimizer={"lr": 1e-2, "warmup_steps": 1, "weight_decay": 0.1, **rates}
    )
    before = open_run(replace(config, out=str(tmp_path / "drawn")), pytest.fail).model.state_dict()
    run_quietly(config)
    run = open_run(replace(config, existing="resume"), pytest.fail)
    moved = {
        name
        for name, value in run.model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    experts = {name for name in before if ".ffn.experts." in name}
    assert experts
    assert moved == set(before) - experts
    assert {group["rate"] for group in run.optimizer.param_groups} == {0.0, 0.5, 1.0}


def test_a_seed_decides_the_initial_parameters(tmp_path):
    states = [
        open_run(
            tiny(tmp_path, out=str(tmp_path / name), seed=seed), pytest.fail
        ).model.state_dict()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert_same(states[0], states[1])
    assert not torch.equal(states[0]["embedding.weight"], states[2]["embedding.weight"])
    seed_everything(2**62)


REFUSED = {
    "short training data": ({"model": {"seq_len": 10_000}}, "fewer than model.seq_len"),
    "short validation data": ({"data": {"val_share": 0.001}}, "fewer than model.seq_len"),
    "missing data": ({"data": {"path": ["absent.txt"]}}, "nothing at absent.txt"),
    "device": ({"device": "gpu"}, "device='gpu' is unknown"),
    "groups": (
        {"model": {"moe": {"router": "group_limited", "router_options": {"num_groups": 3}}}},
        "num_groups",
    ),
    "tokenizer": ({"data": {"tokenizer": "absent.json"}}, "absent.json: the tokenizer is missing"),
}
RESUMED = {
    "architecture": (
        {"model": {"dim": 32, "moe": {"hidden": 8}}},
        (
            r"step 2 is of .*, model.dim \(32 and 16\); model.moe.hidden \(8 and 16\).*choose "
            r"another run folder"
        ),
    ),
    "precision": (
        {"precision": "bfloat16"},
        (
            "precision=bfloat16: the run is in float32: pass --precision float32 or auto, or "
            "another --out"
        ),
    ),
    "text": ({}, "^the training tokens are not those of the checkpoint of step 2: .*--out$"),
    "share": (
        {"data": {"val_share": 0.1}},
        "^the training tokens are not those of the checkpoint of step 2: .*--out$",
    ),
}


@pytest.mark.parametrize(
    ("what", "existing"),
    [*itertools.product(REFUSED, ("replace", "resume")), *((what, "resume") for what in RESUMED)],
)
def test_nothing_is_touched_before_everything_has_proven_good(ran, what, existing):
    changes, words = (REFUSED | RESUMED)[what]
    if what == "text":
        write_text(ran / "text.txt", seed=1)
    before = snapshot(ran)
    with pytest.raises(InputError, match=words) as caught:
        open_run(tiny(ran, existing=existing, **changes), pytest.fail)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        InputError, match=r"holds a run already: pass --existing resume, --existing replace"
    ):
        open_run(tiny(ran), pytest.fail)
    assert snapshot(ran) == before


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_run_leaves_no_folder(tmp_path, what):
    refused(lambda: open_run(tiny(tmp_path, **REFUSED[what][0]), pytest.fail))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no more"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory:\nyou tried to allocate 2199023255552 "
            "bytes."
        ),
    ],
)
def test_a_model_that_no_memory_holds_is_refused_in_one_line(tmp_path, monkeypatch, error):
    def reset(*_: object) -> None:
        raise error

    monkeypatch.setattr("moesaic.train.state.reset_weights", reset)
    with pytest.raises(
        InputError, match=r"the model does not fit the memory of cpu \(.*\): make model.dim, "
    ) as caught:
        open_run(tiny(tmp_path), pytest.fail)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes().replace(b"a", b"b"))]
)
def test_resuming_uses_the_tokenizer_of_the_run_or_the_checkpoints_where_that_was_damaged(
    tmp_path, harm
):
    config = tiny(tmp_path, steps=1, data={"tokenizer": write_tokenizer(tmp_path / "given.json")})
    run_quietly(config)
    Path(config.data.tokenizer).unlink()
    own = tmp_path / "run" / "tokenizer.json"
    before = own.read_bytes()
    assert "damaged" not in run_quietly(replace(config, steps=2, existing="resume"))[1]
    assert own.read_bytes() == before
    harm(own)
    _, said = run_quietly(replace(config, steps=3, existing="resume"))
    assert f"{own}: was lost or damaged, and is taken from step-00000002" in said
    assert (
        own.read_bytes()
        == before
        == (tmp_path / "run" / "checkpoints" / "step-00000003" / own.name).read_bytes()
    )


def test_resuming_where_nothing_is_starts_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    for _ in range(2):
        result, said = run_quietly(tiny(tmp_path, steps=1, existing="resume"))
        assert result.step == 1
        assert "starts at step 0" in " ".join(said.split())
        shutil.rmtree(tmp_path / "run" / "checkpoints")


def test_the_kept_configuration_takes_the_run_up_again_with_its_precision_and_seconds(tmp_path):
    config = tiny(tmp_path, steps=1, existing="replace", precision="auto")
    run_quietly(config)
    kept = override(TrainConfig(), read_table(tmp_path / "run" / "config.json"), source="kept")
    assert kept.precision in ("float32", "bfloat16")
    assert kept == replace(config, existing="resume", precision=kept.precision)
    before = parameters(tmp_path / "run")
    assert run_quietly(kept)[0].step == 1
    assert_same(parameters(tmp_path / "run"), before)
    state = open_run(replace(kept, precision="auto"), pytest.fail)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (
        state.seconds == json.loads((checkpoint / "state.json").read_text())["extra"]["seconds"] > 0
    )
    assert (str(state.dtype), state.config.precision, state.step) == (
        f"torch.{kept.precision}",
        kept.precision,
        1,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "float8"},
        {"precision": None},
        {"seconds": "many"},
        {"seconds": float("nan")},
        {"rng": {}},
        {"rng": {"cpu": "xyz"}},
        {"rng": {"cpu": "00"}},
        {"train_tokens": None},
        {"has_text": None},
        {"skipped": -1},
    ],
)
def test_a_description_that_no_run_left_is_refused_in_one_line(ran, change):
    path = ran / NEWEST / "state.json"
    state = json.loads(path.read_text())
    state["extra"] |= change
    path.write_text(json.dumps(state))
    seal(path.parent)
    with pytest.raises(
        InputError, match=r"state.json does not hold what a run left there .*: delete this"
    ) as caught:
        open_run(tiny(ran, existing="resume"), pytest.fail)
    assert "\n" not in str(caught.value)


def test_other_settings_are_said_in_one_line(ran):
    said: list[str] = []
    changes = {
        "seed": 3,
        "batch_size": 1,
        "accumulation": 2,
        "optimizer": {"lr": 0.5},
        "model": {"moe": {"z_loss": 0.1}},
    }
    open_run(tiny(ran, existing="resume", **changes), said.append).claim.release()
    (line,) = said
    for part in (
        "seed (3 and 0)",
        "batch_size (1 and 2)",
        "accumulation (2 and 1)",
        "optimizer.lr (0.5 and 0.01)",
    ):
        assert part in line
    assert "model.moe.z_loss (0.1 and 0.0)" in line
    open_run(
        tiny(ran, existing="resume", steps=9, evaluate={"every": 1, "sequences": 4}), pytest.fail
    )


def test_settings_that_cannot_be_read_any_more_are_said_so(ran):
    path = ran / NEWEST / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"field_of_the_future": 1}))
    seal(path.parent)
    said: list[str] = []
    assert open_run(tiny(ran, existing="resume"), said.append).step == 2
    (line,) = said
    assert "cannot be compared" in line


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(InputError, match=r"out=.*run: cannot be written .*: choose another --out"):
        open_run(tiny(tmp_path), pytest.fail)
    assert (tmp_path / "run").read_text() == "a file"
