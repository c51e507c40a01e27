"""Lets every write of a process fail, or take place, as a function decides: whichever language
issues it.

A filter of the kernel (seccomp) stops the process at each system call that writes, and asks the
process that started it. Python's own files, the Rust of safetensors and tokenizers and the C++ of
torch are all seen, and so are ranks that the process starts. Linux only; no rights are needed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from moesaic.errors import InputError


@dataclass(frozen=True)
class _Call:
    """A system call that writes."""

    name: str
    descriptor: int | None = None
    """Which argument is the file descriptor of what is written."""
    path: int | None = None
    """Which argument is the path of what is written."""
    folder: int | None = None
    """Which argument is the folder that a path is relative to; None for the working directory."""
    flags: int | None = None
    """Which argument is the flags of an open, which writes if it may create a file."""


WRITE = _Call("write", descriptor=0)
CALLS: Mapping[str, Mapping[int, _Call]] = {
    "x86_64": {
        1: WRITE,
        18: WRITE,
        20: WRITE,
        296: WRITE,
        328: WRITE,
        326: _Call("copy", descriptor=2),
        40: _Call("copy", descriptor=0),
        285: _Call("allocate", descriptor=0),
        77: _Call("truncate", descriptor=0),
        74: _Call("flush", descriptor=0),
        75: _Call("flush", descriptor=0),
        2: _Call("create", path=0, flags=1),
        85: _Call("create", path=0),
        257: _Call("create", path=1, folder=0, flags=2),
        83: _Call("mkdir", path=0),
        258: _Call("mkdir", path=1, folder=0),
        82: _Call("rename", path=1),
        264: _Call("rename", path=3, folder=2),
        316: _Call("rename", path=3, folder=2),
    },
    "aarch64": {
        64: WRITE,
        66: WRITE,
        68: WRITE,
        70: WRITE,
        287: WRITE,
        285: _Call("copy", descriptor=2),
        71: _Call("copy", descriptor=0),
        47: _Call("allocate", descriptor=0),
        46: _Call("truncate", descriptor=0),
        82: _Call("flush", descriptor=0),
        83: _Call("flush", descriptor=0),
        56: _Call("create", path=1, folder=0, flags=2),
        34: _Call("mkdir", path=1, folder=0),
        38: _Call("rename", path=3, folder=2),
        276: _Call("rename", path=3, folder=2),
    },
}
"""By processor and number: every system call by which a file or a folder is written."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SECCOMP = {"x86_64": 317, "aarch64": 277}
NOTIFY = 0x7FC00000
ALLOW = 0x7FFF0000
RECEIVE = 0xC0502100
ANSWER = 0xC0182101
CONTINUE = 1
NO_NEW_PRIVILEGES = 38
SET_FILTER = 1
NEW_LISTENER = 8
"""Numbers of the kernel's interface: linux/seccomp.h, linux/audit.h, linux/prctl.h."""
LOAD = 0x20
EQUALS = 0x15
ANY_BIT = 0x45
RETURN = 0x06
"""Instructions of a filter: linux/bpf_common.h."""
STREAMS = ("", "standard output", "standard error")
HERE = -100
"""The number that stands for the working directory in place of a folder's descriptor."""


@dataclass(frozen=True)
class Write:
    """A system call by which a process is about to write."""

    number: int
    """Its place among all writes of the process and of those that it started, from 1."""
    call: str
    """create, write, truncate, flush, mkdir, rename ..."""
    path: str
    """The absolute path of what is written, or one of `STREAMS`."""
    process: int
    """The thread that writes."""

    def __str__(self) -> str:
        """Return which write it is, in words."""
        return f"{self.call} {self.path}"


@dataclass(frozen=True)
class Watched:
    """How a watched process ended."""

    code: int | None
    """Its exit code, minus a signal's number if that ended it; None if it had no end."""
    writes: tuple[Write, ...]
    """All writes, in their order."""


def require_watching() -> None:
    """Raise InputError if this system cannot watch the writes of a process."""
    needs = "/proc/sys/kernel/seccomp/actions_avail"
    with suppress(OSError):
        if platform.machine() in CALLS and "user_notif" in Path(needs).read_text(encoding="ascii"):
            return
    raise InputError("needs Linux 5.5 or later on x86-64 or aarch64, for seccomp's user_notif")


def can_watch() -> bool:
    """Return whether this system can watch the writes of a process."""
    try:
        require_watching()
    except InputError:
        return False
    return True


def watched(
    child: Callable[[], int], decide: Callable[[Write], int], most_seconds: float
) -> Watched:
    """Fork a process that runs a function, and decide on each of its writes; must be called in a
    process of a single thread.

    Args:
        child: returns the exit code.
        decide: gets a write and returns the number of the error with which it fails, or 0 to let
            it take place. It may also send a signal.
        most_seconds: after so much time in which the process takes processor time, or writes
            nothing, it has no end, and is killed.
    """
    # Over this pair the child sends the descriptor on which the kernel asks.
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        _become(child, theirs)
    theirs.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    ours.close()
    if not descriptors:
        os.waitpid(process, 0)
        raise OSError(errno.ENOSYS, "the kernel refuses to watch a process")
    (listener,) = descriptors
    try:
        return _attend(listener, process, decide, most_seconds)
    finally:
        os.close(listener)


def _become(child: Callable[[], int], line: socket.socket) -> NoReturn:
    """Run a function in this process under a filter whose listener is sent over a line; does not
    return."""
    code = 1
    try:
        os.setpgid(0, 0)  # so that all that it starts can be ended with it
        listener = _install()
        socket.send_fds(line, [b"\0"], [listener])
        os.close(listener)
        line.close()
        code = child()
    finally:
        os._exit(code)


def _install() -> int:
    """Install the filter in this thread and in all that it will start; return the descriptor of
    its listener.

    An instruction is (operation, instructions to skip if true, if false, value). The data that it
    loads from is the kernel's struct seccomp_data: the call's number at byte 0, the architecture at
    4, the arguments of 8 bytes each from 16.
    """
    calls = CALLS[platform.machine()]
    code = [
        (LOAD, 0, 0, 4),
        (EQUALS, 1, 0, ARCHITECTURES[platform.machine()]),
        (RETURN, 0, 0, ALLOW),  # of another architecture, e.g. 32 bits
        (LOAD, 0, 0, 0),
    ]
    for number, call in calls.items():
        if call.flags is None:
            code += [(EQUALS, 0, 1, number), (RETURN, 0, 0, NOTIFY)]
        else:
            flags = 16 + 8 * call.flags
            code += [
                (EQUALS, 0, 4, number),
                (LOAD, 0, 0, flags),
                (ANY_BIT, 1, 0, os.O_CREAT | os.O_TRUNC),
                (RETURN, 0, 0, ALLOW),
                (RETURN, 0, 0, NOTIFY),
            ]
    code.append((RETURN, 0, 0, ALLOW))

    # struct sock_filter for each instruction, and struct sock_fprog: their number and address.
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(packed)))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    listener: int = library.syscall(
        SECCOMP[platform.machine()], SET_FILTER, NEW_LISTENER, ctypes.byref(program)
    )
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return listener


def _attend(
    listener: int, process: int, decide: Callable[[Write], int], most_seconds: float
) -> Watched:
    """Answer the questions of a process and of all that it starts, until it has ended."""
    calls = CALLS[platform.machine()]
    library = ctypes.CDLL(None, use_errno=True)
    question = ctypes.create_string_buffer(80)  # struct seccomp_notif
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    writes: list[Write] = []
    alive = _Alive(process, most_seconds)
    while True:
        ready = poll.poll(50)  # milliseconds
        has_question = any(event & select.POLLIN for _, event in ready)
        if not has_question:
            code = alive.ended()
            if code is not None or alive.has_no_end():
                break
            if ready:  # all threads have ended: the process is about to
                time.sleep(0.002)
            continue
        ctypes.memset(question, 0, 80)
        if library.ioctl(listener, RECEIVE, question):
            continue  # a signal has interrupted the call
        identity, thread, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", question.raw)
        failure = 0
        path = _path(thread, calls[number], arguments)
        if path is not None:
            alive.moved()
            writes.append(Write(len(writes) + 1, calls[number].name, path, thread))
            failure = decide(writes[-1])
        # struct seccomp_notif_resp: the call fails with an error, or takes place.
        answer = struct.pack("=QqiI", identity, 0, -failure, 0 if failure else CONTINUE)
        library.ioctl(listener, ANSWER, ctypes.create_string_buffer(answer))
    _end(process, has_ended=code is not None)
    return Watched(code, tuple(writes))


class _Alive:
    """Whether a process has ended, or will not."""

    def __init__(self, process: int, most_seconds: float) -> None:
        self._process = process
        self._most_seconds = most_seconds
        self._used = 0.0
        self.moved()

    def moved(self) -> None:
        """Note that the process does something."""
        self._since = time.monotonic()

    def ended(self) -> int | None:
        """Return the exit code; None while the process lives."""
        found, status = os.waitpid(self._process, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None

    def has_no_end(self) -> bool:
        """Return whether it takes too much processor time, or takes none for too long."""
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{self._process}/stat").read_text(encoding="ascii", errors="replace")
            # Behind the name in parentheses, 11 and 12 are the ticks in user and in kernel mode.
            fields = stat.rpartition(")")[2].split()
            used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            if used > self._used:
                self._used = used
                self.moved()
        waited = time.monotonic() - self._since
        return self._used > self._most_seconds or waited > self._most_seconds


def _end(process: int, *, has_ended: bool) -> None:
    """Kill what is left of a process and of all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if not has_ended:
        os.waitpid(process, 0)


def _path(thread: int, call: _Call, arguments: Sequence[int]) -> str | None:
    """Return what a call is about to write; None for what is no file: a socket, a device."""
    try:
        if call.descriptor is not None:
            return _open_file(thread, arguments[call.descriptor])
        assert call.path is not None
        name = _text(thread, arguments[call.path])
        # An argument has 64 bits; a descriptor is their lower half, with a sign.
        number = HERE if call.folder is None else ctypes.c_int(arguments[call.folder]).value
        folder = f"/proc/{thread}/cwd" if number == HERE else f"/proc/{thread}/fd/{number}"
        path = os.path.normpath(os.path.join(os.readlink(folder), name))
    except OSError:  # the process has been killed meanwhile
        return None
    is_there = call.name == "mkdir" and os.path.isdir(path)  # then nothing is made
    return None if is_there or path.startswith(("/dev/", "/proc/", "/sys/")) else path


def _open_file(thread: int, descriptor: int) -> str | None:
    """Return the path of an open file, or which stream it is; None for anything else."""
    path = os.readlink(f"/proc/{thread}/fd/{descriptor}")
    if descriptor in (1, 2) and path != os.devnull:
        return STREAMS[descriptor]
    is_file = path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/", "/memfd:"))
    return path.removesuffix(" (deleted)") if is_file else None


def _text(thread: int, address: int) -> str:
    """Return a text in the memory of a thread."""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        found = b""
        while b"\0" not in found and len(found) < 8192:
            # a page at a time, since what follows it may not be there
            size = 4096 - (address + len(found)) % 4096
            found += os.pread(memory.fileno(), size, address + len(found))
    return os.fsdecode(found.partition(b"\0")[0])
