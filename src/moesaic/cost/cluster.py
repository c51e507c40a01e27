"""`ClusterSpec`: what of a cluster decides how long a layer takes: its devices, its links, its hosts; read from TOML by name.

Links form a tree of levels (a device's own, its socket's, its node's, its leaf switch's), each one directed link up and
one down, plus direct links between pairs of devices. A message climbs from its source to the first switch above both
ends and comes down again. `topology.py` makes the graph of it. Every refusal names the field and what would be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from moesaic.configfile import SUCH_AS, build, read_table, suggestion
from moesaic.errors import InputError
from moesaic.program.grid import Grid

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"]
ELEMENT_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1}
"""Bytes of an element by dtype."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A level of the tree: every run of `devices` consecutive devices has one link up and one down, out of the run."""

    name: str
    """Shown where it is the bottleneck: nvlink, pcie, nic, leaf."""
    devices: int = field(metadata={SUCH_AS: "1 for a link of each device"})
    """Consecutive devices behind each of these links: 1 for a device's own, all of a node's for a node's only NIC."""
    gbps: tuple[float, ...] = field(
        metadata={SUCH_AS: "2484 for NVLink of H100, 120 for PCIe 4, 92 for Ethernet of 100 Gb/s"}
    )
    """Rate in each direction, gigabits per second: one for all, one per link of a node, or one per link of the cluster."""
    latency_us: float = 0.0
    """Microseconds that a movement which uses the link takes longer, once, whatever the number of messages."""
    message_us: float = 0.0
    """Microseconds that the link is taken by each message besides its bytes: the start-up cost paid per message in turn."""
    connection_us: float = 0.0
    """Microseconds that each message takes of the link besides, for every connection that is open on it: one thread drives a
    device's connections and visits each in turn (NCCL, src/proxy.cc, progressOps)."""
    connection_gbps: float = 0.0
    """Rate of one connection between two devices at most, gigabits per second; 0 where one fills the link."""
    fabric: float = 0.0
    """The rate falls with this power of half the number of nodes in use: a fabric in which more messages meet."""
    carries: Literal["all", "inside", "outside"] = "all"
    """Which messages use it: those between devices of one node, those between nodes, or both. NVLink beside a NIC per
    device is two levels of one device each, the one inside and the other outside."""
    shared: bool = False
    """One medium for all messages between devices of the run, both directions together, in place of links out of it:
    a bus, the loopback interface of a host."""
    sizes: tuple[float, ...] = ()
    """Bytes that a movement puts on one of the links, ascending, at which `size_share` is given; () where the rate is reached
    whatever the size."""
    size_share: tuple[float, ...] = ()
    """Share of `gbps` that a movement of so many bytes reaches; interpolated over the logarithm."""
    users: tuple[float, ...] = ()
    """Devices that use a shared medium at once, ascending, at which `users_share` is given; () where they only divide it."""
    users_share: tuple[float, ...] = ()
    """Share of `gbps` that so many devices reach together."""
    adds: bool = False
    """Whether the switch behind it adds up: an all-reduce of more than two devices of a node then sends each value up once and
    gets the sum once, as NVLink SHARP does."""
    units: tuple[int, ...] = ()
    """Which of these links each node hangs on, where nodes do not fill them in equal runs; () where they do."""

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
        for name in ("size", "users"):
            check_curve(f"{where}: ", name + "s" * (name == "size"), f"{name}_share", self)

    def rate(self, unit: int) -> float:
        """Return bytes per second of one of the links, each direction."""
        return self.gbps[unit % len(self.gbps)] * 1e9 / 8

    def slowest(self, nodes: int) -> float:
        """Return bytes per second of the slowest of the links while so many nodes are in use."""
        return min(self.gbps) * 1e9 / 8 * self.fabric_share(nodes)

    def fabric_share(self, nodes: int) -> float:
        """Return the share of the rate that is left while so many nodes are in use."""
        return float((max(nodes, 2) / 2) ** -self.fabric)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A direct link between two devices of every node, used in place of the tree: an NVLink bridge."""

    devices: tuple[int, int]
    """The two, counted within the node from 0."""
    gbps: float
    """Rate in each direction, gigabits per second."""
    latency_us: float = 0.0
    """As of `Link`."""
    message_us: float = 0.0
    """As of `Link`."""

    def __post_init__(self) -> None:
        if len(self.devices) != 2 or self.devices[0] == self.devices[1] or min(self.devices) < 0:
            raise InputError(f"cluster peers: devices={list(self.devices)}: give two different devices of a node")
        check_above_zero(f"cluster peers {list(self.devices)}: gbps", self.gbps)
        for name in ("latency_us", "message_us"):
            check_not_negative(f"cluster peers {list(self.devices)}: {name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Tflops:
    """Dense matrix products that a device reaches with large matrices, 10^12 operations per second; 0: not known."""

    fp64: float = 0.0
    fp32: float = 0.0
    tf32: float = 0.0
    bf16: float = 0.0
    fp16: float = 0.0
    fp8: float = 0.0
    mxfp8: float = 0.0
    """With a scale for each 32 numbers."""

    def __post_init__(self) -> None:
        for each in fields(self):
            check_not_negative(f"cluster.device.tflops.{each.name}", getattr(self, each.name))
        if not any(getattr(self, each.name) for each in fields(self)):
            raise InputError("cluster.device.tflops is missing: give the rate of at least one dtype, bf16 = 300 say")

    def of(self, dtype: str) -> float:
        """Return operations per second.

        Raises:
            InputError: if the rate of this dtype is not known.
        """
        rate = getattr(self, dtype, 0.0)
        if not rate:
            known = ", ".join(each.name for each in fields(self) if getattr(self, each.name))
            raise InputError(f"cluster.device.tflops.{dtype} is not given: add it, or choose one of {known}")
        return float(rate) * 1e12


ScoreKernel = Literal["best", "flash2", "flex"]
"""What computes attention's scores: the fastest kernels of a device, FlashAttention-2, or FlexAttention."""


@dataclass(frozen=True, kw_only=True)
class ScoreShares:
    """Share of `tflops` that attention's scores reach, forward and backward together, half of each square counted."""

    heads: tuple[float, ...] = (128.0,)
    """Widths of heads at which shares are given, ascending."""
    best: tuple[float, ...] = (1.0,)
    """By the fastest kernels."""
    flash2: tuple[float, ...] = ()
    """By FlashAttention-2, which PyTorch's attention takes first; () as the fastest."""
    flex: tuple[float, ...] = ()
    """By FlexAttention; () as the fastest."""

    def __post_init__(self) -> None:
        if not self.heads or list(self.heads) != sorted({*self.heads}) or self.heads[0] <= 0:
            raise InputError(
                f"cluster.device.scores.heads={list(self.heads)}: give widths above 0 in ascending order, 64 and 128 say"
            )
        for kernel in get_args(ScoreKernel):
            shares = getattr(self, kernel)
            if (shares or kernel == "best") and (len(shares) != len(self.heads) or min(shares) <= 0):
                raise InputError(
                    f"cluster.device.scores.{kernel}={list(shares)}: give a share above 0 for each of heads={list(self.heads)}"
                )

    def of(self, kernel: ScoreKernel, head_dim: float) -> float:
        """Return the share for heads of a width; narrower and wider ones than are given as the nearest, 0 as the widest."""
        points = [*zip(self.heads, getattr(self, kernel) or self.best)]
        for (low, share), (high, other) in pairwise(points):
            if 0 < head_dim < high:
                return float(share + (other - share) * max(head_dim - low, 0) / (high - low))
        return float(points[-1][1])


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or on CPU one process."""

    tflops: Tflops = field(metadata={SUCH_AS: "{ bf16 = 677 } for H100, { bf16 = 213 } for A100"})
    """Rates of large products by dtype."""
    memory_gib: float = field(metadata={SUCH_AS: "80 for H100, 24 for RTX 4090"})
    """Memory, in GiB."""
    memory_gigabytes_per_second: float = field(metadata={SUCH_AS: "2850 for H100, 850 for RTX 4090"})
    """Rate of copies: bytes read plus bytes written."""
    gemm_rows: tuple[float, ...] = (1, 16, 64, 256, 1024, 4096)
    """Rows per expert at which `gemm_share` is given, ascending."""
    gemm_share: tuple[float, ...] = (0.006, 0.09, 0.3, 0.6, 0.85, 1.0)
    """Share of `tflops` that a product of so many rows reaches. The default is assumed, not measured: about rows over rows
    plus 170; `moesaic profile` measures it."""
    scores: ScoreShares = field(default_factory=ScoreShares)
    """How fast attention's scores are."""
    activation_traffic: float = 0.0
    """Part of the reading and writing of experts' activations, between one product and the next, that takes time of its own:
    0 where products hide or fuse it all, 1 where each of them and the activation run alone."""
    contention: float = 0.0
    """Part of the time in which messages and computing run at once that is lost, since they share processors and memory."""
    narrow_between: tuple[float, ...] = ()
    """Between how many times their rate products in fp8 and mxfp8 may run in training, where that was not measured; () where
    they were measured as training uses them."""
    peak_tflops: float = 0.0
    """The data sheet's rate of dense bfloat16 products, which utilization is a share of; 0: that of `tflops`."""
    codec_gigabytes_per_second: float | None = None
    """Rate of encoding or decoding, in bytes of rows; None: as copies that read rows and write messages."""

    def __post_init__(self) -> None:
        for name in ("peak_tflops", "activation_traffic", "contention"):
            check_not_negative(f"cluster.device.{name}", getattr(self, name))
        for name in ("memory_gib", "memory_gigabytes_per_second"):
            check_above_zero(f"cluster.device.{name}", getattr(self, name))
        if self.codec_gigabytes_per_second is not None:
            check_above_zero("cluster.device.codec_gigabytes_per_second", self.codec_gigabytes_per_second)
        if len(self.narrow_between) not in (0, 2) or any(each <= 0 for each in self.narrow_between):
            raise InputError(
                f"cluster.device.narrow_between={list(self.narrow_between)}: give two numbers above 0, or none"
            )
        if not self.gemm_rows:
            raise InputError("cluster.device.gemm_rows is empty: give the rows at which gemm_share is known")
        check_curve("cluster.device.", "gemm_rows", "gemm_share", self)


@dataclass(frozen=True, kw_only=True)
class Host:
    """What issues the work."""

    runs_compute: bool = False
    """True as on a CPU: the thread that issues movements also computes, and waits for what it reads."""
    task_us: float = 0.0
    """Microseconds of the issuing thread per task: a kernel launch, a Python call."""
    message_us: float = 0.0
    """Microseconds of the issuing thread per message that a rank sends or receives."""
    messages: Literal["together", "in_turn"] = "together"
    """together: all messages of a movement share the links at once. in_turn: a rank sends one after the other, and
    receives one after the other, as ScheMoE (eq. 17) takes NCCL to do. A movement that stays inside nodes runs beside one
    that leaves them, on a communicator of its own (eq. 16: Pipe-A2A)."""

    def __post_init__(self) -> None:
        for name in ("task_us", "message_us"):
            check_not_negative(f"cluster.host.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class RankSkew:
    """How unlike ranks are that should be alike, as distributions; nothing of it is known of a cluster unless it says so."""

    start_us: float = 0.0
    """Mean microseconds by which a rank comes late to a pass of a layer, exponentially distributed, anew for every pass."""
    speed: float = 0.0
    """Standard deviation of the logarithm of a rank's speed of computing, the same for the whole step."""

    def __post_init__(self) -> None:
        for name in ("start_us", "speed"):
            check_not_negative(f"cluster.rank_skew.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster of equal nodes."""

    nodes: int = field(metadata={SUCH_AS: "2"})
    """Machines."""
    devices_per_node: int = field(metadata={SUCH_AS: "8"})
    """Devices in each; as many ranks."""
    device: Device = field(metadata={SUCH_AS: "[device] with tflops = { bf16 = 677 } and memory_gib = 80 for H100"})
    """What each device is."""
    links: tuple[Link, ...] = ()
    """Levels, innermost first."""
    peers: tuple[Peer, ...] = ()
    """Direct links between devices of a node."""
    host: Host = field(default_factory=Host)
    """What issues the work."""
    speeds: tuple[float, ...] = ()
    """Speed of computing over `device`'s, of each device of a node or of the cluster; () where all are alike. Where one rank
    stands for all, it is the slowest."""
    rank_skew: RankSkew = field(default_factory=RankSkew)
    """How unlike ranks are besides; only intervals read it."""
    name: str = "cluster"
    """Shown in tables."""
    description: str = ""
    """What it stands for."""
    source: str = ""
    """Where the numbers come from."""
    measured: tuple[str, ...] = ()
    """Which of the numbers were measured rather than read off a data sheet or assumed: each with where, and how far the model
    is off what it was fitted to."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise InputError(f"cluster.{name}={getattr(self, name)}: must be at least 1")
        if len(self.speeds) not in (0, self.devices_per_node, self.world):
            raise InputError(
                f"cluster.speeds has {len(self.speeds)} values: give one for each of a node's {self.devices_per_node} devices, "
                f"or of all {self.world}"
            )
        for speed in self.speeds:
            check_above_zero("cluster.speeds", speed)
        for peer in self.peers:
            if max(peer.devices) >= self.devices_per_node:
                raise InputError(
                    f"cluster peers: devices={list(peer.devices)}: a node has devices 0 to {self.devices_per_node - 1}"
                )
        for link in self.links:
            self._check_link(link)
        if self.devices_per_node > 1 and not self._has_link("inside"):
            raise InputError(
                f"cluster {self.name}: no link carries messages inside a node of {self.devices_per_node} devices: add one "
                'with carries = "inside" or "all", devices = 1 and gbps = 2484 for NVLink of H100, 200 for PCIe 4 say'
            )
        if self.nodes > 1 and not self._has_link("outside"):
            raise InputError(
                f"cluster {self.name}: no link carries messages between its {self.nodes} nodes: add one with devices = "
                f'{self.devices_per_node}, carries = "outside" or "all", and gbps = 92 for Ethernet of 100 Gb/s say'
            )

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    def of_devices(self, count: int) -> ClusterSpec:
        """Return a cluster of so many devices: whole nodes, or a part of one.

        Raises:
            InputError: if the count is neither.
        """
        per_node = self.devices_per_node
        if count < 1 or (count > per_node and count % per_node):
            near = max(count // per_node, 1) * per_node
            raise InputError(f"{count} devices are no whole nodes of {self.name}, which have {per_node}: try {near}")
        speeds = self.speeds[: count if len(self.speeds) > per_node or count < per_node else per_node]
        # In a part of a node fewer devices are behind a link, and some bridges lead nowhere.
        links = tuple(
            replace(link, devices=min(link.devices, count), gbps=link.gbps[: max(count // link.devices, 1)])
            for link in self.links
        )
        return replace(
            self,
            nodes=max(count // per_node, 1),
            devices_per_node=min(count, per_node),
            links=links if count < per_node else self.links,
            peers=tuple(peer for peer in self.peers if max(peer.devices) < count),
            speeds=speeds,
        )

    def with_links(self, carries: Literal["inside", "outside"], times: float | Sequence[float]) -> ClusterSpec:
        """Return a cluster whose links inside or between nodes are so many times as fast; those that carry both count.

        Args:
            carries: which links.
            times: of all of them, or of each node's. A link that several nodes share is as fast as that of them whose links are
                fastest; connections of pairs, which all nodes have alike, are those of the node whose links are slowest.

        Raises:
            InputError: for another number of values than there are nodes.
        """
        each = (times,) if isinstance(times, int | float) else tuple(times)
        if len(each) not in (1, self.nodes):
            raise InputError(
                f"{len(each)} links' times for {self.nodes} nodes of {self.name}: give one, or one per node"
            )

        def faster(link: Link) -> Link:
            if link.carries not in (carries, "all"):
                return link
            if len(set(each)) == 1:
                return replace(link, gbps=tuple(each[0] * rate for rate in link.gbps))
            of_nodes = [[each[node] for node in nodes] for nodes in self._nodes_of(link)]
            rates = (link.gbps[unit % len(link.gbps)] for unit in range(len(of_nodes)))
            return replace(link, gbps=tuple(max(found) * rate for found, rate in zip(of_nodes, rates)))

        peers = tuple(replace(peer, gbps=min(each) * peer.gbps) if carries == "inside" else peer for peer in self.peers)
        return replace(self, links=tuple(map(faster, self.links)), peers=peers)

    def _nodes_of(self, link: Link) -> list[list[int]]:
        """Return the nodes behind each of the links of a kind."""
        if link.units:
            return [[n for n, unit in enumerate(link.units) if unit == each] for each in range(1 + max(link.units))]
        first = [unit * link.devices for unit in range(math.ceil(self.world / link.devices))]
        return [
            sorted({device // self.devices_per_node for device in range(start, min(start + link.devices, self.world))})
            for start in first
        ]

    def _check_link(self, link: Link) -> None:
        where, per_node = f"cluster link {link.name!r}", self.devices_per_node
        fits = per_node % link.devices == 0 if link.devices < per_node else link.devices % per_node == 0
        if not fits:
            raise InputError(
                f"{where}: devices={link.devices} does not fit nodes of {per_node} devices: choose a divisor or a multiple"
            )
        if link.units and len(link.units) != self.nodes:
            raise InputError(f"{where}: units has {len(link.units)} values: give one per node, {self.nodes}")
        count = 1 + max(link.units) if link.units else math.ceil(self.world / link.devices)
        per_node_count = per_node // link.devices if link.devices < per_node else 1
        if len(link.gbps) not in (1, count, per_node_count):
            raise InputError(
                f"{where}: gbps has {len(link.gbps)} values: give one, or one for each of the {count} links"
            )

    def _has_link(self, kind: Literal["inside", "outside"]) -> bool:
        """Whether every message of a kind has a link to use."""
        for link in self.links:
            if link.carries not in ("all", kind):
                continue
            if link.devices == 1 or (kind == "outside" and link.devices <= self.devices_per_node and not link.shared):
                return True
            if link.shared and link.devices >= self.devices_per_node and kind == "inside":
                return True
        size = self.devices_per_node
        return kind == "inside" and len({tuple(sorted(peer.devices)) for peer in self.peers}) == size * (size - 1) // 2


def presets() -> list[str]:
    """Return the names of the clusters that come with the package."""
    folder = resources.files("moesaic.cost").joinpath("presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_cluster(name: str, *, nodes: int | None = None) -> ClusterSpec:
    """Return a cluster.

    Args:
        name: a preset, or the path of a TOML or JSON file.
        nodes: use so many of its nodes, or more of the same; None for the file's number.

    Raises:
        InputError: for an unknown preset, a file that does not parse, an unknown field, or a value that cannot be.
    """
    if name.endswith((".toml", ".json")):
        table = read_table(Path(name))
    elif name in presets():
        with resources.as_file(resources.files("moesaic.cost").joinpath("presets", f"{name}.toml")) as path:
            table = {"name": name, **read_table(path)}
    else:
        raise InputError(f"cluster {name!r} is unknown{suggestion(name, presets())}; or give a path that ends in .toml")
    return build(ClusterSpec, table if nodes is None else table | {"nodes": nodes}, source=f"cluster {name}")


def check_above_zero(where: str, value: float) -> None:
    """Raise InputError unless a number is finite and above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{where}={value}: must be a finite number above 0")


def check_curve(where: str, at: str, share: str, holder: object) -> None:
    """Raise InputError unless two fields are a curve: as many shares above 0 as ascending places above 0."""
    places, shares = getattr(holder, at), getattr(holder, share)
    if len(places) != len(shares):
        raise InputError(f"{where}{at} has {len(places)} values and {share} {len(shares)}: give one share for each")
    if any(a >= b for a, b in pairwise(places)) or (places and places[0] <= 0):
        raise InputError(f"{where}{at}={list(places)}: must be above 0 and ascending")
    for each in shares:
        check_above_zero(f"{where}{share}", each)


def check_not_negative(where: str, value: float) -> None:
    """Raise InputError unless a number is finite and at least 0."""
    if not (value >= 0 and math.isfinite(value)):
        raise InputError(f"{where}={value}: must be a finite number of at least 0")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine by latencies and rates alone, of one rank: as policies weigh what they decide at every call."""

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
