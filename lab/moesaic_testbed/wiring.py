"""A bed's network: as text for `ip` and `tc`, and its creation.

Every node and the switch are network namespaces. A cable is a veth pair; each of its ends limits
the packets that it sends to the cable's rate. The switch is a router, so no bridge module is
needed.

Rates are kept by htb, a queueing discipline of Linux that `tc` sets up for a device; the device
"lo" has the traffic inside a node. Packets are capped at 16 KiB and queues hold 32 MiB. Packets
larger than the burst would not reach the rate, a larger burst would let short messages through
without delay, and a shorter queue would drop packets.

A namespace is called by its name here: "root", the switch, or "node0", "node1" and so on. An end of
a cable is (name of its namespace, device, address).
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
"""The switch to which all nodes are connected."""
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
"""Kernel settings of every namespace: a bed then behaves the same on machines with different
settings."""


class WiringError(RuntimeError):
    """The network could not be created; one line names the tool and its error."""


@dataclass(frozen=True, kw_only=True)
class Cable:
    """The link between a node and the switch (a veth pair)."""

    node: int
    bytes_per_second: float
    per_message: int

    @property
    def ends(self) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
        """Namespace, device and address of the node's end, and of the switch's."""
        name = node_name(self.node)
        return (name, NODE_DEVICE, node_address(self.node)), (ROOT, name, f"10.64.{self.node}.1")


def node_name(node: int) -> str:
    """Return the name of a node's namespace."""
    return f"node{node}"


def node_address(node: int) -> str:
    """Return a node's address on its link."""
    return f"10.64.{node}.2"


def cables(bed: Bed) -> list[Cable]:
    """Return the cables of a bed, one per node, in order."""
    rates = map(bed.inter_bytes_per_second, range(bed.nodes))
    return [
        Cable(node=node, bytes_per_second=rate, per_message=bed.per_message)
        for node, rate in enumerate(rates)
    ]


def namespaces(bed: Bed) -> list[str]:
    """Return the names of all namespaces of a bed: the switch, nodes."""
    return [ROOT, *map(node_name, range(bed.nodes))]


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
    """Return `ip` commands that give a namespace its addresses and routes; its cables must
    exist."""
    packets = f"gso_max_size {PACKET_BYTES} gro_max_size {PACKET_BYTES}"
    is_shaped = bed.intra is not None and name.startswith("node")
    loopback = f" mtu {MTU} {packets}" if is_shaped else ""
    addresses = [f"link set dev lo{loopback} up"]
    routes = []
    for cable in cables(bed):
        node_end, switch_end = cable.ends
        for end, other_end in ((node_end, switch_end), (switch_end, node_end)):
            owner, device, address = end
            _, _, other_address = other_end
            if owner == name:
                addresses.append(f"address add {address} peer {other_address} dev {device}")
                addresses.append(f"link set dev {device} {packets} txqueuelen 10000 up")
        node, _, _ = node_end
        _, _, switch_address = switch_end
        if node == name:
            routes.append(f"route add 10.64.0.0/16 via {switch_address}")
    return addresses + routes


def queueing(bed: Bed, name: str) -> list[str]:
    """Return `tc` commands that set the rate of every device of a namespace."""
    rates = shaping("lo", bed.intra_bytes_per_second if name.startswith("node") else None)
    for cable in cables(bed):
        for owner, device, _ in cable.ends:
            if owner == name:
                rates += shaping(device, cable.bytes_per_second, cable.per_message)
    return rates


def changing(bed: Bed, node: int, rate: str | None) -> dict[str, str]:
    """Return by namespace the `tc` command that sets its end of a node's link to a rate.

    Args:
        node: the node whose link changes.
        rate: the new rate; None for the bed's original rate.
    """
    cable = cables(bed)[node]
    speed = cable.bytes_per_second if rate is None else bytes_per_second(rate, "rate")
    lines = {}
    for name, device, _ in cable.ends:
        _, class_line, _ = shaping(device, speed, cable.per_message)
        lines[name] = class_line
    return lines


class Wiring:
    """The network of a bed, kept alive by file descriptors: it disappears when the process that
    created it ends.

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

    def switch(self, node: int, *, on: bool) -> None:
        """Cut or restore a node's link at the switch, where routes return by themselves."""
        self._tool("ip", ROOT, [f"link set dev {node_name(node)} {'up' if on else 'down'}"])

    def namespaces(self) -> list[int]:
        """Return the inode numbers of the bed's network namespaces."""
        return [os.fstat(handle).st_ino for handle in self._nets.values()]

    def traffic(self) -> dict[str, Carried]:
        """Return the traffic that every end of every link has sent: "node0 up", "node0 down",
        "node0 inside", ..."""
        # by (namespace, device), the name of the end
        ends = {(net, "lo"): f"{net} inside" for net in self._nets if net.startswith("node")}
        for cable in self._cables:
            for (net, device, _), way in zip(cable.ends, ("up", "down")):
                ends[net, device] = f"{node_name(cable.node)} {way}"
        by_end = {}
        for net, handle in self._nets.items():
            for device, carried in _counters(handle).items():
                if (net, device) in ends:
                    by_end[ends[net, device]] = carried
        return by_end

    def _set_up(self, name: str) -> None:
        """Set up a network: its settings."""
        with inside_net(self._nets[name]):
            for setting, value in SETTINGS.items():
                path = Path("/proc/sys") / setting
                if path.exists() or "ipv6" not in setting:
                    path.write_text(value)

    def _make_cables(self) -> None:
        """Make the cables between networks."""
        lines = []
        for cable in self._cables:
            (node, _, _), (_, device, _) = cable.ends
            lines.append(
                f"link add {device} mtu {MTU} type veth peer name {NODE_DEVICE} mtu {MTU} netns "
                f"/proc/self/fd/{self._nets[node]}"
            )
        self._tool("ip", ROOT, lines, share=list(self._nets.values()))

    def _tool(self, tool: str, name: str, lines: Sequence[str], share: Sequence[int] = ()) -> None:
        """Run a tool with lines of commands inside a network; `share` are file descriptors that it
        inherits."""
        if lines:
            with inside_net(self._nets[name]):
                _run([tool, "-batch", "-"], lines, share)


def _counters(net: int) -> dict[str, Carried]:
    """Return the traffic that each device of a namespace has sent, from its queue's counters or, if
    it has none, its own."""
    with inside_net(net):
        links = json.loads(_run(["ip", "-s", "-j", "link", "show"]))
        queues = json.loads(_run(["tc", "-s", "-j", "qdisc", "show"]))
    shaped = {queue["dev"]: queue for queue in queues if queue["kind"] == "htb"}
    by_device = {}
    for link in links:
        device = link["ifname"]
        sent = link["stats64"]["tx"]
        dropped = sent["dropped"]
        if device in shaped:
            sent = shaped[device]
            dropped = sent["drops"]
        by_device[device] = Carried(bytes=sent["bytes"], packets=sent["packets"], dropped=dropped)
    return by_device


def _run(words: Sequence[str], lines: Sequence[str] = (), share: Sequence[int] = ()) -> str:
    """Run a tool with `lines` as input and return its output."""
    try:
        process = subprocess.run(
            words,
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            pass_fds=share,
            check=False,
        )
    except FileNotFoundError as error:
        raise WiringError(f"`{words[0]}` is missing") from error
    if process.returncode:
        messages = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        reason = messages[0] if messages else f"exit code {process.returncode}"
        raise WiringError(f"`{words[0]}` said: {reason}")
    return process.stdout
