"""The encoder and the encoder-decoder against the models that they imitate, as implemented in
transformers; translation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from models.built import LENGTH, VOCAB, built, copy, ids
from moesaic.shapes import BlockConfig
from moesaic_lab.paper_train.models import CentredConv, Encoder, EncoderDecoder, translate

BERT = BlockConfig(kind="encoder", norm="post_layer", positions="learned", bias=True)
PAIRS = BlockConfig(
    kind="encoder_decoder",
    norm="post_layer",
    positions="learned",
    kv_heads=2,
    bias=True,
    tied=False,
)


def build(block: BlockConfig, **changes: Any) -> Encoder | EncoderDecoder:
    return built(Encoder if block.kind == "encoder" else EncoderDecoder, block, **changes)


@pytest.mark.parametrize(("width", "seen"), [(4, (-1, 1, -2)), (2, (-1,))])
def test_a_centred_convolution_mixes_the_positions_around_it(
    width: int, seen: tuple[int, ...]
) -> None:
    conv = CentredConv(3, width).double()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
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
    ours = build(BlockConfig(kind="encoder"), conv_width=4)
    tokens = ids(2, LENGTH)
    mask = torch.arange(LENGTH).expand(2, -1) < torch.tensor([[LENGTH], [7]])
    other = torch.where(mask, tokens, ids(2, LENGTH))
    torch.testing.assert_close(
        ours(tokens, mask=mask).logits[mask], ours(other, mask=mask).logits[mask]
    )


def test_the_block_of_bert_is_that_of_bert_and_padding_moves_nothing() -> None:
    ours = build(BERT, ffn="dense", dense_hidden=48)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
        layer_norm_eps=1e-5,
    )
    theirs = transformers.BertModel(config, add_pooling_layer=False)
    values = {"embeddings.word_embeddings.weight": ours.embedding.weight}
    values |= {"embeddings.position_embeddings.weight": ours.positions.weight}
    values |= {f"embeddings.LayerNorm.{n}": p for n, p in ours.embedding_norm.named_parameters()}
    for i, block in enumerate(ours.blocks):
        at = f"encoder.layer.{i}"
        attention = block.attention
        expert = block.ffn.expert
        for number, name in enumerate(("query", "key", "value")):
            values[f"{at}.attention.self.{name}.weight"] = attention.qkv.weight[number]
            values[f"{at}.attention.self.{name}.bias"] = attention.qkv.bias[number]
        values |= {
            f"{at}.attention.output.dense.{n}": p for n, p in attention.out.named_parameters()
        }
        values |= {
            f"{at}.attention.output.LayerNorm.{n}": p
            for n, p in block.attention_norm.named_parameters()
        }
        values |= {f"{at}.output.LayerNorm.{n}": p for n, p in block.ffn_norm.named_parameters()}
        values |= {
            f"{at}.intermediate.dense.weight": expert.w1[0],
            f"{at}.intermediate.dense.bias": expert.b1[0],
        }
        values |= {
            f"{at}.output.dense.weight": expert.w2[0],
            f"{at}.output.dense.bias": expert.b2[0],
        }
    copy(theirs, values, "cls.predictions.transform", "token_type")
    torch.nn.init.zeros_(theirs.embeddings.token_type_embeddings.weight)
    tokens = ids(2, LENGTH)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])
    hidden = theirs.double().eval()(tokens, attention_mask=mask.long()).last_hidden_state
    logits = ours(tokens, mask=mask).logits
    torch.testing.assert_close(logits[mask], (hidden @ ours.embedding.weight.T)[mask])


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
    model = build(PAIRS)
    sources = [[3, 4, 5], [6]]
    assert isinstance(model, EncoderDecoder)
    for source, written in zip(sources, translate(model, sources)):
        expected: list[int] = []
        while len(expected) < LENGTH // 2 - 1:
            tokens = torch.tensor([pair(source, expected)[: LENGTH // 2 + 1 + len(expected)]])
            expected.append(int(model(tokens).logits[0, -1].argmax()))
            if expected[-1] == 0:
                break
        assert written == [token for token in expected if token]
