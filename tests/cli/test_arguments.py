"""Command lines become dataclasses, and every refusal one line, whatever the terminal can draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
import tyro

from helpers import refused
from moesaic.cli.arguments import _one_line, parse
from moesaic.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Nested."""

    kind: Literal["a", "b"] = "a"
    """One of two."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to do."""

    count: int = 1
    """How many."""
    system: Literal["megatron", "torchtitan"] | None = None
    """Whose flags."""
    inner: Inner = field(default_factory=Inner)
    """More."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(
                f"count={self.count} in {'a' * 50} {'b' * 50} {'c' * 50}: must be at least 1"
            )


def options(*words: str, default: Options | None = None, taken: tuple[str, ...] = ()) -> Options:
    return parse(Options, words, prog="moesaic do", description="Do.", default=default, taken=taken)


def test_flags_override_the_default():
    assert options() == Options()
    assert options("--count", "3", "--inner.kind=b") == Options(count=3, inner=Inner(kind="b"))
    assert options("--inner.kind", "b", default=Options(count=7)) == Options(
        count=7, inner=Inner(kind="b")
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cuont", "3"], "unknown argument --cuont, did you mean --count?; --help lists all"),
        (["count=3"], "unknown argument count=3, did you mean --count 3?; --help lists all"),
        (["word=3"], "unknown argument word=3; --help lists all"),
        (["--kind=b"], "unknown argument --kind=b, did you mean --inner.kind?; --help lists all"),
        (["--old_kind"], "unknown argument --old_kind; --help lists all"),
        (["--zzzzz"], "unknown argument --zzzzz; --help lists all"),
        (["word"], "unknown argument word; --help lists all"),
        (["count"], "unknown argument count; --help lists all"),
        (["--count"], "Missing value for argument '--count'. Expected 1 values."),
        (
            ["--count", "--inner.kind", "b"],
            "Missing value for argument '--count'. Expected 1 values.",
        ),
        (["--count", "x"], "--count: not a whole number: 'x'"),
        (["--inner.kind", "c"], "--inner.kind c: choose one of a, b"),
        (["--system", "megatrom"], "--system megatrom: did you mean megatron?"),
        (["--system", "x"], "--system x: choose one of megatron, torchtitan"),
        (["--count", "0"], f"count=0 in {'a' * 50} {'b' * 50} {'c' * 50}: must be at least 1"),
    ],
)
def test_refusals_are_one_line(words, message):
    assert refused(options, *words) == message


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What to do."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Where from."""
    out: Annotated[str, tyro.conf.Positional]
    """Where to."""
    to: str
    """Into what."""
    top: int = 1
    """How many."""


@pytest.mark.parametrize("words", [[], ["a"], ["a", "b"], ["--to", "hf"], ["a", "--to", "hf"]])
def test_a_line_that_lacks_something_is_told_the_usage(words):
    usage = "SOURCE OUT --to TO"
    assert refused(parse, Converted, words, prog="moesaic do", description="") == (
        f"needs {usage}: moesaic do {usage}; --help lists all"
    )


def test_a_value_that_has_its_place_is_no_flag():
    said = refused(parse, Converted, ["--source", "X"], prog="moesaic do", description="")
    assert said.startswith("source is no flag, write it alone: moesaic do SOURCE OUT --to TO")


def test_flags_that_the_command_has_read_before_are_suggested_too():
    with pytest.raises(InputError, match=r"^unknown argument --prset, did you mean --preset\?"):
        options("--prset", taken=("--preset",))


@pytest.mark.parametrize(
    "box",
    [
        (
            "╭─ Value error ───╮\n│ Error parsing --steps: no number: 'x' │\n│ ───── │\n│ "
            "Argument helptext: │\n│ --steps │\n"
        ),
        (
            " Value error  \n ------ \n  Error parsing --steps: no number: 'x' \n ------\n  "
            "Argument helptext: \n  --steps \n\n"
        ),
        (
            "\x1b[31m╭─\x1b[0m Value error ─╮\n│ Error parsing --steps:\n no number: 'x' │\n│ For "
            "full helptext, see --help │\n"
        ),
    ],
    ids=["lines", "ascii", "colours"],
)
def test_frames_are_taken_off(box):
    assert _one_line(box) == "--steps: no number: 'x'"


@dataclass(frozen=True, kw_only=True)
class Explained:
    """What to do."""

    count: int = 1
    """A text that is long enough to be written on two lines in the source, and whose
    second line continues the sentence."""
    inner: Inner = field(default_factory=Inner)
    """More."""


def test_help_texts_break_lines_where_the_terminal_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        parse(Explained, ["--help"], prog="moesaic do", description="Do.")
    printed = capsys.readouterr().out
    assert "in the source, and whose second line continues the sentence. (default: 1)" in printed
    assert "One of two." in printed


def test_the_short_help_leaves_out_what_is_unusual_and_the_flags_stay(capsys):
    def listed(flag):
        with pytest.raises(SystemExit):
            parse(Explained, [flag], prog="moesaic do", description="Do.", usual=("--count",))
        return capsys.readouterr().out

    assert "--count" in listed("--help")
    assert "--inner.kind" not in listed("--help")
    assert "--inner.kind" in listed("--help-all")
    given = ("--inner.kind", "b")
    assert parse(Explained, given, prog="do", description="", usual=("--count",)).inner.kind == "b"
    with pytest.raises(InputError, match=r"--help-all lists all$"):
        parse(Explained, ["--zzzzz"], prog="do", description="", usual=("--count",))
