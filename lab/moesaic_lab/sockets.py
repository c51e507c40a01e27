"""A transport over sockets, offered to Moesaic by name: eager tagged messages, a connection per
pair of ranks, no threads.

Gloo, the default on CPUs, asks the receiver before it sends, and passes every message to a thread
and back. Here a send writes straight into the kernel's buffer and ends there; the kernel transmits
while the rank computes. Data that does not fit, and data that arrives, is moved whenever the rank
issues or waits. Messages may arrive before their receive is posted and are kept until then. Beyond
a limit, a rank stops reading from a peer until it posts a receive from it.

Several threads may issue and wait at the same time. One of the waiting threads polls for all of
them.

Every pair of ranks is first connected over TCP. Ranks exchange the addresses they listen on through
their process group. A random word keeps out other programs and shows that an address leads to the
right process.
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

from moesaic.comm.transport import AbstractTransport, Handle, Transfer, as_bytes
from moesaic.errors import InputError

T = TypeVar("T")

_HEADER = struct.Struct("<qq")
"""Precedes each message: its tag and its size in bytes."""

_WAKE_BYTES = 1 << 18
"""A rank that waits for more data is woken once this many bytes have arrived, not for every
packet."""

_MAY_SLEEP_LONGER = sys.platform == "linux"
"""Only Linux grows the buffer for the bytes a rank waits for, and wakes the rank even if it
cannot."""

_EARLY_BYTES = 1 << 26
"""Most bytes of messages from one peer to keep before their receives are posted. Further messages
stay with the peer."""

_MOST_EARLY_BYTES = 1 << 32
"""Most bytes of such messages to keep if this rank waits for a message behind them."""

_LONGEST_POLL = 2.0**31 - 1
"""Longest wait that the kernel accepts, in milliseconds."""

PATIENCE = 30 * 60.0
"""Seconds without any progress after which a wait fails, if the process group has no timeout."""


class MessageSizeError(RuntimeError):
    """A peer sent a message of another size than this rank expects, so the two do not run the same
    program."""


@dataclass(eq=False)
class _Work:
    """The messages of one transfer that are not complete."""

    connections: list[_Connection] = field(default_factory=list)
    """One connection per message."""


@dataclass(eq=False)
class _Receive:
    """A message to receive."""

    buffer: memoryview
    work: _Work | None
    """None if no receive is posted for it yet."""
    received: int = 0


@dataclass(eq=False)
class _Connection:
    """The connection to one peer."""

    peer: int
    socket: socket.socket
    outgoing: deque[tuple[list[memoryview], _Work]] = field(default_factory=deque)
    """Parts of messages that are not in the kernel's buffer yet, with the transfer of each
    message."""
    posted: dict[int, deque[_Receive]] = field(default_factory=dict)
    """Receives without a message, by tag."""
    early: dict[int, deque[memoryview]] = field(default_factory=dict)
    """Messages without a receive, by tag."""
    header: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    header_received: int = 0
    """Bytes of the header that have arrived."""
    early_bytes: int = 0
    """Bytes of messages without a receive, complete or still arriving."""
    bytes_moved: int = 0
    """Bytes sent and received so far."""
    tag: int = 0
    incoming: _Receive | None = None
    """The message after the header."""
    unread_bytes: int = 0
    """Size of the message after the header if it is left with the peer until this rank posts a
    receive; else 0."""
    wake_bytes: int = 1
    """Number of bytes at which the kernel wakes this rank."""
    is_closed: bool = False


class Sockets(AbstractTransport):
    """Sends between processes over stream sockets. Lanes make no difference: messages of both
    overlap.

    Args:
        connections: a connected stream socket for every other rank.
        patience: seconds without any progress after which a wait fails.
    """

    def __init__(
        self, rank: int, connections: Mapping[int, socket.socket], patience: float = PATIENCE
    ) -> None:
        super().__init__(rank, len(connections) + 1)
        self._patience = patience
        self._connections = {
            peer: _Connection(peer, connection) for peer, connection in connections.items()
        }
        self._by_file = {
            connection.socket.fileno(): connection for connection in self._connections.values()
        }
        self._closed_connections: list[_Connection] = []
        self._poll = select.poll()
        self._condition = threading.Condition()
        """Protects the state of this object. A thread that polls releases it meanwhile."""
        self._is_polling = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        """A byte sent into the second wakes the thread that polls."""
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poll.register(self._wake_receiver, select.POLLIN)
        for connection in self._connections.values():
            connection.socket.setblocking(False)
            self._poll.register(connection.socket, select.POLLIN)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        weakref.finalize(
            self, _close_sockets, [self._wake_receiver, self._wake_sender, *connections.values()]
        )

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
            RuntimeError: if a peer has closed its connection, or has sent a message of another size
                than its receive.
        """
        work = _Work()
        with self._condition:
            for peer, buffer in transfer.receives.items():
                if buffer.numel():
                    self._receive(
                        self._connections[peer], transfer.tag, _Receive(_memory_of(buffer), work)
                    )
            for peer, tensor in transfer.sends.items():
                if tensor.numel():
                    self._send(self._connections[peer], transfer.tag, _memory_of(tensor), work)
            if self._is_polling:
                with suppress(BlockingIOError):  # a full buffer wakes the thread too
                    self._wake_sender.send(b"\0")
            elif work.connections:
                self._move(0.0)
        return Handle(transfer, [work])

    def wait(self, handle: Handle) -> None:
        """Wait until all messages of a transfer have arrived in their buffers or are in the
        kernel's buffers.

        Raises:
            RuntimeError: if a peer has closed its connection or has sent a message of another size
                than its receive, or if no byte of the transfer's peers has moved for `patience`
                seconds.
        """
        with self._condition:
            for work in handle.works:
                self._finish_work(work)
        handle.works.clear()

    def _finish_work(self, work: _Work) -> None:
        """Move data until the work is done, or refuse to wait longer."""
        end = time.monotonic() + self._patience
        bytes_moved = _bytes_moved(work)
        while work.connections:
            # No more data arrives on these, and another thread may have caught the first error.
            for connection in self._closed_connections:
                self._check_open(connection)
            self._move(max(end - time.monotonic(), 0.0))
            if _bytes_moved(work) == bytes_moved and time.monotonic() >= end:
                for connection in tuple(work.connections):
                    if not connection.is_closed:
                        # there may be fewer bytes than the kernel wakes a rank for
                        self._pull(connection)
            if _bytes_moved(work) != bytes_moved:
                end = time.monotonic() + self._patience
                bytes_moved = _bytes_moved(work)
            elif time.monotonic() >= end:
                missing = sorted({connection.peer for connection in work.connections})
                raise RuntimeError(
                    f"rank {self.rank} has waited {self._patience:g} s for ranks {missing}: "
                    "nothing was sent or received"
                )

    def _receive(self, connection: _Connection, tag: int, receive: _Receive) -> None:
        """Take a message that has arrived, or post a buffer for it."""
        message = _pop(connection.early, tag)
        if message is not None:
            connection.early_bytes -= len(message)
            self._check_size(connection, tag, len(message), len(receive.buffer))
            receive.buffer[:] = message
            self._resume(connection)
            return
        if connection.is_closed:
            raise _closed_error(self.rank, connection.peer)
        assert receive.work is not None
        receive.work.connections.append(connection)
        connection.posted.setdefault(tag, deque()).append(receive)
        self._resume(connection)

    def _send(self, connection: _Connection, tag: int, data: memoryview, work: _Work) -> None:
        """Send a message, at once as far as the socket takes it."""
        if connection.is_closed:
            raise _closed_error(self.rank, connection.peer)
        work.connections.append(connection)
        connection.outgoing.append(([memoryview(_HEADER.pack(tag, len(data))), data], work))
        if len(connection.outgoing) == 1:
            self._push(connection)
            if connection.outgoing:
                self._listen(connection)

    def _listen(self, connection: _Connection) -> None:
        """Poll a connection for incoming data unless a message is left unread, and for room if
        messages are outgoing."""
        reads = 0 if connection.unread_bytes else select.POLLIN
        writes = select.POLLOUT if connection.outgoing else 0
        self._poll.modify(connection.socket, reads | writes)

    def _move(self, seconds: float) -> None:
        """Move the data that can be moved, waiting for at most `seconds`. If another thread polls,
        wait for it instead."""
        if self._is_polling:
            self._condition.wait(min(seconds, threading.TIMEOUT_MAX))
            return
        for file, event in self._poll_unlocked(min(1000 * seconds, _LONGEST_POLL)):
            if file == self._wake_receiver.fileno():  # another thread has issued a transfer
                with suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
                continue
            connection = self._by_file[file]
            if connection.is_closed:  # another thread may have closed it meanwhile
                continue
            if event & select.POLLOUT:
                self._push(connection)
                if not connection.outgoing:
                    self._listen(connection)
            if event & ~select.POLLOUT:
                if connection.unread_bytes:  # the event can only mean that the peer has closed it
                    self._receive_early(connection, connection.unread_bytes)
                self._pull(connection)

    def _poll_unlocked(self, milliseconds: float) -> list[tuple[int, int]]:
        """Poll without holding the lock, so that other threads can issue. Return the events."""
        self._is_polling = True
        self._condition.release()
        try:
            return self._poll.poll(milliseconds)
        finally:
            self._condition.acquire()
            self._is_polling = False
            self._condition.notify_all()

    def _push(self, connection: _Connection) -> None:
        """Give a connection's messages to the kernel until its buffer is full."""
        while connection.outgoing:
            pieces, work = connection.outgoing[0]
            try:
                sent = connection.socket.sendmsg(pieces)
            except BlockingIOError:
                return
            except OSError as error:
                self._close_connection(connection)
                raise _closed_error(self.rank, connection.peer) from error
            connection.bytes_moved += sent

            # Drop what was sent: whole pieces, then the beginning of the next.
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][sent:]
            else:
                connection.outgoing.popleft()
                work.connections.remove(connection)

    def _pull(self, connection: _Connection) -> None:
        """Read what has arrived on a connection."""
        while not connection.unread_bytes:
            incoming = connection.incoming
            if incoming is None:
                target = memoryview(connection.header)[connection.header_received :]
            else:
                target = incoming.buffer[incoming.received :]
            try:
                count = connection.socket.recv_into(target)
            except BlockingIOError:
                self._set_wake_bytes(connection, min(len(target), _WAKE_BYTES))
                return
            except OSError:
                count = 0
            # the peer has closed its end, an error only if messages are still expected
            if not count:
                self._close_connection(connection)
                self._check_open(connection)
                return
            connection.bytes_moved += count
            if incoming is None:
                connection.header_received += count
                if connection.header_received == _HEADER.size:
                    self._read_header(connection)
            else:
                incoming.received += count
                if incoming.received == len(incoming.buffer):
                    self._finish_message(connection, incoming)
                    if not connection.posted:  # nothing more is expected: read it later
                        return

    def _read_header(self, connection: _Connection) -> None:
        """Decode a header and decide where its message goes."""
        connection.header_received = 0
        connection.tag, size = _HEADER.unpack(connection.header)
        if not size > 0:
            self._close_connection(connection)
            raise MessageSizeError(
                f"rank {connection.peer} announced {size} bytes under tag {connection.tag}: this "
                "is not a message of this transport"
            )
        self._route_message(connection, size)

    def _route_message(self, connection: _Connection, size: int) -> None:
        """Read the message after a header into the buffer of its receive, keep it until there is
        one, or leave it with the peer."""
        connection.incoming = _pop(connection.posted, connection.tag)
        if connection.incoming is not None:
            self._check_size(connection, connection.tag, size, len(connection.incoming.buffer))
        # What this rank waits for may be behind this message, so it has to be read.
        elif connection.posted or connection.early_bytes + size <= _EARLY_BYTES:
            self._receive_early(connection, size)
        else:
            connection.unread_bytes = size
            self._listen(connection)

    def _receive_early(self, connection: _Connection, size: int) -> None:
        """Read the message after a header into new memory."""
        if connection.early_bytes + size > _MOST_EARLY_BYTES:
            self._close_connection(connection)
            raise MessageSizeError(
                f"rank {connection.peer} announced {size} bytes under tag {connection.tag}, for "
                f"which rank {self.rank} has not posted a receive: it keeps at most "
                f"{_MOST_EARLY_BYTES} bytes of such messages"
            )
        connection.unread_bytes = 0
        connection.early_bytes += size
        connection.incoming = _Receive(memoryview(bytearray(size)), None)

    def _resume(self, connection: _Connection) -> None:
        """Reconsider a message that was left with its peer, after this rank has posted a receive
        from that peer."""
        size = connection.unread_bytes
        connection.unread_bytes = 0
        if size and not connection.is_closed:
            self._route_message(connection, size)
            self._listen(connection)

    def _finish_message(self, connection: _Connection, message: _Receive) -> None:
        """Hand over a message that has arrived completely."""
        connection.incoming = None
        self._set_wake_bytes(connection, 1)
        if message.work is not None:
            message.work.connections.remove(connection)
            return
        receive = _pop(connection.posted, connection.tag)
        if receive is not None:  # the receive was posted while the message arrived
            self._check_size(connection, connection.tag, len(message.buffer), len(receive.buffer))
            receive.buffer[:] = message.buffer
            connection.early_bytes -= len(message.buffer)
            assert receive.work is not None
            receive.work.connections.remove(connection)
        else:
            connection.early.setdefault(connection.tag, deque()).append(message.buffer)

    def _close_connection(self, connection: _Connection) -> None:
        """Note that a connection is closed."""
        if not connection.is_closed:
            connection.is_closed = True
            self._closed_connections.append(connection)
            self._poll.unregister(connection.socket)

    def _set_wake_bytes(self, connection: _Connection, count: int) -> None:
        """Set how many bytes must arrive before the receiver wakes."""
        if connection.wake_bytes != count and _MAY_SLEEP_LONGER:
            connection.wake_bytes = count
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _check_size(self, connection: _Connection, tag: int, sent: int, expected: int) -> None:
        """Refuse a message of another size than expected."""
        if sent != expected:
            self._close_connection(connection)  # the boundaries of further messages are unknown
            raise MessageSizeError(
                f"rank {connection.peer} sent {sent} bytes under tag {tag}, where {expected} were "
                "expected: the two do not run the same layer (dtype, top_k, losses or plan "
                "differ)"
            )

    def _check_open(self, connection: _Connection) -> None:
        """Refuse a closed connection on which something is pending."""
        if connection.posted or connection.outgoing or connection.incoming:
            raise _closed_error(self.rank, connection.peer)


class _Memory:
    """A contiguous CPU tensor's bytes for numpy, with a reference that keeps the tensor alive.

    `Tensor.numpy()` would forbid resizing the storage forever, which is how FSDP2 frees parameters.
    """

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.device.type == "cpu", f"sockets send from CPUs, not from {tensor.device}"
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.numel(),),
            "data": (tensor.data_ptr(), False),
        }


def _pop(queues: dict[int, deque[T]], tag: int) -> T | None:
    """Remove and return the first entry queued under a tag; None if there is none."""
    queue = queues.get(tag)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first


def _bytes_moved(work: _Work) -> int:
    """Return the number of bytes moved so far on the connections that a transfer waits for."""
    return sum(connection.bytes_moved for connection in work.connections)


def _memory_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return np.asarray(_Memory(as_bytes(tensor.detach()))).data


def _patience(group: dist.ProcessGroup) -> float:
    """Return after how many seconds a group's own collectives time out."""
    try:
        seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # private names, which PyTorch may change
        return PATIENCE
    return seconds


def _closed_error(rank: int, peer: int) -> RuntimeError:
    """Return the error for a closed connection."""
    return RuntimeError(
        f"rank {rank}: connection closed by rank {peer}, which has ended or failed: its own "
        "message says why"
    )


def _close_sockets(connections: Iterable[socket.socket]) -> None:
    """Close all sockets."""
    for connection in connections:
        connection.close()


INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interface to use, as for Gloo."""

MASTER_VARIABLE = "MASTER_ADDR"
"""The variable with the address at which all ranks meet. The interface that reaches it also reaches
the other ranks."""

TIMEOUT = 10.0
"""Seconds after which an attempt to connect to an address is given up."""

HELLO_TIMEOUT = 1.0
"""Seconds within which a caller must have sent its whole hello."""

CONNECT_SECONDS = 60.0
"""Seconds within which all ranks must be connected: some may first try addresses that lead
nowhere."""

_HELLO = struct.Struct("<16sq")
"""The listener's word and the caller's rank."""

_CALLERS = 64
"""Most connections with incomplete hellos to keep. A newer one replaces the oldest."""

_RECEIVE_BUFFER_BYTES = 1 << 22
"""Size of the receive buffer to ask for, in bytes."""

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class _Endpoint:
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
    received: bytes = b""


def connect(group: dist.ProcessGroup) -> dict[int, socket.socket]:
    """Return a connected socket for every other rank; all ranks must call this together.

    Args:
        group: the process group of all ranks.

    Returns:
        sockets by rank.

    Raises:
        InputError: on every rank, if some pair of ranks could not be connected.
    """
    rank = group.rank()
    world = group.size()
    connections: dict[int, socket.socket] = {}
    problem: str | None = None
    with ExitStack() as stack:
        endpoint, listeners = _listen(world, stack)
        endpoints: list[_Endpoint | None] = [None] * world
        dist.all_gather_object(endpoints, endpoint, group=group)
        try:
            _connect_all(endpoints, rank, listeners, connections)
        except OSError as error:
            problem = str(error)
        problems: list[str | None] = [None] * world
        dist.all_gather_object(problems, problem, group=group)
    if any(problems):
        for connection in connections.values():
            connection.close()
        failed = [rank for rank, text in enumerate(problems) if text]
        first = failed[0]
        raise InputError(
            f"transport=sockets cannot connect rank {first}: {problems[first]}: set "
            f"{INTERFACE_VARIABLE} to the network interface that all ranks reach, or choose "
            "transport=gloo"
        )
    return connections


def _listen(world: int, stack: ExitStack) -> tuple[_Endpoint | None, list[socket.socket]]:
    """Return this rank's addresses and listening sockets. None if it cannot listen.

    It listens only on the addresses given to other ranks.
    """
    listeners: list[socket.socket] = []
    for host in dict.fromkeys(_hosts()):
        with suppress(OSError, UnicodeError):  # UnicodeError: an invalid host name
            listener = stack.enter_context(socket.create_server((host, 0), backlog=world))
            listener.setblocking(False)
            listeners.append(listener)
    if not listeners:
        return None, listeners
    addresses = tuple(
        (listener.getsockname()[0], listener.getsockname()[1]) for listener in listeners
    )
    return _Endpoint(secrets.token_bytes(16), addresses), listeners


def _connect_all(
    endpoints: Sequence[_Endpoint | None],
    rank: int,
    listeners: Sequence[socket.socket],
    connections: dict[int, socket.socket],
) -> None:
    """Connect to all ranks before this one, then accept those after it. Raise OSError if one is not
    reached in time."""
    unreachable = [peer for peer, endpoint in enumerate(endpoints) if endpoint is None]
    if unreachable:
        raise OSError(f"rank {unreachable[0]} has no address to listen on")
    end = time.monotonic() + CONNECT_SECONDS
    known = [endpoint for endpoint in endpoints if endpoint is not None]
    for peer, endpoint in enumerate(known[:rank]):
        connections[peer] = _connect_to(endpoint, rank, end)
    _accept_ranks(known[rank].word, listeners, range(rank + 1, len(endpoints)), connections, end)


def _hosts() -> list[str]:
    """Return addresses to listen on: the named interface's, else those of the interface towards the
    master and of the host name."""
    name = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    hosts = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if name:
            with suppress(ImportError, OSError):
                import fcntl

                # The kernel's struct ifreq: a name of at most 15 letters; bytes 20 to 24 of the
                # answer are the IPv4 address.
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, request)
                hosts.append(socket.inet_ntoa(answer[20:24]))
            return hosts
        with suppress(OSError):
            probe.connect((os.environ.get(MASTER_VARIABLE, "localhost"), 9))  # sends nothing
            hosts.append(probe.getsockname()[0])
    with suppress(OSError):
        hosts.append(socket.gethostbyname(socket.gethostname()))
    return hosts


def _connect_to(endpoint: _Endpoint, rank: int, end: float) -> socket.socket:
    """Connect to a rank that listens. Raise OSError if none of its addresses leads to it before
    `end`.

    Args:
        rank: this rank, which it tells the other.
        end: seconds on `time.monotonic`.
    """
    for address in endpoint.addresses:
        with suppress(OSError):
            connection = socket.create_connection(address, min(TIMEOUT, _seconds_left(end)))
            with suppress(OSError):
                _prepare(connection)
                connection.sendall(_HELLO.pack(endpoint.word, rank))
                if _read_exactly(connection, len(endpoint.word), end) == endpoint.word:
                    return connection
            connection.close()
    tried = ", ".join(f"{host}:{port}" for host, port in endpoint.addresses)
    raise OSError(f"nobody answers at {tried}")


def _accept_ranks(
    word: bytes,
    listeners: Sequence[socket.socket],
    ranks: range,
    connections: dict[int, socket.socket],
    end: float,
) -> None:
    """Accept connections, some of them from other programs, until all `ranks` have connected. Raise
    OSError at `end`.

    Callers are read concurrently, so a slow or silent one delays nobody.

    Args:
        word: this rank's random word, which a caller must show.
        ranks: the ranks that call this one.
        connections: gets a connection for each of them.
        end: seconds on `time.monotonic`.
    """
    callers: dict[socket.socket, _Caller] = {}
    try:
        with selectors.DefaultSelector() as ready:
            for listener in listeners:
                ready.register(listener, selectors.EVENT_READ)
            while True:
                missing = [rank for rank in ranks if rank not in connections]
                if not missing:
                    return
                now = time.monotonic()
                if now >= end:
                    raise OSError(f"rank {missing[0]} has not called within {CONNECT_SECONDS:g} s")
                expired = [
                    connection for connection, caller in callers.items() if now >= caller.end
                ]
                for connection in expired:
                    _drop(connection, callers, ready)
                soonest = min([end, *(caller.end for caller in callers.values())])
                for key, _ in ready.select(max(soonest - now, 0.0)):
                    if key.fileobj in listeners:
                        _accept(cast(socket.socket, key.fileobj), callers, ready)
                    elif key.fileobj in callers:  # a newer one may have replaced it in this round
                        _read_hello(key.fileobj, callers, ready, word, ranks, connections)
    finally:
        for connection in callers:
            connection.close()


def _accept(
    listener: socket.socket, callers: dict[socket.socket, _Caller], ready: selectors.BaseSelector
) -> None:
    """Accept a caller; the oldest one is dropped if there are too many."""
    with suppress(OSError):  # the caller may have closed the connection
        connection, _ = listener.accept()
        if len(callers) >= _CALLERS:
            oldest = next(iter(callers))
            _drop(oldest, callers, ready)
        connection.setblocking(False)
        callers[connection] = _Caller(time.monotonic() + HELLO_TIMEOUT)
        ready.register(connection, selectors.EVENT_READ)


def _read_hello(
    connection: socket.socket,
    callers: dict[socket.socket, _Caller],
    ready: selectors.BaseSelector,
    word: bytes,
    ranks: range,
    connections: dict[int, socket.socket],
) -> None:
    """Read what a caller sends. A complete and valid hello makes it the rank's connection;
    otherwise it is closed."""
    caller = callers[connection]
    try:
        data = connection.recv(_HELLO.size - len(caller.received))
    except OSError:
        data = b""
    caller.received += data
    if data and len(caller.received) < _HELLO.size:
        return

    # The hello is complete, or the caller has ended.
    _forget(connection, callers, ready)
    if data:
        shown_word, peer = _HELLO.unpack(caller.received)
        if secrets.compare_digest(shown_word, word) and peer in ranks:
            with suppress(OSError):
                connection.settimeout(HELLO_TIMEOUT)
                _prepare(connection)
                connection.sendall(word)
                if peer in connections:  # the peer connected a second time
                    connections[peer].close()
                connections[peer] = connection
                return
    connection.close()


def _forget(
    connection: socket.socket, callers: dict[socket.socket, _Caller], ready: selectors.BaseSelector
) -> None:
    """Forget a caller."""
    ready.unregister(connection)
    del callers[connection]


def _drop(
    connection: socket.socket, callers: dict[socket.socket, _Caller], ready: selectors.BaseSelector
) -> None:
    """Forget a caller and close the connection."""
    _forget(connection, callers, ready)
    connection.close()


def _seconds_left(end: float) -> float:
    """Return the seconds until `end`. Raise OSError if it has passed."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no time is left")
    return seconds


def _prepare(connection: socket.socket) -> None:
    """Send small messages at once, and let the kernel receive as much as it allows while a rank
    computes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for count in (_RECEIVE_BUFFER_BYTES, 1):  # on Linux the buffer grows with this, and stays
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def _read_exactly(connection: socket.socket, count: int, end: float) -> bytes:
    """Return exactly `count` bytes. Raise OSError if the other end closes first, or at `end`."""
    data = b""
    while len(data) < count:
        connection.settimeout(_seconds_left(end))
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data
