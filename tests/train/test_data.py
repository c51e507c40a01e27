"""Finding, reading and splitting data, and the tokens of each micro-batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.train import data as data_module
from moesaic.train.config import DataConfig
from moesaic.train.data import (
    FEW_FILES,
    _cut,
    find_files,
    fingerprint,
    load_corpus,
    split_by_name,
    spread_blocks,
)
from moesaic.train.tokenizer import HubTokenizer
from runs import write_text, write_tokenizer


def data(*paths: Path | str, **options: object) -> DataConfig:
    return DataConfig(path=tuple(map(str, paths)), **options)


def tokens_file(path: Path, ids: list[int], dtype: str) -> Path:
    np.array(ids, dtype=np.dtype(dtype).newbyteorder("<")).tofile(path)
    return path


# Splitting


def test_adding_files_moves_no_file_across_the_split():
    root = Path("root")
    files = [root / f"part{i % 7}" / f"file{i}.txt" for i in range(400)]
    train, val = split_by_name(files[:200], 0.1, root)
    more_train, more_val = split_by_name(files, 0.1, root)
    assert sorted(train + val) == sorted(files[:200])
    assert set(train) <= set(more_train)
    assert set(val) <= set(more_val)
    assert 20 <= len(more_val) <= 65


def test_the_split_depends_on_names_below_the_root_only():
    files = [Path("one") / f"file{i}.txt" for i in range(100)]
    moved = [Path("two") / "deep" / f"file{i}.txt" for i in range(100)]
    val = split_by_name(files, 0.2, Path("one"))[1]
    assert val
    assert [p.name for p in val] == [p.name for p in split_by_name(moved, 0.2, Path("two/deep"))[1]]
    aside = [Path("a/b") / p.name for p in files], [Path("c/b") / p.name for p in files]
    one, two = (split_by_name(paths, 0.2, None)[1] for paths in aside)
    assert [p.name for p in one] == [p.name for p in two]


def test_many_files_are_split_by_file_and_few_by_position(tmp_path):
    for index in range(FEW_FILES + 20):
        (tmp_path / f"{index:03}.txt").write_text(f"<{index:03}>")
    corpus = load_corpus(data(tmp_path, val_share=0.3))
    train = bytes(corpus.train)
    val = bytes(corpus.val)
    assert sorted((train + b"\0" + val).split(b"\0")) == [
        b"<%03d>" % i for i in range(FEW_FILES + 20)
    ]
    assert val.count(b"<") > 2
    few = load_corpus(data(*[tmp_path / f"{i:03}.txt" for i in range(4)], val_share=0.25))
    assert bytes(few.train) == b"<000>\0<001>\0<002>"
    assert bytes(few.val) == b"\0<003>"


def test_an_empty_file_is_not_set_aside(tmp_path):
    files = [tmp_path / f"file{i}.txt" for i in range(40)]
    for path in files:
        path.write_text("text of " + path.name)
    emptied = split_by_name(files, 0.3, None)[1]
    for path in emptied[:-1]:
        path.write_text("")
    corpus = load_corpus(data(tmp_path, val_share=0.3))
    assert bytes(corpus.val) == b"text of " + emptied[-1].name.encode()
    emptied[-1].write_text("")
    corpus = load_corpus(data(tmp_path, val_share=0.3))
    assert len(corpus.val) > 0


def test_validation_files_of_ones_own(tmp_path):
    (tmp_path / "a.txt").write_text("training")
    (tmp_path / "b.txt").write_text("validation")
    corpus = load_corpus(data(tmp_path / "a.txt", val=(str(tmp_path / "b.txt"),)))
    assert (bytes(corpus.train), bytes(corpus.val)) == (b"training", b"validation")
    assert corpus.description == "2 files"


def test_one_file_is_set_aside_where_chance_takes_none():
    files = [Path("root") / f"file{i}.txt" for i in range(30)]
    train, val = split_by_name(files, 1e-9, Path("root"))
    assert len(val) == 1
    assert sorted(train + val) == sorted(files)
    assert split_by_name(files[:1], 1e-9, Path("root")) == (files[:1], [])


# Finding


def test_a_file_a_folder_and_a_glob_find_the_same(tmp_path):
    (tmp_path / "deep").mkdir()
    names = ["b.txt", "a.txt", "deep/c.txt"]
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / ".hidden").write_text("not this")
    below = tmp_path / ".cache" / "corpus"
    below.mkdir(parents=True)
    assert find_files((str(below.parent), str(write_text(below / "a.txt"))), "data.path") == [
        below / "a.txt"
    ]
    expected = sorted(tmp_path / name for name in names)
    assert find_files(tuple(str(tmp_path / name) for name in names), "data.path") == expected
    assert find_files((str(tmp_path),), "data.path") == expected
    assert find_files((str(tmp_path / "**" / "*.txt"),), "data.path") == expected
    assert find_files((str(tmp_path), str(tmp_path / "a.txt")), "data.path") == expected


def test_nothing_there_and_empty_files_are_errors(tmp_path):
    for pattern in ("absent.txt", "*.txt"):
        with pytest.raises(
            InputError,
            match=r"data.path: nothing at .*: give a text file, a folder, a glob or a .bin",
        ):
            find_files((str(tmp_path / pattern),), "data.path")
    assert "data.val: no text or .bin files in" in refused(
        lambda: find_files((str(tmp_path),), "data.val")
    )
    for name, given in (("a.txt", tmp_path / "a.txt"), ("b.txt", tmp_path)):
        (tmp_path / name).touch()
        with pytest.raises(InputError, match=r"a.txt .*is empty: give files with text"):
            load_corpus(data(given))


def test_kinds_do_not_mix(tmp_path):
    text = write_text(tmp_path / "a.txt")
    tokens = tokens_file(tmp_path / "b.bin", [1] * 50, "uint16")
    with pytest.raises(InputError, match=r"data.path: .bin files and text files are mixed"):
        load_corpus(data(text, tokens))
    for path, val_path in ((text, tokens), (tokens, text)):
        with pytest.raises(
            InputError, match=r"data.path and data.val: .bin files and text files are mixed"
        ):
            load_corpus(data(path, val=(str(val_path),)))


def test_text_as_bytes_leaves_the_rest_of_a_larger_vocabulary_unused(tmp_path):
    path = write_text(tmp_path / "a.txt")
    for vocab_size in (256, 50_257):
        corpus = load_corpus(data(path, vocab_size=vocab_size))
        assert corpus.vocab_size == vocab_size
        assert corpus.train.max() < 256
    with pytest.raises(
        InputError,
        match=r"data\.vocab_size=255: text has 256 tokens as bytes: set it to that or more",
    ):
        load_corpus(data(path, vocab_size=255))


# Tokens


@pytest.mark.parametrize("place", [0, 399, 800, 1599])
def test_ids_of_a_large_file_are_checked_in_blocks(tmp_path, monkeypatch, place):
    ids = [1] * 1600
    ids[place] = 999
    path = tokens_file(tmp_path / "a.bin", ids, "uint16")
    assert "holds token 999" in refused(lambda: load_corpus(data(path)))
    monkeypatch.setattr(data_module, "ID_CHECK_BLOCK_BYTES", 8)
    monkeypatch.setattr(data_module, "ID_CHECK_BLOCKS", 3)
    if place in (0, 800, 1599):  # of the first, middle and last block
        assert "holds token 999" in refused(lambda: load_corpus(data(path)))
    else:
        load_corpus(data(path))


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, []), (1, [0]), (10, [0, 4, 8]), (12, [0, 4, 8]), (13, [0, 4, 9]), (100, [0, 48, 96])],
)
def test_blocks_cover_all_or_are_spread(length, expected):
    assert spread_blocks(length, 4, 3) == expected


def test_the_fingerprint_of_tokens_sees_changes_and_lengths_and_of_many_tokens_some_blocks(
    monkeypatch,
):
    monkeypatch.setattr(data_module, "FINGERPRINT_BLOCKS", 3)
    monkeypatch.setattr(data_module, "FINGERPRINT_BLOCK_BYTES", 8)
    for dtype, size, seen in (
        (np.uint8, 20, {*range(20)}),
        (np.uint16, 12, {*range(12)}),
        (np.uint8, 100, {*range(8), *range(46, 54), *range(92, 100)}),
    ):
        tokens = np.arange(size, dtype=dtype)
        expected = fingerprint(tokens)
        assert fingerprint(tokens.copy()) == expected
        assert fingerprint(tokens[:-1]) != expected
        assert {
            n
            for n in range(size)
            if fingerprint(np.where(tokens == n, 0xFF, tokens).astype(dtype)) != expected
        } == seen
    assert fingerprint(np.empty(0, np.uint8)) != fingerprint(np.zeros(1, np.uint8))


@pytest.mark.parametrize(
    ("dtype", "largest"), [("uint8", 255), ("uint16", 65_535), ("uint32", 200_000)]
)
def test_bin_files_are_little_endian_integers(tmp_path, dtype, largest):
    ids = [*range(99), largest]
    path = tokens_file(tmp_path / "a.bin", ids, dtype)
    if dtype == "uint8":  # the others follow from the vocabulary
        path.with_suffix(".json").write_text('{"dtype": "uint8"}')
    corpus = load_corpus(data(path, vocab_size=largest + 1, val_share=0.1))
    assert corpus.train.tolist() == ids[:90]
    assert corpus.val.tolist() == ids[90:]
    assert isinstance(corpus.train, np.memmap)
    assert corpus.vocab_size == largest + 1
    assert corpus.val_bytes == 10
    for part in (
        str(path),
        f"holds token {largest}",
        f"data.vocab_size is {largest}",
        f"set it above {largest}",
    ):
        assert part in refused(lambda: load_corpus(data(path, vocab_size=largest)))


def test_several_bin_files_stand_in_a_row(tmp_path):
    paths = [
        tokens_file(tmp_path / f"{i}.bin", list(range(10 * i, 10 * i + 10)), "uint16")
        for i in range(3)
    ]
    corpus = load_corpus(data(*paths, val_share=0.5))
    assert [*corpus.train.tolist(), *corpus.val.tolist()] == list(range(30))
    corpus = load_corpus(data(*paths[:2], val=(str(paths[2]),)))
    assert corpus.train.tolist() == list(range(20))
    assert corpus.val.tolist() == list(range(20, 30))


@pytest.mark.parametrize("size", [0, 3, 101])
def test_a_bin_file_of_odd_size_is_an_error(tmp_path, size):
    path = tmp_path / "a.bin"
    path.write_bytes(b"\0" * size)
    with pytest.raises(
        InputError, match=f"has {size} bytes, not a whole number of uint16: check data.vocab_size"
    ):
        load_corpus(data(path))


def test_a_tokenizer_is_applied_and_bytes_are_counted(tmp_path):
    path = write_text(tmp_path / "a.txt")
    corpus = load_corpus(data(path, tokenizer=write_tokenizer(tmp_path / "tokenizer.json")))
    text = path.read_bytes()
    cut = int(len(text) * 0.95)
    assert isinstance(corpus.tokenizer, HubTokenizer)
    assert corpus.tokenizer.decode(corpus.train).encode() == text[:cut]
    assert corpus.tokenizer.decode(corpus.val).encode() == text[cut:]
    assert corpus.vocab_size == corpus.tokenizer.vocab_size
    assert corpus.val_bytes == len(text) - cut > len(corpus.val)
    again = load_corpus(
        data(path, tokenizer=str(tmp_path / "gone.json")), tmp_path / "tokenizer.json"
    )
    assert again.train.tolist() == corpus.train.tolist()


def test_documents_are_separated(tmp_path):
    (tmp_path / "a.txt").write_text("one two one two")
    (tmp_path / "b.txt").write_text("three")
    val = tuple(str(tmp_path / name) for name in ("a.txt", "b.txt"))
    corpus = load_corpus(data(tmp_path / "a.txt", val=val))
    assert bytes(corpus.val) == b"one two one two\0three"
    assert corpus.val_bytes == 21
    corpus = load_corpus(
        data(tmp_path / "a.txt", val=val, tokenizer=write_tokenizer(tmp_path / "tokenizer.json"))
    )
    assert corpus.val.tolist().count(0) == 1
    assert corpus.val_bytes == 21


def test_documents_of_one_file_are_separated_as_the_tokenizer_does(tmp_path):
    """No byte that stands for another tokenizer's separator gets into the text."""
    texts = [f"the quick brown fox {number}" for number in range(20)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = load_corpus(data(path, tokenizer=write_tokenizer(tmp_path / "tokenizer.json")))
    ids = [*corpus.train.tolist(), *corpus.val.tolist()]
    assert ids.count(corpus.tokenizer.separator) == len(texts) - 1
    assert "\0" not in corpus.tokenizer.decode(ids)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.97, 1.0])
def test_documents_as_bytes_are_cut_where_their_joined_text_is(share):
    documents = [b"one", b"", b"three", b"four"]
    before, after = _cut(documents, share)
    whole = b"\0".join(documents)
    cut = int(len(whole) * share)
    assert b"\0".join(before) == whole[:cut]
    assert b"\0".join(after) == whole[cut:]
