"""Preset models: small ones that `moesaic train --preset` trains in minutes, and models of papers
in their published sizes.

If a paper does not give a size, a comment says which one is used; docs/papers.md compares the
numbers of parameters with the published ones.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from moesaic.configfile import read_table
from moesaic.errors import InputError, suggestion
from moesaic.planner.hub import is_hub_config, read_shape
from moesaic.planner.job import DataShape, Job, job_of
from moesaic.shapes import BlockConfig, ModelShape, MoEShape

GPT2 = BlockConfig(norm="layer", positions="learned", bias=True)
"""GPT-2's block, without its dropout of 0.1, which training on large corpora does not need."""
BERT = BlockConfig(
    kind="encoder", norm="post_layer", norm_eps=1e-12, positions="learned", bias=True
)
"""BERT's block; the model has neither segments nor a pooler, and no layer in front of the output
matrix."""
TRANSFORMER = BlockConfig(
    kind="encoder_decoder", norm="post_layer", positions="learned", tied=False
)
"""The first Transformer's block; positions are learned as in its ablation."""
MODERN = BlockConfig()
GPT2_VOCAB = 50_257
BERT_VOCAB = 30_522


def _job(
    dim: int,
    num_layers: int,
    num_heads: int,
    seq_len: int,
    vocab: int,
    moe: MoEShape,
    block: BlockConfig,
    batch_size: int = 16,
    conv_width: int = 1,
    accumulation: int = 1,
) -> Job:
    """Return a training job; models of width 768 and more recompute their blocks."""
    shape = ModelShape(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        seq_len=seq_len,
        block=block,
        moe=moe,
        conv_width=conv_width,
        checkpoint_activations=dim >= 768,
    )
    return Job(
        batch_size=batch_size,
        accumulation=accumulation,
        model=shape,
        data=DataShape(vocab_size=vocab),
    )


def _plain(
    num_experts: int, top_k: int, hidden: int, shared_hidden: int = 0, factor: float | None = None
) -> MoEShape:
    """Return MoE layers whose experts have two matrices, with a capacity factor; None: dropless."""
    gated = _gated(num_experts, top_k, hidden, shared_hidden)
    plain = replace(gated, experts="gelu")
    if factor is None:
        return plain
    return replace(plain, capacity="fixed", capacity_factor=factor)


def _gated(num_experts: int, top_k: int, hidden: int, shared_hidden: int = 0) -> MoEShape:
    """Return dropless MoE layers of gated experts; with one expert a token, as Switch routes."""
    return MoEShape(
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        shared_hidden=shared_hidden,
        router="switch" if top_k == 1 else "softmax",
    )


def _ours() -> dict[str, Job]:
    """Return small models that train in seconds or minutes, and one for a GPU."""
    return {
        "demo": _job(
            dim=128,
            num_layers=4,
            num_heads=4,
            seq_len=256,
            vocab=256,
            moe=_gated(num_experts=64, top_k=2, hidden=64),
            block=MODERN,
            conv_width=4,
            batch_size=8,
        ),
        "gpt-tiny": _job(
            dim=32,
            num_layers=2,
            num_heads=2,
            seq_len=64,
            vocab=256,
            moe=_gated(num_experts=4, top_k=2, hidden=32),
            block=MODERN,
            conv_width=4,
            batch_size=4,
        ),
        # with more blocks or longer sequences attention learns to copy, without the experts
        "bert-tiny": _job(
            dim=32,
            num_layers=1,
            num_heads=4,
            seq_len=16,
            vocab=256,
            moe=_gated(num_experts=16, top_k=1, hidden=16, shared_hidden=16),
            block=BlockConfig(kind="encoder"),
            conv_width=8,
            batch_size=128,
        ),
        "seq2seq-tiny": _job(
            dim=32,
            num_layers=2,
            num_heads=4,
            seq_len=32,
            vocab=1024,
            moe=_gated(num_experts=16, top_k=1, hidden=16, shared_hidden=16),
            block=BlockConfig(kind="encoder_decoder"),
            conv_width=4,
            batch_size=64,
        ),
        "gpt-small": _job(
            dim=768,
            num_layers=12,
            num_heads=12,
            seq_len=1024,
            vocab=16_384,
            moe=_gated(num_experts=8, top_k=2, hidden=1024),
            block=MODERN,
            conv_width=4,
            accumulation=4,
        ),
    }


def _parm() -> dict[str, Job]:
    """Return the jobs of the Parm paper by name."""
    jobs = {}
    # Parm: top_k is not given in the paper; the experts are as many as on its testbed B (2 on A),
    # and the capacity factor is the smaller of its sweep's two.
    for name, seq_len, vocab, block in (
        ("parm-bert-base", 512, BERT_VOCAB, BERT),
        ("parm-gpt2", 1024, GPT2_VOCAB, GPT2),
    ):
        jobs[name] = _job(
            dim=768,
            num_layers=12,
            num_heads=12,
            seq_len=seq_len,
            vocab=vocab,
            moe=_plain(num_experts=8, top_k=2, hidden=3072, factor=1.2),
            block=block,
        )
    return jobs


def _schemoe() -> dict[str, Job]:
    """Return the jobs of the ScheMoE paper by name."""
    jobs = {
        # ScheMoE: vocabularies are not given; these reproduce its numbers of parameters (Megatron
        # pads GPT-2's to 51,200).
        "transformer-moe": _job(
            dim=512,
            num_layers=24,
            num_heads=8,
            seq_len=256,
            vocab=51_200,
            moe=_plain(num_experts=8, top_k=1, hidden=2048, factor=1.0),
            block=TRANSFORMER,
        ),
        "gpt2-tiny-moe": _job(
            dim=64,
            num_layers=4,
            num_heads=4,
            seq_len=256,
            vocab=GPT2_VOCAB,
            moe=_plain(num_experts=32, top_k=2, hidden=64, factor=1.0),
            block=GPT2,
            batch_size=4,
        ),
        "bert-large-moe": _job(
            dim=1024,
            num_layers=24,
            num_heads=16,
            seq_len=512,
            vocab=37_000,
            moe=_plain(num_experts=32, top_k=1, hidden=4096, factor=1.0),
            block=BERT,
        ),
    }
    for layers in (12, 16, 20, 24):
        # The paper's counts grow by 8 D^2 per layer: the mean attention of an encoder and a
        # decoder, plus one dense layer.
        moe = _plain(num_experts=32, top_k=1, hidden=512, shared_hidden=512, factor=1.0)
        jobs[f"ct-moe-{layers}"] = _job(
            dim=512,
            num_layers=layers,
            num_heads=8,
            seq_len=62,
            vocab=GPT2_VOCAB,
            moe=moe,
            block=TRANSFORMER,
            batch_size=136,
        )
    return jobs


def _fastermoe() -> dict[str, Job]:
    """Return the jobs of the FasterMoE paper by name."""
    jobs = {}
    for name, layers, experts, dim, block in (
        ("gpt-s", 12, 16, 1024, GPT2),
        ("gpt-base", 12, 16, 2048, GPT2),
        ("gpt-l", 12, 16, 4096, GPT2),
        ("bert-deep", 24, 16, 1024, BERT),
        ("bert-deep-l", 24, 16, 4096, BERT),
        ("bert-wide", 12, 64, 1024, BERT),
        ("bert-wide-l", 12, 64, 2048, BERT),
    ):
        is_gpt = block is GPT2
        jobs[f"fastermoe-{name}"] = _job(
            dim=dim,
            num_layers=layers,
            num_heads=dim // 64,
            seq_len=1024 if is_gpt else 512,
            vocab=GPT2_VOCAB if is_gpt else BERT_VOCAB,
            moe=_plain(num_experts=experts, top_k=2, hidden=2 * dim),
            block=block,
        )
    return jobs


def _netmoe() -> dict[str, Job]:
    """Return the jobs of the NetMoE paper by name."""
    jobs = {}
    # NetMoE: GPT-2's depths; 32 experts, the paper's number on 16 devices; the largest model has
    # GPT-3's depth at this width.
    for name, layers, heads, dim in (
        ("s", 12, 12, 768),
        ("m", 24, 16, 1024),
        ("l", 36, 20, 1280),
        ("xl", 48, 25, 1600),
        ("xxl", 32, 32, 4096),
    ):
        jobs[f"netmoe-gpt-{name}"] = _job(
            dim=dim,
            num_layers=layers,
            num_heads=heads,
            seq_len=1024,
            vocab=GPT2_VOCAB,
            moe=_plain(num_experts=32, top_k=2, hidden=4 * dim),
            block=GPT2,
        )
    return jobs


CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "sliding_window": None,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "experts_per_token": 4,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
    },
}
"""The `config.json` of Hugging Face models that are planned by name. Their batch fits the cluster;
that of `moesaic train --preset` is small. Models that are not in `PRESETS` train in transformers
with our layer, since our block lacks latent attention (DeepSeek-V3) and attention sinks
(gpt-oss)."""


def _hub() -> dict[str, Job]:
    """Return Hugging Face models that our block can build; others train in transformers with our
    layer."""
    blocks = {
        "mixtral-8x7b": BlockConfig(kv_heads=8, tied=False, rope_theta=1e6),
        "olmoe-1b-7b": BlockConfig(qk_norm=True, tied=False),
        "qwen3-30b-a3b": BlockConfig(
            kv_heads=4, head_dim=128, qk_norm=True, tied=False, rope_theta=1e6
        ),
    }
    jobs = {}
    for name, block in blocks.items():
        shape = read_shape(CONFIGS[name], name, seq_len=4096)
        jobs[name] = _job(
            dim=shape.dim,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            seq_len=shape.seq_len,
            vocab=shape.vocab,
            moe=shape.moe,
            block=block,
        )
    return jobs


PRESETS: dict[str, Job] = {
    **_ours(),
    **_parm(),
    **_schemoe(),
    **_fastermoe(),
    **_netmoe(),
    **_hub(),
}
"""The sparse models of `moesaic train --preset`, by name."""
TOKENS = 1 << 22
"""Approximate number of tokens per optimizer step of a Hugging Face model."""


def read_job(name: str, *, seq_len: int = 4096, world: int = 1) -> Job:
    """Return the job of a preset or a file.

    Args:
        name: a preset, the path of a training configuration (TOML, or the JSON of a run folder), or
            the path of the `config.json` of a Hugging Face model, or of its folder. Fields that
            change neither time nor memory are ignored. A Hugging Face model has the default
            precision, one sequence per rank and micro-batch, and about `TOKENS` tokens per step.
        seq_len: tokens per sequence; for Hugging Face models only.
        world: number of ranks; for Hugging Face models only.

    Raises:
        InputError: if the preset is unknown, the file does not parse or has no known field, a field
            is misspelt, or a value is invalid.
    """
    if name in PRESETS and name not in CONFIGS:
        return PRESETS[name]
    table = CONFIGS[name] if name in CONFIGS else read_table(_model_file(name), "model")
    if is_hub_config(table):
        shape = read_shape(table, f"model {name}", seq_len=seq_len)
        micro_batches = max(1, round(TOKENS / (world * seq_len)))
        return Job(
            batch_size=world,
            accumulation=micro_batches,
            model=shape,
            data=DataShape(vocab_size=shape.vocab),
        )
    known_fields = [each.name for each in fields(Job)]
    job = job_of(table, f"model {name}")
    if not any(field in known_fields for field in table):
        raise InputError(
            f"model {name}: planning reads the fields {', '.join(known_fields)}, and the file has "
            "none of them: write the sizes as [model] and [model.moe], as a run folder's "
            "config.json has them, or give a config.json of the Hugging Face hub"
        )
    return job


def _model_file(name: str) -> Path:
    """Return the file of a model that is no preset: its path, or the config.json of a folder."""
    path = Path(name)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        raise InputError(f"model {name}: the folder has no config.json: give a model's folder")
    if name.endswith((".toml", ".json")):
        return path
    known_names = list(PRESETS | CONFIGS)
    raise InputError(
        f"model {name!r} is unknown{suggestion(name, known_names)} (or give a path to .toml or "
        ".json, or a folder with a config.json)"
    )
