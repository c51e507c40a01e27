"""Opening a run: what is built and restored, and that nothing is touched before everything is validated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic.configfile import override, read_table
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT
from moesaic.train.config import OptimizerConfig, TrainConfig
from moesaic.train.optimizer import make_optimizer
from moesaic.train.state import open_run, seed_everything
from runs import assert_same, parameters, run_quietly, seal, snapshot, tiny, write_text, write_tokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("router", ["softmax", "noisy", "sigmoid", "cosine", "group_limited"])
def test_weight_decay_is_on_matrices_but_routers(router):
    shape = ModelConfig(
        moe_every=2, dim=16, num_layers=2, num_heads=2, moe=MoEConfig(num_experts=4, hidden=8, router=router)
    )
    model = GPT(shape, 32)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.25), CPU)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        spared = ".router." in name or "norm" in name or name.endswith("bias")
        assert decay[id(parameter)] == (0.0 if spared else 0.25), name
        assert spared or parameter.dim() >= 2
    assert any(".router." in name for name, _ in model.named_parameters())


def test_the_optimizer_takes_its_constants_from_the_configuration():
    model = GPT(ModelConfig(dim=16, num_layers=1, num_heads=2, moe=MoEConfig(num_experts=2, hidden=8)), 32)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, betas=(0.7, 0.8)), CPU)
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert group["betas"] == (0.7, 0.8)


def test_experts_and_routers_have_learning_rates_of_their_own(tmp_path):
    rates = {"expert_lr_scale": 0.0, "router_lr_scale": 0.5}
    config = tiny(tmp_path, steps=2, optimizer={"lr": 1e-2, "warmup_steps": 1, "weight_decay": 0.1, **rates})
    drawn = open_run(replace(config, out=str(tmp_path / "drawn")), pytest.fail).model.state_dict()
    before = {name: value.clone() for name, value in drawn.items()}
    run_quietly(config)
    run = open_run(replace(config, existing="resume"), pytest.fail)
    moved = {name for name, value in run.model.state_dict().items() if not torch.equal(value, before[name])}
    experts = {name for name in before if ".ffn.experts." in name}
    assert experts
    assert moved == set(before) - experts
    found = {group["rate"]: group["lr"] for group in run.optimizer.param_groups}
    assert set(found) == {0.0, 0.5, 1.0}


def test_a_seed_decides_the_initial_parameters(tmp_path):
    states = [
        open_run(tiny(tmp_path, out=str(tmp_path / name), seed=seed), pytest.fail).model.state_dict()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert_same(states[0], states[1])
    assert not torch.equal(states[0]["embedding.weight"], states[2]["embedding.weight"])
    seed_everything(2**62)


def with_tokenizer(folder: Path) -> dict[str, str]:
    """Return data options with a tokenizer of the tokenizers library."""
    return {"tokenizer": write_tokenizer(folder / "given.json")}


def test_an_existing_run_is_refused_unless_asked(tmp_path):
    config = tiny(tmp_path, steps=1)
    run_quietly(config)
    before = snapshot(tmp_path / "run")
    with pytest.raises(InputError, match=r"holds a run already: pass --existing resume, --existing replace"):
        open_run(config, pytest.fail)
    assert snapshot(tmp_path / "run") == before


def test_replacing_leaves_nothing_of_the_old_run(tmp_path):
    run_quietly(tiny(tmp_path, steps=3, save={"every": 1}, tensorboard=True, data=with_tokenizer(tmp_path)))
    run_quietly(tiny(tmp_path, steps=1, existing="replace"))
    assert sorted(snapshot(tmp_path / "run")) == [
        "checkpoints/step-00000001/SHA256SUMS",
        "checkpoints/step-00000001/config.json",
        "checkpoints/step-00000001/shards/.metadata",
        "checkpoints/step-00000001/shards/__0_0.distcp",
        "checkpoints/step-00000001/state.json",
        "config.json",
        "metrics.jsonl",
    ]


BAD = {
    "short training data": {"model": {"seq_len": 10_000}},
    "short validation data": {"data": {"val_share": 0.001}},
    "missing data": {"data": {"path": ["absent.txt"]}},
    "device": {"device": "gpu"},
    "router": {"model": {"moe": {"router": "noisy", "top_k": 1}}},
    "groups": {"model": {"moe": {"router": "group_limited", "router_options": {"num_groups": 3}}}},
    "tokenizer": {"data": {"tokenizer": "absent.json"}},
}


@pytest.mark.parametrize("existing", ["replace", "resume"])
@pytest.mark.parametrize("what", BAD)
def test_nothing_is_touched_before_everything_has_proven_good(tmp_path, what, existing):
    run_quietly(tiny(tmp_path, steps=1))
    before = snapshot(tmp_path)
    with pytest.raises(InputError):
        open_run(tiny(tmp_path, existing=existing, **BAD[what]), pytest.fail)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("what", BAD)
def test_a_refused_run_leaves_no_folder(tmp_path, what):
    with pytest.raises(InputError):
        open_run(tiny(tmp_path, **BAD[what]), pytest.fail)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no more"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory:\nyou tried to allocate 2199023255552 bytes."),
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


def test_resuming_uses_the_tokenizer_of_the_run(tmp_path):
    config = tiny(tmp_path, steps=1, data=with_tokenizer(tmp_path))
    run_quietly(config)
    before = (tmp_path / "run" / "tokenizer.json").read_bytes()
    Path(config.data.tokenizer).unlink()
    run_quietly(replace(config, steps=2, existing="resume"))
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes().replace(b"a", b"b"))])
def test_a_tokenizer_that_was_damaged_is_taken_from_the_checkpoint(tmp_path, harm):
    config = tiny(tmp_path, steps=1, data=with_tokenizer(tmp_path))
    run_quietly(config)
    own = tmp_path / "run" / "tokenizer.json"
    before = own.read_bytes()
    harm(own)
    _, said = run_quietly(replace(config, steps=2, existing="resume"))
    assert f"{own}: was lost or damaged, and is taken from step-00000001" in said
    assert own.read_bytes() == before == (tmp_path / "run" / "checkpoints" / "step-00000002" / own.name).read_bytes()
    assert "damaged" not in run_quietly(replace(config, steps=3, existing="resume"))[1]


def test_resuming_where_nothing_is_starts_a_run(tmp_path):
    result, _ = run_quietly(tiny(tmp_path, steps=1, existing="resume"))
    assert result.step == 1
    (tmp_path / "run2").mkdir()
    assert run_quietly(tiny(tmp_path, steps=1, existing="resume", out=str(tmp_path / "run2")))[0].step == 1
    shutil.rmtree(tmp_path / "run2" / "checkpoints")
    assert run_quietly(tiny(tmp_path, steps=1, existing="resume", out=str(tmp_path / "run2")))[0].step == 1


@pytest.mark.parametrize("existing", ["refuse", "replace"])
def test_the_kept_configuration_takes_the_run_up_again(tmp_path, existing):
    config = tiny(tmp_path, steps=2, existing=existing, precision="auto")
    run_quietly(config)
    kept = override(TrainConfig(), read_table(tmp_path / "run" / "config.json"), source="kept")
    assert kept.precision in ("float32", "bfloat16")
    assert kept == replace(config, existing="resume", precision=kept.precision)
    before = parameters(tmp_path / "run")
    assert run_quietly(kept)[0].step == 2
    assert_same(parameters(tmp_path / "run"), before)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    run_quietly(tiny(tmp_path, steps=1))
    before = snapshot(tmp_path / "run")
    with pytest.raises(InputError) as caught:
        open_run(tiny(tmp_path, existing="resume", model={"dim": 32, "moe": {"hidden": 8}}), pytest.fail)
    for part in ("model.dim (32 and 16)", "model.moe.hidden (8 and 16)", "step 1", "choose another run folder"):
        assert part in str(caught.value)
    assert snapshot(tmp_path / "run") == before


def test_seconds_and_precision_go_on(tmp_path):
    run_quietly(tiny(tmp_path, steps=1, precision="bfloat16"))
    state = open_run(tiny(tmp_path, steps=2, existing="resume", precision="auto"), pytest.fail)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert state.seconds == json.loads((checkpoint / "state.json").read_text())["extra"]["seconds"] > 0
    assert state.dtype == torch.bfloat16
    assert state.config.precision == "bfloat16"
    assert state.step == 1


@pytest.mark.parametrize(("before", "now"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_another_precision_is_refused(tmp_path, before, now):
    run_quietly(tiny(tmp_path, steps=1, precision=before))
    files = snapshot(tmp_path)
    with pytest.raises(InputError) as caught:
        open_run(tiny(tmp_path, existing="resume", precision=now), pytest.fail)
    for part in (f"precision={now}: the run is in {before}", f"pass --precision {before} or auto", "another --out"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert snapshot(tmp_path) == files


@pytest.mark.parametrize("change", ["text", "share"])
def test_other_training_tokens_are_refused(tmp_path, change):
    run_quietly(tiny(tmp_path, steps=1))
    if change == "text":
        write_text(tmp_path / "text.txt", seed=1)
    files = snapshot(tmp_path)
    data = {"val_share": 0.1} if change == "share" else {}
    with pytest.raises(InputError, match=r"^the training tokens are not those of the checkpoint of step 1: .*--out$"):
        open_run(tiny(tmp_path, existing="resume", data=data), pytest.fail)
    assert snapshot(tmp_path) == files


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
def test_a_description_that_no_run_left_is_refused_in_one_line(tmp_path, change):
    run_quietly(tiny(tmp_path, steps=1))
    path = tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json"
    state = json.loads(path.read_text())
    state["extra"] |= change
    path.write_text(json.dumps(state))
    seal(path.parent)
    with pytest.raises(InputError, match=r"state.json does not hold what a run left there .*: delete this") as caught:
        open_run(tiny(tmp_path, existing="resume"), pytest.fail)
    assert "\n" not in str(caught.value)


def test_other_settings_are_said_in_one_line(tmp_path):
    run_quietly(tiny(tmp_path, steps=1))
    said: list[str] = []
    changes = {
        "seed": 3,
        "batch_size": 1,
        "accumulation": 2,
        "optimizer": {"lr": 0.5},
        "model": {"moe": {"z_loss": 0.1}},
    }
    open_run(tiny(tmp_path, existing="resume", **changes), said.append)
    (line,) = said
    for part in ("seed (3 and 0)", "batch_size (1 and 2)", "accumulation (2 and 1)", "optimizer.lr (0.5 and 0.01)"):
        assert part in line
    assert "model.moe.z_loss (0.1 and 0.0)" in line
    open_run(
        tiny(tmp_path, existing="resume", steps=9, evaluate={"every": 1, "sequences": 4}), pytest.fail
    )  # those of the checkpoint


def test_settings_that_cannot_be_read_any_more_are_said_so(tmp_path):
    run_quietly(tiny(tmp_path, steps=1))
    path = tmp_path / "run" / "checkpoints" / "step-00000001" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"field_of_the_future": 1}))
    seal(path.parent)
    said: list[str] = []
    assert open_run(tiny(tmp_path, existing="resume"), said.append).step == 1
    assert len(said) == 1
    assert "cannot be compared" in said[0]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(InputError, match=r"out=.*run: cannot be written .*: choose another --out"):
        open_run(tiny(tmp_path), pytest.fail)
    assert (tmp_path / "run").read_text() == "a file"
