"""Gloo by tagged point-to-point messages, receives posted before sends.

Gloo's own all-to-all posts each send before its receive, and a pair of ranks then runs half-duplex at random; two
collectives of one group issued in different orders swap data silently. Tagged messages match in any order.
"""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.comm.transport import AbstractTransport, Handle, Transfer, as_bytes

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
