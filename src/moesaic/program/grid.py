"""Ranks and their coordinates: one world seen several ways. No torch, no processes.

Dense `(dp, tp)`, tp innermost; sparse `(edp, ep, etp)`, edp outermost and `innermost` saying whether etp or ep changes
fastest. Two more views split the sparse one: `etp = etp_outer * etp_inner`, for plans that gather part of the weights; and
one copy of the experts into `(node, local)`, for plans that treat the links inside a node apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from moesaic.errors import InputError

Axis = Literal["dp", "tp", "edp", "ep", "etp", "etp_outer", "etp_inner", "node", "local"]
DENSE: tuple[Axis, ...] = ("dp", "tp")
SPARSE: tuple[Axis, ...] = ("edp", "ep", "etp")
FACTORED: tuple[Axis, ...] = ("edp", "ep", "etp_outer", "etp_inner")
BY_NODE: tuple[Axis, ...] = ("edp", "node", "local")
VIEWS = (DENSE, SPARSE, FACTORED, BY_NODE)
AXES: tuple[Axis, ...] = tuple(dict.fromkeys(axis for view in VIEWS for axis in view))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The sizes of the parallel axes; dp and edp follow from the world."""

    world: int
    """Ranks."""
    tp: int = 1
    """Tensor parallelism of the dense part: so many ranks hold the same tokens."""
    ep: int = 1
    """Expert parallelism: experts are split over so many ranks."""
    etp: int = 1
    """Expert-tensor parallelism: each expert's hidden width is split over so many ranks."""
    innermost: Literal["etp", "ep"] = "etp"
    """The sparse axis whose neighbours have consecutive ranks."""
    ranks_per_node: int | None = None
    """Consecutive ranks that share a node; None: all ranks share one."""
    etp_inner: int = 1
    """The part of etp over which a plan gathers weights (Tutel's etp / r); etp_outer is the rest."""

    def __post_init__(self) -> None:
        for name in ("world", "tp", "ep", "etp", "etp_inner"):
            if getattr(self, name) < 1:
                raise InputError(f"mesh.{name}={getattr(self, name)}: must be at least 1")
        if self.world % self.tp:
            raise InputError(
                f"mesh.tp={self.tp} does not divide the {self.world} ranks: choose a divisor of {self.world}"
            )
        if self.world % (self.ep * self.etp):
            raise InputError(
                f"mesh.ep={self.ep} times mesh.etp={self.etp} does not divide the {self.world} ranks: "
                f"choose ep * etp as a divisor of {self.world}"
            )
        if self.etp % self.etp_inner:
            raise InputError(f"mesh.etp={self.etp} does not split into parts of {self.etp_inner}: choose a divisor")
        if self.ranks_per_node is not None and (self.ranks_per_node < 1 or self.world % self.ranks_per_node):
            raise InputError(
                f"mesh.ranks_per_node={self.ranks_per_node} does not divide the {self.world} ranks: "
                f"choose a divisor of {self.world}"
            )

    @property
    def dp(self) -> int:
        """Groups of ranks with tokens of their own."""
        return self.world // self.tp

    @property
    def edp(self) -> int:
        """Copies of the experts."""
        return self.world // (self.ep * self.etp)

    @property
    def etp_outer(self) -> int:
        """Shards of an expert that the tokens visit; see `etp_inner`."""
        return self.etp // self.etp_inner

    @property
    def shares_tp_and_etp(self) -> bool:
        """Whether the tensor groups are the expert-shard groups, as TED needs."""
        return all(self.group(rank, ("tp",)) == self.group(rank, ("etp",)) for rank in range(self.world))

    @cached_property
    def nodes_per_replica(self) -> int:
        """Nodes over which one copy of the experts is spread; 0 if it is spread unevenly."""
        replicas = {self.group(rank, ("ep", "etp")) for rank in range(self.world)}
        shapes = set()
        for replica in replicas:
            nodes = [self.node_of(rank) for rank in replica]
            shapes.add((len(set(nodes)), tuple(sorted({nodes.count(node) for node in nodes}))))
        regular = len(shapes) == 1 and len(next(iter(shapes))[1]) == 1
        return next(iter(shapes))[0] if regular else 0

    @property
    def cast_levels(self) -> tuple[int, ...]:
        """How many places multicast may send a token to, once each: nodes, then places of ep.

        Only places of ep where a copy of the experts is on one node, or has one place of ep on each: these are the same then.
        """
        return (self.nodes_per_replica, self.ep) if 1 < self.nodes_per_replica < self.ep else (self.ep,)

    @property
    def has_shards_inside_nodes(self) -> bool:
        """Whether all shards of an expert share a node."""
        return all(len({self.node_of(peer) for peer in self.group(rank, ("etp",))}) == 1 for rank in range(self.world))

    def size(self, axis: Axis) -> int:
        """Return how many ranks an axis has."""
        if axis == "node":
            return self.nodes_per_replica
        if axis == "local":
            return self.ep * self.etp // max(self.nodes_per_replica, 1)
        return int(getattr(self, axis))

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // (self.ranks_per_node or self.world)

    def local_of(self, rank: int) -> int:
        """Return a rank's place on its node."""
        return rank % (self.ranks_per_node or self.world)

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return a rank's place on an axis."""
        return self._coordinates[rank][axis] if axis in self._coordinates[rank] else self._by_node[rank][axis]

    def group(self, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """Return the ranks that share `rank`'s place on all other axes of the view, ascending; it is one of them.

        Args:
            rank: a member.
            axes: axes of one view; () gives the rank alone.
        """
        return self._groups[(rank, axes)] if (rank, axes) in self._groups else self._find_group(rank, axes)

    @cached_property
    def _groups(self) -> dict[tuple[int, tuple[Axis, ...]], tuple[int, ...]]:
        return {}

    @cached_property
    def _coordinates(self) -> list[dict[Axis, int]]:
        table: list[dict[Axis, int]] = []
        inner, outer = (self.etp, self.ep) if self.innermost == "etp" else (self.ep, self.etp)
        for rank in range(self.world):
            edp, within = divmod(rank, inner * outer)
            high, low = divmod(within, inner)
            ep, etp = (high, low) if self.innermost == "etp" else (low, high)
            place: dict[Axis, int] = {"dp": rank // self.tp, "tp": rank % self.tp, "edp": edp, "ep": ep, "etp": etp}
            place["etp_outer"], place["etp_inner"] = divmod(etp, self.etp_inner)
            table.append(place)
        return table

    @cached_property
    def _by_node(self) -> list[dict[Axis, int]]:
        table: list[dict[Axis, int]] = [{} for _ in range(self.world)]
        for rank in range(self.world):
            replica = self.group(rank, ("ep", "etp"))
            nodes = sorted({self.node_of(peer) for peer in replica})
            mates = [peer for peer in replica if self.node_of(peer) == self.node_of(rank)]
            table[rank] = {"node": nodes.index(self.node_of(rank)), "local": mates.index(rank)}
        return table

    def _find_group(self, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        view = next((v for v in VIEWS if set(axes) <= set(v)), None)
        assert view is not None, f"{axes} are not axes of one view"
        fixed = [axis for axis in view if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for each in range(self.world):
            members.setdefault(tuple(self.coordinate(each, axis) for axis in fixed), []).append(each)
        for group in map(tuple, members.values()):
            self._groups.update({(member, axes): group for member in group})
        return self._groups[(rank, axes)]
