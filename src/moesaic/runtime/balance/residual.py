"""The residual of an MoE block when samples change home: with the experts' results, or on its own.

NetMoE (Liu et al., ICLR 2025, appendix A.1) lets every copy bring its token's residual along, so that results and residual
arrive as one: y_e = x + E(x). It says that this keeps the result and not when: weighted by the router, x comes back times the
sum of its copies' weights, which is 1 for some routers and no longer so once a copy is dropped. So each copy brings a share
of the residual besides its weight, one over its token's copies,

    sum_k (g_k E_k(norm(x)) + s_k x) = sum_k g_k E_k(norm(x)) + x        since the shares s of a token sum to one,

whatever the router and the capacity. A token without copies has nobody to ride on: its row alone goes from the old home to the
new one. With a norm in front, tokens travel as they are and the experts' rank applies the norm; that is linear in what comes
back, so the norm's gradient adds up over copies. Where anything stands between the layer and the sum, the residual goes alone
(`SampleMove.carry`): one more row per token that moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moesaic.comm.collectives import share
from moesaic.comm.transport import AbstractTransport
from moesaic.experts.experts import AbstractExperts, DeferredWgrad, ExpertCall, Weights, compute_dtype
from moesaic.plan import Plan


@dataclass(frozen=True)
class Residual:
    """What is added to an MoE layer's result, nothing in between: x + moe(norm(x))."""

    x: Tensor
    """Of the layer's input's shape."""
    norm: nn.Module | None = None
    """What made the layer's input of x, token by token, such as RMSNorm; None where that is x itself."""


def rides_along(residual: Residual | None, plan: Plan, weight_first: bool) -> bool:
    """Whether a residual may travel with the experts' results: weights multiply results and not inputs, and rows have 32 bits
    or more, which no codec or autocast rounds, since every layer would round the residual stream with them."""
    if residual is None or weight_first or not plan.is_lossless:
        return False
    dtype = residual.x.dtype
    return compute_dtype(dtype, residual.x.device) is dtype and dtype.itemsize >= 4


def with_shares(gates: Tensor, token: Tensor, num_tokens: int) -> Tensor:
    """Return each copy's routing weight and its share of its token's residual, (copies, 2).

    Args:
        gates: (copies,) routing weights.
        token: (copies,) int64, each copy's token.
        num_tokens: how many there are.
    """
    copies = torch.bincount(token, minlength=num_tokens)
    return torch.stack([gates, copies[token].to(gates.dtype).reciprocal()], dim=1)


class WithResidual(AbstractExperts):
    """Experts that take tokens before the norm, and add to each weighted result a share of its token.

    Their gates are (rows, 2): the routing weight, and the share of the residual that the row brings. The norm's parameters
    come as further columns of what the shards of an expert hold in common, the same for every expert.

    Args:
        inner: the experts.
        norm: in front of them; None for none.
    """

    def __init__(self, inner: AbstractExperts, norm: nn.Module | None) -> None:
        super().__init__(inner.dim, inner.num_experts)
        self.inner, self.norm = inner, norm
        self._shapes = {} if norm is None else {name: value.shape for name, value in norm.named_parameters()}
        self._columns = sum(shape.numel() for shape in self._shapes.values())

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.inner.names

    def compute(self, call: ExpertCall) -> Tensor:
        return self.inner.compute(self._inside(call)) + self._share(call.rows, call)

    def run(self, call: ExpertCall) -> tuple[Tensor, Weights]:
        with torch.no_grad():
            out, kept = self.inner.run(self._inside(call))
        return out + self._share(call.rows, call), kept

    def gradients(
        self, call: ExpertCall, kept: Weights, dy: Tensor, deferred_wgrad: DeferredWgrad | None = None
    ) -> tuple[Tensor, Tensor | None, Weights, Weights]:
        row = self._split(call.common)[1]
        leaves = [call.rows.detach().requires_grad_(), row.detach().requires_grad_()]
        with torch.enable_grad():
            seen = self._normed(*leaves)
        inside = self._inside(call, seen.detach())
        found = self.inner.gradients(inside, kept, dy, deferred_wgrad)
        assert found[1] is not None
        d_rows, d_row = torch.autograd.grad(seen, leaves, found[0], allow_unused=True, materialize_grads=True)
        d_rows = d_rows + self._share(dy, call)
        d_gates = torch.stack([found[1], torch.zeros_like(found[1])], dim=1)  # a share is a number, not a weight
        d_common: Weights = found[3]
        if self._columns:
            of_norm = torch.zeros_like(call.common[0][:, -self._columns :])
            of_norm[:1] = d_row
            d_common = (torch.cat([*d_common, of_norm], dim=1),)
        return d_rows, d_gates, found[2], d_common

    def init_normal(self, std: float, out_std: float) -> None:
        self.inner.init_normal(std, out_std)

    def pack(self, sharded: Weights) -> Tensor:
        return self.inner.pack(sharded)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        return self.inner.unpack(rows, num_experts)

    def num_units(self, sharded: Weights) -> int:
        return self.inner.num_units(sharded)

    def first(self, sharded: Weights, num_experts: int) -> Weights:
        return self.inner.first(sharded, num_experts)

    def joined(
        self, common: Weights, num_experts: int, shards: int, transport: AbstractTransport, group: tuple[int, ...]
    ) -> Weights:
        """Return what an expert's shards hold in common, with the norm's parameters beside it; differentiable.

        Every shard of an expert gets the whole gradient of those, and data-parallel ranks add up theirs, the shards' among
        them: each counts for its share. The ranks of a tensor group each apply the norm to rows of their own.

        Args:
            common: of the inner experts.
            num_experts: on this rank.
            shards: of an expert.
            transport: this rank's.
            group: its tensor group.
        """
        if self.norm is None or not self._columns:
            return common
        row = torch.cat([value.reshape(-1) for value in self.norm.parameters()])
        row = row if len(group) == 1 else share(transport, group, row)
        row = row if shards == 1 else row / shards + (row - row / shards).detach()
        return (torch.cat([*common, row.expand(num_experts, -1)], dim=1),)

    def _inside(self, call: ExpertCall, normed: Tensor | None = None) -> ExpertCall:
        """Return the call of the inner experts, whose rows are behind the norm."""
        own, row = self._split(call.common)
        rows = self._normed(call.rows, row) if normed is None else normed
        return replace(call, common=own, rows=rows, gates=_both(call)[:, 0].contiguous())

    def _split(self, common: Weights) -> tuple[Weights, Tensor]:
        """Return the inner experts' common parameters, and the norm's, (columns,)."""
        if not self._columns:
            return common, torch.empty(0)
        width = common[0].shape[1] - self._columns
        return ((common[0][:, :width],) if width else ()), common[0][0, width:]

    def _normed(self, rows: Tensor, row: Tensor) -> Tensor:
        if self.norm is None:
            return rows.view_as(rows)
        parts = row.split([shape.numel() for shape in self._shapes.values()]) if self._columns else ()
        given = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts)}
        out: Tensor = functional_call(self.norm, given, (rows,))
        return out

    @staticmethod
    def _share(rows: Tensor, call: ExpertCall) -> Tensor:
        """Return a shard's part of each row's share of its token; the shards' results are summed."""
        return rows * (_both(call)[:, 1:] / call.shards).to(rows.dtype)


def _both(call: ExpertCall) -> Tensor:
    """Return each row's routing weight and its share of the residual, (rows, 2)."""
    assert call.gates is not None, "a residual rides on copies that have weights"
    return call.gates
