"""`ClusterSpec`: a cluster's devices, links and hosts, as far as they decide how long a layer
takes. Read from TOML.

Links form a tree of levels: those of a device, of its socket, of its node, of its leaf switch. Each
link is one directed link up and one down. Pairs of devices may have direct links in addition. A
message climbs from its source to the first switch above both ends and descends to its target.
`topology.py` builds the graph. Every error names the field and a value that would be right.

A run is a number of consecutive devices. Rates of links are given in gigabits per second and one
direction, so 1 gbps is 1e9 / 8 bytes per second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from moesaic.codecs import codec_spec
from moesaic.configfile import SUCH_AS, build, read_table
from moesaic.errors import InputError, suggestion
from moesaic.planner.checks import check_above_zero, check_curve, check_not_negative
from moesaic.planner.fit import Fit

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"]
ELEMENT_BYTES: dict[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "mxfp8": 1,
}
"""Bytes per element, by dtype."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A level of the tree. Every run of `devices` consecutive devices has one link up and one link
    down, out of the run."""

    name: str
    """Shown if the link is the bottleneck: nvlink, pcie, nic, leaf."""
    devices: int = field(metadata={SUCH_AS: "1 for a link of each device"})
    """Consecutive devices behind each of these links: 1 if every device has its own link, all of a
    node's devices if the node has a single NIC."""
    gbps: tuple[float, ...] = field(
        metadata={SUCH_AS: "2484 for NVLink of H100, 120 for PCIe 4, 92 for Ethernet of 100 Gb/s"}
    )
    """Rate per direction in gigabits per second: one value for all links, one per link of a node,
    or one per link of the cluster."""
    latency_us: float = 0.0
    """Latency in microseconds, added once to each movement that uses the link, whatever its number
    of messages."""
    message_us: float = 0.0
    """Microseconds for which each message occupies the link besides the time of its bytes: a
    start-up cost that messages pay one after the other."""
    connection_us: float = 0.0
    """Further microseconds for which each message occupies the link, per connection open on that
    link. One thread drives all connections of a device and visits each in turn (NCCL, src/proxy.cc,
    progressOps)."""
    connection_gbps: float = 0.0
    """Highest rate of one connection between two devices, gigabits per second; 0 if a single
    connection fills the link."""
    fabric: float = 0.0
    """Exponent with which a fabric slows down as more messages meet: the rate is multiplied by
    (nodes in use / 2) ** -fabric."""
    carries: Literal["all", "inside", "outside"] = "all"
    """Which messages use the link: those between devices of one node, those between nodes, or both.
    NVLink and one NIC per device are two levels of one device each, the first "inside" and the
    second "outside"."""
    shared: bool = False
    """The devices of a run share one medium for messages among themselves, both directions
    together: a bus, a host's loopback interface. The level then has no links out of the run."""
    sizes: tuple[float, ...] = ()
    """Bytes that a movement sends over one link, ascending, at which `size_share` is given; () if
    every size reaches the rate."""
    size_share: tuple[float, ...] = ()
    """Share of `gbps` that a movement of that size reaches, interpolated over the logarithm of the
    size."""
    users: tuple[float, ...] = ()
    """Numbers of devices that use a shared medium at once, ascending, at which `users_share` is
    given; () if the devices only divide the rate."""
    users_share: tuple[float, ...] = ()
    """Share of `gbps` that this many devices reach together."""
    adds: bool = False
    """Whether the switch behind the link sums, as NVLink SHARP does. An all-reduce of more than two
    devices of a node then sends each value up once and receives each sum once."""
    deepep: bool = False
    """Whether the link carries DeepEP's and HybridEP's kernels: NVLink inside a node, InfiniBand or
    another network with GPUDirect RDMA between nodes."""

    def __post_init__(self) -> None:
        where = f"cluster link {self.name!r}"
        if self.devices < 1:
            raise InputError(f"{where}: devices={self.devices}: must be at least 1")
        if not self.gbps:
            raise InputError(f"{where}: gbps is missing: give gigabits per second, each direction")
        for rate in self.gbps:
            check_above_zero(f"{where}: gbps", rate)
        for name in ("latency_us", "message_us", "connection_us", "connection_gbps", "fabric"):
            check_not_negative(f"{where}: {name}", getattr(self, name))
        check_curve(f"{where}: ", "sizes", "size_share", self)
        check_curve(f"{where}: ", "users", "users_share", self)

    def rate(self, unit: int) -> float:
        """Return the rate of the link numbered `unit` of this level, bytes per second in each
        direction; `gbps` is repeated along the links."""
        return self.gbps[unit % len(self.gbps)] * 1e9 / 8

    def slowest(self, nodes: int) -> float:
        """Return the rate of the slowest link of this level while `nodes` nodes are in use, bytes
        per second."""
        return min(self.gbps) * 1e9 / 8 * self.fabric_share(nodes)

    def fabric_share(self, nodes: int) -> float:
        """Return the share of the rate that remains while `nodes` nodes are in use: all of it up to
        two nodes, then less by `fabric`."""
        return float((max(nodes, 2) / 2) ** -self.fabric)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A direct link between two devices of every node, such as an NVLink bridge. Messages between
    the two use it in place of the tree."""

    devices: tuple[int, int]
    """The two devices, counted from 0 within the node."""
    gbps: float
    """Rate per direction, gigabits per second."""
    latency_us: float = 0.0
    """As in `Link`."""
    message_us: float = 0.0
    """As in `Link`."""

    def __post_init__(self) -> None:
        if len(self.devices) != 2 or self.devices[0] == self.devices[1] or min(self.devices) < 0:
            raise InputError(
                f"cluster peers: devices={list(self.devices)}: give two different devices of a node"
            )
        check_above_zero(f"cluster peers {list(self.devices)}: gbps", self.gbps)
        for name in ("latency_us", "message_us"):
            check_not_negative(f"cluster peers {list(self.devices)}: {name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Tflops:
    """Rates of large matrix products, 10^12 operations per second; 0 if unknown."""

    fp64: float = 0.0
    fp32: float = 0.0
    tf32: float = 0.0
    bf16: float = 0.0
    fp16: float = 0.0
    fp8: float = 0.0
    mxfp8: float = 0.0
    """With one scale per 32 numbers."""

    def __post_init__(self) -> None:
        for dtype in fields(self):
            check_not_negative(f"cluster.device.tflops.{dtype.name}", getattr(self, dtype.name))
        if not any(getattr(self, dtype.name) for dtype in fields(self)):
            raise InputError(
                "cluster.device.tflops is missing: give the rate of at least one dtype, bf16 "
                "= 300 say"
            )

    def of(self, dtype: str) -> float:
        """Return the operations per second of products in `dtype`.

        Raises:
            InputError: if the rate of this dtype is not known.
        """
        rate = getattr(self, dtype, 0.0)
        if not rate:
            known = ", ".join(other.name for other in fields(self) if getattr(self, other.name))
            raise InputError(
                f"cluster.device.tflops.{dtype} is not given: add it, or choose one of {known}"
            )
        return float(rate) * 1e12


ScoreKernel = Literal["best", "flash2", "flex"]
"""Kernel that computes attention scores: the device's fastest, FlashAttention-2, or
FlexAttention."""


@dataclass(frozen=True, kw_only=True)
class ScoreShares:
    """Share of `tflops` that attention scores reach, forward and backward together. Only the causal
    half of each square counts as operations."""

    heads: tuple[float, ...] = (128.0,)
    """Head widths at which shares are given, ascending."""
    best: tuple[float, ...] = (1.0,)
    """Shares of the fastest kernels."""
    flash2: tuple[float, ...] = ()
    """Shares of FlashAttention-2, which PyTorch's attention chooses first; () if equal to
    `best`."""
    flex: tuple[float, ...] = ()
    """Shares of FlexAttention; () if equal to `best`."""

    def __post_init__(self) -> None:
        if not self.heads or list(self.heads) != sorted({*self.heads}) or self.heads[0] <= 0:
            raise InputError(
                f"cluster.device.scores.heads={list(self.heads)}: give widths above 0 in "
                "ascending order, 64 and 128 say"
            )
        for kernel in get_args(ScoreKernel):
            shares = getattr(self, kernel)
            if not shares and kernel != "best":
                continue
            if len(shares) != len(self.heads) or min(shares) <= 0:
                raise InputError(
                    f"cluster.device.scores.{kernel}={list(shares)}: give a share above 0 for "
                    f"each of heads={list(self.heads)}"
                )

    def of(self, kernel: ScoreKernel, head_dim: float) -> float:
        """Return the share for heads of width `head_dim`, interpolated. A width outside `heads`
        gets the nearest width's share, and 0 the widest's."""
        shares = getattr(self, kernel) or self.best
        points = list(zip(self.heads, shares))
        for (low, low_share), (high, high_share) in pairwise(points):
            if 0 < head_dim < high:
                # 0 below the first width
                above_low = max(head_dim - low, 0)
                return float(low_share + (high_share - low_share) * above_low / (high - low))
        return float(shares[-1])


@dataclass(frozen=True, kw_only=True)
class CodecRate:
    """Speed of one codec."""

    name: str
    """Name of the codec, such as int8."""
    gigabytes_per_second: float
    """Bytes of rows that a device encodes per second, and decodes in another second."""

    def __post_init__(self) -> None:
        codec_spec(self.name)
        check_above_zero(
            f"cluster.device.codecs, {self.name}: gigabytes_per_second", self.gigabytes_per_second
        )


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one process on a CPU."""

    tflops: Tflops = field(metadata={SUCH_AS: "{ bf16 = 778 } for H100, { bf16 = 213 } for A100"})
    """Rates of large matrix products, by dtype: of dense ones, and of grouped ones unless
    `grouped_tflops` has another."""
    memory_gib: float = field(metadata={SUCH_AS: "80 for H100, 24 for RTX 4090"})
    """Memory in GiB."""
    memory_gigabytes_per_second: float = field(
        metadata={SUCH_AS: "2850 for H100, 850 for RTX 4090"}
    )
    """Rate of copies, counted as bytes read plus bytes written."""
    gemm_rows: tuple[float, ...] = (1, 16, 64, 256, 1024, 4096)
    """Rows per expert at which `gemm_share` is given, ascending."""
    gemm_share: tuple[float, ...] = (0.006, 0.09, 0.3, 0.6, 0.85, 1.0)
    """Share of `tflops` that a product of that many rows reaches. The default is assumed, not
    measured: about rows / (rows + 170). `moesaic profile` measures the real curve."""
    scores: ScoreShares = field(default_factory=ScoreShares)
    """Speed of attention scores."""
    grouped_tflops: Tflops | None = None
    """Rates of grouped products, in which each expert multiplies rows of its own; None, or 0 for a
    dtype: as in `tflops`."""
    sort_us_per_1000_copies: float = 0.0
    """Microseconds in which a thousand copies of tokens are sorted by expert."""
    router_us: float = 0.0
    """Microseconds of a router's forward pass besides its product: kernels of top-k, weights,
    counts and losses."""
    activation_traffic: float = 0.0
    """Share of the memory traffic of experts' activations, between one product and the next, that
    costs extra time: 0 if products hide or fuse all of it, 1 if every product and the activation
    run as separate kernels."""
    contention: float = 0.0
    """Share of the time lost while messages and computation overlap, since both use the same
    processors and memory."""
    narrow_between: tuple[float, ...] = ()
    """Lowest and highest factor on the rates of fp8 and mxfp8 products in training, if not measured
    in training; () if measured."""
    peak_tflops: float = 0.0
    """Data-sheet rate of dense bfloat16 products, the reference for utilization; 0 for the rate in
    `tflops`."""
    codec_gigabytes_per_second: float | None = None
    """Rate of encoding or decoding, in bytes of rows; None: a copy that reads rows and writes
    messages."""
    codecs: tuple[CodecRate, ...] = ()
    """Rates of single codecs; the others have the rate above."""

    def __post_init__(self) -> None:
        may_be_zero = (
            "peak_tflops",
            "activation_traffic",
            "contention",
            "sort_us_per_1000_copies",
            "router_us",
        )
        for name in may_be_zero:
            check_not_negative(f"cluster.device.{name}", getattr(self, name))
        for name in ("memory_gib", "memory_gigabytes_per_second"):
            check_above_zero(f"cluster.device.{name}", getattr(self, name))
        if self.codec_gigabytes_per_second is not None:
            check_above_zero(
                "cluster.device.codec_gigabytes_per_second", self.codec_gigabytes_per_second
            )
        has_two_or_none = len(self.narrow_between) in (0, 2)
        if not has_two_or_none or any(factor <= 0 for factor in self.narrow_between):
            raise InputError(
                f"cluster.device.narrow_between={list(self.narrow_between)}: give two numbers "
                "above 0, or none"
            )
        if not self.gemm_rows:
            raise InputError(
                "cluster.device.gemm_rows is empty: give the rows at which gemm_share is known"
            )
        check_curve("cluster.device.", "gemm_rows", "gemm_share", self)

    def flops(self, dtype: str, *, grouped: bool = False) -> float:
        """Return the operations per second of large products in `dtype`: dense ones, or grouped
        ones.

        Raises:
            InputError: if the rate of this dtype is not known.
        """
        of_experts: float = getattr(self.grouped_tflops, dtype, 0.0) if grouped else 0.0
        return of_experts * 1e12 or self.tflops.of(dtype)

    def with_flops(self, flops: float) -> Device:
        """Return a device whose float32 products all take `flops` operations per second, whatever
        their rows."""
        rates = Tflops(fp32=flops / 1e12)
        return replace(self, tflops=rates, grouped_tflops=None, gemm_rows=(1.0,), gemm_share=(1.0,))

    def with_products(self, times: float, dtypes: Sequence[str] = get_args(Dtype)) -> Device:
        """Return a device whose products in some dtypes, dense and grouped, are `times` as fast."""

        def faster(rates: Tflops) -> Tflops:
            """Return rates, with those of the dtypes multiplied."""
            return replace(rates, **{dtype: times * getattr(rates, dtype) for dtype in dtypes})

        grouped = None if self.grouped_tflops is None else faster(self.grouped_tflops)
        return replace(self, tflops=faster(self.tflops), grouped_tflops=grouped)


@dataclass(frozen=True, kw_only=True)
class Host:
    """The thread of a rank that issues tasks, and its costs."""

    runs_compute: bool = False
    """True on a CPU: the thread that issues movements also computes, and waits for the slots that a
    task reads."""
    task_us: float = 0.0
    """Time of the issuing thread per task, in microseconds: a kernel launch, a Python call."""
    message_us: float = 0.0
    """Time of the issuing thread per message that a rank sends or receives, in microseconds."""
    layer_us: float = 0.0
    """Time of a layer outside its programs, forward and backward together, in microseconds:
    routing, the exchange of counts, autograd."""
    messages: Literal["together", "in_turn", "eager"] = "together"
    """together: all messages of a movement share the links at once. in_turn: a rank sends its
    messages one after the other, and receives one after the other, as ScheMoE (eq. 17) assumes of
    NCCL. With in_turn, a movement inside nodes has its own communicator and runs concurrently with
    a movement between nodes (eq. 16: Pipe-A2A). eager: as between processes on CPUs, a message
    leaves when its sender issues it, whatever the others do, and links are queues. So ranks of a
    node drift apart, and links that would idle in lockstep do not; up to 16 ranks are simulated
    separately."""

    def __post_init__(self) -> None:
        for name in ("task_us", "message_us", "layer_us"):
            check_not_negative(f"cluster.host.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster of equal nodes."""

    nodes: int = field(metadata={SUCH_AS: "2"})
    """Number of machines."""
    devices_per_node: int = field(metadata={SUCH_AS: "8"})
    """Devices per machine, or behind one switch of direct links, one rank each."""
    devices_per_host: int = 0
    """Devices of one host, of which a switch serves several (4 of 72 in an NVL72): a job on several
    nodes may use equal parts of them that are whole hosts. 0: a node is one host."""
    device: Device = field(
        metadata={SUCH_AS: "[device] with tflops = { bf16 = 778 } and memory_gib = 80 for H100"}
    )
    """Description of a device."""
    links: tuple[Link, ...] = ()
    """Link levels, innermost first."""
    peers: tuple[Peer, ...] = ()
    """Direct links between devices of a node."""
    host: Host = field(default_factory=Host)
    """Costs of the issuing thread."""
    speeds: tuple[float, ...] = ()
    """Compute speeds relative to `device`, one for each device of a node or of the cluster; () if
    all are equal. If one rank stands for all, the slowest speed counts."""
    collectives: tuple[Fit, ...] = ()
    """Measured lines of collectives over bytes, counted as nccl-tests does, of exactly this many
    nodes. The name tells the collective and its span, such as "all_gather inside"; see
    `moesaic.measure.links`."""
    name: str = "cluster"
    """Shown in tables."""
    description: str = ""
    """What the cluster stands for."""
    source: str = ""
    """Source of the numbers."""
    measured: tuple[str, ...] = ()
    """Which numbers were measured rather than read off a data sheet or assumed. Each entry says
    where, and how far the model is off the data it was fitted to."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise InputError(f"cluster.{name}={getattr(self, name)}: must be at least 1")
        check_not_negative("cluster.devices_per_host", self.devices_per_host)
        if len(self.speeds) not in (0, self.devices_per_node, self.world):
            raise InputError(
                f"cluster.speeds has {len(self.speeds)} values: give one for each of a node's "
                f"{self.devices_per_node} devices, or of all {self.world}"
            )
        for speed in self.speeds:
            check_above_zero("cluster.speeds", speed)
        for peer in self.peers:
            if max(peer.devices) >= self.devices_per_node:
                raise InputError(
                    f"cluster peers: devices={list(peer.devices)}: a node has devices 0 to "
                    f"{self.devices_per_node - 1}"
                )
        for link in self.links:
            self._check_link(link)
        if self.devices_per_node > 1 and not self._has_link("inside"):
            raise InputError(
                f"cluster {self.name}: no link carries messages inside a node of "
                f"{self.devices_per_node} devices: add one "
                'with carries = "inside" or "all", devices = 1 and gbps = 2484 for NVLink of '
                "H100, 200 for PCIe 4 say"
            )
        if self.nodes > 1 and not self._has_link("outside"):
            raise InputError(
                f"cluster {self.name}: no link carries messages between its {self.nodes} nodes: "
                "add one with devices = "
                f'{self.devices_per_node}, carries = "outside" or "all", and gbps = 92 for '
                "Ethernet of 100 Gb/s say"
            )

    @property
    def world(self) -> int:
        """Total number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def carries_deepep(self) -> bool:
        """Whether the links that are in use inside nodes and between them carry DeepEP."""
        used_kinds = ["all", "inside"]
        if self.nodes > 1:
            used_kinds.append("outside")
        links = [link for link in self.links if link.carries in used_kinds]
        return bool(links) and all(link.deepep for link in links)

    def of_devices(self, count: int) -> ClusterSpec:
        """Return a cluster of `count` devices: whole nodes, part of one node, or equal parts of
        nodes of several hosts.

        Raises:
            InputError: if `count` is none of these.
        """
        per_node = self.devices_per_node
        nodes = math.ceil(count / per_node)
        used = count // max(nodes, 1)  # devices of each node
        host = self.devices_per_host or per_node  # 0: a node is one host
        is_uneven = used * nodes != count or used % host != 0
        if count < 1 or (nodes > 1 and is_uneven):
            near = max(count // per_node, 1) * per_node
            raise InputError(
                f"{count} devices are not whole nodes of {self.name}, which have {per_node}: "
                f"try {near}"
            )
        speeds_are_of_cluster = len(self.speeds) > per_node
        speeds = self.speeds[:count] if speeds_are_of_cluster else self.speeds[:used]
        links = self.links
        if used < per_node:
            # In part of a node, fewer devices are behind a link, the links of a node (and their
            # rates) are fewer, and some direct links lose an end.
            links = tuple(
                replace(
                    link,
                    devices=min(link.devices, used),
                    gbps=link.gbps[: max(used // link.devices, 1)],
                )
                for link in self.links
            )
        return replace(
            self,
            nodes=nodes,
            devices_per_node=used,
            links=links,
            peers=tuple(peer for peer in self.peers if max(peer.devices) < used),
            collectives=self.collectives if count == self.world else (),
            speeds=speeds,
        )

    def with_links(
        self, carries: Literal["inside", "outside"], times: float | Sequence[float]
    ) -> ClusterSpec:
        """Return a cluster whose links inside or between nodes are `times` as fast.

        Links that carry both kinds of messages change too.

        Args:
            carries: which links to change.
            times: one factor for all links, or one per node. A link that several nodes share gets
                the largest factor of its nodes. Direct links between pairs are equal in all nodes
                and get the smallest factor.

        Raises:
            InputError: if the number of factors is neither 1 nor the number of nodes.
        """
        factors = (times,) if isinstance(times, int | float) else tuple(times)
        if len(factors) not in (1, self.nodes):
            raise InputError(
                f"{len(factors)} links' times for {self.nodes} nodes of {self.name}: give "
                "one, or one per node"
            )

        def faster(link: Link) -> Link:
            """Return a level of links with their rates multiplied; one that reaches several nodes
            by the largest of their factors."""
            if link.carries not in (carries, "all"):
                return link
            if len(set(factors)) == 1:
                return replace(link, gbps=tuple(factors[0] * rate for rate in link.gbps))
            gbps = []
            for number, nodes in enumerate(self._nodes_of(link)):
                factor = max(factors[node] for node in nodes)
                # `gbps` has one rate for all links of the level, or is repeated along them
                usual = link.gbps[number % len(link.gbps)]
                gbps.append(factor * usual)
            return replace(link, gbps=tuple(gbps))

        peers = tuple(
            replace(peer, gbps=min(factors) * peer.gbps) if carries == "inside" else peer
            for peer in self.peers
        )
        return replace(self, links=tuple(map(faster, self.links)), peers=peers)

    def _nodes_of(self, link: Link) -> list[list[int]]:
        """Return the nodes behind each link of a level."""
        nodes_of_links = []
        for start in range(0, self.world, link.devices):
            last = min(start + link.devices, self.world) - 1
            first_node = start // self.devices_per_node
            last_node = last // self.devices_per_node
            nodes_of_links.append(list(range(first_node, last_node + 1)))
        return nodes_of_links

    def _check_link(self, link: Link) -> None:
        """Refuse a link whose devices do not fit nodes, or whose number of rates does not fit its
        links."""
        where = f"cluster link {link.name!r}"
        per_node = self.devices_per_node
        smaller = min(link.devices, per_node)
        larger = max(link.devices, per_node)
        if larger % smaller:
            raise InputError(
                f"{where}: devices={link.devices} does not fit nodes of {per_node} devices: "
                "choose a divisor or a multiple"
            )
        count = math.ceil(self.world / link.devices)  # links of this level in the cluster
        links_per_node = max(per_node // link.devices, 1)
        if len(link.gbps) not in (1, count, links_per_node):
            raise InputError(
                f"{where}: gbps has {len(link.gbps)} values: give one, or one for each of the "
                f"{count} links"
            )

    def _has_link(self, kind: Literal["inside", "outside"]) -> bool:
        """Return whether every message of a kind has a link to use."""
        per_node = self.devices_per_node
        for link in self.links:
            if link.carries not in ("all", kind):
                continue
            if link.devices == 1:
                return True
            # the links of a run carry what leaves it, a shared medium what stays in it
            if kind == "outside" and link.devices <= per_node and not link.shared:
                return True
            if kind == "inside" and link.devices >= per_node and link.shared:
                return True
        # else direct links must join every two devices of a node
        joined = {tuple(sorted(peer.devices)) for peer in self.peers}
        num_pairs = per_node * (per_node - 1) // 2
        return kind == "inside" and len(joined) == num_pairs


PORTS = ("10", "25", "100")
"""Rates of ports in Gb/s that names of cards may end in."""
CARDS = re.compile(rf"(?:([1-9]\d*)x)?([1248])x(\w+)-(?:pcie|({'|'.join(PORTS)})gbe)")
"""Names of machines with some of the cards of a preset `8xCARD-pcie`: `4x4090-pcie`, and
`2x4x4090-25gbe` for two machines of four cards with a port of 25 Gb/s each."""
ETHERNET_SHARE = 0.92
"""Share of a port's rate that messages reach, as in the presets of DGX machines."""


def presets() -> list[str]:
    """Return the names of the clusters that the package ships."""
    folder = resources.files("moesaic.planner").joinpath("clusters")
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def read_cluster(name: str, *, nodes: int | None = None) -> ClusterSpec:
    """Read a cluster.

    Args:
        name: a preset, some cards of one (`CARDS`), or the path of a TOML or JSON file.
        nodes: number of nodes, fewer or more than in the file; None for the file's number.

    Raises:
        InputError: for an unknown preset, a file that does not parse, an unknown field, or an
            invalid value.
    """
    if name.endswith((".toml", ".json")):
        path = Path(name)
        table = read_table(path, "cluster")
        if {"format", "versions", "host"} <= table.keys():
            raise InputError(
                f"cluster {name} is a profile of an earlier version: run moesaic profile again"
            )
        table = {"name": path.name, **table}
    elif name in presets():
        folder = resources.files("moesaic.planner").joinpath("clusters")
        with resources.as_file(folder.joinpath(f"{name}.toml")) as path:
            table = {"name": name, **read_table(path)}
    else:
        cards = CARDS.fullmatch(name)
        if cards is None or not _is_cards(name):
            raise InputError(
                f"cluster {name!r} is unknown{_near_cluster(name)} (or give cards, "
                "4x4090-pcie or 2x4x4090-25gbe, or a path that ends in .toml)"
            )
        return _cluster_of_cards(name, cards, nodes)
    if nodes not in (None, table.get("nodes")):
        # measured lines of collectives are of the file's number of nodes
        table = table | {"nodes": nodes, "collectives": []}
    return build(ClusterSpec, table, source=f"cluster {name}")


def _near_cluster(name: str) -> str:
    """Return a suggestion for an unknown name: known ports, if the cards are known and the port is
    not; the cards, if they come without a link; or a preset."""
    cards_of_name, _, port = name.rpartition("-")
    if re.fullmatch(r"\d+(?:gbe|g|gbit)?", port) and _is_cards(f"{cards_of_name}-25gbe"):
        names = [f"{cards_of_name}-{each}gbe" for each in PORTS]
        return (
            f": a port has {', '.join(PORTS[:-1])} or {PORTS[-1]} Gb/s: choose one of "
            f"{', '.join(names)}"
        )
    for link in ("25gbe", "pcie"):  # of several machines, of one
        cards = CARDS.fullmatch(f"{name}-{link}")
        is_several = cards is not None and cards[1] is not None
        if is_several == (link == "25gbe") and _is_cards(f"{name}-{link}"):
            return f": did you mean {name}-{link}?"
    return suggestion(name, presets())


def _is_cards(name: str) -> bool:
    """Whether a name is one of cards that a preset has."""
    cards = CARDS.fullmatch(name)
    return cards is not None and f"8x{cards[3]}-pcie" in presets()


def _cluster_of_cards(name: str, cards: re.Match[str], nodes: int | None) -> ClusterSpec:
    """Return the cluster that a name of some cards of a preset describes.

    Args:
        name: the name.
        cards: its match of `CARDS`: machines, cards of each, kind of card, port in Gb/s.
        nodes: number of machines; None for the one in the name.
    """
    machines, num_cards, card, port = cards.groups()
    machine = replace(read_cluster(f"8x{card}-pcie").of_devices(int(num_cards)), name=name)
    port_gbps = ETHERNET_SHARE * int(port or 100)  # names that end in -pcie give no port
    links = []
    for link in machine.links:
        is_port = link.carries == "outside"
        links.append(replace(link, gbps=(port_gbps,)) if is_port else link)
    return replace(machine, nodes=nodes or int(machines or 1), links=tuple(links))
