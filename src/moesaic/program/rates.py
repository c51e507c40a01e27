"""`Rates`: a machine as one layer on one mesh sees it, in plain numbers by which policies predict
the time of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The latencies and rates of one rank, and the sizes of a layer's values.

    `seen_by` in `planner/policy_rates.py` reads them from a cluster.
    """

    intra_gbps: float = 100.0
    """A rank's part of the link inside a node, gigabits per second in each direction."""
    inter_gbps: float = 25.0
    """A rank's part of the link between nodes, gigabits per second in each direction."""
    intra_ranks: int = 1
    """Consecutive ranks that share one link inside a node; each may use the part that the others
    leave."""
    inter_ranks: int = 1
    """Consecutive ranks that share one link between nodes: all of a node's ranks if the node has a
    single NIC."""
    intra_latency_us: float = 10.0
    """Start-up cost of a message inside a node, microseconds."""
    inter_latency_us: float = 30.0
    """Start-up cost of a message between nodes, microseconds."""
    tflops: float = 50.0
    """Rate of the experts' products, 10^12 operations per second."""
    memory_gbps: float = 4000.0
    """Rate of copies, gigabits per second."""
    speeds: tuple[float, ...] = ()
    """Speed of each rank's products relative to `tflops`; () if equal."""
    node_links: tuple[float, ...] = ()
    """Rate of each node's link to the other nodes, in both directions, relative to `inter_gbps`; ()
    if equal."""
    expert_us: float = 0.0
    """Host time in microseconds, forward and backward, for each expert that is replicated to a
    place: packing, placing, calls. Small if grouped products compute all experts at once. Only the
    arbiter counts it."""
    part_us: float = 100.0
    """Host time in microseconds to launch each further all-to-all and its products, if a call runs
    step by step. Only the arbiter counts it."""
    element_bytes: int = 2
    """Bytes per element of activations and weights."""
    matrices: int = 3
    """Weight matrices of an expert: 3 for SwiGLU, 2 for a plain expert."""
    backward: bool = True
    """Count the backward pass too: twice the products, and every transfer again."""

    def __post_init__(self) -> None:
        for name in ("intra_gbps", "inter_gbps", "tflops", "memory_gbps"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise InputError(f"rates.{name}={value}: must be a finite number above 0")
        for name in ("intra_latency_us", "inter_latency_us"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise InputError(f"rates.{name}={value}: must be a finite number of at least 0")
        for name in ("intra_ranks", "inter_ranks", "element_bytes", "matrices"):
            if getattr(self, name) < 1:
                raise InputError(f"rates.{name}={getattr(self, name)}: must be at least 1")

    @property
    def passes(self) -> int:
        """How often a dispatched row crosses a link: to the expert and back, and again for
        gradients."""
        return 4 if self.backward else 2
