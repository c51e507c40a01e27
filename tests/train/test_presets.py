"""Presets: each can be built, and the two halves of the demo compare like with like."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moesaic.models.gpt import GPT
from moesaic.train.presets import PRESETS, demo, demo_dense, preset
from runs import run_quietly, write_text


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_a_model(name):
    config = PRESETS[name]()
    with torch.device("meta"):
        model = GPT(config.model, config.data.vocab_size)
    assert model.num_active_parameters() <= model.num_parameters()
    assert PRESETS[name]() == config


def test_runs_of_presets_do_not_share_a_folder():
    assert len({make().out for make in PRESETS.values()}) == len(PRESETS)


def test_the_demo_compares_equal_active_parameters_tokens_and_steps():
    sparse, dense = demo(), demo_dense()
    with torch.device("meta"):
        one, two = GPT(sparse.model, 256), GPT(dense.model, 256)
    router = sum(p.numel() for name, p in one.named_parameters() if ".router." in name)
    assert one.num_active_parameters() - router == two.num_parameters() == two.num_active_parameters()
    assert one.num_parameters() > 2 * two.num_parameters()
    assert replace(dense, out=sparse.out, model=sparse.model) == sparse


def test_gpt_small_has_the_size_it_says():
    config = PRESETS["gpt-small"]()
    with torch.device("meta"):
        model = GPT(config.model, 50_257)
    assert config.model.moe.num_experts == 8
    assert 90e6 < model.num_active_parameters() < 140e6


def test_gpt_tiny_trains(tmp_path):
    config = replace(
        preset("gpt-tiny"), out=str(tmp_path / "run"), steps=2, threads=1, tensorboard=False, precision="float32"
    )
    config = replace(config, device="cpu", data=replace(config.data, path=(str(write_text(tmp_path / "a.txt")),)))
    assert run_quietly(config)[0].step == 2
