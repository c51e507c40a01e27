"""What stands in for parts of a layer while others are measured: experts that compute nothing, and a router of forced balance.

With such experts, figures are of everything that is not a product of matrices; under such a router plans differ and loads do
not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.experts import AbstractExperts, PlainExperts
from moesaic.experts.experts import DeferredWgrad, Weights
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Choice, Scores


def _ignore(flops: float) -> None:
    """Hear of operations and do nothing."""


@final
class IdleExperts(AbstractExperts):
    """Experts of two matrices with real parameters, which really travel where a plan gathers them, and no products.

    A result is the rows themselves; gradients of rows are those of the result, all others are zero.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        num_experts: how many experts there are.
        told: called with the floating-point operations of every forward and backward pass that is not computed: 2 per row
            and matrix element forward, 4 backward.
    """

    def __init__(self, dim: int, hidden: int, num_experts: int, *, told: Callable[[float], object] = _ignore) -> None:
        super().__init__(dim, num_experts)
        self.w1 = nn.Parameter(torch.zeros(num_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.zeros(num_experts, dim, hidden))
        self._told = told
        with torch.device("meta"):
            self._like = (PlainExperts(dim, hidden, num_experts),)  # in a tuple: it is no part of this module

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._like[0].names

    def shard_dim(self, name: str) -> int | None:
        return self._like[0].shard_dim(name)

    def init_normal(self, std: float, out_std: float) -> None:
        """Leave the weights as they are: nobody multiplies by them."""

    def num_units(self, sharded: Weights) -> int:
        return self._like[0].num_units(sharded)

    def pack(self, sharded: Weights) -> Tensor:
        return self._like[0].pack(sharded)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        return self._like[0].unpack(rows, num_experts)

    def compute(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int = 1
    ) -> Tensor:
        self._told(2 * self._products(sharded, rows))
        return rows

    def run(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int = 1
    ) -> tuple[Tensor, Weights]:
        """Return the rows as they are; nothing is kept."""
        return self.compute(sharded, common, rows, gates, ends, shards), ()

    def gradients(
        self,
        sharded: Weights,
        common: Weights,
        rows: Tensor,
        gates: Tensor | None,
        ends: Tensor,
        kept: Weights,
        dy: Tensor,
        shards: int = 1,
        deferred_wgrad: DeferredWgrad | None = None,
    ) -> tuple[Tensor, Tensor | None, Weights, Weights]:
        """Return the gradients as they are; a backward pass has twice the operations of a forward one."""
        self._told(4 * self._products(sharded, rows))
        d_gates = None if gates is None else torch.zeros_like(gates)
        return dy, d_gates, tuple(map(torch.zeros_like, sharded)), ()

    def _products(self, sharded: Weights, rows: Tensor) -> float:
        """Return the multiplications of all rows: by every matrix of an expert, or of the shard of one."""
        return len(rows) * sum(matrix[0].numel() for matrix in sharded)


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


@functools.lru_cache
def visits(num_tokens: int, top_k: int, num_experts: int, seed: int, chunks: int = 1) -> tuple[tuple[int, float], ...]:
    """Return on how many places a token of the pattern has an expert, for every number of places, as `Workload.visits`.

    Args:
        num_tokens: as of `balanced_choice`, and so are `top_k`, `num_experts` and `seed`.
        top_k: choices of a token.
        num_experts: how many experts there are.
        seed: of the pattern.
        chunks: into so many parts each expert's copies are cut; a token counts once per part.
    """
    expert = balanced_choice(num_tokens, top_k, num_experts, seed).expert.view(num_tokens, top_k)
    place = torch.zeros(num_tokens, num_experts, dtype=torch.int64).scatter_(1, expert, 1)
    part = ((place.cumsum(0).gather(1, expert) - 1) * chunks) // (num_tokens * top_k // num_experts)
    found = []
    for places in (each for each in range(1, num_experts + 1) if num_experts % each == 0):
        there = torch.zeros(num_tokens, places * chunks)
        there.scatter_(1, expert // (num_experts // places) * chunks + part, 1.0)
        found.append((places, float(there.sum(1).mean())))
    return tuple(found)


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
