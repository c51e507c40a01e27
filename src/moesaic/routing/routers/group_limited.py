"""Group-limited routing: a token may use only experts of a few groups, and so is sent to only a few
devices.

DeepSeek-V2 (2024), section 2.1.3, ranks a group by its best expert; DeepSeek-V3 (2024), section
2.1.2, by the sum of its two best experts.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels.top_k import in_best_groups
from moesaic.routing.router import AbstractRouter, FusedChoice, LimitedRouter
from moesaic.routing.routers.sigmoid import SigmoidTopK
from moesaic.routing.routing import Choice, Scores


class GroupLimited(LimitedRouter):
    """A wrapper of a token-choice router that leaves each token the experts of its best
    `top_groups` groups.

    Args:
        inner: the router that scores, chooses among the eligible experts and weighs.
        num_groups: number of equal groups of consecutive experts; must divide `num_experts`.
        top_groups: number of groups that a token may use.
        rank_groups_by: "best" ranks groups by their best expert, "best_two" by the sum of their two
            best experts.
    """

    def __init__(
        self,
        inner: AbstractRouter,
        *,
        num_groups: int,
        top_groups: int,
        rank_groups_by: Literal["best", "best_two"] = "best_two",
    ) -> None:
        super().__init__(inner)
        if num_groups < 1 or inner.num_experts % num_groups:
            raise InputError(
                f"num_groups={num_groups} does not divide num_experts={inner.num_experts}: "
                "choose a divisor of it"
            )
        if not 1 <= top_groups <= num_groups:
            raise InputError(
                f"top_groups={top_groups} does not fit num_groups={num_groups}: choose 1 to "
                f"{num_groups}"
            )
        if rank_groups_by not in ("best", "best_two"):
            raise InputError(
                f'rank_groups_by={rank_groups_by!r} is unknown: write rank_groups_by="best" '
                'or rank_groups_by="best_two"'
            )
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.rank_groups_by = rank_groups_by

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Choose as the inner router, among experts of each token's best groups."""
        limited = in_best_groups(
            scores.rank_by,
            self.num_groups,
            self.top_groups,
            best_two=self.rank_groups_by == "best_two",
        )
        return self.inner.choose(scores._replace(rank_by=limited), top_k, valid_T, noise)

    def fused(self, top_k: int) -> FusedChoice | None:
        """Return the inner router's choice in one operation, limited to groups; None if it has
        none."""
        inner = self.inner.fused(top_k) if self.is_as_in(GroupLimited) else None
        if inner is None or inner.rule.num_groups > 1:  # limited to groups already
            return None
        rule = inner.rule._replace(
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            by_best_two=self.rank_groups_by == "best_two",
        )
        return inner._replace(rule=rule)

    def check_fits(self, top_k: int) -> None:
        """Refuse more experts a token than its best groups have."""
        super().check_fits(top_k)
        eligible = self.top_groups * self.num_experts // self.num_groups
        if top_k > eligible:
            raise InputError(
                f"top_k={top_k} exceeds the {eligible} experts in {self.top_groups} of "
                f"{self.num_groups} groups: raise top_groups or lower top_k"
            )


def group_limited_sigmoid(
    dim: int,
    num_experts: int,
    *,
    num_groups: int = 4,
    top_groups: int = 2,
    rank_groups_by: Literal["best", "best_two"] = "best_two",
    bias_rate: float = 1e-3,
    normalize: bool = True,
    bias: bool = False,
    scale: float = 1.0,
) -> GroupLimited:
    """Build DeepSeek-V3's router: sigmoid scores with a bias, limited to `top_groups` of
    `num_groups` groups.

    Args:
        dim, num_experts, bias_rate, normalize, bias, scale: as for `SigmoidTopK`.
        num_groups, top_groups, rank_groups_by: as for `GroupLimited`.
    """
    inner = SigmoidTopK(
        dim, num_experts, bias_rate=bias_rate, normalize=normalize, bias=bias, scale=scale
    )
    return GroupLimited(
        inner, num_groups=num_groups, top_groups=top_groups, rank_groups_by=rank_groups_by
    )
