"""Parses command lines into dataclasses with tyro, and reports errors in one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, TypeVar, get_args, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from moesaic.errors import InputError, suggestion

T = TypeVar("T")


def parse(
    kind: type[T],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    default: T | None = None,
    taken: Sequence[str] = (),
    usual: Sequence[str] = (),
) -> T:
    """Parse flags into a dataclass.

    Args:
        kind: the dataclass to return.
        arguments: the command line after the subcommand.
        prog: the command as the usage line shows it.
        description: the text above the list of flags in the help.
        default: an instance that gives the values of missing flags; None for the defaults of the
            dataclass.
        taken: further flags of the command, which its caller has read: an unknown one may be meant
            for one of them.
        usual: the flags that --help lists; --help-all lists the others too. Empty: --help lists
            all.

    Raises:
        InputError: if a flag is unknown or a value does not parse. The message is one line.
        SystemExit: with code 0, after the help was printed.
    """
    is_short = usual and {"-h", "--help"} & set(arguments)
    errors = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            parsed, unknown = tyro.cli(
                kind,
                args=["--help" if usual and word == "--help-all" else word for word in arguments],
                prog=prog,
                description=description,
                return_unknown_args=True,
                registry=_help_registry(_rest(kind, usual) if is_short else ()),
                **options,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        said = _one_line(errors.getvalue())
        raise _refusal_of(stop) or InputError(_with_advice(said, kind, prog)) from stop
    if unknown:
        nearest = _nearest(unknown[0], [*taken, *_flags(kind)])
        raise InputError(
            f"unknown argument {unknown[0]}{nearest}; --help{'-all' if usual else ''} lists all"
        )
    result: T = parsed
    return result


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """Return the value that a command line gives to a flag, which `parse` will read too; None if it
    has none."""
    for word, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else following or None
    return None


def joined(arguments: Sequence[str], flag: str) -> list[str]:
    """Return the words with `flag` and its value joined by "=": argparse takes no separate value
    that begins with hyphens."""
    words = list(arguments)
    if flag in words[:-1]:
        at = words.index(flag)
        words[at : at + 2] = [f"{flag}={words[at + 1]}"]
    return words


def _help_registry(hidden: Collection[tuple[type, str]]) -> ConstructorRegistry:
    """Return tyro's rules for dataclasses, with the line breaks of field docstrings removed: tyro
    keeps those of the source.

    `hidden` fields, each a class and a name, are left out of the help, and not parsed.
    """
    registry = ConstructorRegistry()
    is_asking = False

    @registry.struct_rule
    def joined(info: StructTypeInfo) -> StructConstructorSpec | None:
        """Return how tyro shows a dataclass, with hidden fields left out and help on one line."""
        nonlocal is_asking
        if is_asking or not is_dataclass(info.type):
            return None
        is_asking = True  # so that the lookup finds the rule of tyro, not this one
        try:
            spec = registry.get_struct_spec(info)
        finally:
            is_asking = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        shown = []
        for each in spec.fields:
            kind: Any = each.type
            if (info.type, each.name) in hidden:
                kind = tyro.conf.Suppress[each.type]  # type: ignore[misc,name-defined]
            shown.append(replace(each, type=kind, helptext=_on_one_line(each.helptext)))
        return replace(spec, fields=tuple(shown))

    return registry


def _on_one_line(text: str | Callable[[], str | None] | None) -> Callable[[], str]:
    """Return a function that returns a help text without line breaks."""
    return lambda: " ".join(((text() if callable(text) else text) or "").split())


def _nearest(word: str, flags: list[str]) -> str:
    """Return ", did you mean --X?" for a flag whose name ends like an unknown one, else for the one
    that is most like it."""
    import difflib

    name = word.split("=")[0].lstrip("-").replace("_", "-")
    names = [flag.lstrip("-") for flag in flags]
    ending = [each for each in names if each.rpartition(".")[2] == name.rpartition(".")[2]]
    near = ending or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f", did you mean --{near[0]}?" if near and word.startswith("-") else ""


def _rest(kind: Any, usual: Sequence[str], prefix: str = "--") -> set[tuple[type, str]]:
    """Return the fields, each a class and a name, of which and in which no flag is in `usual`."""
    rest = set()
    hints = get_type_hints(kind)
    for field in fields(kind):
        flag = prefix + field.name.replace("_", "-")
        if not any(f"{name}.".startswith(f"{flag}.") for name in usual):
            rest.add((kind, field.name))
        elif is_dataclass(hints[field.name]):
            rest |= _rest(hints[field.name], usual, f"{flag}.")
    return rest


def _flags(kind: Any, prefix: str = "--") -> list[str]:
    """Return the flags of a dataclass and of those in it."""
    flags = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        name = prefix + field.name.replace("_", "-")
        flags += (
            _flags(hints[field.name], f"{name}.") if is_dataclass(hints[field.name]) else [name]
        )
    return flags


def _with_advice(said: str, kind: Any, prog: str) -> str:
    """Return what tyro says of a command line, with the usage where something is missing, and with
    the nearest choice where a value is none."""
    if choice := re.match(r"invalid choice '(.*)' for argument '(.*?)'\. Expected one of \(", said):
        value, flag = choice.groups()
        known = re.findall(r"'([^']*)'", said[choice.end() :])
        if "None" in known:  # of a set, in any order
            known = sorted({*known} - {"None"})
        return f"{flag} {value}{suggestion(value, known)}"
    if said.startswith("Missing from "):
        return f"needs {_usage(kind)}: {prog} {_usage(kind)}; --help lists all"
    if of_place := re.match(r"Missing value for argument '(\w+)'", said):
        return f"{of_place[1]} is no flag, write it alone: {prog} {_usage(kind)}; --help lists all"
    return said


def _usage(kind: Any) -> str:
    """Return the words that a command line needs: values by their place, and required flags."""
    words = []
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        marks = getattr(hints[field.name], "__metadata__", ())
        named = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
        name = named or field.name.upper()
        if get_args(tyro.conf.Positional[str])[1] in marks:
            words.append(name)
        elif field.default is MISSING and field.default_factory is MISSING:
            words.append(f"--{field.name.replace('_', '-')} {name}")
    return " ".join(words)


def _refusal_of(stop: SystemExit) -> InputError | None:
    """Return the InputError of the dataclass that made tyro stop, if any: tyro's frame would break
    its lines."""
    error = stop.__context__
    while error is not None and not isinstance(error, InputError):
        error = error.__context__
    return error


def _one_line(box: str) -> str:
    """Return the text of a framed tyro message without the frame (lines, or hyphens in ASCII),
    headings and help."""
    text = re.sub(r"\x1b\[[0-9;]*m|[─-╿]+|-{3,}", " ", box)
    words = re.sub(r"\s+", " ", text).strip()
    words = re.split(r" (?:Argument helptext:|For full helptext)", words)[0]
    words = re.sub(
        r"no type matching .* instantiated from \['(.*?)'\]\. Got errors: .*(int|float)\b.*",
        r"\2: '\1'",
        words,
    )
    words = re.sub(
        r"(invalid literal for )?int(\(\) with base 10)?: '", "not a whole number: '", words
    )
    words = re.sub(r"(could not convert string to )?float: '", "not a number: '", words)
    words = re.sub(
        r"^(Parsing error|Value error|Invalid choice|Required options|Missing argument) ", "", words
    )
    return re.sub(r"^Error parsing ", "", words)
