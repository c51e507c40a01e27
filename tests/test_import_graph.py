"""Cycles of imports are found in small made-up packages: lazily, relatively, and between
folders."""

from __future__ import annotations

from pathlib import Path

from moesaic_lab.import_graph import cycles, upward
from rooms import package


def test_files_that_import_each_other_are_a_cycle_lazily_and_relatively_too(tmp_path: Path) -> None:
    rooms = package(
        tmp_path,
        a="def f():\n    from rooms import b\n",
        b="from .c import x\n",
        c="import rooms.a\nx = 1\n",
    )
    assert cycles(rooms) == [["rooms.a", "rooms.b", "rooms.c"]]


def test_folders_that_import_each_other_are_a_cycle_without_one_of_files(tmp_path: Path) -> None:
    rooms = package(
        tmp_path,
        one__a="from rooms.two.b import x\n",
        two__b="x = 1\n",
        two__c="import rooms.one.a\n",
    )
    assert cycles(rooms) == [["rooms/one/", "rooms/two/"]]


def test_imports_downwards_are_no_cycle(tmp_path: Path) -> None:
    rooms = package(
        tmp_path,
        top="from rooms.one import a\n",
        one__a="from rooms.two.b import x\n",
        two__b="x = 1\n",
    )
    assert cycles(rooms) == []


def test_a_string_that_is_imported_closes_a_cycle(tmp_path: Path) -> None:
    rooms = package(
        tmp_path,
        a="from importlib import import_module\ndef f():\n    import_module('rooms.b')\n",
        b="import rooms.a\n",
    )
    assert cycles(rooms) == [["rooms.a", "rooms.b"]]


def test_an_import_of_a_later_part_is_upward(tmp_path: Path) -> None:
    rooms = package(
        tmp_path, first="def f():\n    import rooms.last.x\n", last__x="from rooms import first\n"
    )
    assert upward(rooms, ("first", "last")) == ["first.py imports last"]
    assert upward(rooms, ("last", "first")) == ["last/x.py imports first"]
