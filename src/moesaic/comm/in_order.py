"""What a transport without tags does, NCCL's way: batches of a lane run one after another and messages match in that order.

The loopback can run under this rule (`run_ranks(..., in_order=True)`), so that tests without a GPU find the programs that
would hang or swap data on NCCL.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from moesaic.comm.transport import Handle, Lane, Transfer


@dataclass
class _Batch:
    tag: int
    sends: set[int]
    """Peers whose side of a message has not run yet."""
    receives: set[int]


class InOrder:
    """A queue of batches per rank and lane. Only the first of a queue runs; it ends when all its messages have met."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, Lane], deque[_Batch]] = {}
        self._batches: dict[int, _Batch] = {}

    def add(self, handle: Handle) -> None:
        """Enqueue a transfer and run what can run; messages without bytes are not sent.

        Raises:
            AssertionError: if a message would be delivered to a buffer of another tag.
        """
        transfer = handle.transfer
        sends = {peer for peer, tensor in transfer.sends.items() if tensor.numel()}
        receives = {peer for peer, buffer in transfer.receives.items() if buffer.numel()}
        batch = self._batches[id(handle)] = _Batch(transfer.tag, sends, receives)
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
        lane, changed = transfer.lane, deque([transfer.rank])
        while changed:
            rank = changed.popleft()
            queue = self._queues.get((rank, lane))
            if not queue:
                continue
            batch = queue[0]
            for peer in sorted(batch.sends | batch.receives):
                others = self._queues.get((peer, lane))
                if others:
                    _meet(rank, batch, peer, others[0])
                    if not others[0].sends | others[0].receives:
                        others.popleft()
                        changed.append(peer)
            if not batch.sends | batch.receives:
                queue.popleft()
                changed.append(rank)


def _meet(rank: int, batch: _Batch, peer: int, other: _Batch) -> None:
    """Run the messages that two ranks' running batches have for each other."""
    both = (peer in batch.sends and rank in other.receives) or (peer in batch.receives and rank in other.sends)
    assert not both or batch.tag == other.tag, (
        f"without tags, what rank {rank} does under tag {batch.tag} meets what rank {peer} does under tag {other.tag}"
    )
    if peer in batch.sends and rank in other.receives:
        batch.sends.discard(peer)
        other.receives.discard(rank)
    if peer in batch.receives and rank in other.sends:
        batch.receives.discard(peer)
        other.sends.discard(rank)
