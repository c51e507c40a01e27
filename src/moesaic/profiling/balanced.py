"""Forced balance: a router that sends every expert equally many copies, by position, so that plans differ and loads do not."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Choice, Scores


class BalancedRouter(AbstractRouter):
    """Sends copies by a drawn pattern that depends on the number of tokens alone; the weights are `1 / top_k`.

    Tokens come in blocks of `num_experts`. Within a block the first choices are a permutation of the experts, and the
    other choices the same permutation moved on by offsets that are drawn per block: every choice is balanced, no token
    chooses an expert twice, and over many blocks each pair of experts meets equally often.

    Args:
        dim: width of a token (not read).
        num_experts: how many experts there are.
        seed: of the pattern.
    """

    def __init__(self, dim: int, num_experts: int, *, seed: int = 0) -> None:
        super().__init__(dim, num_experts)
        self._seed = seed
        self._choices: dict[tuple[int, int], Choice] = {}

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        even = x_TD.new_full((len(x_TD), self.num_experts), 1 / self.num_experts)
        return Scores(even, even, even, even)

    def choose(self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        key = (len(scores.logits), top_k)
        if key not in self._choices:
            self._choices[key] = balanced_choice(*key, self.num_experts, self._seed)
        return self._choices[key]

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        return torch.full_like(choice.expert, 1 / top_k, dtype=scores.gates.dtype)


def balanced_choice(num_tokens: int, top_k: int, num_experts: int, seed: int) -> Choice:
    """Return the copies of a number of tokens, token after token.

    Raises:
        InputError: if the tokens are no whole number of blocks of `num_experts`.
    """
    blocks, rest = divmod(num_tokens, num_experts)
    if rest:
        raise InputError(
            f"{num_tokens} tokens do not spread evenly over num_experts={num_experts}: give a multiple of it"
        )
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(blocks, num_experts, generator=generator).argsort(1)
    moved = torch.rand(blocks, num_experts - 1, generator=generator).argsort(1)[:, : top_k - 1] + 1
    offsets = torch.cat([torch.zeros(blocks, 1, dtype=torch.int64), moved], dim=1)
    expert = (first.unsqueeze(2) + offsets.unsqueeze(1)) % num_experts
    return Choice(
        token=torch.arange(num_tokens).repeat_interleave(top_k),
        expert=expert.reshape(-1),
        slot=torch.arange(top_k).repeat(num_tokens),
        per_token=top_k,
    )
