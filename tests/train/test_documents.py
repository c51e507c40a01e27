"""A training file's format is detected by its content, whatever its name, and the file is read or refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moesaic.errors import InputError
from moesaic.train.config import DataConfig
from moesaic.train.data import find_files, load_corpus
from moesaic.train.documents import read_documents
from runs import run_quietly, tiny

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


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.json", "a"])
@pytest.mark.parametrize(
    "content",
    [
        LINES,
        LINES.rstrip("\n"),
        "\n" + LINES.replace("\n", "\n\n"),
        LINES.replace("\n", "\r\n"),
        "\ufeff" + LINES,
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        json.dumps(ROWS, ensure_ascii=False),
    ],
    ids=["lines", "no last newline", "blank lines", "windows", "byte order mark", "array", "indented array", "utf-8"],
)
def test_json_of_rows_gives_their_texts(tmp_path, name, content):
    assert read_documents(text(tmp_path / name, content), "text") == TEXTS


def test_another_field_may_hold_the_text(tmp_path):
    path = text(tmp_path / "a.jsonl", LINES.replace('"text"', '"content"'))
    assert read_documents(path, "content") == TEXTS
    with pytest.raises(InputError, match=r"line 1 has no text under 'text' \(it has content, id\).*data\.text_field"):
        read_documents(path, "text")
    assert read_documents(path, "") == [path.read_bytes()]
    with pytest.raises(InputError, match=r"in line 1 'id' is 1, not text: correct it"):
        read_documents(text(tmp_path / "b.jsonl", LINES), "id")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 5 is not JSON"),
        ("plain words", "line 5 is not JSON"),
        ("[1]", "line 5 has no text under 'text' (it has list)"),
        ('{"id": 1}', "line 5 has no text under 'text' (it has id)"),
        ('{"text": null}', "in line 5 'text' is null, not text"),
        ('{"text": {"words": 1}}', "in line 5 'text' is {\"words\": 1}, not text"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, reason):
    with pytest.raises(InputError) as caught:
        read_documents(text(tmp_path / "a.jsonl", LINES + line), "text")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_single_row_whose_text_is_null_is_no_text_of_its_own(tmp_path):
    with pytest.raises(InputError, match="in line 1 'text' is null, not text"):
        read_documents(text(tmp_path / "a.jsonl", '{"text": null}'), "text")


PLAIN = {
    "words": "words and more words",
    "python": "{}\n".join(["import json\n", "x = "]),
    "markdown": "# A page\n\n[1]: https://example.org\n",
    "a list of links": "[a](b)\n",
    "one JSON object": '{"name": "x", "version": 1}\n',
    "indented JSON": json.dumps({"name": "x", "text": ["y"]}, indent=2),
    "an array of numbers": "[1, 2, 3]",
    "objects without the field": '[{"a": 1}, {"a": 2}]',
    "latin-1": "gar\xe7on ".encode("latin-1") * 10,
    "colours of a terminal": b"\x1b[31mred\x1b[0m and plain\x08 text",
    "a form feed": b"page\x0cpage",
    "utf-8": "日本語のテキスト" * 9,
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_text_stays_as_it_is(tmp_path, kind):
    path = text(tmp_path / "a", PLAIN[kind])
    assert read_documents(path, "text") == [path.read_bytes()]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["a.gz", "a.txt"])
def test_compressed_text_is_read_through(tmp_path, compress, name):
    assert read_documents(text(tmp_path / name, compress(LINES.encode())), "text") == TEXTS
    assert read_documents(text(tmp_path / name, compress(b"plain")), "text") == [b"plain"]
    with pytest.raises(InputError, match="is damaged"):
        read_documents(text(tmp_path / name, compress(LINES.encode() * 9)[:-9]), "text")
    with pytest.raises(InputError, match="not text but binary"):
        read_documents(text(tmp_path / name, compress(b"\0" * 99)), "text")


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "words")


FOREIGN = {
    "zip": (zipped, "a zip archive"),
    "safetensors": (lambda path: save_file({"w": torch.ones(3)}, path), "a safetensors file"),
    "npy": (lambda path: path.write_bytes(b"\x93NUMPY\x01rest"), "a NumPy array"),
    "torch": (lambda path: torch.save(torch.ones(3), path), "a zip archive"),
    "picture": (lambda path: path.write_bytes(b"\x89PNG\r\n"), "a picture"),
    "pdf": (lambda path: path.write_bytes(b"%PDF-1.7 words"), "a PDF"),
    "zstd": (lambda path: path.write_bytes(b"\x28\xb5\x2f\xfdabc"), "zstd -d"),
    "utf-16": (lambda path: path.write_text("words", encoding="utf-16"), "iconv"),
    "zeros": (lambda path: path.write_bytes(b"words\0words"), "binary"),
    "noise without zeros": (
        lambda path: path.write_bytes(bytes(random.Random(0).choices(range(1, 256), k=300))),
        "binary",
    ),
    "tokens": (lambda path: np.arange(500, dtype=np.uint16).tofile(path), "name it .bin"),
}


@pytest.mark.parametrize("name", ["a.txt", "a"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_text_is_refused_by_name_and_left_out_of_a_folder(tmp_path, kind, name):
    write, reason = FOREIGN[kind]
    write(tmp_path / name)
    with pytest.raises(InputError) as caught:
        load_corpus(DataConfig(path=(str(tmp_path / name),)))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    (tmp_path / "plain.txt").write_text("words")
    assert find_files((str(tmp_path),), "data.path") == [tmp_path / "plain.txt"]


def test_documents_of_rows_are_separated_like_files(tmp_path):
    corpus = load_corpus(DataConfig(path=(str(text(tmp_path / "a.jsonl", LINES)),), val=("share:0.2",)))
    assert bytes(corpus.train) + bytes(corpus.val) == b"\0".join(TEXTS)


def test_a_run_trains_on_the_texts_of_json_lines(tmp_path):
    config = tiny(tmp_path, steps=1)
    words = (tmp_path / "text.txt").read_text()
    plain, _ = run_quietly(config)
    (tmp_path / "text.txt").write_text(json.dumps({"text": words}) + "\n")
    rows, _ = run_quietly(tiny(tmp_path, steps=1, out=str(tmp_path / "rows")))
    assert rows.val_nats_per_byte == plain.val_nats_per_byte


def save_to_disk(folder: Path, texts: list[str], column: str = "text") -> Path:
    """Write what datasets.save_to_disk writes."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    table = pyarrow.table({column: texts, "id": list(range(len(texts)))})
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=2))
    (folder / "state.json").write_text(json.dumps({"_data_files": []}, indent=2))
    return folder


def test_a_saved_dataset_is_its_table(tmp_path):
    folder = save_to_disk(tmp_path / "saved", ["one", "two", "three"])
    assert find_files((str(folder),), "data.path") == [folder / "data-00000-of-00001.arrow"]
    corpus = load_corpus(DataConfig(path=(str(folder),), val=("share:0.3",)))
    assert bytes(corpus.train) + bytes(corpus.val) == b"one\0two\0three"


def test_splits_are_not_mixed(tmp_path):
    for split in ("test", "train"):
        save_to_disk(tmp_path / "saved" / split, [split])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for given in ("saved", "."):
        with pytest.raises(
            InputError, match=r"holds a dataset of several splits \(test, train\): name one, as .*test$"
        ):
            find_files((str(tmp_path / given),), "data.path")
    assert len(find_files((str(tmp_path / "saved" / "train"),), "data.path")) == 1


def test_tables_are_read_by_their_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = pyarrow.table({"text": ["one", None, "", "two"], "id": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        path = tmp_path / name
        assert read_documents(path, "text") == [b"one", b"two"]
        for field in ("content", "id", ""):
            with pytest.raises(InputError, match=r"without a column of text .* \(it has text, id\): name the one"):
                read_documents(path, field)
        path.write_bytes(path.read_bytes()[:60])
        with pytest.raises(InputError, match="is damaged"):
            read_documents(path, "text")


@pytest.mark.parametrize("head", [b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff\x10"])
def test_without_the_library_tables_are_refused_in_one_line(tmp_path, monkeypatch, head):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a").write_bytes(head + b"rest")
    for given in (tmp_path / "a", tmp_path):
        with pytest.raises(InputError, match=r'pip install "\.\[data\]", or convert it to JSON lines') as caught:
            load_corpus(DataConfig(path=(str(given),)))
        assert "\n" not in str(caught.value)
