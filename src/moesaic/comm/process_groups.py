"""Transports over process groups of torch.distributed: Gloo between CPUs, NCCL between GPUs, by point-to-point messages.

Gloo: tagged messages, receives posted before sends. Its own all-to-all posts each send before its receive, and a pair of ranks
then runs half-duplex at random; two collectives of one group issued in different orders swap data silently. Tagged messages
match in any order.

NCCL: grouped messages, a communicator and a CUDA stream per lane. NCCL ignores tags: between two ranks, messages of one
communicator match in the order of issue, and the batches of one communicator run one after another. So every rank must issue
the transfers of a lane in the same total order, which programs do: the task list is one order over all groups. Two lanes need
two communicators, because operations of one may not run on two streams at a time; ranks must issue the lanes in one order
between them as well, or the two may wait for each other's share of a device. `run_ranks(..., in_order=True)` of the loopback
runs under these rules. Streams and communicators have high priority: NCCL's kernels would otherwise queue behind thousands of
blocks of a product that runs, and nothing would overlap. No call makes the host wait for the device, unless
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
from torch import Tensor

from moesaic.comm.transport import AbstractTransport, Handle, Lane, Transfer, as_bytes

_TAKEN = (torch.uint8, torch.int64, torch.float32, torch.float64)
"""Types that Gloo sends as they are; a view as bytes costs two operations more for each message."""
PAUSE_AT_EXIT = 0.1
"""Seconds for which a process waits before its interpreter ends."""
LONGEST_PAUSE = 10.0
"""Seconds for which it waits at most while other threads have work but no processor."""


class Gloo(AbstractTransport):
    """Sends between the processes of a Gloo group. Lanes make no difference: messages of both overlap.

    Args:
        group: the process group of the ranks, backend gloo; ranks of a transfer are ranks in it.
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
                handle.works.append(dist.irecv(_plain(buffer), group=self._group, group_src=peer, tag=transfer.tag))
        for peer, tensor in transfer.sends.items():
            if tensor.numel():
                handle.works.append(dist.isend(_plain(tensor), group=self._group, group_dst=peer, tag=transfer.tag))
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
        """Count nothing: `wait` has done so, message by message."""


def _let_threads_end() -> None:
    """Let go of the interpreter once before it ends.

    Gloo's threads drop the tensors of a collective after its wait has returned. One that does so in an interpreter that takes
    itself apart aborts the process, "terminate called without an active exception" (pytorch/pytorch#179291), also after
    `destroy_process_group` where a DeviceMesh, FSDP2 or DDP still holds the group. On a crowded machine such a thread may not
    run for a while: as long as one wants to, the process waits.
    """
    time.sleep(PAUSE_AT_EXIT)
    end, quiet = time.monotonic() + LONGEST_PAUSE, 0
    while quiet < 3 and time.monotonic() < end:  # one that waits for the interpreter looks idle while this looks
        quiet = 0 if _others_run() else quiet + 1
        time.sleep(0.005)


def _others_run() -> bool:
    """Say whether another thread of this process runs or waits for a processor; False where the system does not tell."""
    own = str(threading.get_native_id())
    for path in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):
            if path.parent.name != own and path.read_bytes().rpartition(b")")[2].split()[0] == b"R":
                return True
    return False


def _plain(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor in a form that Gloo takes: its bytes, except for types of which it is known."""
    return tensor if tensor.dtype in _TAKEN and tensor.is_contiguous() else as_bytes(tensor)


HIGH = -1
"""The priority of streams whose kernels go before those of others."""


class Nccl(AbstractTransport):
    """Sends between the devices of NCCL groups.

    Args:
        groups: a process group of the same ranks for each lane, each with a communicator of its own that exists
            already: the first operation of a communicator takes all ranks, and a transfer may not (see `create`).
        device: this process's CUDA device.
    """

    def __init__(self, groups: Mapping[Lane, dist.ProcessGroup], device: torch.device) -> None:
        some = next(iter(groups.values()))
        super().__init__(some.rank(), some.size(), device)
        self._groups = dict(groups)
        self._streams = {lane: torch.cuda.Stream(device, priority=HIGH) for lane in groups}

    @classmethod
    def create(cls, device: torch.device, ranks: Sequence[int] | None = None) -> Nccl:
        """Make a group per lane, and its communicator; all its ranks call this together.

        Args:
            device: this process's CUDA device, which must be the current one.
            ranks: of the world, ascending, this one among them; None for all.
        """
        groups: dict[Lane, dist.ProcessGroup] = {}
        for lane in get_args(Lane):
            some = None if ranks is None else list(ranks)
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            group = dist.new_group(some, backend="nccl", pg_options=options, use_local_synchronization=some is not None)
            assert isinstance(group, dist.ProcessGroup)
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            groups[lane] = group
        return cls(groups, device)

    def issue(self, transfer: Transfer) -> Handle:
        """Enqueue all messages as one batch on the lane's stream, behind what the caller's stream holds so far.

        Messages without bytes are not sent; both sides know that. The buffers may be freed at any time after `wait`:
        the allocator learns that the lane's stream uses them.
        """
        handle = Handle(transfer)
        receives = {peer: buffer for peer, buffer in transfer.receives.items() if buffer.numel()}
        sends = {peer: tensor for peer, tensor in transfer.sends.items() if tensor.numel()}
        if not receives and not sends:
            return handle
        group, stream = self._groups[transfer.lane], self._streams[transfer.lane]
        batch = [dist.P2POp(dist.irecv, as_bytes(t), group=group, group_peer=p) for p, t in receives.items()]
        batch += [dist.P2POp(dist.isend, as_bytes(t), group=group, group_peer=p) for p, t in sends.items()]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for work in dist.batch_isend_irecv(batch):
                work.wait()  # the lane's stream waits for NCCL's own; the host does not
            handle.works.append(stream.record_event())
        for tensor in (*receives.values(), *sends.values()):
            tensor.record_stream(stream)
        return handle

    def wait(self, handle: Handle) -> None:
        """Make the caller's current stream wait for the batch; the host goes on."""
        for event in handle.works:
            torch.cuda.current_stream(self.device).wait_event(event)
        handle.works.clear()
