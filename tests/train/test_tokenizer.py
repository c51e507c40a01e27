"""Tokenizers: text to ids and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from moesaic.errors import InputError
from moesaic.train.config import DataConfig
from moesaic.train.tokenizer import AbstractTokenizer, BPETokenizer, ByteTokenizer, _byte_letters, saved_tokenizer

TEXT = "the quick brown fox — naïve 狐 🦊\n\tdef f(x): return x\n" * 20
BPE = BPETokenizer.train([TEXT.encode()], 290)


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


def bytes_of(ids: np.ndarray) -> bytes:
    """Return the bytes that ids of the BPE stand for, read off the vocabulary."""
    values = {letter: byte for byte, letter in enumerate(_byte_letters())}
    return bytes(values[letter] for i in ids for letter in BPE._tokenizer.id_to_token(int(i)))


@given(st.binary())
@example(b"caf\xe9 \xed\xa0\x80 \xff\xfe\0 \xe2\x82")
def test_any_bytes_are_kept_by_the_bpe(data: bytes):
    ids = BPE.encode(data)
    assert bytes_of(ids) == data
    assert BPE.separator not in ids


def test_the_name_of_the_separator_in_a_text_is_text(tmp_path):
    BPE.save(tmp_path / "tokenizer.json")
    for tokenizer in (BPE, BPETokenizer.load(tmp_path / "tokenizer.json")):
        ids = tokenizer.encode(b"the<|end|>quick <|end|>")
        assert tokenizer.separator not in ids
        assert tokenizer.decode(ids) == "the<|end|>quick <|end|>"
    trained = BPETokenizer.train([b"<|end|> the <|end|>" * 50], 300)
    assert trained.separator not in trained.encode(b"<|end|>")


def test_training_a_bpe_is_deterministic_and_shortens(tmp_path):
    again = BPETokenizer.train([TEXT.encode()], 290)
    one, two = BPE.encode(TEXT.encode()), again.encode(TEXT.encode())
    assert np.array_equal(one, two)
    assert len(one) < len(TEXT.encode()) / 1.5
    assert BPE.vocab_size == 290


def test_a_saved_bpe_comes_back(tmp_path):
    BPE.save(tmp_path / "tokenizer.json")
    loaded = BPETokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.vocab_size == BPE.vocab_size
    assert np.array_equal(loaded.encode(TEXT.encode()), BPE.encode(TEXT.encode()))


def test_a_missing_or_damaged_bpe_is_an_error(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match=r"tokenizer.json: the tokenizer is missing: restore it"):
        BPETokenizer.load(path)
    for content in (b'{"version": ', b"", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"tokenizer.json: the tokenizer is damaged"):
            BPETokenizer.load(path)


def test_somebody_elses_tokenizer_is_taken_as_it_is(tmp_path: Path):
    """WordPiece, whose vocabulary has no single bytes and which wraps a text in special tokens."""
    theirs = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words = tokenizers.trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    theirs.train_from_iterator([TEXT], words)
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = saved_tokenizer(DataConfig(tokenizer=str(tmp_path / "tokenizer.json")), None)
    assert ours is not None
    assert (ours.separator, ours.vocab_size) == (2, theirs.get_vocab_size())
    expected = theirs.encode("the quick fox", add_special_tokens=False).ids
    assert ours.encode(b"the quick fox").tolist() == expected
    assert ours.encode(b"the \xff fox").dtype == np.uint16
    assert ours.decode(expected) == theirs.decode(expected)


def test_a_tokenizer_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"no\.json: the tokenizer is missing"):
        saved_tokenizer(DataConfig(tokenizer=str(tmp_path / "no.json")), None)
