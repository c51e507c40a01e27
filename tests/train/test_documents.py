"""A training file is read by its suffix, or refused in one line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.train.config import DataConfig
from moesaic.train.data import find_files, load_corpus
from moesaic.train.documents import read_documents

ROWS = [
    {"text": "first, é", "id": 1},
    {"text": "second\nline", "id": 2},
    {"text": "", "id": 3},
    {"text": "last", "id": 4},
]
TEXTS = ["first, é".encode(), b"second\nline", b"last"]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def text(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    [LINES, LINES.rstrip("\n"), "\n" + LINES.replace("\n", "\n\n"), LINES.replace("\n", "\r\n")],
    ids=["lines", "no last newline", "blank lines", "windows"],
)
def test_json_lines_give_their_texts(tmp_path, content):
    assert read_documents(text(tmp_path / "a.jsonl", content), "text") == TEXTS


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.JSON"])
def test_the_suffix_counts_in_any_case(tmp_path, name):
    assert read_documents(text(tmp_path / name, LINES), "text") == TEXTS


def test_another_field_may_hold_the_text(tmp_path):
    path = text(tmp_path / "a.jsonl", LINES.replace('"text"', '"content"'))
    assert read_documents(path, "content") == TEXTS
    with pytest.raises(
        InputError, match=r"line 1 is no JSON object with a text under 'text'.*data\.text_field"
    ):
        read_documents(path, "text")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "plain words",
        "[1]",
        '{"id": 1}',
        '{"text": null}',
        '{"text": "a", "text": "b"}',
        '{"text": {"words": 1}}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    path = text(tmp_path / "a.jsonl", LINES + line)
    assert "line 5 is no JSON object with a text under 'text'" in refused(
        read_documents, path, "text"
    )


@pytest.mark.parametrize(
    "content", ["words and more words", LINES, "gar\xe7on ".encode("latin-1") * 10, "日本語" * 9]
)
def test_text_stays_as_it_is(tmp_path, content):
    for name in ("a.txt", "a.py", "a"):
        path = text(tmp_path / name, content)
        assert read_documents(path, "text") == [path.read_bytes()]


@pytest.mark.parametrize("place", [0, 9000])
def test_what_has_zero_bytes_is_no_text(tmp_path, place):
    path = text(tmp_path / "a.txt", b"x" * place + b"\0")
    for given in (path, tmp_path):
        refusal = refused(load_corpus, DataConfig(path=(str(given),)))
        assert "a.txt is not text, it has zero bytes: leave it out" in refusal


def test_documents_of_rows_are_separated_like_files(tmp_path):
    corpus = load_corpus(DataConfig(path=(str(text(tmp_path / "a.jsonl", LINES)),), val_share=0.2))
    assert bytes(corpus.train) + bytes(corpus.val) == b"\0".join(TEXTS)


def test_a_saved_dataset_is_its_table_and_splits_are_not_mixed(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {
        split: datasets.Dataset.from_dict({"text": ["one", split], "id": [1, 2]})
        for split in ("test", "train")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path))
    with pytest.raises(
        InputError,
        match=r"holds a dataset of several splits \(test, train\): name one, as .*train$",
    ):
        find_files((str(tmp_path),), "data.path")
    folder = tmp_path / "train"
    assert find_files((str(folder),), "data.path") == [folder]
    corpus = load_corpus(DataConfig(path=(str(folder),), val_share=0.3))
    assert bytes(corpus.train) + bytes(corpus.val) == b"one\0train"


def test_tables_are_read_by_their_column(tmp_path):
    datasets = pytest.importorskip("datasets")
    import pyarrow

    table = datasets.Dataset.from_dict({"text": ["one", None, "", "two"], "id": [1, 2, 3, 4]})
    table.to_parquet(str(tmp_path / "a.parquet"))
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.data.table.schema) as writer:
        writer.write_table(table.data.table)
    for name in ("a.parquet", "a.arrow"):
        path = tmp_path / name
        assert read_documents(path, "text") == [b"one", b"two"]
        for field in ("content", "id"):
            assert re.search(
                f"holds no table with a column of text '{field}'",
                refused(read_documents, path, field),
            )
        path.write_bytes(path.read_bytes()[:30])
        assert "holds no table with a column of text 'text'" in refused(
            read_documents, path, "text"
        )


def test_json_is_a_list_or_lines(tmp_path):
    for content, texts in (
        (LINES, TEXTS),
        ('\ufeff[{"text": "a"}, {"text": null}, {"text": "b"}]', [b"a", b"b"]),
    ):
        assert read_documents(text(tmp_path / "a.json", content), "text") == texts
    # pyarrow crashes on this
    assert "row 2 is no JSON object" in refused(
        read_documents, text(tmp_path / "a.json", '[{"text": "c"}, NaN]'), "text"
    )


@pytest.mark.parametrize("end", ["", "x", "]]"])
def test_a_list_that_does_not_parse_blames_no_row(tmp_path, end):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "abc"}, {"text": "def"}' + end)
    line = refused(read_documents, path, "text")
    assert "is no list of JSON (" in line
    assert "row" not in line


def test_without_the_library_tables_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = text(tmp_path / "a.parquet", b"rest")
    for given in (path, tmp_path):
        refusal = refused(load_corpus, DataConfig(path=(str(given),)))
        assert 'pip install ".[data]", or convert it to JSON lines' in refusal
