"""The documents of a training file. The file's suffix says what it holds.

A text file is one document, and so is a file of any other suffix. A line of JSON lines, an object
in a JSON list and a row of a table are documents too. The package datasets reads tables, but not
JSON, on which pyarrow may crash. Bytes that are not text teach a model nothing, so files with zero
bytes are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic.errors import InputError, to_install
from moesaic.files import read_bytes

LINES = ".jsonl"
LIST = ".json"
"""The suffixes of JSON lines (also ".ndjson"), and of a JSON list or JSON lines."""
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
"""The builder of datasets for each suffix of a table."""
SAVED = "dataset_info.json"
SPLITS = "dataset_dict.json"
"""Files in a folder that `datasets.save_to_disk` wrote, for a dataset and for several splits of
one."""


def suffix_of(path: Path) -> str:
    """Return the suffix of a file in lower case, by which its kind is known."""
    suffix = path.suffix.lower()
    return LINES if suffix == ".ndjson" else suffix


def parsed(data: bytes) -> Any:
    """Return the value of JSON; raises ValueError if it is none, or names a key twice."""
    return json.loads(data, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; ValueError if a key comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the key {twice!r} twice")
    return found


def read_documents(path: Path, field: str) -> list[bytes]:
    """Return the documents of a file, or of a folder that `datasets.save_to_disk` wrote, without
    empty ones.

    Args:
        field: the field of JSON lines and tables that holds the text.

    Raises:
        InputError: if the file cannot be read, is not text, or lacks the field.
    """
    suffix = suffix_of(path)
    if path.is_dir() or suffix in TABLES:
        documents = list(_rows(path, field))
    else:
        try:
            data = read_bytes(path)
        except OSError as error:
            raise InputError(f"data: {path} cannot be read ({error.strerror})") from error
        except MemoryError as error:
            raise InputError(
                f"data: {path} is larger than this process's memory: split it"
            ) from error
        if b"\0" in data:
            raise InputError(
                f"data: {path} is not text, it has zero bytes: leave it out, convert it to UTF-8, "
                "or name it .bin if it holds raw tokens"
            )
        documents = list(_json_texts(data, path, field)) if suffix in (LINES, LIST) else [data]
    return [document for document in documents if document]


def _json_texts(data: bytes, path: Path, field: str) -> Iterator[bytes]:
    """Yield the texts of JSON lines, or of the rows of a JSON list. A row, unlike a line, may have
    null in place of a text."""
    start = data.lstrip(b"\xef\xbb\xbf \t\r\n")  # without a byte order mark and white space
    is_list = suffix_of(path) != LINES and start.startswith(b"[")
    part: Any = data  # the row or line that the error names; a list that does not parse has none
    try:
        for number, part in enumerate(parsed(data) if is_list else data.splitlines(), start=1):  # noqa: B007
            if is_list:
                text = part[field]
                if text is None:
                    continue
            elif part.strip():
                text = parsed(part)[field]
            else:
                continue
            yield text.encode("utf-8", errors="surrogatepass")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        if is_list and part is data:
            raise InputError(f"data: {path}: is no list of JSON ({error}): correct it") from error
        kind = "row" if is_list else "line"
        # the text of a line without the b of its bytes
        shown = str(part[:60])[1:] if isinstance(part, bytes) else f"{part!r:.60}"
        raise InputError(
            f"data: {path}: {kind} {number} is no JSON object with a text under {field!r} but "
            f"{shown}: correct it, or name the field that holds the text with data.text_field"
        ) from error


def _rows(path: Path, field: str) -> Iterator[bytes]:
    """Yield the texts of a table, without rows that have none."""
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"data: {path} is a table, which the package datasets reads: "
            f"{to_install('.[data]')}, or convert it to JSON lines"
        ) from error
    try:
        if path.is_dir():
            table = datasets.load_from_disk(str(path))
        else:
            table = datasets.load_dataset(
                TABLES[suffix_of(path)], data_files=str(path), split="train", streaming=True
            )
        for row in table:
            if row[field] is not None:
                yield row[field].encode("utf-8")
    except Exception as error:  # each of the libraries below datasets raises exceptions of its own
        reason = " ".join(repr(error).split())
        raise InputError(
            f"data: {path} holds no table with a column of text {field!r} ({reason:.200}): name "
            "the column with data.text_field, or write the file anew"
        ) from error
