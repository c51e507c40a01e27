"""Whether links carry what they did: a few messages inside nodes and between them, timed now and then while a run trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

import torch

from moesaic.comm.transport import Transfer
from moesaic.train.ranks import Ranks

PROBE_BYTES = 1 << 18
"""Of a message."""
REPEATS = 5
"""Messages of each kind, of which the fastest counts: what disturbs makes slower."""
DRIFT = 0.2
"""Share by which a rate must have changed, in two probes one after the other."""
KINDS: dict[Literal["inside", "outside"], str] = {"inside": "inside nodes", "outside": "between nodes"}
"""Which links are probed, and what they are called."""


class LinkRates:
    """Remembers how fast links were; all ranks make it and call it together.

    Args:
        ranks: of the run, on a mesh.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._usual: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def drift(self) -> Mapping[Literal["inside", "outside"], float]:
        """Probe the links; return, the same on all ranks, which of them are now how many times as fast as they were.

        The first probe says what is usual. A change counts where two probes agree on it, and is usual from then on.
        """
        found: dict[Literal["inside", "outside"], float] = {}
        for kind in KINDS:
            partners = self._partners(kind)
            if partners is None:
                continue
            seconds = self._seconds(kind, *partners)
            usual = self._usual.setdefault(kind, seconds)
            both = [usual / self._before.get(kind, usual), usual / seconds]
            self._before[kind] = seconds
            if min(both) > 1 + DRIFT or max(both) < 1 / (1 + DRIFT):
                found[kind], self._usual[kind] = both[1], seconds
        return found

    def _partners(self, kind: str) -> tuple[int, int] | None:
        """Return the ranks that this one sends to and hears of; None where there are no such links."""
        assert self._ranks.mesh is not None
        grid, rank = self._ranks.mesh.grid, self._ranks.rank
        per_node = grid.ranks_per_node or grid.world
        if (per_node if kind == "inside" else grid.world // per_node) == 1:
            return None
        if kind == "outside":
            return (rank + per_node) % grid.world, (rank - per_node) % grid.world
        first, place = rank - rank % per_node, rank % per_node
        return first + (place + 1) % per_node, first + (place - 1) % per_node

    def _seconds(self, kind: str, to: int, source: int) -> float:
        """Return how long a message from each rank to its partner takes, the slowest rank's."""
        assert self._ranks.mesh is not None
        transport = self._ranks.mesh.transport
        sent = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=transport.device)
        into, taken = torch.empty_like(sent), []
        for _ in range(REPEATS):
            self._ranks.barrier()
            start = time.perf_counter()
            transport.wait(
                transport.issue(Transfer(self._ranks.rank, transport.take_tags(1), {to: sent}, {source: into}))
            )
            if transport.device.type == "cuda":
                torch.cuda.synchronize(transport.device)
            taken.append(time.perf_counter() - start)
        return float(self._ranks.largest(torch.tensor(min(taken), dtype=torch.float64)))
