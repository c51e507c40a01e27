"""Ranks and their coordinates, in several views of one world. Needs neither torch nor processes.

A view is a list of axes whose sizes multiply to the number of ranks, outermost first: a rank's
coordinates in it are the digits of its number. A replica of the experts is ep * etp consecutive
ranks that together store every expert once. Ranks of a node are consecutive too.

The dense view is `(dp, tp)` with tp innermost. The sparse view is `(edp, ep, etp)` with edp
outermost; `innermost` says whether etp or ep changes fastest. Two more views split the sparse one.
`etp = etp_outer * etp_inner` is for plans that gather a part of the weights. `(node, local)` splits
one replica of the experts by node, for plans that use the links inside a node separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm
from numbers import Integral
from typing import Literal

from moesaic.errors import InputError

Axis = Literal["dp", "tp", "edp", "ep", "etp", "etp_outer", "etp_inner", "node", "local"]
DENSE: tuple[Axis, ...] = ("dp", "tp")
SPARSE: tuple[Axis, ...] = ("edp", "ep", "etp")
FACTORED: tuple[Axis, ...] = ("edp", "ep", "etp_outer", "etp_inner")
BY_NODE: tuple[Axis, ...] = ("edp", "node", "local")
VIEWS = (DENSE, SPARSE, FACTORED, BY_NODE)


def check_size(name: str, size: object) -> None:
    """Raise InputError unless an axis of a mesh may have this size."""
    if not isinstance(size, Integral) or size < 1:
        raise InputError(f"mesh.{name}={size!r}: must be a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The sizes of the parallel axes. dp and edp follow from the number of ranks."""

    world: int
    """Number of ranks."""
    tp: int = 1
    """Tensor parallelism of the dense part: the number of ranks that hold the same tokens."""
    ep: int = 1
    """Expert parallelism: the number of ranks over which the experts are split."""
    etp: int = 1
    """Expert-tensor parallelism: the number of ranks over which each expert's hidden width is
    split."""
    innermost: Literal["etp", "ep"] = "etp"
    """The sparse axis along which neighbours have consecutive ranks."""
    ranks_per_node: int | None = None
    """The number of consecutive ranks that share a node. None: all ranks are on one node."""
    etp_inner: int = 1
    """The part of etp over which a plan gathers weights (Tutel's etp / r). etp_outer is the
    remaining factor."""

    def __post_init__(self) -> None:
        for name in ("world", "tp", "ep", "etp", "etp_inner"):
            check_size(name, getattr(self, name))
        if self.world % self.tp:
            raise InputError(
                f"mesh.tp={self.tp} does not divide the {self.world} ranks: choose a divisor "
                f"of {self.world}"
            )
        if self.world % (self.ep * self.etp):
            raise InputError(
                f"mesh.ep={self.ep} times mesh.etp={self.etp} does not divide the {self.world} "
                f"ranks: choose ep * etp as a divisor of {self.world}"
            )
        if self.etp % self.etp_inner:
            raise InputError(
                f"mesh.etp={self.etp} does not split into parts of {self.etp_inner}: choose a "
                "divisor"
            )
        if self.ranks_per_node is not None and (
            self.ranks_per_node < 1 or self.world % self.ranks_per_node
        ):
            raise InputError(
                f"mesh.ranks_per_node={self.ranks_per_node} does not divide the {self.world} "
                f"ranks: choose a divisor of {self.world}"
            )

    @property
    def dp(self) -> int:
        """Number of data-parallel groups, each with its own tokens."""
        return self.world // self.tp

    @property
    def edp(self) -> int:
        """Number of replicas of the experts."""
        return self.world // (self.ep * self.etp)

    @property
    def etp_outer(self) -> int:
        """Number of shards of an expert to which each token is sent; see `etp_inner`."""
        return self.etp // self.etp_inner

    @property
    def shares_tp_and_etp(self) -> bool:
        """Whether tensor-parallel groups and expert-shard groups consist of the same ranks, as TED
        needs."""
        stride_of_etp, _ = self.spans["etp"]  # 1: its ranks are consecutive, as those of tp are
        return self.tp == self.etp and (self.etp == 1 or stride_of_etp == 1)

    @property
    def nodes_per_replica(self) -> int:
        """Number of nodes over which one replica of the experts is spread. 0 if the spread is
        uneven."""
        replica = self.ep * self.etp
        per_node = self.ranks_per_node or self.world
        if replica % per_node == 0:
            return replica // per_node
        fits_several = per_node % replica == 0  # whole replicas share a node
        return 1 if fits_several else 0

    @property
    def cast_levels(self) -> tuple[int, ...]:
        """The number of destinations at each level at which multicast sends a token once: nodes,
        then ep ranks.

        Only ep ranks if each replica of the experts is on one node or has one ep rank per node,
        since the two levels coincide then.
        """
        if 1 < self.nodes_per_replica < self.ep:
            return (self.nodes_per_replica, self.ep)
        return (self.ep,)

    @property
    def has_shards_inside_nodes(self) -> bool:
        """Whether all shards of each expert are on one node."""
        _, span_of_etp = self.spans["etp"]  # ranks from one group over etp to the next
        return self.etp == 1 or (self.ranks_per_node or self.world) % span_of_etp == 0

    def size(self, axis: Axis) -> int:
        """Return the number of positions along an axis."""
        if axis == "node":
            return self.nodes_per_replica
        if axis == "local":
            # a replica that is spread unevenly, over 0 nodes, counts as one
            return self.ep * self.etp // max(self.nodes_per_replica, 1)
        return int(getattr(self, axis))

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return rank // (self.ranks_per_node or self.world)

    def local_of(self, rank: int) -> int:
        """Return a rank's position on its node."""
        return rank % (self.ranks_per_node or self.world)

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return a rank's coordinate on an axis."""
        if axis in self.spans:
            stride, span = self.spans[axis]
            return rank % span // stride
        replica = self.ep * self.etp
        first_of_replica = rank // replica * replica
        if axis == "node":
            return self.node_of(rank) - self.node_of(first_of_replica)
        # axis "local": counted from the first rank of the replica on this node
        first_of_node = rank - self.local_of(rank)
        return rank - max(first_of_replica, first_of_node)

    def group(self, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """Return the ranks, ascending, that have the same coordinates as `rank` on all other axes
        of the view, including `rank`.

        Args:
            rank: a member of the group.
            axes: axes of one view. () gives the rank alone.
        """
        if (rank, axes) not in self._groups:
            members = self._find_group(rank, axes)
            self._groups.update({(member, axes): members for member in members})
        return self._groups[(rank, axes)]

    def kinds_of_groups(self, axes: tuple[Axis, ...]) -> list[tuple[int, ...]]:
        """Return the groups over some axes of one view from which all others follow by a shift of
        whole nodes.

        Tensor-parallel groups and replicas of the experts are runs of consecutive ranks, so their
        position on the nodes repeats after `period` ranks. Groups over dp or edp reach further, so
        all of them are returned.
        """
        reaches_far = not {"dp", "edp"}.isdisjoint(axes)  # over ranks of any distance
        groups = []
        covered = set[int]()  # ranks of these groups
        for rank in range(self.world if reaches_far else self.period):
            if rank not in covered:
                group = self.group(rank, axes)
                groups.append(group)
                covered.update(group)
        return groups

    @property
    def period(self) -> int:
        """Number of ranks after which tensor-parallel groups, replicas of the experts and nodes
        start at the same rank again."""
        return lcm(self.tp, self.ep * self.etp, self.ranks_per_node or self.world)

    @cached_property
    def spans(self) -> dict[Axis, tuple[int, int]]:
        """For each axis that does not refer to nodes: the rank difference between neighbours, and
        that difference times the axis's size."""
        if self.innermost == "etp":
            etp_stride = 1
            ep_stride = self.etp
        else:
            etp_stride = self.ep
            ep_stride = 1
        outer_stride = etp_stride * self.etp_inner
        return {
            "dp": (self.tp, self.world),
            "tp": (1, self.tp),
            "edp": (self.ep * self.etp, self.world),
            "ep": (ep_stride, ep_stride * self.ep),
            "etp": (etp_stride, etp_stride * self.etp),
            "etp_outer": (outer_stride, etp_stride * self.etp),
            "etp_inner": (etp_stride, outer_stride),
        }

    @cached_property
    def _groups(self) -> dict[tuple[int, tuple[Axis, ...]], tuple[int, ...]]:
        """The groups that were looked up, by a member and axes."""
        return {}

    def _find_group(self, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """Return the ranks, ascending, that differ from `rank` in the coordinates of `axes` at
        most."""
        views = [view for view in VIEWS if set(axes) <= set(view)]
        assert views, f"{axes} are not axes of one view"
        if views[0] == BY_NODE:
            return self._find_group_by_node(rank, axes)
        # Go to coordinate 0 on each axis, then to every coordinate from there.
        first = rank
        for axis in axes:
            stride, _ = self.spans[axis]
            first -= self.coordinate(rank, axis) * stride
        members = [first]
        for axis in axes:
            stride, span = self.spans[axis]
            members = [member + step for member in members for step in range(0, span, stride)]
        return tuple(sorted(members))

    def _find_group_by_node(self, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """Return what `_find_group` does for axes of the view by node, whose coordinates follow no
        fixed strides: nodes may hold parts of several replicas."""
        replica = self.ep * self.etp
        first = rank // replica * replica
        candidates = range(self.world) if "edp" in axes else range(first, first + replica)
        fixed = [axis for axis in BY_NODE if axis not in axes]
        wanted = [self.coordinate(rank, axis) for axis in fixed]
        return tuple(
            member
            for member in candidates
            if [self.coordinate(member, axis) for axis in fixed] == wanted
        )


@dataclass(frozen=True, kw_only=True)
class LinkLevel:
    """A level of links: the groups of ranks that share a link, and the limit on the copies that
    leave a group."""

    name: str
    """Name in messages, such as node or leaf."""
    group: tuple[int, ...]
    """The number of each rank's group."""
    share: float
    """Share of a rank's copies, 0 to 1, that may leave its group; the number of copies is rounded
    down."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InputError(f"topology level {self.name}: share={self.share}: choose 0 to 1")
