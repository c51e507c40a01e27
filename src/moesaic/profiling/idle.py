"""Experts that compute nothing, for figures of everything that is not a product of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from moesaic.experts import AbstractExperts, PlainExperts
from moesaic.experts.experts import DeferredWgrad, Weights


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
