"""Small clusters with round numbers, for tests."""

from __future__ import annotations

from moesaic.planner.cluster import ClusterSpec, Device, Host, Link, Tflops

DEVICE = Device(
    tflops=Tflops(bf16=100.0, fp32=50.0),
    memory_gib=40.0,
    memory_gigabytes_per_second=1000.0,
    gemm_rows=(1, 100, 1000),
    gemm_share=(0.01, 0.5, 1.0),
)
FREE = Device(
    tflops=Tflops(bf16=1e9, fp32=1e9),
    memory_gib=40.0,
    memory_gigabytes_per_second=1e9,
    gemm_rows=(1,),
    gemm_share=(1.0,),
)
"""A device with instant compute, so that only movements count."""


def tree(
    nodes: int,
    per_node: int,
    *,
    leaf: bool = True,
    device: Device = DEVICE,
    host: Host | None = None,
) -> ClusterSpec:
    """Return nodes with one PCIe link per device and one NIC; pairs of nodes share oversubscribed
    leaf switches."""
    links = [
        Link(name="pcie", devices=1, gbps=(100.0,), latency_us=3.0, message_us=1.0),
        Link(
            name="nic",
            devices=per_node,
            gbps=(50.0,),
            latency_us=10.0,
            message_us=5.0,
            carries="outside",
        ),
    ]
    if leaf and nodes > 1:
        links.append(Link(name="leaf", devices=2 * per_node, gbps=(60.0,), carries="outside"))
    return ClusterSpec(
        nodes=nodes,
        devices_per_node=per_node,
        device=device,
        links=tuple(links),
        host=host or Host(),
        name="tree",
    )


def flat(
    nodes: int,
    per_node: int,
    *,
    intra: float = 80.0,
    inter: float = 8.0,
    intra_us: float = 0.0,
    inter_us: float = 0.0,
    message_us: tuple[float, float] = (0.0, 0.0),
    device: Device = FREE,
    host: Host | None = None,
) -> ClusterSpec:
    """Return a cluster in which each device has one link inside its node and one port between
    nodes; rates in Gb/s: 80 is 10 GB/s."""
    links = [
        Link(
            name="nvlink",
            devices=1,
            gbps=(intra,),
            latency_us=intra_us,
            message_us=message_us[0],
            carries="inside",
        ),
        Link(
            name="port",
            devices=1,
            gbps=(inter,),
            latency_us=inter_us,
            message_us=message_us[1],
            carries="outside",
        ),
    ]
    return ClusterSpec(
        nodes=nodes,
        devices_per_node=per_node,
        device=device,
        links=tuple(links),
        host=host or Host(),
        name="flat",
    )
