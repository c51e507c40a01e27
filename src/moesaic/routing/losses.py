"""Auxiliary losses of the router. `injection.py` propagates their gradients to the router's
parameters.

Every loss is a mean over tokens or a ratio of means, so the scale of a loss depends neither on the
shape of the batch nor on the number of ranks. A loss reads `RouterStatistics`: sums taken outside
the router and, on several ranks, reduced over ranks.

T valid tokens, N token copies, E experts, K top_k, G sequences, p the router's probabilities, f_e
the share of all token copies that chose e, before capacity, P_e the mean of p over tokens:

    LoadBalance   E * sum_e f_e P_e                    1 when balanced; Switch, GShard 2.2
    Importance    var_e(I_e) / mean_e(I_e)^2, I_e the  Shazeer et al. 2017, section 4
                  summed routing weights of e
    ZLoss         mean_t logsumexp(logits_t)^2         ST-MoE (Zoph et al. 2022), section 3
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.routing.routing import Choice, Scores


class Sequences(NamedTuple):
    """How the tokens of a batch form consecutive sequences of equal length."""

    number: int = 1
    """G, the number of sequences of the whole batch."""
    first_token: int = 0
    """Position of the first token of a slice, which may cut sequences, in the batch."""
    length: int | None = None
    """Tokens of a sequence of the batch; None if the tokens are the whole batch."""

    def of_tokens(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Return the sequence of each token of the batch or the slice, (T,) int64; None if there
        is only one."""
        if self.number == 1:
            return None
        length = self.length
        if length is None:
            length = max(num_tokens // self.number, 1)
        position = torch.arange(num_tokens, device=device) + self.first_token
        return position // length


@dataclass(frozen=True, kw_only=True)
class RouterStatistics:
    """Sums over the valid tokens of one call, the input of the losses. G is the number of
    sequences, or 1 if no loss needs sums per sequence."""

    counts_GE: Tensor
    """(G, E) float, without gradient: chosen copies before capacity, counted as integers."""
    probs_GE: Tensor
    """(G, E), differentiable: summed probabilities."""
    tokens_G: Tensor
    """(G,) float: valid tokens."""
    importance_E: Tensor | None
    """(E,), differentiable: summed routing weights; None if no loss reads them."""
    logsumexp_squared: Tensor
    """(), differentiable: summed squares of the logits' logsumexp; 0 if no loss reads them."""
    step_counts_E: Tensor
    """(E,) float: copies of the optimizer step so far, this call included."""

    @classmethod
    def of(
        cls,
        scores: Scores,
        choice: Choice,
        weight_N: Tensor,
        alive_N: Tensor | None,
        valid_T: Tensor | None,
        *,
        sequences: Sequences,
        earlier_counts_E: Tensor | None,
        with_importance: bool,
        with_logsumexp: bool,
    ) -> RouterStatistics:
        """Return the sums of one call.

        Args:
            scores: the scores of the T tokens.
            choice: the N chosen copies.
            weight_N: (N,), the routing weights of the copies.
            alive_N: (N,) bool, False for copies that are padding or held back by the router; None
                if all are alive.
            valid_T: (T,) bool, False for padding; None if no token is padding.
            sequences: the sequences of the T tokens.
            earlier_counts_E: (E,) int64, copies since the last optimizer step, without this call.
            with_importance: also sum the routing weights.
            with_logsumexp: also sum the squares of the logits' logsumexp.
        """
        num_tokens, num_experts = scores.probs.shape
        dtype = scores.probs.dtype
        if valid_T is None:
            valid = torch.ones(num_tokens, dtype=dtype, device=scores.probs.device)
        else:
            valid = valid_T.to(dtype)
        copies_N = torch.ones_like(choice.expert) if alive_N is None else alive_N.long()

        sequence_T = sequences.of_tokens(num_tokens, scores.probs.device)
        num_sequences = sequences.number
        counts_GE = _copies_by_sequence(choice, copies_N, sequence_T, num_sequences, num_experts)
        if sequences.length is None:
            sequence_T = None  # whole sequences are summed without their numbers
        step_counts_E = counts_GE.sum(0)
        if earlier_counts_E is not None:
            step_counts_E = step_counts_E + earlier_counts_E

        squares_T = valid.new_zeros(())  # a zero, whose sum is 0
        if with_logsumexp:
            squares_T = scores.logits.logsumexp(-1).square() * valid
        importance_E = None
        if with_importance:
            counted_weight_N = weight_N * copies_N.to(dtype)
            importance_E = _importance(choice, counted_weight_N, num_tokens, num_experts)
        probs = scores.probs if valid_T is None else scores.probs * valid.unsqueeze(1)
        return cls(
            counts_GE=counts_GE.to(dtype),
            probs_GE=_sum_by(sequence_T, num_sequences, probs),
            tokens_G=_sum_by(sequence_T, num_sequences, valid.unsqueeze(1)).squeeze(1),
            importance_E=importance_E,
            logsumexp_squared=squares_T.sum(),
            step_counts_E=step_counts_E.to(dtype),
        )

    def parts(self) -> list[Tensor]:
        """Return the sums that ranks exchange, flat and differentiable, in the order in which
        `joined` splits them; joined by `torch.cat` they are (n,).

        `step_counts_E` is not among them: it follows from `counts_GE` and from earlier counts,
        which are of all ranks already.
        """
        parts = [self.counts_GE.flatten(), self.probs_GE.flatten(), self.tokens_G]
        if self.importance_E is not None:
            parts.append(self.importance_E)
        parts.append(self.logsumexp_squared.unsqueeze(0))
        return parts

    def joined(
        self, packed_Pn: Tensor, slices: int, earlier_counts_E: Tensor | None
    ) -> RouterStatistics:
        """Return the sums over several ranks; the sequences of all ranks are concatenated.

        Args:
            packed_Pn: (P, n), the `parts` of each rank, by `torch.cat`, with the same shapes on all
                ranks.
            slices: number of neighbouring ranks that hold slices of the same sequences.
            earlier_counts_E: as for `of`, but summed over all ranks.
        """
        num_sequences, num_experts = self.counts_GE.shape
        cells = num_sequences * num_experts
        importance_width = 0 if self.importance_E is None else num_experts
        widths = [cells, cells, num_sequences, importance_width, 1]
        # of each rank, in the order of `parts`
        counts, probs, tokens, importance, squares = packed_Pn.split(widths, dim=1)

        # slices of the same sequences are added up: neighbouring ranks hold those of one batch
        batches = len(packed_Pn) // slices
        by_slice = (batches, slices, num_sequences, num_experts)
        counts_GE = counts.view(by_slice).sum(1).flatten(0, 1)
        probs_GE = probs.view(by_slice).sum(1).flatten(0, 1)
        tokens_G = tokens.view(batches, slices, num_sequences).sum(1).flatten()

        step_counts_E = counts_GE.sum(0)
        if earlier_counts_E is not None:
            step_counts_E = step_counts_E + earlier_counts_E
        return RouterStatistics(
            counts_GE=counts_GE,
            probs_GE=probs_GE,
            tokens_G=tokens_G,
            importance_E=None if self.importance_E is None else importance.sum(0),
            logsumexp_squared=squares.sum(),
            step_counts_E=step_counts_E,
        )


def _copies_by_sequence(
    choice: Choice,
    copies_N: Tensor,
    sequence_T: Tensor | None,
    num_sequences: int,
    num_experts: int,
) -> Tensor:
    """Return the copies per sequence and expert, (G, E) int64, from each token's sequence, or None
    for one sequence."""
    cell_N = choice.expert
    if sequence_T is not None:
        cell_N = sequence_T[choice.token] * num_experts + choice.expert
    counts = copies_N.new_zeros(num_sequences * num_experts).scatter_add(0, cell_N, copies_N)
    return counts.view(num_sequences, num_experts)


def _importance(choice: Choice, weight_N: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return the summed routing weights of each expert, (E,), differentiable.

    They are summed over tokens from a dense matrix: `index_add` with a gradient uses atomics on
    CUDA, in an order that varies.
    """
    pair_N = choice.token * num_experts + choice.expert
    weight_TE = weight_N.new_zeros(num_tokens * num_experts).scatter(0, pair_N, weight_N)
    return weight_TE.view(num_tokens, num_experts).sum(0)


def _sum_by(sequence_T: Tensor | None, num_sequences: int, values: Tensor) -> Tensor:
    """Return the sum of (T, n) values per sequence, (G, n). No atomics are used, so the order of
    summation is fixed.

    Args:
        sequence_T: each token's sequence; None if the sequences are consecutive and of equal
            length.
        values: (T, n).
    """
    if sequence_T is None:
        return values.view(num_sequences, len(values) // num_sequences, values.shape[1]).sum(1)
    # (G, T): 1 where a token belongs to a sequence
    is_member = sequence_T == torch.arange(num_sequences, device=values.device).unsqueeze(1)
    return is_member.to(values.dtype) @ values


@dataclass(frozen=True)
class AbstractLoss(ABC):
    """An auxiliary loss: a coefficient and a formula over `RouterStatistics`."""

    coefficient: float
    """Factor on the loss when its gradient is injected."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.coefficient, Real)
        if not is_number or not 0 <= self.coefficient < math.inf:
            raise InputError(
                f"{type(self).__name__}: the coefficient must be a finite number of 0 or "
                f"more, got {self.coefficient!r}"
            )

    @property
    @abstractmethod
    def name(self) -> str:
        """The key under which `Routing.losses` and the metrics report the loss."""

    @property
    def needs_sequences(self) -> bool:
        """True if the loss needs statistics per sequence."""
        return False

    @property
    def needs_step(self) -> bool:
        """True if the loss reads the counts of the optimizer step so far."""
        return False

    @property
    def needs_importance(self) -> bool:
        """True if the loss reads the experts' summed routing weights."""
        return False

    @property
    def needs_logsumexp(self) -> bool:
        """True if the loss reads the logits' logsumexp."""
        return False

    @abstractmethod
    def value(self, statistics: RouterStatistics) -> Tensor:
        """Return the loss before its coefficient, (), differentiable; 0 for a call without valid
        tokens."""


@dataclass(frozen=True)
class LoadBalance(AbstractLoss):
    """`E * sum_e f_e P_e`: pushes probability away from the experts that get more copies than their
    share.

    `level` selects the tokens over which f and P are computed. "micro_batch": all tokens of the
    call, on all ranks. "sequence": each sequence separately, averaged with weights by length
    (DeepSeek-V3 section 2.1.2). "global_batch": P over the call, f over all calls since the last
    optimizer step (Qiu et al., "Demons in the Detail", 2025, section 3), which lets experts
    specialise by domain.
    """

    level: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level not in ("micro_batch", "sequence", "global_batch"):
            raise InputError(
                f"LoadBalance: level={self.level!r} is unknown: write micro_batch, sequence "
                "or global_batch"
            )

    @property
    def name(self) -> str:
        return "load_balance" if self.level == "micro_batch" else f"load_balance_{self.level}"

    @property
    def needs_sequences(self) -> bool:
        return self.level == "sequence"

    @property
    def needs_step(self) -> bool:
        return self.level == "global_batch"

    def value(self, statistics: RouterStatistics) -> Tensor:
        """Return the loss at its level: of sequences, of these tokens, or of all tokens of the step
        so far."""
        if self.level == "sequence":
            counts = statistics.counts_GE
        elif self.level == "global_batch":
            counts = statistics.step_counts_E.unsqueeze(0)
        else:
            counts = statistics.counts_GE.sum(0, keepdim=True)
        num_experts = counts.shape[1]
        share = counts / counts.sum(1, keepdim=True).clamp_min(1)  # f_e
        # The loss is linear in the probabilities, summed by sequence, which all have one slope
        # unless the level is that of sequences. One mean over all tokens weighs these by length.
        slope = num_experts * share / statistics.tokens_G.sum().clamp_min(1)
        if self.level == "global_batch":
            weighed: Tensor = _TimesOfFirstPass.apply(statistics.probs_GE, slope)
        else:
            weighed = statistics.probs_GE * slope
        return weighed.sum()


class _TimesOfFirstPass(torch.autograd.Function):
    """`values * factor` with a gradient that uses the factor of the first forward pass.

    An activation checkpoint recomputes the tensors that autograd saved, but by then the counts of
    the step have changed. Therefore the factor is kept on `ctx` instead of being saved.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return values * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@dataclass(frozen=True)
class Importance(AbstractLoss):
    """The squared coefficient of variation of the experts' summed routing weights."""

    name = "importance"
    needs_importance = True

    def value(self, statistics: RouterStatistics) -> Tensor:
        importance_E = statistics.importance_E
        assert importance_E is not None, "the statistics were taken without importance"
        mean = importance_E.mean()
        tiny = torch.finfo(mean.dtype).tiny  # of a call without tokens the loss is 0, not NaN
        return (importance_E - mean).square().mean() / mean.square().clamp_min(tiny)


@dataclass(frozen=True)
class ZLoss(AbstractLoss):
    """The mean squared logsumexp of the logits: keeps logits small, and low precision exact
    enough."""

    name = "z_loss"
    needs_logsumexp = True

    def value(self, statistics: RouterStatistics) -> Tensor:
        return statistics.logsumexp_squared / statistics.tokens_G.sum().clamp_min(1)
