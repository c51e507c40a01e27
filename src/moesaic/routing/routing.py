"""The records of the route stage: a router's `Scores`, its `Choice` of experts, and the `Routing`
that the layer runs.

`route.py` and the files of `routers/` build these records. Shape letters: T tokens, D dim, E
num_experts, K top_k, N chosen copies, R rows (copies that are sent).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """A router's values for every (token, expert) pair, in float32 (float64 for float64 inputs)."""

    logits: Tensor
    """(T, E), differentiable: the logits, which the z-loss reads."""
    probs: Tensor
    """(T, E), differentiable: probabilities, which the balance losses read. Each row sums to
    one."""
    gates: Tensor
    """(T, E), differentiable: the values from which the routing weights are taken."""
    rank_by: Tensor
    """(T, E), detached: the values by which the selection ranks experts."""


class Choice(NamedTuple):
    """The experts chosen for the tokens: one entry per token copy, before capacity and padding are
    applied.

    A token chooses an expert at most once.
    """

    token: Tensor
    """(N,) int64: the position of each copy's token."""
    expert: Tensor
    """(N,) int64: each copy's expert, in [0, num_experts)."""
    slot: Tensor
    """(N,) int64: the rank of the choice among the token's choices, 0 for the first and 1 for the
    second."""
    sent: Tensor | None = None
    """(N,) bool: the copies that the router itself decided to send; None for all copies."""
    per_token: int | None = None
    """K if every token has exactly K copies and copies are in token order; None otherwise."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The routing of one call: one row per token copy that is sent to an expert. Dispatch, experts
    and combine read it.

    The same record serves top-k, expert-choice and dropped tokens. A dropped copy has no row, and
    its gate gets no gradient (but see `has_unsent`).
    """

    token: Tensor
    """(R,) int64: the token of each row."""
    expert: Tensor
    """(R,) int64: the expert of each row."""
    weight: Tensor
    """(R,) float32, differentiable: the routing weight of each row."""
    num_tokens: int
    """T: the tokens of the call, padding included."""
    num_experts: int
    """E: the experts of the layer."""
    counts: Tensor
    """(E,) int64: rows per expert, without padding."""
    requested: Tensor
    """(E,) int64: copies per expert before capacity dropped any, without padding."""
    num_valid: Tensor
    """() int64: the tokens that are not padding."""
    nonfinite: Tensor
    """() int64: how many of the copies in `requested` have a routing weight that is NaN or
    infinite, on all ranks of a mesh. The results of their tokens are NaN; other tokens are
    unaffected."""
    capacity: Tensor | None
    """() int64: the most rows that an expert takes; None if dropless."""
    padded_capacity: int | None = None
    """The rows that every rank sends to each expert under a padded capacity: the capacity, rounded
    up to a multiple that the plan can divide. None under other capacities."""
    rows_per_token: int | None
    """K if every token has exactly K rows and rows are in token order; None otherwise."""
    has_unsent: bool = False
    """Whether rows may include copies that no expert takes; `expert` is E in those rows. True on a
    GPU under a capacity or a mask, since removing the rows would make the host wait for their
    number."""
    logits: Tensor | None = None
    """(T, E) float32, differentiable: the router's logits for the tokens that this rank routed, for
    losses of your own. None if the experts were chosen outside the router."""
    losses: dict[str, Tensor]
    """() float32 each, detached: the auxiliary losses before their coefficients. Their gradients
    are already injected."""

    @property
    def dropped(self) -> Tensor:
        """() int64: the token copies that were dropped because their expert was full."""
        return self.requested.sum() - self.counts.sum()
