"""Capacity: how many rows an expert takes, and which copies are admitted if the expert is chosen
more often.

The rules are written in words: `Dropless()`, `Capacity.fixed(1.25)`, `Capacity.fitted()`,
`Capacity.fitted(at_most=2.0)`. No number has two meanings; Tutel (section 4.1) encodes the same
rules as positive, zero and negative factors.

A copy is a token's use of one expert; there are N, and its slot is the rank of the choice among
those of its token, up to K. Copies of an expert queue for its rows in the order in which they are
admitted. E is the number of experts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels.pick import is_limited
from moesaic.routing.routing import Choice

Order = Literal["position", "score"]
Scope = Literal["mesh", "rank"]


class AbstractCapacity(ABC):
    """A rule for the number of rows per expert."""

    @property
    def admits_by_score(self) -> bool:
        """True if tokens with a larger best weight are admitted first, False if copies are admitted
        in token order."""
        return False

    @property
    def spans_mesh(self) -> bool:
        """True if one limit applies to the copies of all ranks together, False if each rank has a
        limit of its own."""
        return False

    @property
    def is_padded(self) -> bool:
        """True if, on a mesh, every rank sends the same number of rows to each expert."""
        return False

    @property
    def never_drops(self) -> bool:
        """True if no copy is ever dropped."""
        return False

    @abstractmethod
    def rows(self, requested_E: Tensor, num_valid: Tensor, top_k: int) -> Tensor | None:
        """Return the rows that each expert may take, () int64, or None for no limit.

        Args:
            requested_E: (num_experts,) int64 copies per expert, padding excluded.
            num_valid: () int64 tokens that are not padding.
            top_k: experts per token.
        """


@dataclass(frozen=True)
class Dropless(AbstractCapacity):
    """A capacity without limit: no copy is dropped, however uneven the load."""

    never_drops = True

    def rows(self, requested_E: Tensor, num_valid: Tensor, top_k: int) -> Tensor | None:
        """Return None: no limit."""
        return None


@dataclass(frozen=True)
class Capacity(AbstractCapacity):
    """A limit of `factor` times the mean load; build one with `Capacity.fixed` or
    `Capacity.fitted`."""

    factor: float | None
    """Ratio of rows per expert to the mean load `top_k * tokens / num_experts`; None for no upper
    limit."""
    fit: bool
    """Lower the limit to the load of the fullest expert."""
    order: Order = "position"
    """The order in which copies are admitted; all first choices always come before all second
    choices. "position": in token order (GShard). "score": tokens with the larger best weight first
    (batch-prioritised routing, Riquelme et al., "Scaling Vision with Sparse Mixture of Experts",
    2021, section 4); then each rank admits its own copies, whatever the scope."""
    scope: Scope = "mesh"
    """"mesh": the limit applies to the copies of all ranks together, and drops do not depend on the
    mesh. "rank": each rank has a limit for its own tokens, as in the papers."""
    padded: bool = False
    """On a mesh, make every rank send each expert exactly as many rows as the limit, rounded up to
    a multiple that the plan can divide and filled with empty rows. Sizes are then known in advance,
    and the host never waits for counts. The limit counts padding tokens too."""

    def __post_init__(self) -> None:
        if self.factor is not None:
            is_number = isinstance(self.factor, Real)
            if not is_number or not 0 < self.factor < math.inf:
                raise InputError(
                    f"a capacity factor must be a finite number above 0, got {self.factor!r}: "
                    "write Dropless() to drop nothing, or Capacity.fitted() for the smallest "
                    "capacity without drops"
                )
        if self.order not in ("position", "score"):
            raise InputError(
                f'order={self.order!r} is unknown: write order="position" or order="score"'
            )
        if self.scope not in ("mesh", "rank"):
            raise InputError(f'scope={self.scope!r} is unknown: write scope="mesh" or scope="rank"')
        if self.padded and (self.fit or self.scope != "rank"):
            raise InputError(
                "a padded capacity must be known in advance: write Capacity.fixed(f, "
                'scope="rank", padded=True)'
            )

    @classmethod
    def fixed(
        cls,
        factor: float,
        *,
        order: Order = "position",
        scope: Scope = "mesh",
        padded: bool = False,
    ) -> Capacity:
        """Return a capacity of `ceil(factor * top_k * tokens / num_experts)` rows per expert;
        further copies are dropped."""
        return cls(factor=factor, fit=False, order=order, scope=scope, padded=padded)

    def fixed_rows(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Return the limit of a padded capacity, which depends on sizes only.

        Args:
            num_tokens: tokens of the call, padding included.
            top_k: experts per token.
        """
        assert self.factor is not None
        return math.ceil(num_tokens * (self.factor * top_k / num_experts))

    @classmethod
    def fitted(
        cls, *, at_most: float | None = None, order: Order = "position", scope: Scope = "mesh"
    ) -> Capacity:
        """Return the smallest capacity that drops nothing, limited to the factor `at_most`, above
        which copies are dropped."""
        return cls(factor=at_most, fit=True, order=order, scope=scope)

    @property
    def admits_by_score(self) -> bool:
        """Whether `order` is "score"; see `AbstractCapacity`."""
        return self.order == "score"

    @property
    def is_padded(self) -> bool:
        """Whether `padded` is set; see `AbstractCapacity`."""
        return self.padded

    @property
    def spans_mesh(self) -> bool:
        """Whether the limit counts the copies of all ranks; see `AbstractCapacity`."""
        return self.scope == "mesh" and self.order == "position"

    def rows(self, requested_E: Tensor, num_valid: Tensor, top_k: int) -> Tensor | None:
        """Return the limit, () int64; see `AbstractCapacity.rows`."""
        needed = requested_E.max()
        if self.factor is None:  # fitted, without an upper limit
            return needed
        # in float64, as `fixed_rows`: limited devices, which lack it, leave it to the CPU
        tokens = num_valid.cpu() if is_limited(num_valid.device) else num_valid
        rows_per_token = self.factor * top_k / len(requested_E)
        limit = torch.ceil(tokens.double() * rows_per_token).long().to(num_valid.device)
        return torch.minimum(needed, limit) if self.fit else limit


def as_capacity(capacity: AbstractCapacity | float, name: str) -> AbstractCapacity:
    """Return a capacity unchanged, and a number f as `Capacity.fixed(f)`.

    Args:
        capacity: the value of a user's argument.
        name: the name of that argument, for the error message.

    Raises:
        InputError: for anything else.
    """
    if isinstance(capacity, AbstractCapacity):
        return capacity
    if isinstance(capacity, Real) and not isinstance(capacity, bool):
        return Capacity.fixed(float(capacity))
    raise InputError(
        f"MoE: {name}={capacity!r} is not a capacity: write Dropless(), Capacity.fixed(1.25), "
        "or a number such as 1.25"
    )


def admit(
    choice: Choice,
    alive_N: Tensor | None,
    rows: Tensor | None,
    best_weight_T: Tensor | None,
    num_experts: int,
    before_KE: Tensor | None = None,
) -> Tensor | None:
    """Return which copies are sent, (N,) bool, or None for all copies. No shape depends on values,
    so the host does not wait.

    Args:
        choice: the N copies.
        alive_N: (N,) bool, False for padding and for copies that the router itself held back; None
            if all are alive.
        rows: () int64, rows per expert; None for no limit.
        best_weight_T: (tokens,), the largest weight of each token, to admit by score; None to admit
            by position.
        before_KE: (K, num_experts), the position in each expert's queue of this rank's first copy
            of each choice, if several ranks share the queue; None if this rank has all copies.
    """
    if rows is None:
        return alive_N
    priority = choice.token  # of each copy; the smallest is admitted first
    if best_weight_T is not None:
        by_score = best_weight_T.argsort(descending=True, stable=True)
        priority_T = torch.empty_like(best_weight_T, dtype=torch.int64)
        priority_T[by_score] = torch.arange(len(by_score), device=by_score.device)
        priority = priority_T[choice.token]

    # Copies that are not alive are in no expert's queue: that of one more expert, which sends none.
    queued_expert = choice.expert
    if alive_N is not None:
        queued_expert = queued_expert.masked_fill(~alive_N, num_experts)
    # `queue` lists the copies' numbers. First by slot, first choices first: of copies with the same
    # slot the priorities, all below `num_turns`, decide.
    num_turns = choice.token.max() + 1 if len(choice.token) else 1
    queue = (choice.slot * num_turns + priority).argsort(stable=True)
    # then by expert, so that each expert's copies follow one another, in that order
    queue = queue[queued_expert[queue].argsort(stable=True)]
    expert_in_queue = queued_expert[queue]

    load_E = count(queued_expert, alive_N=None, num_experts=num_experts + 1)
    start_E = load_E.cumsum(0) - load_E
    # the place of each copy in its own expert's queue
    place = torch.arange(len(queue), device=queue.device) - start_E[expert_in_queue]
    if before_KE is not None:
        place = place + _shift(choice, alive_N, before_KE)[queue]
    is_sent = (place < rows) & (expert_in_queue < num_experts)  # in the order of `queue`
    return torch.empty_like(is_sent).scatter_(0, queue, is_sent)


def _shift(choice: Choice, alive_N: Tensor | None, before_KE: Tensor) -> Tensor:
    """Return how much further back each copy is in the queue of all ranks than in that of this
    rank, (N,)."""
    num_experts = before_KE.shape[1]
    num_cells = before_KE.numel()
    # a cell for each choice and expert, and one more for copies that are not alive
    cell = choice.slot * num_experts + choice.expert
    if alive_N is not None:
        cell = cell.masked_fill(~alive_N, num_cells)
    load_KE = count(cell, None, num_cells + 1)[:num_cells].view_as(before_KE)
    # where this rank's copies of each choice start in its own queue
    own_start_KE = load_KE.cumsum(0) - load_KE
    shift_KE = before_KE - own_start_KE
    # copies that are not alive read any cell
    return shift_KE.flatten()[cell.clamp_max(num_cells - 1)]


def count(expert_N: Tensor, alive_N: Tensor | None, num_experts: int) -> Tensor:
    """Return the copies per expert, (num_experts,) int64, without a host sync.

    Args:
        expert_N: (N,) int64, each copy's expert.
        alive_N: (N,) bool, which copies count; None for all.
    """
    increments = torch.ones_like(expert_N) if alive_N is None else alive_N.to(expert_N.dtype)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=expert_N.device)
    return counts.scatter_add_(0, expert_N, increments)
