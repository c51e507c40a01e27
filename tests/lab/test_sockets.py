"""The transport over sockets, with ranks as threads or in turn in one process: tags, early and
large messages, closed peers."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch

from moesaic.comm.transport import Transfer
from moesaic_lab import sockets
from moesaic_lab.sockets import MessageSizeError, Sockets, _accept_ranks, _connect_to, _Endpoint

LARGE = 1 << 25
"""More bytes than the kernel buffers."""


def transports(world: int = 2, patience: float = 60.0) -> list[Sockets]:
    lines: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for left in range(world):
        for right in range(left):
            lines[left][right], lines[right][left] = socket.socketpair()
    return [Sockets(rank, lines[rank], patience) for rank in range(world)]


def test_messages_find_their_receives_in_any_order():
    left, right = transports()
    tensors = {tag: torch.full((5,), float(tag)) for tag in (4, 1, 3)}
    sent = [left.issue(Transfer(0, tag, {1: tensor}, {})) for tag, tensor in tensors.items()]
    buffers = {tag: torch.empty(5) for tag in (1, 3, 4)}
    handles = {
        tag: right.issue(Transfer(1, tag, {}, {0: buffer})) for tag, buffer in buffers.items()
    }
    for tag in (3, 4, 1):
        right.wait(handles[tag])
        assert buffers[tag].tolist() == [float(tag)] * 5
    for handle in sent:
        left.wait(handle)


def test_messages_of_one_tag_keep_their_order_whether_early_or_not():
    left, right = transports()
    buffers = [torch.empty(1) for _ in range(4)]
    deferred_wgrad = right.issue(Transfer(1, 7, {}, {0: buffers[0]}))
    for number in range(4):
        left.wait(left.issue(Transfer(0, 7, {1: torch.full((1,), float(number))}, {})))
    right.wait(deferred_wgrad)
    for buffer in buffers[1:]:
        right.wait(right.issue(Transfer(1, 7, {}, {0: buffer})))
    assert [float(buffer) for buffer in buffers] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        torch.tensor(3, dtype=torch.int64),
        torch.ones(3, requires_grad=True),
        torch.zeros(0, 4),
        torch.arange(8.0)[3:6],
    ],
    ids=["bool", "bfloat16", "scalar", "with gradient", "empty", "part"],
)
def test_any_tensor_arrives(tensor):
    left, right = transports()
    buffer = torch.empty_like(tensor.detach())
    handle = right.issue(Transfer(1, 0, {}, {0: buffer}))
    left.wait(left.issue(Transfer(0, 0, {1: tensor}, {})))
    right.wait(handle)
    assert torch.equal(buffer, tensor.detach())


def test_everyone_sends_everyone_more_than_the_kernel_keeps():
    world = 3

    def exchange(transport: Sockets) -> bool:
        others = [peer for peer in range(world) if peer != transport.rank]
        sends = {
            peer: torch.full((LARGE,), 10 * transport.rank + peer, dtype=torch.uint8)
            for peer in others
        }
        receives = {peer: torch.empty(LARGE, dtype=torch.uint8) for peer in others}
        first = transport.issue(Transfer(transport.rank, 1, sends, receives))
        small = {peer: torch.empty(1) for peer in others}
        second = transport.issue(
            Transfer(transport.rank, 0, {peer: torch.ones(1) for peer in others}, small)
        )
        transport.wait(second)  # its messages are behind the large ones, which move meanwhile
        transport.wait(first)
        right = all(
            bool((buffer == 10 * peer + transport.rank).all()) for peer, buffer in receives.items()
        )
        return right and all(float(buffer) == 1.0 for buffer in small.values())

    with ThreadPoolExecutor(world) as pool:
        assert all(pool.map(exchange, transports(world)))


def test_a_large_message_that_is_asked_for_while_it_arrives():
    left, right = transports()
    data = torch.randint(256, (LARGE,), dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: left.wait(left.issue(Transfer(0, 5, {1: data}, {}))))
        other = torch.empty(1)
        with right._condition:
            while right._connections[0].incoming is None:
                right._move(1.0)
        buffer = torch.empty_like(data)
        handle = right.issue(Transfer(1, 5, {}, {0: buffer}))
        right.wait(handle)
        sent.result()
        pool.submit(lambda: left.wait(left.issue(Transfer(0, 6, {1: torch.ones(1)}, {})))).result()
        right.wait(right.issue(Transfer(1, 6, {}, {0: other})))
    assert torch.equal(buffer, data)
    assert float(other) == 1.0


@pytest.mark.parametrize("is_early", [True, False])
def test_another_size_than_expected_is_named(is_early):
    left, right = transports()

    def send() -> None:
        left.issue(Transfer(0, 3, {1: torch.ones(2)}, {}))

    def receive() -> None:
        handle = right.issue(Transfer(1, 3, {}, {0: torch.empty(1)}))
        if not is_early:
            send()
        right.wait(handle)

    if is_early:
        send()
        with right._condition:
            right._move(1.0)
    with pytest.raises(
        RuntimeError, match="rank 0 sent 8 bytes under tag 3, where 4 were expected"
    ):
        receive()


def test_what_a_peer_sent_before_it_went_still_arrives_and_more_is_refused():
    left, right = transports()
    left.issue(Transfer(0, 0, {1: torch.ones(1)}, {}))
    waiting = right.issue(Transfer(1, 1, {}, {0: torch.empty(1)}))
    del left
    buffer = torch.empty(1)
    for _ in range(2):  # the second wait gets no event from the closed peer
        with pytest.raises(RuntimeError, match="rank 1: connection closed by rank 0"):
            right.wait(waiting)
    right.wait(right.issue(Transfer(1, 0, {}, {0: buffer})))
    assert float(buffer) == 1.0
    for transfer in (Transfer(1, 2, {}, {0: buffer}), Transfer(1, 2, {0: buffer}, {})):
        with pytest.raises(RuntimeError, match="closed by rank 0"):
            right.wait(right.issue(transfer))


def test_a_peer_that_went_and_owes_nothing_disturbs_nobody():
    first, second, third = transports(3)
    del third
    handle = first.issue(Transfer(0, 0, {}, {1: torch.empty(1)}))
    second.wait(second.issue(Transfer(1, 0, {0: torch.ones(1)}, {})))
    first.wait(handle)


def test_any_patience_can_be_asked_for():
    left, right = transports(patience=1e9)
    buffer = torch.empty(1)
    handle = left.issue(Transfer(0, 0, {}, {1: buffer}))
    right.wait(right.issue(Transfer(1, 0, {0: torch.ones(1)}, {})))
    left.wait(handle)
    assert float(buffer) == 1.0


def test_a_wait_without_any_progress_ends():
    left, _right = transports(patience=0.01)
    handle = left.issue(Transfer(0, 0, {}, {1: torch.empty(1)}))
    with pytest.raises(RuntimeError, match=r"rank 0 has waited 0.01 s for ranks \[1\]"):
        left.wait(handle)


def test_waits_are_patient_for_half_an_hour_if_the_group_has_no_timeout():
    class Group:
        def _get_backend(self, device: torch.device) -> None:
            raise RuntimeError("no backend for this device")

    assert sockets._patience(Group()) == 30 * 60


def test_what_was_sent_can_be_freed_as_fsdp_does_it():
    left, right = transports()
    tensor = torch.ones(4)
    buffer = torch.empty(4)
    handle = right.issue(Transfer(1, 0, {}, {0: buffer}))
    left.wait(left.issue(Transfer(0, 0, {1: tensor}, {})))
    right.wait(handle)
    for each in (tensor, buffer):
        each.untyped_storage().resize_(0)


@contextmanager
def listening(
    ranks: range, lines: dict[int, socket.socket], seconds: float = 60.0
) -> Iterator[tuple[_Endpoint, Future[None]]]:
    """Accept ranks in a thread while the block runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.setblocking(False)
        place = _Endpoint(bytes(range(16)), (listener.getsockname(),))
        end = time.monotonic() + seconds
        yield place, pool.submit(_accept_ranks, place.word, [listener], ranks, lines, end)
    for line in lines.values():
        line.close()


def stranger(place: _Endpoint, data: bytes) -> socket.socket:
    line = socket.create_connection(place.addresses[0])
    line.sendall(data)
    return line


def test_strangers_are_not_taken_for_ranks():
    lines: dict[int, socket.socket] = {}
    with listening(range(3, 4), lines) as (place, answered):
        talks = stranger(place, b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")
        line = _connect_to(place, 3, time.monotonic() + 60)
        answered.result()
        line.sendall(b"x")
        assert lines[3].recv(1) == b"x"
        for each in (talks, line):
            each.close()
    with pytest.raises(OSError, match=r"nobody answers at 127\.0\.0\.1:"):
        _connect_to(place, 3, time.monotonic() + 60)


@pytest.mark.parametrize("rank", [-1, 0, 1, 2, 5, 2**40])
def test_a_rank_that_nobody_waits_for_is_not_let_in(rank, monkeypatch):
    monkeypatch.setattr(sockets, "CONNECT_SECONDS", 0.2)
    lines: dict[int, socket.socket] = {}
    with listening(range(3, 5), lines, 0.2) as (place, answered):
        with pytest.raises(OSError, match="nobody answers"):
            _connect_to(place, rank, time.monotonic() + 60)
        with pytest.raises(OSError, match=r"rank 3 has not called within 0.2 s"):
            answered.result()
    assert not lines


def test_callers_that_say_nothing_or_little_keep_nobody_waiting(monkeypatch):
    monkeypatch.setattr(sockets, "HELLO_TIMEOUT", 3600.0)  # no caller times out
    lines: dict[int, socket.socket] = {}
    with listening(range(1, 2), lines) as (place, answered):
        silent = [stranger(place, b"\0" * (count % 24)) for count in range(2 * sockets._CALLERS)]
        line = _connect_to(place, 1, time.monotonic() + 60)
        answered.result()
        assert list(lines) == [1]
        for each in (*silent, line):
            each.close()


def test_a_hello_that_trickles_is_given_up_and_a_flood_of_calls_ends(monkeypatch):
    monkeypatch.setattr(sockets, "HELLO_TIMEOUT", 0.05)
    lines: dict[int, socket.socket] = {}
    with (
        listening(range(1, 2), lines, 1.0) as (place, answered),
        suppress(ConnectionError, socket.timeout),
    ):
        trickles = stranger(place, b"\0")
        while not answered.done():
            stranger(place, b"").close()
            with suppress(ConnectionError):
                trickles.sendall(b"\0")
            time.sleep(0.001)
    with pytest.raises(OSError, match="rank 1 has not called"):
        answered.result()
    assert not lines


def test_ranks_listen_on_the_interface_that_was_named_alone(monkeypatch):
    monkeypatch.setenv(sockets.INTERFACE_VARIABLE, "lo")
    with ExitStack() as open_here:
        place, listeners = sockets._listen(2, open_here)
        assert [listener.getsockname()[0] for listener in listeners] == ["127.0.0.1"]
        assert place is not None
        assert place.addresses == (listeners[0].getsockname(),)
    monkeypatch.setenv(sockets.INTERFACE_VARIABLE, "none-such")
    with ExitStack() as open_here:
        assert sockets._listen(2, open_here) == (None, [])
    monkeypatch.delenv(sockets.INTERFACE_VARIABLE)
    with ExitStack() as open_here:
        assert "0.0.0.0" not in {line.getsockname()[0] for line in sockets._listen(2, open_here)[1]}


@pytest.mark.parametrize("size", [0, -1, -(2**63), 1 << 33, 2**63 - 1])
@pytest.mark.parametrize("is_asked_for", [True, False])
def test_sizes_no_peer_of_ours_announces_are_refused_before_memory_is_taken(size, is_asked_for):
    ours, theirs = socket.socketpair()
    right = Sockets(1, {0: ours})
    theirs.sendall(struct.pack("<qq", 7, size))
    transfer = Transfer(1, 7 if is_asked_for else 8, {}, {0: torch.empty(1)})
    with pytest.raises(
        MessageSizeError, match=rf"^rank 0 (announced|sent) {size} bytes under tag 7"
    ):
        right.wait(right.issue(transfer))
    theirs.close()
    gone = Transfer(1, 8, {}, {0: torch.empty(1)})
    with pytest.raises(RuntimeError, match="closed by rank 0"):
        right.wait(right.issue(gone))


class Waits:
    """A poll that advances a clock of its own by a tenth of a second, and then lets a message be
    sent."""

    def __init__(self, transport: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
        self._poll = transport._poll
        self._now = 0.0
        self.send = lambda: None
        monkeypatch.setattr(sockets, "time", self)
        monkeypatch.setattr(transport, "_poll", self)

    def monotonic(self) -> float:
        return self._now

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self._now += min(milliseconds / 1000, 0.1)
        self.send()
        return self._poll.poll(0)

    def modify(self, *arguments: object) -> None:
        self._poll.modify(*arguments)


def test_bytes_that_trickle_count_as_progress_and_those_of_others_do_not(monkeypatch):
    first, second, third = transports(3, patience=0.2)
    buffer = torch.empty(64, dtype=torch.uint8)
    waits = Waits(second, monkeypatch)
    handle = second.issue(Transfer(1, 0, {}, {0: buffer}))
    line = first._connections[1].socket
    parts = iter((struct.pack("<qq", 0, 64), *[b"\1" * 8] * 8))
    waits.send = lambda: line.sendall(next(parts))
    second.wait(handle)
    assert waits.monotonic() > 4 * 0.2
    assert buffer.tolist() == [1] * 64
    tags = iter(range(1, 1000))
    waits.send = lambda: third.issue(Transfer(2, next(tags), {1: torch.zeros(1)}, {}))
    with pytest.raises(
        RuntimeError, match=r"rank 1 has waited 0.2 s for ranks \[0\]: nothing was sent or received"
    ):
        second.wait(second.issue(Transfer(1, 1, {}, {0: buffer})))


def test_a_peer_that_runs_ahead_waits_until_it_is_asked(monkeypatch):
    monkeypatch.setattr(sockets, "_EARLY_BYTES", 3 << 16)
    first, second, third = transports(3)
    data = [torch.randint(256, (1 << 16,), dtype=torch.uint8) for _ in range(20)]

    def run_ahead() -> None:
        for handle in [
            first.issue(Transfer(0, tag, {1: tensor}, {})) for tag, tensor in enumerate(data)
        ]:
            first.wait(handle)

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(run_ahead)
        tag = 0
        # it reads this peer's messages while it waits for another rank
        while not second._connections[0].unread_bytes:
            tag += 1
            third.issue(Transfer(2, tag, {1: torch.ones(1)}, {}))
            second.wait(second.issue(Transfer(1, tag, {}, {2: torch.empty(1)})))
        assert second._connections[0].early_bytes == 3 << 16
        assert not sent.done()
        buffers = [torch.empty_like(tensor) for tensor in data]
        last = second.issue(Transfer(1, 19, {}, {0: buffers[19]}))
        second.wait(last)  # the earlier messages are kept so that this one can be read
        assert second._connections[0].early_bytes == 19 << 16
        sent.result()
        for tag in range(19):
            second.wait(second.issue(Transfer(1, tag, {}, {0: buffers[tag]})))
    assert second._connections[0].early_bytes == 0
    assert all(torch.equal(tensor, buffer) for tensor, buffer in zip(data, buffers))


def test_messages_that_were_left_with_a_peer_are_read_in_turn(monkeypatch):
    monkeypatch.setattr(sockets, "_EARLY_BYTES", 1 << 10)
    left, right = transports()
    data = [torch.randint(256, (1 << 20,), dtype=torch.uint8) for _ in range(8)]

    def send() -> None:
        for tag, each in enumerate(data):
            left.wait(left.issue(Transfer(0, tag, {1: each}, {})))

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        for tag, each in enumerate(data):
            buffer = torch.empty_like(each)
            right.wait(right.issue(Transfer(1, tag, {}, {0: buffer})))
            assert torch.equal(buffer, each)
            assert right._connections[0].early_bytes <= 1 << 10
        sent.result()


def test_what_a_peer_left_behind_when_it_went_is_read_whatever_it_is(monkeypatch):
    monkeypatch.setattr(sockets, "_EARLY_BYTES", 1 << 10)
    first, second, third = transports(3)
    first.issue(Transfer(0, 7, {1: torch.full((1 << 14,), 3, dtype=torch.uint8)}, {}))
    tag = 0

    def chatter() -> None:
        nonlocal tag
        tag += 1
        third.issue(Transfer(2, tag, {1: torch.ones(1)}, {}))
        second.wait(second.issue(Transfer(1, tag, {}, {2: torch.empty(1)})))

    while not second._connections[0].unread_bytes:
        chatter()
    del first
    while second._connections[0].unread_bytes:
        chatter()
    buffer = torch.empty(1 << 14, dtype=torch.uint8)
    second.wait(second.issue(Transfer(1, 7, {}, {0: buffer})))
    assert bool((buffer == 3).all())


def test_threads_of_a_rank_send_and_receive_at_the_same_time():
    threads = 3
    rounds = 60

    def exchange(transport: Sockets, thread: int) -> bool:
        peer = 1 - transport.rank
        draw = torch.Generator().manual_seed(thread)
        sizes = torch.randint(1, 1 << 12, (rounds,), generator=draw).tolist()
        for number, size in enumerate(sizes):
            size = LARGE // 8 if number % 20 == thread else size  # more than the kernel keeps
            tag = number * threads + thread
            sent = torch.full((size,), 1.0 + tag + 1000 * transport.rank)
            buffer = torch.empty(size)
            transport.wait(
                transport.issue(Transfer(transport.rank, tag, {peer: sent}, {peer: buffer}))
            )
            if not bool((buffer == 1.0 + tag + 1000 * peer).all()):
                return False
        return True

    both = transports()
    with ThreadPoolExecutor(2 * threads) as pool:
        futures = [
            pool.submit(exchange, each, thread) for each in both for thread in range(threads)
        ]
        assert [each.result(120) for each in futures] == [True] * 2 * threads


def test_a_thread_that_waits_is_woken_by_one_that_sends():
    left, right = transports()
    data = torch.randint(
        256, (LARGE,), dtype=torch.uint8
    )  # the kernel buffers a part, the polling thread sends the rest
    buffer = torch.empty_like(data)
    answer = torch.empty(1)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(lambda: left.wait(left.issue(Transfer(0, 2, {}, {1: answer}))))
        while not left._is_polling:
            time.sleep(0.001)
        left.issue(Transfer(0, 1, {1: data}, {}))  # only the peer waits for this message
        right.wait(right.issue(Transfer(1, 1, {}, {0: buffer})))
        right.wait(right.issue(Transfer(1, 2, {0: torch.ones(1)}, {})))
        waits.result(60)
    assert torch.equal(buffer, data)
    assert float(answer) == 1.0
