"""Runs of transformers' Trainer that go on from a checkpoint, over experts on several ranks, on other numbers of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from ep_ranks import Sequences, arguments, load_whole, resumed
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from moesaic.errors import InputError
from moesaic.transformers import Resumable
from moesaic.transformers.resume import _for_groups
from worlds import on_ranks


class ResumableTrainer(Resumable, Trainer):
    """What a user writes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Mixtral, whose files call its experts by other names than the model."""
    path = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_local_experts": 4,
    }
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(path)
    return str(path)


def close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_runs_go_on_from_one_process_to_two_ranks_and_back(folder: str, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    (whole,) = resumed(folder, [(str(tmp_path / "one"), None, {})])
    assert len(whole) == 5
    runs = [("two", f"{tmp_path}/one/checkpoint-2", {}), ("best", None, best)]
    found = on_ranks(2, resumed, folder, [(str(tmp_path / out), *rest) for out, *rest in runs])[0]
    close(found[0], whole)
    close(found[1], whole)
    close(found[2][:1], found[2][1:])  # the model that is left is the one with the best loss
    for losses in resumed(
        folder, [(str(tmp_path / f"back-{step}"), after(tmp_path, step), {}) for step in (2, 4)]
    ):
        close(losses, whole)


def after(folder: Path, step: int) -> str:
    """Return a checkpoint of the run that went on on two ranks, or of the whole one on two ranks."""
    return f"{folder}/{'best' if step == 2 else 'two'}/checkpoint-{step}"


@pytest.mark.random
def test_runs_go_on_from_four_ranks_to_fewer(folder: str, tmp_path: Path) -> None:
    """Each expert is on two of the four ranks, in strided parts."""
    (whole,) = on_ranks(4, resumed, folder, [(str(tmp_path / "four"), None, {})])[0]
    checkpoint = f"{tmp_path}/four/checkpoint-2"
    close(on_ranks(2, resumed, folder, [(str(tmp_path / "two"), checkpoint, {})])[0][0], whole)
    close(resumed(folder, [(str(tmp_path / "one"), checkpoint, {})])[0], whole)


def test_a_checkpoint_of_another_trainer_is_refused_in_one_line(
    folder: str, tmp_path: Path
) -> None:
    options = arguments(
        str(tmp_path), save_strategy="steps", save_steps=2, per_device_train_batch_size=4
    )
    Trainer(
        model=load_whole(folder), args=TrainingArguments(**options), train_dataset=Sequences()
    ).train()
    trainer = ResumableTrainer(
        model=load_whole(folder), args=TrainingArguments(**options), train_dataset=Sequences()
    )
    with pytest.raises(InputError, match="checkpoint-2: has no optimizer/"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_schedule_is_spread_over_another_number_of_groups() -> None:
    model = [torch.nn.Parameter(torch.zeros(1)) for _ in range(5)]
    states = []
    for groups in (2, 5):
        optimizer = torch.optim.SGD([{"params": [each]} for each in model[:groups]], lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(3):
            schedule.step()
        states.append(schedule.state_dict())
    assert _for_groups(states[0], 5) == states[1]
    assert _for_groups(states[1], 2) == states[0]
    with pytest.raises(InputError, match="parameter groups differ in base_lrs"):
        _for_groups(states[0] | {"base_lrs": [0.1, 0.2]}, 5)
