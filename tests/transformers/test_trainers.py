"""Trainers of other libraries on the backend: transformers' Trainer, TRL's SFT, PEFT's LoRA, a few
steps each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from ep_ranks import Sequences, arguments, clipped, lora, losses, supervised, train
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

import moesaic.transformers
from moesaic.errors import InputError
from moesaic.transformers.in_flight import halves
from moesaic_lab.hf import batch
from worlds import on_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Mixtral."""
    path = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES)).save_pretrained(path)
    return str(path)


def model_of(folder: str, implementation: str) -> Any:
    assert moesaic.transformers.experts_forward
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=implementation
    )


def losses_of_trainer(folder: str, implementation: str, out: Path) -> list[float]:
    given = TrainingArguments(**arguments(str(out), per_device_train_batch_size=4))
    return losses(
        Trainer(model=model_of(folder, implementation), args=given, train_dataset=Sequences())
    )


def test_the_trainer_learns_as_over_the_familys_own_loop(folder: str, tmp_path: Path) -> None:
    found, expected = (losses_of_trainer(folder, name, tmp_path) for name in ("moesaic", "eager"))
    assert len(expected) == 3
    assert expected[-1] < expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flies", [False, True])
def test_the_trainer_learns_alike_on_two_ranks(folder: str, tmp_path: Path, flies: bool) -> None:
    expected = losses_of_trainer(folder, "eager", tmp_path)
    for found in on_ranks(2, train, folder, str(tmp_path), flies):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_odd_micro_batch_has_no_halves() -> None:
    with pytest.raises(InputError, match="a micro-batch has 3 sequences: choose an even number"):
        halves({"input_ids": torch.zeros(3, 4)})


def test_the_trainer_clips_experts_on_two_ranks_like_all_else(folder: str, tmp_path: Path) -> None:
    model = model_of(folder, "eager")
    model(input_ids=batch(8)[:4], labels=batch(8)[:4]).loss.backward()
    norm = math.sqrt(
        sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None)
    )
    for found in on_ranks(2, clipped, folder, str(tmp_path)):
        assert found["norms"] == pytest.approx([norm, norm], rel=1e-4)
        assert any("experts" in name for name in found["whole"])
        assert 0.1 / norm < 0.9
        for name, gradient in found["whole"].items():
            torch.testing.assert_close(
                found["clipped"][name], gradient * (0.1 / norm), rtol=1e-4, atol=1e-7
            )


def test_lora_of_attention_beside_experts_on_two_ranks_needs_its_gradients_averaged(
    folder: str,
) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    alone = peft.get_peft_model(model_of(folder, "eager"), config)
    alone(input_ids=batch(2), labels=batch(2)).loss.backward()
    expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    (own, found), (others, also) = on_ranks(2, lora, folder)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        assert torch.equal(found[name], also[name])
    assert any(not torch.allclose(own[name], others[name], rtol=0.1) for name in own)


@pytest.mark.parametrize("experts_too", [False, True])
def test_lora_has_the_familys_own_gradients(folder: str, experts_too: bool) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    found = {}
    for name in ("moesaic", "eager"):
        torch.manual_seed(1)
        on_experts = (
            {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
            if experts_too
            else {}
        )
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **on_experts
        )
        model = peft.get_peft_model(model_of(folder, name), config)
        model(input_ids=batch(2), labels=batch(2)).loss.backward()
        found[name] = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert found["moesaic"].keys() == found["eager"].keys()
    assert any("experts" in key for key in found["eager"]) == experts_too
    for key, gradient in found["eager"].items():
        torch.testing.assert_close(found["moesaic"][key], gradient, rtol=1e-4, atol=1e-6)


def test_supervised_fine_tuning_runs_over_the_backend(folder: str, tmp_path: Path) -> None:
    ours, eager = supervised(
        (model_of(folder, name) for name in ("moesaic", "eager")), str(tmp_path)
    )
    assert len(eager) == 3
    assert all(map(math.isfinite, eager))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
