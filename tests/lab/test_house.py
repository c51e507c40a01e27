"""The figures of the house: each notices in a small made-up source what it is there to notice."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic_lab import house
from rooms import package

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("source", "tokens", "lines"),
    [
        ("x = 1\n", 3, 1),
        (
            (
                '"""A module\nof two lines."""\n\n# a comment\nx = (\n    1,\n)  # one\n"""A '
                'constant."""\n'
            ),
            6,
            3,
        ),
        ('def f():\n    """Return it."""\n    return "text"\n', 7, 2),
        ("x = f(1,\n    'a'\n    'b'\n)\n", 7, 2),
        ("", 0, 0),
    ],
)
def test_tokens_of_code_are_those_that_do_something(source: str, tokens: int, lines: int) -> None:
    assert house.tokens_and_lines(source) == (tokens, lines)


@pytest.mark.parametrize(
    ("source", "is_parallel"),
    [
        ("a, b = x, y", True),
        ("a, b = b, a", True),
        ("self.a, b[0] = f(), (1, 2)", True),
        ("a, b = f()", False),
        ("a, *b = x, y", False),
        ("a = b = x, y", False),
        ("a = x, y", False),
    ],
)
def test_parallel_assignments_are_found(source: str, is_parallel: bool) -> None:
    assert house.is_parallel(ast.parse(source).body[0]) == is_parallel


@pytest.mark.parametrize(
    ("source", "is_long"),
    [
        ("f(1, 2, 3, 4, 5, 6, 7)", True),
        ("kernel[grid](1, 2, 3, 4, 5, *rest, 7)", True),
        ("f(1, 2, 3, 4, 5, 6, g=7)", False),
    ],
)
def test_calls_with_many_positional_arguments_are_found(source: str, is_long: bool) -> None:
    assert house.is_long_call(ast.parse(source, mode="eval").body) == is_long


def test_functions_of_more_than_60_lines_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def short():\n" + "    x = 1\n" * 59 + "def long():\n" + "    x = 1\n" * 60
    )
    assert house.long_functions(tmp_path / "a.py") == ["long"]


def test_modules_are_counted_in_a_new_process() -> None:
    assert house.modules_behind("import moesaic") == 2
    assert house.modules_behind("import moesaic.codecs") == 3


def test_files_are_traced_in_the_order_of_their_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = package(
        tmp_path,
        a="def f():\n    from rooms import b\n    b.g()\n",
        b="from rooms import c\ng = lambda: c.h()\n",
        c="def h():\n    pass\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("rooms", "rooms.a", "rooms.b", "rooms.c"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    start = importlib.import_module("rooms.a").f
    importlib.import_module("rooms.b")
    trace = house.PathTrace(rooms)
    sys.setprofile(trace)
    start()
    sys.setprofile(None)
    assert trace.files == ["a.py", "c.py"]


def test_the_path_begins_at_the_layer_and_ends_at_the_wire() -> None:
    trace = house.trace_path(ROOT / "src" / "moesaic")
    assert trace.files[0] == house.LAYER
    assert any(name.startswith("comm/") for name in trace.files)
    assert trace.depth > 1


def test_a_figure_above_its_maximum_is_a_claim_that_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "measure", lambda: {"tokens": 12, "path_files": 3})
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / house.MAXIMA).write_text("tokens = 11\npath_files = 3\n")
    most = house.maxima(tmp_path)
    monkeypatch.setattr(house, "maxima", lambda: most)
    assert main(["bench", "house"]) == 1
    claims = {claim.name: claim.holds for claim in house.claims(house._rows())}
    assert claims == {"house.tokens": False, "house.path_files": True}
    assert "house.tokens" in capsys.readouterr().out
