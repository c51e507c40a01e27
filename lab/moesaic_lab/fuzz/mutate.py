"""Inputs for readers, drawn by hypothesis: valid files with some edits, and bytes from nowhere.

An edit knows the kind of file, so that what comes of it passes the checks of headers, lengths and checksums.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any

from hypothesis import strategies as st

ODD_WORDS = (
    "", " ", "nan", "inf", "-inf", "1e308", "-0", "0", "-1", "1", "2", "2147483648", "9223372036854775808", "1_0", "٣", "1e400",
    "true", "None", "null", "[]", "{}", "a\nb", "\x00", "../x", "'", '"', "\ud800".encode("utf-8", "replace").decode(), "é" * 300,
)  # fmt: skip
"""What people, shells and other programs put where a word is wanted."""
ODD_NUMBERS = (0, -1, 1, 2, 3, 2**31, 2**63, 10**30, -(2**63), 0.5, 1e308, float("nan"), float("inf"), -0.0, 1e-320)
ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(ODD_WORDS),
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from([None, True, False, [], {}, [[]], {"": None}, [0] * 100]),
    st.text(max_size=8),
)
"""Values that fit anywhere in JSON."""


def mutated(kind: str, data: bytes) -> st.SearchStrategy[bytes]:
    """Return edited copies of a valid file.

    Args:
        kind: json, lines, toml, safetensors, npz, words, or bytes.
        data: the file.
    """
    if kind == "json":
        return _tables(json.loads(data)).map(_dumped)
    if kind == "lines":
        lines = [json.loads(line) for line in data.splitlines()]
        return _tables(lines).map(lambda found: b"\n".join(map(_dumped, found)) if isinstance(found, list) else b"")
    if kind == "safetensors":
        size = struct.unpack("<Q", data[:8])[0]
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        return _tables(header).map(_dumped).map(lambda text: struct.pack("<Q", len(text)) + text + body)
    if kind == "npz":
        return _archives(data)
    if kind in ("toml", "words"):
        return _words(data.decode())
    return _bytes(data)


def anything(kind: str) -> st.SearchStrategy[bytes]:
    """Return inputs that owe nothing to a valid file."""
    if kind in ("bytes", "npz", "safetensors"):
        return st.binary(max_size=200)
    return st.one_of(
        st.binary(max_size=60), ODD.map(_dumped), st.text(max_size=60).map(lambda t: t.encode("utf-8", "replace"))
    )


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where values stand in a tree of lists and tables."""
    found = [at]
    if isinstance(value, dict):
        found += [place for key, each in value.items() for place in _places(each, (*at, key))]
    elif isinstance(value, list):
        found += [place for key, each in enumerate(value[:4]) for place in _places(each, (*at, key))]
    return found


def _tables(tree: Any) -> st.SearchStrategy[Any]:
    edit = st.tuples(st.sampled_from(_places(tree)), st.sampled_from(["set", "drop", "add", "wrap"]), ODD)
    return st.lists(edit, min_size=1, max_size=3).map(lambda edits: _edited(json.loads(json.dumps(tree)), edits))


def _edited(tree: Any, edits: list[tuple[tuple[Any, ...], str, Any]]) -> Any:
    for place, act, value in edits:
        holder = {"": tree}
        inner: Any = holder
        key: Any = ""
        for step in place:
            inner, key = inner[key], step
            if not isinstance(inner, dict | list) or (isinstance(inner, list) and not isinstance(key, int)):
                break
            if (isinstance(inner, dict) and key not in inner) or (isinstance(inner, list) and key >= len(inner)):
                break
        else:
            if act == "drop" and place:
                del inner[key]
            elif act == "add" and isinstance(inner[key], dict):
                inner[key][str(value)[:9]] = value
            elif act == "wrap":
                inner[key] = [inner[key]]
            else:
                inner[key] = value
        tree = holder[""]
    return tree


def _bytes(data: bytes) -> st.SearchStrategy[bytes]:
    edit = st.tuples(
        st.integers(0, max(len(data) - 1, 0)),
        st.sampled_from(["flip", "cut", "set", "put", "zero"]),
        st.binary(max_size=9),
    )

    def apply(edits: list[tuple[int, str, bytes]]) -> bytes:
        found = bytearray(data)
        for at, act, extra in edits:
            if act == "cut":
                del found[at : at + 1 + 7 * len(extra)]
            elif act == "put":
                found[at:at] = extra
            elif act == "set":
                found[at : at + len(extra)] = extra
            elif act == "zero":
                found[at : at + 8] = bytes(len(found[at : at + 8]))
            elif at < len(found):
                found[at] ^= 1 << (len(extra) % 8)
        return bytes(found)

    return st.lists(edit, min_size=1, max_size=4).map(apply)


def _words(text: str) -> st.SearchStrategy[bytes]:
    words = text.split(" ")
    edit = st.tuples(
        st.integers(0, len(words) - 1), st.sampled_from(["set", "drop", "twice"]), st.sampled_from(ODD_WORDS)
    )

    def apply(edits: list[tuple[int, str, str]]) -> bytes:
        found = list(words)
        for at, act, value in edits:
            if at < len(found):
                found[at : at + 1] = {"set": [value], "drop": [], "twice": [found[at], found[at]]}[act]
        return " ".join(found).encode()

    return st.one_of(st.lists(edit, min_size=1, max_size=3).map(apply), _bytes(text.encode()))


def _archives(data: bytes) -> st.SearchStrategy[bytes]:
    """Edit one member of a zip archive, whose own checksums are then made anew."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def with_member(name: str) -> st.SearchStrategy[bytes]:
        return _bytes(members[name]).map(lambda changed: _packed(members | {name: changed}))

    return st.one_of(st.sampled_from(sorted(members)).flatmap(with_member), _headers(members), _bytes(data))


def _headers(members: dict[str, bytes]) -> st.SearchStrategy[bytes]:
    """Edit the JSON that an array of text holds, where there is one."""
    import numpy as np

    header = json.loads(str(np.load(io.BytesIO(members["header.npy"]), allow_pickle=False)))

    def packed(table: Any) -> bytes:
        held = io.BytesIO()
        np.save(held, np.array(json.dumps(table)))
        return _packed(members | {"header.npy": held.getvalue()})

    return _tables(header).map(packed)


def _packed(members: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return held.getvalue()
