"""`moesaic.files`: nothing is written, listed or deleted through a link, and only regular files are
read."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from helpers import refused
from moesaic import files
from moesaic.errors import InputError
from moesaic.files import (
    entries,
    folder_below,
    kind_of,
    open_file,
    open_to_append,
    read_bytes,
    read_text,
    require_writable,
    system_error,
    write,
    writing,
)


def as_folder(path: Path) -> None:
    path.mkdir()


def as_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)
    os.chdir(here)


ODD: dict[str, Callable[[Path], None]] = {
    "a folder": as_folder,
    "a symbolic link": lambda path: path.symlink_to(path.with_name("outside")),
    "a named pipe": os.mkfifo,
    "a socket": as_socket,
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_a_file_is_neither_written_nor_appended_to(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    path = tmp_path / "metrics.jsonl"
    outside.write_text("mine")
    ODD[kind](path)
    assert kind_of(path) == kind
    for attempt in (lambda: write(path, "theirs"), lambda: open_to_append(path)):
        assert re.search(rf"metrics.jsonl': is {kind}: ", refused(attempt))
    assert outside.read_text() == "mine"
    assert kind_of(path) == kind
    assert {each.name for each in tmp_path.iterdir()} == {"outside", "metrics.jsonl"}


def test_a_hard_link_is_not_appended_to_and_loses_its_other_name_when_written(
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    path = tmp_path / "metrics.jsonl"
    outside.write_text("mine")
    path.hardlink_to(outside)
    assert "a hard link" in refused(open_to_append, path)
    write(path, "theirs")
    assert (outside.read_text(), path.read_text()) == ("mine", "theirs")


@pytest.mark.parametrize("kind", ["a folder", "a named pipe"])
def test_only_files_are_read_and_none_is_waited_for(kind: str, tmp_path: Path) -> None:
    ODD[kind](tmp_path / "config.json")
    with pytest.raises(OSError, match=f"it is {kind}, not a file"):
        read_text(tmp_path / "config.json")


def test_devices_are_not_read_even_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="it is a device, not a file"):
        open_file(tmp_path / "config.json")


def test_links_to_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("text\r\n")
    (tmp_path / "config.json").symlink_to("blob")
    assert read_text(tmp_path / "config.json") == "text\n"


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"x" * 11)
    assert read_text(tmp_path / "config.json", at_most=11) == "x" * 11
    with pytest.raises(OSError, match="it has 11 bytes, and such a file at most 10"):
        read_text(tmp_path / "config.json", at_most=10)


def test_a_file_larger_than_memory_is_refused_with_its_size(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(OSError, match=r"it has 8,796,093,022,208 bytes, more than memory"):
        read_bytes(tmp_path / "file")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write(path, "old")

    def fail() -> None:
        with writing(path) as file:
            file.write(b"new, cut")
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert path.read_text() == "old"
    write(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_an_error_of_an_input_keeps_its_name_while_an_output_is_written(tmp_path: Path) -> None:
    unnamed = OSError(errno.EIO, "Input/output error")  # as read() raises it
    named = OSError(errno.EIO, "Input/output error", "input.txt")
    for error in (unnamed, named):
        with pytest.raises(OSError, match="Input/output") as found, writing(tmp_path / "out"):
            raise error
        assert found.value is error


def save_by_library(file: BinaryIO) -> None:
    """Write as a library that raises an error of its own."""
    try:
        file.write(b"text" * 10)
        file.flush()
    except OSError:
        raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904


def test_an_error_of_an_output_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "out"
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output") as found:
        write(path, "text")
    assert found.value.filename == str(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="too large") as found:
            write(path, "text" * 10)
        with pytest.raises(OSError, match="too large") as behind, writing(path) as file:
            save_by_library(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [found.value.filename, behind.value.filename] == [str(path)] * 2
    assert list(tmp_path.iterdir()) == []


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "a", "")
        open_to_append(tmp_path / "b").close()
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [0o640, 0o640]


def test_a_path_that_a_user_typed_may_be_a_link_or_a_device(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write(tmp_path / "link.json", "new", typed=True)
    assert (tmp_path / "real.json").read_text() == "new"
    assert kind_of(tmp_path / "link.json") == "a symbolic link"
    write(Path(os.devnull), "anything", typed=True)
    assert kind_of(Path(os.devnull)) == "a device"


def test_a_pipe_is_written_to_its_reader_and_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READER_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    text = refused(write, tmp_path / "pipe", b"text", typed=True)
    assert text.endswith("pipe: is a named pipe that nobody reads: start its reader first")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(tmp_path / "pipe", b"text", typed=True)
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)


@pytest.mark.parametrize("named", ["/dev/fd/{}", "{folder}/link"])
def test_a_pipe_without_a_name_is_written(named: str, tmp_path: Path) -> None:
    """As of the shell's `>(command)`."""
    reader, writer = os.pipe()
    path = Path(named.format(writer, folder=tmp_path))
    if path.name == "link":
        path.symlink_to(f"/dev/fd/{writer}")
    require_writable(path, "--out")
    write(path, b"text", typed=True)
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    os.close(writer)


def test_folders_below_are_made_and_are_no_links(tmp_path: Path) -> None:
    assert folder_below(tmp_path / "routing").is_dir()
    assert folder_below(tmp_path / "routing").is_dir()
    (tmp_path / "checkpoints").symlink_to("routing")
    assert "checkpoints': is a symbolic link" in refused(folder_below, tmp_path / "checkpoints")


def test_links_are_neither_entries_nor_folders_with_entries(tmp_path: Path) -> None:
    real = tmp_path / "real"
    for name in ("step-2", "step-1", "other"):
        write(folder_below(real) / name, "")
    (real / "step-3").symlink_to("other")
    assert [path.name for path in entries(real, "step-*")] == ["step-1", "step-2"]
    assert entries(tmp_path / "missing") == []
    (tmp_path / "link").symlink_to("real")
    assert "link': is a symbolic link" in refused(entries, tmp_path / "link")
    assert [path.name for path in entries(tmp_path / "link", "step-*", typed=True)] == [
        "step-1",
        "step-2",
    ]


def test_the_error_of_the_system_is_found_behind_that_of_a_library(tmp_path: Path) -> None:
    said_twice = RuntimeError("unexpected pos 704 vs 598")
    said_twice.__context__ = OSError(errno.ENOSPC, "No space left on device")
    in_rust = Exception("I/O error: Input/output error (os error 5)")
    found = [system_error(each) for each in (said_twice, in_rust, ValueError("x"))]
    assert [each and each.errno for each in found] == [errno.ENOSPC, errno.EIO, None]
    ours = InputError("data.json: cannot be read: fetch it again")
    ours.__cause__ = OSError(errno.EIO, "Input/output error")
    assert system_error(ours) is None
    with pytest.raises(InputError, match="fetch it again"), writing(tmp_path / "a"):
        raise ours
    assert list(tmp_path.iterdir()) == []
