"""Transports over process groups of torch.distributed, with point-to-point messages: Gloo between CPUs, NCCL between GPUs.

Gloo: tagged messages, receives posted before sends. Gloo's own all-to-all posts each send before its receive, so a pair
of ranks runs half-duplex at random. Two collectives of one group issued in different orders swap data silently. Tagged
messages match in any order.

NCCL: grouped messages, a communicator and a CUDA stream per lane. NCCL ignores tags: between two ranks, messages of one
communicator match in the order of issue, and the batches of one communicator run one after another. So every rank must
issue the transfers of a lane in the same total order. Programs do: the task list is one order over all groups. Two
lanes need two communicators, because operations of one communicator may not run on two streams at a time. Ranks must
also issue the two lanes in one common order, or each lane may wait for the other to release a part of a device. The
loopback checks these rules: `run_ranks(..., in_order=True)`.

Streams and communicators have high priority. Otherwise NCCL's kernels would queue behind thousands of blocks of a
running matrix product, and nothing would overlap. No call makes the host wait for the device, unless
TORCH_NCCL_BLOCKING_WAIT is set.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist

from moesaic.comm.transport import AbstractTransport, Handle, Lane, Transfer, as_bytes

PAUSE_AT_EXIT = 0.1
"""Seconds that a process waits before its interpreter ends."""
LONGEST_PAUSE = 10.0
"""Most seconds that it waits while other threads are ready to run but have no processor."""


class Gloo(AbstractTransport):
    """Sends between the processes of a Gloo group. Lanes make no difference: messages of both overlap.

    Args:
        group: the process group of the ranks, with backend gloo. The ranks in a transfer are ranks of this group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        atexit.unregister(_let_threads_end)  # once for all transports
        atexit.register(_let_threads_end)

    def issue(self, transfer: Transfer) -> Handle:
        """Post all receives, then all sends. Messages without bytes are not sent; both sides know that."""
        handle = Handle(transfer)
        for peer, buffer in transfer.receives.items():
            if buffer.numel():
                handle.works.append(
                    dist.irecv(buffer, group=self._group, group_src=peer, tag=transfer.tag)
                )
        for peer, tensor in transfer.sends.items():
            if tensor.numel():
                handle.works.append(
                    dist.isend(tensor, group=self._group, group_dst=peer, tag=transfer.tag)
                )
        return handle

    def wait(self, handle: Handle) -> None:
        """Wait for all messages of a transfer."""
        senders = (peer for peer, buffer in handle.transfer.receives.items() if buffer.numel())
        for work in handle.works:
            peer, started = next(senders, None), time.perf_counter()
            work.wait()
            if peer is not None:
                self.waited[peer] += time.perf_counter() - started
        handle.works.clear()

    def note_wait(self, transfer: Transfer, seconds: float) -> None:
        """Do nothing: `wait` has counted the time for each message."""


def _let_threads_end() -> None:
    """Release the interpreter lock once before the interpreter ends, so that Gloo's threads can finish.

    Gloo's threads drop the tensors of a collective after its wait has returned. A thread that does so while the
    interpreter shuts down aborts the process: "terminate called without an active exception" (pytorch/pytorch#179291).
    This also happens after `destroy_process_group` if a DeviceMesh, FSDP2 or DDP still holds the group. On a busy
    machine such a thread may not be scheduled for a while, so the process waits as long as one is ready to run.
    """
    time.sleep(PAUSE_AT_EXIT)
    end, quiet = time.monotonic() + LONGEST_PAUSE, 0
    while (
        quiet < 3 and time.monotonic() < end
    ):  # a thread that waits for the lock looks idle while this one checks
        quiet = 0 if _other_threads_run() else quiet + 1
        time.sleep(0.005)


def _other_threads_run() -> bool:
    """Return whether another thread of this process runs or waits for a processor; False if the system does not tell."""
    own = str(threading.get_native_id())
    for path in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):
            if path.parent.name != own and path.read_bytes().rpartition(b")")[2].split()[0] == b"R":
                return True
    return False


HIGH = -1
"""Stream priority whose kernels run before those of other streams."""


class Nccl(AbstractTransport):
    """Sends between the devices of NCCL groups.

    Args:
        groups: a process group of the same ranks for each lane. Each needs its own communicator, created in advance:
            the first operation of a communicator involves all ranks, which a transfer may not (see `create`).
        device: this process's CUDA device.
    """

    def __init__(self, groups: Mapping[Lane, dist.ProcessGroup], device: torch.device) -> None:
        any_group = next(iter(groups.values()))
        super().__init__(any_group.rank(), any_group.size(), device)
        self._groups = dict(groups)
        self._streams = {lane: torch.cuda.Stream(device, priority=HIGH) for lane in groups}

    @classmethod
    def create(cls, device: torch.device, ranks: Sequence[int] | None = None) -> Nccl:
        """Create a group and its communicator for each lane; all ranks must call this together.

        Args:
            device: this process's CUDA device, which must be the current one.
            ranks: world ranks, ascending, including this one; None for all.
        """
        groups: dict[Lane, dist.ProcessGroup] = {}
        for lane in get_args(Lane):
            members = None if ranks is None else list(ranks)
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            group = dist.new_group(
                members,
                backend="nccl",
                pg_options=options,
                use_local_synchronization=members is not None,
            )
            assert isinstance(group, dist.ProcessGroup)
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            groups[lane] = group
        return cls(groups, device)

    def issue(self, transfer: Transfer) -> Handle:
        """Enqueue all messages as one batch on the lane's stream, after the work enqueued so far on the caller's stream.

        Messages without bytes are not sent; both sides know that. The buffers may be freed at any time after `wait`:
        the allocator knows that the lane's stream uses them.
        """
        handle = Handle(transfer)
        receives = {peer: buffer for peer, buffer in transfer.receives.items() if buffer.numel()}
        sends = {peer: tensor for peer, tensor in transfer.sends.items() if tensor.numel()}
        if not receives and not sends:
            return handle
        group, stream = self._groups[transfer.lane], self._streams[transfer.lane]
        batch = [
            dist.P2POp(dist.irecv, as_bytes(tensor), group=group, group_peer=peer)
            for peer, tensor in receives.items()
        ]
        batch += [
            dist.P2POp(dist.isend, as_bytes(tensor), group=group, group_peer=peer)
            for peer, tensor in sends.items()
        ]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for work in dist.batch_isend_irecv(batch):
                work.wait()  # the lane's stream waits for NCCL's own; the host does not
            handle.works.append(stream.record_event())
        for tensor in (*receives.values(), *sends.values()):
            tensor.record_stream(stream)
        return handle

    def wait(self, handle: Handle) -> None:
        """Make the caller's current stream wait for the batch. The host does not wait."""
        for event in handle.works:
            torch.cuda.current_stream(self.device).wait_event(event)
        handle.works.clear()
