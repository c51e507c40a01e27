"""Routing over several ranks: one exchange per call tells every rank every rank's counts.

From the same numbers every rank derives the same limits, the same drops and the same losses, so that none of them depends
on how the tokens are spread, and no rank waits for another's decision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from moesaic.routing.losses import RouterStatistics
from moesaic.routing.routing import Choice

_SIZES, _DIGEST = 3, 4
"""Numbers at the beginning of a message, and at its end."""


class AbstractPeers(ABC):
    """The ranks that route the tokens of one call, each its own, in the order of their tokens."""

    number: int
    """P, this rank included."""
    place: int
    """This rank's place among them."""
    slices: int
    """So many neighbours hold slices of one batch of tokens (S1's tensor group); 1 if every rank has whole sequences."""
    slice: int
    """Which of the slices this rank holds."""
    digest: Tensor
    """(4,) float64: of what the rank runs, the same on all ranks that run the same."""

    def also(self, choice: Choice | None, alive_N: Tensor | None, num_tokens: int) -> Tensor | None:
        """Return what else to tell in the exchange of counts, (m,) float64, m the same in every call on every rank; or None.

        Args:
            choice: the copies of this rank's tokens; None if the capacity may drop some.
            alive_N: (N,) bool, which of them are sent; None for all.
            num_tokens: of this rank.
        """
        return None

    @abstractmethod
    def gather(self, message: Tensor) -> Tensor:
        """Return every rank's message, (P, n) float64, from this rank's, (n,) float64; the same on all ranks."""


@dataclass(frozen=True)
class Gathered:
    """What the ranks told each other in one call."""

    values: Tensor
    """(P, n) float64: all of the below, side by side."""
    num_slots: int
    """K: choices that are counted apart; 1 where their order does not matter."""
    num_experts: int
    num_more: int = 0
    """m: of `AbstractPeers.also`."""

    @classmethod
    def exchange(
        cls,
        peers: AbstractPeers,
        counts_KE: Tensor,
        num_valid: Tensor | None,
        num_tokens: int,
        nonfinite: Tensor,
        local: RouterStatistics | None,
        more: Tensor | None = None,
    ) -> Gathered:
        """Tell the peers this rank's counts and sums, and hear theirs.

        Args:
            peers: the ranks.
            counts_KE: (K, E) int64 copies before capacity, by choice and expert.
            num_valid: () tokens that are not padding; None for all.
            num_tokens: padding included.
            nonfinite: () copies whose routing weight is NaN or infinite.
            local: sums of this rank's tokens, if a loss reads them.
            more: what `peers.also` returned.
        """
        sizes = torch.full((_SIZES,), num_tokens, dtype=torch.float64, device=counts_KE.device)
        sizes[2] = nonfinite
        if num_valid is not None:
            sizes[0] = num_valid
        digest = peers.digest.to(sizes.device)
        sums = [] if local is None else [local.packed().detach().double()]
        last = [digest] if more is None else [more.to(digest), digest]
        message = torch.cat([sizes, counts_KE.reshape(-1).double(), *sums, *last])
        return cls(
            peers.gather(message),
            num_slots=counts_KE.shape[0],
            num_experts=counts_KE.shape[1],
            num_more=0 if more is None else len(more),
        )

    @cached_property
    def valid(self) -> Tensor:
        """(P,) int64 tokens that are not padding."""
        return self.values[:, 0].long()

    @cached_property
    def tokens(self) -> Tensor:
        """(P,) int64 tokens."""
        return self.values[:, 1].long()

    @cached_property
    def nonfinite(self) -> Tensor:
        """(P,) int64 copies whose routing weight is NaN or infinite."""
        return self.values[:, 2].long()

    @cached_property
    def counts(self) -> Tensor:
        """(P, K, E) int64 copies before capacity."""
        width = self.num_slots * self.num_experts
        return self.values[:, _SIZES : _SIZES + width].long().view(-1, self.num_slots, self.num_experts)

    @cached_property
    def digests(self) -> Tensor:
        """(P, 4) float64: every rank's `AbstractPeers.digest`."""
        return self.values[:, -_DIGEST:]

    @cached_property
    def more(self) -> Tensor:
        """(P, m) float64: what every rank's `AbstractPeers.also` returned."""
        return self.values[:, -_DIGEST - self.num_more : -_DIGEST]

    @cached_property
    def on_host(self) -> np.ndarray:
        """(P, n) float64: the values, brought to the host once."""
        return self.values.cpu().numpy()

    @property
    def digests_on_host(self) -> np.ndarray:
        """(P, 4) float64: `digests`, on the host."""
        return self.on_host[:, -_DIGEST:]

    @property
    def more_on_host(self) -> np.ndarray:
        """(P, m) float64: `more`, on the host."""
        return self.on_host[:, -_DIGEST - self.num_more : -_DIGEST]

    def statistics(
        self, local: RouterStatistics, peers: AbstractPeers, earlier_counts_E: Tensor | None
    ) -> RouterStatistics:
        """Return the sums over all ranks' tokens; differentiable in this rank's part.

        Args:
            local: this rank's sums.
            peers: the ranks.
            earlier_counts_E: (E,) int64 copies of the step before this call, over all ranks.
        """
        mine = local.packed()
        others = self.values[:, _SIZES + self.num_slots * self.num_experts : -_DIGEST - self.num_more].to(mine)
        rows = [mine if place == peers.place else others[place] for place in range(peers.number)]
        return local.joined(torch.stack(rows), peers.slices, earlier_counts_E)


def places_before(counts_PKE: Tensor) -> Tensor:
    """Return how many copies stand before each rank's first in the queue of an expert, (P, K, E) int64.

    All first choices come before all second ones, within a choice in the order of the ranks.
    """
    by_choice = counts_PKE.sum(0)
    earlier_choices = by_choice.cumsum(0) - by_choice
    earlier_ranks = counts_PKE.cumsum(0) - counts_PKE
    return earlier_choices + earlier_ranks


def kept_copies(counts_PKE: Tensor, rows: Tensor | None) -> Tensor:
    """Return the copies that each rank may send to each expert, (P, E) int64.

    Args:
        counts_PKE: (P, K, E) copies before capacity.
        rows: () rows that an expert takes from all ranks together, or (P,) from each rank; None for no limit.
    """
    if rows is None:
        return counts_PKE.sum(1) if counts_PKE.shape[1] > 1 else counts_PKE.squeeze(1)
    if rows.dim():
        return torch.minimum(counts_PKE.sum(1), rows.unsqueeze(1))
    room = (rows - places_before(counts_PKE)).clamp_min(0)
    return torch.minimum(room, counts_PKE).sum(1)
