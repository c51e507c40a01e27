"""Data: finding, splitting, reading, and which tokens each micro-batch holds."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import InputError
from moesaic.train.config import DataConfig
from moesaic.train.data import (
    FEW_FILES,
    Batches,
    as_batch,
    even_windows,
    find_files,
    load_corpus,
    split_by_name,
    standard_library,
)
from moesaic.train.tokenizer import BPETokenizer, ByteTokenizer
from runs import write_text


def data(*paths: Path | str, **options: object) -> DataConfig:
    return DataConfig(path=tuple(map(str, paths)), **options)


def tokens_file(path: Path, ids: list[int], dtype: str) -> Path:
    np.array(ids, dtype=np.dtype(dtype).newbyteorder("<")).tofile(path)
    return path


# The standard library


def test_the_standard_library_is_found_without_tests_and_packages():
    files, root = standard_library()
    assert root == Path(sysconfig.get_paths()["stdlib"])
    assert root / "argparse.py" in files
    assert files == sorted(files)
    parts = {part for path in files for part in path.relative_to(root).parts}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert {path.suffix for path in files} == {".py"}
    assert len(files) > 300
    assert standard_library() == (files, root)


def test_the_standard_library_is_the_default_corpus():
    corpus = load_corpus(DataConfig())
    again = load_corpus(DataConfig())
    assert np.array_equal(corpus.train, again.train)
    assert np.array_equal(corpus.val, again.val)
    assert corpus.vocab_size == 256
    assert isinstance(corpus.tokenizer, ByteTokenizer)
    assert 0.01 < len(corpus.val) / (len(corpus.val) + len(corpus.train)) < 0.15
    assert corpus.val_bytes == len(corpus.val)
    assert "files of " in corpus.description


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
    train, val = bytes(corpus.train), bytes(corpus.val)
    assert sorted((train + b"\0" + val).split(b"\0")) == [b"<%03d>" % i for i in range(FEW_FILES + 20)]
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
    corpus = load_corpus(data(tmp_path / "a.txt", val_path=(str(tmp_path / "b.txt"),)))
    assert (bytes(corpus.train), bytes(corpus.val)) == (b"training", b"validation")
    assert corpus.description == "2 files"


# Finding


def test_a_file_a_folder_and_a_glob_find_the_same(tmp_path):
    (tmp_path / "deep").mkdir()
    names = ["b.txt", "a.txt", "deep/c.txt"]
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / ".hidden").write_text("not this")
    expected = sorted(tmp_path / name for name in names)
    assert find_files(tuple(str(tmp_path / name) for name in names), "data.path") == expected
    assert find_files((str(tmp_path),), "data.path") == expected
    assert find_files((str(tmp_path / "**" / "*.txt"),), "data.path") == expected
    assert find_files((str(tmp_path), str(tmp_path / "a.txt")), "data.path") == expected


def test_a_folder_below_a_hidden_one_is_read(tmp_path):
    folder = tmp_path / ".cache" / "corpus"
    folder.mkdir(parents=True)
    write_text(folder / "a.txt")
    assert find_files((str(folder),), "data.path") == [folder / "a.txt"]


def test_nothing_there_is_an_error(tmp_path):
    for pattern in ("absent.txt", "*.txt"):
        with pytest.raises(InputError, match=r"data.path: nothing at .*: give a text file, a folder, a glob or a .bin"):
            find_files((str(tmp_path / pattern),), "data.path")
    with pytest.raises(InputError, match=r"data.val_path: no files in"):
        find_files((str(tmp_path),), "data.val_path")


def test_empty_files_are_an_error(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(InputError, match=r"a.txt is empty: give files with text"):
        load_corpus(data(tmp_path / "a.txt"))
    (tmp_path / "b.txt").touch()
    with pytest.raises(InputError, match=r"is empty"):
        load_corpus(data(tmp_path))


def test_kinds_do_not_mix(tmp_path):
    text, tokens = write_text(tmp_path / "a.txt"), tokens_file(tmp_path / "b.bin", [1] * 50, "uint16")
    with pytest.raises(InputError, match=r"data.path: .bin files and text files are mixed"):
        load_corpus(data(text, tokens))
    for path, val_path in ((text, tokens), (tokens, text)):
        with pytest.raises(InputError, match=r"data.path and data.val_path: .bin files and text files are mixed"):
            load_corpus(data(path, val_path=(str(val_path),)))


# Tokens


@pytest.mark.parametrize(("dtype", "largest"), [("uint8", 255), ("uint16", 65_535), ("uint32", 200_000)])
def test_bin_files_are_little_endian_integers(tmp_path, dtype, largest):
    ids = [*range(99), largest]
    path = tokens_file(tmp_path / "a.bin", ids, dtype)
    corpus = load_corpus(data(path, bin_dtype=dtype, vocab_size=largest + 1, val_share=0.1))
    assert corpus.train.tolist() == ids[:90]
    assert corpus.val.tolist() == ids[90:]
    assert isinstance(corpus.train, np.memmap)
    assert corpus.vocab_size == largest + 1
    assert corpus.val_bytes == 10
    with pytest.raises(InputError) as caught:
        load_corpus(data(path, bin_dtype=dtype, vocab_size=largest))
    for part in (str(path), f"holds token {largest}", f"data.vocab_size is {largest}", f"set it above {largest}"):
        assert part in str(caught.value)


def test_several_bin_files_stand_in_a_row(tmp_path):
    paths = [tokens_file(tmp_path / f"{i}.bin", list(range(10 * i, 10 * i + 10)), "uint16") for i in range(3)]
    corpus = load_corpus(data(*paths, val_share=0.5))
    assert [*corpus.train.tolist(), *corpus.val.tolist()] == list(range(30))
    corpus = load_corpus(data(*paths[:2], val_path=(str(paths[2]),)))
    assert corpus.train.tolist() == list(range(20))
    assert corpus.val.tolist() == list(range(20, 30))


@pytest.mark.parametrize("size", [0, 3, 101])
def test_a_bin_file_of_odd_size_is_an_error(tmp_path, size):
    path = tmp_path / "a.bin"
    path.write_bytes(b"\0" * size)
    with pytest.raises(InputError, match=f"has {size} bytes, not a whole number of uint16: check data.bin_dtype"):
        load_corpus(data(path))


def test_a_bpe_is_trained_on_the_training_text_and_counts_bytes(tmp_path):
    path = write_text(tmp_path / "a.txt")
    config = data(path, tokenizer="bpe", vocab_size=300)
    corpus = load_corpus(config)
    text = path.read_bytes()
    cut = int(len(text) * 0.95)
    assert isinstance(corpus.tokenizer, BPETokenizer)
    assert corpus.tokenizer.decode(corpus.train).encode() == text[:cut]
    assert corpus.tokenizer.decode(corpus.val).encode() == text[cut:]
    assert corpus.vocab_size == 300
    assert corpus.val_bytes == len(text) - cut > len(corpus.val)
    corpus.tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "b.txt").write_text("other text " * 50)
    again = load_corpus(data(tmp_path / "b.txt", tokenizer="bpe", vocab_size=400), tmp_path / "tokenizer.json")
    assert again.vocab_size == 300


def test_documents_are_separated(tmp_path):
    (tmp_path / "a.txt").write_text("one two one two")
    (tmp_path / "b.txt").write_text("three")
    val = tuple(str(tmp_path / name) for name in ("a.txt", "b.txt"))
    corpus = load_corpus(data(tmp_path / "a.txt", val_path=val))
    assert bytes(corpus.val) == b"one two one two\0three"
    assert corpus.val_bytes == 21
    corpus = load_corpus(data(tmp_path / "a.txt", val_path=val, tokenizer="bpe", vocab_size=300))
    assert corpus.val.tolist().count(0) == 1
    assert corpus.val_bytes == 21


# Batches


@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 60), st.integers(0, 3), st.integers(0, 2**63 - 1))
def test_every_epoch_holds_every_window_once(seq_len, batch_size, extra, epoch, seed):
    tokens = np.arange(seq_len + extra, dtype=np.uint16)
    windows = (len(tokens) - 1) // seq_len
    batches = Batches(tokens, seq_len, batch_size, seed)
    first, last = epoch * windows, (epoch + 1) * windows
    starts = {}
    for index in range(first // batch_size, (last - 1) // batch_size + 1):
        x, y = batches.get(index)
        assert x.shape == y.shape == (batch_size, seq_len)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1)
        starts |= {index * batch_size + row: int(x[row, 0]) for row in range(batch_size)}
    assert sorted(starts[place] for place in range(first, last)) == [w * seq_len for w in range(windows)]


def test_a_batch_is_a_function_of_seed_and_index():
    tokens = np.random.default_rng(0).integers(0, 256, 400).astype(np.uint8)
    one, two = Batches(tokens, 8, 3, 5), Batches(tokens, 8, 3, 5)
    expected = [one.get(index)[0] for index in range(40)]
    for index in (39, 0, 17, 16, 39):
        assert torch.equal(two.get(index)[0], expected[index])
    other = Batches(tokens, 8, 3, 6)
    assert not torch.equal(other.get(0)[0], expected[0])
    windows = (len(tokens) - 1) // 8
    epochs = [torch.cat(expected)[place : place + windows] for place in (0, windows)]
    assert not torch.equal(*epochs)


def test_batches_leave_the_global_generators_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Batches(np.arange(100, dtype=np.uint8), 8, 3, 5).get(9)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_too_short_data_is_an_error():
    Batches(np.zeros(9, dtype=np.uint8), 8, 1, 0)
    with pytest.raises(InputError, match=r"training data: 8 tokens are fewer than model.seq_len \+ 1 = 9: give more"):
        Batches(np.zeros(8, dtype=np.uint8), 8, 1, 0)
    with pytest.raises(InputError, match=r"validation data: 8 tokens are fewer than model.seq_len \+ 1 = 9: give more"):
        even_windows(np.zeros(8, dtype=np.uint8), 8, 1)


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [(81, 3, [0, 4, 9]), (81, 99, list(range(10))), (81, 1, [0]), (80, 2, [0, 8]), (9, 5, [0])],
)
def test_validation_windows_are_spread_evenly(tokens, count, expected):
    assert even_windows(np.zeros(tokens, dtype=np.uint8), 8, count) == expected


def test_targets_are_the_next_tokens():
    tokens = np.arange(30, dtype=np.uint32)
    x, y = as_batch(tokens, [2, 0], 5)
    assert x.tolist() == [[10, 11, 12, 13, 14], [0, 1, 2, 3, 4]]
    assert y.tolist() == [[11, 12, 13, 14, 15], [1, 2, 3, 4, 5]]
