"""A bed's network: as text for `ip` and `tc`, and its creation.

Every node and every switch is a network namespace. A cable is a veth pair; each of its ends limits the packets that it sends
to the cable's rate. Switches are routers, so no bridge module is needed.

Packets are capped at 16 KiB and queues hold 32 MiB. Packets larger than the burst would not reach the rate, a larger burst
would let short messages through without delay, and a shorter queue would drop packets.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic_testbed.bed import Bed, bytes_per_second
from moesaic_testbed.kernel import inside_net, new_net
from moesaic_testbed.messages import Carried

NODE_DEVICE = "eth0"
ROOT = "root"
"""The switch to which all nodes, or else all leaf switches, are connected."""
MTU = 9000
PACKET_BYTES = 16384
QUEUE_BYTES = 32 << 20
BURST = "20kb"
SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_rmem": "4096 131072 33554432",
    "net/ipv4/tcp_wmem": "4096 16384 4194304",
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}
"""Kernel settings of every namespace: a bed then behaves the same on machines with different settings."""


class WiringError(RuntimeError):
    """The network could not be created; one line names the tool and its error."""


@dataclass(frozen=True, kw_only=True)
class Cable:
    """A link between two namespaces (a veth pair). A rate of None is not limited."""

    name: str
    lower: str
    """Namespace of the end towards the nodes."""
    lower_device: str
    lower_address: str
    upper: str
    """Namespace of the end towards the root."""
    upper_device: str
    upper_address: str
    bytes_per_second: float | None
    per_message: int


def node_name(node: int) -> str:
    """Return the name of a node's namespace."""
    return f"node{node}"


def node_address(node: int) -> str:
    """Return a node's address on its link."""
    return f"10.64.{node}.2"


def leaf_address(name: str) -> str:
    """Return the address of a leaf switch on its uplink, by its name."""
    return f"10.65.{name.removeprefix('leaf')}.2"


def cables(bed: Bed) -> list[Cable]:
    """Return the cables of a bed: one per node, in order, then one per leaf switch."""
    listed = []
    for node in range(bed.nodes):
        leaf = bed.leaf_of(node)
        listed.append(
            Cable(
                name=node_name(node), lower=node_name(node), lower_device=NODE_DEVICE, lower_address=node_address(node),
                upper=ROOT if leaf is None else f"leaf{leaf}", upper_device=node_name(node),
                upper_address=f"10.64.{node}.1", bytes_per_second=bed.inter_bytes_per_second(node),
                per_message=bed.per_message,
            )
        )  # fmt: skip
    for leaf in range(bed.leaves):
        listed.append(
            Cable(
                name=f"leaf{leaf}", lower=f"leaf{leaf}", lower_device="up", lower_address=leaf_address(f"leaf{leaf}"),
                upper=ROOT, upper_device=f"leaf{leaf}", upper_address=f"10.65.{leaf}.1",
                bytes_per_second=bed.uplink_bytes_per_second, per_message=0,
            )
        )  # fmt: skip
    return listed


def namespaces(bed: Bed) -> list[str]:
    """Return the names of all namespaces of a bed: the root switch, leaf switches, nodes."""
    return [ROOT, *(f"leaf{leaf}" for leaf in range(bed.leaves)), *(node_name(node) for node in range(bed.nodes))]


def shaping(device: str, rate: float | None, per_message: int = 0) -> list[str]:
    """Return `tc` commands that make a device send at a rate.

    Args:
        device: name of the device.
        rate: bytes per second; None for no limit.
        per_message: least number of bytes that a packet is charged for.
    """
    if rate is None:
        return []
    htb = f"htb rate {rate * 8:.0f}bit burst {BURST} cburst {BURST} quantum {PACKET_BYTES}"
    htb += f" mpu {per_message}" if per_message else ""
    return [
        f"qdisc replace dev {device} root handle 1: htb default 1",
        f"class replace dev {device} parent 1: classid 1:1 {htb}",
        f"qdisc replace dev {device} parent 1:1 handle 2: bfifo limit {QUEUE_BYTES}",
    ]


def addressing(bed: Bed, name: str) -> list[str]:
    """Return `ip` commands that give a namespace its addresses and routes; its cables must exist."""
    packets = f"gso_max_size {PACKET_BYTES} gro_max_size {PACKET_BYTES}"
    shaped = bed.intra is not None and name.startswith("node")
    addresses, routes = [f"link set dev lo{f' mtu {MTU} {packets}' if shaped else ''} up"], []
    for cable in cables(bed):
        ends = (
            (cable.lower, cable.lower_device, cable.lower_address, cable.upper_address),
            (cable.upper, cable.upper_device, cable.upper_address, cable.lower_address),
        )
        for owner, device, address, other in ends:
            if owner == name:
                addresses.append(f"address add {address} peer {other} dev {device}")
                addresses.append(f"link set dev {device} {packets} txqueuelen 10000 up")
        if cable.lower == name:
            routes.append(f"route add 10.64.0.0/16 via {cable.upper_address}")
        elif name == ROOT and cable.upper != ROOT:
            routes.append(f"route add {cable.lower_address} via {leaf_address(cable.upper)}")
    return addresses + routes


def queueing(bed: Bed, name: str) -> list[str]:
    """Return `tc` commands that set the rate of every device of a namespace."""
    rates = shaping("lo", bed.intra_bytes_per_second if name.startswith("node") else None)
    for cable in cables(bed):
        for owner, device in ((cable.lower, cable.lower_device), (cable.upper, cable.upper_device)):
            if owner == name:
                rates += shaping(device, cable.bytes_per_second, cable.per_message)
    return rates


def changing(bed: Bed, node: int, rate: str | None) -> dict[str, str]:
    """Return by namespace the `tc` command that sets its end of a node's link to a rate.

    Args:
        bed: the bed.
        node: the node whose link changes.
        rate: the new rate; None for the bed's original rate.
    """
    cable = cables(bed)[node]
    speed = cable.bytes_per_second if rate is None else bytes_per_second(rate, "rate")
    ends = ((cable.lower, cable.lower_device), (cable.upper, cable.upper_device))
    return {name: shaping(device, speed, cable.per_message)[1] for name, device in ends}


class Wiring:
    """The network of a bed, kept alive by file descriptors: it disappears when the process that created it ends.

    Raises:
        WiringError: if the kernel or a tool refuses.
    """

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self._cables = cables(bed)
        try:
            self._nets = {name: new_net() for name in namespaces(bed)}
            for name in self._nets:
                self._set_up(name)
        except OSError as error:
            raise WiringError(str(error)) from error
        self._make_cables()
        for name in self._nets:
            self._tool("ip", name, addressing(bed, name))
            self._tool("tc", name, queueing(bed, name))

    def net(self, node: int) -> int:
        """Return the file descriptor of a node's network namespace."""
        return self._nets[node_name(node)]

    def change(self, node: int, rate: str | None) -> None:
        """Set both ends of a node's link to a rate; None for the bed's original rate."""
        for name, line in changing(self.bed, node, rate).items():
            self._tool("tc", name, [line])

    def switch(self, node: int, on: bool) -> None:
        """Cut or restore a node's link at its switch. Only for beds of one switch, where routes return by themselves."""
        self._tool("ip", ROOT, [f"link set dev {node_name(node)} {'up' if on else 'down'}"])

    def namespaces(self) -> list[int]:
        """Return the inode numbers of the bed's network namespaces."""
        return [os.fstat(handle).st_ino for handle in self._nets.values()]

    def traffic(self) -> dict[str, Carried]:
        """Return the traffic that every end of every link has sent: "node0 up", "node0 down", "node0 inside", ..."""
        ends = {(net, "lo"): f"{net} inside" for net in self._nets if net.startswith("node")}
        for cable in self._cables:
            ends[cable.lower, cable.lower_device] = f"{cable.name} up"
            ends[cable.upper, cable.upper_device] = f"{cable.name} down"
        by_end = {}
        for net, handle in self._nets.items():
            for device, carried in _counters(handle).items():
                if (net, device) in ends:
                    by_end[ends[net, device]] = carried
        return by_end

    def _set_up(self, name: str) -> None:
        with inside_net(self._nets[name]):
            for setting, value in SETTINGS.items():
                path = Path("/proc/sys") / setting
                if path.exists() or "ipv6" not in setting:
                    path.write_text(value)

    def _make_cables(self) -> None:
        for upper in sorted({cable.upper for cable in self._cables}):
            lines = [
                f"link add {cable.upper_device} mtu {MTU} type veth peer name {cable.lower_device} mtu {MTU} "
                f"netns /proc/self/fd/{self._nets[cable.lower]}"
                for cable in self._cables
                if cable.upper == upper
            ]
            self._tool("ip", upper, lines, share=list(self._nets.values()))

    def _tool(self, tool: str, name: str, lines: Sequence[str], share: Sequence[int] = ()) -> None:
        if lines:
            with inside_net(self._nets[name]):
                _run([tool, "-batch", "-"], lines, share)


def _counters(net: int) -> dict[str, Carried]:
    """Return the traffic that each device of a namespace has sent, from its queue's counters or, if it has none, its own."""
    with inside_net(net):
        links = json.loads(_run(["ip", "-s", "-j", "link", "show"]))
        queues = json.loads(_run(["tc", "-s", "-j", "qdisc", "show"]))
    shaped = {queue["dev"]: queue for queue in queues if queue["kind"] == "htb"}
    by_device = {}
    for link in links:
        sent = link["stats64"]["tx"]
        queue = shaped.get(
            link["ifname"], {"bytes": sent["bytes"], "packets": sent["packets"], "drops": sent["dropped"]}
        )
        by_device[link["ifname"]] = Carried(bytes=queue["bytes"], packets=queue["packets"], dropped=queue["drops"])
    return by_device


def _run(words: Sequence[str], lines: Sequence[str] = (), share: Sequence[int] = ()) -> str:
    """Run a tool with `lines` as input and return its output."""
    try:
        process = subprocess.run(
            words, input="\n".join(lines) + "\n", capture_output=True, text=True, pass_fds=share, check=False
        )
    except FileNotFoundError as error:
        raise WiringError(f"`{words[0]}` is missing") from error
    if process.returncode:
        messages = [line for line in process.stderr.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        raise WiringError(f"`{words[0]}` said: {messages[0].strip()}")
    return process.stdout
