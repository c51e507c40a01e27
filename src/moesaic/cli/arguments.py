"""Command lines to dataclasses by tyro, with one-line errors."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import tyro

from moesaic.errors import InputError

T = TypeVar("T")


def parse(kind: type[T], arguments: Sequence[str], *, prog: str, description: str, default: T | None = None) -> T:
    """Parse flags into a dataclass.

    Args:
        kind: the dataclass.
        arguments: the words after the subcommand.
        prog: shown in the help.
        description: shown in the help.
        default: values of flags that are not given; None takes the dataclass's own.

    Raises:
        InputError: for an unknown flag or a value that does not parse, in one line.
        SystemExit: with code 0 after printing the help.
    """
    errors = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            parsed, unknown = tyro.cli(
                kind, args=list(arguments), prog=prog, description=description, return_unknown_args=True, **options
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise InputError(_one_line(errors.getvalue())) from stop
    if unknown:
        raise InputError(f"unknown argument {unknown[0]}{_nearest(unknown[0], kind)}; --help lists all")
    result: T = parsed
    return result


def _nearest(word: str, kind: Any) -> str:
    import difflib

    near = difflib.get_close_matches(word.split("=")[0], _flags(kind), n=1, cutoff=0.6)
    return f", did you mean {near[0]}?" if near else ""


def _flags(kind: Any, prefix: str = "--") -> list[str]:
    flags = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        name = prefix + field.name.replace("_", "-")
        flags += _flags(hints[field.name], f"{name}.") if is_dataclass(hints[field.name]) else [name]
    return flags


def _one_line(box: str) -> str:
    """Return the text of tyro's framed message without the frame."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"[─-╿]+", " ", line).strip() for line in text.splitlines()]
    words = " ".join(line for line in lines if line and not line.startswith("For full helptext"))
    return re.sub(r"\s+", " ", words).removeprefix("Parsing error ").strip()
