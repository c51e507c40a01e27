"""Parses command lines into dataclasses with tyro, and reports errors in one line.

A *kind* is the dataclass of a command's options: each field is a flag, `--name`, and each field of
a dataclass in it `--field.name`.
"""

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
    words = list(arguments)
    hidden: Collection[tuple[type, str]] = ()
    if usual:
        if "-h" in words or "--help" in words:
            hidden = _unusual(kind, usual)
        words = ["--help" if word == "--help-all" else word for word in words]

    options: dict[str, Any] = {} if default is None else {"default": default}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed, unknown = tyro.cli(
                kind,
                args=words,
                prog=prog,
                description=description,
                return_unknown_args=True,
                registry=_help_registry(hidden),
                **options,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _refusal_of(stop, errors.getvalue(), kind, prog) from stop

    if unknown:
        nearest = _nearest(unknown[0], [*taken, *_flags(kind)])
        help_flag = "--help-all" if usual else "--help"
        raise InputError(f"unknown argument {unknown[0]}{nearest}; {help_flag} lists all")
    _check_seed(parsed)
    result: T = parsed
    return result


def _check_seed(options: Any) -> None:
    """Raise InputError if options have a seed that torch does not take."""
    seed = getattr(options, "seed", 0)
    if not 0 <= seed < 2**63:
        raise InputError(f"seed={seed}: choose 0 or more, below 2**63")


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """Return the value that a command line gives to a flag, which `parse` will read too; None if it
    has none."""
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != flag:  # `parse` takes either in a flag
            continue
        if equals:
            return value
        is_last = index + 1 == len(arguments)
        return None if is_last else arguments[index + 1] or None
    return None


def joined(arguments: Sequence[str], flag: str) -> list[str]:
    """Return the words with `flag` and its value joined by "=": argparse takes no separate value
    that begins with hyphens."""
    words = list(arguments)
    if flag in words[:-1]:  # the last word has no value after it
        index = words.index(flag)
        value = words[index + 1]
        words[index : index + 2] = [f"{flag}={value}"]
    return words


def _help_registry(hidden: Collection[tuple[type, str]]) -> ConstructorRegistry:
    """Return tyro's rules for dataclasses, with the line breaks of field docstrings removed: tyro
    keeps those of the source.

    `hidden` fields, each a class and a name, are left out of the help, and not parsed.
    """
    registry = ConstructorRegistry()
    is_asking = False

    @registry.struct_rule
    def as_shown(info: StructTypeInfo) -> StructConstructorSpec | None:
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

    def one_line() -> str:
        """Return the help text."""
        lines = text() if callable(text) else text
        return " ".join((lines or "").split())

    return one_line


def _nearest(word: str, flags: list[str]) -> str:
    """Return ", did you mean --X?" for a flag whose name ends like an unknown one, else for the one
    that is most like it; without a dash, only for a flag that is given as field=value."""
    import difflib

    given, _, value = word.partition("=")
    name = given.lstrip("-").replace("_", "-")
    names = [flag.lstrip("-") for flag in flags]
    if not word.startswith("-"):  # refusals name the field, not the flag
        return f", did you mean --{name} {value}?" if value and name in names else ""
    last_part = name.rpartition(".")[2]
    # --top-k is meant for --model.moe.top-k
    near = [each for each in names if each.rpartition(".")[2] == last_part]
    if not near:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f", did you mean --{near[0]}?" if near else ""


def _unusual(kind: Any, usual: Sequence[str], prefix: str = "--") -> set[tuple[type, str]]:
    """Return the fields, each a class and a name, of which and in which no flag is in `usual`;
    `prefix` is what the flags of the dataclass begin with."""
    unusual = set()
    hints = get_type_hints(kind)
    for field in fields(kind):
        flag = prefix + field.name.replace("_", "-")
        # the dots tell --model from --model-name, and match --model with --model.dim
        if not any(f"{name}.".startswith(f"{flag}.") for name in usual):
            unusual.add((kind, field.name))
        elif is_dataclass(hints[field.name]):
            unusual |= _unusual(hints[field.name], usual, prefix=f"{flag}.")
    return unusual


def _flags(kind: Any, prefix: str = "--") -> list[str]:
    """Return the flags of a dataclass and of those in it."""
    flags = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        flag = prefix + field.name.replace("_", "-")
        if is_dataclass(hints[field.name]):
            flags += _flags(hints[field.name], f"{flag}.")
        else:
            flags.append(flag)
    return flags


def _with_advice(message: str, kind: Any, prog: str) -> str:
    """Return tyro's message about a command line, with the usage where something is missing, and
    with the nearest choice where a value is none of the choices."""
    wrong_choice = re.match(
        r"invalid choice '(.*)' for argument '(.*?)'\. Expected one of \(", message
    )
    if wrong_choice:
        value, flag = wrong_choice.groups()
        choices = re.findall(r"'([^']*)'", message[wrong_choice.end() :])
        if "None" in choices:  # of a set, in any order
            choices = sorted({*choices} - {"None"})
        return f"{flag} {value}{suggestion(value, choices)}"
    usage = f"{prog} {_usage(kind)}; --help lists all"
    if message.startswith("Missing from "):
        return f"needs {_usage(kind)}: {usage}"
    missing_value = re.match(r"Missing value for argument '(\w+)'", message)
    if missing_value:  # tyro's name of a value that is given by its place
        return f"{missing_value[1]} is no flag, write it alone: {usage}"
    return message


def _usage(kind: Any) -> str:
    """Return the words that a command line needs: values by their place, and required flags."""
    words = []
    _, positional = get_args(tyro.conf.Positional[str])  # (str, the mark of such a field)
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        marks = getattr(hints[field.name], "__metadata__", ())  # those of Annotated
        metavars = [mark.metavar for mark in marks if getattr(mark, "metavar", None)]
        value_name = metavars[0] if metavars else field.name.upper()
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if positional in marks:
            words.append(value_name)
        elif not has_default:
            words.append(f"--{field.name.replace('_', '-')} {value_name}")
    return " ".join(words)


def _refusal_of(stop: SystemExit, box: str, kind: Any, prog: str) -> InputError:
    """Return the InputError of the dataclass that made tyro stop, since tyro's frame would break
    its lines; else one with the message that tyro has printed in a frame, `box`."""
    error = stop.__context__
    while error is not None and not isinstance(error, InputError):
        error = error.__context__
    if error is not None:
        return error
    return InputError(_with_advice(_one_line(box), kind, prog))


def _one_line(box: str) -> str:
    """Return the text of a framed tyro message without the frame (lines, or hyphens in ASCII),
    headings and help."""
    colours_and_frame = r"\x1b\[[0-9;]*m|[─-╿]+|-{3,}"
    words = re.sub(colours_and_frame, " ", box)
    words = re.sub(r"\s+", " ", words).strip()
    words = re.split(r" (?:Argument helptext:|For full helptext)", words)[0]

    # of a value with several types, the last one and the value: int: 'x'
    words = re.sub(
        r"no type matching .* instantiated from \['(.*?)'\]\. Got errors: .*(int|float)\b.*",
        r"\2: '\1'",
        words,
    )

    # what Python says of a value that is no number
    words = re.sub(
        r"(invalid literal for )?int(\(\) with base 10)?: '", "not a whole number: '", words
    )
    words = re.sub(r"(could not convert string to )?float: '", "not a number: '", words)
    words = re.sub(
        r"^(Parsing error|Value error|Invalid choice|Required options|Missing argument) ", "", words
    )
    return re.sub(r"^Error parsing ", "", words)
