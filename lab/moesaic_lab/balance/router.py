"""A router that says what it is told: which tokens go to which experts is a matter of the case, not of the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.routing.router import AbstractRouter, token_choice
from moesaic.routing.routing import Choice, Scores


class ToldRouter(AbstractRouter):
    """Sends every token to the experts that it is told; a token's weights fall with their place, and sum to one.

    Args:
        dim: width of a token (not read).
        num_experts: how many experts there are.
    """

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self._choice: Choice | None = None

    def tell(self, experts_TK: Tensor) -> None:
        """Say which experts the tokens of the next calls go to.

        Args:
            experts_TK: (tokens, top_k) int64.
        """
        self._choice = token_choice(experts_TK)

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        even = x_TD.new_full((len(x_TD), self.num_experts), 1 / self.num_experts)
        return Scores(even, even, even, even)

    def choose(self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        assert self._choice is not None, "nobody told the router"
        return self._choice

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        falling = torch.arange(top_k, 0, -1, dtype=scores.gates.dtype)
        return (falling / falling.sum())[choice.slot]
