"""The input and the results of the choice of experts, shared by its implementations. T tokens, E
experts, K per token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ChoiceRule(NamedTuple):
    """How a token's experts are ranked, chosen and weighed."""

    top_k: int
    by_sigmoid: bool
    """Score by the sigmoid of the logits and rank by score plus balancing bias; else score by
    softmax and rank by logits."""
    normalize: bool
    """Divide a token's weights by their sum. Softmax weights are then computed from the chosen
    logits alone."""
    scale: float
    """Factor on the weights."""
    num_groups: int = 1
    """Number of equal groups of consecutive experts."""
    top_groups: int = 1
    """Number of groups whose experts a token may use."""
    by_best_two: bool = False
    """Rank a group by the sum of its two best experts, else by its best one."""


class WantedSums(NamedTuple):
    """The sums over the valid tokens that the caller wants besides the choice."""

    balance: bool
    """The experts' probabilities."""
    z: bool
    """The squares of the logits' logsumexp."""
    reduced: bool
    """Return the losses of these tokens instead: load balance, `E * sum_e f_e P_e`, and the mean of
    the squares."""


class ChoiceResult(NamedTuple):
    """The result of `choose`: N = T K copies in token order. `weight`, `balance` and `z` are
    differentiable."""

    weight: Tensor
    """(N,): the routing weight of each copy, in the dtype of the logits."""
    balance: Tensor
    """(E,): the summed probabilities, or () if reduced; empty if not wanted."""
    z: Tensor
    """(1,): the sum of the squares, or (), their mean, if reduced; empty if not wanted."""
    expert: Tensor
    """(N,) int64: each copy's expert, a token's best first."""
    token: Tensor
    """(N,) int64: each copy's token."""
    slot: Tensor
    """(N,) int64: the rank of each copy among those of its token."""
    counts: Tensor
    """(E,) int64: copies per expert, without padding."""
    nonfinite: Tensor
    """() int64: copies whose weight is NaN or infinite, without padding."""
    num_valid: Tensor
    """() int64: tokens that are not padding."""


class ChoiceGradients(NamedTuple):
    """What the backward pass of `choose` reads: two of its arguments, fields of `ChoiceResult`, and
    the gradients of the first three of these, None for those that were not used."""

    logits: Tensor
    valid: Tensor | None
    expert: Tensor
    counts: Tensor
    num_valid: Tensor
    d_weight: Tensor | None
    d_balance: Tensor | None
    d_z: Tensor | None
