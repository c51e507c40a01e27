"""Converts an emulated cluster (`moesaic testbed`) to a `ClusterSpec`: the fields of a bed become
links.

Link rates are known, since the kernel is configured with them. The costs of Python, Gloo and the
cores are not: host costs are assumptions until `moesaic profile` has measured them.
"""

from __future__ import annotations

from moesaic.planner.cluster import ClusterSpec, Device, Host, Link
from moesaic.planner.predicted_plans import CPU
from moesaic_testbed.bed import Bed

UNSHAPED_GBPS = 8.0
"""Rate of a loopback interface without a limit, summed over all pairs of ranks; 0.6 to 1.2 GB/s
were measured."""
_MTU = 9000
_PACKETS_PER_MESSAGE = 4
"""A header and a payload, each acknowledged. 48 messages of 1 KiB at 5,000 bytes per packet and 200
Mbit/s took 45 ms on the bed; this number gives 38 ms."""


def emulated(bed: Bed, *, device: Device = CPU, host: Host | None = None) -> ClusterSpec:
    """Return the cluster that a bed emulates, before any of its changes.

    Args:
        bed: nodes and links.
        device: the device of each rank.
        host: costs of the issuing thread; None for assumed costs.
    """
    inside = bed.intra_bytes_per_second
    loopback = UNSHAPED_GBPS if inside is None else _gbps(inside)

    # One rate between nodes stands for all nodes, or each node has its own.
    inter = (bed.inter,) if isinstance(bed.inter, str) else bed.inter
    rates = tuple(_gbps(bed.inter_bytes_per_second(node)) for node in range(len(inter)))

    shown = f"{bed.nodes} nodes of {bed.ranks_per_node} processes, {', '.join(inter)} between them"
    return ClusterSpec(
        name=f"bed-{bed.nodes}x{bed.ranks_per_node}",
        description=f"emulated: {shown}, {bed.intra or 'nothing'} on the loopback interface",
        source="fields of the bed; device and host assumed",
        nodes=bed.nodes,
        devices_per_node=bed.ranks_per_node,
        device=device,
        links=(
            Link(
                name="lo",
                devices=bed.ranks_per_node,
                carries="inside",
                shared=True,
                gbps=(loopback,),
            ),
            _shaped(bed.ranks_per_node, rates, bed.per_message),
        ),
        host=host or Host(runs_compute=True, task_us=30.0, message_us=60.0),
    )


def _gbps(bytes_per_second: float) -> float:
    """Return a rate in Gb/s."""
    return bytes_per_second * 8 / 1e9


def _shaped(devices: int, rates: tuple[float, ...], per_message: int) -> Link:
    """Return the nodes' links. Every second full packet is acknowledged; acknowledgements are
    charged like packets.

    Args:
        devices: ranks per node.
        rates: Gb/s of each node's link, or of all.
        per_message: least bytes that each packet is charged.
    """
    # Of what two full packets and their acknowledgement are charged, the packets carry this share.
    share = 2 * _MTU / (2 * _MTU + per_message)
    return Link(
        name="eth",
        devices=devices,
        carries="outside",
        gbps=tuple(rate * share for rate in rates),
        message_us=_PACKETS_PER_MESSAGE * per_message * 8 / (min(rates) * 1e9) * 1e6,
    )
