"""Comparison with Megatron-Core: its own model computes equal logits from our checkpoint, and round
trips keep every bit.

Skipped unless Megatron-Core can be imported: `pip install --no-deps "megatron-core>=0.16"`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("megatron.core", reason="pip install --no-deps megatron-core")

from checkpoints import assert_bitwise, tensors_of
from megatron_ranks import read_and_write
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moesaic
from worlds import on_ranks


def test_megatron_reads_what_we_write_computes_the_same_and_we_read_what_it_writes(
    tmp_path: Path,
) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        intermediate_size=48,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "hub")
    moesaic.convert(tmp_path / "hub", tmp_path / "ours", to="megatron")
    ids = torch.randint(64, (1, 12))
    theirs = tmp_path / "theirs"
    (logits,) = on_ranks(
        1, read_and_write, config, str(tmp_path / "ours" / "release"), str(theirs), ids
    )
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()(ids).logits, rtol=1e-5, atol=1e-5)
    moesaic.convert(theirs, tmp_path / "back", to="hf", config=tmp_path / "hub" / "config.json")
    assert_bitwise(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hub"))
