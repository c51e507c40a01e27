"""Detection of a training file's format by its content, and reading of its documents.

A text file is one document. JSON lines, JSON arrays of objects, Arrow and Parquet tables hold one document per row. All
text formats may be compressed. Every other format is refused by name, since bytes that are not text teach a model
nothing.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moesaic.errors import InputError, to_install

HEAD_BYTES = 8192
"""Number of leading bytes that are checked. A zero byte, or too large a share of control characters, means that a file
is not text."""
CONTROL_SHARE = 1 / 32
_CONTROL = bytes({*range(1, 8), *range(14, 27), *range(28, 32), 127})
"""Bytes that do not occur in text of any encoding. Escape and backspace are missing, since terminal logs contain them."""

Decompress = Callable[[bytes], bytes]
COMPRESSED: tuple[tuple[bytes, str, Decompress], ...] = (
    (b"\x1f\x8b", "gzip", gzip.decompress),
    (b"BZh", "bzip2", bz2.decompress),
    (b"\xfd7zXZ\0", "xz", lzma.decompress),
)
"""First bytes, name and decompressor of supported compressed formats."""
TABLES = ((b"PAR1", "a Parquet file"), (b"ARROW1\0\0", "an Arrow file"), (b"\xff\xff\xff\xff", "an Arrow stream"))
"""First bytes and names of table formats, which the package pyarrow reads."""
TEXT = ("string", "large_string", "string_view")
"""Types of table columns that hold text."""
REFUSED = (
    (b"PK\x03\x04", "a zip archive (or an .npz, .docx, .pt file)", "unpack it, or convert it to text"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "decompress it with zstd -d"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"%PDF-", "a PDF", "convert it to text"),
    (b"\x93NUMPY", "a NumPy array", "write tokens as raw integers with tofile, into a .bin file"),
    (b"\x89HDF", "an HDF5 file", "convert it to JSON lines"),
    (b"SQLite format 3\0", "an SQLite database", "convert it to JSON lines"),
    (b"\x89PNG", "a picture", "leave it out"),
    (b"\xff\xd8\xff", "a picture", "leave it out"),
    (b"GIF8", "a picture", "leave it out"),
    (b"\xff\xfe", "text in UTF-16", "convert it to UTF-8 with iconv"),
    (b"\xfe\xff", "text in UTF-16", "convert it to UTF-8 with iconv"),
)
"""First bytes, name and remedy of formats that are refused."""


def read_documents(path: Path, field: str) -> list[bytes]:
    """Return the documents of a file without empty ones. Documents from JSON or tables are UTF-8.

    Args:
        path: a file of any format.
        field: the field of JSON objects and tables that holds the text; "" reads JSON files as plain text.

    Raises:
        InputError: if the file cannot be read, has no text, or lacks the field.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"data: {path} cannot be read ({error.strerror})") from error
    return [document for document in _documents(data, path, field) if document]


def is_left_out(path: Path) -> bool:
    """Return whether a file in a data folder is ignored because it is neither text nor a table nor compressed.

    Files that cannot be opened are not ignored: reading them raises an error with the reason.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    known = (*(magic for magic, _, _ in COMPRESSED), *(magic for magic, _ in TABLES))
    is_read = head.startswith(known)
    return not is_read and why_not_text(head) is not None


def holds_table(path: Path) -> bool:
    """Return whether a file is a table, which pyarrow reads."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError:
        return False
    return any(head.startswith(magic) for magic, _ in TABLES)


def why_not_text(head: bytes) -> tuple[str, str] | None:
    """Return why the start of a file is not text, and how to remedy it; None for text."""
    for magic, name, remedy in REFUSED:
        if head.startswith(magic):
            return name, remedy
    if head[257:262] == b"ustar":
        return "a tar archive", "unpack it"
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 27:
        return "a safetensors file, which holds parameters", "leave it out"
    head = head[:HEAD_BYTES]
    if b"\0" in head or len(head) - len(head.translate(None, _CONTROL)) > CONTROL_SHARE * len(head):
        return "binary", "convert it to text, or name it .bin if it holds raw tokens"
    return None


def _documents(data: bytes, path: Path, field: str) -> list[bytes]:
    for magic, name, decompress in COMPRESSED:
        if data.startswith(magic):
            try:
                content = decompress(data)
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
                raise InputError(f"data: {path} is damaged {name} ({error}): compress it anew") from error
            return _documents(content, path, field)
    for magic, name in TABLES:
        if data.startswith(magic):
            return _rows(data, path, name, field)
    reason = why_not_text(data[:HEAD_BYTES])
    if reason is not None:
        raise InputError(f"data: {path} is not text but {reason[0]}: {reason[1]}")
    start = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if field and start[:1] == b"{" and _is_object(start.partition(b"\n")[0]):
        return _json_lines(data, path, field)
    if field and start[:1] == b"[":
        return _json_array(data, field)
    return [data]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(data: bytes, path: Path, field: str) -> list[bytes]:
    """Return the texts of JSON lines. A file of a single object without the field is ordinary JSON, and is returned as
    text."""
    lines = [(number, line) for number, line in enumerate(data.splitlines(), start=1) if line.strip()]
    texts = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"data: {path} begins as JSON lines, but line {number} is not JSON ({error}): correct it, or set "
                'data.text_field to "" to train on the file as it stands'
            ) from error
        if isinstance(row, dict) and isinstance(row.get(field), str):
            texts.append(row[field].encode("utf-8", errors="surrogatepass"))
        elif isinstance(row, dict) and field in row:
            raise InputError(
                f"data: {path} holds JSON lines, and in line {number} {field!r} is {json.dumps(row[field]):.40}, not text: "
                "correct it, or name the field that holds the text with data.text_field"
            )
        elif len(lines) == 1:
            return [data]
        else:
            keys = ", ".join(list(row)[:8]) if isinstance(row, dict) else type(row).__name__
            raise InputError(
                f"data: {path} holds JSON lines, and line {number} has no text under {field!r} (it has {keys}): name the "
                'field that holds the text with data.text_field, or set it to "" to train on the file as it stands'
            )
    return texts


def _json_array(data: bytes, field: str) -> list[bytes]:
    """Return the texts of an array of objects that all have the field. Any other file is returned as text."""
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        return [data]
    if rows and all(isinstance(row, dict) and isinstance(row.get(field), str) for row in rows):
        return [row[field].encode("utf-8", errors="surrogatepass") for row in rows]
    return [data]


def _rows(data: bytes, path: Path, kind: str, field: str) -> list[bytes]:
    """Return the texts of a table."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise InputError(
            f"data: {path} is {kind}, as datasets writes it, which pyarrow reads: {to_install('.[data]')}, "
            "or convert it to JSON lines with Dataset.to_json"
        ) from error
    source: Any = pyarrow.BufferReader(data)
    readers = {
        "a Parquet file": lambda: parquet.read_table(source),
        "an Arrow file": lambda: ipc.open_file(source).read_all(),
        "an Arrow stream": lambda: ipc.open_stream(source).read_all(),
    }
    try:
        table = readers[kind]()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"data: {path} looks like {kind} and is damaged ({' '.join(str(error).split()):.200}): write it anew"
        ) from error
    if field not in table.column_names or str(table.schema.field(field).type) not in TEXT:
        raise InputError(
            f"data: {path} is {kind} without a column of text {field!r} (it has {', '.join(table.column_names)}): name the "
            "one that holds the text with data.text_field"
        )
    return [text.encode("utf-8") for text in table.column(field).to_pylist() if text is not None]
