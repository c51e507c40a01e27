"""How many rows an expert may take, and who gets in when there are more copies than that.

`Dropless()`, `Capacity.fixed(1.25)`, `Capacity.fitted()`, `Capacity.fitted(at_most=2.0)`: in words, so that no number
means two things (Tutel section 4.1 encodes the same choices as positive, zero and negative factors).
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
from moesaic.routing.routing import Choice

Order = Literal["position", "score"]
Scope = Literal["mesh", "rank"]


class AbstractCapacity(ABC):
    """A rule for the number of rows per expert."""

    @property
    def admits_by_score(self) -> bool:
        """True if tokens with a larger best weight are admitted first, False if they are in token order."""
        return False

    @property
    def spans_mesh(self) -> bool:
        """True if the limit counts the copies of all ranks together, False if each rank has its own."""
        return False

    @property
    def is_padded(self) -> bool:
        """True if every rank sends each expert equally many rows on a mesh."""
        return False

    @property
    def never_drops(self) -> bool:
        """True if every copy is served."""
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
    """Every copy is served, however uneven the load."""

    never_drops = True

    def rows(self, requested_E: Tensor, num_valid: Tensor, top_k: int) -> Tensor | None:
        """Return None: no limit."""
        return None


@dataclass(frozen=True)
class Capacity(AbstractCapacity):
    """A limit of `factor` times the mean load; build one with `Capacity.fixed` or `Capacity.fitted`."""

    factor: float | None
    """Rows per expert over the mean load `top_k * tokens / num_experts`; None for no upper limit."""
    fit: bool
    """Take no more than the fullest expert needs."""
    order: Order = "position"
    """Who is admitted first. Either way all first choices come before all second choices. "position": in token order
    (GShard). "score": tokens with the larger best weight first (batch-prioritised routing, Riquelme et al., "Scaling
    Vision with Sparse Mixture of Experts", 2021, section 4); then each rank admits its own, whatever the scope."""
    scope: Scope = "mesh"
    """"mesh": the limit counts the copies of all ranks, so that drops do not depend on the mesh. "rank": each rank has
    a limit for its own tokens, as the papers have it."""
    padded: bool = False
    """On a mesh every rank sends each expert the limit's number of rows, empty ones among them (rounded up to what the plan
    divides by): sizes are known beforehand, and nothing waits for counts on the host. Its limit counts padding tokens too."""

    def __post_init__(self) -> None:
        if self.factor is not None and not 0 < self.factor < math.inf:
            raise InputError(
                f"a capacity factor must be a finite number above 0, got {self.factor}: write Dropless() to drop nothing, "
                "or Capacity.fitted() for the smallest capacity without drops"
            )
        if self.order not in ("position", "score"):
            raise InputError(f'order={self.order!r} is unknown: write order="position" or order="score"')
        if self.scope not in ("mesh", "rank"):
            raise InputError(f'scope={self.scope!r} is unknown: write scope="mesh" or scope="rank"')
        if self.padded and (self.fit or self.scope != "rank"):
            raise InputError(
                'a padded capacity must be known beforehand: write Capacity.fixed(f, scope="rank", padded=True)'
            )

    @classmethod
    def fixed(
        cls, factor: float, *, order: Order = "position", scope: Scope = "mesh", padded: bool = False
    ) -> Capacity:
        """Allow `ceil(factor * top_k * tokens / num_experts)` rows per expert; what exceeds it is dropped."""
        return cls(factor=factor, fit=False, order=order, scope=scope, padded=padded)

    def fixed_rows(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Return the limit of a padded capacity, from nothing but sizes.

        Args:
            num_tokens: padding included.
            top_k: experts per token.
        """
        assert self.factor is not None
        return math.ceil(num_tokens * (self.factor * top_k / num_experts))

    @classmethod
    def fitted(cls, *, at_most: float | None = None, order: Order = "position", scope: Scope = "mesh") -> Capacity:
        """Take the smallest capacity without drops, never above the factor `at_most` (then copies are dropped)."""
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
        if self.factor is None:
            return needed
        limit = torch.ceil(num_valid.double() * (self.factor * top_k / len(requested_E))).long()
        return torch.minimum(needed, limit) if self.fit else limit


def as_capacity(capacity: AbstractCapacity | float, name: str) -> AbstractCapacity:
    """Return a capacity as it is, and a number f as `Capacity.fixed(f)`.

    Args:
        capacity: what a user gave.
        name: the name of the argument, for a message.

    Raises:
        InputError: for anything else.
    """
    if isinstance(capacity, AbstractCapacity):
        return capacity
    if isinstance(capacity, Real) and not isinstance(capacity, bool):
        return Capacity.fixed(float(capacity))
    raise InputError(
        f"MoE: {name}={capacity!r} is no capacity: write Dropless(), Capacity.fixed(1.25), or a number such as 1.25"
    )


def admit(
    choice: Choice,
    alive_N: Tensor | None,
    rows: Tensor | None,
    best_weight_T: Tensor | None,
    num_experts: int,
    before_KE: Tensor | None = None,
) -> Tensor | None:
    """Return which copies are sent, (N,) bool, or None for all of them. No shape depends on values: the host need not wait.

    Args:
        choice: the N copies.
        alive_N: (N,) bool, False for padding and for copies that the router itself held back; None means all alive.
        rows: () int64 rows per expert, None for no limit.
        best_weight_T: (tokens,) the largest weight of each token, to admit by score; None admits by position.
        before_KE: (K, num_experts) copies that stand before this rank's first of a choice in the queue of an expert, where
            several ranks queue; None where these are all copies.
    """
    if rows is None:
        return alive_N
    token, expert, slot = choice.token, choice.expert, choice.slot
    turn = token
    if best_weight_T is not None:
        turn = torch.empty_like(best_weight_T, dtype=torch.int64)
        by_score = best_weight_T.argsort(descending=True, stable=True)
        turn[by_score] = torch.arange(len(by_score), device=by_score.device)
        turn = turn[token]
    at = expert if alive_N is None else expert.masked_fill(~alive_N, num_experts)  # what is held back queues nowhere
    num_turns = choice.token.max() + 1 if len(choice.token) else 1
    queue = (slot * num_turns + turn).argsort(stable=True)
    queue = queue[at[queue].argsort(stable=True)]
    load_E = count(at, None, num_experts + 1)
    start_E = load_E.cumsum(0) - load_E
    place = torch.arange(len(queue), device=queue.device) - start_E[at[queue]]
    if before_KE is not None:
        cells = before_KE.numel()
        cell = slot * num_experts + expert
        cell = cell if alive_N is None else cell.masked_fill(~alive_N, cells)
        load_KE = count(cell, None, cells + 1)[:cells].view_as(before_KE)
        shift_KE = before_KE - (load_KE.cumsum(0) - load_KE)
        place = place + shift_KE.flatten()[cell[queue].clamp_max(cells - 1)]
    is_sent = (place < rows) & (at[queue] < num_experts)
    return torch.empty_like(is_sent).scatter_(0, queue, is_sent)


def count(expert_N: Tensor, alive_N: Tensor | None, num_experts: int) -> Tensor:
    """Return the copies per expert, (num_experts,) int64, without a host sync; `alive_N` (N,) bool says which count."""
    ones = torch.ones_like(expert_N) if alive_N is None else alive_N.to(expert_N.dtype)
    return torch.zeros(num_experts, dtype=torch.int64, device=expert_N.device).scatter_add_(0, expert_N, ones)
