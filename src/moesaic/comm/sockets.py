"""A transport over sockets, chosen by name: eager tagged messages, one connection per pair of ranks, no threads of its own.

Gloo, the default on CPUs, asks the receiver before it sends, and passes every message to a thread and back. Here a send
writes straight into the kernel's buffer and ends there; the kernel transmits while the rank computes. Data that does
not fit, and data that arrives, is moved whenever the rank issues or waits. Messages may arrive before their receive is
posted and are kept until then. Beyond a limit, a rank stops reading from a peer until it posts a receive from it.

Several threads may issue and wait at the same time. One of the waiting threads polls for all of them.

Every pair of ranks is first connected over TCP. Ranks exchange the addresses they listen on through their process
group. A random word keeps out other programs and shows that an address leads to the right process.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.comm.transport import AbstractTransport, Handle, MessageSizeError, Transfer, as_bytes
from moesaic.errors import InputError

T = TypeVar("T")

_HEADER = struct.Struct("<qq")
"""Precedes each message: its tag and its size in bytes."""

_WAKE_BYTES = 1 << 18
"""A rank that waits for more data is woken once this many bytes have arrived, not for every packet."""

_MAY_SLEEP_LONGER = sys.platform == "linux"
"""Only Linux grows the buffer for the bytes a rank waits for, and wakes the rank even if it cannot."""

_EARLY_BYTES = 1 << 26
"""Most bytes of messages from one peer to keep before their receives are posted. Further messages stay with the peer."""

_MOST_EARLY_BYTES = 1 << 32
"""Most bytes of such messages to keep if this rank waits for a message behind them."""

_LONGEST = 2.0**31 - 1
"""Longest wait that the kernel accepts, in milliseconds."""

PATIENCE = 30 * 60.0
"""Seconds without any progress until a wait gives up, where the process group does not tell its own."""


@dataclass(eq=False)
class _Work:
    """The messages of one transfer that are not complete."""

    lines: list[_Line] = field(default_factory=list)
    """One connection per message."""


@dataclass(eq=False)
class _Receive:
    """A message to receive."""

    buffer: memoryview
    work: _Work | None
    """None if no receive is posted for it yet."""
    got: int = 0


@dataclass(eq=False)
class _Line:
    """The connection to one peer."""

    peer: int
    socket: socket.socket
    leaving: deque[tuple[list[memoryview], _Work]] = field(default_factory=deque)
    """Parts of messages that are not in the kernel's buffer yet, with the transfer of each message."""
    posted: dict[int, deque[_Receive]] = field(default_factory=dict)
    """Receives without a message, by tag."""
    early: dict[int, deque[memoryview]] = field(default_factory=dict)
    """Messages without a receive, by tag."""
    header: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    got: int = 0
    """Bytes of the header that have arrived."""
    early_bytes: int = 0
    """Bytes of messages without a receive, complete or still arriving."""
    moved: int = 0
    """Bytes sent and received so far."""
    tag: int = 0
    arriving: _Receive | None = None
    """The message after the header."""
    held: int = 0
    """Size of the message after the header if it is left with the peer until this rank posts a receive; else 0."""
    low: int = 1
    """Number of bytes at which the kernel wakes this rank."""
    is_closed: bool = False


class Sockets(AbstractTransport):
    """Sends between processes over stream sockets. Lanes make no difference: messages of both overlap.

    Args:
        rank: this rank.
        lines: a connected stream socket for every other rank.
        patience: seconds without any progress after which a wait fails.
    """

    def __init__(self, rank: int, lines: Mapping[int, socket.socket], patience: float = PATIENCE) -> None:
        super().__init__(rank, len(lines) + 1)
        self._patience = patience
        self._lines = {peer: _Line(peer, line) for peer, line in lines.items()}
        self._of_file = {line.socket.fileno(): line for line in self._lines.values()}
        self._closed: list[_Line] = []
        self._poll = select.poll()
        self._turn = threading.Condition()
        """Protects the state of this object. A thread that polls releases it meanwhile."""
        self._is_polling = False
        self._ear, self._bell = socket.socketpair()
        """A byte sent into the second wakes the thread that polls."""
        for end in (self._ear, self._bell):
            end.setblocking(False)
        self._poll.register(self._ear, select.POLLIN)
        for line in self._lines.values():
            line.socket.setblocking(False)
            self._poll.register(line.socket, select.POLLIN)
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        weakref.finalize(self, _close, [self._ear, self._bell, *lines.values()])

    @classmethod
    def create(cls, group: dist.ProcessGroup) -> Sockets:
        """Connect all processes of a group; all of them must call this together.

        Args:
            group: the process group of the ranks, through which they exchange their addresses.

        Raises:
            InputError: on all ranks, if two of them could not be connected.
        """
        return cls(group.rank(), connect(group), _patience(group))

    def issue(self, transfer: Transfer) -> Handle:
        """Post all receives, and give all sends to the kernel as far as its buffers have room.

        Messages without bytes are not sent; both sides know that.

        Raises:
            RuntimeError: if a peer has closed its connection, or has sent a message of another size than its receive.
        """
        work = _Work()
        with self._turn:
            for peer, buffer in transfer.receives.items():
                if buffer.numel():
                    self._receive(self._lines[peer], transfer.tag, _Receive(_view(buffer), work))
            for peer, tensor in transfer.sends.items():
                if tensor.numel():
                    self._send(self._lines[peer], transfer.tag, _view(tensor), work)
            if self._is_polling:
                with suppress(BlockingIOError):  # a full buffer wakes the thread too
                    self._bell.send(b"\0")
            elif work.lines:
                self._move(0.0)
        return Handle(transfer, [work])

    def wait(self, handle: Handle) -> None:
        """Wait until all messages of a transfer have arrived in their buffers or are in the kernel's buffers.

        Raises:
            RuntimeError: if a peer has closed its connection or has sent a message of another size than its receive, or
                if no byte of the transfer's peers has moved for `patience` seconds.
        """
        with self._turn:
            for work in handle.works:
                self._finish_work(work)
        handle.works.clear()

    def _finish_work(self, work: _Work) -> None:
        end, moved = time.monotonic() + self._patience, _moved(work)
        while work.lines:
            for line in self._closed:  # no more data arrives, and another thread may have caught the first error
                self._check_open(line)
            self._move(max(end - time.monotonic(), 0.0))
            if _moved(work) == moved and time.monotonic() >= end:
                for line in [each for each in work.lines if not each.is_closed]:
                    self._pull(line)  # there may be fewer bytes than the kernel wakes a rank for
            if _moved(work) != moved:
                end, moved = time.monotonic() + self._patience, _moved(work)
            elif time.monotonic() >= end:
                missing = sorted({line.peer for line in work.lines})
                raise RuntimeError(
                    f"rank {self.rank} has waited {self._patience:g} s for ranks {missing}: nothing came"
                )

    def _receive(self, line: _Line, tag: int, receive: _Receive) -> None:
        message = _taken(line.early, tag)
        if message is not None:
            line.early_bytes -= len(message)
            self._check_size(line, tag, len(message), len(receive.buffer))
            receive.buffer[:] = message
            self._go_on(line)
            return
        if line.is_closed:
            raise _gone(self.rank, line.peer)
        assert receive.work is not None
        receive.work.lines.append(line)
        line.posted.setdefault(tag, deque()).append(receive)
        self._go_on(line)

    def _send(self, line: _Line, tag: int, data: memoryview, work: _Work) -> None:
        if line.is_closed:
            raise _gone(self.rank, line.peer)
        work.lines.append(line)
        line.leaving.append(([memoryview(_HEADER.pack(tag, len(data))), data], work))
        if len(line.leaving) == 1:
            self._push(line)
            if line.leaving:
                self._listen(line)

    def _listen(self, line: _Line) -> None:
        """Poll a connection for the events that matter now: incoming data unless it is held, and room if messages are
        leaving."""
        self._poll.modify(line.socket, (0 if line.held else select.POLLIN) | (select.POLLOUT if line.leaving else 0))

    def _move(self, seconds: float) -> None:
        """Move the data that can be moved, waiting for at most `seconds`. If another thread polls, wait for it instead."""
        if self._is_polling:
            self._turn.wait(min(seconds, threading.TIMEOUT_MAX))
            return
        for file, event in self._polled(min(1000 * seconds, _LONGEST)):
            if file == self._ear.fileno():
                with suppress(BlockingIOError):
                    self._ear.recv(4096)
                continue
            line = self._of_file[file]
            if line.is_closed:  # another thread may have closed it meanwhile
                continue
            if event & select.POLLOUT:
                self._push(line)
                if not line.leaving:
                    self._listen(line)
            if event & ~select.POLLOUT:
                if line.held:  # the only event polled for such a line is that the peer has closed it
                    self._keep(line, line.held)
                self._pull(line)

    def _polled(self, milliseconds: float) -> list[tuple[int, int]]:
        """Poll without holding the lock, so that other threads can issue. Return the events."""
        self._is_polling = True
        self._turn.release()
        try:
            return self._poll.poll(milliseconds)
        finally:
            self._turn.acquire()
            self._is_polling = False
            self._turn.notify_all()

    def _push(self, line: _Line) -> None:
        """Give a connection's messages to the kernel until its buffer is full."""
        while line.leaving:
            pieces, work = line.leaving[0]
            try:
                sent = line.socket.sendmsg(pieces)
            except BlockingIOError:
                return
            except OSError as error:
                self._close_line(line)
                raise _gone(self.rank, line.peer) from error
            line.moved += sent
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][sent:]
            else:
                line.leaving.popleft()
                work.lines.remove(line)

    def _pull(self, line: _Line) -> None:
        """Read what has arrived on a connection."""
        while not line.held:
            arriving = line.arriving
            into = memoryview(line.header)[line.got :] if arriving is None else arriving.buffer[arriving.got :]
            try:
                count = line.socket.recv_into(into)
            except BlockingIOError:
                self._wake_for(line, min(len(into), _WAKE_BYTES))
                return
            except OSError:
                count = 0
            if not count:  # the peer has closed its end, an error only if messages are still expected
                self._close_line(line)
                self._check_open(line)
                return
            line.moved += count
            if arriving is None:
                line.got += count
                if line.got == _HEADER.size:
                    self._begin(line)
            else:
                arriving.got += count
                if arriving.got == len(arriving.buffer):
                    self._finish(line, arriving)
                    if not line.posted:
                        return

    def _begin(self, line: _Line) -> None:
        """Decode a header and decide where its message goes."""
        line.got = 0
        line.tag, size = _HEADER.unpack(line.header)
        if not size > 0:
            self._close_line(line)
            raise MessageSizeError(
                f"rank {line.peer} announced {size} bytes under tag {line.tag}: it sends no messages of ours"
            )
        self._take(line, size)

    def _take(self, line: _Line, size: int) -> None:
        """Read the message after a header into the buffer of its receive, keep it until there is one, or leave it with
        the peer."""
        line.arriving = _taken(line.posted, line.tag)
        if line.arriving is not None:
            self._check_size(line, line.tag, size, len(line.arriving.buffer))
        elif line.posted or line.early_bytes + size <= _EARLY_BYTES:
            self._keep(line, size)
        else:
            line.held = size
            self._listen(line)

    def _keep(self, line: _Line, size: int) -> None:
        """Read the message after a header into new memory."""
        if line.early_bytes + size > _MOST_EARLY_BYTES:
            self._close_line(line)
            raise MessageSizeError(
                f"rank {line.peer} announced {size} bytes under tag {line.tag}, which rank {self.rank} does not wait for: of "
                f"such messages it keeps {_MOST_EARLY_BYTES} bytes"
            )
        line.held = 0
        line.early_bytes += size
        line.arriving = _Receive(memoryview(bytearray(size)), None)

    def _go_on(self, line: _Line) -> None:
        """Reconsider a message that was left with its peer, after this rank has posted a receive from that peer."""
        size, line.held = line.held, 0
        if size and not line.is_closed:
            self._take(line, size)
            self._listen(line)

    def _finish(self, line: _Line, arrived: _Receive) -> None:
        line.arriving = None
        self._wake_for(line, 1)
        if arrived.work is not None:
            arrived.work.lines.remove(line)
            return
        receive = _taken(line.posted, line.tag)
        if receive is not None:  # the receive was posted while the message arrived
            self._check_size(line, line.tag, len(arrived.buffer), len(receive.buffer))
            receive.buffer[:] = arrived.buffer
            line.early_bytes -= len(arrived.buffer)
            assert receive.work is not None
            receive.work.lines.remove(line)
        else:
            line.early.setdefault(line.tag, deque()).append(arrived.buffer)

    def _close_line(self, line: _Line) -> None:
        if not line.is_closed:
            line.is_closed = True
            self._closed.append(line)
            self._poll.unregister(line.socket)

    def _wake_for(self, line: _Line, count: int) -> None:
        if line.low != count and _MAY_SLEEP_LONGER:
            line.low = count
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _check_size(self, line: _Line, tag: int, sent: int, expected: int) -> None:
        if sent != expected:
            self._close_line(line)  # the boundaries of further messages are unknown
            raise MessageSizeError(
                f"rank {line.peer} sent {sent} bytes under tag {tag}, where {expected} were expected: the two "
                "do not run the same layer (dtype, top_k, losses or plan differ)"
            )

    def _check_open(self, line: _Line) -> None:
        if line.posted or line.leaving or line.arriving:
            raise _gone(self.rank, line.peer)


class _Memory:
    """A contiguous CPU tensor's bytes for numpy, with a reference that keeps the tensor alive.

    `Tensor.numpy()` would forbid resizing the storage forever, which is how FSDP2 frees parameters.
    """

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.device.type == "cpu", f"sockets send from CPUs, not from {tensor.device}"
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (tensor.numel(),), "data": (tensor.data_ptr(), False),
        }  # fmt: skip


def _taken(queues: dict[int, deque[T]], tag: int) -> T | None:
    """Remove and return the first entry queued under a tag; None if there is none."""
    queue = queues.get(tag)
    if queue is None:
        return None
    found = queue.popleft()
    if not queue:
        del queues[tag]
    return found


def _moved(work: _Work) -> int:
    """Return the number of bytes moved so far on the connections that a transfer waits for."""
    return sum(line.moved for line in work.lines)


def _view(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return np.asarray(_Memory(as_bytes(tensor.detach()))).data


def _patience(group: dist.ProcessGroup) -> float:
    """Return after how many seconds a group's own collectives time out."""
    try:
        seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # private names, which PyTorch may change
        return PATIENCE
    return seconds


def _gone(rank: int, peer: int) -> RuntimeError:
    return RuntimeError(
        f"rank {rank}: connection closed by rank {peer}, which has ended or failed: its own message says why"
    )


def _close(lines: Iterable[socket.socket]) -> None:
    for line in lines:
        line.close()


INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interface to use, as for Gloo."""

MASTER_VARIABLE = "MASTER_ADDR"
"""The variable with the address at which all ranks meet. The interface that reaches it also reaches the other ranks."""

TIMEOUT = 10.0
"""Seconds after which an attempt to connect to an address is given up."""

HELLO_TIMEOUT = 1.0
"""Seconds within which a caller must have sent its whole hello."""

PATIENCE = 60.0
"""Seconds until every rank must have reached every other: some may be busy with addresses that lead nowhere."""

_HELLO = struct.Struct("<16sq")
"""The listener's word and the caller's rank."""

_CALLERS = 64
"""Most connections with incomplete hellos to keep. A newer one replaces the oldest."""

_MUCH = 1 << 22
"""Size of the receive buffer to ask for, in bytes."""

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class _Place:
    """The addresses on which a rank listens."""

    word: bytes
    """A random word that the caller and the listener show to each other."""
    addresses: tuple[tuple[str, int], ...]
    """Hosts and ports at which other machines may reach the rank, the most likely first."""


@dataclass
class _Caller:
    """A connection with an incomplete hello."""

    end: float
    """Time at which to give up."""
    told: bytes = b""


def connect(group: dist.ProcessGroup) -> dict[int, socket.socket]:
    """Return a connected socket for every other rank; all ranks must call this together.

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
    """Return this rank's addresses and listening sockets. None if it cannot listen.

    It listens only on the addresses given to other ranks.
    """
    listeners: list[socket.socket] = []
    for host in dict.fromkeys(_hosts()):
        with suppress(OSError, UnicodeError):  # UnicodeError: an invalid host name
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
    """Connect to all ranks before this one, then accept those after it. Raise OSError if one is not reached in time."""
    silent = [peer for peer, place in enumerate(places) if place is None]
    if silent:
        raise OSError(f"rank {silent[0]} has no address to listen on")
    end = time.monotonic() + PATIENCE
    known = [place for place in places if place is not None]
    for peer, there in enumerate(known[:rank]):
        lines[peer] = _call(there, rank, end)
    _answer(known[rank].word, listeners, range(rank + 1, len(places)), lines, end)


def _hosts() -> list[str]:
    """Return addresses to listen on: the named interface's, else those of the interface towards the master and of the
    host name."""
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
    """Connect to a rank that listens. Raise OSError if none of its addresses leads to it before `end`."""
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
    """Accept connections, some of them from other programs, until all `ranks` have connected. Raise OSError at `end`.

    Callers are read concurrently, so a slow or silent one delays nobody.
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
                    elif key.fileobj in callers:  # a newer one may have replaced it in this round
                        _hear(key.fileobj, callers, ready, word, ranks, lines)
    finally:
        for line in callers:
            line.close()


def _accept(listener: socket.socket, callers: dict[socket.socket, _Caller], ready: selectors.BaseSelector) -> None:
    with suppress(OSError):  # the caller may have closed the connection
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
    """Read what a caller sends. A complete and valid hello makes it the rank's connection; otherwise it is closed."""
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
                if peer in lines:  # the peer connected a second time
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
    """Return the seconds until `end`. Raise OSError if it has passed."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no time is left")
    return seconds


def _prepare(line: socket.socket) -> None:
    """Send small messages at once, and let the kernel receive as much as it allows while a rank computes."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for count in (_MUCH, 1):  # on Linux the buffer grows with this, and stays
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def _read(line: socket.socket, count: int, end: float) -> bytes:
    """Return exactly `count` bytes. Raise OSError if the other end closes first, or at `end`."""
    told = b""
    while len(told) < count:
        line.settimeout(_left(end))
        more = line.recv(count - len(told))
        if not more:
            raise OSError("closed")
        told += more
    return told
