"""Packing text into a `.bin` file of tokens, from one source or from a weighted mixture of several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moesaic.errors import InputError
from moesaic.train.config import DataConfig
from moesaic.train.data import find_files
from moesaic.train.documents import read_documents
from moesaic.train.tokenizer import AbstractTokenizer, BPETokenizer, saved_tokenizer


@dataclass(frozen=True)
class Packed:
    """Description of a written `.bin` file."""

    path: Path
    dtype: str
    vocab_size: int
    tokens: tuple[int, ...]
    """Number of tokens per source, separators included."""
    documents: tuple[int, ...]
    """Number of documents per source."""
    tokenizer: Path | None
    """A copy of the tokenizer next to the tokens; None for bytes."""


class Texts:
    """The documents of some files in file order, repeated without end."""

    def __init__(self, pattern: str, field: str) -> None:
        self.files, self.field = find_files((pattern,), "path"), field
        self.passes = 0
        """How often all documents have been read."""

    def once(self) -> Iterator[bytes]:
        """Yield each document once."""
        for path in self.files:
            yield from read_documents(path, self.field)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            empty = True
            for document in self.once():
                empty = False
                yield document
            if empty:
                raise InputError(f"path: {self.files[0]} holds no text: leave it out")
            self.passes += 1


def pack(
    out: Path, paths: Sequence[str], data: DataConfig, weights: Sequence[float] = (), num_tokens: int | None = None
) -> Packed:
    """Tokenize documents into one file, with the separator after each, and write a table next to it that describes the
    file.

    A mixture takes the next document from the source that is furthest behind its weight, and starts a source over when
    it ends. Every part of the file therefore has the mixture's shares.

    Args:
        out: path of the `.bin` file; the `.json` and `.tokenizer.json` files next to it share its name.
        paths: files, folders or globs, one per source.
        data: only `tokenizer`, `vocab_size` and `text_field` are used.
        weights: one per source; if empty, each source is read once, in order.
        num_tokens: number of tokens at which a mixture ends; None: when every source was read once, or would have been.

    Raises:
        InputError: for sources without text, and for weights that do not match the sources.
    """
    if weights and (len(weights) != len(paths) or min(weights) <= 0):
        raise InputError(f"weights={tuple(weights)}: give one above 0 for each of the {len(paths)} paths")
    sources = [Texts(path, data.text_field) for path in paths]
    tokenizer = saved_tokenizer(data, None) or BPETokenizer.train(
        (document for source in sources for document in source.once()), data.vocab_size
    )
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    counts = np.zeros((len(sources), 2), dtype=np.int64)
    with out.open("wb") as file:
        for index, document in _mixed(sources, weights, counts, num_tokens):
            ids = np.append(tokenizer.encode(document), tokenizer.separator).astype(dtype.newbyteorder("<"))
            ids.tofile(file)
            counts[index] += (len(ids), 1)
    return _describe(out, dtype.name, tokenizer, counts)


def _mixed(
    sources: list[Texts], weights: Sequence[float], counts: np.ndarray, num_tokens: int | None
) -> Iterator[tuple[int, bytes]]:
    """Yield the number of a source and one of its documents. `counts`, (sources, 2), holds the tokens and documents
    written so far."""
    if not weights:
        for index, source in enumerate(sources):
            for document in source.once():
                yield index, document
        return
    shares = np.asarray(weights) / sum(weights)
    readers = [iter(source) for source in sources]
    while num_tokens is None or counts[:, 0].sum() < num_tokens:
        index = int((counts[:, 0] / shares).argmin())
        document = next(readers[index])
        if num_tokens is None and min(source.passes for source in sources):
            return
        yield index, document


def _describe(out: Path, dtype: str, tokenizer: AbstractTokenizer, counts: np.ndarray) -> Packed:
    if not counts[:, 0].sum():
        raise InputError(f"path: no text in it, {out} is empty: name files with text")
    tokenizer_path = None
    if isinstance(tokenizer, BPETokenizer):
        tokenizer_path = out.with_suffix(".tokenizer.json")
        tokenizer.save(tokenizer_path)
    packed = Packed(
        out, dtype, tokenizer.vocab_size, tuple(counts[:, 0].tolist()), tuple(counts[:, 1].tolist()), tokenizer_path
    )
    table = {"dtype": dtype, "vocab_size": packed.vocab_size, "separator": tokenizer.separator, "tokens": packed.tokens,
             "documents": packed.documents}  # fmt: skip
    out.with_suffix(".json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return packed
