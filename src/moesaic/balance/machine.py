"""`Machine`: the rates of one rank as plain numbers, by which policies predict the time of a
call."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine described by latencies and rates of one rank, for policies that decide at every
    call.

    `planner/policy_rates.py` derives one from a cluster.
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

    def __post_init__(self) -> None:
        for name in ("intra_gbps", "inter_gbps", "tflops", "memory_gbps"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise InputError(f"machine.{name}={value}: must be a finite number above 0")
        for name in ("intra_latency_us", "inter_latency_us"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise InputError(f"machine.{name}={value}: must be a finite number of at least 0")
        for name in ("intra_ranks", "inter_ranks"):
            if getattr(self, name) < 1:
                raise InputError(f"machine.{name}={getattr(self, name)}: must be at least 1")
