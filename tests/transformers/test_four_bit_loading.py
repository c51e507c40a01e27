"""Experts become NF4 as a checkpoint is read: what a rank allocates at most, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

import peft
from allocated import Allocated
from lora_ranks import SIZES, load
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moesaic.errors import InputError
from moesaic.transformers import adopt_adapters
from worlds import on_ranks

EXPERTS = {"intermediate_size": 64, "moe_intermediate_size": 256, "num_experts": 16}


def write(folder: Path, **sizes: int) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 8}, **{**EXPERTS, **sizes})
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="5MB")


def peak(folder: str, ep: int) -> tuple[int, int]:
    """Return the most bytes that loading a model had at a time, and the bytes of its tensors on this rank."""
    if ep > 1:
        from moesaic_lab.hf import as_launched

        as_launched()
    with Allocated() as allocated:
        model = load(folder, four_bit=True, ep=ep)
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}.values()
    return allocated.most, sum(getattr(each, "_local_tensor", each).nbytes for each in tensors)


def test_a_rank_reads_its_own_experts_and_one_weight_at_a_time(tmp_path):
    write(tmp_path)
    largest_shard = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    model = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    weight = 16 * 2 * 256 * 64 * 2  # the largest weight of experts, in 16 bits
    assert largest_shard < model / 2
    alone = peak(str(tmp_path), 1)
    ranks = on_ranks(2, peak, str(tmp_path), 2)
    for (most, stays), own in zip([alone, *ranks], (weight, weight // 2, weight // 2)):
        assert stays < 0.4 * model
        assert most - stays <= 4 * own, "transformers collects, stacks and joins one weight"
        assert most - stays <= 1.2 * largest_shard
    assert all(stays < 0.65 * alone[1] for _, stays in ranks)


def adapted(folder: str, ep: int, low: bool = True) -> tuple[int, int, float]:
    """Return the most bytes that adapters took as they were made, those that stay on this rank, and a sum over them."""
    from moesaic_lab.hf import as_launched

    as_launched()
    config = peft.LoraConfig(
        r=8, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    with Allocated() as allocated:
        model = load(folder, four_bit=True, ep=ep)
        torch.manual_seed(0)
        before = allocated.most = allocated.now
        whole = peft.get_peft_model(model, config, low_cpu_mem_usage=low)
        adopt_adapters(whole)
    parts = [getattr(each, "_local_tensor", each) for each in whole.parameters() if each.requires_grad]
    of_experts = [part.detach().double().abs().sum().item() for part in parts if part.numel() > 8 * 64]
    return allocated.most - before, sum(part.nbytes for part in parts), sum(of_experts)


def test_a_rank_never_has_the_adapters_of_all_experts(tmp_path):
    write(tmp_path)
    ((alone, whole, norm),) = on_ranks(1, adapted, str(tmp_path), 1)
    assert alone < 1.05 * whole
    assert norm == on_ranks(1, adapted, str(tmp_path), 1, False)[0][2], "PEFT draws the same numbers"
    ranks = on_ranks(2, adapted, str(tmp_path), 2)
    of_a_weight = 16 * 8 * (2 * 256 + 64) * 4
    for most, stays, _ in ranks:
        assert stays < 0.6 * whole
        assert most <= stays + 1.5 * of_a_weight < 0.8 * whole
    assert sum(each for _, _, each in ranks) == pytest.approx(norm)


def test_what_cannot_be_in_nf4_is_refused(tmp_path):
    write(tmp_path, moe_intermediate_size=96, num_experts=4)
    with pytest.raises(InputError, match="down_proj of Qwen3MoeExperts reads 96 inputs, no multiple of 64"):
        load(str(tmp_path), four_bit=True)
