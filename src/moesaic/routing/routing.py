"""The records of the route stage: what a router says (`Scores`), whom it picks (`Choice`), what the layer runs (`Routing`).

Records only: how they are made stands in `route.py` and in `routers/`.
Shape letters: T tokens, D dim, E num_experts, K top_k, N chosen copies, R rows (copies that are sent).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """What a router says about every (token, expert) pair, in float32 (float64 for float64 inputs)."""

    logits: Tensor
    """(T, E), differentiable; the z-loss reads them."""
    probs: Tensor
    """(T, E), differentiable, each row sums to one; the balance losses read them."""
    gates: Tensor
    """(T, E), differentiable; the routing weights are read from them."""
    rank_by: Tensor
    """(T, E), detached; the selection ranks experts by it."""


class Choice(NamedTuple):
    """Which expert gets which token: one entry per token copy, before capacity and padding.

    A token chooses an expert at most once.
    """

    token: Tensor
    """(N,) int64, the token's position."""
    expert: Tensor
    """(N,) int64, in [0, num_experts)."""
    slot: Tensor
    """(N,) int64; 0 for a token's first choice, 1 for its second."""
    sent: Tensor | None = None
    """(N,) bool: copies that the router itself decided to send; None means all of them."""
    per_token: int | None = None
    """K when every token has exactly K copies, token after token; None otherwise."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """One row per token copy that is sent to an expert: what dispatch, experts and combine read.

    Top-k, expert-choice and dropped tokens are one thing here: a dropped copy has no row, and its gate no gradient (but see
    `has_unsent`).
    """

    token: Tensor
    """(R,) int64: the row's token."""
    expert: Tensor
    """(R,) int64: the row's expert."""
    weight: Tensor
    """(R,) float32: the row's routing weight, differentiable."""
    num_tokens: int
    """T: the tokens of the call, padding included."""
    num_experts: int
    """E."""
    counts: Tensor
    """(E,) int64: rows per expert."""
    requested: Tensor
    """(E,) int64: copies per expert before capacity dropped any; padding is in neither."""
    num_valid: Tensor
    """() int64: the tokens that are not padding."""
    nonfinite: Tensor
    """() int64: copies, of those in `requested`, whose routing weight is NaN or infinite. Their tokens' results are NaN; all
    other tokens are computed as ever. On a mesh those of all ranks."""
    capacity: Tensor | None
    """() int64: rows an expert may take, None when dropless."""
    padded_capacity: int | None = None
    """Rows that every rank sends each expert where the capacity is padded: the capacity rounded up to what the plan
    divides by; None elsewhere."""
    rows_per_token: int | None
    """K when every token has exactly K rows, in token order; None otherwise."""
    has_unsent: bool = False
    """Some rows may be of copies that no expert takes; their `expert` is E. So it is on a GPU under a capacity or a mask: to
    take them out, the host would have to wait for their number."""
    logits: Tensor | None = None
    """(T, E) float32, differentiable: the router's, for losses of your own; of the tokens that this rank routed. None where
    the experts were chosen elsewhere."""
    losses: dict[str, Tensor]
    """() float32 each, detached: the auxiliary losses before their coefficient; their gradient is injected already."""

    @property
    def dropped(self) -> Tensor:
        """() int64: token copies that no expert had room for."""
        return self.requested.sum() - self.counts.sum()
