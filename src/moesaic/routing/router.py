"""The interface of a router. The leaves stand in `gates/`, one published method a file.

A router owns the weights that score experts and the rule that picks them. It knows no capacity, no loss, no transport.
Scoring is split from choosing so that a recorded choice can be replayed under activation checkpointing while the
scores, which carry the gradient, are computed again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Integral

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.routing.buffers import KeepsFloat32
from moesaic.routing.routing import Choice, Scores
from moesaic.routing.selection import draw_linear


class AbstractRouter(KeepsFloat32, ABC):
    """Scores experts for tokens and chooses among them.

    Args:
        dim: width of a token.
        num_experts: how many experts there are to choose from.
    """

    needs_token_ids = False
    """True for a router that reads token ids instead of activations (`Hash`)."""
    takes_best_ranked = True
    """True if each token's experts are ranked by `Scores.rank_by` alone, so that -inf there excludes an expert."""

    @property
    def looks_across_tokens(self) -> bool:
        """Whether the choice for a token depends, as the router stands (training or not), on which rank it is on or on which
        other tokens are there."""
        return False

    @property
    def weights_sum_to_one(self) -> bool:
        """Whether the weights of every token that gets its `top_k` experts sum to one, whatever the parameters."""
        return False

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        if dim < 1 or num_experts < 1:
            raise InputError(
                f"a router needs dim and num_experts of at least 1, got dim={dim}, num_experts={num_experts}"
            )
        self.dim = dim
        self.num_experts = num_experts

    @abstractmethod
    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        """Score every expert for every token.

        Args:
            x_TD: (tokens, dim), float32 or float64, whatever the autocast state.
            noise: what `draw` returned for this call.
            token_ids: (tokens,) int64 vocabulary ids, or None.
        """

    @abstractmethod
    def choose(self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        """Pick experts for the tokens; nothing here is differentiable.

        Args:
            scores: what `scores` returned.
            top_k: experts per token (on average, for expert-choice).
            valid_T: (tokens,) bool, False for padding; None when there is none.
            noise: what `draw` returned for this call.
        """

    @abstractmethod
    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        """Return the routing weight of every chosen copy, (N,), differentiable."""

    def draw(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Return the random numbers of one call, None if the router uses none; a replay passes the recorded ones."""
        return None

    def reset_parameters(self) -> None:
        """Draw the router's matrices anew, uniformly as `nn.Linear` does, and set the rest to its start."""
        for parameter in self.parameters(recurse=False):
            if parameter.dim() > 1:
                draw_linear(parameter)
        self.reset_state()

    @torch.no_grad()
    def init_normal(self, std: float) -> None:
        """Draw the router's matrices anew from N(0, std), and set the rest to its start."""
        for parameter in self.parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.normal_(std=std)
        self.reset_state()

    def reset_state(self) -> None:
        """Set to its start, in place, what is no matrix that is drawn: biases, tables, matrices that start at zero."""

    def check_fits(self, top_k: int) -> None:
        """Raise InputError, in one line, if this router cannot choose `top_k` experts per token."""
        check_top_k(top_k, self.num_experts)

    def check(self, top_k: int) -> None:
        """Raise InputError, in one line, if this router cannot train with `top_k` experts per token."""
        self.check_fits(top_k)

    @property
    def adapts(self) -> bool:
        """Whether `update` does something; a router that wraps another one answers for it."""
        return type(self).update is not AbstractRouter.update

    def update(self, load_E: Tensor) -> None:
        """Adapt to the load of one optimizer step; does nothing unless the method asks for it.

        Args:
            load_E: (num_experts,) int64 token copies per expert since the last step, of all ranks that train the layer,
                without padding, evaluation and recomputation.
        """


def is_whole(value: object) -> bool:
    """Return whether `value` is a whole number: Python's or numpy's, but no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise InputError if `top_k` experts cannot be chosen out of `num_experts`."""
    if not is_whole(top_k) or not 1 <= top_k <= num_experts:
        raise InputError(f"top_k={top_k} does not fit num_experts={num_experts}: choose 1 <= top_k <= {num_experts}")
