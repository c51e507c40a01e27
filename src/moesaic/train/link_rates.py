"""Whether links carry what they did, and those of each node what those of the others do: a few messages inside nodes and
between them, timed now and then while a run trains."""

from __future__ import annotations

import time

import numpy as np
import torch

from moesaic.balance.replication.cost import LinkKind, LinkTimes
from moesaic.comm.transport import Transfer
from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.topology import Topology
from moesaic.program.grid import Grid
from moesaic.train.ranks import Ranks

PROBE_BYTES = 1 << 18
"""Of a message."""
REPEATS = 5
"""Messages of each kind, of which the fastest counts: what disturbs makes slower."""
DRIFT = 0.2
"""Share by which a rate must have changed, or differ from what the other nodes have, in two probes one after the other."""
KINDS: dict[LinkKind, str] = {"inside": "inside nodes", "outside": "between nodes"}
"""Which links are probed, and what they are called."""


class LinkRates:
    """Remembers how fast the links of each node were; all ranks make it and call it together.

    Args:
        cluster: what is said of the links, so that nodes which it says are unlike are taken for what it says; None: all alike.
    """

    def __init__(self, ranks: Ranks, cluster: ClusterSpec | None = None) -> None:
        self._ranks, self._cluster = ranks, cluster
        self._usual: dict[LinkKind, np.ndarray] = {}
        self._before: dict[LinkKind, np.ndarray] = {}

    def drift(self) -> LinkTimes:
        """Probe the links; return, the same on all ranks, of which kinds those of each node are now how many times as fast as
        they were.

        The first probe says what is usual: what the median node has. A change counts where two probes agree on it, and is usual
        from then on; so a node whose link is slow from the start is found by the second probe.
        """
        found: dict[LinkKind, tuple[float, ...]] = {}
        for kind in KINDS:
            if not self._has(kind):
                continue
            seconds = self._seconds(kind)
            if kind not in self._usual:
                said = self._said(kind)
                self._usual[kind] = said * np.median(seconds / said)
            usual = self._usual[kind]
            both = np.stack([usual / self._before.get(kind, usual), usual / seconds])
            self._before[kind] = seconds
            changed = (both.min(0) > 1 + DRIFT) | (both.max(0) < 1 / (1 + DRIFT))
            if changed.any():
                found[kind] = tuple(np.where(changed, both[1], 1.0).tolist())
                self._usual[kind] = np.where(changed, seconds, usual)
        return found

    @property
    def _grid(self) -> Grid:
        assert self._ranks.mesh is not None
        return self._ranks.mesh.grid

    @property
    def _per_node(self) -> int:
        return self._grid.ranks_per_node or self._grid.world

    def _has(self, kind: LinkKind) -> bool:
        return (self._per_node if kind == "inside" else self._grid.world // self._per_node) > 1

    def _seconds(self, kind: LinkKind) -> np.ndarray:
        """Return how long messages of the ranks of each node take, (nodes,) float64, the same on all ranks.

        Inside nodes that is the slowest rank's. Between nodes each sends to the next one and hears of the one before, and
        what is faster counts: of two nodes whose message is slow, the one that is fast with another node is not to blame.
        """
        grid, per_node = self._grid, self._per_node
        assert self._ranks.mesh is not None
        node, nodes = grid.node_of(self._ranks.mesh.rank), grid.world // per_node
        taken = torch.zeros(nodes, dtype=torch.float64)
        for phase in phases(nodes) if kind == "outside" else [range(nodes)]:
            seconds = min(self._message(kind, phase) for _ in range(REPEATS))
            if node in phase:
                taken[node] = seconds
        heard: np.ndarray = self._ranks.largest(taken).numpy()
        return heard if kind == "inside" else np.minimum(heard, np.roll(heard, -1))

    def _message(self, kind: LinkKind, hears: range) -> float:
        """Return how long the message takes that this rank gets in one phase; of others what it took to send.

        Args:
            hears: nodes that get a message; those before them send, inside nodes to themselves.
        """
        mesh, per_node = self._ranks.mesh, self._per_node
        assert mesh is not None
        rank, world, device = mesh.rank, mesh.grid.world, mesh.transport.device
        node = mesh.grid.node_of(rank)
        message = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
        first, place = rank - rank % per_node, rank % per_node
        if kind == "inside":
            to, source = first + (place + 1) % per_node, first + (place - 1) % per_node
        else:
            to, source = (rank + per_node) % world, (rank - per_node) % world
        sends = {to: message} if kind == "inside" or (node + 1) % (world // per_node) in hears else {}
        receives = {source: torch.empty_like(message)} if node in hears else {}
        tag = mesh.transport.take_tags(1)
        self._ranks.gathered(None)  # so that all begin together
        start = time.perf_counter()
        mesh.transport.wait(mesh.transport.issue(Transfer(rank, tag, sends, receives)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    def _said(self, kind: LinkKind) -> np.ndarray:
        """Return what the cluster says that `_seconds` are, (nodes,), up to a factor."""
        world, per_node = self._grid.world, self._per_node
        nodes = world // per_node
        if self._cluster is None:
            return np.ones(nodes)
        topology, found = Topology(self._cluster, world, per_node), np.zeros(nodes)
        for node in range(nodes):
            gets = np.arange(per_node) + node * per_node
            sends = np.roll(gets, 1) if kind == "inside" else (gets - per_node) % world
            sizes = np.full(per_node, float(PROBE_BYTES))
            found[node] = topology.loads(sends, gets, sizes, np.ones(per_node)).alone
        return found if kind == "inside" else np.minimum(found, np.roll(found, -1))


def phases(nodes: int) -> list[range]:
    """Return which nodes get a message of the one before them, phase by phase, so that none gets and sends at once: what a rank
    measures is then one message. Three phases where the number of nodes is odd."""
    even = nodes - nodes % 2
    return [range(1, even, 2), range(0 if even == nodes else 2, nodes, 2), *([range(1)] if even != nodes else [])]
