"""Transports over process groups of torch.distributed, with point-to-point messages: Gloo between
CPUs, NCCL between GPUs.

Gloo: tagged messages, receives posted before sends. Gloo's own all-to-all posts each send before
its receive, so a pair of ranks runs half-duplex at random. Two collectives of one group issued in
different orders swap data silently. Tagged messages match in any order.

NCCL: grouped messages, a communicator and a CUDA stream per lane. NCCL ignores tags: between two
ranks, messages of one communicator match in the order of issue, and the batches of one communicator
run one after another. So every rank must issue the transfers of a lane in the same total order.
Programs do: the task list is one order over all groups. Two lanes need two communicators, because
operations of one communicator may not run on two streams at a time. Ranks must also issue the two
lanes in one common order, or each lane may wait for the other to release a part of a device. The
loopback checks these rules: `run_ranks(..., in_order=True)`.

Streams and communicators have high priority. Otherwise NCCL's kernels would queue behind thousands
of blocks of a running matrix product, and nothing would overlap. No call makes the host wait for
the device, unless TORCH_NCCL_BLOCKING_WAIT is set.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout
from torch.distributed.device_mesh import DeviceMesh

from moesaic.comm.transport import TAG_LIMIT, AbstractTransport, Handle, Lane, Transfer, as_bytes


def timeout_of(*groups: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout for a new process group: the one that the caller chose for theirs.

    Args:
        groups: groups of the caller whose ranks the new group connects. If all of them have torch's
            default timeout, the default group decides, whose timeout is that of
            `init_process_group`.

    Returns:
        the timeout; None if no backend tells it, so that torch chooses.
    """
    defaults = (dist.default_pg_timeout, default_pg_nccl_timeout)
    for group in groups:
        for timeout in _timeouts(group):
            if timeout not in defaults:
                return timeout
    world = dist.group.WORLD
    return None if world is None else next(_timeouts(world), None)


def _timeouts(group: dist.ProcessGroup) -> Iterator[timedelta]:
    """Yield the timeouts of a group's backends."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            yield timeout


def set_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Set how long the operations of a group wait, from now on; None for the default group."""
    public = getattr(dist, "set_timeout", None)  # torch 2.14 has it
    set_group_timeout = public or dist.distributed_c10d._set_pg_timeout
    set_group_timeout(timeout, group=group)


def keep_timeout(device_mesh: DeviceMesh, *groups: dist.ProcessGroup) -> DeviceMesh:
    """Give the groups that torch made for a device mesh the timeout of `timeout_of(*groups)`;
    return the mesh."""
    timeout = timeout_of(*groups)
    if timeout is None:
        return device_mesh
    for group in device_mesh.get_all_groups():
        if group is not dist.group.WORLD and timeout not in _timeouts(group):
            set_timeout(group, timeout)
    return device_mesh


PAUSE_AT_EXIT = 0.1
"""Seconds that a process waits before its interpreter ends."""
LONGEST_PAUSE = 10.0
"""Most seconds that it waits while other threads are ready to run but have no processor."""


class Gloo(AbstractTransport):
    """Sends between the processes of a Gloo group. Lanes make no difference: messages of both
    overlap.

    Args:
        group: the process group of the ranks, with backend gloo. The ranks in a transfer are ranks
            of this group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        self._has_told = False
        """Whether this rank has written where it waits into the group's store (`waits.py`)."""
        self._open: dict[int, Handle] = {}
        """The transfers not waited for. One that an error leaves behind still fills its buffers: if
        they went, no later message between the two ranks would arrive."""
        atexit.unregister(_let_threads_end)  # once for all transports
        atexit.register(_let_threads_end)

    def issue(self, transfer: Transfer) -> Handle:
        """Post all receives, then all sends. Messages without bytes are not sent; both sides know
        that."""
        handle = Handle(transfer)
        self._open[id(handle)] = handle
        peer = None  # of the message that is posted, for the error
        if self._has_told:  # and has gone on since
            from moesaic.comm.waits import take_back

            take_back(self._group)
            self._has_told = False
        try:
            for peer, buffer in transfer.receives.items():
                if buffer.numel():
                    handle.works.append(
                        dist.irecv(
                            buffer,
                            group=self._group,
                            group_src=peer,
                            tag=_sized_tag(transfer.tag, buffer.nbytes),
                        )
                    )
            for peer, tensor in transfer.sends.items():
                if tensor.numel():
                    handle.works.append(
                        dist.isend(
                            tensor,
                            group=self._group,
                            group_dst=peer,
                            tag=_sized_tag(transfer.tag, tensor.nbytes),
                        )
                    )
        except RuntimeError as error:  # the connection is broken already
            raise self._lost(peer, error) from error
        return handle

    def wait(self, handle: Handle) -> None:
        """Wait for all messages of a transfer."""
        # The works are those of `issue`: the receives, then the sends, without empty messages.
        transfer = handle.transfer
        senders = [peer for peer, buffer in transfer.receives.items() if buffer.numel()]
        receivers = [peer for peer, tensor in transfer.sends.items() if tensor.numel()]
        for number, (work, peer) in enumerate(zip(handle.works, (*senders, *receivers))):
            started = time.perf_counter()
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(peer, error) from error
            is_receive = number < len(senders)
            if is_receive:
                self.waited[peer] += time.perf_counter() - started
        handle.works.clear()
        self._open.pop(id(handle), None)

    def _lost(self, peer: int | None, error: RuntimeError) -> Exception:
        """Return the error that says where ranks wait for each other."""
        from moesaic.comm.waits import lost_message  # what only a run that fails needs

        self._has_told = True
        return lost_message(self._group, peer, self.doing, error)

    def note_wait(self, transfer: Transfer, seconds: float) -> None:
        """Do nothing: `wait` has counted the time for each message."""


def _sized_tag(tag: int, num_bytes: int) -> int:
    """Return the tag of a message, which depends on its size too: the tag of the transfer modulo
    `_TAGS`, then a hash of the size below `_SIZES` as the last digit.

    Gloo aborts the process if a message is larger than its buffer. Ranks that do different things
    wait for each other instead, and then say what.
    """
    # without the product's last bits, which depend on few bits of the size
    size_hash = (num_bytes * _ODD >> 16) % _SIZES
    return tag % _TAGS * _SIZES + size_hash


_TAGS = 2**20
"""Tags that a message in flight is told from."""
_SIZES = TAG_LIMIT // _TAGS
"""Hashes of sizes."""
_ODD = 2654435761
"""2**32 divided by the golden ratio: Knuth's multiplicative hash."""


def _let_threads_end() -> None:
    """Release the interpreter lock once before the interpreter ends, so that Gloo's threads can
    finish.

    Gloo's threads drop the tensors of a collective after its wait has returned. A thread that does
    so while the interpreter shuts down aborts the process: "terminate called without an active
    exception" (pytorch/pytorch#179291). This also happens after `destroy_process_group` if a
    DeviceMesh, FSDP2 or DDP still holds the group. On a busy machine such a thread may not be
    scheduled for a while, so the process waits as long as one is ready to run.
    """
    time.sleep(PAUSE_AT_EXIT)
    end = time.monotonic() + LONGEST_PAUSE
    # A thread that waits for the lock looks idle while this one checks, so one look is not enough.
    num_idle_looks = 0
    while num_idle_looks < 3 and time.monotonic() < end:
        num_idle_looks = 0 if _other_threads_run() else num_idle_looks + 1
        time.sleep(0.005)


def _other_threads_run() -> bool:
    """Return whether another thread of this process runs or waits for a processor; False if the
    system does not tell."""
    own_id = str(threading.get_native_id())
    for path in Path("/proc/self/task").glob("*/stat"):
        if path.parent.name == own_id:
            continue
        with suppress(OSError):  # the thread has ended
            # "ID (NAME) STATE ...", where the name may have brackets of its own
            _, _, after_name = path.read_bytes().rpartition(b")")
            if after_name.split()[0] == b"R":
                return True
    return False


HIGH = -1
"""Stream priority whose kernels run before those of other streams."""


class Nccl(AbstractTransport):
    """Sends between the devices of NCCL groups.

    Args:
        groups: a process group of the same ranks for each lane. Each needs its own communicator,
            created in advance: the first operation of a communicator involves all ranks, which a
            transfer may not (see `create`).
        device: this process's CUDA device.
    """

    def __init__(self, groups: Mapping[Lane, dist.ProcessGroup], device: torch.device) -> None:
        any_group = next(iter(groups.values()))
        super().__init__(any_group.rank(), any_group.size(), device)
        self._groups = dict(groups)
        self._streams = {lane: torch.cuda.Stream(device, priority=HIGH) for lane in groups}
        """By lane, the stream on which its messages are sent."""

    @classmethod
    def create(
        cls,
        device: torch.device,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
    ) -> Nccl:
        """Create a group and its communicator for each lane; all ranks must call this together.

        Args:
            device: this process's CUDA device, which must be the current one.
            ranks: world ranks, ascending, including this one; None for all.
            timeout: how long their operations wait; None for torch's default.
        """
        groups: dict[Lane, dist.ProcessGroup] = {}
        for lane in get_args(Lane):
            members = None if ranks is None else list(ranks)
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            if timeout is not None:
                options._timeout = timeout
            group = dist.new_group(
                members,
                timeout=timeout,
                backend="nccl",
                pg_options=options,
                use_local_synchronization=members is not None,  # these ranks alone take part
            )
            assert isinstance(group, dist.ProcessGroup)
            # creates the communicator now, while all ranks take part
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            groups[lane] = group
        return cls(groups, device)

    def issue(self, transfer: Transfer) -> Handle:
        """Enqueue all messages as one batch on the lane's stream, after the work enqueued so far on
        the caller's stream.

        Messages without bytes are not sent; both sides know that. The buffers may be freed at any
        time after `wait`: the allocator knows that the lane's stream uses them.
        """
        handle = Handle(transfer)
        receives = {peer: buffer for peer, buffer in transfer.receives.items() if buffer.numel()}
        sends = {peer: tensor for peer, tensor in transfer.sends.items() if tensor.numel()}
        if not receives and not sends:
            return handle
        group = self._groups[transfer.lane]
        stream = self._streams[transfer.lane]
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
