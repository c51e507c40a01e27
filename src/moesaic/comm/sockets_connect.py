"""Connects every pair of ranks over TCP.

Ranks tell each other where they listen through their process group. A random word keeps strangers out and shows that an
address led to the right process.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch.distributed as dist

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the network interface that a rank is reached by, as for Gloo."""

MASTER_VARIABLE = "MASTER_ADDR"
"""Whom the launcher told all ranks to meet; the interface that leads there leads to the others."""

TIMEOUT = 10.0
"""Seconds until an address that does not answer is given up."""

HELLO_TIMEOUT = 1.0
"""Seconds that somebody who calls has to say who it is; meanwhile others wait."""

PATIENCE = 60.0
"""Seconds that ranks wait for calls and for answers: the others may be busy with addresses that lead nowhere."""

_HELLO = struct.Struct("<16sq")
"""The listener's word and the rank of who calls."""

_MUCH = 1 << 22
"""Bytes that a rank would like to have received before it asks for them."""

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class _Place:
    """Where a rank listens."""

    word: bytes
    """Random, shown by whoever calls and by whoever answers."""
    hosts: tuple[str, ...]
    """Addresses under which other machines may reach it, likely ones first."""
    port: int


def connect(group: dist.ProcessGroup) -> dict[int, socket.socket] | None:
    """Return a connected socket for every other rank; all ranks call this together.

    Args:
        group: of all ranks.

    Returns:
        sockets by rank; None, on every rank, if some pair of ranks could not be connected.
    """
    rank, world = group.rank(), group.size()
    lines: dict[int, socket.socket] = {}
    with ExitStack() as open_here:
        place, listener = _listen(world, open_here)
        places: list[_Place | None] = [None] * world
        dist.all_gather_object(places, place, group=group)
        is_done = False
        with suppress(OSError):
            _call_and_answer(places, rank, listener, lines)
            is_done = True
        all_done = [False] * world
        dist.all_gather_object(all_done, is_done, group=group)
    if all(all_done):
        return lines
    for line in lines.values():
        line.close()
    return None


def _listen(world: int, open_here: ExitStack) -> tuple[_Place, socket.socket] | tuple[None, None]:
    """Return where this rank listens; nothing where it cannot, so that the others are told."""
    try:
        listener = open_here.enter_context(socket.create_server(("", 0), backlog=world))
        return _Place(secrets.token_bytes(16), tuple(dict.fromkeys(_hosts())), listener.getsockname()[1]), listener
    except (OSError, UnicodeError):  # the latter of a host's name
        return None, None


def _call_and_answer(
    places: Sequence[_Place | None], rank: int, listener: socket.socket | None, lines: dict[int, socket.socket]
) -> None:
    """Call all ranks before this one, then answer those after it; raises OSError where one cannot be reached in time."""
    known = [place for place in places if place is not None]
    if len(known) < len(places) or listener is None:
        raise OSError("some rank does not listen")
    for peer, there in enumerate(known[:rank]):
        lines[peer] = _call(there, rank)
    end = time.monotonic() + PATIENCE
    while len(lines) < len(places) - 1:
        _answer(known[rank], listener, lines, end)


def _hosts() -> list[str]:
    """Return this rank's likely addresses: of the interface it was told, towards the master, of its own name."""
    found = []
    name = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name:
            with suppress(ImportError, OSError):
                import fcntl

                told = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(told[20:24]))
        with suppress(OSError):
            probe.connect((os.environ.get(MASTER_VARIABLE, "localhost"), 9))  # sends nothing
            found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return found


def _call(there: _Place, rank: int) -> socket.socket:
    """Connect to a rank that listens; raises OSError where none of its addresses leads to it."""
    for host in there.hosts:
        with suppress(OSError):
            line = socket.create_connection((host, there.port), TIMEOUT)
            with suppress(OSError):
                _prepare(line)
                line.sendall(_HELLO.pack(there.word, rank))
                line.settimeout(PATIENCE)
                if _read(line, len(there.word)) == there.word:
                    return line
            line.close()
    raise OSError(f"nobody at {there.hosts}, port {there.port}")


def _answer(place: _Place, listener: socket.socket, lines: dict[int, socket.socket], end: float) -> None:
    """Take one call, which may be a stranger's; raises OSError where nobody calls until `end`."""
    listener.settimeout(max(end - time.monotonic(), 1e-3))
    line, _ = listener.accept()
    with suppress(OSError):
        line.settimeout(HELLO_TIMEOUT)
        word, peer = _HELLO.unpack(_read(line, _HELLO.size))
        if secrets.compare_digest(word, place.word):
            _prepare(line)
            line.sendall(word)
            lines[peer] = line
            return
    line.close()


def _prepare(line: socket.socket) -> None:
    """Let small messages leave at once, and let the kernel take as much as it allows while a rank computes."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for count in (_MUCH, 1):  # on Linux the buffer grows with this, and stays
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def _read(line: socket.socket, count: int) -> bytes:
    """Return exactly so many bytes; raises OSError where the other end closes before."""
    told = b""
    while len(told) < count:
        more = line.recv(count - len(told))
        if not more:
            raise OSError("closed")
        told += more
    return told
