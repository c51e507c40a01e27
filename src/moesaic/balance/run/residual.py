"""The residual of an MoE block when samples change home: it is sent with the experts' results, or
separately.

In NetMoE (Liu et al., ICLR 2025, appendix A.1) every copy carries its token's residual, so that
result and residual arrive as one row: y_e = x + E(x). The paper says that this keeps the result,
but not under which conditions. Weighted by the router, x returns multiplied by the sum of its
copies' weights. That sum is 1 for some routers, but not once a copy is dropped. So here each copy
carries, in addition to its weight, a share of the residual, one over the number of its token's
copies:

    sum_k (g_k E_k(norm(x)) + s_k x) = sum_k g_k E_k(norm(x)) + x   since shares add up to one,

for every router and capacity. The row of a token without copies is sent separately from the old
home to the new one. If there is a norm before the layer, tokens are sent without it, and the
expert's rank applies the norm. Gradients are linear, so the norm's gradient is the sum over copies.
If there is any other operation between the layer and the sum, the residual is sent separately
(`SampleMove.carry`), which costs one more row per token that moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moesaic.comm.collectives import share
from moesaic.comm.mesh import Mesh
from moesaic.experts.experts import (
    AbstractExperts,
    DeferredWgrad,
    ExpertCall,
    ExpertGradients,
    Runner,
    Weights,
    compute_dtype,
)
from moesaic.initial_values import Draw, draw_globally
from moesaic.program.plan import Plan


@dataclass(frozen=True)
class Residual:
    """A residual that is added directly to an MoE layer's result: x + moe(norm(x))."""

    x: Tensor
    """The residual, of the shape of the layer's input."""
    norm: nn.Module | None = None
    """The norm that computed the layer's input from x, token by token, such as RMSNorm; None if the
    input is x."""


def rides_along(residual: Residual | None, plan: Plan, weight_first: bool) -> bool:
    """Return whether a residual may be sent with the experts' results.

    Routing weights must multiply results, not inputs. Rows must have 32 bits or more, unchanged by
    codecs or autocast, since otherwise every layer would round the residual stream.
    """
    if residual is None or weight_first or not plan.is_lossless:
        return False
    dtype = residual.x.dtype
    return compute_dtype(dtype, residual.x.device) is dtype and dtype.itemsize >= 4


class WithResidual(AbstractExperts):
    """Experts that apply the norm to tokens themselves, and add a share of the token to each
    weighted result.

    Their gates are (rows, 2): the routing weight, and the row's share of the residual. The norm's
    parameters are appended as columns to the parameters that an expert's shards have in common, the
    same for every expert.

    Args:
        norm: the norm before them; None for none.
        num_copies: (rows,) int64, number of copies of each row's token.
        mesh: the mesh of the layer.
    """

    def __init__(
        self, inner: AbstractExperts, norm: nn.Module | None, num_copies: Tensor, mesh: Mesh
    ) -> None:
        super().__init__(inner.dim, inner.num_experts)
        self.inner = inner
        self.norm = norm
        self._num_copies = num_copies
        self._mesh = mesh
        self._shapes: dict[str, torch.Size] = {}
        """The shapes of the norm's parameters, by name."""
        if norm is not None:
            self._shapes = {name: value.shape for name, value in norm.named_parameters()}
        self._columns = sum(shape.numel() for shape in self._shapes.values())
        """Number of the columns that the norm's parameters take."""

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        sharded, common = self.inner.names
        return sharded, (*common, *(f"norm.{name}" for name in self._shapes))

    def forward(
        self,
        rows: Tensor,
        weight: Tensor | None,
        ends: Tensor | None = None,
        run: Runner | None = None,
    ) -> Tensor:
        """Run the experts with their own weights; `weight`, (rows, 1), and `run` are needed."""
        assert run is not None
        assert weight is not None, "a residual rides on copies that have weights"
        shares = self._num_copies.unsqueeze(1).to(weight.dtype).reciprocal()
        gates_and_shares = torch.cat([weight, shares], dim=1)

        def run_joined(
            x: Tensor, gates: Tensor | None, sharded: Weights, common: Weights
        ) -> Tensor:
            """Run with the norm's parameters beside those of the experts."""
            return run(x, gates, sharded, self._joined(common))

        y: Tensor = self.inner(rows, gates_and_shares, run=run_joined)
        return y

    def compute(self, call: ExpertCall) -> Tensor:
        return self.inner.compute(self._inner_call(call)) + self._share(call.rows, call)

    def run(self, call: ExpertCall) -> tuple[Tensor, Weights]:
        with torch.no_grad():
            out, kept = self.inner.run(self._inner_call(call))
        return out + self._share(call.rows, call), kept

    def gradients(
        self,
        call: ExpertCall,
        kept: Weights,
        dy: Tensor,
        deferred_wgrad: DeferredWgrad | None = None,
    ) -> ExpertGradients:
        """Return the gradients through the inner experts, then through the norm and the
        residual."""
        _, norm_row = self._split(call.common)
        rows = call.rows.detach().requires_grad_()
        norm_row = norm_row.detach().requires_grad_()
        with torch.enable_grad():
            normed = self._normed(rows, norm_row)

        inner_call = self._inner_call(call, normed.detach())
        inner = self.inner.gradients(inner_call, kept, dy, deferred_wgrad)
        assert inner.gates is not None
        d_rows, d_norm_row = torch.autograd.grad(
            normed, [rows, norm_row], inner.rows, allow_unused=True, materialize_grads=True
        )
        d_rows = d_rows + self._share(dy, call)
        # Shares are constants without a gradient.
        d_gates = torch.stack([inner.gates, torch.zeros_like(inner.gates)], dim=1)
        d_common = inner.common
        if self._columns:
            # (experts, columns): the call reads the first expert's, so the others' are zero
            d_norm = torch.zeros_like(call.common[0][:, -self._columns :])
            d_norm[:1] = d_norm_row
            d_common = (torch.cat([*d_common, d_norm], dim=1),)
        return ExpertGradients(d_rows, gates=d_gates, sharded=inner.sharded, common=d_common)

    def init_normal(self, std: float, out_std: float, draw: Draw = draw_globally) -> None:
        self.inner.init_normal(std, out_std, draw)

    def pack(self, sharded: Weights) -> Tensor:
        return self.inner.pack(sharded)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        return self.inner.unpack(rows, num_experts)

    def num_units(self, sharded: Weights) -> int:
        return self.inner.num_units(sharded)

    def first(self, sharded: Weights, num_experts: int) -> Weights:
        return self.inner.first(sharded, num_experts)

    def _joined(self, common: Weights) -> Weights:
        """Return the parameters that an expert's shards have in common, with the norm's parameters
        appended; differentiable.

        Every shard of an expert computes the whole gradient of the norm, and all of these gradients
        are summed over data-parallel ranks. So each is divided by the number of shards. Each rank
        of a tensor-parallel group applies the norm to its own rows.
        """
        if self.norm is None or not self._columns:
            return common
        grid = self._mesh.grid
        rank = self._mesh.rank
        norm_row = torch.cat([value.reshape(-1) for value in self.norm.parameters()])
        if grid.tp > 1:
            norm_row = share(self._mesh.transport, grid.group(rank, ("tp",)), norm_row)
        if grid.etp > 1:  # the same value, with a gradient divided by etp
            norm_row = norm_row / grid.etp + (norm_row - norm_row / grid.etp).detach()
        norm_columns = norm_row.expand(self.num_experts // grid.ep, -1)
        return (torch.cat([*common, norm_columns], dim=1),)

    def _inner_call(self, call: ExpertCall, normed: Tensor | None = None) -> ExpertCall:
        """Return the call of the inner experts, with rows after the norm."""
        inner_common, norm_row = self._split(call.common)
        rows = self._normed(call.rows, norm_row) if normed is None else normed
        gates = _gates_and_shares(call)[:, 0].contiguous()
        return replace(call, common=inner_common, rows=rows, gates=gates)

    def _split(self, common: Weights) -> tuple[Weights, Tensor]:
        """Return the inner experts' common parameters, and the norm's parameters, (columns,)."""
        if not self._columns:
            return common, torch.empty(0)
        (joined,) = common  # (experts, width + columns)
        width = joined.shape[1] - self._columns
        inner_common = (joined[:, :width],) if width else ()
        norm_row = joined[0, width:]
        return inner_common, norm_row

    def _normed(self, rows: Tensor, norm_row: Tensor) -> Tensor:
        """Return the norm of rows, with its parameters from `norm_row`; the rows themselves without
        a norm."""
        if self.norm is None:
            return rows.view_as(rows)  # a result of its own, of which `gradients` can ask
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = norm_row.split(sizes) if self._columns else ()
        parameters = {
            name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts)
        }
        out: Tensor = functional_call(self.norm, parameters, (rows,))
        return out

    @staticmethod
    def _share(rows: Tensor, call: ExpertCall) -> Tensor:
        """Return each row times its residual share, divided by the number of shards, since their
        results are summed."""
        return rows * (_gates_and_shares(call)[:, 1:] / call.shards).to(rows.dtype)


def _gates_and_shares(call: ExpertCall) -> Tensor:
    """Return each row's routing weight and its share of the residual, (rows, 2)."""
    assert call.gates is not None, "a residual rides on copies that have weights"
    return call.gates
