"""The emulated cluster (`moesaic testbed`) as a `ClusterSpec`: the same fields, read as links.

What is asked of the kernel is known here; what Python, Gloo and the cores add is not: the host costs are assumptions until
`moesaic profile` has measured them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from moesaic.cost.cluster import ClusterSpec, Device, Host, Link, Tflops
from moesaic.errors import InputError

UNSHAPED_GBPS = 8.0
"""Of a loopback interface that nothing shapes, all pairs of ranks together; between 0.6 and 1.2 GB/s were measured."""
_MTU = 9000
_PACKETS_PER_MESSAGE = 4
"""A header and a payload, each acknowledged. 48 messages of 1 KiB at 5,000 bytes per packet and 200 Mbit/s took 45 ms on
the bed; this gives 38."""

CPU = Device(
    tflops=Tflops(fp32=0.05, fp64=0.025, bf16=0.01),
    memory_gib=8.0,
    memory_gigabytes_per_second=5.0,
    gemm_rows=(1, 8, 32, 128),
    gemm_share=(0.1, 0.5, 0.85, 1.0),
)
"""One process with one thread of a server core; assumed."""

_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Of link rates, the words of `tc`: 200mbit, 25gbit."""


def emulated(
    *,
    nodes: int = 2,
    ranks_per_node: int = 2,
    inter: str | Sequence[str] = "200mbit",
    intra: str | None = None,
    per_message: int = 0,
    switches: Sequence[int] = (),
    uplink: str | None = None,
    device: Device = CPU,
    host: Host | None = None,
) -> ClusterSpec:
    """Return the cluster that a bed of the test bed emulates.

    Args:
        nodes: namespaces.
        ranks_per_node: processes in each.
        inter: rate of each node's link to its switch, each direction; one for all, or one per node.
        intra: rate of the loopback interface inside each node; None for an unshaped one.
        per_message: bytes that every packet is charged at least.
        switches: leaf switch of each node; () for one switch.
        uplink: rate between each leaf switch and the root, each direction; None: not limited.
        device: what computes.
        host: costs of the issuing thread; None assumes them.

    Raises:
        InputError: for a rate that is none, or numbers that do not fit.
    """
    if per_message < 0:
        raise InputError(f"per_message={per_message}: must be at least 0")
    each = (inter,) if isinstance(inter, str) else tuple(inter)
    if len(each) not in (1, nodes):
        raise InputError(f"inter has {len(each)} rates: give one, or one for each of the {nodes} nodes")
    rates = tuple(parse_rate(rate, "inter") for rate in each)
    links = [Link(name="lo", devices=ranks_per_node, carries="inside", shared=True, gbps=(_loopback(intra),))]
    links.append(_shaped("eth", ranks_per_node, rates, per_message))
    if uplink is not None:
        if not switches:
            raise InputError(f"uplink={uplink} without leaf switches: say with switches which node hangs on which")
        if len(switches) != nodes:
            raise InputError(f"switches has {len(switches)} values: give the leaf switch of each of the {nodes} nodes")
        widest = max(list(switches).count(leaf) for leaf in switches)
        up = (parse_rate(uplink, "uplink"),)
        links.append(_shaped("uplink", ranks_per_node * widest, up, per_message, tuple(switches)))
    shown = f"{nodes} nodes of {ranks_per_node} processes, {', '.join(each)} between them"
    return ClusterSpec(
        name=f"bed-{nodes}x{ranks_per_node}",
        description=f"emulated: {shown}, {intra or 'nothing'} on the loopback interface",
        source="fields of the bed; device and host assumed",
        nodes=nodes,
        devices_per_node=ranks_per_node,
        device=device,
        links=tuple(links),
        host=host or Host(runs_compute=True, task_us=30.0, message_us=60.0),
    )


def _loopback(intra: str | None) -> float:
    return UNSHAPED_GBPS if intra is None else parse_rate(intra, "intra")


def _shaped(
    name: str, devices: int, rates: tuple[float, ...], per_message: int, switches: tuple[int, ...] = ()
) -> Link:
    """Return a shaped link; every second full packet is acknowledged, and an acknowledgement is charged like a packet."""
    share = 2 * _MTU / (2 * _MTU + per_message)
    slowest = min(rates)
    regular = _in_runs(switches)
    return Link(
        name=name,
        devices=devices,
        carries="outside",
        gbps=tuple(rate * share for rate in rates),
        message_us=_PACKETS_PER_MESSAGE * per_message * 8 / (slowest * 1e9) * 1e6,
        units=() if regular else switches,
    )


def _in_runs(switches: tuple[int, ...]) -> bool:
    """Whether nodes fill the switches one after the other, equally many each."""
    count = len(set(switches)) or 1
    size = len(switches) // count
    return switches == tuple(node // size for node in range(size * count)) if switches else True


def parse_rate(text: str, where: str) -> float:
    """Return a rate in gigabits per second.

    Args:
        text: a number and bit, kbit, mbit or gbit.
        where: names the field in the refusal.

    Raises:
        InputError: if it is not a rate above 0.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]+)\s*", str(text).lower())
    if not found or found.group(2) not in _UNITS or float(found.group(1)) <= 0:
        raise InputError(f"{where}={text!r} is no rate: write a number above 0 and bit, kbit, mbit or gbit: 200mbit")
    return float(found.group(1)) * _UNITS[found.group(2)] / 1e9
