"""Detection of changes in link speed: a few messages inside and between nodes are timed now and then while a run
trains.

The times show whether links are as fast as before, and whether one node's links differ from those of the others.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from moesaic.balance.replication.cost import LinkKind, LinkTimes
from moesaic.comm.transport import Transfer
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.topology import Topology
from moesaic.program.grid import Grid
from moesaic.train.ranks import Ranks

PROBE_BYTES = 1 << 18
"""Bytes of a probe message."""
REPEATS = 5
"""Probe messages of each kind. The fastest one counts, since disturbances only slow messages down."""
DRIFT = 0.2
"""Relative change of a rate, or difference to the other nodes' rates, that counts as drift if two consecutive probes
show it."""
KINDS: dict[LinkKind, str] = {"inside": "inside nodes", "outside": "between nodes"}
"""The kinds of links that are probed, and what they are called in messages."""


class LinkRates:
    """Remembers the link speed of each node. All ranks create it and call its methods together.

    Args:
        cluster: description of the links, which may differ between nodes; None if all nodes have the same links.
    """

    def __init__(self, ranks: Ranks, cluster: ClusterSpec | None = None) -> None:
        self._ranks, self._cluster = ranks, cluster
        self._usual: dict[LinkKind, np.ndarray] = {}
        self._before: dict[LinkKind, np.ndarray] = {}

    def drift(self) -> LinkTimes:
        """Probe the links. Return, identically on all ranks, each node's current link speed over its usual speed, for
        the kinds of links that changed.

        The first probe defines the usual speed, that of the median node. A change counts if two probes agree on it, and
        then becomes the usual speed. The second probe therefore finds a node with a link that is slow from the start.
        """
        changes: dict[LinkKind, tuple[float, ...]] = {}
        for kind in KINDS:
            if not self._has_links(kind):
                continue
            seconds = self._measured_seconds(kind)
            if kind not in self._usual:
                expected = self._expected_seconds(kind)
                self._usual[kind] = expected * np.median(seconds / expected)
            usual = self._usual[kind]
            speeds = np.stack([usual / self._before.get(kind, usual), usual / seconds])
            self._before[kind] = seconds
            changed = (speeds.min(0) > 1 + DRIFT) | (speeds.max(0) < 1 / (1 + DRIFT))
            if changed.any():
                changes[kind] = tuple(np.where(changed, speeds[1], 1.0).tolist())
                self._usual[kind] = np.where(changed, seconds, usual)
        return changes

    @property
    def _grid(self) -> Grid:
        assert self._ranks.mesh is not None
        return self._ranks.mesh.grid

    @property
    def _per_node(self) -> int:
        return self._grid.ranks_per_node or self._grid.world

    def _has_links(self, kind: LinkKind) -> bool:
        return (self._per_node if kind == "inside" else self._grid.world // self._per_node) > 1

    def _measured_seconds(self, kind: LinkKind) -> np.ndarray:
        """Return how long messages of each node's ranks take, (nodes,) float64, identically on all ranks.

        Inside nodes, the slowest rank's time counts. Between nodes, each node sends to the next and receives from the
        previous one, and the faster of its two times counts. If a message between two nodes is slow, the node that is
        fast with its other neighbour is therefore not blamed.
        """
        grid, per_node = self._grid, self._per_node
        assert self._ranks.mesh is not None
        node, nodes = grid.node_of(self._ranks.mesh.rank), grid.world // per_node
        of_nodes = torch.zeros(nodes, dtype=torch.float64)
        for phase in phases(nodes) if kind == "outside" else [range(nodes)]:
            seconds = min(self._message(kind, phase) for _ in range(REPEATS))
            if node in phase:
                of_nodes[node] = seconds
        slowest: np.ndarray = self._ranks.largest(of_nodes).numpy()
        return slowest if kind == "inside" else np.minimum(slowest, np.roll(slowest, -1))

    def _message(self, kind: LinkKind, receivers: range) -> float:
        """Return how long this rank's message takes in one phase: the one it receives, or else the one it sends.

        Args:
            receivers: nodes that receive a message. Between nodes, their predecessors send it; inside nodes, the same nodes
                do.
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
        sends = {to: message} if kind == "inside" or (node + 1) % (world // per_node) in receivers else {}
        receives = {source: torch.empty_like(message)} if node in receivers else {}
        tag = mesh.transport.take_tags(1)
        self._ranks.gathered(None)  # a barrier, so that all ranks begin together
        start = time.perf_counter()
        mesh.transport.wait(mesh.transport.issue(Transfer(rank, tag, sends, receives)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    def _expected_seconds(self, kind: LinkKind) -> np.ndarray:
        """Return the `_measured_seconds` that the described cluster predicts, (nodes,), up to a constant factor."""
        world, per_node = self._grid.world, self._per_node
        nodes = world // per_node
        if self._cluster is None:
            return np.ones(nodes)
        topology, seconds = Topology(self._cluster, world, per_node), np.zeros(nodes)
        for node in range(nodes):
            receivers = np.arange(per_node) + node * per_node
            senders = np.roll(receivers, 1) if kind == "inside" else (receivers - per_node) % world
            sizes = np.full(per_node, float(PROBE_BYTES))
            seconds[node] = topology.loads(senders, receivers, sizes, np.ones(per_node)).alone
        return seconds if kind == "inside" else np.minimum(seconds, np.roll(seconds, -1))


def phases(nodes: int) -> list[range]:
    """Return, phase by phase, the nodes that receive a message from the previous node.

    No node receives and sends in the same phase, so each rank times a single message. An odd number of nodes needs
    three phases.
    """
    even = nodes - nodes % 2
    return [range(1, even, 2), range(0 if even == nodes else 2, nodes, 2), *([range(1)] if even != nodes else [])]
