"""The topology-aware gate: limits how many of a rank's copies leave its node; the other copies
choose an expert inside it.

FasterMoE (He et al., PPoPP 2022), section 4.3, has one level (nodes) and two experts per token, and
limits first choices only. Here levels nest as the cluster's links do (socket, node, leaf switch),
every copy counts, and a token may have any number of experts. The levels are processed from the
outermost to the innermost:

    1. Each token chooses its best experts among those that are still eligible for it.
    2. Of the copies that leave the group of this level, those with the highest scores may go, up to
       the limit.
    3. Outside the group, a token keeps only those experts to which its permitted copies go; inside,
       it keeps all experts.

A copy that may not leave thus goes to the best expert inside that its token has not chosen yet. The
gate changes which experts are chosen, and so what the model learns: the paper's model needed 18 %
more steps to reach its loss. It is off by default, and always off in evaluation.

A level divides the ranks of the mesh into link groups. An origin is a data-parallel group, whose
tokens start from its link group; experts are inside if they are in the same link group. T tokens, K
experts of each, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels.top_k import top_k_indices
from moesaic.program.grid import Grid, LinkLevel
from moesaic.routing.router import AbstractRouter, LimitedRouter
from moesaic.routing.routers.softmax import SoftmaxTopK
from moesaic.routing.routing import Choice, Scores

NODE_SHARE = 0.14
"""Share of a rank's copies that may leave its node if the rates of the links are unknown; the value
of FasterMoE's code."""
Levels = Callable[[Grid], Sequence[LinkLevel]]
"""A function from the mesh to its levels, outermost first."""


class TopologyRouter(LimitedRouter):
    """A wrapper of a token-choice router that, in training, limits the copies that leave a rank's
    groups of ranks.

    The experts' ranks are known once the layer is on a mesh: `MoE.parallelize` calls `place`.
    Before that call, and on one process, nothing is limited.

    Args:
        inner: the router that scores, chooses among the eligible experts and weighs.
        grid: the mesh of the experts; None if `place` will be called with it.
        levels: the levels, outermost first, each group inside a group of the level before;
            `planner.policy_rates.levels_of` derives them from a cluster. Alternatively a function
            from the mesh to the levels.
        origin: the data-parallel group of this process, which sees the tokens of that group only.
            None if the process sees the tokens of all groups in their order and routes each as its
            group would (one process that stands for a cluster).
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
            raise InputError(
                "TopologyRouter: no level of links to limit: give at least one, or use the "
                "router itself"
            )
        self.levels: tuple[LinkLevel, ...] = ()
        """The levels in force; empty before the gate knows the mesh."""
        self._levels_on: Levels = levels if callable(levels) else lambda _: levels
        """Returns the levels of a mesh."""
        # Not a buffer: it follows from the mesh, and deferred initialisation would leave a buffer
        # undefined.
        self.inside = torch.ones(0, 1, inner.num_experts, dtype=torch.bool, device="cpu")
        """(levels, origins, E) bool: which experts are inside, for the origins of this process."""
        self.is_placed = False
        """Whether the gate knows the mesh."""
        if grid is not None:
            self.place(grid, origin)

    def join_mesh(self, grid: Grid, origin: int) -> None:
        """Call `place`, unless the constructor did."""
        if not self.is_placed:
            self.place(grid, origin)

    def place(self, grid: Grid, origin: int | None) -> None:
        """Set the mesh of the experts; the limits apply from then on.

        Args:
            origin: as for the class.

        Raises:
            InputError: if mesh, levels and experts do not fit.
        """
        if self.num_experts % grid.ep:
            raise InputError(
                f"TopologyRouter: mesh.ep={grid.ep} does not divide "
                f"num_experts={self.num_experts}: choose a divisor"
            )
        if origin is not None and not 0 <= origin < grid.dp:
            raise InputError(
                f"TopologyRouter: origin={origin}: choose 0 to {grid.dp - 1}, or None for all"
            )
        levels = tuple(self._levels_on(grid))
        table = experts_inside(grid, levels, self.num_experts)
        # what is inside at a level must be inside at the level before, which is wider
        for level, inside_before, inside in zip(levels[1:], table, table[1:]):
            if (inside & ~inside_before).any():
                raise InputError(
                    f"TopologyRouter: level {level.name} has groups across those of the level "
                    "before: nest them"
                )
        if origin is not None:
            table = table[:, origin : origin + 1]
        self.levels = levels
        self.is_placed = True
        self.inside = torch.from_numpy(table.copy())

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Choose as the inner router; in training, among the experts that the limits leave."""
        if self.training and self.levels:
            scores = scores._replace(rank_by=self._limited(scores, top_k, valid_T))
        return self.inner.choose(scores, top_k, valid_T, noise)

    def check_fits(self, top_k: int) -> None:
        """Refuse more experts a token than the smallest group has."""
        super().check_fits(top_k)
        # over all levels and origins
        fewest = int(self.inside.sum(2).min()) if self.levels else self.num_experts
        if top_k > fewest:
            raise InputError(
                f"top_k={top_k} exceeds the {fewest} experts inside a group of the topology gate, "
                "where copies that may not leave choose again: lower top_k, use larger groups, "
                "or a mesh with more experts on each rank"
            )

    def _limited(self, scores: Scores, top_k: int, valid_T: Tensor | None) -> Tensor:
        """Return the values that rank the experts, (tokens, num_experts); -inf where the limits
        exclude an expert."""
        rank_by = scores.rank_by
        gates = scores.gates.detach()
        num_tokens = len(rank_by)
        num_origins = self.inside.shape[1]
        # the tokens of several origins follow one another, equally many of each
        token = torch.arange(num_tokens, device=rank_by.device)
        origin_T = token * num_origins // max(num_tokens, 1)
        is_routed_T = torch.ones_like(origin_T, dtype=torch.bool) if valid_T is None else valid_T
        self.inside = self.inside.to(rank_by.device)
        # of each origin, padding excluded
        copies = torch.zeros(num_origins, dtype=torch.int64, device=rank_by.device)
        copies.scatter_add_(0, origin_T, is_routed_T.long() * top_k)

        # for each level the three steps of the module's docstring
        for level, inside in zip(self.levels, self.inside):
            is_inside_TE = inside[origin_T]
            best_TK = top_k_indices(rank_by, top_k)
            leaves_TK = ~is_inside_TE.gather(1, best_TK) & is_routed_T.unsqueeze(1)
            # 1e-9: a product such as 100 * 0.29 may be just below the whole number
            limit = (copies.double() * level.share + 1e-9).floor().long()
            may_leave_TK = highest(gates.gather(1, best_TK), leaves_TK, origin_T, limit)
            may_leave_TE = torch.zeros_like(is_inside_TE).scatter_(1, best_TK, may_leave_TK)
            is_eligible_TE = is_inside_TE | may_leave_TE
            rank_by = rank_by.masked_fill(~is_eligible_TE, float("-inf"))
        return rank_by


def highest(scores_TK: Tensor, among_TK: Tensor, origin_T: Tensor, limit: Tensor) -> Tensor:
    """Return which entries are among the highest of their origin, (tokens, columns) bool; the first
    of equal entries win.

    Args:
        scores_TK: (tokens, columns).
        among_TK: (tokens, columns) bool, the entries that compete.
        origin_T: (tokens,) int64, the origin of each token, ascending.
        limit: (origins,) int64, the number of entries to take per origin.
    """
    scores = scores_TK.masked_fill(~among_TK, float("-inf")).flatten()
    origin = origin_T.repeat_interleave(scores_TK.shape[1])
    # the entries of one origin after those of another, the highest first
    order = scores.argsort(descending=True, stable=True)
    order = order[origin[order].argsort(stable=True)]
    sorted_origin = origin[order]

    num_entries = torch.zeros_like(limit).scatter_add_(0, origin, torch.ones_like(origin))
    first = num_entries.cumsum(0) - num_entries
    # of each entry among those of its origin, the highest at 0
    position = torch.arange(len(order), device=order.device) - first[sorted_origin]
    is_taken = torch.zeros_like(origin, dtype=torch.bool)
    is_taken[order] = position < limit[sorted_origin]
    return is_taken.view_as(among_TK) & among_TK


def experts_inside(grid: Grid, levels: Sequence[LinkLevel], num_experts: int) -> np.ndarray:
    """Return which experts are inside the link group of each data-parallel group, (levels, dp,
    num_experts) bool.

    An expert is inside if all ranks of the tensor-parallel group and all shards of the expert that
    they use are in one group.

    Args:
        grid: the mesh.
        levels: the groups of the ranks of the mesh.
        num_experts: experts of a layer.

    Raises:
        InputError: if a level does not give the group of each rank.
    """
    table = np.zeros((len(levels), grid.dp, num_experts), dtype=bool)
    place_of_expert = np.arange(num_experts) // (num_experts // grid.ep)  # along ep
    for index, level in enumerate(levels):
        if len(level.group) != grid.world:
            raise InputError(
                f"topology level {level.name}: gives the group of {len(level.group)} ranks: "
                f"give one for each of {grid.world}"
            )
        for origin in range(grid.dp):
            senders = range(origin * grid.tp, (origin + 1) * grid.tp)  # the ranks of the origin
            is_inside = np.ones(grid.ep, dtype=bool)
            for place in range(grid.ep):
                is_inside[place] = all(_is_inside(grid, level, sender, place) for sender in senders)
            table[index, origin] = is_inside[place_of_expert]
    return table


def topology_gate(
    dim: int,
    num_experts: int,
    *,
    inner: Callable[[int, int], AbstractRouter] | None = None,
    levels: Sequence[LinkLevel] | Levels | None = None,
    share: float = NODE_SHARE,
    normalize: Literal["before", "after"] = "after",
    bias: bool = False,
    scale: float = 1.0,
) -> TopologyRouter:
    """Build the gate of `router="topology"`; use `partial(topology_gate, levels=...)` for limits
    from real link rates.

    Args:
        dim: width of a token.
        inner: builds the wrapped router from (dim, num_experts); None for `SoftmaxTopK` with the
            options below.
        levels: as for `TopologyRouter`; `moesaic.planner.policy_rates.levels_of` derives them from
            a cluster. None limits only the copies that leave a node.
        share: share of a rank's copies that may leave its node, if no levels are given.
        normalize, bias, scale: as for `SoftmaxTopK`.
    """
    inner = inner or partial(SoftmaxTopK, normalize=normalize, bias=bias, scale=scale)
    if levels is None:
        levels = partial(node_level, share=share)
    return TopologyRouter(inner(dim, num_experts), levels=levels)


def node_level(grid: Grid, share: float = NODE_SHARE) -> tuple[LinkLevel, ...]:
    """Return one level that limits the copies that leave a node; no level on a mesh of one node.

    Args:
        share: share of a rank's copies that may leave its node.
    """
    nodes = tuple(grid.node_of(rank) for rank in range(grid.world))
    if len(set(nodes)) == 1:
        return ()
    return (LinkLevel(name="node", group=nodes, share=share),)


def _is_inside(grid: Grid, level: LinkLevel, sender: int, place: int) -> bool:
    """Return whether all shards that `sender`, a rank, uses of the experts at a place of ep are in
    the sender's link group."""
    replica = grid.group(sender, ("ep", "etp"))
    shards = [rank for rank in replica if grid.coordinate(rank, "ep") == place]
    return all(level.group[rank] == level.group[sender] for rank in shards)
