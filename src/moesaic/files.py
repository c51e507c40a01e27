"""Reads, writes, lists and deletes files of folders that somebody else may have made.

An archive or a clone may hold symbolic links, named pipes and devices in place of files. So only
regular files are read, with a limit of size where a file has one. Below the path that a user typed,
nothing is written, listed or deleted through a link: a link where a file is to be written is an
error that names it. `typed` says of a path that the user typed it, and a *kind* is what a path is,
in words: "a file", "a folder", "a symbolic link" and others.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from moesaic.errors import InputError, TrainingError

MOST_TEXT = 1 << 28
"""The most bytes of a text that is read whole: a configuration, an index, a tokenizer, a
receipt."""
WRITING = ".writing-"
"""How the names of files begin that are being written."""
READER_SECONDS = 5.0
"""How long a named pipe may wait for its reader."""
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
"""Flag of `os.open`: do not wait for the other end of a named pipe. These three are 0 where the
system has none."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
"""Flag of `os.open`: fail if the path is a link."""
_BINARY = getattr(os, "O_BINARY", 0)
"""Flag of `os.open`: keep line ends, on Windows."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(path: Path) -> str | None:
    """Return what a path is, without following a link: "a file", "a folder", "a symbolic link" ...;
    None if it is nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "a file")
    except (FileNotFoundError, NotADirectoryError):
        return None


def open_file(path: Path, *, at_most: int | None = None) -> BinaryIO:
    """Open a regular file for reading, at once: a named pipe or a device is refused instead of
    waited for.

    A link is followed, as the hub's cache consists of links.

    Args:
        at_most: the most bytes that such a file may have; None for any number.

    Raises:
        OSError: it cannot be opened, is not a regular file, or is larger.
    """
    descriptor = os.open(path, os.O_RDONLY | _AT_ONCE | _BINARY)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
        if at_most is not None and status.st_size > at_most:
            words = f"it has {status.st_size:,} bytes, and such a file at most {at_most:,}"
            raise OSError(errno.EFBIG, words, str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, *, at_most: int | None = None) -> bytes:
    """Return the contents of a regular file; see `open_file`.

    Raises:
        OSError: see `open_file`; or memory does not hold the contents.
    """
    with open_file(path, at_most=at_most) as file:
        try:
            return file.read()
        except MemoryError:
            size = os.fstat(file.fileno()).st_size
            words = f"it has {size:,} bytes, more than memory holds"
            raise OSError(errno.ENOMEM, words, str(path)) from None


def read_text(path: Path, *, at_most: int = MOST_TEXT) -> str:
    """Return the text of a regular file in UTF-8, with line ends as "\\n"; see `open_file`.

    Raises:
        OSError: see `open_file`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(path, at_most=at_most).decode("utf-8").replace("\r\n", "\n")


@contextmanager
def writing(path: Path, *, typed: bool = False) -> Iterator[BinaryIO]:
    """Write a file whole or not at all: into a new file beside it, flushed to disk, then renamed
    over the name.

    Args:
        typed: whether the user typed this path, which may then be a link, or lead to a pipe or a
            device, such as /dev/stdout and the shell's `>(command)`.

    Raises:
        InputError: `path` is a link, a folder or anything else but a file.
        OSError: it cannot be written; an earlier file at `path` is kept.
    """
    stream = _stream_at(path) if typed else None
    if stream is not None:  # a pipe or a device, which no new file may replace
        is_pipe = stream == "a named pipe"
        with os.fdopen(_opened_pipe(path), "wb") if is_pipe else path.open("wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path)) if typed else path
    kind = kind_of(path)
    if kind not in (None, "a file"):
        raise _refused(path, str(kind))
    # the new file; 255 is as long as a file's name may be
    aside = path.with_name(f"{WRITING}{secrets.token_hex(4)}-{path.name}"[:255])

    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | _BINARY, 0o666)
    try:
        with io.BufferedWriter(_Output(descriptor, str(aside))) as file:
            yield file
            file.flush()
            with _named(str(aside)):
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink()
        cause = system_error(error) if isinstance(error, Exception) else None
        # not an error of the new file, but one of the block, such as of a file that it reads
        if cause is None or cause.filename != str(aside):
            raise
        # with the name that a reader of the message knows
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def _stream_at(path: str | Path) -> str | None:
    """Return the kind of a pipe or a device that a path leads to, "a named pipe" or "a device";
    None if it leads to neither. /dev/fd/3 leads to a pipe that has no other name."""
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except OSError:
        return None
    return kind if kind in ("a device", "a named pipe") else None


def _opened_pipe(path: Path) -> int:
    """Open a named pipe for writing once somebody reads it, and return its descriptor; raises
    InputError if nobody does for `READER_SECONDS`."""
    deadline = time.monotonic() + READER_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | _AT_ONCE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: nobody reads it
                raise
        else:
            os.set_blocking(descriptor, True)
            return descriptor
        if time.monotonic() > deadline:
            raise InputError(f"{path}: is a named pipe that nobody reads: start its reader first")
        time.sleep(0.05)


class _Output(io.FileIO):
    """A file whose errors have its name, so that those of other files are told from them."""

    def __init__(self, descriptor: int, path: str) -> None:
        super().__init__(descriptor, "wb")
        self._path = path

    def write(self, data: Any) -> int:
        with _named(self._path):
            return super().write(data)

    def close(self) -> None:
        with _named(self._path):
            super().close()


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Give the system's errors in the block the name of a file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def system_error(error: BaseException) -> OSError | None:
    """Return the system's error behind an exception of any library; None if there is none, or a
    line of ours says it already.

    torch raises another error while it handles the system's, and libraries in Rust say its number
    in their text alone.
    """
    current: BaseException | None = error
    while current is not None and not isinstance(current, (InputError, TrainingError)):
        if isinstance(current, OSError) and current.errno is not None:
            return current
        match = re.search(r"\(os error (\d+)\)", str(current))
        if match is not None:
            number = int(match[1])
            return OSError(number, os.strerror(number))
        # as Python prints a chain: what it was raised from, else what was handled meanwhile
        if current.__cause__ is not None:
            current = current.__cause__
        else:
            current = None if current.__suppress_context__ else current.__context__
    return None


def write(path: Path, data: str | bytes, *, typed: bool = False) -> None:
    """Write a file whole or not at all; see `writing`. Text becomes UTF-8."""
    with writing(path, typed=typed) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def put(source: Path, path: Path) -> None:
    """Give a file that is written already, in a new folder of the same file system, the name
    `path`, flushed to disk.

    Raises:
        InputError: `path` is a link, a folder or anything else but a file.
        OSError: it cannot get that name; an earlier file at `path` is kept.
    """
    require_place(path)
    descriptor = os.open(source, os.O_RDWR | _NO_LINK | _BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(source, path)


def leftovers(path: Path) -> list[Path]:
    """Return the unfinished files that processes which were killed as they wrote `path` have left
    beside it."""
    random_part = "[0-9a-f]" * 8  # the 4 bytes of `writing` in hexadecimal
    return entries(path.parent, f"{WRITING}{random_part}-{path.name}", typed=True)


def open_to_append(path: Path, mode: str = "ab") -> IO[bytes]:
    """Open a file, made if missing, to append to it without a buffer ("ab"), or to read it too
    ("a+b").

    Raises:
        InputError: it is a link, has another name elsewhere (a hard link), or is anything else but
            a file.
        OSError: it cannot be opened.
    """
    access = os.O_RDWR if "+" in mode else os.O_WRONLY
    flags = access | os.O_APPEND | os.O_CREAT | _NO_LINK | _AT_ONCE | _BINARY
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        kind = kind_of(path)
        if kind in (None, "a file"):  # what may be opened: the error is the system's
            raise
        raise _refused(path, str(kind)) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        kind = _KINDS.get(
            stat.S_IFMT(status.st_mode), "a hard link, whose other name would change too"
        )
        raise _refused(path, kind)
    return os.fdopen(descriptor, mode, buffering=0)


def folder_below(path: Path) -> Path:
    """Return a folder below the path that a user typed, made if missing.

    Raises:
        InputError: it is a link, or no folder.
        OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir()
    kind = kind_of(path)
    if kind == "a file":
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if kind != "a folder":
        raise _refused(path, str(kind))
    return path


def entries(folder: Path, pattern: str = "*", *, typed: bool = False) -> list[Path]:
    """Return what a folder holds and matches a pattern, sorted by name: files and folders that are
    really there, no links.

    Args:
        folder: the folder; nothing is listed if it is missing.
        pattern: a glob pattern without separators.
        typed: whether the user typed this path, which may then be a link.

    Raises:
        InputError: the folder is a link.
    """
    if not typed:
        refuse_link(folder)
    return sorted(path for path in folder.glob(pattern) if kind_of(path) in ("a file", "a folder"))


def refuse_link(path: Path) -> None:
    """Raise InputError if a path is a link."""
    if kind_of(path) == "a symbolic link":
        raise _refused(path, "a symbolic link")


def require_writable(path: str | Path | None, flag: str, *, makes_parents: bool = False) -> None:
    """Raise InputError if nothing can be written to a path that a user typed: before the work whose
    result goes there.

    Args:
        path: a file or a folder to write, which need not exist; None for none.
        flag: what the message calls it.
        makes_parents: whether missing folders above it are made.
    """
    if path is None:
        return
    if _stream_at(path) is not None:
        return
    target = Path(os.path.realpath(path))
    folder = target if target.is_dir() else target.parent
    while makes_parents and not os.path.lexists(folder):
        folder = folder.parent
    try:  # since permissions alone do not tell
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        raise InputError(
            f"{flag} {path}: cannot be written ({reason}): choose another {flag}"
        ) from error


def require_place(path: Path, wanted: str = "a file") -> None:
    """Raise InputError if a path is neither nothing nor of the wanted kind, "a file" or "a
    folder"."""
    kind = kind_of(path)
    if kind not in (None, wanted):
        raise _refused(path, kind)


def _refused(path: Path, kind: str) -> InputError:
    """Return the error for something else where a file or a folder of ours should be."""
    return InputError(
        f"{str(path)!r}: is {kind}: nothing is written, listed or deleted through it: take it "
        "away, or choose another place"
    )
