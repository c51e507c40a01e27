"""The description of an emulated cluster: nodes and links. Pure data, validated on construction."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from moesaic.errors import InputError

MAX_NODES = 250
"""A node's number is one byte of its IP address."""
MAX_WORLD = 1024
MAX_PER_MESSAGE = 65535
"""Upper limit of `Bed.per_message` in bytes. Packets have at most 16384, so a larger charge slows
down bulk data too."""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST = 100e3
FASTEST = 100e9
"""Range of valid rates in bits per second."""
EXAMPLES = "write a number with kbit, mbit or gbit, as in 200mbit"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a link's rate while ranks run."""

    at_seconds: float
    """Seconds after the start of a command on the ranks; for a function, seconds after all ranks
    have connected."""
    node: int
    """The node whose link changes, in both directions."""
    rate: str
    """Rate of the link from then on, until the end of this run."""

    def __post_init__(self) -> None:
        if not (self.at_seconds >= 0 and math.isfinite(self.at_seconds)):
            raise InputError(
                f"change.at_seconds={self.at_seconds}: write seconds from the start, 0 or more"
            )
        bytes_per_second(self.rate, "change.rate")


@dataclass(frozen=True, kw_only=True)
class Bed:
    """An emulated cluster: `nodes` x `ranks_per_node` processes, each node on its own link."""

    nodes: int = 2
    """Number of nodes."""
    ranks_per_node: int = 2
    """Processes per node; rank r runs on node r // ranks_per_node."""
    inter: str | tuple[str, ...] = "200mbit"
    """Rate of each node's link to the switch, in each direction; a tuple has one rate per node."""
    intra: str | None = None
    """Rate of the traffic inside each node, summed over all its processes and both directions;
    None: not limited."""
    per_message: int = 0
    """Least number of bytes that a packet on a node's link is charged for; emulates the start-up
    cost of a message."""
    changes: tuple[Change, ...] = ()
    """Changes of link rates during each run."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.nodes > MAX_NODES or self.world > MAX_WORLD:
            raise InputError(
                f"nodes={self.nodes} x ranks_per_node={self.ranks_per_node}: at most {MAX_NODES} "
                f"nodes and {MAX_WORLD} ranks"
            )
        if not isinstance(self.inter, str) and len(self.inter) != self.nodes:
            raise InputError(
                f"inter has {len(self.inter)} rates for {self.nodes} nodes: write one rate, "
                "or one per node"
            )
        rates = (self.inter,) if isinstance(self.inter, str) else self.inter
        for rate in rates:
            bytes_per_second(rate, "inter")
        if self.intra is not None:
            bytes_per_second(self.intra, "intra")
        if not 0 <= self.per_message <= MAX_PER_MESSAGE:
            raise InputError(
                f"per_message={self.per_message}: write bytes from 0 to {MAX_PER_MESSAGE}"
            )
        for change in self.changes:
            if not 0 <= change.node < self.nodes:
                raise InputError(f"change.node={change.node}: nodes are 0 to {self.nodes - 1}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def intra_bytes_per_second(self) -> float | None:
        """Bytes per second inside a node; None: not limited."""
        return None if self.intra is None else bytes_per_second(self.intra, "intra")

    def inter_bytes_per_second(self, node: int = 0) -> float:
        """Return the bytes per second of a node's link in each direction, before any change."""
        return bytes_per_second(
            self.inter if isinstance(self.inter, str) else self.inter[node], "inter"
        )

    def node_of(self, rank: int) -> int:
        """Return the node that a rank runs on."""
        return rank // self.ranks_per_node


def bytes_per_second(rate: str, where: str) -> float:
    """Convert a rate to bytes per second.

    Args:
        rate: a number and a unit of bits per second, as in "200mbit" or "2.5gbit".
        where: the field's name, for the error message.

    Raises:
        InputError: for any other text. `mbps` is refused too: `tc` reads it as megabytes, other
            tools as megabits.
    """
    match = None
    if isinstance(rate, str):  # a configuration file may have a number
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)", rate.strip().lower())
    if match is None:
        raise InputError(f"{where}={rate!r} is no rate: {EXAMPLES}")
    number, unit = match.groups()
    bits = float(number) * UNITS[unit]
    if not SLOWEST <= bits <= FASTEST:
        raise InputError(
            f"{where}={rate!r}: rates go from {SLOWEST / 1e3:.0f}kbit to {FASTEST / 1e9:.0f}gbit"
        )
    return bits / 8
