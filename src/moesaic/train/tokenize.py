"""Packing text into a `.bin` file of tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moesaic.errors import InputError
from moesaic.files import require_writable, write, writing
from moesaic.train.config import DataConfig
from moesaic.train.data import find_files
from moesaic.train.documents import read_documents
from moesaic.train.tokenizer import AbstractTokenizer, HubTokenizer, make_tokenizer


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


def pack(out: Path, paths: Sequence[str], data: DataConfig) -> Packed:
    """Tokenize documents into one file, with the separator after each, and write a table next to it
    that describes the file.

    Args:
        out: path of the `.bin` file; the `.json` and `.tokenizer.json` files next to it share its
            name.
        paths: files, folders or globs, one per source; sources are read in order.
        data: only `tokenizer` and `text_field` are used.

    Raises:
        InputError: for sources without text.
    """
    require_writable(out, "--out")
    sources = [find_files((path,), "path") for path in paths]
    tokenizer = make_tokenizer(data, file=None)
    # the smallest integers that all ids fit
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    little_endian = dtype.newbyteorder("<")
    tokens = [0] * len(sources)
    documents = [0] * len(sources)
    with writing(out, typed=True) as file:
        for index, files in enumerate(sources):
            for path in files:
                for document in read_documents(path, data.text_field):
                    ids = np.append(tokenizer.encode(document), tokenizer.separator)
                    file.write(ids.astype(little_endian).tobytes())
                    tokens[index] += len(ids)
                    documents[index] += 1
    if not sum(tokens):
        raise InputError(f"path: no text in it, {out} is empty: name files with text")
    return _describe(out, dtype.name, tokenizer, tuple(tokens), tuple(documents))


def _describe(
    out: Path,
    dtype: str,
    tokenizer: AbstractTokenizer,
    tokens: tuple[int, ...],
    documents: tuple[int, ...],
) -> Packed:
    """Write the facts about a file of tokens, and its tokenizer, beside it."""
    tokenizer_path = None
    if isinstance(tokenizer, HubTokenizer):
        tokenizer_path = out.with_suffix(".tokenizer.json")
        write(tokenizer_path, tokenizer.text)
    packed = Packed(
        out,
        dtype,
        tokenizer.vocab_size,
        tokens=tokens,
        documents=documents,
        tokenizer=tokenizer_path,
    )
    table = {
        "dtype": dtype,
        "vocab_size": packed.vocab_size,
        "separator": tokenizer.separator,
        "tokens": packed.tokens,
        "documents": packed.documents,
    }
    write(out.with_suffix(".json"), json.dumps(table, indent=2) + "\n")
    return packed
