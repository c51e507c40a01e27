"""The topology-aware gate: of a rank's copies only so many may leave its node; the others choose again inside it.

FasterMoE (He et al., PPoPP 2022), section 4.3, which has one level (nodes) and two experts per token, and limits first
choices only. Here levels nest as the cluster's links do (socket, node, leaf switch), every copy counts, and a token may have
any number of experts. The definition, level by level from the outermost in:

    1. tokens choose their best experts among those that are left to them;
    2. of the copies that leave the group of this level, the limit's number with the highest scores may go;
    3. a token whose copy may not go has the experts outside left to it that its other copies go to, and all inside.

So a copy that stays goes to the best expert inside that its token has not chosen yet. It changes the model's choices, and
with them what is learnt: the paper's model took 18 % more steps to its loss. Off unless asked for, and in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.topology import check_fit
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.routing.router import AbstractRouter, LimitedRouter, top_k_indices
from moesaic.routing.routers.softmax import SoftmaxTopK
from moesaic.routing.routing import Choice, Scores


@dataclass(frozen=True, kw_only=True)
class LinkLevel:
    """A level of links: which ranks are behind the same one, and how much may go through it."""

    name: str
    """Shown in messages: node, leaf."""
    group: tuple[int, ...]
    """Number of the group that each rank is in."""
    share: float
    """Of a rank's copies, 0 to 1: so many may leave its group, rounded down."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InputError(f"topology level {self.name}: share={self.share}: choose 0 to 1")


NODE_SHARE = 0.14
"""Of a rank's copies, that may leave its node where nobody knows the links: as FasterMoE's code has it."""
Levels = Callable[[Grid], Sequence[LinkLevel]]
"""From the mesh to the limits on it, outermost first."""


class TopologyRouter(LimitedRouter):
    """Wraps a token-choice router: limits what leaves a rank's groups of ranks in training.

    Where experts are is known once the layer is on a mesh: `MoE.parallelize` tells the gate (`place`). Until then, and on one
    process, nothing leaves and nothing is limited.

    Args:
        inner: the router that scores, chooses among what is left and weighs.
        grid: the mesh on which the experts will be; None to be told.
        levels: outermost first, each group inside one of the level before; `levels_of` takes them from a cluster. A function
            of the mesh where that is to be told.
        origin: place of this process in data parallelism, whose tokens it sees; None: it sees those of all, in their order,
            and routes as they would (one process that stands for a cluster).
    """

    @property
    def looks_across_tokens(self) -> bool:
        return self.training or super().looks_across_tokens

    def __init__(
        self,
        inner: AbstractRouter,
        *,
        grid: Grid | None = None,
        levels: Sequence[LinkLevel] | Levels,
        origin: int | None = None,
    ) -> None:
        super().__init__(inner)
        if not callable(levels) and not levels:
            raise InputError("TopologyRouter: no level of links to limit: give at least one, or use the router itself")
        self.levels: tuple[LinkLevel, ...] = ()
        """In force; none before the gate knows the mesh."""
        self._levels_on: Levels = levels if callable(levels) else lambda _: levels
        # No buffer: a deferred initialisation would leave it undefined, and it follows from the mesh.
        self.inside = torch.ones(0, 1, inner.num_experts, dtype=torch.bool, device="cpu")
        self.is_placed = False
        """Whether the gate knows the mesh."""
        if grid is not None:
            self.place(grid, origin)

    def place(self, grid: Grid, origin: int | None) -> None:
        """Tell the gate on which mesh the experts are; limits hold from then on.

        Args:
            origin: as of the class.

        Raises:
            InputError: if mesh, levels and experts do not fit.
        """
        if self.num_experts % grid.ep:
            raise InputError(
                f"TopologyRouter: mesh.ep={grid.ep} does not divide num_experts={self.num_experts}: choose a divisor"
            )
        if origin is not None and not 0 <= origin < grid.dp:
            raise InputError(f"TopologyRouter: origin={origin}: choose 0 to {grid.dp - 1}, or None for all")
        levels = tuple(self._levels_on(grid))
        table = experts_inside(grid, levels, self.num_experts)
        for level, (outer, within) in zip(levels[1:], pairwise(table)):
            if (within & ~outer).any():
                raise InputError(
                    f"TopologyRouter: level {level.name} has groups across those of the level before: nest them"
                )
        kept = table if origin is None else table[:, origin : origin + 1]
        self.levels, self.is_placed = levels, True
        self.inside = torch.from_numpy(kept.copy())

    def choose(self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        if self.training and self.levels:
            scores = scores._replace(rank_by=self._limited(scores, top_k, valid_T))
        return self.inner.choose(scores, top_k, valid_T, noise)

    def check_fits(self, top_k: int) -> None:
        super().check_fits(top_k)
        fewest = int(self.inside.sum(2).min()) if self.levels else self.num_experts
        if top_k > fewest:
            raise InputError(
                f"top_k={top_k} exceeds the {fewest} experts inside a group of the topology gate, where copies that may "
                "not leave choose again: lower top_k, use larger groups, or a mesh with more experts on each rank"
            )

    def _limited(self, scores: Scores, top_k: int, valid_T: Tensor | None) -> Tensor:
        """Return what experts are ranked by, (tokens, num_experts), -inf where a token may not go."""
        rank_by, tokens, origins = scores.rank_by, len(scores.rank_by), self.inside.shape[1]
        origin_T = torch.arange(tokens, device=rank_by.device) * origins // max(tokens, 1)
        routed_T = torch.ones_like(origin_T, dtype=torch.bool) if valid_T is None else valid_T
        self.inside = self.inside.to(rank_by.device)
        copies = torch.zeros(origins, dtype=torch.int64, device=rank_by.device)
        copies.scatter_add_(0, origin_T, routed_T.long() * top_k)
        for level, inside in zip(self.levels, self.inside):
            inside_TE = inside[origin_T]
            best_TK = top_k_indices(rank_by, top_k)
            leaves_TK = ~inside_TE.gather(1, best_TK) & routed_T.unsqueeze(1)
            limit = (copies.double() * level.share + 1e-9).floor().long()
            goes_TK = highest(scores.gates.detach().gather(1, best_TK), leaves_TK, origin_T, limit)
            goes_TE = torch.zeros_like(inside_TE).scatter_(1, best_TK, goes_TK)
            rank_by = rank_by.masked_fill(~(inside_TE | goes_TE), float("-inf"))
        return rank_by


def highest(scores_TK: Tensor, among_TK: Tensor, origin_T: Tensor, limit: Tensor) -> Tensor:
    """Return which entries are among the highest of their origin, (tokens, columns) bool; of equal ones the first.

    Args:
        scores_TK: (tokens, columns).
        among_TK: (tokens, columns) bool, the entries that are looked at.
        origin_T: (tokens,) int64, whose each token is, ascending.
        limit: (origins,) int64, how many to take of each origin.
    """
    scores, origin = (
        scores_TK.masked_fill(~among_TK, float("-inf")).flatten(),
        origin_T.repeat_interleave(scores_TK.shape[1]),
    )
    order = scores.argsort(descending=True, stable=True)
    order = order[origin[order].argsort(stable=True)]
    size = torch.zeros_like(limit).scatter_add_(0, origin, torch.ones_like(origin))
    first = size.cumsum(0) - size
    own = origin[order]
    taken = torch.zeros_like(origin, dtype=torch.bool)
    taken[order] = torch.arange(len(order), device=order.device) - first[own] < limit[own]
    return taken.view_as(among_TK) & among_TK


def experts_inside(grid: Grid, levels: Sequence[LinkLevel], num_experts: int) -> np.ndarray:
    """Return which experts are in the groups of data-parallel groups, (levels, dp, num_experts) bool.

    An expert is inside if all ranks of the tensor group are in one group with all shards of the expert that they use.

    Args:
        levels: groups of its ranks.
        num_experts: of a layer.

    Raises:
        InputError: if a level does not say the group of each rank.
    """
    table = np.zeros((len(levels), grid.dp, num_experts), dtype=bool)
    place = np.arange(num_experts) // (num_experts // grid.ep)
    for number, level in enumerate(levels):
        if len(level.group) != grid.world:
            raise InputError(
                f"topology level {level.name}: says the group of {len(level.group)} ranks: give one for each of {grid.world}"
            )
        for origin in range(grid.dp):
            senders = range(origin * grid.tp, (origin + 1) * grid.tp)
            near = [all(_is_inside(grid, level, sender, at) for sender in senders) for at in range(grid.ep)]
            table[number, origin] = np.array(near)[place]
    return table


def topology_gate(
    dim: int,
    num_experts: int,
    *,
    inner: Callable[[int, int], AbstractRouter] | None = None,
    cluster: ClusterSpec | None = None,
    share: float = NODE_SHARE,
    normalize: Literal["before", "after"] = "after",
    bias: bool = False,
    scale: float = 1.0,
) -> TopologyRouter:
    """Build the gate that `router="topology"` names; `partial(topology_gate, cluster=...)` for the limits of real links.

    Args:
        inner: builds the router that it wraps; None for `SoftmaxTopK` with the options below.
        cluster: whose links' rates set the limits (`levels_of`); None limits what leaves a node, and nothing else.
        share: of a rank's copies that may leave its node, without a cluster.
        normalize, bias, scale: as for `SoftmaxTopK`.
    """
    inner = inner or partial(SoftmaxTopK, normalize=normalize, bias=bias, scale=scale)

    def levels(grid: Grid) -> Sequence[LinkLevel]:
        return node_level(grid, share) if cluster is None else levels_of(cluster, grid)

    return TopologyRouter(inner(dim, num_experts), levels=levels)


def node_level(grid: Grid, share: float = NODE_SHARE) -> tuple[LinkLevel, ...]:
    """Return a limit on what leaves nodes; none on a mesh of one node.

    Args:
        share: of a rank's copies.
    """
    nodes = tuple(grid.node_of(rank) for rank in range(grid.world))
    level = LinkLevel(name="node", group=nodes, share=share)
    return (level,) if len(set(nodes)) > 1 else ()


def levels_of(cluster: ClusterSpec, grid: Grid) -> tuple[LinkLevel, ...]:
    """Return the limits of a cluster's links, outermost first; those that limit nothing are left out.

    FasterMoE's rule, L = Wn / (M * Wl) of a rank's copies, so that the shared link takes as long as the rank's own: Wn is
    the rate of a link that M ranks share on their way out, Wl that of a rank's own link.

    Args:
        cluster: what the mesh runs on, a rank per device.

    Raises:
        InputError: if they do not fit, or the cluster has no link of a device's own.
    """
    per_node = check_fit(cluster, grid.world, grid.ranks_per_node)
    own = [link.slowest(cluster.nodes) for link in cluster.links if link.devices == 1 and link.carries != "outside"]
    if not own or per_node != cluster.devices_per_node:
        raise InputError(
            f"topology gate: cluster {cluster.name} on nodes of {per_node} ranks does not say the rate of a rank's own link: "
            "use a rank per device and a link with devices = 1, or give the levels yourself"
        )
    found = []
    for link in cluster.links:
        leaves_node = link.carries == "outside" or link.devices >= per_node
        size = max(link.devices, per_node) if leaves_node else link.devices
        share = link.slowest(cluster.nodes) / (link.devices * min(own))
        if link.carries == "inside" or link.shared or size >= grid.world or size == 1 or share >= 1:
            continue
        units = [rank // size if not link.units else link.units[rank // per_node] for rank in range(grid.world)]
        found.append((size, LinkLevel(name=link.name, group=tuple(units), share=share)))
    return tuple(level for _, level in sorted(found, key=lambda pair: -pair[0]))


def _is_inside(grid: Grid, level: LinkLevel, sender: int, place: int) -> bool:
    """Whether all shards that a rank uses of the experts at a place of ep are in its group."""
    replica = grid.group(sender, ("ep", "etp"))
    shards = [rank for rank in replica if grid.coordinate(rank, "ep") == place]
    return {level.group[rank] for rank in shards} == {level.group[sender]}
