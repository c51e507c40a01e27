"""All ranks in one process: a mailbox, and a driver that runs ordinary blocking code of all ranks
in lockstep.

Tests need no processes, and every run is the same: one rank runs at a time, and a seed decides
which rank runs next. The mailbox is stricter than real transports: receive buffers hold NaN until
they are waited for, a send is complete only once its receiver has posted the buffer, and a send
buffer must not change before that.

With `run_ranks(..., in_order=True)` messages have no tags, as on NCCL: batches of a lane run one
after another, and messages match in that order. So tests without a GPU find programs that would
hang or swap data on NCCL.
"""

from __future__ import annotations

import contextvars
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from moesaic.comm.transport import AbstractTransport, Handle, Lane, Transfer, as_bytes

T = TypeVar("T")


class Loopback:
    """A mailbox that keeps the messages of all ranks until their receivers wait for them, and
    counts the bytes sent.

    Receive buffers hold NaN until then, which reveals a task that reads too early.

    Args:
        in_order: run the transfers of a lane in the order of issue, as NCCL does. Otherwise
            messages are matched by tag alone.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        self._queues = InOrder() if in_order else None
        """Batches in the order of issue; None if messages are matched by tag."""
        self._mail: dict[tuple[int, int, int], Tensor] = {}
        """Messages that were sent and not received, by (tag, source, target)."""
        self._posted: set[tuple[int, int, int]] = set()
        """(tag, source, target) of receive buffers that were posted and whose sender has not
        waited."""
        self.bytes_sent: dict[tuple[int, int], int] = {}
        """Bytes by (source, target), since the mailbox was created."""

    def issue(self, transfer: Transfer) -> Handle:
        """Post the sends, and fill the receive buffers with NaN (integers: the largest value)."""
        handle = Handle(transfer)
        for peer, tensor in transfer.sends.items():
            key = (transfer.tag, transfer.rank, peer)
            assert key not in self._mail, (
                f"two messages with tag {transfer.tag} from {transfer.rank} to {peer}"
            )
            assert peer != transfer.rank, f"rank {peer} sends to itself"
            assert tensor.is_contiguous(), (
                f"rank {transfer.rank} sends a tensor that is not contiguous"
            )
            self._mail[key] = tensor.detach().clone()
            # `wait` compares the two, to see whether the sender has changed its tensor.
            handle.works.append((peer, tensor, self._mail[key]))
            pair = (transfer.rank, peer)
            num_bytes = tensor.numel() * tensor.element_size()
            self.bytes_sent[pair] = self.bytes_sent.get(pair, 0) + num_bytes
        for peer, buffer in transfer.receives.items():
            assert buffer.is_contiguous(), (
                f"rank {transfer.rank} receives into a tensor that is not contiguous"
            )
            self._posted.add((transfer.tag, peer, transfer.rank))
            _poison(buffer)
        if self._queues is not None:
            self._queues.add(handle)
        return handle

    def missing(self, handle: Handle) -> list[int]:
        """Return the peers that have not posted their side of a transfer, ascending. If there are
        none, it can be waited for."""
        transfer = handle.transfer
        missing = set[int]()
        for peer in transfer.receives:
            if (transfer.tag, peer, transfer.rank) not in self._mail:
                missing.add(peer)
        for peer in transfer.sends:
            if (transfer.tag, transfer.rank, peer) not in self._posted:
                missing.add(peer)
        if self._queues is not None:
            missing.update(self._queues.blocked_by(handle))
        return sorted(missing)

    def wait(self, handle: Handle) -> None:
        """Deliver the messages of a transfer. No peer may be `missing`."""
        transfer = handle.transfer
        for peer, tensor, sent in handle.works:
            self._posted.discard((transfer.tag, transfer.rank, peer))
            is_unchanged = torch.equal(as_bytes(tensor.detach()), as_bytes(sent))
            assert is_unchanged, (
                f"rank {transfer.rank} changed what it sends to {peer} before it waited (tag "
                f"{transfer.tag})"
            )
        handle.works.clear()
        if self._queues is not None:
            self._queues.end(handle)
        for peer, buffer in transfer.receives.items():
            message = self._mail.pop((transfer.tag, peer, transfer.rank))
            assert (message.shape, message.dtype) == (buffer.shape, buffer.dtype), (
                f"rank {transfer.rank} expects {buffer.shape} {buffer.dtype} of {peer}: "
                f"{message.shape} {message.dtype}"
            )
            buffer.copy_(message)

    @property
    def is_empty(self) -> bool:
        """Whether every message was received."""
        return not self._mail

    def left(self) -> str:
        """Return a text that lists the messages that were not received."""
        return ", ".join(
            f"tag {tag} from rank {source} to rank {target}"
            for tag, source, target in sorted(self._mail)
        )


class LoopbackTransport(AbstractTransport):
    """One rank's transport over a mailbox, for code that blocks. `run_ranks` creates them."""

    def __init__(self, rank: int, world: int, steps: _LockStep) -> None:
        super().__init__(rank, world)
        self._steps = steps
        self.mailbox = steps.mail
        """The mailbox of all ranks, with its counters."""
        self._open: dict[int, Handle] = {}
        """The transfers not waited for, by the identity of their handles."""

    def issue(self, transfer: Transfer) -> Handle:
        """Post a transfer. No other rank runs meanwhile."""
        assert transfer.rank == self.rank, (
            f"a transfer of rank {transfer.rank} was issued on the transport of rank {self.rank}"
        )
        handle = self.mailbox.issue(transfer)
        self._open[id(handle)] = handle
        return handle

    def wait(self, handle: Handle) -> None:
        """Let other ranks run until the messages have arrived.

        Raises:
            RuntimeError: if all ranks wait.
        """
        if self._open.pop(id(handle), None) is not None:
            self._steps.wait(self.rank, handle)

    def left(self) -> str:
        """Return a text that lists the transfers that were not waited for."""
        return ", ".join(
            f"tag {handle.transfer.tag} on rank {self.rank}" for handle in self._open.values()
        )


class _Stopped(BaseException):
    """Unwinds a rank after another one failed. It is not an `Exception`, so that code which catches
    those does not stop it."""


class _LockStep:
    """Schedules the ranks' threads: exactly one holds the baton and runs."""

    def __init__(self, world: int, seed: int, *, in_order: bool) -> None:
        self.mail = Loopback(in_order=in_order)
        self.done = threading.Event()
        """Set when no rank runs any more."""
        self.failures: dict[int, BaseException] = {}
        """By rank, the exception that its code raised."""
        self.stopped = False
        """Whether all ranks are to end as soon as they wait."""
        self.running = -1
        """The rank that holds the baton; -1 before the first."""
        self._random = random.Random(seed)
        self._live = set(range(world))
        """Ranks that have not ended."""
        self._waiting: dict[int, Handle] = {}
        """By rank that waits, what it waits for."""
        self._errors: dict[int, BaseException] = {}
        """By rank that waits, an exception to raise there."""
        self._gates = [threading.Lock() for _ in range(world)]
        """A lock per rank, closed while the rank does not hold the baton."""
        for gate in self._gates:
            gate.acquire()

    def await_turn(self, rank: int) -> None:
        """Block a rank until it gets the baton."""
        self._gates[rank].acquire()

    def wait(self, rank: int, handle: Handle) -> None:
        """Let other ranks run until a handle of this rank is ready, then deliver its messages.

        PyTorch's default generator belongs to the process. It is saved and restored here, so each
        rank has its own random stream, as processes do.
        """
        if not self.stopped:
            self._waiting[rank] = handle
            state = torch.get_rng_state()
            if self.pass_on(rank):  # else this rank goes on at once
                self._gates[rank].acquire()
                torch.set_rng_state(state)
            del self._waiting[rank]
        if self.stopped:
            raise _Stopped
        if rank in self._errors:
            raise self._errors.pop(rank)
        self.mail.wait(handle)

    def end(self, rank: int) -> None:
        """Remove a rank that has finished."""
        self._live.discard(rank)
        self.pass_on(rank)

    def pass_on(self, rank: int) -> bool:
        """Give the baton to a random rank that can run. Return whether that is another rank."""
        runnable = self._runnable()
        if not runnable and self._live:
            self._resolve_deadlock()
            runnable = self._runnable()
        if not runnable:  # all ranks have ended
            self.done.set()
            return False
        self.running = self._random.choice(runnable)
        if self.running == rank:
            return False
        self._gates[self.running].release()
        return True

    def _runnable(self) -> list[int]:
        """Return the ranks that can go on, ascending."""
        return [rank for rank in sorted(self._live) if self._can_go_on(rank)]

    def _can_go_on(self, rank: int) -> bool:
        """Return whether a rank waits for nothing that has not arrived, or is to be stopped."""
        if self.stopped or rank in self._errors or rank not in self._waiting:
            return True
        return not self.mail.missing(self._waiting[rank])

    def _resolve_deadlock(self) -> None:
        """Resolve a deadlock: if a rank has failed, stop the others, else give each waiting rank an
        error."""
        if self.failures:
            self.stopped = True
            return
        ranks = sorted(self._waiting)
        waits = []
        for rank in ranks:
            handle = self._waiting[rank]
            waits.append(
                f"rank {rank} for tag {handle.transfer.tag} with {self.mail.missing(handle)}"
            )
        for rank in ranks:
            self._errors[rank] = RuntimeError(
                f"ranks {ranks} wait for messages that nobody sends: {'; '.join(waits)}"
            )


def run_ranks(
    world: int,
    function: Callable[[AbstractTransport], T],
    *,
    seed: int = 0,
    in_order: bool = False,
    timeout_seconds: float = 120.0,
) -> list[T]:
    """Run ordinary blocking code of n ranks in one process, in lockstep.

    There is one thread per rank, of which exactly one runs at any moment. The baton changes hands
    when a rank waits for a handle, and when it ends. Autograd works: on a CPU the backward pass of
    a thread runs in that thread. PyTorch's per-thread modes (grad mode, inference mode, autocast)
    start as in the caller and are then separate for each rank. The default generator belongs to the
    process, so it is exchanged together with the baton: each rank has its own generator, which
    starts in the caller's state. The caller's state is restored at the end. Python's and NumPy's
    generators, the default dtype and the number of threads are not exchanged.

    Args:
        world: number of ranks.
        function: the code of a rank; called with its transport.
        seed: seed of the order in which ranks run; the same seed gives the same order.
        in_order: match messages in the order of issue per lane, as NCCL does, and not by tag. Code
            that would swap data on NCCL raises an AssertionError, code that would hang a
            RuntimeError.
        timeout_seconds: time limit for the whole run.

    Returns:
        each rank's result.

    Raises:
        RuntimeError: in every waiting rank, if all ranks wait; at the end, if messages are left
            over.
        TimeoutError: if the time limit is exceeded; the running rank cannot be stopped then.
        BaseException: the exception that a rank raised; the lowest rank's, if several raised. Other
            ranks run until they wait for a failed one, and are then stopped.
    """
    steps = _LockStep(world, seed, in_order=in_order)
    transports = [LoopbackTransport(rank, world, steps) for rank in range(world)]
    results: dict[int, T] = {}
    threads = [_rank_thread(transport, function, steps, results) for transport in transports]
    _run_in_turns(threads, steps, timeout_seconds)
    if steps.failures:
        raise steps.failures[min(steps.failures)]
    texts = [transport.left() for transport in transports]
    not_waited = ", ".join(text for text in texts if text)
    if not_waited or not steps.mail.is_empty:
        raise RuntimeError(
            f"transfers never waited for: {not_waited or 'none'}; never received: "
            f"{steps.mail.left()}"
        )
    return [results[rank] for rank in range(world)]


def _run_in_turns(
    threads: Sequence[threading.Thread], steps: _LockStep, timeout_seconds: float
) -> None:
    """Run the threads of all ranks to their ends, and restore the default generator's state."""
    generator = torch.get_rng_state()
    for thread in threads:
        thread.start()
    try:
        steps.pass_on(-1)  # -1: no rank has the baton yet
        if not steps.done.wait(timeout_seconds):
            raise TimeoutError(
                f"rank {steps.running} of {len(threads)} was still running after "
                f"{timeout_seconds} seconds"
            )
    finally:
        steps.stopped = True
        torch.set_rng_state(generator)
    for thread in threads:
        thread.join()


def _rank_thread(
    transport: AbstractTransport,
    function: Callable[[AbstractTransport], T],
    steps: _LockStep,
    results: dict[int, T],
) -> threading.Thread:
    """Return a rank's thread, which starts with the caller's PyTorch modes and puts its result into
    `results`."""
    rank = transport.rank
    generator = torch.get_rng_state()
    context = contextvars.copy_context()
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu")

    def run() -> None:
        """Run one rank in its turns, with the settings of the thread that started it."""
        steps.await_turn(rank)
        try:
            if not steps.stopped:
                torch.set_rng_state(generator)
                with (
                    torch.inference_mode(inference),
                    torch.set_grad_enabled(grad),
                    torch.autocast("cpu", dtype=dtype, enabled=autocast),
                ):
                    results[rank] = function(transport)
        except _Stopped:
            pass
        except BaseException as error:
            steps.failures[rank] = error
        finally:
            steps.end(rank)

    return threading.Thread(target=context.run, args=(run,), name=f"rank {rank}", daemon=True)


def _poison(buffer: Tensor) -> None:
    """Fill a receive buffer with a value that shows where it is read too early."""
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(float("nan"))
    elif buffer.dtype == torch.bool:
        buffer.fill_(True)
    else:
        buffer.fill_(torch.iinfo(buffer.dtype).max)


@dataclass
class _Batch:
    """The messages of one rank's transfer that have not been matched with the other side."""

    tag: int
    sends: set[int]
    """Peers that have not received."""
    receives: set[int]
    """Peers that have not sent."""

    @property
    def has_ended(self) -> bool:
        """Whether all messages were matched."""
        return not self.sends and not self.receives


class InOrder:
    """A queue of batches per rank and lane. Only the first batch of a queue runs; it ends once all
    its messages have matched."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, Lane], deque[_Batch]] = {}
        """By rank and lane, its batches that have not ended, in the order of issue."""
        self._batches: dict[int, _Batch] = {}
        """By the identity of a handle that was not waited for, its batch."""

    def add(self, handle: Handle) -> None:
        """Enqueue a transfer and run the batches that can run. Messages without bytes are not sent.

        Raises:
            AssertionError: if a message would be delivered to a buffer with another tag.
        """
        transfer = handle.transfer
        sends = {peer for peer, tensor in transfer.sends.items() if tensor.numel()}
        receives = {peer for peer, buffer in transfer.receives.items() if buffer.numel()}
        batch = _Batch(transfer.tag, sends, receives)
        self._batches[id(handle)] = batch
        self._queues.setdefault((transfer.rank, transfer.lane), deque()).append(batch)
        self._run(transfer)

    def blocked_by(self, handle: Handle) -> list[int]:
        """Return the peers whose side of a transfer has not run, ascending."""
        batch = self._batches.get(id(handle))
        return [] if batch is None else sorted(batch.sends | batch.receives)

    def end(self, handle: Handle) -> None:
        """Forget a transfer that was waited for."""
        self._batches.pop(id(handle), None)

    def _run(self, transfer: Transfer) -> None:
        """Run all batches of the transfer's lane that have become the first of their ranks, and so
        can be matched."""
        lane = transfer.lane
        changed = deque([transfer.rank])  # ranks whose first batch may be another one now
        while changed:
            rank = changed.popleft()
            queue = self._queues.get((rank, lane))
            if not queue:
                continue
            batch = queue[0]
            for peer in sorted(batch.sends | batch.receives):
                peer_queue = self._queues.get((peer, lane))
                if not peer_queue:
                    continue
                _match(rank, batch, peer, peer_queue[0])
                if peer_queue[0].has_ended:
                    peer_queue.popleft()
                    changed.append(peer)
            if batch.has_ended:
                queue.popleft()
                changed.append(rank)


def _match(rank: int, batch: _Batch, peer: int, other: _Batch) -> None:
    """Match the messages that the running batches of two ranks have for each other."""
    goes_there = peer in batch.sends and rank in other.receives
    comes_back = peer in batch.receives and rank in other.sends
    assert batch.tag == other.tag or not (goes_there or comes_back), (
        f"without tags, a message of rank {rank} with tag {batch.tag} meets one of rank "
        f"{peer} with tag {other.tag}"
    )
    if goes_there:
        batch.sends.discard(peer)
        other.receives.discard(rank)
    if comes_back:
        batch.receives.discard(peer)
        other.sends.discard(rank)
