"""A transport over sockets, chosen by name: eager tagged messages, a connection per pair of ranks, no thread.

Gloo, which ranks on CPUs use by default, asks the receiver before it sends, and hands every message to a thread and back.
Here a send goes straight into the kernel's buffer and is over when it is there; the kernel carries it on while the rank
computes. What does not fit, and what arrives, moves whenever the rank issues or waits. Messages may arrive before their
receive is posted: they are kept until then, up to a limit from which on a rank reads no more of that peer until it asks for
something of it.

Several threads may issue and wait at the same time. One of those that wait polls for all of them.

Every pair of ranks is connected over TCP first. Ranks tell each other where they listen through their process group. A random
word keeps strangers out and shows that an address led to the right process.
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
"""Tag and bytes of a message, in front of it."""

_WAKE_BYTES = 1 << 18
"""A rank that waits for more is woken when so many have arrived, instead of for every packet."""

_MAY_SLEEP_LONGER = sys.platform == "linux"
"""Linux makes room for what a rank waits for, and wakes it all the same where there is none."""

_EARLY_BYTES = 1 << 26
"""Bytes of messages of one peer that are kept before this rank asks for them; more stay with the peer."""

_MOST_EARLY_BYTES = 1 << 32
"""Bytes of messages that are kept all the same, since this rank asks for one that comes behind them."""

_LONGEST = 2.0**31 - 1
"""Milliseconds that the kernel can be asked to wait."""

PATIENCE = 30 * 60.0
"""Seconds without any progress until a wait gives up, where the process group does not tell its own."""


@dataclass(eq=False)
class _Work:
    """Messages of one transfer that are not done."""

    lines: list[_Line] = field(default_factory=list)
    """The connection of each of them."""


@dataclass(eq=False)
class _Receive:
    """A message on its way in."""

    buffer: memoryview
    work: _Work | None
    """None while nobody has asked for it."""
    got: int = 0


@dataclass(eq=False)
class _Line:
    """The connection to one peer."""

    peer: int
    socket: socket.socket
    leaving: deque[tuple[list[memoryview], _Work]] = field(default_factory=deque)
    """Pieces of messages that are not in the kernel's buffer yet."""
    posted: dict[int, deque[_Receive]] = field(default_factory=dict)
    """By tag: receives without a message."""
    early: dict[int, deque[memoryview]] = field(default_factory=dict)
    """By tag: messages without a receive."""
    header: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    got: int = 0
    """Bytes of the header that have arrived."""
    early_bytes: int = 0
    """Bytes of messages without a receive, kept or arriving."""
    moved: int = 0
    """Bytes sent and received so far."""
    tag: int = 0
    arriving: _Receive | None = None
    """The message behind the header."""
    held: int = 0
    """Bytes of the message behind the header, where it stays with the peer until this rank asks for more."""
    low: int = 1
    """Bytes for which the kernel wakes this rank."""
    is_closed: bool = False


class Sockets(AbstractTransport):
    """Sends between processes over stream sockets. Lanes make no difference: messages of both overlap.

    Args:
        rank: the rank whose end it is.
        lines: a connected stream socket for every other rank.
        patience: seconds without any progress until a wait gives up.
    """

    def __init__(self, rank: int, lines: Mapping[int, socket.socket], patience: float = PATIENCE) -> None:
        super().__init__(rank, len(lines) + 1)
        self._patience = patience
        self._lines = {peer: _Line(peer, line) for peer, line in lines.items()}
        self._of_file = {line.socket.fileno(): line for line in self._lines.values()}
        self._closed: list[_Line] = []
        self._poll = select.poll()
        self._turn = threading.Condition()
        """Whoever has it changes what is here; nobody has it while a thread polls."""
        self._is_polling = False
        self._ear, self._bell = socket.socketpair()
        """What is sent into the second wakes the thread that polls."""
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
        """Connect all processes of a group; all of them call this together.

        Args:
            group: the process group of the ranks, through which they tell each other their addresses.

        Raises:
            InputError: on all of them, if two could not be connected.
        """
        return cls(group.rank(), connect(group), _patience(group))

    def issue(self, transfer: Transfer) -> Handle:
        """Post all receives, and hand all sends to the kernel as far as it takes them.

        Messages without bytes are not sent; both sides know that.

        Raises:
            RuntimeError: if a peer has gone, or sent another number of bytes than its receive has.
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
                with suppress(BlockingIOError):  # then it has been rung often enough
                    self._bell.send(b"\0")
            elif work.lines:
                self._move(0.0)
        return Handle(transfer, [work])

    def wait(self, handle: Handle) -> None:
        """Wait until all messages of a transfer are in their buffers, or in the kernel's.

        Raises:
            RuntimeError: if a peer has gone, sent another number of bytes than its receive has, or if no byte of the
                transfer's peers has moved for `patience` seconds.
        """
        with self._turn:
            for work in handle.works:
                self._finish_work(work)
        handle.works.clear()

    def _finish_work(self, work: _Work) -> None:
        end, moved = time.monotonic() + self._patience, _moved(work)
        while work.lines:
            for line in self._closed:  # nothing comes of them any more, and somebody may have caught that before
                self._check_open(line)
            self._move(max(end - time.monotonic(), 0.0))
            if _moved(work) == moved and time.monotonic() >= end:
                for line in [each for each in work.lines if not each.is_closed]:
                    self._pull(line)  # fewer bytes than the kernel wakes a rank for
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
        """Have the kernel tell what concerns a line: that something has come, and where messages leave, that there is room."""
        self._poll.modify(line.socket, (0 if line.held else select.POLLIN) | (select.POLLOUT if line.leaving else 0))

    def _move(self, seconds: float) -> None:
        """Move what can be moved, or let the thread that polls do it, waiting for it at most so long."""
        if self._is_polling:
            self._turn.wait(min(seconds, threading.TIMEOUT_MAX))
            return
        for file, event in self._polled(min(1000 * seconds, _LONGEST)):
            if file == self._ear.fileno():
                with suppress(BlockingIOError):
                    self._ear.recv(4096)
                continue
            line = self._of_file[file]
            if line.is_closed:  # by another thread meanwhile
                continue
            if event & select.POLLOUT:
                self._push(line)
                if not line.leaving:
                    self._listen(line)
            if event & ~select.POLLOUT:
                if line.held:  # of such a line the kernel tells its end alone
                    self._keep(line, line.held)
                self._pull(line)

    def _polled(self, milliseconds: float) -> list[tuple[int, int]]:
        """Return what the kernel tells; other threads have their turn meanwhile, and after it one of them may poll."""
        self._is_polling = True
        self._turn.release()
        try:
            return self._poll.poll(milliseconds)
        finally:
            self._turn.acquire()
            self._is_polling = False
            self._turn.notify_all()

    def _push(self, line: _Line) -> None:
        """Hand a line's messages to the kernel until it takes no more."""
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
        """Take what has arrived on a line."""
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
            if not count:  # the peer has closed its end, which matters only to whoever still wants something of it
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
        """Find out where the message behind a header goes."""
        line.got = 0
        line.tag, size = _HEADER.unpack(line.header)
        if not size > 0:
            self._close_line(line)
            raise MessageSizeError(
                f"rank {line.peer} announced {size} bytes under tag {line.tag}: it sends no messages of ours"
            )
        self._take(line, size)

    def _take(self, line: _Line, size: int) -> None:
        """Read the message behind a header into the buffer of its receive, keep it until there is one, or leave it there."""
        line.arriving = _taken(line.posted, line.tag)
        if line.arriving is not None:
            self._check_size(line, line.tag, size, len(line.arriving.buffer))
        elif line.posted or line.early_bytes + size <= _EARLY_BYTES:
            self._keep(line, size)
        else:
            line.held = size
            self._listen(line)

    def _keep(self, line: _Line, size: int) -> None:
        """Read the message behind a header into memory of its own."""
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
        """Look again at a message that was left with its peer, after this rank has asked for something of it."""
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
        if receive is not None:  # asked for while it arrived
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
            self._close_line(line)  # what follows cannot be told apart
            raise MessageSizeError(
                f"rank {line.peer} sent {sent} bytes under tag {tag}, where {expected} were expected: the two "
                "do not run the same layer (dtype, top_k, losses or plan differ)"
            )

    def _check_open(self, line: _Line) -> None:
        if line.posted or line.leaving or line.arriving:
            raise _gone(self.rank, line.peer)


class _Memory:
    """A contiguous CPU tensor's bytes for numpy, which keeps the tensor alive.

    `Tensor.numpy()` would forbid the storage to be resized for ever after, which is how FSDP2 frees parameters.
    """

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.device.type == "cpu", f"sockets send from CPUs, not from {tensor.device}"
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (tensor.numel(),), "data": (tensor.data_ptr(), False),
        }  # fmt: skip


def _taken(queues: dict[int, deque[T]], tag: int) -> T | None:
    """Take the first of what is queued under a tag; None where nothing is."""
    queue = queues.get(tag)
    if queue is None:
        return None
    found = queue.popleft()
    if not queue:
        del queues[tag]
    return found


def _moved(work: _Work) -> int:
    """Return how many bytes have moved between this rank and those that a transfer waits for."""
    return sum(line.moved for line in work.lines)


def _view(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return np.asarray(_Memory(as_bytes(tensor.detach()))).data


def _patience(group: dist.ProcessGroup) -> float:
    """Return after how many seconds a group's own collectives give up."""
    try:
        seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # names that PyTorch may change
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
