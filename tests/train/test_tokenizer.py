"""Tokenizers: text to ids and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from helpers import refused
from moesaic.errors import InputError
from moesaic.train.config import DataConfig
from moesaic.train.tokenizer import AbstractTokenizer, ByteTokenizer, HubTokenizer, make_tokenizer
from runs import train_tokenizer

TEXT = "the quick brown fox — naïve 狐 🦊\n\tdef f(x): return x\n" * 20
BPE = HubTokenizer(train_tokenizer(TEXT, 290))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("text", [TEXT, "never seen: Ω≈ç√", "", " \n\n ", "a\r\nb"])
def test_decoding_undoes_encoding(tokenizer: AbstractTokenizer, text: str):
    ids = tokenizer.encode(text.encode())
    assert ids.dtype.kind == "u"
    assert ids.size == 0 or ids.max() < tokenizer.vocab_size
    assert tokenizer.separator not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_text_round_trips_through_the_bpe(text: str):
    assert BPE.decode(BPE.encode(text.encode())) == text


@given(st.binary())
def test_any_bytes_are_their_own_ids(data: bytes):
    ids = ByteTokenizer().encode(data)
    assert ids.tolist() == list(data)
    assert ByteTokenizer().decode(ids) == data.decode("utf-8", errors="replace")


def test_the_name_of_the_separator_in_a_text_is_text(tmp_path):
    (tmp_path / "tokenizer.json").write_text(BPE.text, encoding="utf-8")
    for tokenizer in (BPE, HubTokenizer.load(tmp_path / "tokenizer.json")):
        assert tokenizer.vocab_size == 290
        assert tokenizer.separator == tokenizer._tokenizer.token_to_id("<|endoftext|>")
        ids = tokenizer.encode(b"the<|endoftext|>quick <|endoftext|>")
        assert tokenizer.separator not in ids
        assert tokenizer.decode(ids) == "the<|endoftext|>quick <|endoftext|>"


def test_a_missing_or_damaged_tokenizer_is_an_error(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match=r"tokenizer.json: the tokenizer is missing: restore it"):
        make_tokenizer(DataConfig(tokenizer=str(path)), None)
    for content in (b'{"version": ', b"", b"\xff\xfe"):
        path.write_bytes(content)
        assert "tokenizer.json: the tokenizer is damaged" in refused(HubTokenizer.load, path)


def test_somebody_elses_tokenizer_is_taken_as_it_is(tmp_path: Path):
    """WordPiece, whose vocabulary has no single bytes and which wraps a text in special tokens."""
    theirs = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words = tokenizers.trainers.WordPieceTrainer(
        vocab_size=80, special_tokens=["[UNK]", "[CLS]", "[SEP]"]
    )
    theirs.train_from_iterator([TEXT], words)
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = make_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokenizer.json")), None)
    assert (ours.separator, ours.vocab_size) == (2, theirs.get_vocab_size())
    expected = theirs.encode("the quick fox", add_special_tokens=False).ids
    assert ours.encode(b"the quick fox").tolist() == expected
    assert ours.encode(b"the \xff fox").dtype == np.uint16
    assert ours.decode(expected) == theirs.decode(expected)
