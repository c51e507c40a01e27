"""Nested states, such as an optimizer's, in one safetensors file: tensors as they are, the rest as
JSON in the file's header.

Reading builds tensors, numbers, texts, None, lists, tuples and dicts, and nothing else.

What JSON has is written as it is. The rest is a table with one entry, its kind: {"tensor": name in
the file}, {"float": "nan"}, {"tuple": [...]}, and {"dict": [[key, value], ...]}, whose keys may be
integers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.errors import InputError
from moesaic.files import open_file, writing

STATE = "state"
"""Where the header of a file holds the JSON."""


def write_nested(path: Path, state: Any) -> None:
    """Write a state into a file, whole or not at all.

    Args:
        path: the file, whose folder exists.
        state: tensors, bool, int, float, str and None, in lists, tuples and dicts.

    Raises:
        InputError: it holds something else (the message names where), or something is in the way of
            the file.
        OSError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    text = dumped(state, tensors)
    # One entry: safetensors writes several in any order, and a state has the same bytes every time.
    data = save(_separate(tensors), {STATE: text})
    with writing(path) as file:
        file.write(data)


def read_nested(path: Path) -> Any:
    """Return the state that a file holds, its tensors in CPU memory.

    Raises:
        InputError: it cannot be read, or is damaged.
    """
    try:
        open_file(path).close()  # the library would wait for a named pipe
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            text = (file.metadata() or {})[STATE]
            return loaded(text, tensors)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path}: is not a state that was saved, or is damaged ({reason:.200})"
        ) from error


def dumped(state: Any, tensors: dict[str, Tensor] | None = None) -> str:
    """Return a state as JSON.

    Args:
        state: see `write_nested`.
        tensors: receives its tensors, under the names by which the JSON refers to them; None
            refuses tensors.

    Raises:
        InputError: see `write_nested`.
    """
    return json.dumps(_encoded(state, (), tensors), allow_nan=False)


def loaded(text: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return the state that `dumped` wrote.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is damaged.
    """
    return _decoded(json.loads(text), tensors or {})


def _encoded(value: Any, at: tuple[str, ...], tensors: dict[str, Tensor] | None) -> Any:
    """Return a value as JSON.

    Args:
        at: the keys that lead to it.
        tensors: receives its tensors by name; None refuses them.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float):  # NumPy's float64 too, as Python's
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if kind is list or kind is tuple:
        items = []
        for index, each in enumerate(value):
            items.append(_encoded(each, (*at, str(index)), tensors))
        return items if kind is list else {"tuple": items}
    if kind is dict and all(type(key) in (str, int) for key in value):
        pairs = []
        for key, each in value.items():
            pairs.append([key, _encoded(each, (*at, str(key)), tensors)])
        return {"dict": pairs}
    if tensors is not None and _is_plain(value):
        name = "/".join(at) or "state"
        while name in tensors:  # keys with a slash in them may join to the same name
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    where = ".".join(at) or "the state"
    allowed = "numbers, texts, None, lists, tuples and dicts"
    if tensors is not None:
        allowed = f"tensors, {allowed}"
    raise InputError(f"{where} is of type {kind.__name__}: a checkpoint holds {allowed} alone")


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that safetensors can store: dense, whole and not meta."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return False
    return value.layout == torch.strided and not value.is_meta


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that `_encoded` made JSON."""
    if isinstance(value, list):
        return [_decoded(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "float":
        return float(inside)
    if kind == "tuple":
        return tuple(_decoded(each, tensors) for each in inside)
    if kind == "dict":
        return {key: _decoded(each, tensors) for key, each in inside}
    raise ValueError(f"it holds a {kind!r:.50}")


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as safetensors stores them: in CPU memory of their own, in row-major order."""
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
