"""Connects every pair of ranks over TCP.

Ranks tell each other where they listen through their process group. A random word keeps strangers out and shows that an
address led to the right process.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist

from moesaic.errors import InputError

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the network interface that a rank is reached by, as for Gloo."""

MASTER_VARIABLE = "MASTER_ADDR"
"""Whom the launcher told all ranks to meet; the interface that leads there leads to the others."""

TIMEOUT = 10.0
"""Seconds until an address that does not answer is given up."""

HELLO_TIMEOUT = 1.0
"""Seconds that somebody who calls has to say all of who it is."""

PATIENCE = 60.0
"""Seconds until every rank must have reached every other: some may be busy with addresses that lead nowhere."""

_HELLO = struct.Struct("<16sq")
"""The listener's word and the rank of who calls."""

_CALLERS = 64
"""Calls whose hello is not complete that are kept; a newer one takes the place of the oldest."""

_MUCH = 1 << 22
"""Bytes that a rank would like to have received before it asks for them."""

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class _Place:
    """Where a rank listens."""

    word: bytes
    """Random, shown by whoever calls and by whoever answers."""
    addresses: tuple[tuple[str, int], ...]
    """Hosts and ports under which other machines may reach it, likely ones first."""


@dataclass
class _Caller:
    """A connection whose hello is not complete."""

    end: float
    """When it is given up."""
    told: bytes = b""


def connect(group: dist.ProcessGroup) -> dict[int, socket.socket]:
    """Return a connected socket for every other rank; all ranks call this together.

    Args:
        group: the process group of all ranks.

    Returns:
        sockets by rank.

    Raises:
        InputError: on every rank, if some pair of ranks could not be connected.
    """
    rank, world = group.rank(), group.size()
    lines: dict[int, socket.socket] = {}
    problem: str | None = None
    with ExitStack() as open_here:
        place, listeners = _listen(world, open_here)
        places: list[_Place | None] = [None] * world
        dist.all_gather_object(places, place, group=group)
        try:
            _call_and_answer(places, rank, listeners, lines)
        except OSError as error:
            problem = str(error)
        problems: list[str | None] = [None] * world
        dist.all_gather_object(problems, problem, group=group)
    if any(problems):
        for line in lines.values():
            line.close()
        peer, text = next((peer, text) for peer, text in enumerate(problems) if text)
        raise InputError(
            f"transport=sockets cannot connect rank {peer}: {text}: set {INTERFACE_VARIABLE} to the network interface that all "
            "ranks reach, or choose transport=gloo"
        )
    return lines


def _listen(world: int, open_here: ExitStack) -> tuple[_Place | None, list[socket.socket]]:
    """Return where this rank listens, only on addresses that others are told; nothing where it cannot."""
    listeners: list[socket.socket] = []
    for host in dict.fromkeys(_hosts()):
        with suppress(OSError, UnicodeError):  # the latter of a host's name
            listener = open_here.enter_context(socket.create_server((host, 0), backlog=world))
            listener.setblocking(False)
            listeners.append(listener)
    if not listeners:
        return None, listeners
    addresses = tuple((each.getsockname()[0], each.getsockname()[1]) for each in listeners)
    return _Place(secrets.token_bytes(16), addresses), listeners


def _call_and_answer(
    places: Sequence[_Place | None], rank: int, listeners: Sequence[socket.socket], lines: dict[int, socket.socket]
) -> None:
    """Call all ranks before this one, then answer those after it; raises OSError where one cannot be reached in time."""
    silent = [peer for peer, place in enumerate(places) if place is None]
    if silent:
        raise OSError(f"rank {silent[0]} has no address to listen on")
    end = time.monotonic() + PATIENCE
    known = [place for place in places if place is not None]
    for peer, there in enumerate(known[:rank]):
        lines[peer] = _call(there, rank, end)
    _answer(known[rank].word, listeners, range(rank + 1, len(places)), lines, end)


def _hosts() -> list[str]:
    """Return the addresses to listen on: of the interface that was named, else towards the master and of its own name."""
    name = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name:
            with suppress(ImportError, OSError):
                import fcntl

                told = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(told[20:24]))
            return found
        with suppress(OSError):
            probe.connect((os.environ.get(MASTER_VARIABLE, "localhost"), 9))  # sends nothing
            found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return found


def _call(there: _Place, rank: int, end: float) -> socket.socket:
    """Connect to a rank that listens; raises OSError where none of its addresses leads to it until `end`."""
    for address in there.addresses:
        with suppress(OSError):
            line = socket.create_connection(address, min(TIMEOUT, _left(end)))
            with suppress(OSError):
                _prepare(line)
                line.sendall(_HELLO.pack(there.word, rank))
                if _read(line, len(there.word), end) == there.word:
                    return line
            line.close()
    raise OSError(f"nobody answers at {', '.join(f'{host}:{port}' for host, port in there.addresses)}")


def _answer(
    word: bytes, listeners: Sequence[socket.socket], ranks: range, lines: dict[int, socket.socket], end: float
) -> None:
    """Take calls, some of them strangers', until all `ranks` have called; raises OSError where they have not at `end`.

    Callers are heard side by side, so that one that says nothing, or a byte now and then, keeps nobody waiting.
    """
    callers: dict[socket.socket, _Caller] = {}
    try:
        with selectors.DefaultSelector() as ready:
            for listener in listeners:
                ready.register(listener, selectors.EVENT_READ)
            while missing := [rank for rank in ranks if rank not in lines]:
                now = time.monotonic()
                if now >= end:
                    raise OSError(f"rank {missing[0]} has not called within {PATIENCE:g} s")
                for line in [line for line, caller in callers.items() if now >= caller.end]:
                    _drop(line, callers, ready)
                soonest = min([end, *(caller.end for caller in callers.values())])
                for key, _ in ready.select(max(soonest - now, 0.0)):
                    if key.fileobj in listeners:
                        _accept(cast(socket.socket, key.fileobj), callers, ready)
                    elif key.fileobj in callers:  # it may have given place to a newer one in this round
                        _hear(key.fileobj, callers, ready, word, ranks, lines)
    finally:
        for line in callers:
            line.close()


def _accept(listener: socket.socket, callers: dict[socket.socket, _Caller], ready: selectors.BaseSelector) -> None:
    with suppress(OSError):  # it may have hung up
        line, _ = listener.accept()
        if len(callers) >= _CALLERS:
            _drop(next(iter(callers)), callers, ready)
        line.setblocking(False)
        callers[line] = _Caller(time.monotonic() + HELLO_TIMEOUT)
        ready.register(line, selectors.EVENT_READ)


def _hear(
    line: socket.socket,
    callers: dict[socket.socket, _Caller],
    ready: selectors.BaseSelector,
    word: bytes,
    ranks: range,
    lines: dict[int, socket.socket],
) -> None:
    """Take what a caller says; once that is all of a hello it becomes a rank's line, or is dropped."""
    caller = callers[line]
    try:
        more = line.recv(_HELLO.size - len(caller.told))
    except OSError:
        more = b""
    caller.told += more
    if more and len(caller.told) < _HELLO.size:
        return
    _forget(line, callers, ready)
    if more:
        said, peer = _HELLO.unpack(caller.told)
        if secrets.compare_digest(said, word) and peer in ranks:
            with suppress(OSError):
                line.settimeout(HELLO_TIMEOUT)
                _prepare(line)
                line.sendall(word)
                if peer in lines:  # it called again
                    lines[peer].close()
                lines[peer] = line
                return
    line.close()


def _forget(line: socket.socket, callers: dict[socket.socket, _Caller], ready: selectors.BaseSelector) -> None:
    ready.unregister(line)
    del callers[line]


def _drop(line: socket.socket, callers: dict[socket.socket, _Caller], ready: selectors.BaseSelector) -> None:
    _forget(line, callers, ready)
    line.close()


def _left(end: float) -> float:
    """Return the seconds until `end`; raises OSError where it is over."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no time is left")
    return seconds


def _prepare(line: socket.socket) -> None:
    """Let small messages leave at once, and let the kernel take as much as it allows while a rank computes."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for count in (_MUCH, 1):  # on Linux the buffer grows with this, and stays
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def _read(line: socket.socket, count: int, end: float) -> bytes:
    """Return exactly so many bytes; raises OSError where the other end closes before, or at `end`."""
    told = b""
    while len(told) < count:
        line.settimeout(_left(end))
        more = line.recv(count - len(told))
        if not more:
            raise OSError("closed")
        told += more
    return told
