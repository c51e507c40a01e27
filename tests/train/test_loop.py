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
from moesaic.models.gpt import GPT, GPTOutput
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
    skip_measuring,
    snapshot,
    tiny,
    write_tokenizer,
)

VARIANTS = {
    "noisy": {"model": {"moe": {"router": "noisy"}}},
    "sigmoid": {"model": {"moe": {"router": "sigmoid", "router_options": {"bias_rate": 0.01}}}},
    "global batch": {"model": {"moe": {"load_balance_level": "global_batch"}}},
    "tokenizer": {"data": {"tokenizer": "given.json"}, "model": {"moe": {"router": "noisy"}}},
    "recomputed": {"model": {"checkpoint_activations": True, "moe": {"router": "noisy"}}},
}


def continuing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the patch that sends signals to the process."""
    monkeypatch.undo()
    skip_measuring(monkeypatch)


@pytest.mark.parametrize(("variant", "stopped_after"), thinned(itertools.product(VARIANTS, (1, 3)), every=2))
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(tmp_path, monkeypatch, variant, stopped_after):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "given.json")
    config = tiny(tmp_path, steps=6, accumulation=2, **VARIANTS[variant])
    run_quietly(replace(config, out=str(tmp_path / "whole")))
    signal_after(monkeypatch, stopped_after)
    first, said = run_quietly(config)
    continuing(monkeypatch)
    assert first.was_stopped
    assert first.step == stopped_after
    assert f"stopped by SIGINT after step {stopped_after}, saved; go on with moesaic train --config" in said
    torch.manual_seed(12345)  # whatever the process drew before
    second, _ = run_quietly(replace(config, existing="resume"))
    assert not second.was_stopped
    assert second.step == 6
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert_same(parameters(tmp_path / "run"), parameters(tmp_path / "whole"))
    whole = load_checkpoint(tmp_path / "whole" / "checkpoints", pytest.fail)
    assert_same(load_checkpoint(tmp_path / "run" / "checkpoints", pytest.fail).optimizer, whole.optimizer)


def test_routing_noise_and_the_bias_matter_to_the_resume_tests(tmp_path):
    one = tiny(tmp_path, **VARIANTS["noisy"])
    other = replace(one, out=str(tmp_path / "other"), seed=1)
    run_quietly(one)
    run_quietly(other)
    assert losses(tmp_path / "run") != losses(tmp_path / "other")
    run_quietly(tiny(tmp_path, out=str(tmp_path / "biased"), steps=3, **VARIANTS["sigmoid"]))
    biases = [value for name, value in parameters(tmp_path / "biased").items() if name.endswith("router.bias")]
    assert len(biases) == 2
    assert all(value.abs().max() > 0 for value in biases)


def test_a_signal_before_the_first_step_is_saved_and_resumed(tmp_path, monkeypatch):
    config = tiny(tmp_path)
    plain = Trainer._describe

    def describe(self: Trainer) -> str:
        signal.raise_signal(signal.SIGTERM)
        return plain(self)

    monkeypatch.setattr(Trainer, "_describe", describe)
    result, said = run_quietly(config)
    continuing(monkeypatch)
    assert result.was_stopped
    assert result.step == 0
    assert result.val_nats_per_byte is None
    assert "stopped by SIGTERM after step 0" in said
    run_quietly(replace(config, existing="resume"))
    run_quietly(replace(config, out=str(tmp_path / "whole")))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_the_line_that_says_how_to_go_on_is_quoted_for_a_shell(tmp_path, monkeypatch):
    signal_after(monkeypatch, 1)
    _, said = run_quietly(tiny(tmp_path, out=str(tmp_path / "my run's")))
    words = shlex.split(said.split("go on with ")[1].splitlines()[0])
    assert words == ["moesaic", "train", "--config", str(tmp_path / "my run's" / "config.json"), "--existing", "resume"]


def test_signal_handlers_are_put_back(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal_after(monkeypatch, 1)
    run_quietly(tiny(tmp_path))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_second_signal_has_its_usual_effect(tmp_path, monkeypatch):
    plain = Trainer._step

    def stepping(self: Trainer) -> dict:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return plain(self)

    monkeypatch.setattr(Trainer, "_step", stepping)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with none
    try:
        with pytest.raises(KeyboardInterrupt):
            run_quietly(tiny(tmp_path))
    finally:
        signal.signal(signal.SIGINT, before)


def test_more_steps_can_be_asked_of_a_finished_run(tmp_path):
    run_quietly(tiny(tmp_path, steps=2))
    result, _ = run_quietly(tiny(tmp_path, steps=3, existing="resume"))
    assert result.step == 3
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3]
    assert [line["step"] for line in lines(tmp_path / "run", "eval")] == [2, 3]


def test_a_run_taken_up_after_its_last_step_is_evaluated_again(tmp_path):
    config = tiny(tmp_path, steps=2)
    first, _ = run_quietly(config)
    before = snapshot(tmp_path / "run")
    second, said = run_quietly(replace(config, existing="resume"))
    assert (second.step, second.was_stopped) == (2, False)
    assert second.val_nats_per_byte == first.val_nats_per_byte
    assert "step 2, validation" in said
    assert snapshot(tmp_path / "run")["metrics.jsonl"] == before["metrics.jsonl"]


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


def test_evaluating_and_logging_change_nothing(tmp_path):
    seldom = tiny(tmp_path, **VARIANTS["noisy"])
    run_quietly(seldom)
    often = replace(
        seldom, out=str(tmp_path / "often"), evaluate=EvaluateConfig(every=1, sequences=4), save=SaveConfig(every=1)
    )
    run_quietly(often)
    assert losses(tmp_path / "often") == losses(tmp_path / "run")
    assert_same(parameters(tmp_path / "often"), parameters(tmp_path / "run"))
    assert len(lines(tmp_path / "often", "eval")) == 4
    unlogged = replace(seldom, out=str(tmp_path / "unlogged"), log_every=100)
    run_quietly(unlogged)
    assert losses(tmp_path / "unlogged") == losses(tmp_path / "run")[-1:]
    assert_same(parameters(tmp_path / "unlogged"), parameters(tmp_path / "run"))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_accumulation_is_one_larger_batch(tmp_path, z_loss):
    moe = {"load_balance": 0.0, "z_loss": z_loss}
    large = tiny(tmp_path, steps=1, batch_size=4, model={"moe": moe})
    run_quietly(large)
    run_quietly(replace(large, out=str(tmp_path / "small"), batch_size=2, accumulation=2))
    one, two = parameters(tmp_path / "run"), parameters(tmp_path / "small")
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=1e-4, msg=name)
    moments = [load_checkpoint(tmp_path / out / "checkpoints", pytest.fail).optimizer for out in ("run", "small")]
    for name in moments[0]:
        torch.testing.assert_close(moments[0][name], moments[1][name], atol=1e-8, rtol=1e-4, msg=name)
    for (_, a), (_, b) in zip(losses(tmp_path / "run"), losses(tmp_path / "small")):
        assert a == pytest.approx(b, abs=1e-6)


def test_the_z_loss_reaches_the_gradient(tmp_path):
    for name, z_loss in (("without", 0.0), ("with", 0.1)):
        out = str(tmp_path / name)
        run_quietly(tiny(tmp_path, steps=1, out=out, model={"moe": {"load_balance": 0.0, "z_loss": z_loss}}))
    assert losses(tmp_path / "without") == losses(tmp_path / "with")
    moments = [
        load_checkpoint(tmp_path / name / "checkpoints", pytest.fail).optimizer["blocks.0.ffn.router.weight.exp_avg"]
        for name in ("without", "with")
    ]
    assert not torch.equal(*moments)


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    config = tiny(tmp_path, steps=5, save={"every": 2}, nonfinite_steps=1)
    plain, calls = GPT.forward, []

    def spoilt(self, tokens, targets=None, **options):
        output = plain(self, tokens, targets, **options)
        if self.training:
            calls.append(1)
        if len(calls) < 3 or output.loss is None:
            return output
        return GPTOutput(output.logits, output.loss * math.nan, output.routings)

    monkeypatch.setattr(GPT, "forward", spoilt)
    with pytest.raises(TrainingError) as caught:
        run_quietly(config)
    kept = tmp_path / "run" / "checkpoints" / "step-00000002"
    for part in ("the loss of step 3 is not finite (nan", f"the checkpoint {kept} is intact", "--optimizer.lr"):
        assert part in str(caught.value)
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == [kept]
    assert all(value.isfinite().all() for value in parameters(tmp_path / "run").values())
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2]
    monkeypatch.setattr(GPT, "forward", plain)
    assert run_quietly(replace(config, existing="resume"))[0].step == 5


def test_an_absurd_learning_rate_says_that_nothing_was_saved(tmp_path):
    with pytest.raises(TrainingError, match=r"of step 4 is not finite .*; no checkpoint was written yet: lower"):
        run_quietly(tiny(tmp_path, steps=9, optimizer={"lr": 1e38, "warmup_steps": 0}))


def test_parameters_that_are_not_finite_are_not_saved(tmp_path, monkeypatch):
    config = tiny(tmp_path, steps=3, save={"every": 1})
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
        run_quietly(config)
    for part in ("largest parameter of step 2 is not finite (nan)", f"the checkpoint {kept} is intact"):
        assert part in str(caught.value)
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == [kept]
    assert all(value.isfinite().all() for value in parameters(tmp_path / "run").values())


def test_metrics_hold_every_figure_per_layer(tmp_path):
    run_quietly(tiny(tmp_path, accumulation=2, model={"moe": {"z_loss": 0.01}}))
    found = lines(tmp_path / "run", "train")
    assert len(found) == 4
    for line in found:
        assert {"loss", "grad_norm", "lr", "load_balance", "z_loss", "tokens_per_second"} <= line.keys()
        assert "mfu" not in line, "a CPU has no peak of its own"
        assert len(line["layers"]) == 2
        for layer in line["layers"]:
            assert sum(layer["tokens_per_expert"]) == 2 * 2 * 16 * 2  # sequences, micro-batches, tokens, experts
            assert layer["max_violation"] >= 0
            assert 0 <= layer["entropy"] <= 1
            assert layer["dropped"] == 0
        assert line["load_balance"] >= 0.9
    (last,) = lines(tmp_path / "run", "eval")
    assert last["val_nats_per_byte"] == last["val_loss"]


def test_a_dense_model_has_no_expert_figures(tmp_path):
    run_quietly(tiny(tmp_path, steps=2, model={"ffn": "dense"}))
    for line in lines(tmp_path / "run", "train"):
        assert line["layers"] == []


def test_auxiliary_losses_are_means_over_all_micro_batches(tmp_path):
    config = tiny(tmp_path, steps=1, accumulation=3, model={"moe": {"z_loss": 0.01}})
    state = open_run(replace(config, out=str(tmp_path / "open")), pytest.fail)
    found: dict[str, list[float]] = {"load_balance": [], "z_loss": []}
    for micro in range(3):
        for routing in state.model(*state.batches.get(micro)).routings:
            for name, values in found.items():
                values.append(float(routing.losses[name]))
    run_quietly(config)
    (line,) = lines(tmp_path / "run", "train")
    for name, values in found.items():
        assert line[name] == pytest.approx(sum(values) / 6, rel=1e-5)
        assert line[name] != pytest.approx(sum(values[-2:]) / 2, rel=1e-5)


def test_training_learns(tmp_path):
    run_quietly(tiny(tmp_path, steps=30, log_every=29))
    found = dict(losses(tmp_path / "run"))
    assert found[29] < math.log(256) - 2


def test_clipping_can_be_turned_off(tmp_path):
    for name, limit in (("tight", 1e-3), ("off", 0.0)):
        run_quietly(tiny(tmp_path, steps=1, out=str(tmp_path / name), optimizer={"clip_norm": limit}))
    moments = [load_checkpoint(tmp_path / name / "checkpoints", pytest.fail).optimizer for name in ("tight", "off")]
    norms = [sum(float(v.norm()) ** 2 for k, v in m.items() if k.endswith("exp_avg")) ** 0.5 for m in moments]
    (line,) = lines(tmp_path / "off", "train")
    assert norms[1] == pytest.approx(0.1 * line["grad_norm"], rel=1e-4)
    assert norms[0] == pytest.approx(0.1 * 1e-3, rel=1e-2)


def test_saving_honours_when_and_how_many(tmp_path):
    run_quietly(tiny(tmp_path, steps=5, save={"every": 2, "keep": 2}))
    kept = [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == ["step-00000004", "step-00000005"]
    assert not [name for name in snapshot(tmp_path / "run") if ".writing" in name]


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path, monkeypatch):
    plain, goes_on, waited = checkpoint.write_shards, threading.Event(), []
    step = Trainer._step

    def slowly(*arguments, **options):
        waited.append(goes_on.wait(30))
        return plain(*arguments, **options)

    def stepping(self: Trainer) -> dict:
        values = step(self)
        if self.state.step == 4:
            assert not (tmp_path / "run" / "checkpoints" / "step-00000002").exists()
            goes_on.set()
        return values

    monkeypatch.setattr(checkpoint, "write_shards", slowly)
    monkeypatch.setattr(Trainer, "_step", stepping)
    config = tiny(tmp_path, steps=7, save={"every": 2, "keep": 9, "background": True})
    run_quietly(config)
    assert waited[0]
    monkeypatch.undo()
    skip_measuring(monkeypatch)
    run_quietly(replace(config, out=str(tmp_path / "waits"), save=SaveConfig(every=2, keep=9)))
    assert losses(tmp_path / "run") == losses(tmp_path / "waits")
    for one, other in zip(*(list_checkpoints(tmp_path / out / "checkpoints") for out in ("run", "waits")), strict=True):
        assert one.name == other.name
        for part in ("model.", "optimizer."):
            assert_same(read_whole(one, part), read_whole(other, part))


def test_every_micro_batch_is_read_once_in_order(tmp_path, monkeypatch):
    plain, seen = Batches.get, []

    def noting(self: Batches, index: int):
        seen.append(index)
        return plain(self, index)

    monkeypatch.setattr(Batches, "get", noting)
    run_quietly(tiny(tmp_path, steps=3, accumulation=2))
    run_quietly(tiny(tmp_path, steps=4, accumulation=2, existing="resume"))
    assert seen == list(range(8))
