"""Runs of transformers' Trainer that go on from a checkpoint, over experts on several ranks, on
other numbers of them."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from ep_ranks import Sequences, arguments, load_whole, resumed
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments
from transformers.distributed import save_optimizer_distributed

from helpers import kinds_of_files, refused
from moesaic.errors import InputError
from moesaic.resuming import COMPLETE, checksum, seal
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
    for out, world in (("one", 1), ("two", 2)):
        kinds = kinds_of_files(tmp_path / out / "checkpoint-4")
        assert set(kinds.values()) == {"text", "safetensors"}
        assert len([name for name in kinds if name.startswith("optimizer/shard-")]) == world
        assert {name for name in kinds if name.startswith("random-")} == {
            f"random-{rank}-of-{world}.safetensors" for rank in range(world)
        }


def after(folder: Path, step: int) -> str:
    """Return a checkpoint of the run that went on on two ranks, or of the whole one on two
    ranks."""
    return f"{folder}/{'best' if step == 2 else 'two'}/checkpoint-{step}"


def test_random_states_come_back_to_the_bit(folder: str, tmp_path: Path) -> None:
    trainer = ResumableTrainer(
        model=load_whole(folder), args=TrainingArguments(**arguments(str(tmp_path)))
    )
    drawn = []
    for draw in range(2):
        if draw == 0:
            np.random.standard_normal(3)  # leaves half a pair in numpy's state
            trainer._save_rng_state(str(tmp_path))
        else:
            trainer._load_rng_state(str(tmp_path))
        drawn.append(
            [
                random.random(),
                np.random.standard_normal(),
                np.random.randint(9),
                torch.rand(()).item(),
            ]
        )
    assert drawn[0] == drawn[1]


def test_a_checkpoint_of_an_earlier_version_is_resumed(folder: str, tmp_path: Path) -> None:
    (whole,) = resumed(folder, [(str(tmp_path / "one"), None, {})])
    checkpoint = tmp_path / "one" / "checkpoint-2"
    options = {"max_steps": 5, "save_strategy": "no", "per_device_train_batch_size": 4}
    trainer = ResumableTrainer(
        model=load_whole(folder),
        args=TrainingArguments(**arguments(str(tmp_path / "again"), **options)),
        train_dataset=Sequences(),
    )
    trainer.create_optimizer_and_scheduler(5)
    trainer._load_optimizer_and_scheduler(str(checkpoint))
    schedule = trainer.lr_scheduler.state_dict()
    shutil.rmtree(checkpoint / "optimizer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_optimizer_distributed(trainer.model, trainer.optimizer, str(checkpoint / "optimizer"))
    (checkpoint / "scheduler.json").unlink()
    (checkpoint / COMPLETE).unlink()
    torch.save(schedule, checkpoint / "scheduler.pt")
    (losses,) = resumed(folder, [(str(tmp_path / "two"), str(checkpoint), {})])
    close(losses, whole)


def test_what_an_optimizer_lacks_or_what_is_damaged_is_refused_in_one_line(
    folder: str, tmp_path: Path
) -> None:
    resumed(folder, [(str(tmp_path / "one"), None, {})])
    checkpoint = tmp_path / "one" / "checkpoint-2"

    def refusal() -> str:
        """Let the checksums be right, as those of a checkpoint that was written so."""
        files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != COMPLETE]
        seal(
            checkpoint, {path.relative_to(checkpoint).as_posix(): checksum(path) for path in files}
        )
        return refused(lambda: resumed(folder, [(str(tmp_path / "again"), str(checkpoint), {})]))

    listed = checkpoint / "optimizer" / "index.json"
    text = listed.read_text()
    listed.write_text(text.replace("lm_head", "head"))
    assert "optimizer: has no state.lm_head.weight." in refusal()
    listed.write_text("{")
    assert "index.json: is not the list of a checkpoint's tensors" in refusal()
    listed.unlink()
    assert "optimizer: its list of tensors cannot be read" in refusal()
    listed.write_text(text)
    (checkpoint / "scheduler.json").write_text('{"pickle": 1}')
    assert "scheduler.json: cannot be read, or is damaged" in refusal()


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


def test_a_damaged_checkpoint_is_refused_by_name_and_an_older_one_found(
    folder: str, tmp_path: Path
) -> None:
    options = arguments(
        str(tmp_path),
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=4,
    )

    def trainer() -> ResumableTrainer:
        return ResumableTrainer(
            model=load_whole(folder), args=TrainingArguments(**options), train_dataset=Sequences()
        )

    trainer().train()
    two = tmp_path / "checkpoint-2"
    four = tmp_path / "checkpoint-4"
    sums = json.loads((four / COMPLETE).read_text())["sha256"]
    assert {
        "model.safetensors",
        "scheduler.json",
        "trainer_state.json",
        "optimizer/index.json",
    } < sums.keys()
    data = bytearray((four / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (four / "model.safetensors").write_bytes(data)
    with pytest.raises(
        InputError,
        match=r"checkpoint-4: the checkpoint is damaged \(model\.safetensors does not match",
    ):
        trainer().train(resume_from_checkpoint=str(four))
    with pytest.warns(UserWarning, match="taking checkpoint-2 instead"):
        assert trainer()._newest() == str(two)
    (two / COMPLETE).unlink()
    with pytest.raises(
        InputError, match=r"damaged \(complete\.json is missing, so saving was not finished\)"
    ):
        trainer().train(resume_from_checkpoint=str(two))
    with pytest.raises(InputError, match="every checkpoint there is damaged"):
        trainer().train(resume_from_checkpoint=True)


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
