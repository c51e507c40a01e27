"""The training loop: exact resuming, clean stops, errors, and the files that it writes."""

from __future__ import annotations

import itertools
import math
import shlex
import signal
import threading
from dataclasses import replace

import pytest
import torch

from helpers import thinned
from moesaic.errors import TrainingError
from moesaic.train import checkpoint
from moesaic.train.checkpoint import list_checkpoints, load_checkpoint
from moesaic.train.config import EvaluateConfig, SaveConfig
from moesaic.train.data import Batches
from moesaic.train.distributed_checkpoint import read_whole
from moesaic.train.loop import Trainer
from moesaic.train.state import open_run
from runs import (
    assert_same,
    lines,
    losses,
    parameters,
    run_quietly,
    signal_after,
    snapshot,
    tiny,
    write_tokenizer,
)

VARIANTS = {
    "noise, tokenizer, recomputed": {
        "data": {"tokenizer": "given.json"},
        "model": {"checkpoint_activations": True, "moe": {"router": "noisy"}},
    },
    "bias, global batch": {
        "model": {
            "moe": {
                "router": "sigmoid",
                "router_options": {"bias_rate": 0.01},
                "load_balance_level": "global_batch",
            }
        }
    },
}


@pytest.mark.parametrize(
    ("variant", "stopped_after"), thinned(itertools.product(VARIANTS, (1, 3)), every=3)
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(
    tmp_path, monkeypatch, variant, stopped_after
):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "given.json")
    config = tiny(tmp_path, steps=4, accumulation=2, **VARIANTS[variant])
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run_quietly(replace(config, out=str(tmp_path / "whole")))
    signal_after(monkeypatch, stopped_after)
    first, said = run_quietly(config)
    monkeypatch.undo()
    assert (first.was_stopped, first.step) == (True, stopped_after)
    assert (
        f"stopped by SIGINT after step {stopped_after}, saved; go on with moesaic train --config"
        in said
    )
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    torch.manual_seed(12345)  # whatever the process drew before
    second, _ = run_quietly(replace(config, existing="resume"))
    assert (second.was_stopped, second.step) == (False, 4)
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    run, whole = (
        load_checkpoint(tmp_path / name / "checkpoints", pytest.fail) for name in ("run", "whole")
    )
    assert_same(run.model, whole.model)
    assert_same(run.optimizer, whole.optimizer)
    biases = [value for name, value in run.model.items() if name.endswith("router.bias")]
    assert any(value.any() for value in biases) == bool(biases)


def test_a_signal_before_the_first_step_is_saved_and_says_how_to_go_on_quoted_for_a_shell(
    tmp_path, monkeypatch
):
    config = tiny(tmp_path, out=str(tmp_path / "my run's"))
    plain = Trainer._describe

    def describe(self: Trainer) -> str:
        signal.raise_signal(signal.SIGTERM)
        return plain(self)

    monkeypatch.setattr(Trainer, "_describe", describe)
    result, said = run_quietly(config)
    monkeypatch.undo()
    assert (result.was_stopped, result.step, result.val_nats_per_byte) == (True, 0, None)
    assert "stopped by SIGTERM after step 0" in said
    words = shlex.split(said.split("go on with ")[1].splitlines()[0])
    assert words == [
        "moesaic",
        "train",
        "--config",
        f"{config.out}/config.json",
        "--existing",
        "resume",
    ]
    run_quietly(replace(config, existing="resume"))
    run_quietly(replace(config, out=str(tmp_path / "whole")))
    assert losses(tmp_path / "my run's") == losses(tmp_path / "whole")


def test_the_second_signal_has_its_usual_effect(tmp_path, monkeypatch):
    def stepping(self: Trainer) -> dict:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return {}

    monkeypatch.setattr(Trainer, "_step", stepping)
    # a shell's background job is started with none
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_quietly(tiny(tmp_path))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_finished_run_can_be_evaluated_again_and_be_asked_for_more_steps(tmp_path, monkeypatch):
    plain = Batches.get
    seen = []
    monkeypatch.setattr(
        Batches, "get", lambda self, index: seen.append(index) or plain(self, index)
    )
    config = tiny(tmp_path, steps=2, accumulation=2)
    first, _ = run_quietly(config)
    before = snapshot(tmp_path / "run")
    second, said = run_quietly(replace(config, existing="resume"))
    assert (second.step, second.was_stopped, second.val_nats_per_byte) == (
        2,
        False,
        first.val_nats_per_byte,
    )
    assert "step 2, validation" in said
    assert snapshot(tmp_path / "run")["metrics.jsonl"] == before["metrics.jsonl"]
    assert run_quietly(replace(config, steps=3, existing="resume"))[0].step == 3
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3]
    assert [line["step"] for line in lines(tmp_path / "run", "eval")] == [2, 3]
    assert seen == list(range(6)), "every micro-batch is read once, in order"


def test_steps_after_the_last_checkpoint_are_taken_again(tmp_path):
    config = tiny(tmp_path, steps=4, save={"every": 2}, evaluate={"every": 1, "sequences": 4})
    run_quietly(config)
    expected = losses(tmp_path / "run")
    for path in list_checkpoints(tmp_path / "run" / "checkpoints")[1:]:
        (path / "state.json").unlink()
    _, said = run_quietly(replace(config, existing="resume"))
    assert "taking step-00000002 instead" in said
    assert losses(tmp_path / "run") == expected
    assert [line["step"] for line in lines(tmp_path / "run", "eval")] == [1, 2, 3, 4]


def test_evaluating_saving_and_logging_change_nothing_and_saving_honours_when_and_how_many(
    tmp_path,
):
    seldom = tiny(tmp_path, steps=3, log_every=100, model={"moe": {"router": "noisy"}})
    run_quietly(seldom)
    often = replace(
        seldom,
        out=str(tmp_path / "often"),
        log_every=1,
        evaluate=EvaluateConfig(every=1, sequences=4),
        save=SaveConfig(every=2, keep=1),
    )
    run_quietly(often)
    assert losses(tmp_path / "run") == losses(tmp_path / "often")[-1:]
    assert_same(parameters(tmp_path / "often"), parameters(tmp_path / "run"))
    assert len(lines(tmp_path / "often", "eval")) == 3
    assert [path.name for path in list_checkpoints(tmp_path / "often" / "checkpoints")] == [
        "step-00000003"
    ]
    assert not [name for name in snapshot(tmp_path / "often") if ".writing" in name]


def test_accumulation_is_one_larger_batch(tmp_path):
    large = tiny(
        tmp_path, steps=1, batch_size=4, model={"moe": {"load_balance": 0.0, "z_loss": 0.1}}
    )
    run_quietly(large)
    run_quietly(replace(large, out=str(tmp_path / "small"), batch_size=2, accumulation=2))
    run_quietly(
        replace(
            large,
            out=str(tmp_path / "free"),
            model=replace(large.model, moe=replace(large.model.moe, z_loss=0)),
        )
    )
    whole, parts, free = (
        load_checkpoint(tmp_path / out / "checkpoints", pytest.fail)
        for out in ("run", "small", "free")
    )
    for name, value in whole.model.items():
        torch.testing.assert_close(value, parts.model[name], atol=1e-4, rtol=1e-4, msg=name)
    for name, value in whole.optimizer.items():
        torch.testing.assert_close(value, parts.optimizer[name], atol=1e-8, rtol=1e-4, msg=name)
    for (_, a), (_, b) in zip(losses(tmp_path / "run"), losses(tmp_path / "small")):
        assert a == pytest.approx(b, abs=1e-6)
    router = "blocks.0.ffn.router.weight.exp_avg"
    assert losses(tmp_path / "run") == losses(tmp_path / "free")
    assert not torch.equal(whole.optimizer[router], free.optimizer[router]), (
        "the z-loss reaches the gradient"
    )


def test_an_absurd_learning_rate_says_that_nothing_was_saved(tmp_path):
    with pytest.raises(
        TrainingError, match=r"of step 4 is not finite .*; no checkpoint was written yet: lower"
    ):
        run_quietly(tiny(tmp_path, steps=9, optimizer={"lr": 1e38, "warmup_steps": 0}))


def test_parameters_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    plain = torch.optim.AdamW.step

    def spoil(self, *options):
        result = plain(self, *options)
        parameter = self.param_groups[0]["params"][0]
        if self.state[parameter]["step"] == 2:
            parameter.data.view(-1)[-1] = math.nan
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    kept = tmp_path / "run" / "checkpoints" / "step-00000001"
    with pytest.raises(TrainingError) as caught:
        run_quietly(tiny(tmp_path, steps=3, save={"every": 1}))
    for part in (
        "largest parameter of step 2 is not finite (nan)",
        f"the checkpoint {kept} is intact",
    ):
        assert part in str(caught.value)
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == [kept]


def test_metrics_hold_every_figure_per_layer_and_means_over_all_micro_batches(tmp_path):
    config = tiny(tmp_path, steps=2, accumulation=3, model={"moe": {"z_loss": 0.01}})
    state = open_run(replace(config, out=str(tmp_path / "open")), pytest.fail)
    found: dict[str, list[float]] = {"load_balance": [], "z_loss": []}
    for micro in range(3):
        for routing in state.model(*state.batches.get(micro)).routings:
            for name, values in found.items():
                values.append(float(routing.losses[name]))
    run_quietly(config)
    first, second = lines(tmp_path / "run", "train")
    for line in (first, second):
        assert {
            "loss",
            "grad_norm",
            "lr",
            "load_balance",
            "z_loss",
            "tokens_per_second",
        } <= line.keys()
        assert "mfu" not in line, "a CPU has no peak of its own"
        assert len(line["layers"]) == 2
        for layer in line["layers"]:
            # sequences, micro-batches, tokens, experts
            assert sum(layer["tokens_per_expert"]) == 2 * 3 * 16 * 2
            assert layer["max_violation"] >= 0
            assert 0 <= layer["entropy"] <= 1
            assert layer["dropped"] == 0
        assert line["load_balance"] >= 0.9
    for name, values in found.items():
        assert first[name] == pytest.approx(sum(values) / 6, rel=1e-5)
        assert first[name] != pytest.approx(sum(values[-2:]) / 2, rel=1e-5)
    (last,) = lines(tmp_path / "run", "eval")
    assert last["val_nats_per_byte"] == last["val_loss"]


def test_training_learns_in_a_dense_model_too_which_has_no_expert_figures(tmp_path):
    for name, ffn in (("sparse", "moe"), ("dense", "dense")):
        run_quietly(
            tiny(tmp_path, steps=30, log_every=29, out=str(tmp_path / name), model={"ffn": ffn})
        )
        assert dict(losses(tmp_path / name))[29] < math.log(256) - 2
    assert [line["layers"] for line in lines(tmp_path / "dense", "train")] == [[], []]


def test_clipping_can_be_turned_off(tmp_path):
    for name, limit in (("tight", 1e-3), ("off", 0.0)):
        run_quietly(
            tiny(tmp_path, steps=1, out=str(tmp_path / name), optimizer={"clip_norm": limit})
        )
    moments = [
        load_checkpoint(tmp_path / name / "checkpoints", pytest.fail).optimizer
        for name in ("tight", "off")
    ]
    norms = [
        sum(float(v.norm()) ** 2 for k, v in m.items() if k.endswith("exp_avg")) ** 0.5
        for m in moments
    ]
    (line,) = lines(tmp_path / "off", "train")
    assert norms[1] == pytest.approx(0.1 * line["grad_norm"], rel=1e-4)
    assert norms[0] == pytest.approx(0.1 * 1e-3, rel=1e-2)


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path, monkeypatch):
    plain = checkpoint.write_shards
    goes_on = threading.Event()
    waited = []
    step = Trainer._step

    def slowly(*arguments, **options):
        waited.append(goes_on.wait(30))
        return plain(*arguments, **options)

    def stepping(self: Trainer) -> dict:
        values = step(self)
        if self.state.step == 3:
            assert not (tmp_path / "run" / "checkpoints" / "step-00000002").exists()
            goes_on.set()
        return values

    monkeypatch.setattr(checkpoint, "write_shards", slowly)
    monkeypatch.setattr(Trainer, "_step", stepping)
    config = tiny(tmp_path, steps=4, save={"every": 2, "keep": 9, "background": True})
    run_quietly(config)
    assert waited[0]
    monkeypatch.undo()
    run_quietly(replace(config, out=str(tmp_path / "waits"), save=SaveConfig(every=2, keep=9)))
    assert losses(tmp_path / "run") == losses(tmp_path / "waits")
    for one, other in zip(
        *(list_checkpoints(tmp_path / out / "checkpoints") for out in ("run", "waits")), strict=True
    ):
        assert one.name == other.name
        for part in ("model.", "optimizer."):
            assert_same(read_whole(one, part), read_whole(other, part))
