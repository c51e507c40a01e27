"""What a rank says when another one's messages do not come: where both of them wait.

Ranks that call different layers, or of which one runs no backward pass, wait for each other's
messages until the timeout of their process group; then one connection after the other breaks. Each
rank writes where it waits into the store of the group once its own wait has failed, and takes that
back if it sends again. So nothing is written while all goes well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch.distributed as dist

from moesaic.errors import InputError

GRACE_SECONDS = 3.0
"""How long a rank whose wait failed looks for the other ranks' words in the store."""
_KEY = "moesaic/waits/{}"
"""The key of a rank's words in the store."""
ADVICE = (
    "call the same layers in the same order on every rank, forward and backward, also where a rank "
    "has no tokens, and freeze the same parameters"
)


class LostMessageError(RuntimeError):
    """Raised when a rank's messages do not come, and that rank does not say where it waits."""


def lost_message(
    group: dist.ProcessGroup, peer: int | None, doing: str, error: RuntimeError
) -> Exception:
    """Return the error to raise where a wait for messages has failed.

    Args:
        group: the process group of the messages.
        peer: the rank whose message did not come, or did not go.
        doing: what this rank does, in words; "" if that is not known.
        error: the backend's error.

    Returns:
        an InputError that names ranks which wait in different places, a `LostMessageError` that
        names this rank and the other, or `error` itself if all wait in the same place.
    """
    if not doing:
        return error
    rank = group.rank()
    places = {rank: doing} | _others(group, doing)
    if len(set(places.values())) > 1:  # ranks wait in different places
        return InputError(f"{in_words(places)}: {ADVICE}")
    if peer is None or peer in places:  # all say the same place
        return error
    return LostMessageError(
        f"rank {rank} waited in {doing} for rank {peer}, which waits in no call of a layer, or has "
        f"ended: {ADVICE}"
    )


@contextmanager
def said(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """Raise the error of `lost_message` where a collective in the block fails.

    Args:
        group: its process group; None for the default group.
        doing: what this rank does, in words.
    """
    try:
        yield
    except RuntimeError as error:
        waiting_group = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
        assert waiting_group is not None
        raise lost_message(waiting_group, peer=None, doing=doing, error=error) from error


def take_back(group: dist.ProcessGroup) -> None:
    """Remove from the store of a group what this rank has written there, since it waits no more."""
    with suppress(RuntimeError, ValueError, AttributeError, KeyError):
        store = dist.distributed_c10d._get_process_group_store(group)
        store.delete_key(_KEY.format(group.rank()))


def in_words(places: Mapping[int, str]) -> str:
    """Return which ranks wait where, in words, from what each rank does."""
    ranks_at: dict[str, list[int]] = {}
    for rank in sorted(places):
        ranks_at.setdefault(places[rank], []).append(rank)
    parts = []
    for place, ranks in ranks_at.items():
        listed = ", ".join(map(str, ranks))
        if len(ranks) == 1:
            parts.append(f"rank {listed} waits in {place}")
        else:
            parts.append(f"ranks {listed} wait in {place}")
    return "; ".join(parts)


def _others(group: dist.ProcessGroup, doing: str) -> dict[int, str]:
    """Write what this rank does into the store of a group, and return what the others have written
    or write soon, by rank."""
    places: dict[int, str] = {}

    def ask() -> None:
        """Ask the store, which may be gone, or of a process that is stopped."""
        with suppress(RuntimeError, ValueError, AttributeError, KeyError):
            store = dist.distributed_c10d._get_process_group_store(group)
            store.set(_KEY.format(group.rank()), doing)
            others = [rank for rank in range(group.size()) if rank != group.rank()]
            until = time.monotonic() + GRACE_SECONDS
            while len(places) < len(others) and time.monotonic() < until:
                for rank in others:
                    key = _KEY.format(rank)
                    if rank not in places and store.check([key]):
                        places[rank] = store.get(key).decode()
                time.sleep(0.05)

    # In a thread of its own, since a store of a stopped process may block for long.
    thread = threading.Thread(target=ask, name="moesaic-waits", daemon=True)
    thread.start()
    thread.join(2 * GRACE_SECONDS)  # no longer, even if the store blocks
    return dict(places)
