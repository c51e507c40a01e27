"""Cycles of imports are found in small made-up packages: lazily, relatively, and between folders."""

from __future__ import annotations

from pathlib import Path

from import_graph import cycles, package


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
