"""Clusters as TOML: presets by name, or a file. Every refusal names the field and what would be right."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moesaic.configfile import read_table, suggestion
from moesaic.cost.cluster import ClusterSpec
from moesaic.errors import InputError

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def presets() -> list[str]:
    """Return the names of the clusters that come with the package."""
    folder = resources.files("moesaic.cost").joinpath("presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_cluster(name: str, *, nodes: int | None = None) -> ClusterSpec:
    """Return a cluster.

    Args:
        name: a preset, or the path of a TOML or JSON file.
        nodes: use so many of its nodes, or more of the same; None for the file's number.

    Raises:
        InputError: for an unknown preset, a file that does not parse, an unknown field, or a value that cannot be.
    """
    if name.endswith((".toml", ".json")):
        return cluster_from(read_table(Path(name)), source=f"cluster {name}", nodes=nodes)
    if name not in presets():
        raise InputError(f"cluster {name!r} is unknown{suggestion(name, presets())}; or give a path that ends in .toml")
    with resources.as_file(resources.files("moesaic.cost").joinpath("presets", f"{name}.toml")) as path:
        return cluster_from({"name": name, **read_table(path)}, source=f"cluster {name}", nodes=nodes)


def cluster_from(table: dict[str, Any], *, source: str, nodes: int | None = None) -> ClusterSpec:
    """Return the cluster that a table describes.

    Args:
        table: as TOML gives it.
        source: where it comes from, for messages.
        nodes: instead of the table's number.

    Raises:
        InputError: as `read_cluster` does.
    """
    if nodes is not None:
        table = {**table, "nodes": nodes}
    spec: ClusterSpec = _build(ClusterSpec, table, source, "")
    return spec


def to_toml(spec: ClusterSpec) -> str:
    """Return a cluster as TOML that `read_cluster` reads back."""
    head, tables = [], []
    for each in fields(spec):
        value = getattr(spec, each.name)
        if is_dataclass(value):
            tables += _section(f"[{each.name}]", each.name, value)
        elif isinstance(value, tuple) and any(isinstance(item, str | float) for item in value):
            head.append(f"{each.name} = {_text(value)}")
        elif isinstance(value, tuple):
            for item in value:
                tables += _section(f"[[{each.name}]]", each.name, item)
        else:
            head.append(f"{each.name} = {_text(value)}")
    return "\n".join([*head, *tables]) + "\n"


def _section(heading: str, path: str, value: Any) -> list[str]:
    lines, nested = ["", heading], []
    for each in fields(value):
        item = getattr(value, each.name)
        if is_dataclass(item):
            nested += _section(f"[{path}.{each.name}]", f"{path}.{each.name}", item)
        elif item is not None:
            lines.append(f"{each.name} = {_text(item)}")
    return lines + nested


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)


def _build(kind: Any, table: Any, source: str, prefix: str) -> Any:
    """Return a dataclass from a table, nested ones and lists of them included."""
    if not isinstance(table, dict):
        raise InputError(f"{source}: {prefix.rstrip('.')} must be a table, got {table!r}")
    hints = get_type_hints(kind)
    for name in table:
        if name not in hints:
            raise InputError(f"{source}: unknown field {prefix}{name}{suggestion(name, list(hints))}")
    for each in fields(kind):
        if each.name not in table and each.default is MISSING and each.default_factory is MISSING:
            raise InputError(f"{source}: {prefix}{each.name} is missing")
    values = {name: _value(hints[name], value, source, f"{prefix}{name}") for name, value in table.items()}
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _value(hint: Any, value: Any, source: str, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _build(hint, value, source, f"{where}.")
    if origin is Literal:
        if value not in arguments:
            raise InputError(f"{source}: {where}={value!r}: choose one of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            value = [value]
        return tuple(_value(arguments[0], item, source, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is not None and type(None) in arguments:
        return _value(next(kind for kind in arguments if kind is not type(None)), value, source, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise InputError(f"{source}: {where} must be {_WORDS[hint]}, got {value!r}")
    return value
