"""Presets: each one builds, those of papers have the published sizes, and the demo compares models
of equal active size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers
from torch import nn

from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT
from moesaic.planner.cluster import read_cluster
from moesaic.planner.presets import CONFIGS, read_job
from moesaic.planner.presets import PRESETS as MODELS
from moesaic.train.config import EvaluateConfig
from moesaic.train.presets import PRESETS, demo, demo_dense
from moesaic_lab.paper_train.command import PRESETS as PAPER_PRESETS
from moesaic_lab.paper_train.command import paper_preset
from moesaic_lab.paper_train.models import Encoder, EncoderDecoder
from runs import run_quietly, write_text

ALL = PRESETS | PAPER_PRESETS


def built(config: ModelConfig, vocab_size: int) -> GPT:
    with torch.device("meta"):
        return {"decoder": GPT, "encoder": Encoder, "encoder_decoder": EncoderDecoder}[
            config.block.kind
        ](config, vocab_size)


def count(model: nn.Module, *parts: str) -> int:
    """Return the number of parameters with names that contain one of `parts`; of all parameters
    without `parts`."""
    return sum(
        p.numel()
        for name, p in model.named_parameters()
        if not parts or any(part in name for part in parts)
    )


def outside(model: nn.Module) -> int:
    """Return the number of parameters outside experts and routers."""
    return count(model) - count(model, ".ffn.experts.", ".router.")


@cache
def of_preset(name: str) -> GPT:
    config = ALL[name]()
    return built(config.model, config.data.vocab_size)


@pytest.mark.parametrize("name", ALL)
def test_every_preset_builds_a_model(name):
    model = of_preset(name)
    assert model.num_active_parameters() <= model.num_parameters()
    assert (model.config.block.kind == "decoder") == (name in PRESETS)


def test_every_model_that_is_planned_is_trained_and_runs_do_not_share_a_folder():
    assert {*MODELS, "demo-dense"} == {*ALL}
    assert len({make().out for make in ALL.values()}) == len(ALL)


PUBLISHED = {
    "gpt-s": "0.86",
    "gpt-base": "3.42",
    "gpt-l": "13.7",
    "bert-deep": "1.71",
    "bert-deep-l": "27.4",
    "bert-wide": "3.27",
    "bert-wide-l": "13.1",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fastermoes_models_have_the_published_billions_of_parameters_without_embeddings(name):
    model = of_preset(f"fastermoe-{name}")
    found = (count(model) - count(model, "embedding.weight", "positions.")) / 1e9
    assert f"{found:.{len(PUBLISHED[name].partition('.')[2])}f}" == PUBLISHED[name]


MI = 2**20


@pytest.mark.parametrize(
    ("name", "dense", "unit", "experts"),
    [
        ("transformer-moe", 90, 1e6, 403),
        ("bert-large-moe", 139, 1e6, 6442),
        ("ct-moe-24", 97, MI, 403),
        ("ct-moe-20", 89, MI, None),
        ("ct-moe-16", 81, MI, None),
        ("ct-moe-12", 73, MI, None),
        ("gpt2-tiny-moe", None, 1e6, 1),
    ],
)
def test_schemoes_models_have_the_published_parameters(name, dense, unit, experts):
    """GPT2-Tiny-MoE's dense size is not checked: its published 32 M need a vocabulary ten times
    GPT-2's at the printed width of 64."""
    model = of_preset(name)
    assert dense is None or round(outside(model) / unit) == dense
    assert experts is None or round(count(model, ".ffn.experts.") / 1e6) == experts


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("parm-gpt2", 124_439_808),
        ("netmoe-gpt-s", 124_439_808),
        ("netmoe-gpt-m", 354_823_168),
        ("netmoe-gpt-l", 774_030_080),
        ("netmoe-gpt-xl", 1_557_611_200),
    ],
)
def test_the_dense_twin_of_a_gpt2_is_gpt2(name, parameters):
    config = PRESETS[name]()
    dense = replace(config.model, ffn="dense", dense_hidden=config.model.moe.hidden)
    assert count(built(dense, config.data.vocab_size)) == parameters
    assert config.model.moe.hidden == 4 * config.model.dim


def test_the_dense_twin_of_parms_bert_is_bert_base_without_segments_and_pooler():
    config = ALL["parm-bert-base"]()
    dense = built(replace(config.model, ffn="dense", dense_hidden=3072), config.data.vocab_size)
    with torch.device("meta"):
        bert = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)
    assert count(dense) == count(bert) - count(bert, "token_type")
    norms = {module.eps for module in dense.modules() if isinstance(module, nn.LayerNorm)}
    assert norms == {bert.config.layer_norm_eps}


@pytest.mark.parametrize(
    ("start", "experts", "factor"),
    [
        ("parm-", {8}, 1.2),
        ("ct-moe-", {32}, 1.0),
        ("transformer-moe", {8}, 1.0),
        ("bert-large-moe", {32}, 1.0),
        ("gpt2-tiny-moe", {32}, 1.0),
        ("fastermoe-", {16, 64}, None),
        ("netmoe-", {32}, None),
    ],
)
def test_models_of_papers_have_their_experts_and_capacities(start, experts, factor):
    """FastMoE, on which FasterMoE and NetMoE run, drops nothing."""
    found = [make().model.moe for name, make in ALL.items() if name.startswith(start)]
    assert {moe.num_experts for moe in found} == experts
    assert {moe.capacity_factor if moe.capacity == "fixed" else None for moe in found} == {factor}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", "46.7", "12.9"),
        ("qwen3-30b-a3b", "30.5", "3.4"),
        ("olmoe-1b-7b", "6.9", "1.3"),
    ],
)
def test_models_of_the_hub_have_the_published_parameters(name, total, active):
    model = of_preset(name)
    assert (f"{count(model) / 1e9:.1f}", f"{model.num_active_parameters() / 1e9:.1f}") == (
        total,
        active,
    )


def test_the_modern_block_has_the_parameters_of_transformers():
    made = {
        "mixtral-8x7b": transformers.MixtralConfig(num_local_experts=8),
        "qwen3-30b-a3b": transformers.Qwen3MoeConfig(
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            vocab_size=151_936,
        ),
    }
    for name, config in made.items():
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(config)
        assert count(of_preset(name)) == count(theirs)


def test_deepseek_v3_is_planned_with_the_parameters_of_transformers():
    """Norms and the router's bias are not compared: planning leaves them out."""
    sizes = {
        name: value
        for name, value in CONFIGS["deepseek-v3"].items()
        if name not in ("model_type", "moe_layer_freq")
    }
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.DeepseekV3Config(**sizes)
        )
    planned, _ = read_job("deepseek-v3").parameters(read_cluster("dgx-h100"))
    assert planned == count(theirs) - count(theirs, "norm", "e_score_correction_bias")
    assert f"{planned / 1e9:.0f}" == "671"


def test_the_demo_compares_equal_active_parameters_tokens_and_steps():
    sparse = demo()
    dense = demo_dense()
    one = built(sparse.model, 256)
    two = built(dense.model, 256)
    assert (
        one.num_active_parameters() - count(one, ".router.")
        == two.num_parameters()
        == two.num_active_parameters()
    )
    assert one.num_parameters() > 2 * two.num_parameters()
    assert replace(dense, out=sparse.out, model=sparse.model) == sparse


def test_gpt_small_has_the_size_it_says():
    model = built(PRESETS["gpt-small"]().model, 50_257)
    assert 90e6 < model.num_active_parameters() < 140e6


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "seq2seq-tiny"])
def test_the_tiny_ones_train(tmp_path, name):
    config = replace(
        paper_preset(name),
        out=str(tmp_path / "run"),
        steps=2,
        threads=1,
        tensorboard=False,
        precision="float32",
    )
    config = replace(config, device="cpu", evaluate=EvaluateConfig(sequences=8))
    if name != "seq2seq-tiny":  # whose data are Django's
        config = replace(
            config, data=replace(config.data, path=(str(write_text(tmp_path / "a.txt")),))
        )
    assert run_quietly(config)[0].step == 2
