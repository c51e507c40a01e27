"""Variants of the block against the models that they imitate, as implemented in transformers;
decoding with each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from models.built import LENGTH, SHAPE, VOCAB, built, copy, ids
from moesaic.errors import InputError
from moesaic.models.attention import KeyValueCache, ShortConv
from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT
from moesaic.models.split import StackedLinear
from moesaic.shapes import BlockConfig

GPT2 = BlockConfig(norm="layer", positions="learned", bias=True)
QWEN3 = BlockConfig(
    kv_heads=2, head_dim=12, qk_norm=True, tied=False, rope_theta=500.0, rope_factor=2.0
)


def build(block: BlockConfig, **changes: Any) -> GPT:
    return built(GPT, block, "swiglu" if block is QWEN3 else "gelu", **changes)


@pytest.mark.parametrize(("width", "seen"), [(3, (-1, -2)), (2, (-1,))])
def test_a_short_convolution_mixes_the_positions_before_it(
    width: int, seen: tuple[int, ...]
) -> None:
    conv = ShortConv(3, width).double()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(conv(x), x)
    torch.nn.init.normal_(conv.taps)
    expected = x.clone()
    for at in range(7):
        for tap, offset in zip(conv.taps, seen):
            if at + offset >= 0:
                expected[:, at] += tap * x[:, at + offset]
    torch.testing.assert_close(conv(x), expected)


def test_a_stacked_linear_draws_as_one_linear() -> None:
    torch.manual_seed(3)
    layer = StackedLinear(3, 8, 8)
    torch.manual_seed(3)
    plain = torch.nn.Linear(8, 24, bias=False)
    assert torch.equal(layer.weight.flatten(0, 1), plain.weight)


def test_the_block_of_gpt2_is_that_of_gpt2() -> None:
    ours = build(GPT2, ffn="dense", dense_hidden=48)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_inner=48,
            activation_function="gelu",
        )
    )
    values = {
        "transformer.wte.weight": ours.embedding.weight,
        "transformer.wpe.weight": ours.positions.weight,
    }
    values |= {"lm_head.weight": ours.embedding.weight}
    values |= {f"transformer.ln_f.{n}": p for n, p in ours.norm.named_parameters()}
    for i, block in enumerate(ours.blocks):
        at = f"transformer.h.{i}"
        attention = block.attention
        expert = block.ffn.expert
        values |= {f"{at}.ln_1.{n}": p for n, p in block.attention_norm.named_parameters()}
        values |= {f"{at}.ln_2.{n}": p for n, p in block.ffn_norm.named_parameters()}
        values |= {f"{at}.attn.c_attn.weight": attention.qkv.weight.flatten(0, 1).T}
        values |= {f"{at}.attn.c_attn.bias": attention.qkv.bias.flatten()}
        values |= {
            f"{at}.attn.c_proj.weight": attention.out.weight.T,
            f"{at}.attn.c_proj.bias": attention.out.bias,
        }
        values |= {f"{at}.mlp.c_fc.weight": expert.w1[0].T, f"{at}.mlp.c_fc.bias": expert.b1[0]}
        values |= {f"{at}.mlp.c_proj.weight": expert.w2[0].T, f"{at}.mlp.c_proj.bias": expert.b2[0]}
    copy(theirs, values, "tied")
    tokens = ids(2, LENGTH)
    torch.testing.assert_close(ours(tokens).logits, theirs.double().eval()(tokens).logits)


def test_the_modern_block_is_that_of_qwen3() -> None:
    ours = build(QWEN3, ffn="dense", dense_hidden=48)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=48,
        rms_norm_eps=torch.finfo(torch.float64).eps,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    )
    theirs = transformers.Qwen3ForCausalLM(config)
    values = {
        "model.embed_tokens.weight": ours.embedding.weight,
        "lm_head.weight": ours.unembedding.weight,
    }
    values |= {"model.norm.weight": ours.norm.weight}
    for i, block in enumerate(ours.blocks):
        at = f"model.layers.{i}"
        attention = block.attention
        expert = block.ffn.expert
        values |= {f"{at}.self_attn.q_proj.weight": attention.q.weight[0]}
        values |= {
            f"{at}.self_attn.{n}_proj.weight": attention.kv.weight[k] for k, n in enumerate("kv")
        }
        values |= {f"{at}.self_attn.o_proj.weight": attention.out.weight}
        values |= {f"{at}.self_attn.q_norm.weight": attention.q_norm.weight}
        values |= {f"{at}.self_attn.k_norm.weight": attention.k_norm.weight}
        values |= {f"{at}.input_layernorm.weight": block.attention_norm.weight}
        values |= {f"{at}.post_attention_layernorm.weight": block.ffn_norm.weight}
        values |= {
            f"{at}.mlp.gate_proj.weight": expert.w1[0],
            f"{at}.mlp.up_proj.weight": expert.w3[0],
        }
        values |= {f"{at}.mlp.down_proj.weight": expert.w2[0]}
    copy(theirs, values, "tied")
    tokens = ids(2, LENGTH)
    torch.testing.assert_close(
        ours(tokens).logits, theirs.double().eval()(tokens).logits, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("block", [GPT2, QWEN3], ids=["gpt2", "qwen3"])
def test_decoding_with_a_cache_equals_the_whole_forward(block: BlockConfig) -> None:
    model = build(block)
    tokens = ids(2, 9)
    caches = [KeyValueCache() for _ in model.blocks]
    parts = [model(part, caches=caches).logits for part in tokens.split([4, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_dropout_is_of_training_only() -> None:
    model = build(BlockConfig(dropout=0.5))
    tokens = ids(1, 6)
    torch.testing.assert_close(model(tokens).logits, model(tokens).logits)
    model.train()
    assert not torch.allclose(model(tokens).logits, model(tokens).logits)


BAD_BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"kv_heads": 3}, "model.block.kv_heads=3 does not divide model.num_heads=4"),
    ({"kv_heads": 0}, "model.block.kv_heads=0: must be at least 1"),
    ({"head_dim": 5}, "model.block.head_dim=5: choose an even width"),
    *(
        ({name: value}, f"model.block.{name}={value}: must be above 0 and finite")
        for name in ("rope_theta", "rope_factor", "norm_eps")
        for value in (0.0, float("nan"))
    ),
    ({"dropout": 1.0}, "model.block.dropout=1.0"),
]


@pytest.mark.parametrize(("block", "words"), BAD_BLOCKS)
def test_a_block_that_cannot_be_is_refused(block: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words.replace(".", r"\.")):
        ModelConfig(**SHAPE, block=BlockConfig(**block))


def test_an_unknown_kind_of_feed_forward_layers_is_refused_in_python_too() -> None:
    with pytest.raises(InputError, match=r"^model\.ffn='dense:48' is unknown: choose moe or dense"):
        build(GPT2, ffn="dense:48")
