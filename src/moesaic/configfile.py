"""Configurations as files: reads and writes TOML and JSON. Every error names the field and a valid
value.

A configuration is a frozen dataclass whose fields may be dataclasses; a *table* is the dict that
TOML or JSON parses to; a *hint* is a field's annotated type.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from moesaic.errors import InputError, suggestion
from moesaic.files import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
SUCH_AS = "such as"
"""Metadata key of a field without a default: an example value, for the error if the field is
missing."""


def read_table(path: Path, what: str = "config") -> dict[str, Any]:
    """Read a TOML or JSON file, depending on its suffix, into a dict; `what` names it in errors.

    Raises:
        InputError: if the file is missing, has another suffix, or does not parse.
    """
    if path.suffix not in (".toml", ".json"):
        wrong = "unknown kind of file, use .toml or .json"
        if path.is_dir():
            wrong = f"is a folder: name a file, such as {path / what}.json"
        raise InputError(f"{what} {path}: {wrong}")
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise InputError(f"{what} {path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what} {path}: cannot be read ({error})") from error
    try:
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} {path}: does not parse ({error})") from error
    if not isinstance(table, dict):
        raise InputError(
            f"{what} {path}: must hold a table of fields, holds a {type(table).__name__}"
        )
    return table


def override(config: T, table: dict[str, Any], *, source: str, prefix: str = "") -> T:
    """Return `config` with the fields of `table` replaced, nested tables included.

    Args:
        config: a dataclass instance.
        table: field names to values, as parsed from TOML or JSON.
        source: the origin of the table, for messages.
        prefix: the path of `config` inside the whole configuration, with a trailing dot.

    Raises:
        InputError: for an unknown field or a value of the wrong type.
    """
    assert is_dataclass(config)
    assert not isinstance(config, type)
    hints = _hints(type(config), table, source, prefix)
    changes: dict[str, Any] = {}
    for name, value in table.items():
        current = getattr(config, name)
        where = f"{source}: {prefix}{name}"
        if is_dataclass(current):
            if not isinstance(value, dict):
                names = ", ".join(each.name for each in fields(current))
                raise InputError(f"{where} must be a table of {names}, got {value!r}")
            changes[name] = override(current, value, source=source, prefix=f"{prefix}{name}.")
        else:
            changes[name] = _convert(value, hints[name], where)
    return replace(config, **changes)


def build(kind: type[T], table: dict[str, Any], *, source: str, prefix: str = "") -> T:
    """Return a dataclass with the fields of `table`, nested tables and lists of tables included.

    Args:
        kind: the class.
        table, source, prefix: as for `override`.

    Raises:
        InputError: in the cases of `override`; if a field without a default is missing (the message
            has an example if the field's metadata has `SUCH_AS`); or if the class refuses a value.
    """
    hints = _hints(kind, table, source, prefix)
    for field in fields(kind):  # type: ignore[arg-type]
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if field.name not in table and not has_default:
            such_as = field.metadata.get(SUCH_AS, "")
            advice = f": add it, for example {such_as}" if such_as else ""
            raise InputError(f"{source}: {prefix}{field.name} is missing{advice}")
    values = {
        name: _convert(value, hints[name], f"{source}: {prefix}{name}")
        for name, value in table.items()
    }
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _hints(kind: type, table: dict[str, Any], source: str, prefix: str) -> dict[str, Any]:
    """Return the types of a class's fields, after a check that the table has no other names."""
    hints = get_type_hints(kind)
    for name in table:
        if name not in hints:
            raise InputError(
                f"{source}: unknown field {prefix}{name}{suggestion(name, list(hints))}"
            )
    return hints


def _table(value: Any, where: str) -> dict[str, Any]:
    """Return a value that must be a table; `where` names it in the message."""
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a table, got {value!r}")
    return value


def as_json(config: Any) -> str:
    """Return a configuration as indented JSON; `override` reads it back."""
    return json.dumps(asdict(config), indent=2) + "\n"


def as_toml(config: Any) -> str:
    """Return a configuration as TOML, without fields that have their defaults; `build` reads it
    back."""
    return to_toml(_not_default(config)) + "\n"


def _not_default(value: Any) -> Any:
    """Return a value with dataclasses as tables of the fields that differ from their defaults, and
    tuples as lists."""
    if isinstance(value, tuple):
        return [_not_default(each) for each in value]
    if not is_dataclass(value):
        return value
    table = {}
    for field in fields(value):
        current = getattr(value, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if current != default:
            table[field.name] = _not_default(current)
    return table


def to_toml(table: dict[str, Any], prefix: str = "") -> str:
    """Return a table as TOML; the JSON of numbers, texts, truth values and lists of these is also
    TOML.

    Args:
        table: has no None.
        prefix: the name of the table with a trailing dot; "" for the whole file.
    """
    lines = []
    below = []  # TOML wants tables behind the plain values of the table that holds them
    for name, value in table.items():
        if isinstance(value, dict):
            below += ["", f"[{prefix}{name}]", to_toml(value, f"{prefix}{name}.")]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for entry in value:
                below += ["", f"[[{prefix}{name}]]", to_toml(entry, f"{prefix}{name}.")]
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join([*lines, *below])


def differing_fields(one: Any, other: Any, prefix: str = "") -> list[str]:
    """Return the paths of the fields in which two configurations of one class differ, each with
    both values."""
    differences: list[str] = []
    for field in fields(one):
        value = getattr(one, field.name)
        other_value = getattr(other, field.name)
        if is_dataclass(value):
            differences += differing_fields(value, other_value, f"{prefix}{field.name}.")
        elif value != other_value:
            differences.append(f"{prefix}{field.name} ({value!r} and {other_value!r})")
    return differences


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check a TOML or JSON value against a field's type and convert it: lists become tuples, whole
    numbers floats if needed.

    A single value stands for a list of one if the list may have any length. `where` is the source,
    a colon and the field's path, for messages.
    """
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Literal:
        return _require_choice(value, arguments, where)
    if origin is tuple:
        return _convert_list(value, arguments, where)
    if origin is dict:
        value_hint = arguments[1]
        return {
            key: _convert(item, value_hint, f"{where}.{key}")
            for key, item in _table(value, where).items()
        }
    if isinstance(hint, type) and is_dataclass(hint):
        source, _, path = where.rpartition(": ")
        return build(hint, _table(value, where), source=source, prefix=f"{path}.")
    if type(None) in arguments:
        if value is None:
            return None
        # None or a value of one other type
        others = [each for each in arguments if each is not type(None)]
        return _convert(value, others[0], where)

    # Python counts true and false as whole numbers
    is_whole_number = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and is_whole_number:
        return _as_float(value, where)

    kinds = arguments or (hint,)  # arguments of a union such as int | str
    is_stray_bool = isinstance(value, bool) and bool not in kinds
    if is_stray_bool or not isinstance(value, kinds):
        names = [str(_NAMES.get(each, each)) for each in kinds]
        raise InputError(f"{where} must be {' or '.join(names)}, got {value!r}")
    return value


def _require_choice(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    """Return a value that must be one of a field's choices."""
    if value in choices:
        return value
    has_options = isinstance(value, str) and value.partition(":")[0] in choices
    more = "; what follows the colon has fields of its own" if has_options else ""
    raise InputError(f"{where}={value!r}: choose one of {', '.join(map(str, choices))}{more}")


def _convert_list(value: Any, hints: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    """Convert a list to a tuple with entries of the given types; (type, ...) is one of any
    length."""
    if Ellipsis in hints:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(
            _convert(item, hints[0], f"{where}[{number}]") for number, item in enumerate(items)
        )
    if not isinstance(value, list | tuple) or len(value) != len(hints):
        raise InputError(f"{where} must be a list of {len(hints)}, got {value!r}")
    return tuple(_convert(item, hint, where) for item, hint in zip(value, hints))


def _as_float(value: int, where: str) -> float:
    """Return a whole number as a float; raise InputError if no float is so large."""
    if abs(value) > sys.float_info.max:
        side = "above " if value > 0 else "below -"
        raise InputError(f"{where} is a number {side}{sys.float_info.max}: no float is so large")
    return float(value)


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
