"""The figures of the house: each notices in a small made-up package what it is there to notice. The house may only shrink."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from import_graph import package
from moesaic_lab import house

ROOT = Path(__file__).resolve().parents[2]
RATCHET = {
    "code_lines": 33_112, "code_lines_with_lab": 51_534, "lab_code_lines": 17_817, "tests_code_lines": 36_708,
    "statements": 34_463, "formatter_off": 382, "path_frames": 9, "path_files": 25, "path_returns": 2,
    "names_with_two_meanings": 9,
}  # fmt: skip
"""What the figures may be at most today. They may only fall: lower a number when its figure falls."""


def test_a_class_name_in_two_files_has_two_meanings(tmp_path: Path) -> None:
    rooms = package(
        tmp_path,
        a="class Job: ...\nclass _Row: ...\n",
        b="class Job: ...\nclass _Row: ...\nclass Other: ...\n",
    )
    assert house.names_with_two_meanings(sorted(rooms.rglob("*.py"))) == {
        "Job": ["rooms/a.py", "rooms/b.py"]
    }


@pytest.mark.parametrize(
    ("b", "returns"),
    [
        ("def g(x):\n    return x\n", []),
        ("from rooms import a\ndef g(x):\n    return a.h({'rows': x})\n", ["a.py h"]),
        ("from rooms import a\ndef g(x):\n    return a.h('nothing')\n", []),
    ],
)
def test_tokens_that_come_back_to_a_file_are_a_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, b: str, returns: list[str]
) -> None:
    rooms = package(
        tmp_path,
        a="def f(x):\n    from rooms import b\n    h(x)\n    b.g(x)\ndef h(y):\n    return y\n",
        b=b,
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("rooms", "rooms.a", "rooms.b"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    start = importlib.import_module("rooms.a").f
    importlib.import_module("rooms.b")
    trace = house.PathTrace(rooms, lambda value: value == 1.5)
    sys.setprofile(trace)
    start(1.5)
    sys.setprofile(None)
    assert trace.files == ["a.py", "b.py"]
    assert trace.steps == ["a.py f", "b.py g", *returns]
    assert trace.returns == returns


def test_lines_of_code_are_those_that_do_something(tmp_path: Path) -> None:
    text = (
        '"""A module\nof two lines."""\n\nimport os  # one\n\n# a comment\nX = (\n    1,\n)  # fmt'
        + ': skip\n"""A constant."""\n'
    )
    (tmp_path / "a.py").write_text(text)
    assert house.FileSize.of(tmp_path / "a.py") == house.FileSize(
        lines=3, statements=4, formatter_off=1
    )


def test_the_figures_do_not_grow() -> None:
    rows = house.measure(ROOT)
    figures = {row["name"]: row["value"] for row in rows if row["what"] == "figure"}
    assert set(figures) == set(house.TARGETS) == set(RATCHET)
    assert {name: value for name, value in figures.items() if value > RATCHET[name]} == {}
    assert [(claim.name, claim.value) for claim in house.claims(rows)] == [
        (f"house.{n}", v) for n, v in figures.items()
    ]
    assert sum(row["lines"] for row in rows if row["what"] == "part") == figures["code_lines"]


def test_the_path_begins_at_the_layer_and_ends_at_the_wire() -> None:
    trace = house.trace_path(ROOT / "src" / "moesaic")
    assert trace.files[0] == house.LAYER
    assert any(name.startswith("comm/") for name in trace.files)
    assert trace.steps[0] == "layer.py forward"
    assert set(trace.returns) < set(trace.steps)
    assert trace.depth > 0
