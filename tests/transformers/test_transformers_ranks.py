"""Expert parallelism of transformers by Moesaic's programs: real processes over Gloo against one process that loops.

Ranks compute in float32, the one process in float64. In float64 FSDP2 divides the gradients of experts without a second copy
twice, under transformers' own exchange as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='pip install "moesaic[transformers]"')

from ep_ranks import Case, batch, find_plan, gradients, lines, steps
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from worlds import on_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral; a tiny gpt-oss, and one whose router sends every token to the first two experts."""
    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES)).double().save_pretrained(path / "mixtral")
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_experts_per_tok=2, layer_types=["full_attention"] * 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(path / "gpt_oss")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                parameter.copy_(torch.tensor([50.0, 40.0, *[0.0] * 6]))
    model.save_pretrained(path / "skewed")
    return path


def check(world: int, cases: list[Case]) -> None:
    results = on_ranks(world, steps, cases)
    for number, case in enumerate(cases):
        one = AutoModelForCausalLM.from_pretrained(
            case.folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        ids = batch(world // case.tp)
        out = one(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        wanted = gradients(one)
        largest = max(float(each.abs().max()) for each in wanted.values())
        for rank in range(world):
            logits, found = results[rank][number]
            torch.testing.assert_close(logits[0], out.logits[rank // case.tp].float(), rtol=1e-5, atol=1e-5)
            assert found.keys() == wanted.keys()
            for name, gradient in found.items():
                scale = max(float(wanted[name].abs().max()), 0.02 * largest)
                worst = float((gradient - wanted[name]).abs().max()) / scale
                assert worst <= 1e-5, (case, rank, name, worst)


def test_two_ranks_equal_one(folder: Path) -> None:
    mixtral, gpt_oss, skewed = (str(folder / name) for name in ("mixtral", "gpt_oss", "skewed"))
    check(2, [
        Case(mixtral, ep=2),
        Case(gpt_oss, ep=2),
        Case(skewed, ep=2),  # the second rank gets no token
        Case(mixtral, ep=2, plan={"chunks": 2, "all_to_all": "multicast"}),
        Case(mixtral, ep=2, plan={"chunks": 2}, then={"all_to_all": "hier2d"}),
        Case(skewed, ep=2, plan={"replication": "least_loaded"}),
        Case(mixtral, ep=2, tp=2),
        Case(mixtral, ep=2, tp=2, plan={"schedule": "s2"}),
        Case(mixtral, ep=2, recompute=True),
    ])  # fmt: skip


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_more_ranks_equal_one(folder: Path, world: int) -> None:
    mixtral, gpt_oss, skewed = (str(folder / name) for name in ("mixtral", "gpt_oss", "skewed"))
    check(world, [
        Case(mixtral, ep=world),
        Case(gpt_oss, ep=world // 2),  # two copies of every expert
        Case(skewed, ep=world, plan={"chunks": 2}),
        Case(mixtral, ep=world, tp=2),
    ])  # fmt: skip


def test_the_plan_is_found_while_training(folder: Path) -> None:
    for found in on_ranks(2, find_plan, str(folder / "mixtral")):
        assert found["plans"] == {found["candidates"][-1]}
        assert len(found["candidates"]) >= 4
        assert len(found["said"]) == 1


def test_ranks_say_in_one_line_what_does_not_fit(folder: Path) -> None:
    for said in on_ranks(2, lines, str(folder / "mixtral")):
        different, instead, without, taken = said
        assert "plan.chunks differs: 2 on rank 1, 1 on rank 0" in different or "plan.chunks differs" in different
        assert "MixtralExperts has a gate" in instead
        assert "all_to_all" in instead
        assert 'load it with ep_implementation="moesaic"' in without
        assert "'all_to_all' is taken" in taken
