"""Experts become NF4 as a checkpoint is read: what a rank allocates at most, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

from allocated import Allocated
from lora_ranks import SIZES, load
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moesaic.errors import InputError
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


def test_what_cannot_be_in_nf4_is_refused(tmp_path):
    write(tmp_path, moe_intermediate_size=96, num_experts=4)
    with pytest.raises(InputError, match="down_proj of Qwen3MoeExperts reads 96 inputs, no multiple of 64"):
        load(str(tmp_path), four_bit=True)
