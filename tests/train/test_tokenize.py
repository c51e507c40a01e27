"""Packed tokens equal the tokens that training reads from the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from moesaic.cli.main import main
from moesaic.train.config import DataConfig
from moesaic.train.data import load_corpus
from moesaic.train.documents import read_documents
from moesaic.train.tokenizer import HubTokenizer
from runs import run_quietly, tiny, write_text, write_tokenizer


def test_what_is_packed_trains_as_the_text_does_and_its_text_is_known(
    tmp_path: Path, capsys
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        write_text(texts / f"{number}.txt", seed=number)
    table = pyarrow.table({"text": ["one document", "another one"]})
    pyarrow.parquet.write_table(table, texts / "rows.parquet")
    out = tmp_path / "tokens.bin"
    tokenizer = write_tokenizer(tmp_path / "given.json")
    assert main(["tokenize", str(texts), "--out", str(out), "--tokenizer", tokenizer]) == 0
    said = capsys.readouterr().out
    assert f"{texts}: " in said
    assert "of 5 documents" in said
    beside = tmp_path / "tokens.tokenizer.json"
    vocab_size = HubTokenizer.load(beside).vocab_size
    assert f"--data.vocab-size {vocab_size} --data.tokenizer {beside}" in said
    data = {"path": (str(out),), "vocab_size": vocab_size, "tokenizer": str(beside)}
    packed = load_corpus(DataConfig(**data))
    documents = [
        document for path in sorted(texts.iterdir()) for document in read_documents(path, "text")
    ]
    whole = np.concatenate([packed.train, packed.val])
    expected = [
        np.append(packed.tokenizer.encode(document), packed.tokenizer.separator)
        for document in documents
    ]
    assert whole.tolist() == np.concatenate(expected).tolist()
    run_quietly(tiny(tmp_path, steps=1, data=data))
    assert main(["sample", str(tmp_path / "run"), "--prompt", "one", "--tokens", "3"]) == 0


@pytest.mark.parametrize(
    ("sources", "flags", "words"),
    [
        (["a.txt"], ["--out", "b.txt"], "files of tokens end in .bin"),
        (["a.txt"], ["--tokenizer", "no.json"], "no.json: the tokenizer is missing"),
        ([], [], "name at least one file or folder"),
        (["a.txt"], [], "no text in it"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, capsys, monkeypatch, sources, flags, words
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").touch()
    assert main(["tokenize", *sources, "--out", "a.bin", *flags]) == 2
    assert words in capsys.readouterr().err
