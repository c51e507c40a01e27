"""`Machine`: a machine by latencies and rates alone, as policies weigh what they decide at every call."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.cost.cluster import ClusterSpec, Device, Link, Tflops, check_above_zero, check_not_negative
from moesaic.program.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one rank."""

    intra_gbps: float = 100.0
    """Link inside a node, gigabits per second."""
    inter_gbps: float = 25.0
    """Link between nodes, gigabits per second."""
    intra_latency_us: float = 10.0
    """Start-up cost of a message inside a node, microseconds."""
    inter_latency_us: float = 30.0
    """Start-up cost of a message between nodes, microseconds."""
    tflops: float = 50.0
    """Of the experts' products."""
    memory_gbps: float = 4000.0
    """Of copies, gigabits per second."""

    def __post_init__(self) -> None:
        for name in ("intra_gbps", "inter_gbps", "tflops", "memory_gbps"):
            check_above_zero(f"machine.{name}", getattr(self, name))
        for name in ("intra_latency_us", "inter_latency_us"):
            check_not_negative(f"machine.{name}", getattr(self, name))

    def to_cluster(self, grid: Grid) -> ClusterSpec:
        """Return a cluster of such ranks: a port of its own inside its node and one between nodes for each, bf16 products.

        Args:
            grid: the mesh, whose ranks the cluster has.
        """
        per_node = grid.ranks_per_node or grid.world
        return ClusterSpec(
            name="nominal",
            nodes=grid.world // per_node,
            devices_per_node=per_node,
            device=Device(
                tflops=Tflops(bf16=self.tflops),
                memory_gib=80.0,
                memory_gigabytes_per_second=self.memory_gbps / 8,
                gemm_rows=(1,),
                gemm_share=(1.0,),
            ),
            links=(
                Link(
                    name="inside",
                    devices=1,
                    gbps=(self.intra_gbps,),
                    message_us=self.intra_latency_us,
                    carries="inside",
                ),
                Link(
                    name="outside",
                    devices=1,
                    gbps=(self.inter_gbps,),
                    message_us=self.inter_latency_us,
                    carries="outside",
                ),
            ),
        )
