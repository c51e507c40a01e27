"""Hypothesis strategies for inputs of file readers: edited valid files, damaged files and random
bytes.

Edits depend on the kind of file, so an edited file still passes the checks of headers, lengths and
checksums. A strategy is hypothesis's word for what draws values; an edit is drawn as (where, what
to do, a value), and `apply` turns some edits into an input.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import re
import struct
import zipfile
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, scalar_dtypes

T = TypeVar("T")

ODD_WORDS = (
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "-0",
    "0",
    "-1",
    "1",
    "2",
    "2147483648",
    "9223372036854775808",
    "1_0",
    "٣",
    "1e400",
    "true",
    "None",
    "null",
    "[]",
    "{}",
    "a\nb",
    "\x00",
    "../x",
    "'",
    '"',
    "é" * 300,
)
"""Words that people, shells and other programs put where another word is expected."""
ODD_NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    2**31,
    2**63,
    10**30,
    10**400,
    -(2**63),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    -0.0,
    1e-320,
)
ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(ODD_WORDS),
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from([None, True, False, [], {}, [[]], {"": None}, [0] * 100]),
    st.text(max_size=8),
)
"""Odd values that are valid anywhere in JSON."""


def drawn_from(name: str, data: bytes) -> st.SearchStrategy[tuple[bool, bytes]]:
    """Return a strategy for inputs of a file reader.

    It draws pairs: whether the input passes the checks of headers, lengths and checksums, which two
    of three do, and the input.

    Args:
        name: the name of the file; its ending determines how the content is edited.
        data: the content of a valid file.
    """
    return either(_edited(_kind(name, data), data), _damaged(data))


def either(
    edited: st.SearchStrategy[T], other: st.SearchStrategy[T]
) -> st.SearchStrategy[tuple[bool, T]]:
    """Return a strategy that draws from `edited` twice as often as from `other`, in pairs (is from
    `edited`, input)."""
    marked = {
        True: edited.map(lambda value: (True, value)),
        False: other.map(lambda value: (False, value)),
    }
    return st.sampled_from((True, True, False)).flatmap(lambda is_edited: marked[is_edited])


def _kind(name: str, data: bytes) -> str:
    """Return the kind of a file, by its name or content."""
    ending = PurePath(name).suffix.removeprefix(".")
    if ending in ("json", "jsonl", "safetensors", "npz", "npy", "gz"):
        return ending
    try:
        return "bytes" if "\0" in data.decode() else "words"
    except UnicodeDecodeError:
        return "bytes"


def _edited(kind: str, data: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for copies of a valid file with some edits behind intact headers, lengths
    and checksums."""
    if kind == "json":
        return _tables(json.loads(data)).map(_dumped)
    if kind == "jsonl":
        lines = [json.loads(line) for line in data.splitlines()]
        return _tables(lines).map(_dumped_lines)
    if kind == "safetensors":
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        body = data[8 + size :]

        def with_header(text: bytes) -> bytes:
            """Return a file of another header and the same elements."""
            return struct.pack("<Q", len(text)) + text + body

        return _tables(header).map(_dumped).map(with_header)
    if kind == "npz":
        return _archives(data)
    if kind == "npy":
        return _arrays(data)
    if kind == "gz":
        return _words(gzip.decompress(data).decode()).map(lambda text: gzip.compress(text, mtime=0))
    return _words(data.decode()) if kind == "words" else _bytes(data)


def _damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for inputs unrelated to any valid file, and for copies of a valid file with
    damaged bytes."""
    text = st.text(max_size=60).map(lambda drawn_text: drawn_text.encode("utf-8", "replace"))
    opening_and_depth = st.tuples(st.sampled_from((b"[", b'{"a":')), st.integers(0, 50_000))
    deep = opening_and_depth.map(lambda drawn: drawn[0] * drawn[1])
    return st.one_of(st.binary(max_size=200), ODD.map(_dumped), text, deep, _bytes(data))


def _dumped(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value).encode()


def _dumped_lines(values: Any) -> bytes:
    """Return a list of values as lines of JSON; nothing for what an edit has made no list."""
    if not isinstance(values, list):
        return b""
    return b"\n".join(_dumped(value) for value in values)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of the values in a tree of lists and dicts, as tuples of keys that begin
    with `at`, the path of `value`; of a list, only the first four."""
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value[:4]))
    paths = [at]
    for key, child in children:
        paths += _places(child, (*at, key))
    return paths


def _tables(tree: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for edited values of JSON."""
    edit = st.tuples(
        st.sampled_from(_places(tree)),
        st.sampled_from(["set", "drop", "add", "wrap", "bend", "name"]),
        ODD,
    )
    return st.lists(edit, min_size=1, max_size=3).map(
        lambda edits: _apply_edits(json.loads(json.dumps(tree)), edits)  # of a copy
    )


def _apply_edits(tree: Any, edits: list[tuple[tuple[Any, ...], str, Any]]) -> Any:
    """Return a value of JSON after edits, each a path, what to do there, and a value. Edits at
    paths that earlier ones have removed do nothing."""
    for path, act, drawn in edits:
        value = copy.deepcopy(drawn)  # later edits may change the inserted value
        # The tree is an entry of a table too, so that it can be replaced as a whole.
        root = {"": tree}
        keys = ("", *path)
        container = _container(root, keys)
        if container is not None:
            _edit(container, keys[-1], act, value, is_root=not path)
        tree = root[""]
    return tree


def _container(root: Any, keys: tuple[Any, ...]) -> Any:
    """Return the dict or list in which the last of the keys is; None if the path does not exist."""
    container = root
    for place, key in enumerate(keys):
        if isinstance(container, dict):
            exists = key in container
        elif isinstance(container, list):
            exists = isinstance(key, int) and key < len(container)
        else:
            exists = False
        if not exists:
            return None
        if place < len(keys) - 1:
            container = container[key]
    return container


def _edit(container: Any, key: Any, act: str, value: Any, *, is_root: bool) -> None:
    """Edit an entry of a dict or list; what cannot be done sets the entry to the value."""
    if act == "drop" and not is_root:
        del container[key]
    elif act == "add" and isinstance(container[key], dict):
        container[key][str(value)[:9]] = value
    elif act == "wrap":
        container[key] = [container[key]]
    elif act == "name" and not is_root and isinstance(container, dict):
        container[str(value)[:9]] = container.pop(key)
    elif act == "bend":
        container[key] = _bent(container[key])
    else:
        container[key] = value


def _bent(value: Any) -> Any:
    """Return a slightly different value of the same type."""
    if isinstance(value, bool | None):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value[1:] if isinstance(value, str | list) else {}


def _bytes(data: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for edited bytes."""
    edit = st.tuples(
        st.integers(0, max(len(data) - 1, 0)),
        st.sampled_from(["flip", "cut", "set", "put", "zero"]),
        st.binary(max_size=9),
    )

    def apply(edits: list[tuple[int, str, bytes]]) -> bytes:
        """Return the bytes after edits, each a position, what to do there, and some bytes, of which
        "cut" and "flip" use only the number."""
        changed = bytearray(data)
        for at, act, extra in edits:
            if act == "cut":  # 1 to 64 bytes
                del changed[at : at + 1 + 7 * len(extra)]
            elif act == "put":
                changed[at:at] = extra
            elif act == "set":
                changed[at : at + len(extra)] = extra
            elif act == "zero":
                changed[at : at + 8] = bytes(len(changed[at : at + 8]))
            elif at < len(changed):  # "flip": a bit
                changed[at] ^= 1 << (len(extra) % 8)
        return bytes(changed)

    return st.lists(edit, min_size=1, max_size=4).map(apply)


def _words(text: str) -> st.SearchStrategy[bytes]:
    """Return a strategy for edited texts."""
    pieces = re.split(r"([\s,:=\[\]]+)", text)  # words and separators alternate
    edit = st.tuples(
        st.integers(0, len(pieces) // 2),
        st.sampled_from(["set", "drop", "twice", "on"]),
        st.sampled_from(ODD_WORDS),
    )

    def apply(edits: list[tuple[int, str, str]]) -> bytes:
        """Return the text after edits, each the number of a word, what to do, and another word."""
        changed = list(pieces)
        for number, act, value in edits:
            word = changed[2 * number]
            results = {"set": value, "drop": "", "twice": f"{word} {word}", "on": word + value}
            changed[2 * number] = results[act]
        return "".join(changed).encode()

    return st.one_of(st.lists(edit, min_size=1, max_size=3).map(apply), _bytes(text.encode()))


def _arrays(data: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for arrays of other shapes, dtypes and values, and for a valid array with a
    few odd numbers."""
    valid = np.load(io.BytesIO(data), allow_pickle=False)
    shapes = array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)
    drawn = arrays(scalar_dtypes(), shapes).map(_saved)
    if not valid.size or valid.dtype.kind not in "iu":
        return drawn
    edit = st.tuples(
        st.integers(0, valid.size - 1), st.sampled_from((-1, 0, 1, 2**15, 2**31, 2**62))
    )

    def apply(edits: list[tuple[int, int]]) -> bytes:
        """Return the array after edits, each a position and a number, which wraps around."""
        changed = valid.copy()
        for at, value in edits:
            changed.flat[at] = np.array(value).astype(changed.dtype)
        return _saved(changed)

    return st.one_of(drawn, st.lists(edit, min_size=1, max_size=3).map(apply))


def _saved(array: np.ndarray) -> bytes:
    """Return an array as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _archives(data: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy that edits one member of a zip archive and rewrites the archive, checksums
    included."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def with_member(name: str) -> st.SearchStrategy[bytes]:
        """Return a strategy for archives in which one member is edited."""
        changed = st.one_of(_arrays(members[name]), _bytes(members[name]))
        return changed.map(lambda member: _packed(members | {name: member}))

    return st.one_of(st.sampled_from(sorted(members)).flatmap(with_member), _headers(members))


def _headers(members: dict[str, bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy that edits the JSON text in the array `header.npy` of an archive."""
    header = json.loads(str(np.load(io.BytesIO(members["header.npy"]), allow_pickle=False)))
    return _tables(header).map(
        lambda table: _packed(members | {"header.npy": _saved(np.array(json.dumps(table)))})
    )


def _packed(members: dict[str, bytes]) -> bytes:
    """Return members as a ZIP archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()
