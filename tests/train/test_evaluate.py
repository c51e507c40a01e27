"""Evaluation: the loss per token and per byte, and a loss that is not finite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moesaic.errors import TrainingError
from moesaic.models.gpt import GPT, GPTOutput
from moesaic.train.checkpoint import list_checkpoints
from moesaic.train.evaluate import evaluate
from moesaic.train.state import open_run
from moesaic.train.tokenizer import HubTokenizer
from runs import lines, parameters, run_quietly, tiny, write_tokenizer


def test_the_loss_per_byte_counts_the_bytes_behind_tokens_text_or_not(tmp_path):
    config = tiny(tmp_path, steps=1, data={"tokenizer": write_tokenizer(tmp_path / "given.json")})
    (tmp_path / "val.txt").write_bytes(b"caf\xe9 abc abc abc def\xff\xfe" * 40)
    result, _ = run_quietly(
        replace(config, data=replace(config.data, val=(str(tmp_path / "val.txt"),)))
    )
    (line,) = lines(tmp_path / "run", "eval")
    tokens = HubTokenizer.load(tmp_path / "run" / "tokenizer.json").encode(
        (tmp_path / "val.txt").read_bytes()
    )
    assert len(tokens) not in (0, 22 * 40)
    assert result.val_nats_per_byte == line["val_nats_per_byte"]
    assert result.val_nats_per_byte == pytest.approx(line["val_loss"] * len(tokens) / (22 * 40))


def test_the_validation_loss_is_that_of_the_model_over_the_windows(ran):
    config = tiny(ran, steps=2)
    (line,) = lines(ran / "run", "eval")
    model = GPT(config.model, 256)
    model.load_state_dict(parameters(ran / "run"))
    text = (ran / "text.txt").read_bytes()
    val = torch.tensor(list(text[int(len(text) * 0.95) :]))
    last = (len(val) - 1) // 16 - 1
    total = 0.0
    for window in (0, last // 3, 2 * last // 3, last):
        piece = val[window * 16 : window * 16 + 17]
        with torch.no_grad():
            total += float(model.eval()(piece[None, :-1], piece[None, 1:]).loss)
    assert line["val_loss"] == pytest.approx(total / 4, rel=1e-5)


def test_evaluating_leaves_mode_and_gradients_alone_and_does_not_depend_on_the_batch_size(tmp_path):
    state = open_run(tiny(tmp_path), pytest.fail)
    losses = []
    for training, size in ((True, 1), (False, 3), (True, 99)):
        state.model.train(training)
        found = evaluate(
            state.model, state.corpus, state.eval_windows, batch_size=size, dtype=torch.float32
        )
        assert state.model.training is training
        assert found.per_token == found.per_byte == pytest.approx(math.log(256), abs=0.5)
        losses.append(found.per_token)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_a_validation_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    config = tiny(tmp_path, steps=4, save={"every": 2}, evaluate={"every": 3, "sequences": 4})
    plain = GPT.forward

    def spoilt(self, tokens, targets=None, **options):
        output = plain(self, tokens, targets, **options)
        if self.training or output.loss is None:
            return output
        return GPTOutput(output.logits, output.loss * math.nan, output.routings)

    monkeypatch.setattr(GPT, "forward", spoilt)
    kept = tmp_path / "run" / "checkpoints" / "step-00000002"
    with pytest.raises(TrainingError) as caught:
        run_quietly(config)
    for part in (
        "the validation loss of step 3 is not finite (nan)",
        f"the checkpoint {kept} is intact",
    ):
        assert part in str(caught.value)
    assert lines(tmp_path / "run", "eval") == []
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == [kept]
