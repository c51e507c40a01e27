"""The NCCL transport with stand-ins for streams and batches: what is enqueued where, and in which
order. Needs no GPU."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moesaic.comm.process_groups import Nccl
from moesaic.comm.transport import Transfer

DEVICE = torch.device("cpu")


class Recorder:
    """Records events in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.batches: list[list[Any]] = []
        self.current = FakeStream("caller", self)
        self.made = 0


class FakeStream:
    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name = name
        self.recorder = recorder

    def wait_stream(self, other: FakeStream) -> None:
        self.recorder.log.append((self.name, "waits for stream", other.name))

    def wait_event(self, event: str) -> None:
        self.recorder.log.append((self.name, "waits for", event))

    def record_event(self) -> str:
        self.recorder.log.append((self.name, "records"))
        return f"event of {self.name}"


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    recorder = Recorder()

    def make(device: torch.device, priority: int) -> FakeStream:
        assert priority < 0, "kernels of messages would queue behind those of products"
        recorder.made += 1
        return FakeStream(f"stream {recorder.made}", recorder)

    @contextmanager
    def entered(stream: FakeStream) -> Any:
        before = recorder.current
        recorder.current = stream
        yield
        recorder.current = before

    def batch(ops: list[Any]) -> list[Any]:
        on = recorder.current.name
        recorder.batches.append(ops)
        recorder.log.append((on, "runs", len(ops)))
        return [
            SimpleNamespace(
                wait=lambda: recorder.log.append((recorder.current.name, "waits for work of", on))
            )
        ]

    def used(tensor: torch.Tensor, stream: FakeStream) -> None:
        recorder.log.append((stream.name, "uses", tensor.data_ptr()))

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: recorder.current)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(
        dist,
        "P2POp",
        lambda op, tensor, **options: SimpleNamespace(op=op, tensor=tensor, **options),
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", used)
    return recorder


def make_transport(rank: int = 1, world: int = 3) -> Nccl:
    groups = {
        lane: SimpleNamespace(rank=lambda: rank, size=lambda: world, lane=lane)
        for lane in ("intra", "inter")
    }
    return Nccl(groups, DEVICE)  # type: ignore[arg-type]


def test_a_batch_runs_on_its_lane_between_the_callers_work(recorder):
    transport = make_transport()
    send = torch.ones(2, 3, dtype=torch.bfloat16)
    receive = torch.empty(4, dtype=torch.int16)
    handle = transport.issue(Transfer(1, 9, {2: send}, {0: receive}, "inter"))
    assert recorder.log == [
        ("stream 2", "waits for stream", "caller"),
        ("stream 2", "runs", 2),
        ("stream 2", "waits for work of", "stream 2"),
        ("stream 2", "records"),
        ("stream 2", "uses", receive.data_ptr()),
        ("stream 2", "uses", send.data_ptr()),
    ]
    recorder.log.clear()
    transport.wait(handle)
    transport.wait(handle)
    assert recorder.log == [("caller", "waits for", "event of stream 2")]


def test_messages_are_bytes_for_ranks_of_the_lanes_group(recorder):
    send = torch.ones(2, 3, dtype=torch.bfloat16)
    receive = torch.empty(4, dtype=torch.int16)
    make_transport().issue(Transfer(1, 9, {2: send}, {0: receive}, "intra"))
    (ops,) = recorder.batches
    assert [(op.op, op.group_peer, op.group.lane) for op in ops] == [
        (dist.irecv, 0, "intra"),
        (dist.isend, 2, "intra"),
    ]
    assert [(op.tensor.dtype, op.tensor.numel()) for op in ops] == [
        (torch.uint8, 8),
        (torch.uint8, 12),
    ]
    assert [op.tensor.data_ptr() for op in ops] == [receive.data_ptr(), send.data_ptr()]


def test_lanes_have_streams_of_their_own(recorder):
    transport = make_transport()
    for lane in ("intra", "inter", "intra"):
        transport.issue(Transfer(1, 0, {0: torch.ones(1)}, {}, lane))
    assert [entry[0] for entry in recorder.log if entry[1] == "runs"] == [
        "stream 1",
        "stream 2",
        "stream 1",
    ]


def test_what_has_no_bytes_is_not_enqueued(recorder):
    transport = make_transport()
    handle = transport.issue(Transfer(1, 0, {0: torch.ones(0, 3)}, {2: torch.ones(0)}))
    transport.wait(handle)
    assert (recorder.log, recorder.batches) == ([], [])
    transport.issue(Transfer(1, 0, {0: torch.ones(0)}, {2: torch.ones(5)}))
    assert [op.group_peer for op in recorder.batches[0]] == [2]


def test_creating_it_makes_a_communicator_per_lane_with_all_ranks(recorder, monkeypatch):
    groups: list[Any] = []

    class FakeGroup(dist.ProcessGroup):
        def __init__(self) -> None:
            dist.ProcessGroup.__init__(self, 1, 3)

    def new_group(
        ranks: list[int] | None,
        timeout: timedelta,
        backend: str,
        pg_options: Any,
        use_local_synchronization: bool,
    ) -> Any:
        assert (ranks, use_local_synchronization) == (None, False)
        assert pg_options.is_high_priority_stream
        assert timeout == pg_options._timeout == timedelta(seconds=15)
        groups.append((backend, FakeGroup()))
        return groups[-1][1]

    reduced: list[Any] = []
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False
    )
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: reduced.append(group))
    transport = Nccl.create(DEVICE, timeout=timedelta(seconds=15))
    assert [backend for backend, _ in groups] == ["nccl", "nccl"]
    assert [id(group) for group in reduced] == [id(group) for _, group in groups]
    assert (
        transport.rank,
        transport.world,
        transport.device,
        transport.take_tags(2),
        transport.take_tags(1),
    ) == (1, 3, DEVICE, 0, 2)
