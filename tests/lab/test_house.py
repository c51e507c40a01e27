"""The figures of the house: each of them notices in a small made-up package what it is there to notice."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from moesaic_lab import house

ROOT = Path(__file__).resolve().parents[2]


def package(folder: Path, **files: str) -> Path:
    """Write a package named `rooms`; `a__b` stands for a/b.py."""
    made = folder / "rooms"
    for name, text in files.items():
        path = made / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [made, *made.rglob("*")]:
        if path.is_dir():
            path.joinpath("__init__.py").touch()
    return made


def test_files_that_import_each_other_are_a_cycle_lazily_and_relatively_too(tmp_path: Path) -> None:
    rooms = package(
        tmp_path, a="def f():\n    from rooms import b\n", b="from .c import x\n", c="import rooms.a\nx = 1\n"
    )
    assert house.cycles(rooms) == [["rooms.a", "rooms.b", "rooms.c"]]


def test_folders_that_import_each_other_are_a_cycle_without_one_of_files(tmp_path: Path) -> None:
    rooms = package(tmp_path, one__a="from rooms.two.b import x\n", two__b="x = 1\n", two__c="import rooms.one.a\n")
    assert house.cycles(rooms) == [["rooms/one/", "rooms/two/"]]


def test_imports_downwards_are_no_cycle(tmp_path: Path) -> None:
    rooms = package(tmp_path, top="from rooms.one import a\n", one__a="from rooms.two.b import x\n", two__b="x = 1\n")
    assert house.cycles(rooms) == []


def test_a_class_name_in_two_files_has_two_meanings(tmp_path: Path) -> None:
    rooms = package(
        tmp_path, a="class Job: ...\nclass _Row: ...\n", b="class Job: ...\nclass _Row: ...\nclass Other: ...\n"
    )
    assert house.names_with_two_meanings(sorted(rooms.rglob("*.py"))) == {"Job": ["rooms/a.py", "rooms/b.py"]}


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
        tmp_path, a="def f(x):\n    from rooms import b\n    h(x)\n    b.g(x)\ndef h(y):\n    return y\n", b=b
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


def test_the_path_of_the_library_begins_at_the_layer_and_ends_at_the_wire() -> None:
    trace = house.trace_path(ROOT / "src" / "moesaic")
    assert trace.files[0] == "layer.py"
    assert any(name.startswith("comm/") for name in trace.files)
    assert trace.steps[0] == "layer.py __call__"
    assert set(trace.returns) < set(trace.steps)
    assert len(trace.files) <= house.TARGETS["path_files"]
    assert len(trace.returns) <= house.TARGETS["path_returns"]


def test_the_claims_are_what_was_counted() -> None:
    rows = house.measure(ROOT / "src" / "moesaic", [])
    claims = {claim.name.removeprefix("house."): claim for claim in house.claims(rows)}
    assert set(claims) == set(house.TARGETS)
    files = list((ROOT / "src" / "moesaic").rglob("*.py"))
    assert claims["wheel_files"].value == len(files) == sum(row["files"] for row in rows if row["what"] == "part")
    assert claims["wheel_lines"].value == sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert claims["python_lines"].value == claims["wheel_lines"].value
