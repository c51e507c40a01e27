"""Variants of the block against the models that they imitate, as implemented in transformers; decoding with each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from moesaic.errors import InputError
from moesaic.models.attention import KeyValueCache, ShortConv
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT, EncoderDecoder, make_language_model, translate
from moesaic.shapes import BlockConfig

VOCAB, LENGTH = 40, 12
SHAPE: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "seq_len": LENGTH, "conv_width": 1}
GPT2 = BlockConfig(norm="layer", positions="learned", bias=True)
BERT = BlockConfig(kind="encoder", norm="post_layer", positions="learned", bias=True)
QWEN3 = BlockConfig(attention="plain:kv_heads=2:head_dim=12:qk_norm", tied=False, positions="rotary:500.0:2.0")
PAIRS = BlockConfig(
    kind="encoder_decoder", norm="post_layer", positions="learned", attention="plain:kv_heads=2", bias=True, tied=False
)


def build(block: BlockConfig, **changes: Any) -> GPT:
    moe = MoEConfig(num_experts=4, top_k=2, hidden=24, experts="swiglu" if block is QWEN3 else "gelu")
    model = make_language_model(ModelConfig(**SHAPE | {"block": block, "moe": moe} | changes), VOCAB)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, shape)


def copy(into: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    missing, unknown = into.load_state_dict(values, strict=False)
    assert not unknown
    assert all("cls.predictions.transform" in name or "token_type" in name or "tied" in name for name in missing), (
        missing
    )


@pytest.mark.parametrize(("width", "causal", "seen"), [(3, True, (-1, -2)), (4, False, (-1, 1, -2)), (2, False, (-1,))])
def test_a_short_convolution_mixes_the_positions_before_it_or_around_it(
    width: int, causal: bool, seen: tuple[int, ...]
) -> None:
    conv, x = ShortConv(3, width, causal=causal).double(), torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(conv(x), x)
    torch.nn.init.normal_(conv.taps)
    mask = torch.rand(2, 7) < 0.7
    for given in (None, mask):
        expected = x.clone()
        for batch in range(2):
            for at in range(7):
                for tap, offset in zip(conv.taps, seen):
                    if 0 <= at + offset < 7 and (given is None or given[batch, at + offset]):
                        expected[batch, at] += tap * x[batch, at + offset]
        torch.testing.assert_close(conv(x, mask=given), expected)


def test_padding_moves_nothing_in_an_encoder_with_convolutions() -> None:
    ours, tokens = build(BlockConfig(kind="encoder"), conv_width=4), ids(2, LENGTH)
    mask = torch.arange(LENGTH).expand(2, -1) < torch.tensor([[LENGTH], [7]])
    other = torch.where(mask, tokens, ids(2, LENGTH))
    torch.testing.assert_close(ours(tokens, mask=mask).logits[mask], ours(other, mask=mask).logits[mask])


def test_the_block_of_gpt2_is_that_of_gpt2() -> None:
    ours = build(GPT2, ffn="dense:48")
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, n_inner=48, activation_function="gelu"
        )
    )
    values = {"transformer.wte.weight": ours.embedding.weight, "transformer.wpe.weight": ours.positions.weight}
    values |= {"lm_head.weight": ours.embedding.weight}
    values |= {f"transformer.ln_f.{n}": p for n, p in ours.norm.named_parameters()}
    for i, block in enumerate(ours.blocks):
        at, attention, expert = f"transformer.h.{i}", block.attention, block.ffn.expert
        values |= {f"{at}.ln_1.{n}": p for n, p in block.attention_norm.named_parameters()}
        values |= {f"{at}.ln_2.{n}": p for n, p in block.ffn_norm.named_parameters()}
        values |= {f"{at}.attn.c_attn.weight": attention.qkv.weight.flatten(0, 1).T}
        values |= {f"{at}.attn.c_attn.bias": attention.qkv.bias.flatten()}
        values |= {f"{at}.attn.c_proj.weight": attention.out.weight.T, f"{at}.attn.c_proj.bias": attention.out.bias}
        values |= {f"{at}.mlp.c_fc.weight": expert.w1[0].T, f"{at}.mlp.c_fc.bias": expert.b1[0]}
        values |= {f"{at}.mlp.c_proj.weight": expert.w2[0].T, f"{at}.mlp.c_proj.bias": expert.b2[0]}
    copy(theirs, values)
    tokens = ids(2, LENGTH)
    torch.testing.assert_close(ours(tokens).logits, theirs.double().eval()(tokens).logits)


def test_the_block_of_bert_is_that_of_bert_and_padding_moves_nothing() -> None:
    ours = build(BERT, ffn="dense:48")
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=LENGTH, layer_norm_eps=1e-5,
    )  # fmt: skip
    theirs = transformers.BertModel(config, add_pooling_layer=False)
    values = {"embeddings.word_embeddings.weight": ours.embedding.weight}
    values |= {"embeddings.position_embeddings.weight": ours.positions.weight}
    values |= {f"embeddings.LayerNorm.{n}": p for n, p in ours.embedding_norm.named_parameters()}
    for i, block in enumerate(ours.blocks):
        at, attention, expert = f"encoder.layer.{i}", block.attention, block.ffn.expert
        for number, name in enumerate(("query", "key", "value")):
            values[f"{at}.attention.self.{name}.weight"] = attention.qkv.weight[number]
            values[f"{at}.attention.self.{name}.bias"] = attention.qkv.bias[number]
        values |= {f"{at}.attention.output.dense.{n}": p for n, p in attention.out.named_parameters()}
        values |= {f"{at}.attention.output.LayerNorm.{n}": p for n, p in block.attention_norm.named_parameters()}
        values |= {f"{at}.output.LayerNorm.{n}": p for n, p in block.ffn_norm.named_parameters()}
        values |= {f"{at}.intermediate.dense.weight": expert.w1[0], f"{at}.intermediate.dense.bias": expert.b1[0]}
        values |= {f"{at}.output.dense.weight": expert.w2[0], f"{at}.output.dense.bias": expert.b2[0]}
    copy(theirs, values)
    torch.nn.init.zeros_(theirs.embeddings.token_type_embeddings.weight)
    tokens, mask = ids(2, LENGTH), torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])
    hidden = theirs.double().eval()(tokens, attention_mask=mask.long()).last_hidden_state
    logits = ours(tokens, mask=mask).logits
    torch.testing.assert_close(logits[mask], (hidden @ ours.embedding.weight.T)[mask])


def test_the_modern_block_is_that_of_qwen3() -> None:
    ours = build(QWEN3, ffn="dense:48")
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        intermediate_size=48, rms_norm_eps=torch.finfo(torch.float64).eps, tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    )  # fmt: skip
    theirs = transformers.Qwen3ForCausalLM(config)
    values = {"model.embed_tokens.weight": ours.embedding.weight, "lm_head.weight": ours.unembedding.weight}
    values |= {"model.norm.weight": ours.norm.weight}
    for i, block in enumerate(ours.blocks):
        at, attention, expert = f"model.layers.{i}", block.attention, block.ffn.expert
        values |= {f"{at}.self_attn.q_proj.weight": attention.q.weight[0]}
        values |= {f"{at}.self_attn.{n}_proj.weight": attention.kv.weight[k] for k, n in enumerate("kv")}
        values |= {f"{at}.self_attn.o_proj.weight": attention.out.weight}
        values |= {f"{at}.self_attn.q_norm.weight": attention.q_norm.weight}
        values |= {f"{at}.self_attn.k_norm.weight": attention.k_norm.weight}
        values |= {f"{at}.input_layernorm.weight": block.attention_norm.weight}
        values |= {f"{at}.post_attention_layernorm.weight": block.ffn_norm.weight}
        values |= {f"{at}.mlp.gate_proj.weight": expert.w1[0], f"{at}.mlp.up_proj.weight": expert.w3[0]}
        values |= {f"{at}.mlp.down_proj.weight": expert.w2[0]}
    copy(theirs, values)
    tokens = ids(2, LENGTH)
    torch.testing.assert_close(ours(tokens).logits, theirs.double().eval()(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [GPT2, QWEN3], ids=["gpt2", "qwen3"])
def test_decoding_with_a_cache_equals_the_whole_forward(block: BlockConfig) -> None:
    model, tokens = build(block), ids(2, 9)
    caches = [KeyValueCache() for _ in model.blocks]
    parts = [model(part, caches=caches).logits for part in tokens.split([4, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).logits, rtol=1e-5, atol=1e-5)


def pair(source: list[int], target: list[int]) -> list[int]:
    half = LENGTH // 2
    return [*source, *[0] * (half - len(source)), 0, *target, *[0] * (half - 1 - len(target))]


def test_an_encoder_decoder_reads_all_of_the_source_and_none_of_what_follows() -> None:
    model = build(PAIRS)
    tokens = torch.tensor([pair([3, 4, 5, 6], [7, 8, 9]), pair([3, 4], [7])])
    logits = model(tokens).logits
    assert logits.shape == (2, LENGTH // 2, VOCAB)
    later = tokens.clone()
    later[:, 8] = 11
    changed = model(later).logits
    torch.testing.assert_close(changed[:, :2], logits[:, :2])
    assert not torch.allclose(changed[:, 2], logits[:, 2])
    read = tokens.clone()
    read[:, 1] = 11
    assert not torch.allclose(model(read).logits[:, 0], logits[:, 0])
    alone = model(tokens[1:]).logits
    torch.testing.assert_close(alone[0, :2], logits[1, :2])


def test_only_what_is_written_counts_and_each_pair_the_same() -> None:
    model = build(PAIRS)
    tokens = torch.tensor([pair([3, 4, 5, 6], [7, 8, 9]), pair([3, 4], [7])])
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), 5)], 1)
    output = model(tokens, targets)
    own = output.logits.log_softmax(-1)
    first = -sum(own[0, at, token] for at, token in enumerate([7, 8, 9, 0])) / 4
    second = -(own[1, 0, 7] + own[1, 1, 0]) / 2
    torch.testing.assert_close(output.loss, (first + second) / 2)
    assert [int(routing.num_valid) for routing in output.routings] == [6, 6]


def test_a_translation_is_the_likeliest_token_again_and_again() -> None:
    model, sources = build(PAIRS), [[3, 4, 5], [6]]
    assert isinstance(model, EncoderDecoder)
    for source, written in zip(sources, translate(model, sources)):
        expected: list[int] = []
        while len(expected) < LENGTH // 2 - 1:
            tokens = torch.tensor([pair(source, expected)[: LENGTH // 2 + 1 + len(expected)]])
            expected.append(int(model(tokens).logits[0, -1].argmax()))
            if expected[-1] == 0:
                break
        assert written == [token for token in expected if token]


def test_dropout_is_of_training_only() -> None:
    model, tokens = build(BlockConfig(dropout=0.5)), ids(1, 6)
    torch.testing.assert_close(model(tokens).logits, model(tokens).logits)
    model.train()
    assert not torch.allclose(model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"attention": "plain:kv_heads=3"},
            "model.block.attention=plain:kv_heads=3: kv_heads=3 does not divide model.num_heads=4",
        ),
        ({"attention": "plain:head_dim=5"}, "model.block.attention=plain:head_dim=5: head_dim=5: choose an even width"),
        ({"attention": "plain:head_dim=x"}, "kv_heads and head_dim must be numbers from 1"),
        ({"attention": "plain:qk_norm=1"}, "write plain, and behind it each once"),
        ({"attention": "plain:heads=1"}, "write plain, and behind it each once"),
        ({"attention": "plain:kv_heads=1:kv_heads=1"}, "write plain, and behind it each once"),
        ({"attention": "grouped"}, "write plain, and behind it each once"),
        *(
            ({"positions": bad}, f"model.block.positions='{bad}': write learned, or rotary")
            for bad in ("rotary:0", "rotary:1:nan", "rotary:1:1:1", "rotary:", "sine", "learned:1")
        ),
        ({"dropout": 1.0}, "model.block.dropout=1.0"),
    ],
)
def test_a_block_that_cannot_be_is_refused(block: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words.replace(".", r"\.")):
        ModelConfig(**SHAPE, block=BlockConfig(**block))
